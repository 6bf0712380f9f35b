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
from minivllm.worker.transfer import pack_to_device, to_device


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


class RowColumns(NamedTuple):
    """What each row of a batch wants, as the kernels take it: on the device, each `[rows]`. A greedy row has temperature 0 and no filters."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor


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
        random_keys: Of the random rows.
        logprob_rows: For each number of log-probabilities: the rows that want so many, and the same on the device.
    """

    def __init__(
        self, params: list[SamplingParams], seeds: list[int], indices: list[int], vocab_size: int, device: torch.device
    ) -> None:
        self._params, self._others = params, (seeds, indices, vocab_size, device)
        self._vocab_size, self._device = vocab_size, device
        self.may_adjust = any(p.adjusts_logits or p.min_tokens > 0 or p.structured_outputs is not None for p in params)
        self.random_rows = [i for i, p in enumerate(params) if not p.is_greedy]
        self.random_keys = RandomKeys([seeds[i] for i in self.random_rows], [indices[i] for i in self.random_rows])
        wanting: dict[int, list[int]] = defaultdict(list)
        for i, p in enumerate(params):
            if p.logprobs is not None:
                wanting[p.logprobs].append(i)
        self.logprob_rows = [(count, rows, to_device(rows, device)) for count, rows in wanting.items()]

    @functools.cached_property
    def random_indices(self) -> Tensor | None:
        """`random_rows` on the device; None if all rows are drawn, or none."""
        return to_device(self.random_rows, self._device) if 0 < len(self.random_rows) < len(self._params) else None

    @functools.cached_property
    def filters(self) -> Filters | None:
        """Those of the random rows; None if there are none."""
        random_params = [self._params[i] for i in self.random_rows]
        return Filters.of(random_params, self._vocab_size, self._device) if random_params else None

    @functools.cached_property
    def columns(self) -> RowColumns:
        """What all rows want, for kernels."""

        def column(values: list[Any], dtype: type, nothing: Any) -> np.ndarray:
            everything: np.ndarray = np.full(len(self._params), nothing, dtype)
            everything[self.random_rows] = values
            return everything

        params, size = [self._params[i] for i in self.random_rows], self._vocab_size
        temperature = column([p.temperature for p in params], np.float32, 0)
        min_p, top_p = column([p.min_p for p in params], np.float32, 0), column([p.top_p for p in params], np.float32, 1)
        top_k = column([p.top_k if 0 < p.top_k < size else size for p in params], np.int64, size)
        return RowColumns(*pack_to_device([temperature, min_p, top_k, top_p], self._device))

    @functools.cached_property
    def has_filters(self) -> bool:
        """Whether some row that is drawn has filters."""
        params = [self._params[i] for i in self.random_rows]
        return any(p.min_p > 0 or 0 < p.top_k < self._vocab_size or p.top_p < 1 for p in params)

    def keys_at(self, positions: list[int]) -> np.ndarray:
        """The keys of all rows, `[rows]`, int32, at these positions of the random ones; 0 for the others."""
        keys = np.zeros(len(self._params), np.int32)
        keys[self.random_rows] = self.random_keys.at(positions)
        return keys

    def is_for(
        self, params: list[SamplingParams], seeds: list[int], indices: list[int], vocab_size: int, device: torch.device
    ) -> bool:
        """Whether it was made from these very objects `params`, and the rest is equal."""
        same = len(params) == len(self._params) and all(map(operator.is_, params, self._params))
        return same and (seeds, indices, vocab_size, device) == self._others
