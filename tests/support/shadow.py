"""An executor whose cache holds, instead of numbers, a note of what should be there.

The "key and value" of a token is a hash of the token and of everything before it, just as a real one depends on
everything before it. When a step computes a token, the shadow reads its whole context through the block table and
complains about the first slot that holds anything else. The next token is a function of the context too, so a request has
one right answer, which `expected_tokens` computes without any engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.tokenizer import Tokenizer
from minivllm.executor.base import Executor, PendingStep
from minivllm.outputs import Logprob
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import (
    FREED_BLOCK,
    PLACEHOLDER,
    ExecuteModelRequest,
    Masks,
    SchedulerOutput,
    SequenceData,
    SequenceOutput,
)
from minivllm.worker.sampler import random_key

VOCAB_SIZE = 50
EOS = 0


def chain(parent: str, token_id: int) -> str:
    """What stands in the cache for a token after a context."""
    return hashlib.md5(f"{parent}/{token_id}".encode()).hexdigest()


def habit(token_id: int) -> int:
    """What the shadow model likes to say after a token. It leads round in small circles, so that drafts are often right."""
    return token_id * 7 % 10 + 1


def next_token(context: str, last: int, params: SamplingParams, seed: int, index: int, position: int) -> int:
    """The shadow model: a hash of the context and, unless greedy, of the token's key chooses between its habit
    and any token at all.
    """
    noise = "" if params.is_greedy else str(random_key(seed, index, position))
    number = int(hashlib.md5((context + noise).encode()).hexdigest(), 16)
    return number // 4 % VOCAB_SIZE if number % 4 == 0 else habit(last)


def expected_tokens(prompt: list[int], params: SamplingParams, seed: int, index: int, max_num_tokens: int) -> list[int]:
    """What a sequence must produce, whatever happens around it."""
    context = ""
    for token_id in prompt:
        context = chain(context, token_id)
    output: list[int] = []
    while True:
        token_id = next_token(context, (prompt + output)[-1], params, seed, index, len(output))
        output.append(token_id)
        context = chain(context, token_id)
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
        if token_id in stops and len(output) >= params.min_tokens:
            return output
        if len(prompt) + len(output) >= max_num_tokens:
            return output


class Violation(BaseException):
    """A broken invariant. Not an Exception: those the engine turns into errors of requests, and the test would pass."""


class ShadowExecutor(Executor):
    """Checks every read and write of the cache against what ought to be there, and every step against its limits.

    Several steps may be in flight. They are computed in the order of launches, as by a device, and the results are kept until they are asked
    for. What was in a step that failed is ruined from then on: its tokens mean nothing, and what it writes neither.
    """

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int, max_concurrent_batches: int = 1) -> None:
        self.max_concurrent_batches = max_concurrent_batches
        self.sampled: dict[int, dict[int, int]] = {}
        """Tokens that the device has sampled, by sequence and position."""
        self.ruined: set[int] = set()
        self.num_in_flight = self.most_in_flight = self.num_placeholders = 0
        self.num_blocks = (num_gpu_blocks, num_cpu_blocks)
        self.block_size = block_size
        self.gpu = [[None] * block_size for _ in range(num_gpu_blocks)]
        self.cpu = [[None] * block_size for _ in range(num_cpu_blocks)]
        self.scheduler: Scheduler  # set when the engine is made
        self.config: SchedulerConfig
        self.fail_at: set[int] = set()
        self.num_steps = 0
        self.num_swapped = self.num_copied = self.num_preempted = self.num_mixed = self.num_accepted = 0

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self.num_blocks

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        assert (num_gpu_blocks, num_cpu_blocks) == self.num_blocks

    def watch(self, scheduler: Scheduler) -> None:
        """Look at each step as the scheduler decides it, too."""
        schedule = scheduler.schedule

        def watched_schedule() -> SchedulerOutput:
            self.output = schedule()
            return self.output

        self.scheduler, scheduler.schedule = scheduler, watched_schedule

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        try:
            self.observe(self.output)
            return self._execute(request, self.output)
        except AssertionError as error:
            raise Violation(str(error)) from error

    def sample_tokens(self, masks: Masks) -> PendingStep:
        execute = super().sample_tokens(masks)
        try:
            results = execute()
        except Violation:
            raise
        except BaseException as error:
            items = [*(item.seq for item in self.output.scheduled), *self.output.preempted, *self.output.swapped_in]
            self.ruined.update(seq.seq_id for seq in items)
            outcome: list[SequenceOutput] | BaseException = error
        else:
            outcome = results
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return lambda: self.deliver(outcome)

    def deliver(self, outcome: list[SequenceOutput] | BaseException) -> list[SequenceOutput]:
        """Hand over the results of a step, or its failure."""
        self.num_in_flight -= 1
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def observe(self, output: SchedulerOutput) -> None:
        """Called with each step before it is executed; tests put their own assertions here."""

    def _execute(self, request: ExecuteModelRequest, output: SchedulerOutput) -> list[SequenceOutput]:
        self.num_steps += 1
        self.check_limits(output)
        if self.num_steps in self.fail_at:
            raise RuntimeError("planned failure")
        for block, host in request.blocks_to_swap_out:
            self.cpu[host] = list(self.gpu[block])
        for host, block in request.blocks_to_swap_in:
            self.gpu[block] = list(self.cpu[host])
        copies = [(list(self.gpu[source]), destination) for source, destination in request.blocks_to_copy]
        for content, destination in copies:
            self.gpu[destination] = content
        self.num_swapped += len(output.blocks_to_swap_out)
        self.num_copied += len(copies)
        self.num_preempted += len(output.preempted)
        self.num_mixed += output.phase == "mixed"
        return [self.compute_ruined(seq) if seq.seq_id in self.ruined else self.compute(seq) for seq in request.sequences]

    def compute_ruined(self, seq: SequenceData) -> SequenceOutput:
        """Compute a sequence that was in a step that failed: nothing right, and in blocks of its own."""
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_tokens):
            self.gpu[seq.block_table[position // self.block_size]][position % self.block_size] = "ruined"
        return SequenceOutput([1] * (seq.num_samples + seq.num_drafts if seq.num_samples else 0))

    def check_limits(self, output: SchedulerOutput) -> None:
        assert len(output.scheduled) <= self.config.max_num_seqs
        assert sum(item.num_tokens for item in output.scheduled) == output.num_batched_tokens
        assert output.num_batched_tokens <= self.config.max_num_batched_tokens
        assert len({item.seq.seq_id for item in output.scheduled}) == len(output.scheduled)
        assert all(item.num_tokens > 0 for item in output.scheduled)
        begun = [item.seq for item in output.scheduled if item.seq.num_computed_tokens == 0 or item.seq in output.swapped_in]
        assert not any(seq.num_tokens_in_flight for seq in begun), "admitted again before its tokens came"
        if not self.config.enable_chunked_prefill:
            assert output.phase != "mixed"
        assert self.scheduler.num_running <= self.config.max_num_seqs
        check_blocks(self.scheduler)
        self.check_drafts(output)

    def check_drafts(self, output: SchedulerOutput) -> None:
        """Drafts only where they may be, and never where the prefix cache finds them."""
        for item in output.scheduled:
            seq, num_drafts = item.seq, len(item.draft_token_ids)
            if num_drafts:
                assert num_drafts <= self.config.num_speculative_tokens
                assert (seq.num_uncomputed_tokens, item.num_tokens) == (1, 1 + num_drafts)
                assert seq.num_tokens + num_drafts < seq.request.max_num_tokens
        manager = self.scheduler.block_manager
        for seq in self.scheduler.running:
            for i, block in enumerate(manager.get_block_table(seq)):
                if block != FREED_BLOCK and manager.gpu_allocator._hash_of[block] is not None:
                    num_computed = seq.num_computed_tokens - seq.num_tokens_in_flight
                    assert (i + 1) * self.block_size <= num_computed, "the prefix cache offers what is not computed"

    def compute(self, seq: SequenceData) -> SequenceOutput:
        request, table, start = seq.request, seq.block_table, seq.num_computed_tokens
        num_drafts, end = seq.num_drafts, start + seq.num_tokens
        siblings = range(seq.index, seq.index + seq.num_samples)
        live = next(item.seq for item in self.output.scheduled if item.seq.seq_id == seq.seq_id)
        sampled, num_known = self.sampled.setdefault(seq.seq_id, {}), len(live.token_ids)
        # What a worker reads from the cache, and what it is given.
        token_ids = [live.token_ids[i] if i < num_known else sampled[i] for i in range(start)] + seq.token_ids
        assert PLACEHOLDER not in token_ids[:-1]
        if token_ids[-1] == PLACEHOLDER:
            token_ids[-1] = sampled[max(sampled)]
            assert max(sampled) == end - 1, "the token sampled last is another one"
            self.num_placeholders += 1
        if seq.request.sampling_params.needs_output_tokens:
            assert len(seq.output_token_ids) == seq.num_output_tokens, "the sampler does not know all output tokens"
        context, chosen, logprobs = "", [], []
        history = str(seq.output_token_ids) if seq.output_token_ids else ""
        first_seen = max(0, start - self.config.window + 1) if self.config.window else 0
        for position in range(end):
            context = chain(context, token_ids[position])
            if position < first_seen:
                continue  # no token of this step looks at it
            block, offset = table[position // self.block_size], position % self.block_size
            assert block != FREED_BLOCK, f"{live}: position {position} is seen, but its block has been freed"
            if position >= start:
                assert self.scheduler.block_manager.gpu_allocator.ref_counts[block] == 1, "write into a shared block"
                self.gpu[block][offset] = context
            assert self.gpu[block][offset] == context, f"{live}: position {position} holds something else"
            if position >= end - 1 - num_drafts:
                number = seq.num_output_tokens + position - (end - 1 - num_drafts)
                args = (context + history, token_ids[position], request.sampling_params, request.seed)
                tokens = [next_token(*args, index, number) for index in siblings]
                chosen += [allowed_token(token, seq.masks[position - end]) for token in tokens] if seq.masks else tokens
                logprobs += [{token: Logprob(-token - number / 100, 1)} for token in chosen[-len(tokens) :]]
        if chosen:
            sampled[end - num_drafts] = chosen[0]
        drafts = seq.token_ids[seq.num_tokens - num_drafts :]
        self.num_accepted += chosen[:num_drafts] == drafts != []
        return SequenceOutput(chosen, logprobs if request.sampling_params.logprobs is not None else None)


def allowed_token(token_id: int, mask: bytes) -> int:
    """The first token from this one on that a mask allows."""
    allowed = [t for t in range(VOCAB_SIZE) if mask[t // 8] >> t % 8 & 1]
    return min(allowed, key=lambda t: (t < token_id, t))


def check_blocks(scheduler: Scheduler) -> None:
    """Invariant 1: free and referenced blocks are all there are; reference counts equal the tables' entries."""
    manager = scheduler.block_manager
    for allocator, tables in (
        (manager.gpu_allocator, manager.block_tables),
        (manager.cpu_allocator, manager.swapped_tables),
    ):
        counts = [0] * allocator.num_blocks
        for table in tables.values():
            held = [block for block in table if block != FREED_BLOCK]
            assert len(set(held)) == len(held), "a table names a block twice"
            assert held == table[len(table) - len(held) :], "a block is freed before an earlier one"
            for block in held:
                counts[block] += 1
        assert counts == allocator.ref_counts
        assert allocator.num_free == counts.count(0)


