"""A backend that is late in one process, and stages that wait for a second only, for the tests of executors. Workers import it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from minivllm.distributed.shared_memory_pipeline import SharedMemoryPipeline
from minivllm.layers.attention_backends import TorchAttentionBackend

if "LATE_PROCESS" in os.environ:
    SharedMemoryPipeline.__init__.__defaults__ = (1.0,)


class LateBackend(TorchAttentionBackend):
    """Takes a minute in the process whose number stands in the file that `LATE_PROCESS` names."""

    def forward(self, *arguments):
        file = Path(os.environ["LATE_PROCESS"])
        if file.exists() and file.read_text() == str(os.getpid()):
            time.sleep(60)
        return super().forward(*arguments)
