"""Whether a trace that was read from a file agrees with itself."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from minivllm.config import SchedulerConfig
from minivllm.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from minivllm.engine.trace import EngineTrace


def check_trace(trace: EngineTrace) -> None:
    """Raise a ValueError if blocks, requests or times are inconsistent."""
    config, launched, now = trace.config, -math.inf, -math.inf
    msgspec.convert(config.scheduler_config, SchedulerConfig)
    for request in trace.requests.values():
        params = {name: value for name, value in request.params.items() if name != "logit_bias"}
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        SamplingParams(**params)
        if not request.request_id.isprintable():
            raise ValueError(f"request {request.request_id!r} has an id that cannot be printed")
        if len(request.finish_reasons) not in (0, len(request.output_token_ids)):
            raise ValueError(f"request {request.request_id!r} has not as many finish reasons as sequences")
    if config.block_size < 1 or config.num_gpu_blocks < 1:
        raise ValueError("a cache without blocks")
    for number, step in enumerate(trace):
        moments = [moment for moment in (step.start, step.launched, step.awaited, step.end) if moment is not None]
        if moments != sorted(moments) or step.start < launched or step.end < now:
            raise ValueError(f"step {number} starts or ends before the last one, or its times are not in order")
        launched, now = step.start, step.end
        for rank in step.ranks:
            moments = [rank.start, *itertools.chain.from_iterable(rank.communication), rank.end]
            if moments != sorted(moments) or not all(map(math.isfinite, moments)):
                raise ValueError(f"step {number} has a rank whose times are not in order")
        named = {*step.arrived, *step.aborted, *(key.request_id for key in (*step.block_tables, *step.swapped_tables))}
        for items in (step.scheduled, step.preempted, step.finished, step.swapped_in):
            named.update(item.request_id for item in items)
        if not named <= trace.requests.keys():
            raise ValueError(f"step {number} names an unknown request {min(named - trace.requests.keys())!r}")
        gpu_blocks = (*step.block_tables.values(), step.ref_counts, step.cached_blocks, *step.blocks_to_copy)
        for tables, num_blocks in ((gpu_blocks, config.num_gpu_blocks), (step.swapped_tables.values(), config.num_cpu_blocks)):
            if max(itertools.chain.from_iterable(tables), default=-1) >= num_blocks:
                raise ValueError(f"step {number} has a block id beyond the {num_blocks} blocks of the cache")
