"""What the storm (storm_test.py) does in its ranks, and the parent that kills and stops them.

A run is a list of rounds that every process knows. In each round those who are still alive make a
new group, work in it, and one of them does something bad; the others must get an error, clean up,
and go on to the next round. A victim that dies is missing from the next round's group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import selectors
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, reduce_scatter_list
from torch import nn
from torch.distributed.fsdp import fully_shard

LETHAL = ("kill", "stop", "exit")
HARMLESS = ("raise", "skip", "sizes", "peace")
OPERATIONS = ("gather", "reduce", "step")
NAMED_THREADS = torch.__version__ >= "2.14"
WARM_UP = 2  # calls before anything happens
LONG, SHORT = 120.0, 4.0  # seconds; the second is the group's timeout where a rank is stopped
NUMEL = 60_000
TURNS = 64  # sizes come again after so many calls
DEVICE = os.environ.get("TIDE_TEST_DEVICE", "cpu")  # "cuda": all ranks on one GPU


@dataclass(frozen=True)
class Round:
    kind: str
    operation: str
    victim: int  # a rank of the run
    members: tuple[int, ...]  # ranks of the run; their places are the ranks of the round's group
    at: int  # the call in which the victim does it by itself
    delay: float  # seconds until the parent kills or stops it
    aborts: bool  # how survivors end their group
    node_size: int = 0  # ranks of each node of the round's group; 0: one node

    @property
    def timeout(self) -> float:
        return SHORT if self.kind == "stop" else LONG


def make_rounds(seed: int, ranks: int, between_nodes: bool = False) -> list[Round]:
    """Peace first and last; a harmless round before each lethal one, until one rank is left."""
    chance = random.Random(seed)
    members = tuple(range(ranks))
    rounds = []

    def add(kind: str, members: tuple[int, ...]) -> Round:
        rounds.append(
            Round(
                kind,
                chance.choice(OPERATIONS),
                chance.choice(members),
                members,
                WARM_UP + chance.randrange(4),
                chance.random() * 0.03,
                chance.random() < 0.5,
                chance.choice((1, 2) if len(members) == 4 else (1,)) if between_nodes else 0,
            )
        )
        return rounds[-1]

    add("peace", members)
    while len(members) > 1:
        for _ in range(2):
            add(chance.choice(HARMLESS[:3]), members)
        # A stopped rank costs its timeout: one in four.
        lethal = add(chance.choice(("kill", "kill", "stop", "exit")), members)
        members = tuple(rank for rank in members if rank != lethal.victim)
    add("peace", members)
    return rounds


class Mistake(Exception):
    """What a victim's script raises by itself."""


class Work:
    """Calls of one kind, each with an answer that is known."""

    def __init__(self, round_: Round, place: int) -> None:
        self.round, self.place, self.size = round_, place, len(round_.members)
        if round_.operation == "step":
            torch.manual_seed(1)
            self.model: Any = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))).to(DEVICE)
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        elif DEVICE != "cpu":
            most = sum(self.sizes(TURNS - 1, True)) + 5
            self.room = tide.empty(self.size * most, device=DEVICE)

    def call(self, index: int, bad: str) -> None:
        if self.round.operation == "step":
            self.step(index, bad)
        elif bad != "skip":
            getattr(self, self.round.operation)(index, bad == "sizes")

    def sizes(self, index: int, other: bool) -> list[int]:
        # No two calls in a row are equal, so that one that is left out shows.
        return [NUMEL + 7 * (index % TURNS), 1 + index % 5, 40 + int(other)]

    def outputs(self, sizes: list[int]) -> list[torch.Tensor]:
        numels = [self.size * n for n in sizes]
        if DEVICE == "cpu":
            return [torch.zeros(n) for n in numels]
        return list(self.room[: sum(numels)].split(numels))

    def settle(self, work: dist.Work) -> None:
        """Until it is over here. On a GPU a wait orders a stream only; what broke the group
        meanwhile is raised by the next one."""
        work.wait()
        if DEVICE != "cpu":
            torch.cuda.synchronize()
            work.wait()

    def gather(self, index: int, other: bool) -> None:
        sizes = self.sizes(index, other)
        outputs = self.outputs(sizes)
        inputs = [torch.full((n,), float(self.place + index), device=DEVICE) for n in sizes]
        self.settle(all_gather_list(outputs, inputs))
        for output in outputs:
            last = output.view(self.size, -1)[:, -1]
            assert last.tolist() == [float(p + index) for p in range(self.size)]

    def reduce(self, index: int, other: bool) -> None:
        sizes = self.sizes(index, other)
        outputs = [torch.zeros(n, device=DEVICE) for n in sizes]
        value = float(self.place + index)
        inputs = [torch.full((self.size * n,), value, device=DEVICE) for n in sizes]
        self.settle(reduce_scatter_list(outputs, inputs))
        for output in outputs:
            assert output[-1].item() == sum(p + index for p in range(self.size))

    def step(self, index: int, bad: str) -> None:
        self.model.zero_grad()
        x = torch.ones(2, 48, device=DEVICE)
        if bad == "sizes":
            self.model[2].weight.requires_grad_(False)  # a reduction of fewer gradients
        for position, layer in enumerate(self.model):
            if bad != "skip" or position != 1:
                x = layer(x)
        x.sum().backward()
        finite = bool(self.model[1].weight.grad.to_local().isfinite().all())
        if not finite and DEVICE != "cpu":
            for layer in self.model:  # poisoned: the next gather says why
                x = layer(x)
        assert finite


