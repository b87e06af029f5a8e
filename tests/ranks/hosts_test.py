"""torchrun with several nodes on hosts that do not exist: network namespaces with rails of their
own (ci/hosts)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from c10d_nodes_test import pytestmark as needs_ucx

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "tc", "unshare", "setpriv", "mount")


def why_not() -> str:
    """Why this machine can make no hosts; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"ci/hosts needs {', '.join(missing)} (packages iproute2 and util-linux)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this system allows no network namespaces"


pytestmark = [needs_ucx, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.mark.parametrize(("hosts", "rails"), [(2, 2), (3, 1)])
def test_torchrun_on_several_hosts(hosts: int, rails: int) -> None:
    program = str(ROOT / "tests/ranks/hosts_program.py")
    command = [str(ROOT / "ci/hosts"), str(hosts), str(rails)]
    command += [sys.executable, "-m", "torch.distributed.run", program]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = [line.split("TIDE ", 1)[1] for line in done.stdout.splitlines() if "TIDE " in line]
    assert len(lines) == hosts * rails, done.stdout[-3000:]
    for line in lines:
        nodes = json.loads(line.split(" ", 1)[1])
        assert (nodes["nodes"], nodes["local_ranks"]) == (hosts, rails)
        # Local rank l talks over rail l, by the transport that was asked for.
        assert nodes["device"] == f"rail{nodes['local']}" and nodes["transport"] == "tcp"
        assert nodes["version"].startswith("UCX 1.")
