"""Builds tide: `pip install .`, with or without build isolation.

The extension is compiled for the torch of the environment that tide goes into. That torch is looked
up by path and never imported, so it is found from inside pip's isolated build environment too.
TIDE_TORCH_DIR overrides the search.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parent
NOTE = "_built_for.json"  # what the extension was built for; tide._registration reads it
FIND_TORCH = (
    "import importlib.util as u; s = u.find_spec('torch'); "
    "print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')"
)


def fail(sentence: str) -> None:
    """Ends the build with one sentence instead of a trace."""
    raise SystemExit(f"tide: {sentence}")


def torch_directory() -> Path:
    """site-packages/torch of the target environment."""
    chosen = os.environ.get("TIDE_TORCH_DIR")
    if not chosen:
        # pip's isolation works through these two variables: without them the interpreter sees its
        # own environment.
        hidden = {"PYTHONPATH", "PYTHONNOUSERSITE"}
        plain = {name: value for name, value in os.environ.items() if name not in hidden}
        for environment in (dict(os.environ), plain):
            found = subprocess.run(
                [sys.executable, "-c", FIND_TORCH],
                env=environment,
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
            )
            chosen = found.stdout.strip()
            if chosen:
                break
    if not chosen or not (Path(chosen) / "version.py").is_file():
        fail(
            f"no torch found for {sys.executable}; install torch 2.11 or newer first, or set "
            "TIDE_TORCH_DIR to the folder of an installed torch (site-packages/torch)"
        )
    return Path(chosen)


def torch_version(directory: Path) -> str:
    """The full version of the torch in a folder, for example "2.15.0+cu132"."""
    match = re.search(r"__version__ = '([^']+)'", (directory / "version.py").read_text())
    if match is None:
        fail(f"cannot read torch's version from {directory / 'version.py'}")
        raise AssertionError
    return match.group(1)


def check_machine() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  pip asks python_requires, `python setup.py` not
        fail(f"Python 3.11 or newer is needed, this is {platform.python_version()}")
    if struct.calcsize("P") != 8 or not sys.platform.startswith("linux"):
        fail("only 64-bit Linux is served")
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        fail("no C++ compiler found; install g++ 12 or newer (Debian and Ubuntu: apt install g++)")


def check_setuptools() -> None:
    """Old releases make wheels only with a package beside them."""
    try:
        import setuptools.command.bdist_wheel  # noqa: F401
    except ImportError:
        if find_spec("wheel") is None:
            fail("this setuptools is too old to build with; `pip install -U setuptools` and retry")


def missing_tools() -> list[str]:
    """Build tools that pip must bring because the machine has none."""
    return [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]


class CMakeBuild(build_ext):
    """Runs CMake and puts the extension, and the note of what it was built for, beside the Python
    files."""

    def build_extension(self, ext: Extension) -> None:
        check_machine()
        torch = torch_directory()
        version = torch_version(torch)
        cmake = shutil.which("cmake")
        ninja = shutil.which("ninja")
        if cmake is None:
            fail("cmake 3.22 or newer is needed; `pip install cmake ninja` brings it")
            raise AssertionError
        minor = ".".join(version.split(".")[:2])
        build = SOURCE / "build" / f"package-{sysconfig.get_config_var('SOABI')}-torch{minor}"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            cmake,
            "-S",
            str(SOURCE),
            "-B",
            str(build),
            "-DCMAKE_BUILD_TYPE=Release",
            "-DTIDE_TESTS=OFF",
            f"-DTIDE_TORCH_DIR={torch}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        if ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = str(self.parallel or os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        for command in (
            configure,
            [cmake, "--build", str(build), "--target", "tide_c10d", "-j", jobs],
        ):
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as error:
                fail(
                    f"`{' '.join(command)}` failed with status {error.returncode}; its output "
                    "above says why"
                )
        made = build / "backend" / "c10d" / f"_C.{sysconfig.get_config_var('SOABI')}.so"
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A process that has the old file mapped keeps it: the new one takes its name, not its
        # bytes.
        fresh = target.with_suffix(".new")
        shutil.copyfile(made, fresh)
        fresh.replace(target)
        note = {"torch": version, "python": platform.python_version(), "source": str(SOURCE)}
        (target.parent / NOTE).write_text(json.dumps(note) + "\n")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        shutil.copyfile(Path(self.build_lib) / "tide" / NOTE, SOURCE / "python" / "tide" / NOTE)


if "build_ext" not in sys.argv:  # which makes no wheel
    check_setuptools()
setup(
    name="tide",
    version="0.1.0",
    description="Layout-aware collectives for FSDP2: a torch.distributed backend",
    package_dir={"": "python"},
    packages=find_packages("python"),
    package_data={"tide": ["py.typed", "_C.pyi"]},
    python_requires=">=3.11",
    install_requires=[
        "click>=8",
        "matplotlib>=3.8",
        "pyyaml>=6",
        "rich>=13",
    ],  # torch is there already: tide is built for it
    ext_modules=[Extension("tide._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=missing_tools(),
    entry_points={
        "console_scripts": ["tide = tide.cli:main"],
        "torch.distributed.backends": ["tide = tide._registration:register"],
        "torch.backends": ["tide = tide._registration:autoload"],
    },
    zip_safe=False,
)
