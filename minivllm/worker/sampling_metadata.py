"""What the rows of a batch want of the sampler: made when the batch changes, and kept from step to step.

Mirrors `vllm/v1/sample/metadata.py`.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling_params import SamplingParams
from minivllm.worker.transfer import to_device


class Filters(NamedTuple):
    """The temperature and the filters of some rows, as columns on the device, each `[rows, 1]`; None for a filter that nobody wants.

    Attributes:
        temperature, min_p, top_k, top_p: See `SamplingParams`. A `top_k` that keeps all is the size of the vocabulary.
        highest_top_k: The highest one below that size.
    """

    temperature: Tensor
    min_p: Tensor | None
    top_k: Tensor | None
    highest_top_k: int
    top_p: Tensor | None

    @classmethod
    def of(cls, params: list[SamplingParams], vocab_size: int, device: torch.device) -> Filters:
        """The filters of rows with these parameters."""

        def column(values: list[Any]) -> Tensor:
            return to_device(values, device).unsqueeze(1)

        min_ps, top_ps = [p.min_p for p in params], [p.top_p for p in params]
        top_ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        return cls(
            temperature=column([p.temperature for p in params]),
            min_p=column(min_ps) if max(min_ps) > 0 else None,
            top_k=column(top_ks) if min(top_ks) < vocab_size else None,
            highest_top_k=max((top_k for top_k in top_ks if top_k < vocab_size), default=0),
            top_p=column(top_ps) if min(top_ps) < 1 else None,
        )


class RandomKeys:
    """The keys to the random numbers of some sequences (`sampler.random_key`), step after step: what stays of each hash is computed once.

    Args:
        seeds, indices: Of each sequence, its request's seed and its place among the request's siblings.
    """

    def __init__(self, seeds: Iterable[int], indices: Iterable[int]) -> None:
        self._begun = [_begin_key(seed, index) for seed, index in zip(seeds, indices, strict=True)]

    def at(self, positions: Iterable[int]) -> np.ndarray:
        """The key of the token at each sequence's position, `[sequences]`, int32."""
        digests = []
        for begun, position in zip(self._begun, positions, strict=True):
            key = begun.copy()
            key.update(b"%d" % position)
            digests.append(key.digest())
        return np.frombuffer(b"".join(digests), ">i4").astype(np.int32)


@functools.lru_cache(maxsize=4096)
def _begin_key(seed: int, index: int) -> hashlib.blake2b:
    return hashlib.blake2b(f"{seed},{index},".encode(), digest_size=4)


class SamplingMetadata:
    """What the rows of a batch want, made once for all steps in which they are the same.

    Args:
        params, seeds, indices: Of each row, its request's parameters and seed, and which of the request's siblings it is for.
        vocab_size, device: Of the logits.

    Attributes:
        may_adjust: Whether some row's logits may be changed before temperature and filters.
        random_rows: Rows whose tokens are drawn; the others get the most likely one.
        random_indices: The same, on the device; None if all rows are drawn, or none.
        random_keys: Of the random rows.
        filters: Of the random rows; None if there are none.
        logprob_rows: For each number of log-probabilities: the rows that want so many, and the same on the device.
    """

    def __init__(
        self, params: list[SamplingParams], seeds: list[int], indices: list[int], vocab_size: int, device: torch.device
    ) -> None:
        self._params, self._others = params, (seeds, indices, vocab_size, device)
        self.may_adjust = any(p.adjusts_logits or p.min_tokens > 0 or p.structured_outputs is not None for p in params)
        self.random_rows = [i for i, p in enumerate(params) if not p.is_greedy]
        self.random_indices = to_device(self.random_rows, device) if 0 < len(self.random_rows) < len(params) else None
        random_params = [params[i] for i in self.random_rows]
        self.random_keys = RandomKeys([seeds[i] for i in self.random_rows], [indices[i] for i in self.random_rows])
        self.filters = Filters.of(random_params, vocab_size, device) if random_params else None
        wanting: dict[int, list[int]] = defaultdict(list)
        for i, p in enumerate(params):
            if p.logprobs is not None:
                wanting[p.logprobs].append(i)
        self.logprob_rows = [(count, rows, to_device(rows, device)) for count, rows in wanting.items()]

    def is_for(
        self, params: list[SamplingParams], seeds: list[int], indices: list[int], vocab_size: int, device: torch.device
    ) -> bool:
        """Whether it was made from these very objects `params`, and the rest is equal."""
        same = len(params) == len(self._params) and all(map(operator.is_, params, self._params))
        return same and (seeds, indices, vocab_size, device) == self._others
