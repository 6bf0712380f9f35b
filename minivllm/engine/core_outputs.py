"""What an engine core has to tell its frontend: what each step adds to each request, kept until the frontend asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from minivllm.engine.core_messages import EngineCoreOutput, NewTokens, make_output
from minivllm.outputs import Logprob
from minivllm.request import Request, Sequence
from minivllm.scheduler_output import ScheduledSequence, SequenceOutput


class CoreOutputs:
    """Outputs that the frontend has not heard yet.

    Attributes:
        waiting: In the order of the steps.
        num_generated_tokens: How many tokens have been generated so far.
    """

    def __init__(self) -> None:
        self.waiting: list[EngineCoreOutput] = []
        self.num_generated_tokens = 0

    def add_step(
        self,
        step: list[tuple[ScheduledSequence, SequenceOutput]],
        advanced: list[tuple[Sequence, int]],
        errors: Mapping[Request, str],
        unfinished: Mapping[str, Request],
        now: float,
    ) -> None:
        """Add what a step has computed.

        Args:
            step: Its sequences, each with its result.
            advanced: The sequences with new tokens, each with its place in `step`: forked siblings share one.
            errors: Why requests failed.
            unfinished: The requests that have not finished, by id. An id may have been given to another one since the step began.
            now: When the results came.
        """
        new_tokens: dict[Request, list[NewTokens]] = {}
        errors, num_generated = dict(errors), 0
        for seq, i in advanced:
            request, (item, result) = seq.request, step[i]
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            token_ids, logprobs = seq.take_new_tokens(), None
            num_generated += len(token_ids)
            if result.logprobs:  # one for each sibling forked from `item.seq`; or, with drafts, several for one sequence
                first = seq.index - item.seq.index
                logprobs = result.logprobs[first : first + len(token_ids)]
            new = NewTokens(seq.index, token_ids, logprobs, seq.finish_reason, seq.stop_reason)
            if request in new_tokens:
                new_tokens[request].append(new)
            else:
                new_tokens[request] = [new]
            if seq.grammar is not None and seq.grammar.error:
                errors.setdefault(request, f"structured_outputs cannot go on: {seq.grammar.error}")
        self.num_generated_tokens += num_generated
        prompt_logprobs: dict[Request, dict[int, dict[int, Logprob]]] = {}
        for item, result in step:
            if not result.prompt_logprobs:
                continue
            request = item.seq.request
            if request in new_tokens or unfinished.get(request.request_id) is request:
                new_tokens.setdefault(request, [])  # none after a chunk in the middle of the prompt
                prompt_logprobs[request] = result.prompt_logprobs
        for request, sequences in new_tokens.items():
            finished = request.finished
            if finished:
                request.metrics.finished_time = now
            output = make_output(request, sequences, finished, errors.get(request) if errors else None)
            if prompt_logprobs:
                output.prompt_logprobs = prompt_logprobs.get(request)
            self.waiting.append(output)

    def add_failure(self, request: Request, indices: Iterable[int], error: str, now: float) -> None:
        """Add that a request failed, and which of its sequences that ended."""
        request.metrics.finished_time = now
        ended = [NewTokens(index, [], finish_reason="error") for index in indices]
        self.waiting.append(make_output(request, ended, True, error))

    def add_again(self, outputs: list[EngineCoreOutput]) -> None:
        """Add outputs that did not arrive, before all others."""
        self.waiting = outputs + self.waiting

    def forget(self, request_id: str) -> None:
        """Nobody waits for a request any more."""
        self.waiting = [output for output in self.waiting if output.request_id != request_id]

    def take(self) -> list[EngineCoreOutput]:
        """All that waits, once."""
        taken, self.waiting = self.waiting, []
        return taken
