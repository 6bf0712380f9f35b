"""The basis of lesson 03: a padded step over a contiguous cache, the frame of its attention, and requests for a hand-written loop.

A contiguous cache has one row for each text, and a row has a slot for each token: `[num_rows, max_len, num_kv_heads, head_dim]`. That is a
paged cache whose blocks are as long as the longest text, so the same attention also runs in the engine, with `block_size=max_model_len`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.errors import ConfigError
from minivllm.layers.attention import AttentionBackend, AttentionMetadata, KVCache
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SequenceData
from minivllm.worker.sampler import Sampler, SamplingRow

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM
    from minivllm.models.base import CausalLM


@dataclass
class PaddedStep:
    """What one step computes: some new tokens for each of a few texts, padded on the right to the same width.

    Attributes:
        rows: The cache row of each text in the batch.
        starts: How many tokens of each text are in the cache before the step.
        counts: How many new tokens each has, at least 1.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]

    @property
    def width(self) -> int:
        """The number of columns of the padded batch: the largest of `counts`."""
        return max(self.counts)


class PaddedAttention(AttentionBackend):
    """Attention over a contiguous cache in two parts: `write` the new keys and values, then `attend`.

    `forward` is called by each layer of the model. It takes the flat tokens of a padded batch with its `PaddedStep`, or the ragged
    batch of an engine whose blocks are as long as the longest text, which it pads first.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: Any) -> Tensor:
        """Write, then attend; see `AttentionBackend.forward`."""
        step = metadata
        if isinstance(metadata, AttentionMetadata):
            step, places = to_padded(metadata)
            query, key, value = (pad(x, places, len(step.rows) * step.width) for x in (query, key, value))
        query, key, value = (x.unflatten(0, (len(step.rows), step.width)) for x in (query, key, value))
        self.write(kv_cache, key, value, step)
        output = self.attend(query, kv_cache, step).flatten(0, 1)
        return output[places] if step is not metadata else output

    def write(self, kv_cache: KVCache, keys: Tensor, values: Tensor, step: PaddedStep) -> None:
        """Write new keys and values, `[batch, width, num_kv_heads, head_dim]`, to their slots."""
        raise NotImplementedError("write this")

    def attend(self, query: Tensor, kv_cache: KVCache, step: PaddedStep) -> Tensor:
        """Attention of new tokens, `[batch, width, num_heads, head_dim]`, over their texts' cached tokens."""
        raise NotImplementedError("write this")


def to_padded(metadata: AttentionMetadata) -> tuple[PaddedStep, Tensor]:
    """The padded step of a ragged one, and for each token of the ragged batch its index in the flat padded batch.

    Raises:
        ConfigError: Texts have more than one block.
    """
    if metadata.block_tables.shape[1] != 1:
        raise ConfigError("A contiguous cache has one block for each text: set block_size to max_model_len.")
    counts = metadata.query_start_loc.diff()
    starts = metadata.context_lens - counts
    step = PaddedStep(metadata.block_tables[:, 0].tolist(), starts.tolist(), counts.tolist())
    places = [i * step.width + j for i, count in enumerate(step.counts) for j in range(count)]
    return step, torch.tensor(places, device=counts.device)


def pad(x: Tensor, places: Tensor, length: int) -> Tensor:
    """A flat padded batch: `x` at its places, zeros elsewhere."""
    return x.new_zeros(length, *x.shape[1:]).index_copy_(0, places, x)


@dataclass
class TextRequest:
    """A prompt to be continued by a loop, with the sampling that the engine would use.

    Attributes:
        request: What the engine's core would get.
    """

    request: EngineCoreRequest

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return self.request.prompt_token_ids

    def choose(self, logits: Tensor, output: list[int]) -> int:
        """Choose the next token.

        Args:
            logits: `[vocab_size]`, of what follows the newest token.
            output: The tokens chosen before; with a seed, their number decides what is drawn.
        """
        seq = SequenceData(self.request, 0, 0, [], 0, [], len(output), list(output), num_samples=1, num_drafts=0, is_decode=True)
        return Sampler().sample(logits[None], [SamplingRow(seq, 0)])[0].token_id

    def is_finished(self, output: list[int]) -> bool:
        """Whether the continuation is complete: it is long enough, or has ended with a stop token."""
        length = len(self.prompt_token_ids) + len(output)
        return length >= self.request.max_num_tokens or bool(output and output[-1] in self.request.stop_reasons)


def make_requests(llm: LLM, prompts: list[str], params: SamplingParams | list[SamplingParams]) -> list[TextRequest]:
    """Requests for a hand-written loop, as `llm.generate(prompts, params)` would make them.

    Args:
        llm: Its tokenizer and limits are used.
        prompts: Texts to continue.
        params: One for all, or one for each.
    """
    each = params if isinstance(params, list) else [params] * len(prompts)
    process = llm.llm_engine.input_processor.process_inputs
    return [TextRequest(process(f"{i}", *pair).core_request) for i, pair in enumerate(zip(prompts, each, strict=True))]


def model_of(llm: LLM) -> CausalLM:
    """The model inside an engine that runs in this process."""
    return llm.llm_engine.executor.worker.model_runner.model  # type: ignore[attr-defined, no-any-return]
