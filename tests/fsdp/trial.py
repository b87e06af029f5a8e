"""Trains one configuration of FSDP2 on several engines in one set of ranks, and compares what comes
out.

Engines: "stock" (gloo), "double" (the stand-in in double.py: fp32 sums in rank order), "tide"; each
of the last two may carry options of tide.Options after a colon: "tide:fsdp=gather",
"double:memory_mode=slot_reuse".

What must hold, of gradients of the first step and of the losses:
  tide equals double bit for bit (a fixed-order fp32 reference); gathers alone (fsdp=gather) equal
  stock bit for bit; tide stays within twice the distance of stock from stock whose initial weights
  were moved by one ulp.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import double
import models
import pytest
import tide
import torch
import torch.distributed as dist
from harness import run_ranks
from tide.fsdp.plan import groups_of
from tide.fsdp.report import Report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# "cuda": all ranks on one GPU, with gloo for stock. The test process itself never touches it.
DEVICE = os.environ.get("TIDE_TEST_DEVICE", "cpu")


class Setting:
    """One engine during one training: makes meshes on it. `over_tide`: stock FSDP2's groups are
    tide's, which delegates every call, where Gloo's own calls end the process."""

    def __init__(self, engine: str, over_tide: bool = False) -> None:
        self.engine, _, words = engine.partition(":")
        self.over_tide = over_tide
        self.options = dict(word.split("=") for word in words.split(",") if word)
        self.groups: list[dist.ProcessGroup] = []

    def mesh(self, *sizes: int, names: tuple[str, ...] = ("shard",)) -> DeviceMesh:
        """Sizes default to one dimension over all ranks."""
        shape = sizes or (dist.get_world_size(),)
        mesh = init_device_mesh(
            DEVICE,
            shape,
            mesh_dim_names=names,
            backend_override=dict.fromkeys(names, self._backend()),
        )
        self.groups += [group for group in mesh.get_all_groups() if group is not dist.group.WORLD]
        return mesh

    def group(self) -> dist.ProcessGroup:
        """A further group over all ranks."""
        name, options = self._backend()
        group = dist.new_group(backend=name, pg_options=options)
        self.groups.append(group)
        return group

    def close(self) -> None:
        """Ends the groups made here, for ranks that try many cases."""
        for group in self.groups:
            dist.destroy_process_group(group)
        self.groups.clear()

    def _backend(self) -> Any:
        if self.engine != "tide" and self.over_tide:
            return ("tide", tide.Options(inner_cuda="gloo", fsdp="0"))
        if self.engine != "tide":
            return ("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:gloo", None)
        values = {
            k: int(v) if v.isdecimal() and k != "fsdp" else v for k, v in self.options.items()
        }
        return ("tide", tide.Options(inner_cuda="gloo", **values))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if self.engine != "double":
            yield
            return
        with double.standing_in(**self.options):
            yield


@dataclass
class Case:
    """One configuration. `shard` applies fully_shard; `step` runs one training step and returns its
    loss."""

    build: Callable[[], nn.Module]
    shard: Callable[[nn.Module, Setting], None]
    steps: int = 3
    ranks: int = 4
    step: Callable[[Trainer, int], torch.Tensor] | None = None
    optimizer: Callable[[nn.Module], Any] = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)
    prepare: Callable[[nn.Module], None] = lambda _: None  # after sharding
    keeps_groups: bool = False  # DTensor remembers meshes by their ranks, and so their groups
    # On a GPU Gloo ends the process in a call that this case makes beside FSDP2's.
    gloo_ends_on_gpu: bool = False
    calls_served: bool = True  # no call of a served group goes stock
    since: tuple[int, int] = (2, 11)  # the first torch whose stock FSDP2 can do it
    exact_beside_stock: bool = True  # stock does the same arithmetic around its collectives
    ulp_of: torch.dtype | None = None  # moved by one ulp of this dtype; None: of the weights' own
    paths: Callable[[Report], bool] | None = (
        None  # None: every group with more than one rank on tide
    )


@dataclass
class Outcome:
    losses: list[float]
    gradients: dict[str, torch.Tensor]  # this rank's shards after the first backward
    weights: dict[str, torch.Tensor]  # this rank's shards at the end
    report: Report | None = None


class Trainer:
    def __init__(self, case: Case, engine: str, moved: bool = False) -> None:
        self.case = case
        self.setting = Setting(engine, DEVICE != "cpu" and case.gloo_ends_on_gpu)
        torch.manual_seed(0)
        self.model = case.build()
        if moved:
            models.move_by_one_ulp(self.model, case.ulp_of)
        case.shard(self.model, self.setting)
        case.prepare(self.model)
        self.optimizer = case.optimizer(self.model)
        self.gradients: dict[str, torch.Tensor] = {}
        torch.manual_seed(1000 + dist.get_rank())

    def words(self) -> torch.Tensor:
        return torch.randint(0, models.WORDS, (2, 7)).to(DEVICE)

    def backward(self) -> torch.Tensor:
        loss = models.loss_of(self.model, self.words())
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.keep_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def keep_gradients(self) -> None:
        if not self.gradients:
            self.gradients = {
                name: local(p.grad).clone()
                for name, p in sharded_parameters(self.model).items()
                if p.grad is not None
            }

    def run(self) -> Outcome:
        step = self.case.step or plain_step
        with self.setting.active():
            losses = [float(step(self, index)) for index in range(self.case.steps)]
            outcome = Outcome(
                losses,
                self.gradients,
                {name: local(p).clone() for name, p in sharded_parameters(self.model).items()},
            )
            if self.setting.engine != "stock":
                outcome.report = tide.report(self.model)
        return outcome


def plain_step(trainer: Trainer, index: int) -> torch.Tensor:
    loss = trainer.backward()
    trainer.update()
    return loss


def sharded_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, also while the module holds the unsharded ones."""
    found = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module._get_fsdp_state()):
                for parameter in group.fsdp_params:
                    found[parameter._param_fqn] = parameter.sharded_param
    return found


