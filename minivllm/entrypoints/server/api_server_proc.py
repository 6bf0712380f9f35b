"""The process of a further API server; see `ApiServerProcesses`."""

from __future__ import annotations

import os
import pickle
import socket
import sys

from minivllm.executor.processes import LifeSigns, exit_with_parent, read_setup


def main(signs: LifeSigns) -> int:
    """Read the setup from standard input, and serve until told to stop. Returns the exit status."""
    # Not above: they take seconds, in which this process shows signs of life.
    from minivllm.engine.async_llm_engine import AsyncLLMEngine
    from minivllm.engine.metrics import SHARED_METRICS
    from minivllm.entrypoints.server.launcher import ApiServer, ApiServerSetup, freeze_heap
    from minivllm.entrypoints.server.request_log import configure_logging
    from minivllm.entrypoints.server.state import ServerState
    from minivllm.errors import MinivllmError

    setup = read_setup(ApiServerSetup)
    exit_with_parent(setup.place.folder, os.environ[SHARED_METRICS])
    configure_logging(setup.settings.log_level)
    try:
        engine = AsyncLLMEngine.join(pickle.loads(setup.config), setup.place, setup.settings.seed)
    except MinivllmError as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 1
    try:
        with socket.socket(fileno=setup.listener) as listener:
            server = ApiServer(ServerState(engine, setup.settings), listener.getsockname(), signs=signs)
            freeze_heap()
            server.run(sockets=[listener])
    finally:
        engine.shutdown()
    return server.exit_status


if __name__ == "__main__":
    sys.exit(main(LifeSigns()))
