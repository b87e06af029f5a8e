"""Makes this folder's own helpers importable, and imports before any fork what every rank needs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tide.fsdp.report  # noqa: F401
import torch._dynamo
import torch._dynamo.backends.debugging
import torch._dynamo.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.onnx
import torch.profiler  # noqa: F401
