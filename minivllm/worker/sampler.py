"""From logits to tokens: penalties, temperature, filters, and the draw.

The filters are pure functions on `[rows, vocab_size]` logits. The random numbers of a draw are hashes of the request's
seed, the sequence's index, the position and the token id, so a request's tokens do not depend on its batch. The order of
the steps is vLLM's (`vllm/v1/sample/sampler.py`).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops, load_platform_kernels
from minivllm.outputs import Logprob
from minivllm.sampling_params import SamplingParams, num_parameters
from minivllm.scheduler_output import SequenceData
from minivllm.worker.logprobs import LogprobTensors, launch_logprobs
from minivllm.worker.sampling_metadata import Filters, RandomKeys, SamplingMetadata
from minivllm.worker.token_counts import TokenCounts
from minivllm.worker.transfer import HostCopy, to_device

MIN_LOGIT = float("-inf")
TOP_P_CANDIDATES = 1024
KEPT_BATCHES = 8
"""Several, because batches may take turns: those of pipeline stages do. A stage more than that, and no batch is found again."""


class SamplingRow(msgspec.Struct, gc=False):
    """One token to sample.

    Attributes:
        seq: The sequence that it continues.
        index: The sibling that gets it: the sequence itself, or one that is about to be forked from it.
        num_drafts: Draft tokens that come before it.
        error: Why the token is meaningless: a logits processor of the request failed, say.
    """

    seq: SequenceData
    index: int
    num_drafts: int = 0
    error: str | None = None

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.seq.request.sampling_params

    @property
    def mask(self) -> bytes | None:
        """Which tokens a grammar allows, if there is one."""
        return self.seq.masks[self.num_drafts] if self.seq.masks else None

    @property
    def position(self) -> int:
        """Output tokens that come before this one."""
        return self.seq.num_output_tokens + self.num_drafts


class SampledToken(msgspec.Struct, gc=False):
    """A drawn token, and its log-probabilities if requested."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None


class PendingTokens:
    """Tokens that are being sampled, and log-probabilities of the rows that want some.

    Args:
        token_ids: `[rows]`, on the device.
        logprobs: Log-probabilities, and the rows that they are of.
    """

    def __init__(self, token_ids: Tensor, logprobs: list[tuple[list[int], LogprobTensors]] | None = None) -> None:
        self.token_ids = token_ids
        self._logprobs = logprobs or []
        self._copy = HostCopy(token_ids)

    def wait(self) -> list[SampledToken]:
        """The tokens, once the device has sampled them."""
        tokens = [SampledToken(token_id) for token_id in self._copy.wait()[0].tolist()]
        for rows, tensors in self._logprobs:
            for row, entry in zip(rows, tensors.entries([tokens[row].token_id for row in rows]), strict=True):
                tokens[row].logprobs = entry
        return tokens


class Sampler:
    """Chooses the next tokens. `LLM(sampler_cls=...)` takes another class with the method `sample`."""

    _kept: tuple[SamplingMetadata, ...] = ()
    """Of the last few batches, the newest first."""
    _token_counts: TokenCounts | None = None
    """Of the last logits on a GPU."""

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        """Choose one token for each row.

        Args:
            logits: `[len(rows), vocab_size]`, any float dtype; not changed.
            rows: What each row is for.
        """
        return self.launch(logits, rows).wait()

    def launch(self, logits: Tensor, rows: list[SamplingRow]) -> PendingTokens:
        """`sample`, without waiting for a device that computes beside the host."""
        ops = load_sampling_ops(logits.device)
        logits = logits.float() if ops is None else as_kernels_take_them(logits)
        metadata = self._find_metadata(rows, logits)
        if ops is not None and (self._token_counts is None or not self._token_counts.is_for(logits)):
            self._token_counts = TokenCounts(logits.shape[1], logits.device, ops)
        counts = None if ops is None else self._token_counts
        processed = adjust_logits(logits, rows, counts) if metadata.may_adjust else logits
        positions = [rows[i].position for i in metadata.random_rows]
        token_ids = choose_by_kernels(ops, processed, metadata, positions) if ops else choose(processed, metadata, positions)
        logprobs = [
            (some, launch_logprobs(logits.index_select(0, indices), token_ids.index_select(0, indices), count))
            for count, some, indices in metadata.logprob_rows
        ]
        return PendingTokens(token_ids, logprobs)

    def _find_metadata(self, rows: list[SamplingRow], logits: Tensor) -> SamplingMetadata:
        """What the rows want: as in one of the last steps, if they have not changed."""
        requests = [row.seq.request for row in rows]
        params, seeds = [request.sampling_params for request in requests], [request.seed for request in requests]
        batch = params, seeds, [row.index for row in rows], logits.shape[-1], logits.device
        found = next((metadata for metadata in self._kept if metadata.is_for(*batch)), None)
        others = [metadata for metadata in self._kept if metadata is not found]
        found = found or SamplingMetadata(*batch)
        self._kept = (found, *others[: KEPT_BATCHES - 1])
        return found


