"""rocm-systems 10944.

fp8 numbers were summed in the wrong type. Right: tide sums no fp8; the call is an error that names
the dtype, on every rank, outputs stay as they were, and the group still works.
"""

from __future__ import annotations

import pytest
import tide
import torch
from harness import all_gather_list, reduce_scatter_list, run_ranks

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_not_summed(dtype: torch.dtype) -> None:
    def body(rank: int, size: int) -> None:
        whole = torch.ones(4 * size).to(dtype)
        shards = [torch.full((4,), 7.0).to(dtype)]
        with pytest.raises(RuntimeError, match=r"(?i)float8|unsupported|scalar type"):
            reduce_scatter_list(shards, [whole]).wait()
        reason = tide.of().why_delegated()["reduce_scatter_tensor_coalesced"]
        assert "does not sum dtype" in reason
        flat = torch.full((4,), 7.0)
        layout = tide.GroupLayout.of([whole.shape], [0])
        with pytest.raises(RuntimeError, match=r"(?i)float8"):
            layout.reduce_scatter(flat, [whole])
        assert flat.tolist() == [7.0] * 4 and shards[0].float().tolist() == [7.0] * 4
        # Gathers move bytes, so fp8 is fine there.
        gathered = [torch.zeros(4 * size).to(dtype)]
        all_gather_list(gathered, [torch.full((4,), float(rank)).to(dtype)]).wait()
        assert gathered[0].float().tolist() == [float(r) for r in range(size) for _ in range(4)]

    run_ranks(2, body)
