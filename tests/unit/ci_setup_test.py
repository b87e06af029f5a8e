"""The commands of ci/ on faked machines: each trouble gives one sentence and exit status 1, never a
trace.

A faked machine is a copy of ci/ in an empty folder and a PATH of links to this machine's tools,
less some, plus fakes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Machine = Callable[..., subprocess.CompletedProcess[str]]

TOOLS = [
    "as",
    "awk",
    "basename",
    "bash",
    "bc",
    "cat",
    "chmod",
    "cmake",
    "cp",
    "cut",
    "date",
    "df",
    "dirname",
    "env",
    "find",
    "flock",
    "g++",
    "getconf",
    "git",
    "grep",
    "head",
    "id",
    "ld",
    "mkdir",
    "mktemp",
    "ninja",
    "nproc",
    "printf",
    "python3",
    "rm",
    "sed",
    "sha256sum",
    "sort",
    "stat",
    "tail",
    "touch",
    "tr",
    "uname",
    "wc",
    "xargs",
]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Runs a ci/ command on a machine with `fakes` (name -> bash script) in place of, and without,
    some tools."""
    project, bin_folder = tmp_path / "project", tmp_path / "bin"
    shutil.copytree(ROOT / "ci", project / "ci")
    bin_folder.mkdir()
    python = Path(sys.executable).resolve()
    for tool in TOOLS:
        real = str(python) if tool == "python3" else shutil.which(tool)
        if real:
            (bin_folder / tool).symlink_to(real)
    for tool in ("cmake", "ninja", "git", "flock"):
        if not (bin_folder / tool).exists():
            (bin_folder / tool).write_text("#!/bin/sh\n")
            (bin_folder / tool).chmod(0o755)

    def run(
        *command: str,
        without: tuple[str, ...] = (),
        fakes: dict[str, str] | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        for tool in (*without, *(fakes or {})):
            (bin_folder / tool).unlink(missing_ok=True)
        for tool, script in (fakes or {}).items():
            (bin_folder / tool).write_text(f"#!/bin/bash\n{script}\n")
            (bin_folder / tool).chmod(0o755)
        environment = {
            "PATH": str(bin_folder),
            "HOME": str(tmp_path),
            "LC_ALL": "C.UTF-8",
            **variables,
        }
        return subprocess.run(
            ["bash", *command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run


def only_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on stderr of a command that failed as it should."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tide: ")
    assert "Traceback" not in done.stdout
    return lines[0]


NO_NETWORK = (
    'echo "E: Failed to fetch http://deb.debian.org/x  Could not resolve deb.debian.org"; exit 100'
)
NO_PACKAGE = 'echo "E: Unable to locate package g++"; exit 100'


@pytest.mark.parametrize("name", ["i686", "armv7l", "riscv64"])
def test_machine_without_torch_packages(machine: Machine, name: str) -> None:
    said = only_sentence(
        machine("ci/demo", fakes={"uname": f'[ "$1" = -s ] && echo Linux || echo {name}'})
    )
    assert name in said and "64-bit" in said


def test_32_bit_userland(machine: Machine) -> None:
    assert "32-bit" in only_sentence(machine("ci/test", fakes={"getconf": "echo 32"}))


def test_other_system(machine: Machine) -> None:
    assert "Darwin" in only_sentence(machine("ci/test", fakes={"uname": "echo Darwin"}))


@pytest.mark.parametrize("command", ["ci/demo", "ci/test", "ci/lint"])
def test_no_compiler_and_no_network(machine: Machine, command: str) -> None:
    said = only_sentence(machine(command, without=("g++",), fakes={"apt-get": NO_NETWORK}))
    assert "g++" in said and "network" in said


def test_no_compiler_in_any_package(machine: Machine) -> None:
    said = only_sentence(machine("ci/demo", without=("g++",), fakes={"apt-get": NO_PACKAGE}))
    assert "Unable to locate package g++" in said


def test_no_compiler_and_no_apt(machine: Machine) -> None:
    said = only_sentence(machine("ci/demo", without=("g++", "apt-get")))
    assert "g++" in said and "apt-get" in said


def test_no_compiler_and_no_right_to_install(machine: Machine) -> None:
    said = only_sentence(
        machine("ci/demo", without=("g++",), fakes={"apt-get": "exit 0", "id": "echo 1000"})
    )
    assert "root or sudo" in said


def test_old_compiler(machine: Machine) -> None:
    said = only_sentence(machine("ci/demo", fakes={"g++": "exit 1", "apt-get": "exit 0"}))
    assert "C++20" in said


def test_wrong_python(machine: Machine) -> None:
    fakes = {"python3.9": '[ "$1" = --version ] && echo Python 3.9.2; exit 1', "apt-get": "exit 0"}
    said = only_sentence(machine("ci/demo", fakes=fakes, PYTHON="python3.9"))
    assert "3.11" in said and "3.9.2" in said


def test_full_disk(machine: Machine) -> None:
    header = "Filesystem 1024-blocks Used Available Capacity Mounted"
    said = only_sentence(
        machine("ci/demo", fakes={"df": f'echo "{header}"; echo "/dev/a 9 9 2097152 99% /"'})
    )
    assert "12 GB" in said and "2 GB are free" in said


def test_folder_that_cannot_be_written(machine: Machine) -> None:
    assert "cannot write" in only_sentence(machine("ci/demo", fakes={"mkdir": "exit 1"}))


def test_no_network_for_pip_and_a_broken_environment(machine: Machine, tmp_path: Path) -> None:
    broken = tmp_path / "project/.venv/bin"
    broken.mkdir(parents=True)
    (broken / "python").symlink_to("/nowhere/python3")
    done = machine(
        "ci/demo",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert "making it anew" in done.stdout
    said = only_sentence(done)
    assert "torch==2.15.0" in said and "network" in said


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("ci/test", "--torch", "2.3"), "2.3"),
        (("ci/test", "--torch"), "2.15"),
        (("ci/test", "--fast"), "--fast"),
        (("ci/configure", "gpu"), "cpu, cuda, asan, tsan"),
        (("ci/configure",), "cpu, cuda, asan, tsan"),
        (("ci/demo", "--ranks", "0"), "--ranks"),
        (("ci/lint", "--quick"), "--fix"),
    ],
)
def test_wrong_arguments(machine: Machine, command: tuple[str, ...], named: str) -> None:
    assert named in only_sentence(machine(*command))


def test_cuda_variant_without_nvcc(machine: Machine) -> None:
    assert "nvcc" in only_sentence(machine("ci/configure", "cuda"))