def choose(logits: Tensor, metadata: SamplingMetadata, positions: list[int]) -> Tensor:
    """A token for each row, `[rows]`, given the positions of the tokens of rows that are drawn."""
    if metadata.filters is None:
        return argmax(logits)
    keys = metadata.random_keys.at(positions)
    if metadata.random_indices is None:
        return draw(apply_filters(logits, metadata.filters), keys)
    token_ids = argmax(logits)
    filtered = apply_filters(logits.index_select(0, metadata.random_indices), metadata.filters)
    return token_ids.index_copy_(0, metadata.random_indices, draw(filtered, keys))


def choose_by_kernels(ops: Ops, logits: Tensor, metadata: SamplingMetadata, positions: list[int]) -> Tensor:
    """`choose`, in a few launches: greedy rows take part in the race with their logits as scores."""
    columns, keys = metadata.columns, to_device(metadata.keys_at(positions), logits.device)
    thresholds = ops.filter_thresholds(logits, *columns) if metadata.has_filters else None
    return ops.draw(logits, columns.temperature, keys, thresholds)[1]


def as_kernels_take_them(logits: Tensor) -> Tensor:
    """The same logits, whatever a model of the user's returns: in one of three dtypes, and each row's next to each other."""
    logits = logits if logits.dtype in (torch.float32, torch.bfloat16, torch.float16) else logits.float()
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def argmax(logits: Tensor) -> Tensor:
    """The most likely token of each row, `[rows]`; on a CPU by numpy, whose search is several times as fast as torch's."""
    return torch.from_numpy(logits.numpy().argmax(axis=-1)) if logits.device.type == "cpu" else logits.argmax(dim=-1)


def adjusts_logits(row: SamplingRow) -> bool:
    """Whether `adjust_logits` would change anything."""
    params = row.seq.request.sampling_params
    return params.adjusts_logits or bool(row.seq.masks) or (params.min_tokens > 0 and row.position < params.min_tokens)


