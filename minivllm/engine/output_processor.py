"""From new tokens to what the user gets: text, stop strings, log-probabilities.

The engine core gives tokens; here they become text, and a stop string in the text finishes its sequence in the core. Mirrors
`vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from minivllm.engine.core_messages import EngineCoreOutput, EngineCoreOutputs, NewTokens, StoppedSequence
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.input_processor import ProcessedRequest
from minivllm.engine.tokenizer import Tokenizer
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams


class SequenceText:
    """The text and log-probabilities of one sequence so far. Without a tokenizer there is no text."""

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        index: int,
        tokenizer: Tokenizer | None,
        detokenizer_cls: type[IncrementalDetokenizer] = IncrementalDetokenizer,
    ) -> None:
        self.output = CompletionOutput(index, "", [])
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_cls(tokenizer, prompt_token_ids, params) if tokenizer else None
        self._num_given_characters, self._num_given_tokens, self._gave_end = 0, 0, False
        """What `take_new` has returned so far."""

    def add(self, token_id: int, logprobs: dict[int, Logprob] | None, visible: bool = True) -> str | None:
        """Add a token. Returns the stop string that it completes, if any; the text then ends before it.

        A token that finished the sequence is not `visible`: it is in the ids but not in the text.
        """
        self.output.token_ids.append(token_id)
        if logprobs is not None and self.output.logprobs is not None:
            self.output.logprobs.append(add_decoded_tokens(logprobs, self._tokenizer))
            self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + logprobs[token_id].logprob
        if self._detokenizer is None or not visible:
            return None
        stop = self._detokenizer.update(token_id)
        self.output.text = self._detokenizer.text
        return stop

    def finish(self) -> str | None:
        """Release the text that was held back. Returns the stop string that it contains, if any."""
        if self._detokenizer is None:
            return None
        stop = self._detokenizer.finish()
        self.output.text = self._detokenizer.text
        return stop

    def copy(self) -> CompletionOutput:
        """Everything so far, in lists of its own."""
        return self._since(0, 0)

    def take_new(self) -> CompletionOutput | None:
        """What is new since the last call; None if nothing is."""
        output = self.output
        if len(output.token_ids) == self._num_given_tokens and (self._gave_end or output.finish_reason is None):
            return None
        new = self._since(self._num_given_characters, self._num_given_tokens)
        self._num_given_characters, self._num_given_tokens = len(output.text), len(output.token_ids)
        self._gave_end = output.finish_reason is not None
        return new

    def _since(self, num_characters: int, num_tokens: int) -> CompletionOutput:
        output = self.output
        return CompletionOutput(
            output.index,
            output.text[num_characters:],
            output.token_ids[num_tokens:],
            output.cumulative_logprob,
            None if output.logprobs is None else output.logprobs[num_tokens:],
            output.finish_reason,
            output.stop_reason,
        )


class RequestState:
    """The frontend's side of an unfinished request.

    Attributes:
        finished: Whether it gets no more tokens. The frontend can know that before the core does.
        engine_index: The replica where it is, or was last.
    """

    def __init__(
        self,
        processed: ProcessedRequest,
        tokenizer: Tokenizer | None,
        detokenizer_cls: type[IncrementalDetokenizer] = IncrementalDetokenizer,
    ) -> None:
        request = processed.core_request
        self.prompt, self.request = processed.prompt, request
        self.params = request.sampling_params
        self.metrics = RequestMetrics(request.arrival_time)
        self.error: str | None = None
        self.finished = False
        self.engine_index = 0
        self.texts: dict[int, SequenceText] = {}
        self._is_delta = self.params.output_kind is RequestOutputKind.DELTA
        self._tokenizer, self._detokenizer_cls = tokenizer, detokenizer_cls
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(request.prompt_token_ids)

    def add(self, output: EngineCoreOutput, timestamp: float) -> tuple[bool, list[StoppedSequence]]:
        """Add what a step computed. Returns whether it added tokens, and the sequences whose text completed a stop string."""
        if output.prompt_logprobs and self._prompt_logprobs is not None:
            for position, entry in output.prompt_logprobs.items():
                self._prompt_logprobs[position] = add_decoded_tokens(entry, self._tokenizer)
        has_new, has_ended = False, False
        stopped: list[StoppedSequence] = []
        for new in output.sequences:
            text = self.texts.get(new.index) or self.text(new.index)
            if text.output.finish_reason is not None:
                continue  # a stop string finished it, and the core had gone on meanwhile
            has_new = True
            stop = self._add_tokens(text, new)
            if stop is None and new.finish_reason is None:
                continue
            has_ended = True
            if stop is not None:
                text.output.finish_reason, text.output.stop_reason = "stop", stop
                if new.finish_reason is None:
                    stopped.append(StoppedSequence(self.request.request_id, self.request.number, new.index, stop))
            else:
                reason = new.stop_reason
                if isinstance(reason, int):  # of a special token, perhaps, whose text the request gave as a stop string
                    reason = self.request.special_stops.get(reason, reason)
                text.output.finish_reason, text.output.stop_reason = new.finish_reason, reason
                if isinstance(reason, str) and self.params.include_stop_str_in_output:
                    text.output.text += reason
        self.metrics = output.metrics
        self.error = self.error or output.error
        self.finished = output.finished or (has_ended and self._all_have_ended())
        if self.finished and self.metrics.finished_time is None:
            self.metrics.finished_time = timestamp
        return has_new, stopped

    def _all_have_ended(self) -> bool:
        return len(self.texts) == self.params.n and all(text.output.finished for text in self.texts.values())

    def _add_tokens(self, text: SequenceText, new: NewTokens) -> str | None:
        """Add a sequence's new tokens. Returns the stop string that they complete, if any; tokens after it are dropped."""
        last = len(new.token_ids) - 1
        for i, token_id in enumerate(new.token_ids):
            visible = True
            if new.finish_reason == "stop" and i == last and token_id in self.request.stop_reasons:  # not ended by a grammar
                visible = self.params.include_stop_str_in_output
            stop = text.add(token_id, new.logprobs[i] if new.logprobs else None, visible)
            if stop is not None:
                return stop
        return text.finish() if new.finish_reason is not None else None

    def abort(self) -> None:
        """Finish it here: sequences that have not finished get the finish reason "abort"."""
        for index in range(self.params.n):
            output = self.text(index).output
            output.finish_reason = output.finish_reason or "abort"
        self.finished = True

    def text(self, index: int) -> SequenceText:
        """The text of a sequence."""
        if index not in self.texts:
            self.texts[index] = SequenceText(
                self.request.prompt_token_ids, self.params, index, self._tokenizer, self._detokenizer_cls
            )
        return self.texts[index]

    def make_output(self) -> RequestOutput:
        """Everything so far; or, for `RequestOutputKind.DELTA`, what is new since the last call."""
        is_delta, completions = self._is_delta, []
        for text in self.texts.values() if len(self.texts) == 1 else [self.texts[index] for index in sorted(self.texts)]:
            completion = text.take_new() if is_delta else text.copy()
            if completion is not None:
                completions.append(completion)
        prompt_logprobs = self._prompt_logprobs
        if is_delta:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            metrics=self.metrics,
            prompt_logprobs=prompt_logprobs,
            error=self.error,
        )


