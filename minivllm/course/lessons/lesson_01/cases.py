"""Inputs for the checks of lesson 01, and how messages show them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SequenceData
from minivllm.viz.tokens import byte_alphabet
from minivllm.worker.sampler import SamplingRow


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token in a byte-level vocabulary."""
    token = tokenizer.hf_tokenizer.convert_ids_to_tokens(token_id)
    if token_id in tokenizer.hf_tokenizer.added_tokens_decoder:
        return str(token).encode()
    alphabet = byte_alphabet()
    return bytes(alphabet[character] for character in token)


def make_logits(rng: random.Random, num_rows: int, vocab_size: int, *, ties: bool = False) -> Tensor:
    """`[num_rows, vocab_size]`: multiples of 1/4 from -6 to 6, all different within a row unless ties are wanted."""
    steps = range(-24, 25)
    rows = [rng.choices(steps[20:28], k=vocab_size) if ties else rng.sample(steps, vocab_size) for _ in range(num_rows)]
    return torch.tensor(rows, dtype=torch.float32) / 4


def make_row(
    params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = (), *, seed: int = 0, index: int = 0, eos: Sequence[int] = ()
) -> SamplingRow:  # fmt: skip
    """A row of a batch, as the engine's model runner makes it."""
    request = EngineCoreRequest("r", list(prompt), params, max_num_tokens=1000, eos_token_ids=tuple(eos), seed=seed)
    known = list(output) if params.has_penalties else []  # the engine sends it only where it is needed
    seq = SequenceData(request, 0, index, [0], 0, [0], len(output), known, num_samples=1, num_drafts=0, is_decode=True)
    return SamplingRow(seq, index)


def show(values: Any) -> str:
    """Numbers for a message, with only as many digits as a reader needs."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, (list, tuple, set)):
        return f"[{', '.join(show(value) for value in (sorted(values) if isinstance(values, set) else values))}]"
    return f"{values:.4g}" if isinstance(values, float) else str(values)