def adjust_logits(logits: Tensor, rows: list[SamplingRow], counts: TokenCounts | None = None) -> Tensor:
    """Logit bias, penalties and logits processors, then everything that excludes tokens; for greedy rows, too. With `counts`, those of the device,
    penalties are applied to all rows at once.

    Without waiting for the device: `torch.where` decides there what an `if` on a tensor's value would decide here. Only functions of users'
    own may wait, and the check that grammars and other wishes together leave a token.
    """
    wanted = [i for i, row in enumerate(rows) if adjusts_logits(row)]
    if not wanted:
        return logits
    adjusted, device = logits.to(torch.float32, copy=True), logits.device
    for i in wanted:
        if bias := rows[i].params.logit_bias:
            adjusted[i, to_device(list(bias), device)] += to_device(list(bias.values()), device)
    penalized = [i for i in wanted if rows[i].params.has_penalties]
    if counts is not None and penalized:
        counts.penalize(adjusted, penalized, [rows[i].seq for i in penalized])
    for i in wanted:
        row, params = rows[i], rows[i].params
        if counts is None and params.has_penalties:
            adjusted[i] = apply_penalties(
                adjusted[i],
                row.seq.request.prompt_token_ids,
                row.seq.output_token_ids,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
        for process in params.logits_processors or ():
            try:
                adjusted[i] = run_logits_processor(process, row, adjusted[i])
            except Exception as error:  # fails this request only
                row.error = f"The logits processor {getattr(process, '__name__', type(process).__name__)} {error}"
                break
        if params.allowed_token_ids:
            kept = to_device(params.allowed_token_ids, device)
            adjusted[i] = torch.full_like(adjusted[i], MIN_LOGIT).index_copy_(0, kept, adjusted[i, kept])
        if row.mask is not None:
            excluded = ~allowed_tokens(row.mask, logits.shape[-1])
            adjusted[i].masked_fill_(to_device(excluded.numpy(), device), MIN_LOGIT)
            other = "allowed_token_ids" if params.allowed_token_ids else "logits_processors" if params.logits_processors else None
            if other and row.error is None and not row.num_drafts and adjusted[i].max() == MIN_LOGIT:
                row.error = f"structured_outputs and {other} together leave no token to choose from."
        for banned in banned_tokens(row):
            kept = adjusted[i].index_fill(0, to_device(banned, device), MIN_LOGIT)
            # A grammar or `allowed_token_ids` takes precedence.
            adjusted[i] = torch.where(kept.max() > MIN_LOGIT, kept, adjusted[i])
    return adjusted


def run_logits_processor(process: Callable[..., Tensor], row: SamplingRow, logits: Tensor) -> Tensor:
    """Apply one of `SamplingParams.logits_processors` to the logits of a row; `[vocab_size]` in and out.

    Raises:
        RuntimeError: It failed, or returned something else.
    """
    arguments: list[Any] = [list(row.seq.output_token_ids), logits.clone()]
    if num_parameters(process) == 3:
        arguments.insert(0, list(row.seq.request.prompt_token_ids))
    try:
        processed = process(*arguments)
    except Exception as error:
        raise RuntimeError(f"raised {type(error).__name__}: {error}.") from error
    if not isinstance(processed, Tensor) or processed.shape != logits.shape:
        found = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
        raise RuntimeError(f"must return the logits, {list(logits.shape)}, not {found}.")
    best = float(processed.max())
    if best == MIN_LOGIT:
        raise RuntimeError("leaves no token to choose from.")
    if not math.isfinite(best):
        raise RuntimeError(f"returned a logit of {best}: use a large number.")
    return processed


def banned_tokens(row: SamplingRow) -> list[list[int]]:
    """Tokens that must not come next: before `min_tokens`, the ones that end the text; the last token of a bad word whose other tokens were
    just generated."""
    request, output = row.seq.request, row.seq.output_token_ids
    stops = list(request.stop_reasons) if row.position < row.params.min_tokens else []
    last = output[-1] if output else None
    ends = [
        word[-1]
        for word in request.bad_words
        if len(word) == 1 or (word[-2] == last and tuple(output[1 - len(word) :]) == word[:-1])
    ]
    return [banned for banned in (stops, ends) if banned]


def allowed_tokens(mask: bytes, vocab_size: int) -> Tensor:
    """A mask of `StructuredOutputGrammar.masks` as `[vocab_size]`, bool."""
    return torch.from_numpy(np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab_size, bitorder="little").view(bool))


