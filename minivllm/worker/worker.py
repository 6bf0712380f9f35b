"""A worker owns a device: it loads the model, or its part of it, measures how many cache blocks fit, and runs steps.

Mirrors `vllm/v1/worker/gpu_worker.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank
from minivllm.distributed.partition import split_heads
from minivllm.distributed.pipeline import PipelineGroup, SingleStage
from minivllm.errors import ConfigError
from minivllm.layers.platform import Platform
from minivllm.models.compiled_llama import CompiledLlama, compile_model
from minivllm.models.fused_attention import fuse_attention
from minivllm.models.weights import load_model
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import ExecuteModelRequest, Masks, SequenceOutput
from minivllm.worker.cache_engine import CacheEngine
from minivllm.worker.memory import available_cpu_memory, cpu_cache_bytes, measure_peak_memory, useful_cache_bytes
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.sampler import Sampler
from minivllm.worker.stage import PipelineStage
from minivllm.worker.transfer import RecentTokens

CPU_PROFILE_TOKENS = 256
CPU_PROFILE_SEQS = 16
"""Sizes of the two profiling runs on a CPU: tokens of a prompt, and sequences to sample from."""

LEAST_DEFAULT_TOKENS = 2048
"""By default a step may have so many tokens, or more if a whole prompt may (`EngineArgs.scheduler_config`)."""

WARM_UP_TOKENS = 1024
"""Of a prompt that is long enough for the attention kernel of long prompts."""
WARM_UP_PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=0, presence_penalty=1.0),  # logits in float32
    SamplingParams(top_p=0.9, presence_penalty=1.0),
)
"""Kinds of sampling that have kernels of their own."""

MAX_STEPS_BEFORE = 2
"""With asynchronous scheduling, how many steps in flight before a step its placeholders may refer to."""


class Worker:
    """Runs a model on one device.

    Start-up has a fixed order, because each step needs the result of the one before: load the model, measure how much
    memory the largest step needs, give the cache what is left.

    Args:
        model_config, cache_config, scheduler_config, worker_config: What to run, where, and within which limits.
        group: The workers that share the model, or a stage of it; None if this one has all of it.
        pipeline: The stages, each with some of the layers; None if there is one.

    Attributes:
        rank, num_ranks: This one among all workers of the model, and how many they are.
        rank_config: The model config, with this rank's layers and heads.

    Raises:
        ConfigError: The device, dtype, backend or quantization is not available.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        worker_config: WorkerConfig,
        group: GroupCoordinator | None = None,
        pipeline: PipelineGroup | None = None,
    ) -> None:
        self.group, self.pipeline = group or SingleRank(), pipeline or SingleStage()
        self.num_ranks = self.pipeline.world_size * self.group.world_size
        self.rank = self.pipeline.rank * self.group.world_size + self.group.rank
        stage = self.pipeline.stage
        heads = split_heads(model_config.num_heads, model_config.num_kv_heads, self.group.world_size, self.group.rank)
        self.model_config = model_config
        num_layers = len(stage.layers(model_config.num_layers))
        self.rank_config = replace(model_config, num_layers=num_layers, num_heads=len(heads.query), num_kv_heads=len(heads.kv))
        self.cache_config = cache_config
        self.scheduler_config = scheduler_config
        self.device = resolve_device(worker_config.device, self.rank if self.num_ranks > 1 else None)
        self.dtype = resolve_dtype(worker_config.dtype, self.device, model_config)
        self.enforce_eager = worker_config.enforce_eager
        self.sampler = (worker_config.sampler_cls or Sampler)()
        self.platform = Platform(
            self.device, self.dtype, worker_config.attention_backend, worker_config.quantization, self.group, stage
        )
        self.block_bytes = CacheEngine.block_bytes(self.rank_config, cache_config.block_size, self.dtype)
        self.compiled_model: CompiledLlama | None = None
        self.model_runner: ModelRunner
        self.cache_engine: CacheEngine

    def load_model(self) -> None:
        """Build the model on the device, load its weights, and let compiled or fused kernels do its layers' work, if any."""
        model = load_model(self.model_config, self.platform)
        if not self.enforce_eager:
            fuse_attention(model, self.platform)
            self.compiled_model = compile_model(model, self.platform)
            if self.compiled_model is not None:  # the model calls it and it has the model: apart, both are freed with the worker
                weakref.finalize(self, vars(self.compiled_model.model).pop, "forward", None)
        block_size, max_model_len = self.cache_config.block_size, self.model_config.max_model_len
        self.model_runner = ModelRunner(model, block_size, max_model_len, self.device, self.sampler)
        if self.pipeline.world_size > 1:
            hidden_size, dtype = self.model_config.hf_config["hidden_size"], self.platform.activation_dtype
            self.model_runner.stage = PipelineStage(self.pipeline, model.intermediate_names, hidden_size, dtype)
        elif self.scheduler_config.async_scheduling:
            self.model_runner.recent_tokens = RecentTokens(MAX_STEPS_BEFORE, self.group)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """How many blocks fit on the device, and how many in the swap space on the host.

        Raises:
            ConfigError: Not even one fits.
        """
        config = self.cache_config
        num_cpu_blocks = config.swap_space_bytes // self.block_bytes
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override, num_cpu_blocks
        if config.kv_cache_memory_bytes is not None:
            memory, source = config.kv_cache_memory_bytes, f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes:,}"
            remedy = "raise it, or lower block_size"
        else:
            memory, tokens_that_fit = self._memory_left_for_cache()
            remedy = self._remedy(tokens_that_fit)
            source = f"gpu_memory_utilization = {config.gpu_memory_utilization} leaves {max(memory, 0):,} bytes for the cache"
        num_gpu_blocks = memory // self.block_bytes
        if num_gpu_blocks < 1:
            raise ConfigError(f"{source}, but one block of {config.block_size} tokens takes {self.block_bytes:,}: {remedy}.")
        return num_gpu_blocks, num_cpu_blocks

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocate the KV cache. On a GPU, compile the kernels of all kinds of steps, and capture CUDA graphs if steps use them.

        Raises:
            ConfigError: There is not enough memory.
        """
        on_cpu = num_cpu_blocks + (num_gpu_blocks if self.device.type == "cpu" else 0)
        self._check_host_memory(on_cpu)
        if self.device.type == "cuda":
            self._check_memory(num_gpu_blocks, "the GPU", torch.cuda.mem_get_info(self.device)[0])
        self.cache_engine = CacheEngine(
            self.rank_config, self.cache_config.block_size, num_gpu_blocks, num_cpu_blocks, self.platform
        )
        if self.device.type == "cuda":
            self._warm_up()
        if self._uses_graphs():
            self.model_runner.capture_graphs(self.cache_engine.gpu_cache, self.scheduler_config.max_num_seqs, self._max_tokens())

    def _warm_up(self) -> None:
        """Run what compiles kernels of its own: a request should not wait for a compiler."""
        caches, num_tokens = self.cache_engine.gpu_cache, min(self._max_tokens(), self.model_config.max_model_len)
        for params in WARM_UP_PARAMS:
            self.model_runner.profile_run(1, 1, caches, params)
        self.model_runner.profile_run(min(num_tokens, WARM_UP_TOKENS), 1, caches)
        self.cache_engine.copy([(0, 0)])

    def _max_tokens(self) -> int:
        """The most tokens of a step."""
        config = self.scheduler_config
        return min(config.max_num_batched_tokens, config.max_num_seqs * self.model_config.max_model_len)

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        """Move blocks as the scheduler says, then run the step. Only the last stage has results.

        Raises:
            StageError: A stage before this one has failed, and this one is ready for the next step.
        """
        with self._step(request):
            self._move_blocks(request)
            if not request.sequences:
                return []
            return self.model_runner.execute_model(request.sequences, self.cache_engine.gpu_cache)

    def launch_model(self, request: ExecuteModelRequest) -> None:
        """The first half of `execute_model`: a GPU gets its work. `sample_tokens` must follow."""
        with self._step(request):
            self._move_blocks(request)
            self.model_runner.launch_model(request.sequences, self.cache_engine.gpu_cache)

    def sample_tokens(self, masks: Masks) -> Callable[[], list[SequenceOutput]]:
        """The second half. The function that is returned waits for the results."""
        return self.model_runner.sample_tokens(masks)

    def _step(self, request: ExecuteModelRequest) -> AbstractContextManager[None]:
        """Stages, if there are several, tell each other of a step in which there is something to compute."""
        return self.pipeline.step() if request.sequences and self.pipeline.world_size > 1 else nullcontext()

    def _move_blocks(self, request: ExecuteModelRequest) -> None:
        self.cache_engine.swap_out(request.blocks_to_swap_out)
        self.cache_engine.swap_in(request.blocks_to_swap_in)
        self.cache_engine.copy(request.blocks_to_copy)

    def take_timing(self) -> tuple[list[tuple[float, float]], int]:
        """When it was communicating since the last call, within its stage and with its neighbours, and how many bytes it contributed."""
        spans, num_bytes = self.group.take_timing()
        more_spans, more_bytes = self.pipeline.take_timing()
        return sorted(spans + more_spans), num_bytes + more_bytes

    def describe_model(self) -> str:
        """How the model's layers run, in words."""
        model_cls = type(self.model_runner.model)
        if self.model_runner.graphs is not None:
            how = "CUDA graphs for decodes and small steps with prompts"
        else:
            how = "as written" if self.compiled_model is None else self.compiled_model.describe()
        return f"{model_cls.__module__}.{model_cls.__name__}: {how}"

    def check_health(self) -> None:
        """Return when all work is done: a worker that answers is ready for more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # operations of the group may only have been launched

    def _uses_graphs(self) -> bool:
        can_capture = self.platform.attention_backend.supports_cuda_graphs() and self.group.supports_cuda_graphs
        can_capture = can_capture and self.pipeline.world_size == 1  # what passes between stages waits on the host
        return self.device.type == "cuda" and not self.enforce_eager and can_capture

    def _check_host_memory(self, num_blocks: int) -> None:
        """Check the machine's memory, which all ranks share."""
        num_ranks = self.num_ranks
        place = "the machine" if num_ranks == 1 else f"the machine, for each of {num_ranks} workers,"
        self._check_memory(num_blocks, place, available_cpu_memory() // num_ranks)

    def _check_memory(self, num_blocks: int, place: str, free: int) -> None:
        if num_blocks * self.block_bytes > free:
            raise ConfigError(
                f"The cache would take {num_blocks * self.block_bytes / 2**30:,.1f} GiB, but {place} has only "
                f"{free / 2**30:,.1f} GiB free: lower num_gpu_blocks_override, kv_cache_memory_bytes, block_size or swap_space."
            )

    def _remedy(self, tokens_that_fit: int | None) -> str:
        """What to do if weights and activations leave too little: any of these works alone. See `_memory_left_for_cache`."""
        config = self.scheduler_config
        to = "" if tokens_that_fit is None else f" to {tokens_that_fit}"
        given = config.max_num_batched_tokens > max(LEAST_DEFAULT_TOKENS, config.max_num_seqs, self.model_config.max_model_len)
        if given and not config.enable_chunked_prefill and tokens_that_fit != 0:
            return f"raise it, or lower max_num_batched_tokens (now {config.max_num_batched_tokens:,}) and max_model_len{to}"
        if not config.enable_chunked_prefill and (tokens_that_fit is None or tokens_that_fit >= LEAST_DEFAULT_TOKENS):
            return (
                f"raise it, lower max_model_len (now {self.model_config.max_model_len:,}){to}, or set enable_chunked_prefill=True"
            )
        if tokens_that_fit == 0:
            return "raise it, free some memory, or take a smaller dtype or model"
        first = "" if config.enable_chunked_prefill else "set enable_chunked_prefill=True and "
        tokens = f"max_num_batched_tokens (now {config.max_num_batched_tokens:,})"
        if tokens_that_fit is not None and tokens_that_fit < config.max_num_seqs:
            tokens += f" and max_num_seqs (now {config.max_num_seqs:,})"
        return f"raise it, or {first}lower {tokens}{to}"

    def _memory_left_for_cache(self) -> tuple[int, int | None]:
        """What the weights and the largest step leave of the usable memory.

        Returns:
            Bytes, and how many tokens, a power of two, a step may have to leave room for a block: 0 if no step does, None if that is not known.
        """
        self._check_host_memory(1)
        max_num_seqs, max_model_len = self.scheduler_config.max_num_seqs, self.model_config.max_model_len
        max_tokens = self._max_tokens()
        max_rows = min(max_num_seqs * (1 + self.scheduler_config.num_speculative_tokens), max_tokens)  # of logits
        useful = useful_cache_bytes(max_num_seqs, max_model_len, self.cache_config.block_size, self.block_bytes)
        runner = self.model_runner
        one_block = CacheEngine(self.rank_config, self.cache_config.block_size, 1, 0, self.platform).gpu_cache
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            runner.profile_run(max_tokens, max_rows, one_block)
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.empty_cache()
            if self._uses_graphs():
                peak += runner.measure_graph_memory(one_block, max_num_seqs, max_tokens)
            free, total = torch.cuda.mem_get_info(self.device)
            usable = int(total * self.cache_config.gpu_memory_utilization)
            if self.num_ranks > torch.cuda.device_count():  # ranks share a GPU
                return min(usable // -(-self.num_ranks // torch.cuda.device_count()) - peak, useful), None
            others = total - free - torch.cuda.memory_reserved(self.device)
            return min(usable - others - peak, useful), None
        fraction, num_ranks = self.cache_config.gpu_memory_utilization, self.num_ranks  # which share this memory
        if getattr(self.platform.attention_backend.load_ops(), "INTERPRETED", False):  # a profiling run would take minutes
            return cpu_cache_bytes(available_cpu_memory(), fraction, 0, useful, num_ranks), None
        # A smaller prefill and a smaller batch, scaled up: the largest step would take seconds on a CPU.
        num_tokens, num_seqs = min(max_tokens, CPU_PROFILE_TOKENS), min(max_rows, CPU_PROFILE_SEQS)
        num_prompts = -(-num_tokens // max_model_len)
        runner.profile_run(1, 1, one_block)  # what is allocated once, such as threads and compiled code, is not scaled up
        sampling_peak = measure_peak_memory(lambda: runner.profile_run(num_seqs, num_seqs, one_block))
        prefill_peak = measure_peak_memory(lambda: runner.profile_run(num_tokens, num_prompts, one_block))
        available = available_cpu_memory()

        def left_by(tokens: int) -> int:  # fewer than were measured may take as much
            rows = max(num_seqs, min(tokens, max_rows))
            needed = prefill_peak * max(num_tokens, tokens) // num_tokens + sampling_peak * rows // num_seqs
            return cpu_cache_bytes(available, fraction, needed, useful, num_ranks)

        sizes = (2**power for power in range(max_tokens.bit_length(), 3, -1))
        return left_by(max_tokens), next((size for size in sizes if left_by(size) >= self.block_bytes), 0)


def resolve_device(device: str, rank: int | None = None) -> torch.device:
    """The device with this name; "auto" is the GPU if there is one. Several ranks take the GPUs in turn."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no usable GPU: run `minivllm doctor`, or use device='cpu'.")
    if device == "cuda" and rank is not None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """The dtype with this name; "auto" is float32 on a CPU, else what the model was saved in."""
    if dtype == "auto":
        saved = config.hf_config.get("dtype") or config.hf_config.get("torch_dtype") or "float32"
        dtype = "float32" if device.type == "cpu" else str(saved).removeprefix("torch.")
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype):
        raise ConfigError(f"The model was saved in dtype {dtype!r}, which torch does not have: set dtype.")
    return resolved
