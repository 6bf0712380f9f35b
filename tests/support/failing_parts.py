"""Parts that fail in a worker, for the tests of executors; in a module, so that workers can import them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from minivllm.layers.attention_backends import TorchAttentionBackend
from minivllm.models.llama import LlamaForCausalLM
from minivllm.worker.sampler import Sampler


class FailingBackend(TorchAttentionBackend):
    """Fails in the process whose number stands in the file that `FAILING_PROCESS` names; others go on to where they wait for it."""

    def forward(self, *arguments):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it at any time
            if Path(os.environ["FAILING_PROCESS"]).read_text() == str(os.getpid()):
                raise ZeroDivisionError("attention has failed")
        return super().forward(*arguments)


class FailingOnceBackend(FailingBackend):
    """Fails once: the process could go on, while others still wait for it in the step that failed."""

    def forward(self, *arguments):
        try:
            return super().forward(*arguments)
        except ZeroDivisionError:
            Path(os.environ["FAILING_PROCESS"]).unlink()
            raise


class FailingSampler(Sampler):
    """Fails for requests whose seed is 13, on the one rank that samples; kills its process for seed 14, and is slow for 15."""

    def sample(self, logits, rows):
        seeds = {row.seq.request.seed for row in rows}
        if 13 in seeds:
            raise ZeroDivisionError("the sampler has failed")
        if 14 in seeds:
            os.kill(os.getpid(), signal.SIGKILL)
        if 15 in seeds:
            time.sleep(0.2)
        return super().sample(logits, rows)


class HalfAsSure(LlamaForCausalLM):
    """Changes the logits without a word about ranks that have none."""

    def compute_logits(self, hidden):
        return super().compute_logits(hidden) / 2