def apply_penalties(
    logits: Tensor,
    prompt_token_ids: list[int],
    output_token_ids: list[int],
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> Tensor:
    """Make tokens that have occurred less likely; `[vocab_size]` in, a new `[vocab_size]` out.

    Repetition (prompt and output) divides positive logits and multiplies negative ones; presence and frequency
    (output only) subtract, once and for each occurrence.
    """
    logits = logits.clone()
    if repetition_penalty != 1.0:
        seen = to_device(sorted({*prompt_token_ids, *output_token_ids}), logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    if output_token_ids and (presence_penalty or frequency_penalty):
        counts = Counter(output_token_ids)
        repeated, times = to_device(list(counts), logits.device), to_device(list(counts.values()), logits.device, logits.dtype)
        logits[repeated] -= presence_penalty + frequency_penalty * times
    return logits


def filter_logits(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Temperature, then min-p, top-k and top-p. What a filter removes becomes minus infinity."""
    return apply_filters(logits, Filters.of(params, logits.shape[-1], logits.device))


def apply_filters(logits: Tensor, filters: Filters) -> Tensor:
    """`filter_logits` by columns that are on the device."""
    logits = apply_temperature(logits, filters.temperature)
    if filters.min_p is not None:
        logits = apply_min_p(logits, filters.min_p)
    if filters.top_k is not None:
        logits = apply_top_k(logits, filters.top_k, filters.highest_top_k)
    if filters.top_p is not None:
        logits = apply_top_p(logits, filters.top_p)
    return logits


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide by the temperature, `[rows, 1]`: below 1 sharpens the distribution, above flattens it."""
    return logits / temperature


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Remove tokens less likely than `min_p` (`[rows, 1]`) times the most likely one."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), MIN_LOGIT)


def apply_top_k(logits: Tensor, top_k: Tensor, highest: int | None = None) -> Tensor:
    """Keep the `top_k` (`[rows, 1]`, at least 1) largest logits, and what ties with the last of them.

    `highest` is the highest `top_k` below the size of the vocabulary: a caller that knows it spares a wait for the device.
    """
    highest = highest or int(top_k[top_k < logits.shape[-1]].max())
    largest = logits.topk(highest, dim=-1).values
    last_kept = largest.gather(-1, top_k.clamp(max=largest.shape[-1]) - 1)
    unlimited = top_k >= logits.shape[-1]
    return logits.masked_fill((logits < last_kept) & ~unlimited, MIN_LOGIT)


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities reach `top_p` (`[rows, 1]`), at least one, and what ties with the last of them.

    That set is mostly small, so only the most likely tokens are looked at first; the whole vocabulary is sorted if they do not
    reach `top_p`. Holtzman et al., 2019 (arXiv:1904.09751).
    """
    probs = logits.softmax(dim=-1)
    likely, token_ids = probs.topk(min(TOP_P_CANDIDATES, probs.shape[-1]), dim=-1)
    if ((likely.sum(dim=-1, keepdim=True) < top_p) & (top_p < 1)).any():
        likely, token_ids = probs.sort(dim=-1, descending=True)
    keep = likely.cumsum(dim=-1) - likely < top_p
    keep[:, 0] = True
    last_kept = logits.gather(-1, token_ids).masked_fill_(~keep, -MIN_LOGIT).amin(dim=-1, keepdim=True)
    return logits.masked_fill((logits < last_kept) & (top_p < 1), MIN_LOGIT)


def draw(logits: Tensor, keys: np.ndarray) -> Tensor:
    """One token per row from the distribution that the logits describe, `[rows]`; `keys` are the rows' `random_keys`.

    The tokens run a race. Each one's time is a random number from an exponential distribution, divided by its probability, and the
    first wins: every token with exactly its probability. Rounding errors of the logits matter only when two tokens arrive at almost the
    same moment. vLLM has the same race (`sample_with_exponential_noise` in `vllm/v1/sample/ops/topk_topp_sampler.py`).
    """
    return argmax(logits.softmax(dim=-1) / exponential_noise(keys, logits.shape[-1], logits.device))


def random_keys(rows: list[SamplingRow]) -> np.ndarray:
    """The `random_key` of each row's token, `[rows]`, int32."""
    return RandomKeys([row.seq.request.seed for row in rows], [row.index for row in rows]).at([row.position for row in rows])


def random_key(seed: int, index: int, position: int) -> int:
    """The key to one token's random numbers: a hash of a request's seed, a sequence's index and a token's position; 32 bits, signed."""
    digest = hashlib.blake2b(f"{seed},{index},{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big", signed=True)


def exponential_noise(
    keys: list[int] | np.ndarray, vocab_size: int, device: torch.device | str = "cpu", first: int = 0
) -> Tensor:
    """Random numbers from an exponential distribution of mean 1, `[len(keys), vocab_size]`, float32, above 0.

    Each is a hash of its row's key and a token id, counted from `first`, so it is the same in any batch.
    """
    device = torch.device(device)
    uniform = _load_ops(device).random_uniform(to_device(keys, device, torch.int32), vocab_size, first)
    return uniform.neg_().log1p_().neg_()


@functools.cache
def load_sampling_ops(device: torch.device) -> Ops | None:
    """The operations of a device that has kernels for sampling: a GPU. None for a CPU, on which the functions of this module are faster."""
    kernels = load_platform_kernels(device)
    return Ops(kernels, Checks.SHAPES) if kernels is not reference and hasattr(kernels, "draw") else None


@functools.cache
def _load_ops(device: torch.device) -> Ops:
    return Ops(load_platform_kernels(device), Checks.NONE)