def play(round_: Round, number: int, rank: int, folder: Path, say: Any) -> str:
    """One round in one rank: the error it got, or an empty string in peace."""
    place = round_.members.index(rank)
    if DEVICE != "cpu":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "tide",
        store=dist.FileStore(str(folder / f"round{number}"), len(round_.members)),
        rank=place,
        world_size=len(round_.members),
        timeout=timedelta(seconds=round_.timeout),
        pg_options=tide.Options(node_size=round_.node_size),
    )
    message, work = "", None
    try:
        work = Work(round_, place)
        calls = round_.at + 2 if round_.kind == "peace" else 1_000_000
        for index in range(calls):
            mine = rank == round_.victim
            if index == WARM_UP and mine and round_.kind in ("kill", "stop"):
                say({"victim": number})
            bad = round_.kind if mine and index == round_.at else ""
            if bad == "exit":
                os._exit(3)
            if bad == "raise":
                raise Mistake
            work.call(index, bad if bad in ("skip", "sizes") else "")
        if round_.kind == "peace":
            dist.barrier()  # nobody aborts what another one is still in
    except Mistake:
        message = "raised"
    except dist.DistBackendError as error:
        message = str(error)
    say({"failed": number})
    del work
    if DEVICE != "cpu":
        torch.cuda.synchronize()  # no stream of this process is stuck
    if round_.aborts:
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    gc.collect()
    return message


