"""FSDP2 on tide: the seam that lets `fully_shard` modules use slots and layout collectives.

`install()` is called when the first tide process group of a process is created. Nothing here is
needed by user code; `tide.report(model)` shows what became of each parameter group.
"""

from tide.fsdp.seam import install, installed, refusal, uninstall

__all__ = ["install", "installed", "refusal", "uninstall"]
