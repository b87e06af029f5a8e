"""Makes the helpers of this folder and of tests/fsdp importable, and imports before any fork what
the ranks need."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "fsdp"))
sys.path.insert(0, str(Path(__file__).parent))

import tide.fsdp.report  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils._foreach_utils  # noqa: F401
