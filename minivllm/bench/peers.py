"""minivllm beside vLLM, transformers and llama.cpp: the same requests to each, in turn, in one run."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm.auto import tqdm

from minivllm.bench.engine_process import EngineProcess, EngineSpec, Run, find_versions, start_all
from minivllm.bench.workloads import WorkloadRequest, warm_up_requests
from minivllm.config import EngineArgs, ModelConfig
from minivllm.errors import ConfigError

ENGINE_NAMES = (
    "minivllm", "minivllm-int8", "minivllm-int4", "transformers-static", "transformers-continuous", "vllm", "vllm-eager",
    "llama.cpp",
)  # fmt: skip
TOKEN_REFERENCE = "transformers-static"
SPEED_REFERENCE = "vllm"


@dataclass
class EngineResult:
    """What one engine did.

    Speeds are output tokens per second of each round. `equal_requests` counts the requests whose tokens are all those of
    the reference; `equal_tokens` adds the tokens of every request before its first difference, and `first_differences` has,
    for each request that differs, how many those are. `repeatable` is whether all rounds gave the same tokens.
    """

    name: str
    how: str
    settings: dict[str, Any]
    versions: dict[str, str]
    load_seconds: float
    peak_memory_mb: float
    seconds: list[float]
    output_tokens_per_second: list[float]
    equal_requests: int
    equal_tokens: int
    first_differences: dict[int, int]
    repeatable: bool
    median: float = field(init=False)

    def __post_init__(self) -> None:
        self.median = statistics.median(self.output_tokens_per_second)


@dataclass
class Comparison:
    """All engines on one workload. `speed_reference` is the engine whose median is 1, `token_reference` the one that is right."""

    workload: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    speed_reference: str
    token_reference: str
    engines: list[EngineResult]

    def ratio(self, engine: EngineResult) -> float:
        """Median speed of an engine, relative to the reference."""
        return engine.median / next(other.median for other in self.engines if other.name == self.speed_reference)

    def to_json(self) -> dict[str, Any]:
        """Everything, with the ratios and the extremes that the table shows."""
        return asdict(self) | {
            "engines": [
                asdict(engine)
                | {"min": min(engine.output_tokens_per_second), "max": max(engine.output_tokens_per_second)}
                | {"ratio": self.ratio(engine)}
                for engine in self.engines
            ]
        }


def make_specs(
    names: Sequence[str],
    model_config: ModelConfig,
    engine_args: dict[str, Any],
    requests: list[WorkloadRequest],
    *,
    gguf: str | None = None,
    vllm_python: str | None = None,
    llama_python: str | None = None,
) -> list[EngineSpec]:
    """How to start each engine, all with the same limits.

    Args:
        names: Of `ENGINE_NAMES`, each at most once.
        model_config: The model, the same files for all.
        engine_args: Arguments of `EngineArgs` for minivllm. The peers get its `max_num_seqs`.
        requests: The workload, which must fit the model.
        gguf: The file for llama.cpp.
        vllm_python, llama_python: Interpreters of the environments that have them; None is this one.

    Raises:
        ConfigError: A name is unknown or doubled, an engine cannot be had, or a request does not fit.
    """
    if doubled := sorted({name for name in names if list(names).count(name) > 1}):
        raise ConfigError(f"The engine {doubled[0]} is named more than once: name each once.")
    if unknown := [name for name in names if name not in ENGINE_NAMES]:
        raise ConfigError(f"There is no engine {unknown[0]!r} to compare with: it must be one of {', '.join(ENGINE_NAMES)}.")
    if engine_args.get("device") == "cuda":
        raise ConfigError("The comparison with other engines is made on the CPU: leave out --device.")
    max_model_len = _check_requests(model_config, requests, engine_args.get("max_model_len"))
    max_num_seqs = engine_args["max_num_seqs"]
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs is {max_num_seqs}, but must be a whole number of at least 1.")
    bytes_per_token = 2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim * 4
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": engine_args.get("kv_cache_memory_bytes") or max_num_seqs * max_model_len * bytes_per_token,
    }
    mine = engine_args | limits | {"device": "cpu"}
    peer = limits | {"model": str(model_config.path), "num_threads": _num_cores()}
    vllm_hint = "make an environment for it with tools/setup_vllm.py and name its Python with --vllm-python"
    llama_hint = "install llama-cpp-python in an environment of its own and name its Python with --llama-python"
    specs = []
    for name in names:
        kind, _, variant = name.rpartition("-") if name.startswith(("minivllm-", "vllm-")) else (name, "", "")
        python, settings, install = sys.executable, peer, "run `make setup`"
        if kind == "minivllm":
            args = mine | ({"quantization": variant} if variant else {})
            if unknown_args := args.keys() - set(EngineArgs.names()):
                raise ConfigError(f"{name} cannot be started: the engine has no argument {', '.join(sorted(unknown_args))}.")
            settings = {"engine_args": args}
        elif kind == "vllm":
            python, install = vllm_python or python, vllm_hint
            settings = peer | {"enforce_eager": variant == "eager"}
        elif kind == "llama.cpp":
            python, install = llama_python or python, llama_hint
            if gguf is None:
                raise ConfigError(f"llama.cpp cannot be started: the model {model_config.name} was not made from a .gguf file.")
            settings = peer | {"gguf": gguf}
        specs.append(EngineSpec(name, kind, python, settings, install))
    return specs


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_requests(model_config: ModelConfig, requests: list[WorkloadRequest], max_model_len: int | None) -> int:
    """The context that all engines are given: what was asked for, or at least 1,024 tokens if the model takes them."""
    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
    limit = max_model_len or min(max(longest, 1024), model_config.max_model_len)
    for i, request in enumerate(requests):
        if len(request.prompt_token_ids) + request.output_len > limit:
            raise ConfigError(f"Request {i} of the workload grows beyond the {limit} tokens that the model takes: leave it out.")
        if not all(0 <= token_id < model_config.vocab_size for token_id in request.prompt_token_ids):
            raise ConfigError(f"Request {i} of the workload has a token id outside the model's {model_config.vocab_size} tokens.")
    return limit


def compare(
    specs: list[EngineSpec], name: str, requests: list[WorkloadRequest], rounds: int = 3, use_tqdm: bool = True
) -> Comparison:
    """Load all engines, warm each up, then let each run the workload once in every round while the others are stopped.

    Args:
        specs: The engines, from `make_specs`.
        name: Of the workload, for the report.
        requests: The workload.
        rounds: How often each engine runs it.
        use_tqdm: Show progress on standard error.

    Raises:
        ConfigError: An engine cannot be started, fails, or gives a request another number of tokens than it asked for. What
            can be found out without loading a model is found out for all engines before any is loaded.
    """
    if rounds < 1:
        raise ConfigError(f"The number of rounds is {rounds}, but must be at least 1.")
    versions = [find_versions(spec) for spec in specs]
    width = max(spec.settings.get("engine_args", spec.settings).get("max_num_seqs", 16) for spec in specs)
    warm_up = warm_up_requests(requests, width)
    runs: list[list[Run]] = [[] for _ in specs]
    total = len(specs) * (2 + rounds)
    with start_all(specs) as engines, tqdm(total=total, unit="run", disable=not use_tqdm, dynamic_ncols=True) as bar:

        def tell(engine: EngineProcess, doing: str) -> None:
            bar.set_description(f"{engine.spec.name}: {doing}")

        for engine in engines:
            tell(engine, "loading")
            engine.load()
            bar.update()
            tell(engine, "warming up")
            engine.run(warm_up)
            bar.update()
        for i in range(rounds):
            for engine, done in zip(engines, runs, strict=True):
                tell(engine, f"round {i + 1} of {rounds}")
                done.append(engine.run(requests))
                bar.update()
        memory = [engine.peak_memory() for engine in engines]
    names = [spec.name for spec in specs]
    token_reference = TOKEN_REFERENCE if TOKEN_REFERENCE in names else names[0]
    right = runs[names.index(token_reference)][0].tokens
    return Comparison(
        workload=name,
        num_requests=len(requests),
        prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        output_tokens=sum(request.output_len for request in requests),
        speed_reference=SPEED_REFERENCE if SPEED_REFERENCE in names else names[0],
        token_reference=token_reference,
        engines=[
            summarize(engine, version, peak, done, right)
            for engine, version, peak, done in zip(engines, versions, memory, runs, strict=True)
        ],
    )


def summarize(
    engine: EngineProcess, versions: dict[str, str], peak_memory_mb: float, runs: list[Run], right: list[list[int]]
) -> EngineResult:
    """An engine's rounds, with its tokens held against those that are right."""
    equal = [count_equal(ours, theirs) for ours, theirs in zip(runs[0].tokens, right, strict=True)]
    first_differences = {i: count for i, count in enumerate(equal) if count < len(right[i])}
    return EngineResult(
        name=engine.spec.name,
        how=engine.how,
        settings={name: value for name, value in engine.spec.settings.items() if name not in ("model", "gguf")},  # paths
        versions=versions,
        load_seconds=engine.load_seconds,
        peak_memory_mb=peak_memory_mb,
        seconds=[run.seconds for run in runs],
        output_tokens_per_second=[run.num_tokens / run.seconds for run in runs],
        equal_requests=len(right) - len(first_differences),
        equal_tokens=sum(equal),
        first_differences=first_differences,
        repeatable=all(run.tokens == runs[0].tokens for run in runs),
    )


