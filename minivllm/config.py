"""Configuration: `EngineArgs`, as the user gives them, and the validated configs made from them.

Arguments are spelled as in vLLM (`vllm/engine/arg_utils.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from minivllm.config_checks import check_at_least as check_at_least
from minivllm.config_checks import check_choice as check_choice
from minivllm.errors import ConfigError
from minivllm.parallel_config import EXECUTOR_BACKENDS as EXECUTOR_BACKENDS
from minivllm.parallel_config import PLACEMENT_STRATEGIES as PLACEMENT_STRATEGIES
from minivllm.parallel_config import REPLICA_BACKENDS as REPLICA_BACKENDS
from minivllm.parallel_config import ROUTINGS as ROUTINGS
from minivllm.parallel_config import ParallelConfig as ParallelConfig

POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("recompute", "swap")
QUANTIZATIONS = ("int8",)
GENERATION_CONFIGS = ("auto", "vllm")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "float16", "bfloat16")
LONGEST_WHOLE_PROMPT = 65_536
"""Tokens of a context beyond which prefill is chunked unless told otherwise: the activations of one step would take many gigabytes."""


@dataclass(frozen=True)
class ModelConfig:
    """What the engine needs to know about a model: its public name, where its files are, the shape of its KV cache, and its limits.

    `hf_config` is the content of its config.json; the model class reads everything else from there. `model_cls` is that class, as
    registered when the config was read; later registrations do not change it.
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
    model_cls: type | None = None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    """What its generation_config.json recommends, by the names of `SamplingParams`; empty if that is not to be used."""
    load_format: str = "auto"
    """See `EngineArgs`."""


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache: block size, memory and features."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space_bytes: int = 0
    enable_prefix_caching: bool = False
    watermark: float = 0.01

    def __post_init__(self) -> None:
        check_at_least("block_size", self.block_size, 1)
        if not isinstance(self.watermark, (int, float)) or not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark!r}, but is a fraction of the blocks: use a value in [0, 1).")


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler's limits and policies.

    Args:
        max_num_seqs: Maximum number of sequences per step.
        max_num_batched_tokens: Maximum number of tokens per step.
        policy: "fcfs", or "priority" (smaller values first, then by arrival).
        priority_preemption: With "priority", preempt running sequences for waiting ones whose value is strictly smaller.
        enable_chunked_prefill: Fill one token budget with decodes and prefill chunks, instead of steps that are
            either prefill or decode.
        preemption_mode: How the latest arrival is preempted when blocks run out: "recompute" or "swap".
        num_speculative_tokens: Maximum number of draft tokens a sequence verifies per step; 0 turns speculative decoding off.
        prompt_lookup_max, prompt_lookup_min: Longest and shortest n-gram used to look up draft tokens.
        async_scheduling: Whether the next step is scheduled while the device computes this one.
        pipeline_parallel_size: The number of pipeline stages, each with a batch of its own.
        window: How many tokens back any layer of the model sees, itself included; cache blocks before them are freed while a sequence runs. 0 if a
            layer sees all.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    policy: str = "fcfs"
    priority_preemption: bool = True
    enable_chunked_prefill: bool = False
    preemption_mode: str = "recompute"
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    async_scheduling: bool = False
    pipeline_parallel_size: int = 1
    window: int = 0

    def __post_init__(self) -> None:
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_choice("policy", self.policy, POLICIES)
        check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        check_at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}), so some running sequences would never get a token: raise the former or lower the latter."
            )
        check_at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        check_at_least("window", self.window, 0)
        check_at_least("prompt_lookup_max", self.prompt_lookup_max, 1)
        check_at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        if self.prompt_lookup_max > 32:
            raise ConfigError(
                f"prompt_lookup_max is {self.prompt_lookup_max}, but must be at most 32: longer ones match no more."
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max ({self.prompt_lookup_max}), so no "
                f"n-gram would be looked up: lower the former or raise the latter."
            )

    def may_exceed_cache(self, cache_tokens: int, block_size: int) -> bool:
        """Whether a sequence may have more tokens than the whole cache: a window and the tokens of a step have room in it, and prompts are computed in
        chunks (after a preemption, a sequence is a prompt again)."""
        # The first and the last block may hold one of these tokens each.
        num_held = self.window + self.max_num_batched_tokens + 2 * block_size
        return self.window > 0 and self.enable_chunked_prefill and num_held <= cache_tokens

    def check_prompts_fit(self, max_model_len: int) -> None:
        """Raise a ConfigError if a prompt can be too long for one step, and may not be computed in chunks."""
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but a prompt may have up to max_model_len = "
                f"{max_model_len} tokens and must fit in one step: raise it, lower max_model_len, or set enable_chunked_prefill=True."
            )


@dataclass(frozen=True)
class WorkerConfig:
    """Device, dtype and kernels of a worker; see `EngineArgs`."""

    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str | type = "auto"
    enforce_eager: bool = False
    quantization: str | None = None
    sampler_cls: type | None = None


_Config = TypeVar("_Config", CacheConfig, SchedulerConfig, WorkerConfig, ParallelConfig)


