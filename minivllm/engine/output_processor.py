"""From new tokens to what the user gets: text, stop strings, log-probabilities, times.

Mirrors `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

from dataclasses import replace

from minivllm.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from minivllm.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.request import Request, Sequence, SequenceStatus
from minivllm.sampling_params import RequestOutputKind
from minivllm.scheduler_output import SchedulerOutput, SequenceOutput


class SequenceText:
    """The text and log-probabilities of one sequence so far.

    Args:
        request: The sequence's request.
        index: The sequence's number in it.
        tokenizer: None where there is no text.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.sampling_params
        self.output = CompletionOutput(index, "", [])
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens) if tokenizer else None
        )
        self._text = ""
        """All text, with the end that is held back because it may be the beginning of a stop string."""
        self._num_held = max((len(stop) for stop in params.stop_strings), default=1) - 1
        self._num_given_characters, self._num_given_tokens, self._gave_end = 0, 0, False
        """How much of it `take_new` has given out."""

    def add(self, token_id: int, logprobs: dict[int, Logprob] | None, visible: bool = True) -> str | None:
        """Take in one more token. Returns the stop string that it completed, if any; the text then ends before it.

        The token that ended a sequence is not `visible`: it is kept among the ids and out of the text.
        """
        self.output.token_ids.append(token_id)
        if logprobs is not None and self.output.logprobs is not None:
            self.output.logprobs.append(add_decoded_tokens(logprobs, self._tokenizer))
            self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + logprobs[token_id].logprob
        if self._detokenizer is None or not visible:
            return None
        new = self._detokenizer.add(token_id)
        self._text += new
        stop = None
        if new and self._params.stop and len(self.output.token_ids) > self._params.min_tokens:
            stop = self._cut_at_stop(len(new))
        self.output.text = self._text if stop is not None else self._text[: max(0, len(self._text) - self._num_held)]
        return stop

    def finish(self) -> str | None:
        """Give out what was held back. Returns the stop string that stands in it, if any."""
        if self._detokenizer is None:
            return None
        new = self._detokenizer.flush()
        self._text += new
        stop = self._cut_at_stop(len(new)) if new and len(self.output.token_ids) > self._params.min_tokens else None
        self.output.text = self._text
        return stop

    def copy(self) -> CompletionOutput:
        """All there is so far, in lists of its own."""
        logprobs = None if self.output.logprobs is None else list(self.output.logprobs)
        return replace(self.output, token_ids=list(self.output.token_ids), logprobs=logprobs)

    def take_new(self) -> CompletionOutput | None:
        """What there is since the last call; None if that is nothing."""
        output, num_characters, num_tokens = self.output, self._num_given_characters, self._num_given_tokens
        if len(output.token_ids) == num_tokens and not (output.finished and not self._gave_end):
            return None
        self._num_given_characters, self._num_given_tokens, self._gave_end = (
            len(output.text),
            len(output.token_ids),
            output.finished,
        )
        logprobs = None if output.logprobs is None else output.logprobs[num_tokens:]
        return replace(output, text=output.text[num_characters:], token_ids=output.token_ids[num_tokens:], logprobs=logprobs)

    def _cut_at_stop(self, num_new: int) -> str | None:
        """Cut the text before the earliest stop string that ends in its last `num_new` characters."""
        found: tuple[int, str] | None = None
        for stop in self._params.stop_strings:
            position = self._text.find(stop, max(0, len(self._text) - num_new - len(stop) + 1))
            if position >= 0 and (found is None or position < found[0]):
                found = (position, stop)
        if found is None:
            return None
        self._text = self._text[: found[0]]
        return found[1]


def add_decoded_tokens(logprobs: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The same log-probabilities with each token's text."""
    if tokenizer is None:
        return logprobs
    return {
        token_id: replace(logprob, decoded_token=tokenizer.decode([token_id], skip_special_tokens=False))
        for token_id, logprob in logprobs.items()
    }


class RequestState:
    """What the output processor keeps of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.texts: dict[int, SequenceText] = {}
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if request.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(request.prompt_token_ids)


class OutputProcessor:
    """Keeps the text of every request that runs and makes the outputs of each step."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.states: dict[str, RequestState] = {}

    def add_request(self, request: Request) -> None:
        """Begin to keep a request."""
        self.states[request.request_id] = RequestState(request)

    def process(
        self,
        output: SchedulerOutput,
        results: list[SequenceOutput],
        advanced: list[tuple[Sequence, int]],
        now: float,
    ) -> list[tuple[Sequence, str]]:
        """Take in a step's tokens.

        Args:
            output: What was computed.
            results: What the model gave for it.
            advanced: The sequences with new tokens and the number of their result, from `Scheduler.update`.
            now: The engine's time.

        Returns:
            Sequences whose text completed a stop string, with that string. The caller ends them.
        """
        stopped: list[tuple[Sequence, str]] = []
        for scheduled, result in zip(output.scheduled, results, strict=True):
            state = self.states.get(scheduled.seq.request.request_id)
            if result.prompt_logprobs and state is not None and state.prompt_logprobs is not None:
                for position, entry in result.prompt_logprobs.items():
                    state.prompt_logprobs[position] = add_decoded_tokens(entry, self.tokenizer)
        for seq, i in advanced:
            state = self.states[seq.request.request_id]
            if state.request.metrics.first_token_time is None:
                state.request.metrics.first_token_time = now
            text = state.texts.get(seq.index)
            if text is None:
                text = state.texts[seq.index] = SequenceText(seq.request, seq.index, self.tokenizer)
            # A result has one token for each sibling that it was forked into, in the order of their indices; or, with
            # speculation, several for one sequence.
            first = seq.index - output.scheduled[i].seq.index
            new_token_ids = seq.token_ids[seq.num_prompt_tokens + len(text.output.token_ids) :]
            stop = None
            for position, token_id in enumerate(new_token_ids, start=first):
                logprobs = results[i].logprobs[position] if results[i].logprobs else None
                is_last = position == first + len(new_token_ids) - 1
                ended_it = is_last and seq.status is SequenceStatus.FINISHED_STOPPED
                stop = text.add(token_id, logprobs, visible=not ended_it)
                if stop is not None:
                    break  # the tokens after a stop string are dropped
            if stop is None and seq.finished:
                stop = text.finish()
            if stop is not None:
                stopped.append((seq, stop))
        return stopped

    def make_output(self, request: Request, now: float) -> RequestOutput:
        """What there is of a request, or what is new if it wants deltas; a finished one is then forgotten."""
        state = self.states[request.request_id]
        is_delta = request.sampling_params.output_kind is RequestOutputKind.DELTA
        completions = []
        for seq in request.sequences:
            text = state.texts.get(seq.index)
            if text is None:
                text = state.texts[seq.index] = SequenceText(request, seq.index, self.tokenizer)
            if seq.finished and text.output.finish_reason is None:
                if seq.status is SequenceStatus.FINISHED_ERROR:
                    text.finish()
                text.output.finish_reason = seq.finish_reason
                text.output.stop_reason = seq.stop_reason
            completion = text.take_new() if is_delta else text.copy()
            if completion is not None:
                completions.append(completion)
        prompt_logprobs = state.prompt_logprobs
        if is_delta:
            state.prompt_logprobs = None
        finished = request.finished
        if finished:
            request.metrics.finished_time = now
            del self.states[request.request_id]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            finished=finished,
            metrics=replace(request.metrics),
            prompt_logprobs=prompt_logprobs,
            error=request.error,
        )
