"""Placeholders in a step's input are filled in by the tokens that were sampled last."""

from __future__ import annotations

import torch

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
