"""From `EngineArgs` to a resolved configuration: the one place where a model's name becomes files and limits.

The frontend resolves; the engine core gets the result, as plain data where it runs in another process. Mirrors
`EngineArgs.create_engine_config` and `vllm/config/vllm.py`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.pipeline_scheduler import choose_scheduler
from minivllm.core.scheduler import Scheduler
from minivllm.errors import ConfigError
from minivllm.executor.base import Executor
from minivllm.executor.processes import check_classes

if TYPE_CHECKING:
    from minivllm.engine.detokenizer import IncrementalDetokenizer
    from minivllm.engine.tokenizer import Tokenizer


PLUGINS = {
    "scheduler_cls": ("schedule", "update"),
    "block_space_manager_cls": ("allocate", "free"),
    "sampler_cls": ("sample",),
    "detokenizer_cls": ("update", "finish"),
}
"""Arguments that are classes, and methods without which there is no point in starting."""


def public_name(model: str) -> str:
    """How a model is called where others see it: not by the path of its folder."""
    path = Path(model)
    return path.absolute().name if path.exists() or path.is_absolute() else model


def check_plugin(name: str, plugin: Any, methods: tuple[str, ...]) -> None:
    """Raise a ConfigError unless this is None or a class with these methods."""
    if plugin is None:
        return
    if not isinstance(plugin, type):
        raise ConfigError(f"{name} must be a class, not {plugin!r}.")
    missing = [method for method in methods if not callable(getattr(plugin, method, None))]
    if missing:
        raise ConfigError(
            f"{name} is {plugin.__name__}, which has no method {' and no method '.join(missing)}: the engine calls it."
        )


def check_steps_in_flight(args: EngineArgs) -> None:
    """Raise a ConfigError if the arguments ask for steps in flight where that is impossible."""
    scheduler_cls = args.scheduler_cls or AsyncScheduler
    if args.pipeline_parallel_size > 1:
        obstacle = "pipeline stages have steps in flight of their own"
    elif not issubclass(scheduler_cls, AsyncScheduler):
        obstacle = f"scheduler_cls is {scheduler_cls.__name__}, which is no AsyncScheduler"
    elif args.block_space_manager_cls is not None:
        obstacle = f"block_space_manager_cls is {args.block_space_manager_cls.__name__}, which may not know of steps in flight"
    else:
        return
    if args.async_scheduling:
        raise ConfigError(f"async_scheduling is on, but {obstacle}: leave it out.")
    if args.pipeline_parallel_size > 1 and args.block_space_manager_cls is not None:
        raise ConfigError(
            f"pipeline_parallel_size is {args.pipeline_parallel_size}, but block_space_manager_cls is "
            f"{args.block_space_manager_cls.__name__}, which may not know of steps in flight: leave one of them out."
        )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine needs to know, resolved and checked."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    worker_config: WorkerConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_cls: type[Scheduler] = Scheduler
    block_space_manager_cls: type[BlockSpaceManager] = BlockSpaceManager
    detokenizer_cls: type[IncrementalDetokenizer] | None = None
    has_tokenizer: bool = True

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> EngineConfig:
        """Resolve the model and check that the arguments fit together.

        Raises:
            ModelLoadError: The model cannot be found or used.
            ConfigError: The arguments cannot work together.
        """
        # Imported here, so that an engine on a simulated executor does not load torch.
        from minivllm.models.hub import resolve_model
        from minivllm.models.registry import check_can_be_split, load_model_config, load_sampling_defaults
        from minivllm.models.windows import cache_window

        for name, methods in PLUGINS.items():
            check_plugin(name, getattr(args, name), methods)
        if args.served_model_name is not None and not (args.served_model_name.strip() and args.served_model_name.isprintable()):
            raise ConfigError(f"served_model_name is {args.served_model_name!r}, but must be printable characters.")
        folder = resolve_model(args.model, with_weights=args.load_format != "dummy")
        model_config = load_model_config(str(args.model), folder, args.max_model_len)
        name = args.served_model_name or public_name(str(args.model))
        model_config = replace(model_config, name=name, load_format=args.load_format)
        if args.generation_config == "auto":
            model_config = replace(model_config, sampling_defaults=load_sampling_defaults(model_config.path))
        parallel_config = args.parallel_config()
        check_can_be_split(model_config, parallel_config)
        check_steps_in_flight(args)
        scheduler_config = args.scheduler_config(model_config.max_model_len)
        if args.scheduler_cls is None and args.block_space_manager_cls is None:  # another class may not know of freed blocks
            scheduler_config = replace(scheduler_config, window=cache_window(model_config))
        return cls(
            model_config,
            args.cache_config(),
            scheduler_config,
            args.worker_config(),
            parallel_config,
            args.scheduler_cls or choose_scheduler(scheduler_config),
            args.block_space_manager_cls or BlockSpaceManager,
            args.detokenizer_cls,
            not args.skip_tokenizer_init,
        )

    def load_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init.

        Raises:
            ModelLoadError: The model's folder has none that can be read.
        """
        from minivllm.engine.tokenizer import Tokenizer  # the engine core knows no text

        return Tokenizer(self.model_config.path) if self.has_tokenizer else None

    def make_executor(self) -> Executor:
        """The executor, with the model loaded, or being loaded by other processes."""
        configs = (self.model_config, self.cache_config, self.scheduler_config, self.worker_config)
        if self.parallel_config.distributed_executor_backend == "ray":
            from minivllm.executor.ray import RayExecutor

            return RayExecutor(*configs, self.parallel_config)
        if self.parallel_config.uses_processes:
            from minivllm.executor.multiproc import MultiProcExecutor

            return MultiProcExecutor(*configs, self.parallel_config)
        from minivllm.executor.uniproc import UniProcExecutor  # a core on another executor does not load torch

        return UniProcExecutor(*configs)

    def to_bytes(self) -> bytes:
        """The configuration for another process that we start ourselves, which reads it with `pickle.loads`.

        Raises:
            ConfigError: A class is defined where another process cannot import it.
        """
        config = replace(self, detokenizer_cls=None)  # text stays in the frontend
        check_classes(config)
        return pickle.dumps(config)
