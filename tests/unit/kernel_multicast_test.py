"""The sum by the switch is in the code for GPUs that have it, and in no other."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc", path=None) or shutil.which("nvcc", path="/usr/local/cuda/bin")


@pytest.mark.skipif(NVCC is None, reason="no nvcc: this build has no CUDA kernels")
@pytest.mark.parametrize(("architecture", "has_it"), [(80, False), (90, True), (100, True)])
def test_multimem_by_architecture(architecture: int, has_it: bool, tmp_path: Path) -> None:
    assert NVCC is not None
    base = [NVCC, "-std=c++20", "-fmad=false", "-O3", f"-I{ROOT}", str(ROOT / "kernels/combine.cu")]
    ptx = tmp_path / "combine.ptx"
    subprocess.run([*base, "-ptx", f"-arch=compute_{architecture}", "-o", str(ptx)], check=True)
    text = ptx.read_text()
    assert ".entry multicast_combine" in text
    assert ("multimem.ld_reduce" in text) == has_it
    cubin = tmp_path / "combine.cubin"  # assembled, too
    subprocess.run([*base, "-cubin", f"-arch=sm_{architecture}", "-o", str(cubin)], check=True)
    assert cubin.stat().st_size > 0
