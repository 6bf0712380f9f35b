"""What an engine is made to do: `EngineArgs` as the user gives them, and the checked configs made from them.

Arguments are spelled as in vLLM (`vllm/engine/arg_utils.py`), so that a person who knows it guesses every name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError

POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("recompute", "swap")
QUANTIZATIONS = ("int8", "int4")
DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """What the engine must know of a model: the shape of its cache, its limits and where it lies.

    `hf_config` is the content of its config.json, which the model class reads for everything else.
    """

    name: str
    path: Path
    architecture: str
    hf_config: dict[str, Any]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class CacheConfig:
    """How the KV cache is cut up and how much memory it may take."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space_bytes: int = 0
    enable_prefix_caching: bool = False
    watermark: float = 0.01


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler's limits and policies.

    Args:
        max_num_seqs: The most sequences in one step.
        max_num_batched_tokens: The most tokens in one step.
        policy: "fcfs", or "priority" (smaller first, then arrival).
        enable_chunked_prefill: Fill one token budget with decodes and chunks of prompts, instead of steps that are
            either prefill or decode.
        preemption_mode: What happens to the latest arrival when blocks run out: "recompute" or "swap".
        num_speculative_tokens: The most draft tokens that a sequence verifies in one step; 0 is no speculative decoding.
        prompt_lookup_max, prompt_lookup_min: The longest and the shortest n-gram by which drafts are found.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    policy: str = "fcfs"
    enable_chunked_prefill: bool = False
    preemption_mode: str = "recompute"
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}), so not every running sequence could get its token: raise the one or lower the other."
            )
        _check_at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _check_at_least("prompt_lookup_max", self.prompt_lookup_max, 1)
        _check_at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        if self.prompt_lookup_max > 32:
            raise ConfigError(
                f"prompt_lookup_max is {self.prompt_lookup_max}, but must be at most 32: longer n-grams find nothing new."
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max ({self.prompt_lookup_max}), so no "
                f"n-gram would be looked up: lower the one or raise the other."
            )


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker computes on, and with; see `EngineArgs`."""

    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str | type = "auto"
    enforce_eager: bool = False
    quantization: str | None = None
    low_memory: bool = False


@dataclass
class EngineArgs:
    """Everything an engine can be told. Only `model` is needed.

    Args:
        model: A known name ("smollm2-135m"), a folder with config.json, safetensors and tokenizer files, a .gguf
            file, or a Hugging Face name.
        dtype: Of weights, activations and cache; "auto" is float32 on a CPU, else what the model was saved in.
        device: "auto", "cpu" or "cuda".
        seed: From it come the random streams of requests that have no seed of their own.
        max_model_len: The most tokens of prompt and output together. None: what the model was trained for.
        block_size: Tokens in a cache block.
        gpu_memory_utilization: Fraction of the GPU's memory for weights, activations and cache together. On a CPU: of
            the memory that is still free when the weights are loaded, and 4 GiB at most.
        kv_cache_memory_bytes: Bytes for the cache on the device, instead of working them out.
        num_gpu_blocks_override: Number of device blocks, instead of working it out.
        swap_space: GiB of host memory for swapped sequences; used with `preemption_mode="swap"` only.
        enable_prefix_caching: Reuse the computed beginning of earlier prompts.
        max_num_seqs: The most sequences in one step.
        max_num_batched_tokens: The most tokens in one step. None: 2,048, or `max_model_len` if that is more and
            prompts are not cut into chunks.
        enable_chunked_prefill: Mix decodes and chunks of prompts in one step.
        scheduling_policy: "fcfs" or "priority".
        preemption_mode: "recompute" or "swap".
        num_speculative_tokens: Guess so many tokens ahead and verify them in one step (speculative decoding by prompt
            lookup); the tokens stay the same. 0 turns it off; requests with penalties do without.
        prompt_lookup_max: Guesses are what followed the last time that the newest so many tokens occurred.
        prompt_lookup_min: If they have not occurred before, fewer of them are looked up, down to so many.
        skip_tokenizer_init: Load no tokenizer; prompts are token ids, and outputs have no text.
        scheduler_cls: The class to use as scheduler, for example `StaticBatchScheduler` or a learner's own.
        block_space_manager_cls: The class to use as block space manager.
        attention_backend: "auto", "torch", "cpu" or "triton", or an `AttentionBackend` subclass of your own. "auto" is
            "triton" on a GPU and "cpu" (Numba) without one; "triton" without a GPU runs interpreted, very slowly.
        enforce_eager: On a GPU, launch the kernels of a decode one by one instead of replaying a captured CUDA graph.
        quantization: On a CPU, the bits of the weights: "int8", or "int4" for one or a few
            sequences at a time (it is slow with long prompts and many sequences). None computes with the weights as they are.
        low_memory: On a CPU, keep the weights as they are instead of packing them for small batches: slower, but the head has no
            copy beside the embedding, and loading needs no second copy of anything.
        trace: Record what the engine does in each step, in `llm.llm_engine.trace`.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space: float = 1.0
    enable_prefix_caching: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = False
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    skip_tokenizer_init: bool = False
    scheduler_cls: type | None = None
    block_space_manager_cls: type | None = None
    attention_backend: str | type = "auto"
    enforce_eager: bool = False
    quantization: str | None = None
    low_memory: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_at_least("block_size", self.block_size, 1)
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        for name in ("gpu_memory_utilization", "swap_space"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{name} is {value!r}, but must be a finite number.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed is {self.seed!r}, but must be a whole number.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, but is a fraction of the memory: use a value in (0, 1]."
            )
        if self.swap_space < 0:
            raise ConfigError(f"swap_space is {self.swap_space} GiB: use 0 or more.")

    @classmethod
    def help_for(cls, name: str) -> str:
        """The sentence that the docstring has for an argument, for the command line's --help."""
        lines = (cls.__doc__ or "").split("\n")
        start = next(i for i, line in enumerate(lines) if line.startswith(f"        {name}: "))
        text = [lines[start].split(": ", 1)[1]]
        for line in lines[start + 1 :]:
            if not line.startswith("            "):
                break
            text.append(line.strip())
        return " ".join(text)

    def cache_config(self) -> CacheConfig:
        """The part that concerns the KV cache."""
        uses_swap = self.preemption_mode == "swap"
        return CacheConfig(
            block_size=self.block_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            swap_space_bytes=int(self.swap_space * 2**30) if uses_swap else 0,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The part that concerns the scheduler, for a model of that length."""
        max_num_batched_tokens = self.max_num_batched_tokens
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(2048, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        if not self.enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, but a prompt may have up to max_model_len = "
                f"{max_model_len} tokens and must fit in one step: raise it, lower max_model_len, or set enable_chunked_prefill=True."
            )
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=self.scheduling_policy,
            enable_chunked_prefill=self.enable_chunked_prefill,
            preemption_mode=self.preemption_mode,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=self.prompt_lookup_min,
        )

    def worker_config(self) -> WorkerConfig:
        """The part that concerns a device."""
        return WorkerConfig(**{field.name: getattr(self, field.name) for field in fields(WorkerConfig)})

    @classmethod
    def names(cls) -> list[str]:
        """The names of all arguments."""
        return [f.name for f in fields(cls)]


def _check_at_least(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {value!r}, but must be a whole number of at least {low}.")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}.")
