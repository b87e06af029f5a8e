"""The checkers behind ci/lint and ci's repair of a damaged environment find what they are made to
find."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("backend/layout/a.h", '#include "backend/base/status.h"'),
        ("backend/plan/a.cc", '#include "backend/layout/group_layout.h"'),
        ("backend/engine/a.cc", '#include "transports/fabric.h"'),
        ("backend/c10d/a.cc", "#include <torch/csrc/distributed/c10d/Backend.hpp>"),
        ("transports/host/a.cc", '#include "transports/fabric.h"'),
        ("kernels/a.cc", "#include <vector>"),
        ("transports/host/a.cc", '#include "transports/host/window.h"'),
    ],
)
def test_allowed_includes(path: str, line: str) -> None:
    assert load("check_includes").offences(path, line) == []


@pytest.mark.parametrize(
    ("path", "line", "word"),
    [
        ("backend/layout/a.h", '#include "backend/plan/program.h"', "backend/plan/program.h"),
        ("backend/plan/a.cc", '#include "backend/engine/group.h"', "backend/engine/group.h"),
        ("backend/engine/a.cc", '#include "transports/host/window.h"', "transports/host/window.h"),
        ("backend/engine/a.cc", "#include <torch/torch.h>", "libtorch"),
        ("transports/host/a.cc", '#include "transports/memory/memory.h"', "transports/memory"),
        ("transports/host/a.cc", '#include "backend/plan/program.h"', "backend/plan"),
        ("kernels/a.cc", '#include "copy.h"', "from the root"),
        ("backend/other/a.cc", "#include <vector>", "no rule"),
    ],
)
def test_forbidden_includes(path: str, line: str, word: str) -> None:
    (offence,) = load("check_includes").offences(path, "// one line before\n" + line)
    assert word in offence


def test_readme_checker(tmp_path: Path) -> None:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci/demo").write_text("--ranks")
    (tmp_path / "ci/demo").chmod(0o755)
    (tmp_path / "python/tide").mkdir(parents=True)
    (tmp_path / "python/tide/cli.py").write_text('VERBS = {"bench": 0}')
    (tmp_path / "python/tide/knobs.py").write_text('Knob("TIDE_FSDP", "both")')
    check = load("check_readme").offences
    right = (
        "Run `ci/demo --ranks 2`, then\n    tide bench\nwith TIDE_FSDP=0, see [the commands](ci)."
    )
    assert check(right, tmp_path) == []
    wrong = "`ci/deploy`\n`ci/demo --quick`\n    tide dance\nTIDE_SPEED=1\n[page](docs/a.md)\n"
    found = "\n".join(check(wrong, tmp_path))
    for name in ("ci/deploy", "--quick", "tide dance", "TIDE_SPEED", "TIDE_FSDP", "docs/a.md"):
        assert name in found


def distribution(folder: Path, name: str, version: str) -> Path:
    """An installed package of one module, as pip leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text("x = 1\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(
        f"{name}.py,sha256=0,6\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n"
    )
    return folder / f"{name}.py"


def test_damaged_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = distribution(tmp_path, "numpy", "9.9.9")
    distribution(tmp_path, "torch", "2.15.0+cpu")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    check = load("check_environment")
    monkeypatch.setattr(
        check, "wanted", lambda torch: [f"torch=={torch}", "numpy==9.9.9", "rich==1.0"]
    )
    assert check.problems("2.15.0") == ["rich==1.0"]
    assert check.problems("2.11.0") == ["torch==2.11.0", "rich==1.0"]
    module.write_text("")
    assert check.problems("2.15.0") == ["numpy==9.9.9", "rich==1.0"]
    module.unlink()
    assert check.problems("2.15.0") == ["numpy==9.9.9", "rich==1.0"]