def local(tensor: Any) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.detach()


VARIANTS = {
    # engine: what it equals bit for bit, because gathers move bytes and sums have one order
    "tide": "double",
    "tide:memory_mode=slot_reuse": "double",
    "tide:fsdp=reduce": "double",
    "tide:fsdp=gather": "stock",
    "tide:fsdp=0": "stock",
}
PATHS = {"fsdp=gather": "gather", "fsdp=reduce": "reduce", "fsdp=0": "stock"}


ENVIRONMENT = {"TIDE_INNER_CUDA": "gloo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def prepare_device() -> None:
    """In a rank: its GPU, and products that give the same bits every time."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(True)


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def check(
    case: Case, engines: tuple[str, ...] = tuple(VARIANTS), reference: str = "double"
) -> None:
    """Trains the case on stock, stock moved, the reference and `engines`; asserts the module's
    promise."""
    if case.since > TORCH:
        pytest.skip(f"stock FSDP2 of torch {torch.__version__} cannot do this")

    def body(rank: int, size: int) -> Any:
        prepare_device()
        return tried(case, engines, reference)

    judge(case, engines, run_ranks(case.ranks, body, timeout=280, environment=ENVIRONMENT))


def tried(case: Case, engines: tuple[str, ...], reference: str = "double") -> dict[str, Tried]:
    """In a rank: the case on every engine."""

    def outcome_of(engine: str, moved: bool = False) -> Outcome:
        trainer = Trainer(case, engine, moved)
        outcome = trainer.run()
        if DEVICE != "cpu" and not case.keeps_groups:
            trainer.setting.close()
        return outcome

    stock = outcome_of("stock")
    moved = outcome_of("stock", moved=True)
    expected = outcome_of(reference)
    equals = {"double": expected, "stock": stock}
    results: dict[str, Tried] = {}
    for engine in engines:
        outcome = outcome_of(engine)
        assert outcome.report is not None
        assert all(math.isfinite(x) for x in outcome.losses)
        results[engine] = Tried(
            differs(outcome, equals[VARIANTS.get(engine, "double")]),
            distance(outcome, stock),
            distance(moved, stock),
            outcome.report,
        )
    return results


def judge(case: Case, engines: tuple[str, ...], ranks: list[dict[str, Tried]]) -> None:
    for engine in engines:
        tried = [results[engine] for results in ranks]
        exact = VARIANTS.get(engine, "double") == "double" or case.exact_beside_stock
        for rank, one in enumerate(tried if exact else []):
            assert not one.differs, (
                f"{engine}, rank {rank}: {one.differs} differ from the reference"
            )
        for index, what in enumerate(("gradients", "losses")):
            got = math.sqrt(sum(one.from_stock[index] for one in tried))
            allowed = 2 * math.sqrt(sum(one.moved_from_stock[index] for one in tried))
            assert got <= allowed, f"{engine}: {what} {got:.3e} from stock, allowed {allowed:.3e}"
        check_reports(case, engine, [one.report for one in tried])


@dataclass
class Tried:
    """One rank's comparison: names that differ from the reference, squared distances (gradients,
    losses)."""

    differs: str
    from_stock: tuple[float, float]
    moved_from_stock: tuple[float, float]
    report: Report


def differs(one: Outcome, other: Outcome) -> str:
    assert one.gradients.keys() == other.gradients.keys()
    names = [n for n, g in one.gradients.items() if not torch.equal(g, other.gradients[n])]
    names += [f"weight {n}" for n, w in one.weights.items() if not torch.equal(w, other.weights[n])]
    if one.losses != other.losses:
        names.append(f"losses {one.losses} and {other.losses}")
    return ", ".join(names[:4])


def distance(one: Outcome, other: Outcome) -> tuple[float, float]:
    gradients = sum(
        float((g.double() - other.gradients[n].double()).square().sum())
        for n, g in one.gradients.items()
    )
    losses = sum((a - b) ** 2 for a, b in zip(one.losses, other.losses, strict=True))
    return gradients, losses


def check_reports(case: Case, engine: str, reports: list[Report]) -> None:
    path = PATHS.get(engine.partition(":")[2], "tide")
    for report in reports:
        assert [r.reason for r in report] == [r.reason for r in reports[0]]
        for row in report:
            assert row.path == path, f"{engine}\n{report}"
            if case.calls_served:
                assert not row.stock_calls, f"{engine}\n{report}"
                assert row.gathers > 0 or path in ("reduce", "stock"), f"{engine}\n{report}"
                assert row.reduces > 0 or row.reduced_bytes == 0, f"{engine}\n{report}"
