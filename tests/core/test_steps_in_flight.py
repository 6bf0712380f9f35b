"""Several steps in flight: everything that a request gets is what it gets with one, over random workloads on the shadow model."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from shadow import EOS, VOCAB_SIZE, check_blocks, shadow_engine
from test_invariants import Job, Result, describe, engine_arguments, jobs, run

from minivllm import Scheduler
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.engine.trace import EngineTrace

pytestmark = pytest.mark.slow


numbers = st.sampled_from([1, 2, 2, 3])


class Characters:
    """A tokenizer: token i is the i-th character from "A" on, and the end of a text is none."""

    skipped_token_ids = frozenset({EOS})
    eos_token_id = EOS

    def has(self, token_id: int) -> bool:
        return 0 <= token_id < VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) - ord("A") for character in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.token_text(token_id) for token_id in token_ids if token_id != EOS)

    def token_text(self, token_id: int) -> str:
        return chr(ord("A") + token_id)


@dataclass
class Remainders:
    """A grammar that depends on every token: the next one must not have the remainder by 3 of the sum so far. 9, 19, ... end it."""

    total: int = 0
    error: str | None = None

    def accept_token(self, token_id: int) -> bool:
        assert token_id % 3 != self.total % 3, "a token that the grammar does not allow"
        self.total += token_id
        return token_id % 10 != 9

    def count_valid(self, token_ids: list[int]) -> int:
        grammar = self.fork()
        for count, token_id in enumerate(token_ids):
            if token_id % 3 == grammar.total % 3 or not grammar.accept_token(token_id):
                return count
        return len(token_ids)

    def masks(self, draft_token_ids: tuple[int, ...] = ()) -> list[bytes]:
        totals = [self.total + sum(draft_token_ids[:i]) for i in range(len(draft_token_ids) + 1)]
        return [bytes(sum((8 * i + bit) % 3 != total % 3 and 1 << bit for bit in range(8)) for i in range(7)) for total in totals]

    def fork(self) -> Remainders:
        return Remainders(self.total)


@dataclass
class Flight:
    """A workload, and an engine for it. Requests in `constrained` have a grammar."""

    arguments: dict
    jobs: list[Job]
    constrained: set[str]
    fail_at: set[int] = field(default_factory=set)

    def run(self, max_concurrent_batches: int, scheduler_cls=AsyncScheduler, observe=None):
        options = self.arguments | {"scheduler_cls": scheduler_cls}
        engine, executor = shadow_engine(**options, max_concurrent_batches=max_concurrent_batches, tokenizer=Characters())
        executor.fail_at = self.fail_at
        engine.start_trace()
        if observe is not None:
            executor.observe = lambda output: observe(executor, output)
        add = engine.scheduler.add_request

        def add_with_grammar(request):
            request.grammar = Remainders() if request.request_id in self.constrained else None
            add(request)

        engine.scheduler.add_request = add_with_grammar
        return engine, executor, run(engine, self.jobs)

    def expected(self) -> dict[str, Result]:
        """What becomes of the jobs with one step in flight, if none is aborted and no step fails."""
        patient = [dataclasses.replace(job, abort_after=None) for job in self.jobs]
        return dataclasses.replace(self, jobs=patient, fail_at=set()).run(1, Scheduler)[2]


@st.composite
def demanding_jobs(draw, max_n: int) -> Job:
    job = draw(jobs(40, max_n))
    extras = {
        "presence_penalty": draw(st.sampled_from([0.0] * 5 + [0.5])),
        "logprobs": draw(st.sampled_from([None, 0])),
        "stop": draw(st.sampled_from([[], [], ["B"], ["BH", "DC"], ["HJ"]])),
    }
    return dataclasses.replace(job, params=dataclasses.replace(job.params, **extras))


@st.composite
def flights(draw, with_failures=False, **fixed) -> Flight:
    arguments = draw(engine_arguments(scheduler_cls=AsyncScheduler)) | fixed
    arguments["num_speculative_tokens"] = draw(st.sampled_from([0, 0, 0, 0, 3]))
    jobs_ = draw(st.lists(demanding_jobs(arguments["max_num_seqs"]), min_size=1, max_size=12))
    constrained = {str(i) for i in draw(st.sets(st.integers(0, 11), max_size=2))}
    fail_at = draw(st.sets(st.integers(1, 40), max_size=3)) if with_failures else set()
    return Flight(arguments, jobs_, constrained, fail_at)


def check_all_is_free(engine) -> None:
    """Nothing is left of any request, and nothing is in flight."""
    assert not engine.core.has_unfinished_requests()
    assert engine.executor.num_in_flight == 0
    check_blocks(engine.scheduler)
    manager = engine.block_manager
    assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
    assert manager.get_num_free_cpu_blocks() == manager.num_cpu_blocks
    assert not manager.num_cached_blocks
    assert not engine.output_processor.states
    assert engine.scheduler.num_running == len(engine.scheduler.waiting) == len(engine.scheduler.swapped) == 0


def check_results(results: dict[str, Result], expected: dict[str, Result]) -> None:
    """Tokens, log-probabilities and finish reasons are as expected, unless the request was aborted or failed."""
    for name, result in results.items():
        assert result.finished or result.error is not None
        if result.error is None:
            assert result == expected[name]


def check_trace(trace: EngineTrace, results: dict[str, Result]) -> None:
    """The trace is consistent, survives being saved, and its steps add up to the tokens of each request."""
    assert EngineTrace.from_json(json.loads(json.dumps(trace.to_json()))) == trace
    num_tokens: Counter[tuple[str, int]] = Counter()
    for step in trace:
        assert step.start <= step.launched <= step.awaited <= step.end
        for part in step.scheduled:
            num_tokens[part.key] += part.num_new_tokens
    outputs = [record.output_token_ids for record in trace.requests.values()]
    assert num_tokens.total() == sum(len(tokens) - (i > 0) for output in outputs for i, tokens in enumerate(output))
    for name, result in results.items():
        if result.error is None:
            recorded = trace.requests[name].output_token_ids  # with drafts accepted after a stop string
            assert [ours[: len(theirs)] for ours, theirs in zip(recorded, result.tokens, strict=True)] == result.tokens


@given(flights(), numbers)
def test_all_that_a_request_gets_is_the_same(flight, max_concurrent_batches):
    engine, executor, results = flight.run(max_concurrent_batches)
    describe(executor)
    event(f"most in flight: {executor.most_in_flight}")
    event(f"placeholders: {executor.num_placeholders > 0}")
    assert executor.most_in_flight <= max_concurrent_batches
    expected = flight.expected()
    check_results(results, expected)
    assert all(result.error in (None, "aborted", expected[name].error) for name, result in results.items())
    check_all_is_free(engine)
    check_trace(engine.trace, results)


@given(flights(with_failures=True), numbers)
def test_a_failing_step_ends_its_own_requests_only(flight, max_concurrent_batches):
    """Steps in flight behind it go on for the others; what it wrote is in no cache."""
    in_failed_steps: set[str] = set()

    def observe(executor, output):
        if executor.num_steps + 1 in executor.fail_at:
            sequences = [*(item.seq for item in output.scheduled), *output.preempted, *output.swapped_in]
            in_failed_steps.update(seq.request.request_id for seq in sequences)

    engine, _, results = flight.run(max_concurrent_batches, observe=observe)
    failed = {name for name, result in results.items() if result.error and "planned failure" in result.error}
    event(f"failed: {bool(failed)}")
    assert failed <= in_failed_steps
    check_results(results, flight.expected())
    check_all_is_free(engine)


@given(flights(), numbers, st.integers(1, 30), st.booleans())
def test_an_interrupted_step_ends_its_own_requests_only(flight, max_concurrent_batches, interrupted_step, at_launch):
    """Ctrl-C while a step is launched, or while its results are waited for."""
    raised = 0

    def observe(executor, output):
        if executor.num_steps + 1 == interrupted_step:
            executor.num_steps += 1
            raise KeyboardInterrupt

    options = flight.arguments | {"scheduler_cls": AsyncScheduler}
    engine, executor = shadow_engine(**options, max_concurrent_batches=max_concurrent_batches, tokenizer=Characters())
    executor.observe = lambda output: observe(executor, output)
    sample, step = executor.sample_tokens, engine.step

    def sample_or_raise(masks):
        pending = sample(masks)
        if at_launch and executor.num_steps == interrupted_step:
            pending()
        return pending

    def step_and_go_on():
        nonlocal raised
        try:
            return step()
        except KeyboardInterrupt:
            raised += 1
            return []

    executor.sample_tokens, engine.step = sample_or_raise, step_and_go_on
    results = run(engine, flight.jobs)
    event(f"interrupted: {raised == 1}")
    assert raised <= 1
    check_results(results, dataclasses.replace(flight, constrained=set()).expected())
    check_all_is_free(engine)
