"""The engine behind a queue: messages go in, and what each step brings comes out.

    input_queue ─► run_busy_loop: take all messages, step, take all messages, step, ... ─► output_queue

`AsyncLLMEngine` runs it in a thread, or in a process of its own (`engine_core_proc.py`). Mirrors `EngineCore` in
`vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import logging
import queue

from minivllm.engine.core_messages import (
    AbortRequest,
    AddRequest,
    CoreFailed,
    CoreReady,
    EngineStats,
    FromCore,
    RequestDelta,
    SetTracing,
    Shutdown,
    StepDone,
    ToCore,
)
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import RequestError
from minivllm.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

_MOST_FAILED_STEPS = 3
"""After so many steps in a row that the model failed in, it is taken to be broken."""


class EngineCore:
    """Steps an `LLMEngine` for as long as it has work, and waits for messages when it has none.

    Args:
        engine: Nobody else may step it.

    Attributes:
        input_queue: Messages of type `ToCore`, from any thread.
        output_queue: Messages of type `FromCore`, the last one None.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.input_queue: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[FromCore | None] = queue.SimpleQueue()
        self._num_steps = 0
        self._num_failed_steps = 0
        self._numbers: dict[str, int] = {}
        """Of the requests that live."""
        self._refused: list[RequestDelta] = []
        """Requests that did not get in: the next message tells of them."""
        self.output_queue.put(CoreReady(int(engine.block_manager.num_gpu_blocks)))

    def run_busy_loop(self) -> bool:
        """Take messages and step, until told to stop, or until the engine itself fails. Returns whether it was told.

        A model that fails in a step does not end the loop: the requests of that step end with an error, and the others go on.
        One that fails in several steps in a row does. Requests that are left are aborted.
        """
        try:
            while self._take_messages():
                if self.engine.has_unfinished_requests():
                    self._step()
            return True
        except Exception as error:
            logger.exception("The engine failed.")
            self.output_queue.put(CoreFailed(type(error).__name__, str(error)))
            return False
        finally:
            for request_id in list(self.engine.scheduler.requests):
                self.engine.abort_request(request_id)
            self.engine.stop_trace()
            self.output_queue.put(None)

    def _take_messages(self) -> bool:
        """Handle all messages there are; wait for one if there is nothing else to do. Returns False after a `Shutdown`."""
        wait, handled = not self.engine.has_unfinished_requests(), False
        while True:
            try:
                message = self.input_queue.get(block=wait)
            except queue.Empty:
                break
            if isinstance(message, Shutdown):
                return False
            self._handle(message)
            wait, handled = False, True
        if handled and not self.engine.has_unfinished_requests():
            self._send([])
        return True

    def _handle(self, message: ToCore) -> None:
        if isinstance(message, AddRequest):
            try:
                params = SamplingParams(**message.params, output_kind=RequestOutputKind.DELTA)
                self.engine.add_request(
                    message.request_id,
                    message.prompt_token_ids,
                    params,
                    arrival_time=message.arrival_time,
                    priority=message.priority,
                )
                self._numbers[message.request_id] = message.number
            except (RequestError, TypeError) as error:  # the frontend has checked it: only a frontend in error comes here
                self._refused.append(RequestDelta(message.request_id, message.number, [], finished=True, error=str(error)))
        elif isinstance(message, AbortRequest):
            self.engine.abort_request(message.request_id)
            self._numbers.pop(message.request_id, None)
            self._forget_ended_requests()
        elif isinstance(message, SetTracing):
            if message.on:
                self.engine.start_trace()
            else:
                self.engine.stop_trace()

    def _step(self) -> None:
        outputs = self.engine.step()
        self._num_steps += 1
        deltas = [RequestDelta.of(output, self._numbers.get(output.request_id, -1)) for output in outputs]
        for output in outputs:
            if output.finished:
                self._numbers.pop(output.request_id, None)
        self._send(deltas)
        self._forget_ended_requests()
        if outputs:
            self._num_failed_steps = self._num_failed_steps + 1 if all(output.error for output in outputs) else 0
        if self._num_failed_steps == _MOST_FAILED_STEPS:
            raise RuntimeError(f"{_MOST_FAILED_STEPS} steps in a row failed. {outputs[-1].error}")

    def _send(self, deltas: list[RequestDelta]) -> None:
        engine, manager = self.engine, self.engine.block_manager
        stats = EngineStats(
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            num_swapped=len(engine.scheduler.swapped),
            num_used_blocks=int(manager.num_gpu_blocks - manager.get_num_free_gpu_blocks()),  # a learner's may count in numpy
            num_gpu_blocks=int(manager.num_gpu_blocks),
            num_steps=self._num_steps,
            num_preemptions=engine.num_preemptions,
        )
        deltas, self._refused = self._refused + deltas, []
        record = engine.trace.steps.pop() if engine.trace and engine.trace.steps else None
        self.output_queue.put(StepDone(deltas, stats, record))

    def _forget_ended_requests(self) -> None:
        """Keep a trace, which is given out step by step, from growing for ever."""
        if self.engine.trace is not None:
            requests = self.engine.trace.requests
            for request_id in [name for name, record in requests.items() if record.finished_time is not None]:
                del requests[request_id]