def add_decoded_tokens(logprobs: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The same log-probabilities with each token's text."""
    if tokenizer is None:
        return logprobs
    return {
        token_id: Logprob(logprob.logprob, logprob.rank, tokenizer.token_text(token_id)) for token_id, logprob in logprobs.items()
    }


@dataclass
class ProcessedOutputs:
    """What a step changed for the frontend: the requests with new tokens, or that finished; and the sequences to finish in the core, because a
    stop string was found.
    """

    updated: list[RequestState]
    stopped: list[StoppedSequence]


class OutputProcessor:
    """Holds the state of every unfinished request, and adds to it what each step computed."""

    def __init__(self, tokenizer: Tokenizer | None, detokenizer_cls: type[IncrementalDetokenizer] | None = None) -> None:
        self.tokenizer, self.detokenizer_cls = tokenizer, detokenizer_cls or IncrementalDetokenizer
        self.states: dict[str, RequestState] = {}
        self._numbers = itertools.count()

    def add_request(self, processed: ProcessedRequest) -> RequestState:
        """Begin to track a request, and number it."""
        request = replace(processed.core_request, number=next(self._numbers))
        state = RequestState(replace(processed, core_request=request), self.tokenizer, self.detokenizer_cls)
        self.states[request.request_id] = state
        return state

    def abort_request(self, request_id: str) -> RequestState | None:
        """Stop tracking a request; None if it is unknown."""
        return self.states.pop(request_id, None)

    def process_outputs(self, outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """Add the result of a step. Finished requests are not tracked any longer."""
        processed = ProcessedOutputs([], [])
        for output in outputs.outputs:
            state = self.states.get(output.request_id)
            if state is None or state.request.number != output.number:
                continue  # aborted meanwhile
            state.engine_index = outputs.engine_index
            has_new, stopped = state.add(output, outputs.timestamp)
            if stopped:
                processed.stopped += stopped
            if state.finished:
                del self.states[output.request_id]
            if has_new or state.finished:
                processed.updated.append(state)
        return processed
