"""What has come of one request and has not been taken yet: between the thread of the engine's outputs and a coroutine that waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from minivllm.engine.core_messages import RequestDelta
from minivllm.errors import EngineDeadError
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams


@dataclass
class GeneratedTokens:
    """How many tokens a sequence has, and when its first and its last came, in seconds of `time.perf_counter`."""

    count: int
    first_time: float
    last_time: float


class RequestStream:
    """Joins what is new of a request until somebody asks for it, so that a slow reader costs no more than the text.

    Used from the event loop alone.

    Args:
        request_id, prompt, prompt_token_ids, params: The request.
        number: Of this one among all that have the same id, one after the other.
        arrival_time: When it came, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.params = params
        self.arrival_time = arrival_time
        self.num_prompt_tokens = len(prompt_token_ids)
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.generated: dict[int, GeneratedTokens] = {}
        """Of each sequence, by index."""
        self.finished = False
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._outputs: dict[int, CompletionOutput] = {}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._metrics: RequestMetrics | None = None
        self._error: str | None = None
        self._failure: EngineDeadError | None = None
        self._ended: set[int] = set()
        self._news = asyncio.Event()

    def put(self, delta: RequestDelta) -> None:
        """Add what is new."""
        self._ended.update(new.index for new in delta.outputs if new.finished)
        for new in delta.outputs:
            output = self._outputs.get(new.index)
            if output is None:
                self._outputs[new.index] = new
                continue
            output.text += new.text
            output.token_ids += new.token_ids
            if output.logprobs is not None:
                output.logprobs += new.logprobs or []
            if new.cumulative_logprob is not None:
                output.cumulative_logprob = new.cumulative_logprob
            output.finish_reason, output.stop_reason = new.finish_reason, new.stop_reason
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        self._metrics, self._error, self.finished = delta.metrics, delta.error, delta.finished
        if self.finished or self.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            self._news.set()

    def abort(self) -> None:
        """It was given up: what has not ended ends here."""
        indices = [index for index in range(self.params.n) if index not in self._ended]
        outputs = [CompletionOutput(index, "", [], finish_reason="abort") for index in indices]
        self.put(RequestDelta(self.request_id, self.number, outputs, finished=True, metrics=self._metrics))

    def fail(self, error: EngineDeadError) -> None:
        """Nothing more will come."""
        self._failure = EngineDeadError(str(error))  # one for each stream: a traceback grows with every raise
        self._news.set()

    async def get(self) -> RequestOutput:
        """The next output, as `params.output_kind` wants it.

        Raises:
            EngineDeadError: The engine has failed.
        """
        await self._news.wait()
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        output = RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            [self._outputs[index] for index in sorted(self._outputs)],
            self.finished,
            self._metrics,
            self._prompt_logprobs,
            self._error,
        )
        if self.params.output_kind is RequestOutputKind.DELTA:
            self._outputs, self._prompt_logprobs = {}, None
        else:
            output.outputs = [_copy(completion) for completion in output.outputs]
        return output


def _copy(output: CompletionOutput) -> CompletionOutput:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
