"""From `EngineArgs` to a resolved configuration: the one place where a model's name becomes files and limits.

The frontend resolves; the engine core gets the result, as plain data where it runs in another process. Mirrors
`EngineArgs.create_engine_config` and `vllm/config/vllm.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig, WorkerConfig
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.core.scheduler import Scheduler
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import Tokenizer

_CLASS = "class:"
"""A class crosses a process line as this prefix, its module, a colon and its name."""


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

    def pack(self) -> dict[str, Any]:
        """The configuration as JSON has it, for another process.

        Raises:
            ConfigError: A class is defined where another process cannot import it.
        """
        return {field.name: _pack(field.name, getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> EngineConfig:
        """The configuration that `pack` was called on."""
        values = {name: _unpack(value) for name, value in packed.items()}
        model = ModelConfig(**values["model_config"])
        values["model_config"] = replace(model, path=Path(model.path), eos_token_ids=tuple(model.eos_token_ids))
        values["cache_config"] = CacheConfig(**values["cache_config"])
        values["scheduler_config"] = SchedulerConfig(**values["scheduler_config"])
        values["worker_config"] = WorkerConfig(**values["worker_config"])
        return cls(**values)


def _pack(name: str, value: Any) -> Any:
    if isinstance(value, (ModelConfig, CacheConfig, SchedulerConfig, WorkerConfig)):
        return {field.name: _pack(field.name, getattr(value, field.name)) for field in fields(value)}
    if not isinstance(value, type):
        return str(value) if isinstance(value, Path) else value
    if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
        raise ConfigError(
            f"{name} is {value.__qualname__}, which another process cannot import from where it is defined: put the class into "
            f"a module, or run the engine in this process (in_process=True)."
        )
    return f"{_CLASS}{value.__module__}:{value.__qualname__}"


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unpack(item) for name, item in value.items()}
    if not isinstance(value, str) or not value.startswith(_CLASS):
        return value
    module, _, name = value.removeprefix(_CLASS).partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
