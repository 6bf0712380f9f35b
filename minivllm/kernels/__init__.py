"""Operations on tensors. `reference` is the definition in plain torch; `triton` and `cpu` are fast where they run."""

from __future__ import annotations

import importlib.util


def has_cpu_kernels() -> bool:
    """Whether Numba is there, and works with this Python and numpy."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        from minivllm.kernels import cpu  # noqa: F401
    except ImportError:
        return False
    return True
