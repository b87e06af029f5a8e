"""Says what is wrong with the Python environment that runs this script, importing none of it.

With a torch version as argument: prints one requirement a line that is missing, of another version
or damaged. With `--extension editable`: exit status 0 if `tide` comes from this folder and its
compiled part is there; with `--extension ""`: the same for a copy installed in the environment.
"""

import importlib.machinery
import importlib.util
import os
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent


def wanted(torch: str) -> list[str]:
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return [f"torch=={torch}"] + [line for line in lines if line and not line.startswith("#")]


def damaged(found: Distribution) -> bool:
    """Whether a file that the installer recorded is gone or has another size."""
    if found.read_text("RECORD") is None:
        return True
    for file in found.files or []:
        if file.suffix == ".pyc" or file.size is None:
            continue
        try:
            size = os.stat(os.fspath(file.locate())).st_size
        except OSError:
            return True
        if size != file.size and file.suffix in {".so", ".py", ""}:
            return True
    return False


def problems(torch: str) -> list[str]:
    result = []
    named = set()
    for line in wanted(torch):
        name, version = line.split("==")
        named.add(re.sub(r"[-_.]+", "-", name).lower())
        try:
            found = distribution(name)
        except PackageNotFoundError:
            result.append(line)
            continue
        if found.version.split("+")[0] != version or damaged(found):
            result.append(line)
    for found in distributions():
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower()
        if name and name not in named and name not in {"tide", "pip"} and damaged(found):
            result.append(f"{name}=={found.version}")
    return result


def extension_is_here(editable: bool) -> bool:
    """Looks where `import tide._C` would look, without running it."""
    spec = importlib.util.find_spec("tide") if "tide" not in sys.modules else None
    if spec is None or not spec.submodule_search_locations:
        return False
    folders = [Path(folder).resolve() for folder in spec.submodule_search_locations]
    if editable != (HERE.parent / "python" / "tide" in folders):
        return False
    endings = importlib.machinery.EXTENSION_SUFFIXES
    return any((folder / f"_C{ending}").exists() for folder in folders for ending in endings)


if __name__ == "__main__":
    if sys.argv[1] == "--extension":
        sys.exit(0 if extension_is_here(sys.argv[2] == "editable") else 1)
    print("\n".join(problems(sys.argv[1])))
