"""Blocks are swapped beside the computation, and nothing overtakes: with made-up streams that run in any order that events allow,
and on a GPU."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError
from minivllm.kernels import reference
from minivllm.layers.platform import Platform
from minivllm.worker import swap_stream
from minivllm.worker.cache_engine import CacheEngine
from minivllm.worker.swap_stream import SwapStream

SHAPE = (1, 1, 1)
NUM_CACHES, NUM_GPU_BLOCKS, NUM_CPU_BLOCKS, NUM_ROWS = 2, 5, 4, 2


class MadeUpEvent:
    def __init__(self):
        self.num_records = self.num_happened = 0

    def record(self, stream):
        self.num_records += 1
        stream.tasks.append((None, self._happen))

    def _happen(self):
        self.num_happened += 1


class MadeUpStream:
    """Tasks in order: (what must have happened, or None; what to do)."""

    def __init__(self, device=None):
        self.tasks = []

    def launch(self, task):
        self.tasks.append((None, task))

    def synchronize(self):
        assert not self.tasks, "the GPU would still be at work"

    def wait_event(self, event):
        """For its last record so far; events recorded later, or never, do not count."""
        awaited = event.num_records
        self.tasks.append((lambda: event.num_happened >= awaited, lambda: None))

    def wait_stream(self, stream):
        event = MadeUpEvent()
        event.record(stream)
        self.wait_event(event)


class MadeUpGPU:
    """Replaces `torch.cuda`, and block copies: the host only launches, and `run` does the work later."""

    def __init__(self):
        self.computing, self.streams = MadeUpStream(), []
        self.current = self.computing
        self.locked = set()
        self.refuses = False

    def make_stream(self, device):
        self.streams.append(MadeUpStream())
        return self.streams[-1]

    @contextmanager
    def use(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before

    def copy_blocks(self, *args):
        self.current.launch(lambda: reference.copy_blocks(*args))

    def register(self, address, num_bytes, flags):
        self.locked.add(address)
        return 2 if self.refuses else 0

    def run(self, rng):
        """Everything, one task at a time, of any stream that need not wait."""
        streams = [self.computing, *self.streams]
        favourite = rng.choice([None, *streams])  # which is far ahead of the others
        while any(stream.tasks for stream in streams):
            ready = [stream for stream in streams if stream.tasks and (stream.tasks[0][0] is None or stream.tasks[0][0]())]
            assert ready, "the streams wait for each other"
            stream = favourite if favourite in ready else rng.choice(ready)
            stream.tasks.pop(0)[1]()


@contextmanager
def made_up_gpu():
    gpu = MadeUpGPU()
    copy = torch.Tensor.copy_

    def launch_copy(destination, source, non_blocking=False):
        assert non_blocking and destination.is_contiguous() and source.is_contiguous(), "the host would wait"
        gpu.current.launch(lambda: copy(destination, source))
        return destination

    cuda = {
        "Stream": gpu.make_stream, "Event": MadeUpEvent, "stream": gpu.use, "current_stream": lambda device: gpu.current,
        "device": lambda device: nullcontext(),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=gpu.register, cudaHostUnregister=gpu.locked.remove),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in cuda.items():
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(torch.Tensor, "copy_", launch_copy)
        patch.setattr(swap_stream, "BUFFER_BYTES", NUM_ROWS * NUM_CACHES * 4)
        yield gpu


def pairs(num_sources, num_destinations):
    pair = st.tuples(st.integers(0, num_sources - 1), st.integers(0, num_destinations - 1))
    return st.lists(pair, max_size=4, unique_by=lambda pair: pair[1])


gpu_blocks = st.integers(0, NUM_GPU_BLOCKS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), gpu_blocks),
        st.tuples(st.just("read"), gpu_blocks),
        st.tuples(st.just("swap_out"), pairs(NUM_GPU_BLOCKS, NUM_CPU_BLOCKS)),
        st.tuples(st.just("swap_in"), pairs(NUM_CPU_BLOCKS, NUM_GPU_BLOCKS)),
    ),
    max_size=15,
)


@given(steps=steps, seed=st.integers(0, 2**31))
def test_any_order_that_the_events_allow_gives_what_one_after_another_gives(steps, seed):
    """All steps are launched at once, as with steps in flight. Each block holds the number of the step that wrote it last."""
    on_gpu, on_host = [-1 - i for i in range(NUM_GPU_BLOCKS)], [-11 - i for i in range(NUM_CPU_BLOCKS)]
    caches = torch.tensor(on_gpu, dtype=torch.float32).view(1, -1, *SHAPE).repeat(NUM_CACHES, 1, 1, 1, 1)
    swap_space = torch.tensor(on_host, dtype=torch.float32).view(-1, 1, *SHAPE).repeat(1, NUM_CACHES, 1, 1, 1)
    seen, expected = [], []
    with made_up_gpu() as gpu:
        stream = SwapStream(caches, swap_space, gpu)
        for number, (what, which) in enumerate(steps, start=1):
            if what == "write":
                gpu.computing.launch(lambda block=which, number=number: caches[:, block].fill_(number))
                on_gpu[which] = number
            elif what == "read":
                gpu.computing.launch(lambda block=which: seen.append(caches[:, block].flatten().tolist()))
                expected.append([on_gpu[which]] * NUM_CACHES)
            else:
                source, destination = (on_gpu, on_host) if what == "swap_out" else (on_host, on_gpu)
                before = list(source)
                for i, j in which:
                    destination[j] = before[i]
                getattr(stream, what)(which)
        gpu.run(random.Random(seed))
        del stream
        assert not gpu.locked, "pages stay locked"
    assert seen == expected
    assert caches[:, :, 0, 0, 0].tolist() == [on_gpu] * NUM_CACHES
    assert swap_space[:, :, 0, 0, 0].tolist() == [[number] * NUM_CACHES for number in on_host]


def test_where_memory_cannot_be_locked_the_message_says_what_to_do():
    with made_up_gpu() as gpu, pytest.raises(ConfigError, match="lower swap_space"):
        gpu.refuses = True
        SwapStream(torch.zeros(NUM_CACHES, 1, *SHAPE), torch.zeros(1, NUM_CACHES, *SHAPE), gpu)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_come_back_while_the_device_is_busy(device):
    """Twice as many blocks as the buffer holds on a GPU, overwritten right after they were swapped out."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    config = ModelConfig("", Path(), "", {}, 2, 1, 1, 16, 50, 64, ())  # two layers, one head of 16 channels
    platform = Platform(torch.device(device), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap_stream, "BUFFER_BYTES", 4 * CacheEngine.block_bytes(config, 8, torch.float32))
        engine = CacheEngine(config, 8, 12, 9, platform)
    engine.gpu_blocks.copy_(torch.arange(12.0).view(12, 1, 1, 1).expand_as(engine.gpu_blocks))
    out, back = [(i, 8 - i) for i in range(8)], [(8 - i, (i + 3) % 12) for i in range(8)]
    busy = torch.randn(512, 512, device=device)
    for _ in range(3):
        busy = (busy @ busy).tanh_()
        engine.swap_out(out)
        engine.gpu_blocks.fill_(-1)  # a later step uses the blocks
        engine.swap_in(back)
        moved = engine.gpu_blocks.clone()
        engine.gpu_blocks[:, :8] = engine.gpu_blocks[:, 3:11].clone()
        engine.gpu_blocks[:, 8:] = -1
    assert moved[:, :, 0, 0, 0].tolist() == [[-1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7, -1]] * 4
    assert engine.cpu_blocks[:, 1:, 0, 0, 0].tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]] * 4
