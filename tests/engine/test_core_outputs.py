"""What a step adds to requests, and to whom it is told."""

from __future__ import annotations

import pytest

from minivllm import SamplingParams
from minivllm.engine.core_outputs import CoreOutputs
from minivllm.outputs import Logprob
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.scheduler_output import ScheduledSequence, SequenceOutput


def make_request(number: int) -> Request:
    return Request(EngineCoreRequest("the id", [1, 2, 3], SamplingParams(prompt_logprobs=0), max_num_tokens=9, number=number))


@pytest.mark.parametrize("is_unfinished", [True, False])
def test_prompt_logprobs_of_a_request_that_is_gone_are_not_told_to_the_one_that_has_its_id_now(is_unfinished):
    """The step with its chunk was in flight when it was aborted."""
    request, other = make_request(1), make_request(2)
    outputs, entry = CoreOutputs(), {1: {2: Logprob(-1.0, 1)}}
    step = [(ScheduledSequence(Sequence(0, request), 2, [0]), SequenceOutput(prompt_logprobs=entry))]
    outputs.add_step(step, [], {}, {"the id": request if is_unfinished else other}, 0.0)
    assert [(output.number, output.prompt_logprobs) for output in outputs.take()] == [(1, entry)] * is_unfinished
    assert outputs.take() == []
