"""Checks which folder includes what, by the rules below. Prints one line an offence; exit status 1
if there is any."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["backend", "transports", "kernels"]

# Folder -> prefixes of project headers that it may include, its own folder aside. The longest
# matching folder counts.
ALLOWED = {
    "backend/base": [],
    "backend/layout": ["backend/base/"],
    "backend/plan": ["backend/base/", "backend/layout/"],
    # The seams' headers hold the small structs (a piece, a sum) that kernels are called with.
    "kernels": ["backend/base/", "transports/*.h"],
    "transports": ["backend/base/", "kernels/"],
    "transports/host": ["backend/base/", "kernels/", "transports/*.h"],
    # Ranks as threads share the blocking queues of ranks as processes.
    "transports/memory": ["backend/base/", "kernels/", "transports/*.h", "transports/host/"],
    # Ranks meet and share descriptors through the host's fabric.
    "transports/cuda": ["backend/base/", "kernels/", "transports/*.h", "transports/host/"],
    "transports/ucx": ["backend/base/", "kernels/", "transports/*.h"],
    "backend/engine": [
        "backend/base/",
        "backend/layout/",
        "backend/plan/",
        "kernels/",
        "transports/*.h",
    ],
    "backend/c10d": [
        "backend/base/",
        "backend/layout/",
        "backend/plan/",
        "backend/engine/",
        "kernels/",
        "transports/*.h",
        "transports/host/",
        "transports/memory/",
        "transports/cuda/",
        "transports/ucx/ucx.h",
        "transports/ucx/rails.h",
    ],
}
LIBTORCH = ("torch/", "ATen/", "c10/", "pybind11/", "Python.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def folder_of(path: str) -> str | None:
    fitting = [folder for folder in ALLOWED if path.startswith(folder + "/")]
    return max(fitting, key=len) if fitting else None


def permits(rule: str, header: str) -> bool:
    if rule.endswith("/*.h"):
        return header.startswith(rule[:-3]) and "/" not in header[len(rule) - 3 :]
    return header.startswith(rule)


def offences(path: str, text: str) -> list[str]:
    """What `path` (relative to the root) includes and may not. Pure, so that it can be tested."""
    folder = folder_of(path)
    if folder is None:
        return [f"{path}: no rule for this folder; add one to ci/check_includes.py"]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        bracket, header = match.groups()
        where = f"{path}:{number}: {folder}"
        if header.startswith(LIBTORCH):
            if folder != "backend/c10d":
                found.append(f"{where} includes {header}; only backend/c10d may include libtorch")
        elif header.startswith(tuple(name + "/" for name in FOLDERS)):
            own = header.startswith(folder + "/")
            if not own and not any(permits(rule, header) for rule in ALLOWED[folder]):
                allowed = ", ".join(ALLOWED[folder]) or "nothing of the project"
                found.append(f"{where} includes {header}; it may include {allowed}")
        elif bracket == '"':
            found.append(f'{where} includes "{header}"; name project headers from the root')
    return found


def main() -> int:
    found: list[str] = []
    for name in FOLDERS:
        for path in sorted((ROOT / name).rglob("*")):
            if path.suffix in {".h", ".cc", ".cu", ".cuh"}:
                found += offences(path.relative_to(ROOT).as_posix(), path.read_text())
    print("\n".join(found) or "includes are as allowed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
