"""Where the time of a step goes, and how close that is to the machine's limits.

python benchmarks/step_profile.py --workload benchmarks/workloads/offline_64.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from linear_layers import Floor, measure_floor
from stopwatch import Stopwatch

from minivllm.bench.offline import run_offline
from minivllm.bench.report import format_table
from minivllm.bench.workloads import WorkloadRequest
from minivllm.core.scheduler import Scheduler
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.trace import EngineTrace
from minivllm.entrypoints.cli.bench import add_workload_options, make_engine, one_workload, report_engine
from minivllm.entrypoints.cli.options import add_engine_options, check_writable
from minivllm.errors import ConfigError
from minivllm.layers.attention import AttentionMetadata
from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.linear import Linear

PARTS = ("linear", "attention", "norm and rope", "sampling", "scheduling", "detokenizing", "other")


@dataclass
class Profile:
    """How a workload's steps spend their time.

    Attributes:
        milliseconds: By phase ("prefill", "decode", "mixed") and part, its mean in a step.
        num_steps, num_tokens: By phase, the steps, and the tokens computed in them.
        stopwatch: Milliseconds that measuring added to a step, subtracted already.
        batch: The most frequent batch size of decode steps.
        decode_step: Median milliseconds of decode steps with that batch size; None if there were none.
        linear_alone: Median milliseconds of all linear layers at that batch size, with nothing between them.
        attention_alone: The same for attention, over contexts of the workload's mean length.
        prefill_gigaflops: Arithmetic of linear layers and attention per second of prefill steps.
        floor: What the machine can do at best.
    """

    milliseconds: dict[str, dict[str, float]]
    num_steps: dict[str, int]
    num_tokens: dict[str, int]
    stopwatch: float
    batch: int
    decode_step: float | None
    linear_alone: float
    attention_alone: float
    prefill_gigaflops: float | None
    floor: Floor

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def profile_offline(engine: LLMEngine, name: str, requests: list[WorkloadRequest]) -> Profile:
    """Run a workload four times: to warm up, as it is, and twice with every kernel called from Python, without and with a stopwatch.

    Compiled layers (`models.compiled_llama`) cannot be timed inside, so the parts come from a run without them, and the time of a
    step with them is given alongside. The stopwatch, used hundreds of times in a step, costs time itself: the difference between the last
    two runs, whose steps are the same, gives the cost of a switch, and its median is subtracted from each part.

    Args:
        engine: As `run_offline` takes it.
        name: Name of the workload, for progress.
        requests: The workload.

    Raises:
        ConfigError: As `run_offline`; or the model is on a GPU, where calls return before their work is done.
    """
    model = engine.executor.worker.model_runner.model
    if engine.executor.worker.device.type != "cpu":
        raise ConfigError("This profile times calls, which says nothing on a GPU: use a GPU profiler there.")
    run_offline(engine, "continuous", name, requests)
    compiled = run_offline(engine, "continuous", name, requests).trace
    backend = next(module.backend for module in model.modules() if hasattr(module, "backend"))
    ops = engine.executor.worker.platform.ops
    timed = {
        "linear": [(module, "forward") for module in model.modules() if isinstance(module, Linear)],
        "attention": [(type(backend), "forward")],
        "norm and rope": [(ops, op) for op in ("rms_norm", "add_rms_norm", "rotary_embedding", "silu_and_mul")],
        "sampling": [(type(engine.executor.worker.sampler), "sample")],
        "scheduling": [(Scheduler, method) for method in ("schedule", "update", "finish_sequence")],
        "detokenizing": [(OutputProcessor, method) for method in ("process_outputs",)],
    }
    watch = Stopwatch()
    steps: list[tuple[dict[str, float], Counter[str]]] = []
    step = engine.step

    def watched_step() -> Any:
        watch.take()
        outputs = step()
        steps.append(watch.take())
        return outputs

    with ExitStack() as patches:
        if engine.executor.worker.compiled_model is not None:
            patches.callback(setattr, model.model, "forward", vars(model.model).pop("forward"))
        plain = run_offline(engine, "continuous", name, requests).trace
        for part, places in timed.items():
            for owner, attribute in places:
                patches.enter_context(mock.patch.object(owner, attribute, watch.timed(part, getattr(owner, attribute))))
        patches.enter_context(mock.patch.object(engine, "step", watched_step))
        trace = run_offline(engine, "continuous", name, requests).trace
    cost = statistics.median(
        (watched.end - watched.start - record.end + record.start) / switches.total()
        for watched, record, (_, switches) in zip(trace, plain, steps, strict=True)
    )
    cost = max(0.0, cost)
    parts = [{part: max(0.0, seconds[part] - cost * switches[part]) for part in PARTS} for seconds, switches in steps]
    phases = [record.phase for record in trace]
    batch = Counter(len(record.scheduled) for record in trace if record.phase == "decode").most_common(1)
    size = batch[0][0] if batch else 1
    same_batch = [r.end - r.start for r in compiled if r.phase == "decode" and len(r.scheduled) == size]
    contexts = [len(request.prompt_token_ids) + request.output_len // 2 for request in requests]
    return Profile(
        milliseconds={
            phase: {
                part: statistics.mean(step[part] * 1e3 for step, p in zip(parts, phases, strict=True) if p == phase)
                for part in PARTS
            }
            for phase in dict.fromkeys(phases)
        },
        num_steps=dict(Counter(phases)),
        num_tokens={
            phase: sum(record.num_tokens for record in trace if record.phase == phase) for phase in dict.fromkeys(phases)
        },
        stopwatch=cost * statistics.mean(switches.total() for _, switches in steps) * 1e3,
        batch=size,
        decode_step=statistics.median(same_batch) * 1e3 if same_batch else None,
        linear_alone=_time_linear(model, size),
        attention_alone=_time_attention(engine, size, round(statistics.mean(contexts))),
        prefill_gigaflops=_prefill_gigaflops(engine, compiled),
        floor=measure_floor(),
    )


@dataclass
class RankProfile:
    """How several workers spend a workload's steps of one phase, means over them.

    Attributes:
        num_steps, num_tokens: The steps, and the tokens computed in them.
        milliseconds: Of a step, from scheduling to the new tokens.
        computing, communication: Milliseconds of it, by rank. Communication is mostly waiting for the slowest rank.
        bytes_per_token: Bytes that all ranks together send to each other for a token.
    """

    num_steps: int
    num_tokens: int
    milliseconds: float
    computing: list[float]
    communication: list[float]
    bytes_per_token: float


def profile_ranks(engine: LLMEngine, name: str, requests: list[WorkloadRequest]) -> dict[str, RankProfile]:
    """Run a workload twice, the first time to warm up; by phase. Arguments and errors as for `profile_offline`."""
    run_offline(engine, "continuous", name, requests)
    trace = run_offline(engine, "continuous", name, requests).trace
    profiles = {}
    for phase in dict.fromkeys(step.phase for step in trace if step.ranks):
        steps = [step for step in trace if step.phase == phase and step.ranks]
        num_tokens, ranks = sum(step.num_tokens for step in steps), range(len(steps[0].ranks))
        communication = [1e3 * statistics.mean(step.ranks[rank].communication_seconds for step in steps) for rank in ranks]
        whole = [1e3 * statistics.mean(step.ranks[rank].end - step.ranks[rank].start for step in steps) for rank in ranks]
        profiles[phase] = RankProfile(
            num_steps=len(steps),
            num_tokens=num_tokens,
            milliseconds=1e3 * statistics.mean(step.end - step.start for step in steps),
            computing=[total - part for total, part in zip(whole, communication, strict=True)],
            communication=communication,
            bytes_per_token=sum(timing.num_bytes for step in steps for timing in step.ranks) / num_tokens,
        )
    return profiles


def format_rank_profiles(profiles: dict[str, RankProfile]) -> str:
    """The profile of several workers as a table of text."""
    rows = []
    for phase, profile in profiles.items():
        rows.append(
            (f"{phase}, {profile.num_steps} steps", f"{profile.milliseconds:.2f} ms", "", "", f"{profile.bytes_per_token:,.0f}")
        )
        for rank, (computing, waiting) in enumerate(zip(profile.computing, profile.communication, strict=True)):
            share = waiting / max(computing + waiting, 1e-9)
            rows.append((f"  rank {rank}", f"{computing:.2f} ms", f"{waiting:.2f} ms", f"{share:.1%}", ""))
    return format_table(("mean of a step", "computing", "communication", "share", "bytes per token"), rows)


@torch.inference_mode()
def _time_linear(model: torch.nn.Module, rows: int, repeats: int = 9) -> float:
    """Median milliseconds of all linear layers of a model, called one after another."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    inputs = {width: torch.randn(rows, width) for width in {layer.in_features for layer in linears}}
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        for layer in linears:
            layer(inputs[layer.in_features])
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])  # the first warms up


