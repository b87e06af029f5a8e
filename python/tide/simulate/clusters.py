"""Clusters: GPUs, what joins them, and how both are written down (built-in, or a YAML file).

Every rate that is not given follows from the constants of the cost model (`tide simulate
--constants`), scaled by memory bandwidth and product rate where the GPU is another one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tide.look import BadInput
from tide.simulate.native import native

LARGEST = 16384


def constants() -> dict[str, float]:
    return {name: value for name, value, _, _ in native().cost_constants()}


@dataclass(frozen=True)
class Cluster:
    """One kind of node, as many of them as a launch asks for. Rates in bytes/s, times in s."""

    name: str
    gpu: str = "H200"
    gpus_per_node: int = 8
    sms: int = 132
    hbm: float = 4.8e12
    flops: float = 989.4e12  # bf16, data sheet
    multicast: bool = True
    link: float = 0.0  # one way, a GPU; 0: as measured
    rail: float = 0.0  # one way, a GPU; 0: 400 Gbit/s
    rail_latency: float = 0.0  # one way; 0: the model's
    free_ctas: int = 16  # kernel CTAs with room beside products; 0: products fill every SM
    overrides: dict[str, float] = field(default_factory=dict)  # of the fabric, by their C++ names
    note: str = ""

    def numbers(self) -> dict[str, float]:
        """What the C++ simulator is given."""
        known = constants()
        memory = self.hbm / known["measured_hbm"]
        result = {
            "push_rate": self.link or known["push_rate"],
            "sum_rate_per_cta": known["sum_rate_per_cta"],
            "sum_rate_limit": known["sum_rate_limit"] * memory,
            "sms": float(self.sms),
            "multicast": float(self.multicast),
            "free_sms": float(self.free_ctas),
            "rail_rate": self.rail or known["nic_rate"],
            "rail_latency_s": self.rail_latency or known["nic_latency"],
        }
        return {**result, **self.overrides}


NAMED = (
    Cluster("dgx-h200", note="8 a node, NVSwitch, one 400G adapter a GPU"),
    Cluster("dgx-h100", gpu="H100", hbm=3.35e12, note="8 a node, NVSwitch, one 400G adapter a GPU"),
    Cluster(
        "gb200",
        gpu="GB200-like",
        gpus_per_node=64,
        sms=148,
        hbm=8.0e12,
        flops=2500e12,
        link=2 * 392e9,
        note="64 a node, links twice as fast, one 400G adapter a GPU; nothing measured",
    ),
    Cluster("one-gpu", gpus_per_node=1, multicast=False, note="nodes of one, one 400G adapter"),
    Cluster("no-multicast", multicast=False, note="8 a node, pushes to each peer by itself"),
    Cluster(
        "emulated",
        gpu="CPU",
        gpus_per_node=2,
        sms=1,
        hbm=20e9,
        flops=50e9,
        multicast=False,
        link=4e9,
        rail=50e6,
        rail_latency=60e-6,
        free_ctas=1,
        overrides={
            "push_start_s": 5e-6,
            "batch_start_s": 5e-6,
            "signal_s": 30e-6,
            "credit_s": 30e-6,
            "kernel_start_s": 5e-6,
            "sum_rate_per_cta": 4e9,
            "copy_rate_per_cta": 4e9,
            "kernel_ctas": 1,
            "combine_ctas": 1,
        },
        note="namespaces on one host, 400 Mbit/s a rail; assumed rates, give your own",
    ),
)
BUILT_IN = {cluster.name: cluster for cluster in NAMED}


def find(name: str) -> Cluster:
    """A built-in cluster, or the one that a YAML file describes."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise BadInput(
            f"there is no cluster '{name}'; built in are {', '.join(BUILT_IN)}, or give a file "
            "that ends in .yaml"
        )
    return from_yaml(path)


def from_yaml(path: Path) -> Cluster:
    """Keys are the fields of Cluster; `base` names a built-in cluster that the others change."""
    import yaml

    try:
        read: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(read, dict):
        raise BadInput(f"{path}: a cluster is a mapping of names to values")
    base_name = read.pop("base", "dgx-h200")
    if base_name not in BUILT_IN:
        raise BadInput(f"{path}: base is one of {', '.join(BUILT_IN)}, got '{base_name}'")
    base = BUILT_IN[base_name]
    read.setdefault("name", path.stem)
    given = {key: checked(path, base, key, value) for key, value in read.items()}
    return check_overrides(path, replace(base, **given))


def checked(path: Path, base: Cluster, key: str, value: Any) -> Any:
    known = {one.name for one in fields(Cluster)}
    if key not in known:
        raise BadInput(f"{path}: there is no '{key}'; a cluster has {', '.join(sorted(known))}")
    kind = type(getattr(base, key))
    if kind is float:
        value = number(path, key, value)
    if kind is dict and isinstance(value, dict):
        return {str(one): number(path, f"overrides.{one}", read) for one, read in value.items()}
    if type(value) is not kind:
        raise BadInput(f"{path}: {key} is a {kind.__name__}, got {value!r}")
    least = 1 if key in ("gpus_per_node", "sms", "hbm", "flops") else 0
    if kind in (int, float) and not least <= value < 1e30:
        raise BadInput(f"{path}: {key} is at least {least}, got {value}")
    return value


def number(path: Path, key: str, value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML reads 4e9 as text
    raise BadInput(f"{path}: {key} is a number, got {value!r}")


def check_overrides(path: Path, cluster: Cluster) -> Cluster:
    for key, value in cluster.overrides.items():
        if not 0 < value < 1e30:
            raise BadInput(f"{path}: overrides.{key} is above 0, got {value}")
    _C = native()
    try:
        _C.choose_schedule(cluster.numbers(), 2, 1, _C.Pacing.off, 1)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from None
    return cluster


def nodes_of(cluster: Cluster, gpus: int) -> tuple[int, int]:
    """(nodes, GPUs of each) that hold so many GPUs; BadInput where nodes would not be full."""
    if not 2 <= gpus <= LARGEST:
        raise BadInput(f"--gpus is from 2 to {LARGEST}, got {gpus}")
    if gpus <= cluster.gpus_per_node:
        return 1, gpus
    if gpus % cluster.gpus_per_node:
        raise BadInput(
            f"{gpus} GPUs do not fill nodes of {cluster.gpus_per_node}: give a multiple of it"
        )
    return gpus // cluster.gpus_per_node, cluster.gpus_per_node
