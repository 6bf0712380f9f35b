"""The checks of lesson 01 for the draw, for the sampler as a whole, and for the sampler in the engine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_01.detokenizer import REAL_MODEL
from minivllm.course.lessons.lesson_01.filters import Function, make_logits, show
from minivllm.course.observations import fail, require, rounds
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import SequenceData
from minivllm.worker.sampler import SampledToken, Sampler, SamplingRow

DrawCase = tuple[list[float], list[float]]
"""The logits and the noise of a row."""
_DRAWS = 20_000


def check_draw(draw: Function) -> None:
    """The token of each row whose noise, divided by its probability, is the smallest."""
    for rng in rounds("draw", 60):
        _compare_draws(draw, [draw_case(rng, size) for size in [rng.randint(3, 9)] * rng.randint(1, 4)])
    high = ([210.0, 211.0, 205.0], [1.0, 0.5, 9.0])
    rare = ([0.0] + [-18.0] * 5000, [3.0] + [1.0] * 4000 + [1e-8] + [1.0] * 999)
    removed = ([0.0] + [-math.inf] * 3, [5.0] + [1e-30] * 3)
    for case in (high, rare, removed):
        _compare_draws(draw, [case])


def draw_case(rng: random.Random, vocab_size: int) -> DrawCase:
    """A row in which the winner is clearly ahead, some tokens have been removed, and sometimes an unlikely one wins."""
    while True:
        logits = [rng.randint(-12, 12) / 4 for _ in range(vocab_size)]
        for token in rng.sample(range(vocab_size), rng.randint(0, vocab_size - 1)):
            logits[token] = -math.inf
        noise = [rng.expovariate(1.0) + 1e-3 for _ in logits]
        if rng.random() < 0.5:
            noise[rng.randrange(vocab_size)] = 2.0**-10
        first, second = arrivals(logits, noise).sort().values[:2]
        if second > 1.05 * first:
            return logits, noise


def arrivals(logits: list[float], noise: list[float]) -> Tensor:
    """When each token of a row arrives."""
    return torch.tensor(noise).double() / torch.tensor(logits).double().softmax(dim=0)


def _compare_draws(draw: Function, cases: list[DrawCase]) -> None:
    logits, noise = (torch.tensor(part) for part in zip(*cases, strict=True))
    before = {"logits": (logits, logits.clone()), "noise": (noise, noise.clone())}
    got = draw(logits, noise)
    size = list(got.shape) if isinstance(got, Tensor) else repr(got)
    must = f"draw must return a tensor of {len(cases)} token ids, one for each row, but returned"
    require([len(cases)], size, f"{must} {size}. Look at its last line.")
    for name, (now, then) in before.items():
        changed = f"draw changed the {name} that it was given; expected them as they were. Look for an assignment into them."
        require(True, torch.equal(now, then), changed)
    whole = f"draw must return token ids, which are whole numbers, but returned {got.dtype}. Look at its last line."
    require(False, got.is_floating_point(), whole)
    for row, (case, token) in enumerate(zip(cases, got.tolist(), strict=True)):
        _compare_draw(f"row {row} of {len(cases)}", *case, token)


def _compare_draw(where: str, logits: list[float], noise: list[float], got: int) -> None:
    if not 0 <= got < len(noise):
        fail(f"draw returned token {got} for a vocabulary of {len(noise)}. Look at its last line.")
    seen = f"probabilities {show(torch.tensor(logits).softmax(dim=0))} and noise {show(noise)}"
    hint = "a token's time is its noise divided by its probability, and a removed token never arrives."
    if max(logits) > 100:
        seen = f"logits {show(logits)} and noise {show(noise)}"
        hint = "exp(210) is infinity in float32, and softmax only needs the differences between logits."
    elif len(noise) > 10:
        seen = f"{len(noise):,} tokens, most of them rare,"
    times = arrivals(logits, noise)
    wanted = int(times.argmin())
    require(wanted, got, f"draw, with {seen} in {where}: expected token {wanted}, which arrives first, at {times[wanted]:.3g}; got {got}, which "
            f"arrives at {times[got]:.3g}. Look at the times: {hint}")  # fmt: skip


def check_sampler(sampler_class: type) -> None:
    """A batch of rows with different parameters: the same tokens as the engine's sampler, alone and together."""
    sampler = sampler_class()
    for number, rng in enumerate(rounds("sampler", 70)):
        vocab_size = rng.randint(8, 24)
        logits = make_logits(rng, 30 if number % 7 == 5 else rng.randint(1, 6), vocab_size)
        rows = [make_random_row(rng, vocab_size, kind=number % 7) for _ in logits]
        wanted = [token.token_id for token in Sampler().sample(logits, rows)]
        got = sample(sampler, logits, rows)
        for i, (row, theirs, mine) in enumerate(zip(rows, wanted, got, strict=True)):
            require(theirs, mine,
                f"MySampler, row {i} of {len(rows)} with {describe(row)}, position {row.position}, seed {row.seq.request.seed}, index "
                f"{row.index} and logits {show(logits[i])}: expected token {theirs}, got {mine}. Look at {_places(row)}.",
            )  # fmt: skip
        alone = [sample(sampler, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        require(got, alone, f"MySampler drew {got} for {len(rows)} rows together, but {alone} for the same rows one by one; expected the same. "
                "Look at where the noise comes from: the row's seed, index and position, and nothing else.")  # fmt: skip
    check_distribution(sampler)


def check_distribution(sampler: Any) -> None:
    """20,000 draws against the exact probabilities, with temperature, top-k and top-p combined."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.0, -1.0, -3.0]])
    params = SamplingParams(temperature=0.5, top_k=4, top_p=0.99, seed=5)
    weights = [*(math.exp(logit / 0.5) for logit in (2.0, 1.5, 1.0, 0.0)), 0.0, 0.0]
    counts = [0] * len(weights)
    for start in range(0, _DRAWS, 2000):
        rows = [make_row(params, seed=5, index=i) for i in range(start, start + 2000)]
        for token in sample(sampler, logits.expand(2000, -1), rows):
            counts[token] += 1
    for token, (weight, got) in enumerate(zip(weights, counts, strict=True)):
        prob = weight / sum(weights)
        is_likely = abs(got - _DRAWS * prob) <= 4.5 * math.sqrt(_DRAWS * prob * (1 - prob))
        require(True, is_likely,
            f"MySampler drew token {token} {got} times in {_DRAWS:,}; expected about {_DRAWS * prob:.0f}, because its probability is {prob:.4f}. "
            "Look at draw, and at the random keys, which must differ from row to row.",
        )  # fmt: skip


def make_row(
    params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = (), *, seed: int = 0, index: int = 0, eos: Sequence[int] = ()
) -> SamplingRow:  # fmt: skip
    """A row of a batch, as the engine's model runner makes it."""
    request = EngineCoreRequest("r", list(prompt), params, max_num_tokens=1000, eos_token_ids=tuple(eos), seed=seed)
    known = list(output) if params.has_penalties else []  # the engine sends it only where it is needed
    seq = SequenceData(request, 0, index, [0], 0, [0], len(output), known, num_samples=1, num_drafts=0, is_decode=True)
    return SamplingRow(seq, index)


def make_random_row(rng: random.Random, vocab_size: int, kind: int = 4) -> SamplingRow:
    """A row with random parameters: greedy, one filter, penalties, a text too short to end, or all at once."""
    options: dict[str, Any] = {"temperature": rng.choice((0.0, 0.5, 1.0, 2.0))}
    if kind == 1:
        options = {"temperature": 2.0} | rng.choice(({"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.4}))
    if kind == 5:  # in another order, the filters would leave other tokens
        options = {"temperature": rng.choice((1.0, 2.0)), "min_p": 0.15, "top_k": 5, "top_p": rng.choice((0.6, 0.8))}
    if kind in (4, 6):
        options |= {"top_k": rng.choice((0, 3, 5)), "top_p": rng.choice((1.0, 0.83)), "min_p": rng.choice((0.0, 0.07))}
    if kind in (2, 4, 6):
        options |= {"repetition_penalty": rng.choice((1.0, 2.0)), "presence_penalty": rng.choice((0.0, 0.5))}
        options["frequency_penalty"] = rng.choice((0.0, 0.25))
    if kind in (3, 4, 6):
        options["min_tokens"] = rng.choice((0, 2, 4))
    prompt, output = rng.choices(range(vocab_size), k=3), rng.choices(range(vocab_size), k=rng.randint(0, 5))
    eos, seed, index = rng.sample(range(vocab_size), 2), rng.randrange(1000), rng.randrange(3)
    return make_row(SamplingParams(max_tokens=50, **options), prompt, output, seed=seed, index=index, eos=eos)


def sample(sampler: Any, logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """The tokens that a learner's sampler chooses, after a look at what it returns."""
    before = logits.clone()
    sampled = sampler.sample(logits, rows)
    if not isinstance(sampled, list) or not all(isinstance(token, SampledToken) for token in sampled):
        must = "must return a list of SampledToken, one for each row"
        fail(f"MySampler.sample {must}, but returned {sampled!r:.200}. Look at its last line.")
    lengths = f"MySampler.sample was given {len(rows)} rows, but returned {len(sampled)} tokens. Look at its last line."
    require(len(rows), len(sampled), lengths)
    changed = (
        "MySampler.sample changed the logits that it was given; expected them as they were. Look for an assignment into them."
    )
    require(True, torch.equal(logits, before), changed)
    if not all(type(token.token_id) is int for token in sampled):
        must = "must put plain numbers (int) into its SampledToken"
        fail(f"MySampler.sample {must}, but the first has {sampled[0].token_id!r}. Look at tolist().")
    return [token.token_id for token in sampled]


def _places(row: SamplingRow) -> str:
    """Possible causes of a wrong token, for a message."""
    if describe(row) == f"temperature={row.params.temperature:g}" and row.params.temperature > 0:
        return "the random key and the noise of this row, and at its temperature"
    order = "the order (forbidden stops, penalties, temperature, min-p, top-k, top-p)"
    others = "at which rows are greedy, and at the random key and the noise of this row"
    stops = list(row.seq.request.stop_reasons)
    least = f". Its stop tokens are {stops}: min_tokens forbids them as long as the position, {row.position} here, is below it"
    return f"{order}, {others}{least if row.params.min_tokens else ''}"


_SHOWN = ("temperature", "min_p", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def describe(row: SamplingRow) -> str:
    """The parameters of a row that are not the defaults."""
    default, params = SamplingParams(max_tokens=50), row.params
    changed = [f"{name}={getattr(params, name):g}" for name in _SHOWN if getattr(params, name) != getattr(default, name)]
    return ", ".join(changed) or "temperature=1"


_REAL = "MySampler: the checks above have not tried it with 49,152 tokens"


def check_sampler_text(sampler_class: type) -> None:
    """In the engine, with the real model: a learner's sampler chooses the same tokens as the engine's own."""
    from minivllm import LLM

    troubles: list[BaseException] = []

    class Compared(Sampler):
        """Both samplers on the same logits."""

        ours = sampler_class()

        def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
            wanted = super().sample(logits, rows)
            try:
                for theirs, mine, row in zip(wanted, sample(self.ours, logits, rows), rows, strict=True):
                    case = f"With the real model, token {row.position + 1} of the text with {describe(row)}: expected token"
                    require(theirs.token_id, mine, f"{case} {theirs.token_id}, got {mine}. Look at {_REAL}.")
            except Exception as error:  # the engine would only end the requests
                troubles.append(error)
                raise
            return wanted

    LLM("smollm2-135m", **REAL_MODEL, sampler_cls=Compared).generate(list(_PROMPTS), list(_TEXT_PARAMS), use_tqdm=False)
    if troubles:
        raise troubles[0]


def watch(**parts: type) -> None:
    """Print a text while the real model writes it, with a learner's `sampler_cls` and `detokenizer_cls`."""
    from minivllm import LLM

    engine = LLM("smollm2-135m", **REAL_MODEL, **parts).llm_engine
    print(f"{_WATCHED[0]!r}, up to {_WATCHED[1].stop_strings[0]!r}:")
    engine.add_request("watched", *_WATCHED)
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                print(f"MySampler does not work yet: {output.error}" if output.error else repr(output.outputs[0].text))
        except NotImplementedError:
            engine.abort_request("watched")
            print("MyDetokenizer is not written yet.")


_WATCHED = ("Five emoji: 🌳", SamplingParams(temperature=0.8, top_p=0.8, seed=3, max_tokens=24, stop=["🌪🌪"]))
_PROMPTS = ("The king said:", "Once upon a time", "My favourite animal is the", "Dear Sir,")
_TEXT_PARAMS = (
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=3, max_tokens=24),
    SamplingParams(temperature=1.2, min_p=0.1, repetition_penalty=1.3, seed=4, max_tokens=24, n=2),
    SamplingParams(temperature=0.5, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=20, seed=5, max_tokens=24),
)
