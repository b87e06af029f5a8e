"""Checks that what the root README.md names is there: ci/ commands and their options, `tide` verbs,
files, TIDE_ knobs."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def offences(text: str, root: Path) -> list[str]:
    found = []
    sources = "\n".join(
        path.read_text()
        for folder in ("python", "backend", "transports", "ci")
        for path in (root / folder).rglob("*")
        if path.suffix in {".py", ".cc", ".h", ".sh", ""}
        and path.is_file()
        and path != Path(__file__)
    )
    for command in sorted(set(re.findall(r"\b(\.?ci/[a-z_]+)(?![\w./])", text))):
        path = root / command
        if not path.exists():
            found.append(f"README.md names {command}, which is not there")
        elif path.is_file() and not path.stat().st_mode & 0o111:
            found.append(f"README.md names {command}, which is not executable")
    for script, rest in re.findall(r"\b(ci/[a-z_]+)((?: +-{2}[a-z-]+[^\n|`]*)+)", text):
        for option in re.findall(r"--[a-z-]+", rest):
            places = [root / script, root / "python/tide/demo.py"]
            if not any(path.is_file() and option in path.read_text() for path in places):
                found.append(f"README.md names {script} {option}, which that command does not know")
    verbs = set(re.findall(r"^(?: {4}|\$ )tide ([a-z]+)", text, re.M)) | set(
        re.findall(r"`tide ([a-z]+)", text)
    )
    for verb in sorted(verbs):
        if f'"{verb}"' not in (root / "python/tide/cli.py").read_text():
            found.append(f"README.md names `tide {verb}`, which python/tide/cli.py does not list")
    for knob in sorted(set(re.findall(r"\bTIDE_[A-Z_]+\b", text))):
        if knob not in sources:
            found.append(f"README.md names {knob}, which no source reads")
    table = root / "python/tide/knobs.py"
    declared = re.findall(r'Knob\(\s*"(TIDE_[A-Z_]+)"', table.read_text()) if table.exists() else []
    for knob in declared:
        if knob not in text:
            found.append(f"README.md leaves out {knob}, which python/tide/knobs.py declares")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        if not (root / link).exists():
            found.append(f"README.md links to {link}, which is not there")
    return found


def main() -> int:
    found = offences((ROOT / "README.md").read_text(), ROOT)
    print("\n".join(found) or "what README.md names is there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
