"""When steps are scheduled while the device computes, and what is said where that is impossible."""

from __future__ import annotations

import pytest

from minivllm import Scheduler, StaticBatchScheduler
from minivllm.config import EngineArgs
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.engine.engine_config import schedules_asynchronously
from minivllm.errors import ConfigError
from minivllm.worker.sampler import Sampler


class Mine(AsyncScheduler):
    """A scheduler of one's own that knows of steps in flight."""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_by_default_only_on_a_gpu_where_nothing_forbids_it(monkeypatch, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert schedules_asynchronously(EngineArgs()) == has_gpu
    assert schedules_asynchronously(EngineArgs(scheduler_cls=Mine)) == has_gpu
    for args in (
        {"device": "cpu"},
        {"tensor_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
        {"scheduler_cls": Scheduler},
        {"scheduler_cls": StaticBatchScheduler},
        {"block_space_manager_cls": BlockSpaceManager},
        {"sampler_cls": Sampler},
        {"async_scheduling": False},
    ):
        assert not schedules_asynchronously(EngineArgs(**args))


def test_where_asked_for_on_a_cpu_too():
    assert schedules_asynchronously(EngineArgs(async_scheduling=True, device="cpu"))
    assert schedules_asynchronously(EngineArgs(async_scheduling=True, sampler_cls=Sampler))


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"tensor_parallel_size": 2}, "workers in processes of their own take one step at a time"),
        ({"scheduler_cls": StaticBatchScheduler}, "scheduler_cls is StaticBatchScheduler, which is no AsyncScheduler"),
        ({"block_space_manager_cls": BlockSpaceManager}, "block_space_manager_cls is BlockSpaceManager, which may not know"),
    ],
)
def test_asked_for_where_it_is_impossible(args, cause):
    with pytest.raises(ConfigError, match=f"async_scheduling is on, but {cause}.*: leave it out."):
        schedules_asynchronously(EngineArgs(async_scheduling=True, **args))