def _arg(default: Any, help: str) -> Any:
    """A field of `EngineArgs` with its help, which the command line shows, too. (`python -OO` drops docstrings.)"""
    return field(default=default, metadata={"help": help})


@dataclass
class EngineArgs:
    """Everything an engine can be configured with. Each argument has its description next to its default."""

    model: str = _arg(
        "smollm2-135m",
        'A known name ("smollm2-135m"), a folder with config.json, safetensors and tokenizer files, a .gguf file, or a Hugging '
        "Face name.",
    )
    served_model_name: str | None = _arg(
        None, "Name of the model in the API, metrics and traces. None: the one above, of a folder its last part."
    )
    generation_config: str = _arg(
        "auto",
        'Sampling defaults: "auto" takes temperature, top_p and others from the model\'s generation_config.json where a request leaves them out; '
        '"vllm" ignores that file.',
    )
    load_format: str = _arg(
        "auto",
        '"auto": the weights of the model\'s files; "dummy": random weights, always the same ones, of which no file is needed or downloaded.',
    )
    dtype: str = _arg(
        "auto",
        'Data type of weights, activations and KV cache; "auto" is float32 on a CPU, otherwise what the model was saved in. '
        "With bfloat16 on a CPU, activations stay float32 where the weights are packed or quantized.",
    )
    device: str = _arg("auto", '"auto", "cpu" or "cuda".')
    seed: int = _arg(0, "Seed for the random streams of requests that have no seed of their own.")
    max_model_len: int | None = _arg(
        None, "Maximum length of prompt plus output, in tokens. None: the length the model was trained for."
    )
    block_size: int = _arg(16, "Tokens per KV-cache block.")
    gpu_memory_utilization: float = _arg(
        0.9,
        "Fraction of the GPU's memory for weights, activations and KV cache together. On a CPU: fraction of the memory that is "
        "free after loading the weights, up to 4 GiB.",
    )
    kv_cache_memory_bytes: int | None = _arg(
        None, "Size of the KV cache on the device, in bytes, instead of profiling; of each worker's part, if there are several."
    )
    num_gpu_blocks_override: int | None = _arg(None, "Number of device blocks, instead of profiling.")
    swap_space: float = _arg(
        1.0,
        'Host memory for swapped sequences, in GiB; of each worker, used only with preemption_mode="swap". With a GPU, all of it is '
        "taken and pinned at the start.",
    )
    enable_prefix_caching: bool = _arg(False, "Reuse the KV blocks of earlier prompts that start the same way.")
    max_num_seqs: int = _arg(256, "Maximum number of sequences per step.")
    max_num_batched_tokens: int | None = _arg(
        None,
        "Maximum number of tokens per step. None: 2,048, or max_model_len if that is larger and prefill is not chunked; "
        "`minivllm serve` on a CPU: 256, or max_num_seqs + 128 if that is larger; on a GPU: 1,024, or max_num_seqs + 512.",
    )
    enable_chunked_prefill: bool | None = _arg(
        None,
        f"Mix decodes and prefill chunks in one step. None: if max_model_len is more than {LONGEST_WHOLE_PROMPT:,}; `minivllm serve`: always.",
    )
    scheduling_policy: str = _arg("fcfs", '"fcfs" or "priority".')
    priority_preemption: bool = _arg(
        True,
        'With scheduling_policy="priority", preempt running requests for a waiting one that is strictly more urgent, if it finds no place or '
        "no blocks. False: it waits until one has finished.",
    )
    preemption_mode: str = _arg("recompute", '"recompute" or "swap".')
    num_speculative_tokens: int = _arg(
        0,
        "Number of draft tokens to propose and verify per step (speculative decoding by prompt lookup); the output stays the "
        "same. 0 turns it off. Requests with penalties are not speculated on.",
    )
    prompt_lookup_max: int = _arg(4, "Longest n-gram to look up: the tokens that followed its last occurrence become the draft.")
    prompt_lookup_min: int = _arg(2, "Shortest n-gram to look up when longer ones have not occurred before.")
    async_scheduling: bool = _arg(
        False,
        "Schedule the next step while the device computes this one; the output stays the same. Pays on a GPU, and with workers in other "
        "processes. Not with a block space manager of your own.",
    )
    skip_tokenizer_init: bool = _arg(False, "Load no tokenizer: prompts are token ids, and outputs have no text.")
    scheduler_cls: type | None = _arg(None, "Scheduler class, such as `StaticBatchScheduler` or your own.")
    block_space_manager_cls: type | None = _arg(None, "Block space manager class.")
    sampler_cls: type | None = _arg(None, "Sampler class: what `sample(logits, rows)` of it returns are the next tokens.")
    detokenizer_cls: type | None = _arg(None, "Incremental detokenizer class: what turns a sequence's tokens into text.")
    attention_backend: str | type = _arg(
        "auto",
        '"auto", "torch", "cpu" or "triton", or your own `AttentionBackend` subclass. "auto" is "triton" on a GPU and "cpu" '
        '(Numba) without one; "triton" without a GPU runs interpreted, very slowly.',
    )
    enforce_eager: bool = _arg(
        False,
        "Run the model's code as it is written: no CUDA graphs and no fused kernels on a GPU, no compiled layers on a CPU. Slower, with the same tokens.",
    )
    quantization: str | None = _arg(None, 'Weight quantization: "int8", on a CPU. None leaves the weights as they are.')
    tensor_parallel_size: int = _arg(
        1, "Number of workers that the model is divided among, each in a process of its own. On a CPU they share the cores."
    )
    pipeline_parallel_size: int = _arg(
        1,
        "Number of stages, each with some of the layers and as many workers as tensor_parallel_size says. Each works on another batch.",
    )
    pp_layer_partition: str | None = _arg(
        None, 'Number of layers of each stage, such as "12,18". None: as even as can be. (In vLLM: VLLM_PP_LAYER_PARTITION.)'
    )
    distributed_executor_backend: str | None = _arg(
        None,
        'Where workers run: "uni", one in the engine\'s process, "mp", in processes of their own, or "ray", as actors of a Ray cluster. '
        'None: "uni" if there is one, else "mp".',
    )
    ray_address: str | None = _arg(
        None,
        "Address of a Ray cluster's head node, such as 10.0.0.1:6379. None: RAY_ADDRESS, or the cluster on this machine, or a new one.",
    )
    ray_placement_strategy: str = _arg(
        "PACK",
        'How Ray places the workers: "PACK", on as few nodes as possible, "SPREAD", on as many as possible, "STRICT_PACK", on one, or "STRICT_SPREAD", '
        "each on another.",
    )
    data_parallel_size: int = _arg(
        1, "Number of replicas of the model, each in a process of its own with its own KV cache. On a CPU they share the cores."
    )
    data_parallel_backend: str = _arg(
        "mp", 'What starts the replicas: "mp", this machine and `minivllm serve --headless` on others, or "ray", a Ray cluster.'
    )
    data_parallel_size_local: int | None = _arg(
        None,
        "Number of replicas on this machine; others are started elsewhere with `minivllm serve --headless`. None: all are here.",
    )
    data_parallel_start_rank: int = _arg(0, "Rank of the first replica on this machine; 0 where the API server is.")
    data_parallel_address: str = _arg("127.0.0.1", "Address of the API server's machine, at which replicas elsewhere reach it.")
    data_parallel_rpc_port: int = _arg(29550, "Port at that address, where replicas elsewhere introduce themselves.")
    data_parallel_key_file: str | None = _arg(
        None, "Key that all machines share (`minivllm make-key FILE`); needed for any address but this machine's own."
    )
    data_parallel_routing: str = _arg(
        "least-loaded",
        'Which replica gets a request: "least-loaded", "prefix-aware" (where its beginning is cached), or "round-robin".',
    )
    replica_timeout: int = _arg(10, "Seconds of silence after which the requests of a replica continue on others.")
    failover_timeout: int = _arg(60, "Seconds that requests wait for a replica when none is left, until they fail.")
    max_replica_deaths: int = _arg(
        5, "Stop restarting a replica after this many deaths in a row, each within 10 seconds of becoming ready."
    )
    trace: bool = _arg(False, "Record every step in `llm.llm_engine.trace`.")

    def __post_init__(self) -> None:
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name in ("gpu_memory_utilization", "swap_space"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{name} is {value!r}, but must be a finite number.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed is {self.seed!r}, but must be a whole number.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, but must be a fraction in (0, 1].")
        if self.swap_space < 0:
            raise ConfigError(f"swap_space is {self.swap_space} GiB: use 0 or more.")
        self.cache_config()  # these check their fields, before a model is downloaded
        self.parallel_config()

    def cache_config(self) -> CacheConfig:
        """The KV cache's part of the arguments."""
        uses_swap = self.preemption_mode == "swap"
        return self._part(CacheConfig, swap_space_bytes=int(self.swap_space * 2**30) if uses_swap else 0)

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's part of the arguments, for a model of this length."""
        max_num_batched_tokens, is_chunked = self.max_num_batched_tokens, self.enable_chunked_prefill
        if is_chunked is None:
            is_chunked = max_model_len > LONGEST_WHOLE_PROMPT
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(2048, self.max_num_seqs, 0 if is_chunked else max_model_len)
        given = {"enable_chunked_prefill": is_chunked, "max_num_batched_tokens": max_num_batched_tokens}
        config = self._part(SchedulerConfig, policy=self.scheduling_policy, **given)
        config.check_prompts_fit(max_model_len)
        return config

    def worker_config(self) -> WorkerConfig:
        """The worker's part of the arguments."""
        return self._part(WorkerConfig)

    def parallel_config(self) -> ParallelConfig:
        """The part of the arguments about workers and replicas."""
        return self._part(ParallelConfig)

    def _part(self, config_cls: type[_Config], **others: Any) -> _Config:
        """A config made from the arguments with its fields' names, and `others`."""
        shared = {item.name: getattr(self, item.name) for item in fields(config_cls) if hasattr(self, item.name)}
        return config_cls(**shared | others)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all arguments."""
        return [f.name for f in fields(cls)]
