"""From `EngineArgs` to a resolved configuration: the one place where a model's name becomes files and limits.

The frontend resolves; the engine core gets the result, as plain data where it runs in another process. Mirrors
`EngineArgs.create_engine_config` and `vllm/config/vllm.py`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig, WorkerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine needs to know, resolved and checked."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    worker_config: WorkerConfig
    scheduler_cls: type[Scheduler] = Scheduler
    block_space_manager_cls: type[BlockSpaceManager] = BlockSpaceManager
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
        from minivllm.models.registry import load_model_config

        for name in ("scheduler_cls", "block_space_manager_cls"):
            plugin = getattr(args, name)
            if plugin is not None and not isinstance(plugin, type):
                raise ConfigError(f"{name} must be a class, not {plugin!r}.")
        model_config = load_model_config(str(args.model), resolve_model(args.model), args.max_model_len)
        return cls(
            model_config,
            args.cache_config(),
            args.scheduler_config(model_config.max_model_len),
            args.worker_config(),
            args.scheduler_cls or Scheduler,
            args.block_space_manager_cls or BlockSpaceManager,
            not args.skip_tokenizer_init,
        )

    def load_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init.

        Raises:
            ModelLoadError: The model's folder has none that can be read.
        """
        from minivllm.engine.tokenizer import Tokenizer  # the engine core knows no text

        return Tokenizer(self.model_config.path) if self.has_tokenizer else None

    def to_bytes(self) -> bytes:
        """The configuration for another process that we start ourselves, which reads it with `pickle.loads`.

        Raises:
            ConfigError: A class is defined where another process cannot import it.
        """
        plugins = {
            "scheduler_cls": self.scheduler_cls,
            "block_space_manager_cls": self.block_space_manager_cls,
            "attention_backend": self.worker_config.attention_backend,
            "the registered model class": self.model_config.model_cls,
        }
        for name, plugin in plugins.items():
            if isinstance(plugin, type) and (plugin.__module__ == "__main__" or "<locals>" in plugin.__qualname__):
                raise ConfigError(
                    f"{name} is {plugin.__qualname__}, which another process cannot import from where it is defined: put the "
                    f"class into a module, or run the engine in this process (in_process=True)."
                )
        return pickle.dumps(self)
