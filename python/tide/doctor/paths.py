"""Which path tide would take on this machine, and for each better one why not and what to change.

Pure: a function of the facts, so that any machine can be asked about in a test. A ladder lists the
paths for one kind of traffic, the best first; tide takes the first rung without an obstacle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]

MULTICAST_SWITCHES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TIDE_MULTICAST": "0",
}
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Obstacle:
    why: str
    change: str


@dataclass(frozen=True)
class Rung:
    path: str
    obstacles: tuple[Obstacle, ...]


@dataclass(frozen=True)
class Ladder:
    traffic: str
    rungs: tuple[Rung, ...]

    @property
    def taken(self) -> Rung | None:
        """The path that tide takes; None: none is open."""
        return next((rung for rung in self.rungs if not rung.obstacles), None)

    @property
    def better(self) -> list[Rung]:
        """The closed rungs above the one that is taken."""
        taken = self.taken
        return list(self.rungs[: self.rungs.index(taken)] if taken else self.rungs)


@dataclass(frozen=True)
class Build:
    """What this build of tide can do: the devices that it serves, those whose memory it moves
    between hosts, and whether one copy of its engine reaches all peers."""

    devices: Sequence[str]
    hosts: Sequence[str]
    multicast: bool


def ladders(facts: Facts, build: Build, hosts: int = 1) -> list[Ladder]:
    """hosts: of the launch."""
    result = [cpu_inside(facts, build.devices)]
    if facts["gpus"]["devices"]:
        result.append(gpu_inside(facts, build))
    launch = "" if hosts > 1 else " (this launch has one)"
    result.append(cpu_between(facts, build.hosts, launch))
    if facts["gpus"]["devices"]:
        result.append(gpu_between(facts, build.hosts, launch))
    return result


def found(*checks: tuple[bool, str, str]) -> tuple[Obstacle, ...]:
    """Obstacles for the checks (open, why not, what to change) that are not open."""
    return tuple(Obstacle(why, change) for is_open, why, change in checks if not is_open)


def tide_checks(facts: Facts) -> tuple[tuple[bool, str, str], ...]:
    """What every path of tide needs."""
    extension = facts["versions"]["tide extension"]
    return (
        (
            extension.startswith("built for"),
            extension,
            "rebuild tide in this environment: pip install .",
        ),
        (
            facts["knobs"].get("TIDE_FSDP") != "0",
            "TIDE_FSDP=0 leaves FSDP2 as it is",
            "unset TIDE_FSDP",
        ),
    )


def cpu_inside(facts: Facts, served: Sequence[str]) -> Ladder:
    host = facts["host"]
    files = host["open files"]
    checks = (
        *tide_checks(facts),
        ("cpu" in served, "this build does not serve CPU tensors", "build tide from its sources"),
        (
            bool(host["shared memory by descriptor"]),
            "this system has no memfd_create",
            "use Linux 3.17 or newer",
        ),
        (
            files == "unlimited" or files >= 256,
            f"only {files} open files are allowed, each rank holds one per peer and window",
            "raise the limit: ulimit -n 4096",
        ),
    )
    return Ladder(
        "CPU tensors between ranks of one host",
        (
            Rung("tide: pushes through shared memory, sums in fp32", found(*checks)),
            Rung("stock: gloo, layout copies by FSDP2", ()),
        ),
    )


def gpu_inside(facts: Facts, build: Build) -> Ladder:
    gpus, versions, environment = facts["gpus"], facts["versions"], facts["environment"]
    devices = gpus["devices"]
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    driver = versions["cuda driver"] or "0"
    every: Callable[[str], bool] = lambda name: all(d.get(name) for d in devices)  # noqa: E731
    base = (
        *tide_checks(facts),
        (
            "cuda" in build.devices,
            f"this build of tide serves {', '.join(build.devices)} tensors only",
            "install a tide that serves CUDA tensors",
        ),
        (
            int(driver.split(".")[0]) >= 13,
            f"the driver is for CUDA {driver}, tide needs 13 or newer",
            "update the NVIDIA driver",
        ),
        (
            every("handles by descriptor") and every("virtual memory"),
            "a GPU cannot share memory by descriptor",
            "use GPUs with virtual memory management (not MIG slices or vGPU)",
        ),
        (
            not connections.isdigit() or int(connections) >= 8,
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: one waiting stream would stop all others",
            "unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more",
        ),
    )
    reachable = all(all(row) for row in gpus["peer access"])
    peers = (
        (
            reachable,
            "GPUs of this machine cannot write each other's memory",
            "run ranks on GPUs joined by NVLink or one PCIe root; check `nvidia-smi topo -p2p w`",
        ),
    )
    links = gpus["nvlinks"]
    nvlink = ((bool(links) and min(links) > 0, "no active NVLink", "nothing: a matter of boards"),)
    alone = len(devices) < 2
    one = ((not alone, "one GPU is visible: there is no peer to push to", "make more visible"),)
    return Ladder(
        "CUDA tensors between ranks of one host",
        (
            Rung(
                "tide: copy engines, one multicast copy to all peers",
                found(*base, *one, *peers, *nvlink, *multicast(facts, build)),
            ),
            Rung(
                "tide: copy engines, one copy to each peer over NVLink",
                found(*base, *one, *peers, *nvlink),
            ),
            Rung("tide: copy engines, one copy to each peer over PCIe", found(*base, *one, *peers)),
            Rung("stock: NCCL, layout copies by FSDP2", ()),
        ),
    )


def multicast(facts: Facts, build: Build) -> list[tuple[bool, str, str]]:
    devices = facts["gpus"]["devices"]
    said = {**facts["environment"], **facts["knobs"]}
    off = [name for name, value in MULTICAST_SWITCHES.items() if said.get(name) == value]
    capable = all(device.get("multicast") for device in devices)
    return [
        (
            len(devices) >= 3,
            "fewer than 3 GPUs: one push reaches the only peer",
            "nothing: there is nothing to save",
        ),
        (
            build.multicast,
            "this build of tide copies to each peer in turn",
            "install a tide that copies by multicast",
        ),
        (
            capable,
            "a GPU has no multicast: no NVSwitch, or the fabric manager does not run",
            "on a machine with NVSwitch: systemctl start nvidia-fabricmanager",
        ),
        (not off, f"{', '.join(off)} forbids multicast", f"unset {', '.join(off)}"),
    ]


STOCK_BETWEEN = Rung("stock: NCCL or gloo, layout copies by FSDP2", ())


def cpu_between(facts: Facts, served: Sequence[str], launch: str) -> Ladder:
    base = ucx_checks(facts, "cpu" in served, "CPU")
    return Ladder(
        f"CPU tensors between hosts{launch}",
        (
            Rung("tide: puts over RDMA rails", found(*base, *rdma_checks(facts))),
            Rung("tide: puts over UCX on TCP", found(*base)),
            STOCK_BETWEEN,
        ),
    )


def gpu_between(facts: Facts, served: Sequence[str], launch: str) -> Ladder:
    base = ucx_checks(facts, "cuda" in served, "CUDA")
    rdma = rdma_checks(facts)
    direct = (
        facts["network"]["nvidia_peermem"]
        or all(d.get("dma-buf") for d in facts["gpus"]["devices"]),
        "adapters cannot reach GPU memory: neither dma-buf nor nvidia_peermem",
        "modprobe nvidia_peermem, or a driver with dma-buf (open kernel modules)",
    )
    return Ladder(
        f"CUDA tensors between hosts{launch}",
        (
            Rung("tide: puts from GPU memory over RDMA rails", found(*base, *rdma, direct)),
            Rung("tide: puts over RDMA rails, staged through host memory", found(*base, *rdma)),
            Rung("tide: puts over UCX on TCP, staged", found(*base)),
            STOCK_BETWEEN,
        ),
    )


def ucx_checks(facts: Facts, is_served: bool, tensors: str) -> tuple[tuple[bool, str, str], ...]:
    return (
        *tide_checks(facts),
        (
            is_served,
            f"this build of tide moves no {tensors} tensors between hosts",
            f"install a tide that moves {tensors} tensors between hosts",
        ),
        (
            bool(facts["versions"]["ucx"]),
            "UCX was not found",
            "pip install libucx-cu13, or install UCX 1.21",
        ),
    )


def rdma_checks(facts: Facts) -> tuple[tuple[bool, str, str], ...]:
    ports, memlock = facts["network"]["rdma ports"], facts["host"]["memlock"]
    active = [port for port in ports if port["state"] == "ACTIVE"]
    states = ", ".join(f"{port['device']} is {port['state']}" for port in ports)
    return (
        (
            bool(active),
            f"no active RDMA port ({states})" if ports else "no RDMA device on this machine",
            "bring a port up (ibstat)" if ports else "needs InfiniBand or RoCE adapters",
        ),
        (
            memlock == "unlimited" or memlock >= 1024 * MEBIBYTE,
            f"only {memlock} bytes may be locked, RDMA memory must be",
            "ulimit -l unlimited (containers: --ulimit memlock=-1)",
        ),
    )
