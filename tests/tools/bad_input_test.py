"""What every verb says to what it cannot work with: one sentence, exit code 2, nothing on stdout,
no file made."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tide import cli

CALL = {"sequence": 1, "kind": "gather", "subject": "a", "state": "done", "microseconds": 1}
GROUP = {"group": "0", "rank": 0, "ranks": 2, "error": None}


def dump(**changes: object) -> str:
    return json.dumps({"tide": 1, "groups": [{**GROUP, "operations": [CALL], **changes}]})


FILES = {
    "words.json": b"hello",
    "empty.json": b"",
    "object.json": b'{"a": 1}',
    "torn.json": b'{"traceEvents": [{"ph": "X", "cat": "kern',
    "untimed.json": b'{"traceEvents": [{"ph": "X", "ts": "soon"}, {"ph": "M"}]}',
    "deep.json": b'{"traceEvents": [' + b"[" * 200_000,
    "binary.json": bytes(range(256)),
    "torn.gz": gzip.compress(b'{"traceEvents": [')[:12],
    "no.gz": b"\x1f\x8bhello",
    "groups.json": b'{"tide": 1}',
    "group.json": b'{"tide": 1, "groups": [3]}',
    "calls.json": dump(operations=[{**CALL, "kind": None}]).encode(),
    "waits.json": dump(operations=[{**CALL, "waiting": 3}]).encode(),
    "rank.json": dump(rank="none").encode(),
    "script.py": b"print('hello')",
    "binary.py": bytes(range(256)),
    "broken.py": b"def f(:",
}
CASES = [
    # advise
    ("advise", "TRACES"),
    ("advise nofile", "there is no trace nofile"),
    ("advise folder", "no trace (*.json, *.json.gz) in folder"),
    ("advise words.json", "it begins with 'hello'"),
    ("advise empty.json", "there is nothing in it"),
    ("advise object.json", "no list traceEvents"),
    ("advise torn.json", "no event that says when"),
    ("advise untimed.json", "no event that says when"),
    ("advise deep.json", "no event that says when"),
    ("advise binary.json", "no chrome trace"),
    ("advise torn.gz", "no chrome trace"),
    ("advise no.gz", "its gzip data cannot be read"),
    ("advise object.json --out step", "names no picture"),
    ("advise object.json --out step.doc", "names no picture"),
    ("advise object.json --out nofolder/step.png", "there is no folder nofolder"),
    ("advise object.json --threshold -1", "--threshold"),
    ("advise object.json --threshold nan", "finite"),
    ("advise object.json --tokens 5", "belong together"),
    ("advise object.json --parameters 0 --tokens 5", "--parameters"),
    ("advise object.json --parameters inf --tokens 5", "finite"),
    # explain
    ("explain", "DUMPS"),
    ("explain nofile", "there is no file nofile"),
    ("explain folder", "no flight record"),
    ("explain words.json", "words.json is not a flight record"),
    ("explain empty.json", "not a flight record"),
    ("explain deep.json", "not a flight record"),
    ("explain binary.json", "not a flight record"),
    ("explain groups.json", "not a flight record"),
    ("explain group.json", "not a flight record"),
    ("explain calls.json", "not a flight record"),
    ("explain waits.json", "not a flight record"),
    ("explain rank.json", "not a flight record"),
    # check: what happens inside the script is in check_test.py
    ("check", "TARGET"),
    ("check nofile.py", "there is no script nofile.py"),
    ("check folder", "there is no script folder"),
    ("check script.py --ranks 0", "--ranks"),
    ("check script.py --ranks -8", "--ranks"),
    ("check script.py --ranks many", "--ranks"),
    ("check script.py --ranks 8 --local-ranks 3", "cannot be cut"),
    ("check script.py --local-ranks 0", "--local-ranks"),
    ("check script.py --device tpu", "--device"),
    ("check script.py --timeout 0", "--timeout"),
    ("check script.py --steps 3", "--steps"),
    ("check broken.py", "SyntaxError"),
    ("check binary.py", "cannot be checked"),
    # parity: what happens inside the script is in parity_test.py
    ("parity", "SCRIPT"),
    ("parity nofile.py", "there is no script nofile.py"),
    ("parity folder", "there is no script folder"),
    ("parity script.py --ranks 0", "--ranks"),
    ("parity script.py --window 0", "--window"),
    ("parity script.py --from-step -1", "--from-step"),
    ("parity script.py --seed -1", "--seed"),
    ("parity script.py --steps 3", "--steps"),
    ("parity script.py --out words.json", "no folder can be made at words.json"),
    ("parity script.py --out words.json/inside", "no folder can be made"),
    # bench
    ("bench --ranks 1", "--ranks"),
    ("bench --ranks -4", "--ranks"),
    ("bench --case speed", "speed"),
    ("bench --repetitions 0", "--repetitions"),
    ("bench --operation-mib 0", "--operation-mib"),
    ("bench --path-mib -1", "--path-mib"),
    ("bench --seconds -1", "--seconds"),
    ("bench --out nofolder/found", "there is no folder nofolder"),
    # doctor; simulate has its own in simulate_test.py
    ("doctor --timeout 0", "--timeout"),
    ("doctor now", "now"),
    ("simulate --gpus 0", "--gpus"),
    ("simulate --out step.doc", "names no picture"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "said"), CASES)
def test_one_sentence_and_2(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    spoken = capsys.readouterr()
    assert left.value.code == 2, spoken.err
    assert spoken.out == ""
    sentences = [line for line in spoken.err.splitlines() if not line.startswith("running ")]
    assert len(sentences) == 1 and sentences[0].startswith("tide: "), spoken.err
    assert said in sentences[0]
    assert sorted(path for path in folder.rglob("*") if path.name != "__pycache__") == before


@pytest.mark.parametrize("words", ["advise good.json --out step.png", "explain good.json"])
def test_what_is_left_out_leaves_the_rest(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """The same files beside good ones: a foreign trace is refused by name, a foreign dump left
    out."""
    good = dump() if words.startswith("explain") else '[{"ph": "X", "cat": "kernel", "ts": 1}]'
    (folder / "good.json").write_text(good)
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    assert left.value.code == 0
    with pytest.raises(SystemExit) as left:
        cli.main([*words.split(), "object.json"])
    spoken = capsys.readouterr()
    if words.startswith("advise"):
        assert left.value.code == 2 and "object.json is no chrome trace" in spoken.err
    else:
        assert left.value.code == 0 and "left out: object.json" in spoken.out


def test_a_full_disk_is_a_sentence(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "step.png").symlink_to("/dev/full")
    (folder / "good.json").write_text('[{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1}]')
    with pytest.raises(SystemExit) as left:
        cli.main(["advise", "good.json", "--out", "step.png"])
    spoken = capsys.readouterr()
    assert left.value.code == 2
    assert spoken.err.strip() == "tide: No space left on device"
