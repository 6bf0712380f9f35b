"""The basis of lesson 08: a device to start on, and the messages between the core of a small engine and its frontend."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from minivllm.course.parts import EngineParts
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.input_processor import ProcessedRequest
from minivllm.engine.tokenizer import Tokenizer
from minivllm.layers.platform import Platform
from minivllm.models.base import CausalLM
from minivllm.models.weights import iterate_weights, load_model
from minivllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.worker.cache_engine import CacheEngine
from minivllm.worker.memory import measure_peak_memory
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.worker import resolve_device, resolve_dtype


class Device:
    """A device, reduced to what an engine's start-up needs.

    Args:
        config: Which model, and how large a block is.
        parts: The model's class and the attention backend.
        total_bytes: Its memory: as much of the real memory as the engine should know of.
        other_bytes: The part held by other programs.

    Attributes:
        model: The model, once it is loaded.
        block_bytes: The size of one block, over all layers.
        used_bytes: What the engine holds now.
        peak_bytes: The most it has held at one time since `reset_peak`.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts, total_bytes: int, other_bytes: int = 0) -> None:
        self.model_config = replace(config.model_config, model_cls=parts.model_cls)
        self.block_size = config.cache_config.block_size
        self.total_bytes, self.other_bytes = total_bytes, other_bytes
        device = resolve_device(config.worker_config.device)
        dtype = resolve_dtype(config.worker_config.dtype, device, self.model_config)
        self.platform = Platform(device, dtype, parts.attention_backend)
        self.block_bytes = CacheEngine.block_bytes(self.model_config, self.block_size, dtype)
        self.used_bytes = self.peak_bytes = 0
        self.model: CausalLM | None = None

    def load_model(self) -> None:
        """Build the model and read its weights."""
        self.model = load_model(self.model_config, self.platform)
        sources = (source for _, source in iterate_weights(self.model_config.path))  # slices of a file, or tensors
        shapes = (source.shape if isinstance(source, torch.Tensor) else source.get_shape() for source in sources)
        self._hold(sum(map(math.prod, shapes)) * self.platform.dtype.itemsize)

    def profile_run(self, num_tokens: int, num_seqs: int) -> None:
        """Run a step of `num_tokens` tokens over `num_seqs` sequences, each of which gets a token. It changes only the peak."""
        self._hold(0, self._measure(num_tokens, num_seqs))

    def allocate_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> CacheEngine:
        """The KV cache: `num_gpu_blocks` blocks on the device, and `num_cpu_blocks` in host memory to swap to."""
        self._hold(num_gpu_blocks * self.block_bytes)
        return CacheEngine(self.model_config, self.block_size, num_gpu_blocks, num_cpu_blocks, self.platform)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.used_bytes

    def _measure(self, num_tokens: int, num_seqs: int) -> int:
        """The bytes that a step takes on top of the weights, at its peak."""
        platform, max_model_len = self.platform, self.model_config.max_model_len
        assert self.model is not None
        runner = ModelRunner(self.model, self.block_size, max_model_len, platform.device)
        num_tokens = min(num_tokens, num_seqs * max_model_len)
        one_block = CacheEngine(self.model_config, self.block_size, 1, 0, platform).gpu_cache
        if platform.device.type == "cpu":
            return measure_peak_memory(lambda: runner.profile_run(num_tokens, num_seqs, one_block))
        before = torch.cuda.memory_allocated(platform.device)
        torch.cuda.reset_peak_memory_stats(platform.device)
        runner.profile_run(num_tokens, num_seqs, one_block)
        return torch.cuda.max_memory_allocated(platform.device) - before

    def _hold(self, num_bytes: int, for_a_moment: int = 0) -> None:
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + for_a_moment)


@dataclass
class CoreOutput:
    """What a step added to a request, in token ids.

    Attributes:
        request_id: The request.
        token_id: Its new token; None if the step failed.
        finish_reason: "stop" at a token that ends the text, "length" at its token limit, "error"; None if it continues.
        error: Why it failed.
    """

    request_id: str
    token_id: int | None
    finish_reason: str | None = None
    error: str | None = None


class RequestState:
    """An unfinished request as the frontend knows it.

    Args:
        processed: The request, checked and in token ids.
        detokenizer_cls: Turns its tokens into text.
        tokenizer: The model's.

    Attributes:
        core_request: What the core gets.
        token_ids: The answer so far.
        finish_reason, error: As in `CoreOutput`.
    """

    def __init__(self, processed: ProcessedRequest, detokenizer_cls: type, tokenizer: Tokenizer) -> None:
        self.prompt, self.core_request = processed.prompt, processed.core_request
        self.detokenizer = detokenizer_cls(tokenizer, self.core_request.prompt_token_ids, self.core_request.sampling_params)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None

    def make_output(self) -> RequestOutput:
        """Everything so far, in the form the user gets."""
        request = self.core_request
        completion = CompletionOutput(0, self.detokenizer.text, list(self.token_ids), finish_reason=self.finish_reason)
        metrics, finished = RequestMetrics(request.arrival_time), self.finish_reason is not None
        return RequestOutput(
            request.request_id, self.prompt, request.prompt_token_ids, [completion], finished, metrics, error=self.error
        )


def refused(request_id: str, error: Exception) -> RequestOutput:
    """The output of a request that could not be accepted."""
    return RequestOutput(request_id, None, [], [], finished=True, error=str(error))
