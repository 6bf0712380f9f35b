"""What was sent to the workers, and what they have answered: several messages may be on their way at once.

    send 5 · send 6 ──► every rank: 5, 6 ──► receive 5 · receive 6

Every rank answers every message, in order, so an answer to a later one also says that it has left the earlier ones. A rank that fails holds:
it begins nothing before all ranks have left that message, or else it would meet ranks that still wait for it in a collective operation with
another one, of a later step. If all have left, the mark of the queue lets them go on (`QueueWriter.set_mark`), and only that step is lost.
If some of its stage are still in it soon after, they wait for a rank that does not come, and the workers are ended. Later stages leave a step that
has failed because they get the failure in the place of tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn
from weakref import WeakValueDictionary

from minivllm import errors
from minivllm.distributed.message_queue import SECONDS_WHILE_FULL
from minivllm.errors import DistributedError, StageError, WorkerError
from minivllm.executor.worker_messages import Answer, Failed, FromWorker, Question, Step, StepMasks, ToWorker, WorkerLog, encode
from minivllm.executor.workers import CHECK_SECONDS, GRACE_SECONDS, Workers

SECONDS_FOR_OTHERS = 0.8
"""After a rank has failed, how long the others have to leave that step. If they do, only that step is lost."""


@dataclass(eq=False)
class Sent:
    """A message that was sent. Its answers are kept for as long as somebody holds this.

    Attributes:
        number: The message's.
        is_step: Whether it is a step; else it is a call.
        is_timed: Whether it is a timed step.
        answers: Of the ranks that have answered.
        failed: Of those that have failed, once the others have left it, too, or the workers were ended.
    """

    number: int
    is_step: bool = False
    is_timed: bool = False
    answers: dict[int, Answer] = field(default_factory=dict)
    failed: dict[int, Failed] | None = None


@dataclass
class Failure:
    """What ranks say about a message in which they failed, until it is known what becomes of the others.

    Attributes:
        previous: The message before, as they have answered it.
        ranks: What each says.
        since: Of each pipeline stage in which one has failed, when the first one said so.
    """

    previous: int
    ranks: dict[int, Failed] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)


class WorkerAnswers:
    """Sends messages to all workers, and receives their answers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._number = 0
        """Of the last message. The start is number 0."""
        self._left = [-1] * workers.world_size
        """By rank, the last message that it has answered."""
        self._left_at = [time.monotonic()] * workers.world_size
        """When it did."""
        self._sent: WeakValueDictionary[int, Sent] = WeakValueDictionary()
        self._failures: dict[int, Failure] = {}
        """By number."""
        self._settled = self._received = -1
        """The last message that all ranks left though it had failed, and the last step whose results were received."""
        self._logs = LogsOnce()

    def next_number(self) -> int:
        """The number of the next message."""
        self._number += 1
        self._logs.forget(min(self._left))
        return self._number

    def send(self, message: Question) -> Sent:
        """Send a message. Answers that arrive meanwhile are kept, so that the workers can always go on.

        Raises:
            EngineDeadError: A worker has ended, or was ended.
        """
        sent = Sent(message.number, isinstance(message, Step), isinstance(message, Step) and message.timed)
        self._sent[message.number] = sent
        self._write(message)
        return sent

    def send_masks(self, masks: StepMasks) -> None:
        """Send what a step needs before it samples. Raises as `send`."""
        self._write(masks)

    def receive(self, sent: Sent, ranks: Iterable[int]) -> list[Answer]:
        """Wait for the answers of these ranks to a message.

        Raises:
            MinivllmError: What a rank raised, as a `WorkerError` if it was an error of another kind. All are ready for more, if it was a step.
            EngineDeadError: A worker has ended, or failed in a step in which others wait for it.
        """
        wanted = set(ranks)
        while sent.failed is None and (sent.number in self._failures or not wanted <= sent.answers.keys()):
            self._read(CHECK_SECONDS)
        if sent.failed is not None:
            self._raise(sent.failed, sent.is_step)
        self._received = max(self._received, sent.number)
        return [sent.answers[rank] for rank in sorted(wanted)]

    def wait_for_start(self) -> None:
        """Wait until all workers have started. Raises as `receive`."""
        start = self._sent[0] = Sent(0)
        self.receive(start, range(self._workers.world_size))

    def _write(self, message: ToWorker) -> None:
        self._workers.check()
        try:
            self._workers.inbox.write(encode(message), while_full=lambda: self._read(SECONDS_WHILE_FULL))
        except DistributedError:
            self._workers.raise_failure(self._workers.find_ended(GRACE_SECONDS) or "A worker has closed its end of the queue.")

    def _read(self, timeout: float) -> None:
        """Take the answers that have arrived, or arrive within `timeout` seconds."""
        self._workers.read(timeout, self._take)
        for number in sorted(self._failures):
            self._judge(number, self._failures[number])

    def _take(self, rank: int, message: FromWorker) -> None:
        """Note what a worker says. It may be the same again."""
        if isinstance(message, WorkerLog):
            self._logs.log(rank, message)
            return
        number, previous, now = message.number, self._left[rank], time.monotonic()
        self._left[rank], self._left_at[rank] = max(previous, number), now
        if isinstance(message, Failed):
            if number <= self._settled:
                self._workers.inbox.set_mark(self._settled)
            elif number <= self._received:  # its part of the cache is wrong, and the step's results are used
                self._workers.raise_failure(self._describe(rank, message))
            else:
                failure = self._failures.setdefault(number, Failure(previous))
                failure.ranks[rank] = message
                failure.since.setdefault(self._workers.stage_of(rank), now)
        elif (sent := self._sent.get(number)) is not None:
            sent.answers[rank] = message

    def _judge(self, number: int, failure: Failure) -> None:
        """Decide whether only one message has failed, as all ranks have left it, or the engine. It may be too early to tell."""
        _, first = _first(failure.ranks)
        if not self._workers.are_ready or first.error_type == DistributedError.__name__:
            self._fail(failure)
        elif all(left >= number for left in self._left):
            self._settled = max(self._settled, number)
            self._workers.inbox.set_mark(self._settled)
        elif self._is_late(number, failure):
            self._fail(failure)
        else:
            return
        if (sent := self._sent.get(number)) is not None:
            sent.failed = failure.ranks
        del self._failures[number]

    def _is_late(self, number: int, failure: Failure) -> bool:
        """Whether a rank takes too long to leave a message that others of its stage have left, though it is not busy with an earlier one."""
        for rank, left in enumerate(self._left):
            since = failure.since.get(self._workers.stage_of(rank))
            if since is None or not failure.previous <= left < number:
                continue
            if time.monotonic() > max(since, self._left_at[rank]) + SECONDS_FOR_OTHERS:
                return True
        return False

    def _fail(self, failure: Failure) -> None:
        rank, first = _first(failure.ranks)
        is_because_of_others = first.error_type == DistributedError.__name__  # which may have noticed an end first
        if ended := self._workers.find_ended(self._workers.seconds_until_seen if is_because_of_others else 0.0):
            self._workers.raise_failure(ended)
        self._workers.fail(self._describe(rank, first))

    def _raise(self, failed: dict[int, Failed], is_step: bool) -> NoReturn:
        if is_step:
            self._workers.check()
        rank, first = _first(failed)
        kind, name = getattr(errors, first.error_type, None), self._workers.name(rank, of_all=False)
        if kind is None:
            raise WorkerError(f"{name}: {first.error_type}: {first.message}")
        raise kind(f"{name}: {first.message}")

    def _describe(self, rank: int, failure: Failed) -> str:
        kind = "" if failure.error_type == DistributedError.__name__ else f"{failure.error_type}: "
        return f"{self._workers.name(rank)} failed: {kind}{failure.message}"


def _first(failed: dict[int, Failed]) -> tuple[int, Failed]:
    """The rank to name: if possible one that has not failed because of another, not even of another stage."""
    because_of_others = ("", DistributedError.__name__, StageError.__name__)

    def order(item: tuple[int, Failed]) -> tuple[int, int]:
        kind = item[1].error_type
        return because_of_others.index(kind) if kind in because_of_others else 0, item[0]

    return min(failed.items(), key=order)


class LogsOnce:
    """Logs what several ranks log about the same message once; below warnings, only what rank 0 logs."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, str], int] = {}
        """By message and text, the rank that has logged it first."""

    def log(self, rank: int, message: WorkerLog) -> None:
        """Log a text of a rank, unless another has logged it, too."""
        if rank > 0 and message.level < logging.WARNING:
            return
        if self._first.setdefault((message.number, message.text), rank) == rank:
            message.log("" if rank == 0 else f"Rank {rank}: ")

    def forget(self, number: int) -> None:
        """All ranks have answered the messages up to this one."""
        if self._first:
            self._first = {key: rank for key, rank in self._first.items() if key[0] > number}
