"""What every measurement with ranks on one GPU sets before it starts."""

from __future__ import annotations

SAFE = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TIDE_INNER_CUDA": "gloo",
}