def count_equal(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first difference.

    >>> count_equal([5, 6, 7], [5, 6, 8])
    2
    """
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))


def format_table(comparison: Comparison) -> str:
    """The engines as a table of text."""
    width = max(len("engine"), *(len(engine.name) for engine in comparison.engines)) + 2
    ratio = f"x {comparison.speed_reference}"
    header = (
        f"{'engine':<{width}}{'tokens/s':>9}{'min':>8}{'max':>8}{ratio:>{len(ratio) + 3}}{'load':>8}{'memory':>10}"
        f"{'same requests':>15}{'same tokens':>14}"
    )
    lines = [header, "-" * len(header)]
    for engine in comparison.engines:
        speeds = engine.output_tokens_per_second
        requests = f"{engine.equal_requests}/{comparison.num_requests}"
        tokens = f"{engine.equal_tokens}/{comparison.output_tokens}"
        lines.append(
            f"{engine.name:<{width}}{engine.median:>9.1f}{min(speeds):>8.1f}{max(speeds):>8.1f}"
            f"{comparison.ratio(engine):>{len(ratio) + 3}.2f}{engine.load_seconds:>6.1f} s{engine.peak_memory_mb:>7.0f} MB"
            f"{requests:>15}{tokens:>14}"
        )
    lines += [
        "",
        f"tokens/s: output tokens per second, median of {len(comparison.engines[0].seconds)}. same: as {comparison.token_reference} "
        "in float32; of a request that differs, the tokens before its first difference are counted.",
    ]
    lines += [f"{engine.name} gave other tokens in another round." for engine in comparison.engines if not engine.repeatable]
    return "\n".join(lines)
