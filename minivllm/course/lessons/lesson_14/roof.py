"""The checks of lesson 14 for what a step must do at least: its operations, its bytes, and the time that a machine needs for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.course.lessons.ranks import situation
from minivllm.course.observations import expect, expect_number, rounds, see


@dataclass(frozen=True)
class Sizes:
    """What a model's steps cost depends on these.

    Attributes:
        layer_weights: Numbers in the linear layers, all layers together: every token is multiplied by them.
        head_weights: Numbers in the head: only the last token of a sequence is multiplied by them.
        num_layers, num_heads, num_kv_heads, head_dim: Of attention.
        weight_bytes, cache_bytes: Bytes of a weight, and of a number in the KV cache.
    """

    layer_weights: int
    head_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: float = 4
    cache_bytes: float = 4

    @classmethod
    def of(cls, config: dict[str, Any], weight_bytes: float = 4, cache_bytes: float = 4) -> Sizes:
        """Of a Llama, from its config.json."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        layer = attention + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(layers * layer, config["vocab_size"] * hidden, layers, heads, kv_heads, head_dim, weight_bytes, cache_bytes)


def step_cost(sizes: Sizes, new: Sequence[int], contexts: Sequence[int]) -> tuple[int, float]:
    """Operations and bytes of a step in which sequence i computes its last `new[i]` of `contexts[i]` tokens."""
    pairs = sum(n * context - n * (n - 1) // 2 for n, context in zip(new, contexts, strict=True))
    products = sum(new) * sizes.layer_weights + len(new) * sizes.head_weights
    flops = 2 * products + 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim * pairs
    token_bytes = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * sizes.cache_bytes
    weights = (sizes.layer_weights + sizes.head_weights) * sizes.weight_bytes
    return flops, weights + token_bytes * (sum(contexts) + sum(new))


def make_sizes(rng: random.Random) -> Sizes:
    """Sizes of some small model."""
    kv_heads = rng.randint(1, 3)
    return Sizes(
        rng.randint(50, 400), rng.randint(20, 200), rng.randint(2, 5), kv_heads * rng.randint(2, 4), kv_heads, rng.choice((4, 8)),
        rng.choice((1, 2, 4)), rng.choice((2, 4)),
    )  # fmt: skip


def _flop_mistakes(sizes: Sizes, new: list[int], contexts: list[int], flops: int) -> dict[str, float]:
    width = 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim
    whole = sum(n * context for n, context in zip(new, contexts, strict=True))
    attention = width * sum(n * context - n * (n - 1) // 2 for n, context in zip(new, contexts, strict=True))
    return {
        "half of it: a multiply-add is two operations": flops / 2,
        "what it would be if every token had logits: only the last one of a sequence needs them": flops
        + 2 * (sum(new) - len(new)) * sizes.head_weights,
        "what it would be if every new token read the whole context: it sees itself and what is before it": flops
        - attention
        + width * whole,
        "what it would be with the scores alone: the values are multiplied, too": flops - attention / 2,
        "what it would be with one head per KV head: every query head computes scores": flops
        - attention
        + attention * sizes.num_kv_heads / sizes.num_heads,
        "without attention": flops - attention,
        "what it would be if a token did not see itself": flops - width * sum(new),
    }


def _byte_mistakes(sizes: Sizes, new: list[int], contexts: list[int], num_bytes: float) -> dict[str, float]:
    token = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * sizes.cache_bytes
    weights = (sizes.layer_weights + sizes.head_weights) * sizes.weight_bytes
    cache = num_bytes - weights
    return {
        "what it would be if each token read the weights: a step reads them once, for all": num_bytes + (sum(new) - 1) * weights,
        "what it would be with a cache for each query head: there are only the KV heads'": weights
        + cache * sizes.num_heads / sizes.num_kv_heads,
        "what it would be with the keys alone: the cache has the values, too": weights + cache / 2,
        "without what is written to the cache": num_bytes - token * sum(new),
        "what it would be if each new token read the cache again: a sequence's is read once": weights
        + token * (sum(n * c for n, c in zip(new, contexts, strict=True)) + sum(new)),
        "without the cache": weights,
        "what it would be without the head": num_bytes - sizes.head_weights * sizes.weight_bytes,
        "what it would be with a cache of weight_bytes: it has cache_bytes": weights
        + cache * sizes.weight_bytes / sizes.cache_bytes,
    }


def check_step_cost(step_cost_of: Callable[..., Any]) -> None:
    """Two operations for each multiply-add, and each byte once."""
    for rng in rounds("cost", 40):
        sizes, count = make_sizes(rng), rng.randint(2, 4)
        new = [rng.choice((1, rng.randint(2, 9))) for _ in range(count)]
        contexts = [n + rng.choice((0, rng.randrange(1, 12))) for n in new]
        said = f"step_cost({sizes}, new={new}, contexts={contexts})."
        flops, num_bytes = step_cost(sizes, new, contexts)
        with situation(said):
            got = step_cost_of(sizes, list(new), list(contexts))
        is_pair = isinstance(got, (tuple, list)) and len(got) == 2
        expect(said, "what is returned", "a pair", "a pair" if is_pair else repr(got)[:80], "the last line: operations and bytes")
        flop_mistakes = {"the bytes: operations come first": num_bytes, **_flop_mistakes(sizes, new, contexts, flops)}
        look = "the products with the weights first, then attention: pairs of a new token and a token that it sees"
        expect_number(said, "operations", flops, got[0], look, flop_mistakes)
        look = "the weights, what is read of the cache, and what is written to it"
        expect_number(said, "bytes", num_bytes, got[1], look, _byte_mistakes(sizes, new, contexts, num_bytes))
        see([round(number) for number in got])  # relative to the right ones, as they were seen above, they are always 1


def check_roofline(least_seconds: Callable[..., Any], break_even: Callable[..., Any]) -> None:
    """The slower of the two limits; and the batch at which they are equal."""
    for rng in rounds("roof", 40):
        flops, num_bytes = rng.randint(1, 999) * 1e8, rng.randint(1, 999) * 1e5
        peak, bandwidth = rng.randint(100, 999) * 1e9, rng.randint(1, 99) * 1e8
        said = f"least_seconds(flops={flops:.4g}, num_bytes={num_bytes:.4g}, peak={peak:.4g}, bandwidth={bandwidth:.4g})."
        compute, memory = flops / peak, num_bytes / bandwidth
        mistakes = {
            "both times, one after the other: the processor computes while it reads": compute + memory,
            "the faster of the two limits": min(compute, memory),
        }
        with situation(said):
            got = least_seconds(flops, num_bytes, peak, bandwidth)
        expect_number(said, "seconds", max(compute, memory), got, "which of the two takes longer", mistakes)
        sizes = replace(make_sizes(rng), weight_bytes=rng.choice((1, 4)))
        if peak * sizes.weight_bytes % (2 * bandwidth) == 0:  # with powers of two, a tie is exact however it is computed
            peak, bandwidth = 2.0 ** rng.randint(36, 39), 2.0 ** rng.randint(28, 32)
        said = f"break_even({sizes}, peak={peak:.4g}, bandwidth={bandwidth:.4g})."
        weights = sizes.layer_weights + sizes.head_weights
        right = next_whole(peak * sizes.weight_bytes, 2 * bandwidth)
        known = {
            "twice the batch: a multiply-add is two operations": next_whole(peak * sizes.weight_bytes, bandwidth),
            "what comes of bandwidth / peak, upside down": next_whole(2 * bandwidth, peak * sizes.weight_bytes),
            "rounded down: there, reading still takes longer": right - 1,
            "not rounded: a batch is a whole number": peak * sizes.weight_bytes / (2 * bandwidth),
            "what it would be with 4 bytes, whatever weight_bytes is": next_whole(peak * 4, 2 * bandwidth),
        }
        with situation(said):
            got = break_even(sizes, peak, bandwidth)
        look = f"the batch at which 2 * batch * {weights} operations take as long as reading {weights} weights"
        expect_number(said, "sequences", right, got, look, known)


def next_whole(numerator: float, denominator: float) -> int:
    """The quotient, rounded up."""
    return int(-(-numerator // denominator))


def check_amdahl(amdahl: Callable[..., Any]) -> None:
    """What a faster part makes of the whole, and what it could make at most."""
    for rng in rounds("amdahl", 40):
        names = rng.sample(["linear", "attention", "norms", "sampling", "schedule", "other"], rng.randint(2, 5))
        profile = {name: rng.randint(1, 400) / 10 for name in names}
        part, factor = rng.choice(names), rng.choice((1.25, 2, 3, 8))
        said = f"amdahl({profile}, {part!r}, {factor})."
        total = sum(profile.values())
        rest = total - profile[part]
        right, most = total / (rest + profile[part] / factor), total / rest
        with situation(said):
            got = amdahl(dict(profile), part, factor)
        is_pair = isinstance(got, (tuple, list)) and len(got) == 2
        expect(
            said,
            "what is returned",
            "a pair",
            "a pair" if is_pair else repr(got)[:80],
            "the last line: the speed-up, and the most",
        )
        share = profile[part] / total
        mistakes = {
            "the factor of the part alone: the rest takes as long as before": factor,
            "the time that is left, as a share: the speed-up is its inverse": 1 / right,
            "one plus what is saved: divide the time before by the time after": 1 + share * (1 - 1 / factor),
            "what comes of a part that takes no time at all": most,
            "the mean of 1 and the factor, weighted by time: times add up, speeds do not": 1 - share + share * factor,
        }
        expect_number(said, "speed-up", right, got[0], "the whole before, divided by the whole after", mistakes)
        known = {
            "one divided by the share of the part: it is the rest that stays": total / profile[part],
            "the speed-up again": right,
        }
        expect_number(said, "most", most, got[1], "what is left when the part takes no time", known)
        see([f"{float(number):.6g}" for number in got])
