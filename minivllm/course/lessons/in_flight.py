"""The basis of lesson 13: what a client keeps of a request until it has finished, and what it tells the request's user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.engine import core_messages
from minivllm.engine.core_messages import EngineCoreOutputs, SchedulerStats, ToCore, make_output
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest, Request


class TextStream:
    """The text of one continuation, as it grows.

    Attributes:
        text: What the user has been given.
        stop: The stop string that has ended it; None if there was none.
    """

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, request.sampling_params)
        self.text = ""
        self.stop: str | None = None

    def add(self, token_ids: list[int], is_last: bool = False) -> str:
        """Add tokens, after which, perhaps, no more will come. Returns the text that may be shown now.

        What may be the beginning of a stop string is held back; after a stop string there is nothing more.
        """
        before = len(self.text)
        for token_id in token_ids:
            if self.stop is None:
                self.stop = self._detokenizer.update(token_id)
        if self.stop is None and is_last:
            self.stop = self._detokenizer.finish()
        self.text = self._detokenizer.text
        return self.text[before:]


@dataclass
class InFlight:
    """A request that has not finished.

    Attributes:
        request: As its user has sent it.
        tokenizer: Makes text of its tokens.
        streams: The text of each continuation, by index.
        unfinished: The indices of the continuations that go on.
        token_ids: The output so far of these, by index; empty before the first token.
        metrics: As they came with the latest output.
        replica: Which one has it; None while it waits.
        number: That of its latest sending.
        num_deaths: How many replicas in a row have died with it, and not one has given it a token.
    """

    request: EngineCoreRequest
    tokenizer: Any
    streams: list[TextStream] = field(init=False)
    unfinished: set[int] = field(init=False)
    metrics: RequestMetrics = field(init=False)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    replica: int | None = None
    number: int = -1
    num_deaths: int = 0

    def __post_init__(self) -> None:
        indices = range(self.request.sampling_params.n)
        self.streams = [TextStream(self.tokenizer, self.request) for _ in indices]
        self.unfinished, self.metrics = set(indices), RequestMetrics(self.request.arrival_time)


@dataclass(frozen=True)
class Delta:
    """What is new for a user: of a request's continuation with this index, more text, and why it has ended if it has."""

    request_id: str
    index: int
    text: str
    finish_reason: str | None = None


def refusal(request: EngineCoreRequest, reason: str) -> EngineCoreOutputs:
    """What a replica says of a request that its core does not take."""
    return EngineCoreOutputs([make_output(Request(request), [], True, reason)], 0.0, SchedulerStats())


def decode_to_core(data: bytes) -> ToCore:
    """A message to a core; raises a `msgspec.DecodeError` for anything else. A function, which a class that goes to another process may call."""
    return core_messages.decode_to_core(data)
