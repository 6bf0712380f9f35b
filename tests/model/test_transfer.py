"""Placeholders in a step's input are filled in by the tokens that were sampled last."""

from __future__ import annotations

import pytest
import torch
from test_invariants_on_a_model import tiny_folder  # noqa: F401 (a fixture)

from minivllm import LLM, SamplingParams
from minivllm.worker.transfer import HostCopy, RecentTokens, to_device


def test_the_newest_step_that_sampled_for_a_sequence_counts():
    recent = RecentTokens(num_steps=2)
    recent.add({7: 0, 8: 1}, torch.tensor([70, 80]))
    recent.add({8: 0}, torch.tensor([81]))
    input_ids = torch.tensor([1, 0, 2, 0])
    recent.fill_in(input_ids, {7: 1, 8: 3})
    assert input_ids.tolist() == [1, 70, 2, 81]


def test_older_steps_are_forgotten_and_what_is_unknown_stays():
    recent = RecentTokens(num_steps=1)
    recent.add({7: 0}, torch.tensor([70]))
    recent.add({8: 0}, torch.tensor([80]))
    input_ids = torch.tensor([0, 0])
    recent.fill_in(input_ids, {7: 0, 8: 1})
    assert input_ids.tolist() == [0, 80]


def test_tensors_come_to_the_host_in_order():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = to_device([1, 2, 3], device, torch.int32)
    copy = HostCopy(numbers, numbers * 2)
    numbers += 1
    assert [tensor.device.type for tensor in copy.wait()] == ["cpu", "cpu"]
    assert copy.wait()[1].tolist() == [2, 4, 6]


def strictly(function):
    """The function, in which whatever makes the host wait for the GPU is an error."""

    def call(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_launch_does_not_wait_for_the_gpu(tiny_folder, monkeypatch, enforce_eager):  # noqa: F811
    options = {
        "skip_tokenizer_init": True,
        "block_size": 8,
        "num_gpu_blocks_override": 100,
        "dtype": "float32",
        "max_num_seqs": 16,
    }
    llm = LLM(str(tiny_folder), async_scheduling=True, enforce_eager=enforce_eager, **options)
    wishes = [
        {"temperature": 0},
        {"seed": 1, "logprobs": 3},
        {"seed": 2, "top_k": 5, "min_p": 0.01, "top_p": 0.9, "n": 3},
        {"temperature": 0, "logit_bias": {3: 2.0}, "min_tokens": 4},
        {"temperature": 0, "allowed_token_ids": [5, 6, 7]},
        {"seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    ]
    params = [SamplingParams(max_tokens=6 + i, **wish) for i, wish in enumerate(wishes)]
    prompts = [[7 + i] * (5 + i) for i in range(len(params))]
    expected = llm.generate(prompts, params, use_tqdm=False)  # compiles what is not compiled yet
    worker = llm.llm_engine.executor.worker
    for name in ("launch_model", "sample_tokens"):
        monkeypatch.setattr(worker, name, strictly(getattr(worker, name)))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
