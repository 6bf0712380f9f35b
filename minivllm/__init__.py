"""minivllm: an LLM serving engine with vLLM's architecture, small enough to read, and a course that builds it."""

import os
import sys
from typing import TYPE_CHECKING, Any

OPENMP_SPINS = "10000"
"""How long torch's idle threads spin. The default, milliseconds, would slow down our own threads. OpenMP reads it when torch is imported."""
if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = OPENMP_SPINS

__version__ = "1.0.0"

if TYPE_CHECKING:
    from minivllm.config import EngineArgs as EngineArgs
    from minivllm.core.scheduler import Scheduler as Scheduler
    from minivllm.core.static_batching import StaticBatchScheduler as StaticBatchScheduler
    from minivllm.engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from minivllm.engine.llm_engine import LLMEngine as LLMEngine
    from minivllm.engine.trace import EngineTrace as EngineTrace
    from minivllm.entrypoints.llm import LLM as LLM
    from minivllm.executor.simulated import SimulatedExecutor as SimulatedExecutor
    from minivllm.executor.simulated import VirtualClock as VirtualClock
    from minivllm.models.registry import ModelRegistry as ModelRegistry
    from minivllm.outputs import CompletionOutput as CompletionOutput
    from minivllm.outputs import RequestOutput as RequestOutput
    from minivllm.sampling_params import SamplingParams as SamplingParams
    from minivllm.sampling_params import StructuredOutputsParams as StructuredOutputsParams

_MODULES = {
    "LLM": "entrypoints.llm",
    "AsyncLLMEngine": "engine.async_llm_engine",
    "CompletionOutput": "outputs",
    "EngineArgs": "config",
    "EngineTrace": "engine.trace",
    "LLMEngine": "engine.llm_engine",
    "ModelRegistry": "models.registry",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "Scheduler": "core.scheduler",
    "SimulatedExecutor": "executor.simulated",
    "StaticBatchScheduler": "core.static_batching",
    "StructuredOutputsParams": "sampling_params",
    "VirtualClock": "executor.simulated",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import on first use: `import minivllm` alone, or a look at the scheduler, does not wait for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"minivllm.{_MODULES[name]}"), name)