def shadow_engine(
    num_gpu_blocks: int,
    num_cpu_blocks: int = 0,
    block_size: int = 4,
    *,
    enable_prefix_caching: bool = False,
    watermark: float = 0.01,
    max_model_len: int = 1000,
    scheduler_cls: type[Scheduler] = Scheduler,
    max_concurrent_batches: int = 1,
    tokenizer: Tokenizer | None = None,
    **scheduler_args,
) -> tuple[LLMEngine, ShadowExecutor]:
    """The real engine, scheduler and block manager on a shadow model."""
    model_config = ModelConfig("shadow", Path(), "Shadow", {}, 1, 1, 1, 1, VOCAB_SIZE, max_model_len, (EOS,))
    scheduler_config = SchedulerConfig(**scheduler_args)
    executor = ShadowExecutor(num_gpu_blocks, num_cpu_blocks, block_size, max_concurrent_batches)
    engine = LLMEngine.from_executor(
        model_config,
        CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching, watermark=watermark),
        scheduler_config,
        executor,
        tokenizer,
        scheduler_cls=scheduler_cls,
        clock=lambda: float(executor.num_steps),
    )
    executor.watch(engine.scheduler)
    executor.config = scheduler_config
    return engine, executor


def set_clock(engine: LLMEngine, clock: Callable[[], float]) -> None:
    """Give an engine another clock."""
    engine.core.clock = engine.input_processor.clock = clock
