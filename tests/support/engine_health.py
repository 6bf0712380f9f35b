"""Whether an engine says that it is alive."""

from __future__ import annotations

from minivllm.errors import EngineDeadError


def is_healthy(engine):
    try:
        engine.check_health()
    except EngineDeadError:
        return False
    return True