def format_profile(profile: Profile) -> str:
    """The profile as a table of text: milliseconds and shares of a step."""
    phases = list(profile.milliseconds)
    totals = {phase: sum(profile.milliseconds[phase].values()) for phase in phases}
    rows = []
    for part in PARTS:
        times = {phase: profile.milliseconds[phase][part] for phase in phases}
        rows.append(
            (part, *(cell for phase in phases for cell in (f"{times[phase]:.2f} ms", f"{times[phase] / totals[phase]:.1%}")))
        )
    rows.append(("whole step", *(cell for phase in phases for cell in (f"{totals[phase]:.2f} ms", ""))))
    rows.append(("steps", *(cell for phase in phases for cell in (profile.num_steps[phase], ""))))
    rows.append(("tokens", *(cell for phase in phases for cell in (profile.num_tokens[phase], ""))))
    lines = [format_table(("mean of a step", *(cell for phase in phases for cell in (phase, ""))), rows)]
    lines.append(f"\nMeasuring added {profile.stopwatch:.1f} ms to a step, subtracted already.")
    if profile.decode_step is not None:
        rest = 1 - (profile.linear_alone + profile.attention_alone) / profile.decode_step
        if rest >= 0:
            ending = f"({profile.attention_alone:.1f} ms), that leaves {rest:.1%} of the step for everything else."
        else:
            ending = f"({profile.attention_alone:.1f} ms) that is more than the step: there, no Python comes between the layers."
        lines += [
            "",
            "Above, every kernel was called from Python. As the engine runs, with compiled layers where it has them, a decode step",
            f"of {profile.batch} sequences takes {profile.decode_step:.1f} ms: {profile.decode_step / profile.linear_alone:.2f} times "
            f"its linear layers alone ({profile.linear_alone:.1f} ms). With attention alone",
            ending,
        ]
    if profile.prefill_gigaflops is not None:
        share = profile.prefill_gigaflops / profile.floor.gigaflops
        lines += [
            "",
            f"Prefill computes {profile.prefill_gigaflops:.0f} GFLOP/s, {share:.0%} of what this machine reaches in large matrix products.",
        ]
    lines.append(
        f"\nThis machine reads {profile.floor.read_gigabytes_per_second:.1f} GB/s and multiplies large float32 matrices at "
        f"{profile.floor.gigaflops:.0f} GFLOP/s."
    )
    return "\n".join(lines)


