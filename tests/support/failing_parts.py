"""Parts that fail in a worker, for the tests of executors; in a module, so that workers can import them."""

from __future__ import annotations

import os
import signal
import time

from minivllm.worker.sampler import Sampler


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