def held() -> dict[str, list[str]]:
    """What a process holds that a group could have left behind."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            file = os.readlink(f"/proc/self/fd/{name}").split(":[")[0]
            if DEVICE == "cpu" or not file.startswith(("/dev/nvidia", "anon_inode")):
                files.append(file)  # the CUDA driver keeps its own as it likes
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    own_name = Path("/proc/self/comm").read_text().strip()
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return {
        "files": sorted(files),
        "memory files": sorted(name for name in maps if "memfd" in name),
        "threads": sorted(threads),
        "unnamed threads": [name for name in threads if name == own_name],
    }


def left_over(before: dict[str, list[str]]) -> str:
    """What is held now beyond `before`, after some time for threads that are on their way out."""
    deadline = time.monotonic() + 10
    while True:
        now = held()
        if all(len(now[kind]) <= len(before[kind]) for kind in now):
            return ""
        if time.monotonic() > deadline:
            return f"before {before}\nafter {now}"
        time.sleep(0.02)


def live(rounds: list[Round], rank: int, folder: Path, say: Any) -> dict[str, Any]:
    """All rounds of one rank. The first, in peace, makes whatever is made once."""
    messages: dict[int, str] = {}
    before: dict[str, list[str]] = {}
    meshes: set[int] = set()
    for number, round_ in enumerate(rounds):
        if rank not in round_.members:
            continue
        messages[number] = play(round_, number, rank, folder, say)
        size = len(round_.members)
        if number == 0 or (round_.operation == "step" and size not in meshes):
            # DTensor's caches keep the first mesh of each size, and with it that mesh's inner
            # group: what is held now is the new measure, but of tide's own parts nothing may be
            # left. Where Gloo and autograd name their threads, those without a name are tide's.
            meshes.update([size] if round_.operation == "step" else [])
            before = {**held(), "memory files": []}
            if DEVICE == "cpu" and NAMED_THREADS:  # CUDA has a thread without a name as well
                before["unnamed threads"] = ["the main one"]
        left = left_over(before)
        if left:
            raise AssertionError(f"round {number}, {round_}\n{left}")
    return {"messages": messages}


@dataclass
class Rank:
    pid: int
    pipe: int
    log: Path
    text: bytearray = field(default_factory=bytearray)
    status: int | None = None
    result: dict[str, Any] | None = None


class Parent:
    """Forks the ranks of one run and does to them what the rounds say."""

    def __init__(self, rounds: list[Round], folder: Path) -> None:
        self.rounds, self.folder = rounds, folder
        sys.stdout.flush()
        sys.stderr.flush()
        self.ranks = [self._fork(rank) for rank in range(len(rounds[0].members))]
        self.failed: dict[int, set[int]] = {}  # round -> ranks that got its error

    def run(self, seconds: float) -> list[Rank]:
        deadline = time.monotonic() + seconds
        selector = selectors.DefaultSelector()
        for number, rank in enumerate(self.ranks):
            selector.register(rank.pipe, selectors.EVENT_READ, number)
        try:
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(timeout=0.1):
                    chunk = os.read(key.fd, 65536)
                    if not chunk:
                        selector.unregister(key.fd)
                    self._hear(key.data, chunk)
            hung = [number for number in range(len(self.ranks)) if not self._ended(number)]
            for number in hung:
                os.kill(self.ranks[number].pid, signal.SIGCONT)
                os.kill(self.ranks[number].pid, signal.SIGUSR1)  # their stacks, to their logs
            if hung:
                time.sleep(1)
        finally:
            selector.close()
            for rank in self.ranks:
                os.close(rank.pipe)
                if rank.status is None:
                    os.kill(rank.pid, signal.SIGKILL)
                    rank.status = os.waitpid(rank.pid, 0)[1]
        assert not hung, f"ranks {hung} did not end in time\n{self.logs()}"
        return self.ranks

    def logs(self) -> str:
        return "\n".join(
            f"--- rank {number}, status {rank.status}:\n{rank.log.read_text()[-6000:]}"
            for number, rank in enumerate(self.ranks)
        )

    def _ended(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.status is None:
            # Its pipe is closed, so it is at its end; a stopped one is not.
            for _ in range(100):
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    rank.status = status
                    break
                time.sleep(0.01)
        return rank.status is not None

    def _hear(self, number: int, chunk: bytes) -> None:
        text = self.ranks[number].text
        text += chunk
        while b"\n" in text:
            line, _, rest = bytes(text).partition(b"\n")
            text[:] = rest
            said = json.loads(line)
            if "victim" in said:
                self._strike(self.rounds[said["victim"]])
            elif "failed" in said:
                self._count(said["failed"], number)
            else:
                self.ranks[number].result = said

    def _strike(self, round_: Round) -> None:
        time.sleep(round_.delay)
        what = signal.SIGSTOP if round_.kind == "stop" else signal.SIGKILL
        os.kill(self.ranks[round_.victim].pid, what)

    def _count(self, number: int, rank: int) -> None:
        """A stopped rank dies once all others have their error."""
        round_ = self.rounds[number]
        reached = self.failed.setdefault(number, set())
        reached.add(rank)
        if round_.kind == "stop" and len(reached) == len(round_.members) - 1:
            os.kill(self.ranks[round_.victim].pid, signal.SIGKILL)

    def _fork(self, number: int) -> Rank:
        read_end, write_end = os.pipe()
        log = self.folder / f"rank{number}.log"
        pid = os.fork()
        if pid != 0:
            os.close(write_end)
            return Rank(pid, read_end, log)
        status = 1
        try:
            os.close(read_end)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            faulthandler.enable(file=2, all_threads=True)
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
            torch.set_num_threads(1)

            def say(what: dict[str, Any]) -> None:
                os.write(write_end, json.dumps(what).encode() + b"\n")

            say(live(self.rounds, number, self.folder, say))
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            _leave(status)
        raise AssertionError("unreachable")


def _leave(status: int) -> NoReturn:
    os._exit(status)