@torch.inference_mode()
def _time_attention(engine: LLMEngine, num_seqs: int, context_len: int, repeats: int = 9) -> float:
    """Median milliseconds of attention in all layers of a decode step, over the engine's own cache, writing nothing."""
    worker = engine.executor.worker
    block_size, caches = worker.cache_config.block_size, worker.cache_engine.gpu_cache
    num_blocks, available = -(-context_len // block_size), len(caches[0][0])
    backend = next(module.backend for module in worker.model_runner.model.modules() if hasattr(module, "backend"))
    metadata = AttentionMetadata(
        is_decode=True,
        slot_mapping=torch.full((num_seqs,), -1),
        block_tables=(torch.randperm(num_seqs * num_blocks, dtype=torch.int32) % available).view(num_seqs, num_blocks),
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32),
    )
    query = torch.randn(num_seqs, backend.num_heads, backend.head_dim)
    key, value = torch.randn(2, num_seqs, backend.num_kv_heads, backend.head_dim)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for cache in caches:
            backend.forward(query, key, value, cache, metadata)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _prefill_gigaflops(engine: LLMEngine, trace: EngineTrace) -> float | None:
    """Multiplications and additions per second of all prefill steps; None if there were none.

    Linear layers except the head: two for each weight and token. Attention: four for each layer, channel, and pair of a token with an
    earlier one or itself.
    """
    steps = [record for record in trace if record.phase == "prefill"]
    if not steps:
        return None
    config, model = engine.model_config, engine.executor.worker.model_runner.model
    sizes = (
        layer.in_features * sum(layer.out_features)
        for layer in model.modules()
        if isinstance(layer, Linear) and not isinstance(layer, ParallelLMHead)
    )
    lengths = [item.num_tokens for record in steps for item in record.scheduled]
    linear = 2 * sum(sizes) * sum(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
    return (linear + attention) / sum(record.end - record.start for record in steps) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser).add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=16, command=None)
    arguments = parser.parse_args()
    check_writable(arguments.json)
    engine = make_engine(arguments)
    name, requests = one_workload(arguments, engine.model_config)
    what = f"{name}, at most {arguments.max_num_seqs} running"
    if not hasattr(engine.executor, "worker"):  # its workers are in other processes
        profiles = profile_ranks(engine, name, requests)
        results = {"ranks": {phase: asdict(found) for phase, found in profiles.items()}}
        report_engine(arguments, what, format_rank_profiles(profiles), results)
        return
    profile = profile_offline(engine, name, requests)
    report_engine(arguments, what, format_profile(profile), {"profile": profile.to_json()})


if __name__ == "__main__":
    main()
