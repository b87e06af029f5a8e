"""What one process can find out about its machine: plain values, no opinion.

Nothing here makes a CUDA context, opens a device for writing or waits for a peer. A fact that
cannot be found out is None, or a sentence that says why.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tide.doctor import libraries

Facts = dict[str, Any]

HEEDED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
    "TORCH_DISTRIBUTED_DEBUG",
    "OMP_NUM_THREADS",
    "UCX_NET_DEVICES",
    "UCX_TLS",
)
"""Variables of others that change what tide may do; shown where they are set."""


def collect() -> Facts:
    """All facts of this process, by section."""
    import torch

    return {
        "versions": versions(torch),
        "host": host(),
        "gpus": gpus(torch),
        "network": network(),
        "environment": {name: os.environ[name] for name in HEEDED if name in os.environ},
        "launch": launch(),
    }


def versions(torch: Any) -> Facts:
    from tide import _registration

    try:
        _registration._check_torch_version()
        from tide import _C

        extension = f"built for torch {_C.TORCH_VERSION}"
    except ImportError as error:
        extension = f"unusable: {error}"
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tide": package("tide"),
        "tide extension": extension,
        "cuda of torch": torch.version.cuda,
        "cuda driver": libraries.driver_version(),
        "nccl": nccl,
        "ucx": libraries.ucx_version(),
        "kernel": platform.release(),
    }


def package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def host() -> Facts:
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    memlock, files = (
        resource.getrlimit(kind) for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    return {
        "name": platform.node(),
        "boot": first_line("/proc/sys/kernel/random/boot_id"),
        "cores": len(os.sched_getaffinity(0)),
        "memory bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory limit bytes": memory_limit(),
        "shm bytes": shared.total if shared else None,
        "shm free bytes": shared.free if shared else None,
        "memlock": limit(memlock[0]),
        "open files": limit(files[0]),
        "open files, hard": limit(files[1]),
        "shared memory by descriptor": hasattr(os, "memfd_create"),
        "ptrace scope": first_line("/proc/sys/kernel/yama/ptrace_scope"),
    }


def limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().split("\n", 1)[0].strip()
    except OSError:
        return None


def memory_limit() -> int | None:
    """Of this process's control group; None without one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = first_line(path)
        if text and text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def gpus(torch: Any) -> Facts:
    found = libraries.driver_devices()
    if isinstance(found, str):
        return {"none": found, "devices": []}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    peers = [
        [int(i == j or torch.cuda.can_device_access_peer(i, j)) for j in range(count)]
        for i in range(count)
    ]
    return {
        "devices": found,
        "peer access": peers,
        "nvlinks": libraries.active_nvlinks(len(found)),
        "imex channels": len(list(Path("/dev/nvidia-caps-imex-channels").glob("channel*"))),
        "fabric manager": Path("/run/nvidia-fabricmanager").exists()
        or Path("/var/run/nvidia-fabricmanager").exists(),
    }


def network() -> Facts:
    rails = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        for port in sorted((device / "ports").glob("*")):
            rails.append(
                {
                    "device": f"{device.name}:{port.name}",
                    "state": (first_line(str(port / "state")) or "?").split(": ")[-1],
                    "rate": first_line(str(port / "rate")),
                    "kind": first_line(str(port / "link_layer")),
                    "numa node": first_line(str(device / "device" / "numa_node")),
                }
            )
    interfaces = [
        {"name": path.name, "mbit/s": speed(path)}
        for path in sorted(Path("/sys/class/net").glob("*"))
        if path.name != "lo" and first_line(str(path / "operstate")) != "down"
    ]
    modules = first_lines("/proc/modules")
    return {
        "rdma ports": rails,
        "interfaces": interfaces,
        "nvidia_peermem": any(line.startswith("nvidia_peermem ") for line in modules),
    }


def speed(interface: Path) -> int | None:
    text = first_line(str(interface / "speed"))
    return int(text) if text and text.isdigit() else None


def first_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def launch() -> Facts:
    """What torchrun said; empty outside it."""
    names = {
        "rank": "RANK",
        "ranks": "WORLD_SIZE",
        "local rank": "LOCAL_RANK",
        "local ranks": "LOCAL_WORLD_SIZE",
        "host": "GROUP_RANK",
        "hosts": "GROUP_WORLD_SIZE",
    }
    return {
        what: int(os.environ[name])
        for what, name in names.items()
        if os.environ.get(name, "").isdigit()
    }
