"""The entry point of a worker's process: `python -m minivllm.executor.worker_main`. Large imports wait until the urgent part is done.

The process ends when its inbox closes or its parent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import msgspec

from minivllm.errors import DistributedError
from minivllm.executor.worker_messages import WorkerSetup

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the setup from standard input and run."""
    if sys.platform == "linux":  # has this process killed when its parent ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(1)  # the parent has ended already
    setup = msgspec.json.decode(line, type=WorkerSetup)
    if os.getppid() != setup.parent:
        sys.exit(1)
    sys.path[:] = setup.sys_path
    from minivllm.executor.worker_proc import WorkerProc

    with contextlib.suppress(DistributedError):  # the executor has ended
        WorkerProc(setup).run()
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed would wait for dead ranks


if __name__ == "__main__":
    main()
