"""The threads of the CPU kernels: every part is done once, by whichever thread."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("numba")
from numba import njit

from minivllm.kernels.cpu.native import thread_pool
from minivllm.kernels.cpu.native.thread_pool import parallel_for, start_workers


@njit(nogil=True)
def _count_part(part, counts, rounds):
    for _ in range(rounds):
        counts[part] += 1


@njit(nogil=True)
def _count(num_threads, counts, rounds):
    parallel_for(num_threads, len(counts), _count_part, (counts, rounds))


@njit
def _nested_part(part, counts):
    parallel_for(2, counts.shape[1], _count_part, (counts[part], 1))


@njit
def _nested(counts):
    parallel_for(2, len(counts), _nested_part, (counts,))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_parts", [0, 1, 2, 3, 100])
def test_each_part_is_done_once(num_threads, num_parts):
    start_workers(num_threads - 1)
    for _ in range(200):
        counts = np.zeros(num_parts, np.int64)
        _count(num_threads, counts, 1)
        assert (counts == 1).all()


def test_a_pool_without_workers_does_all_parts():
    counts = np.zeros(300, np.int64)
    _count(200, counts, 1)  # more threads than anybody has started
    assert (counts == 1).all()


def test_one_thread_sets_the_pool_up_once(monkeypatch):
    """Each set-up allocates locks: a set-up for each kernel is a leak."""
    start_workers(0)
    monkeypatch.setattr(thread_pool, "_workers", [])
    monkeypatch.setattr(thread_pool, "_configure", lambda: pytest.fail("set up again"))
    start_workers(0)


def test_parts_within_a_part():
    start_workers(1)
    counts = np.zeros((7, 9), np.int64)
    _nested(counts)
    assert (counts == 1).all()


def test_callers_at_once():
    start_workers(1)
    results = [np.zeros(50, np.int64) for _ in range(4)]

    def call(counts):
        for _ in range(100):
            _count(2, counts, 10)

    threads = [threading.Thread(target=call, args=(counts,)) for counts in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((counts == 1000).all() for counts in results)


def test_a_process_with_workers_ends():
    code = "from minivllm.kernels.cpu.native.thread_pool import start_workers; start_workers(3)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


GREEDY = """
import os, time
import torch
from minivllm import LLM, SamplingParams

def switches():
    return {
        task: next(line for line in open(f"/proc/self/task/{task}/status") if line.startswith("voluntary"))
        for task in os.listdir("/proc/self/task")
    }

torch.set_num_threads(2)
others = set(os.listdir("/proc/self/task"))
torch.ones(2**22).add_(1)
threads_of_torch = set(os.listdir("/proc/self/task")) - others
assert threads_of_torch

def wakes(work):
    time.sleep(0.3)  # so that they sleep
    before = switches()
    work()
    time.sleep(0.3)
    after = switches()
    return any(before[task] != after[task] for task in threads_of_torch)

assert wakes(lambda: torch.ones(2**22).add_(1)), "this is how it looks"
for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}):
    llm = LLM(**options)
    prompts = [{"prompt_token_ids": [7 * i + j for j in range(60)]} for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    assert not wakes(lambda: llm.generate(prompts, params, use_tqdm=False)), options
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.long
def test_prompts_and_greedy_steps_wake_no_threads_of_torch():
    """They would go on spinning in the way of the kernels' own."""
    done = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
