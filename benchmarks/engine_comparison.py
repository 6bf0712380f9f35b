"""minivllm against vLLM, transformers and llama.cpp: the same requests to each, in turn, in one run.

    python benchmarks/engine_comparison.py --workload benchmarks/workloads/offline_64.json --engines minivllm vllm

docs/measuring_against_vllm.md says how to install the others, and what makes the comparison fair.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, EngineSpec, Run, find_versions, start_all
from quality import OPTIONS, format_qualities, measure_qualities
from tqdm.auto import tqdm

from minivllm.bench.report import format_table, report
from minivllm.bench.workloads import WorkloadRequest, warm_up_requests
from minivllm.config import EngineArgs, ModelConfig
from minivllm.entrypoints.cli.bench import add_workload_options, find_model_config, one_workload
from minivllm.entrypoints.cli.options import add_engine_options, check_writable, options_for
from minivllm.errors import ConfigError, MinivllmError
from minivllm.models.hub import PACKAGED_MODELS, find_packaged_file

ENGINE_NAMES = (
    "minivllm", "minivllm-bfloat16", "minivllm-int8", "minivllm-int8-bfloat16", "transformers-static", "transformers-continuous", "vllm",
    "vllm-bfloat16", "vllm-eager", "llama.cpp",
)  # fmt: skip
TOKEN_REFERENCE = "transformers-static"
SPEED_REFERENCES = ("vllm", "vllm-bfloat16")


@dataclass
class EngineResult:
    """The result of one engine.

    `output_tokens_per_second` has the throughput of each round. `equal_requests` counts the requests with exactly the reference's
    tokens; `equal_tokens` sums each request's tokens before its first difference; `first_differences` maps the requests that differ to
    the position of that difference. `repeatable` says whether all rounds gave the same tokens.
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
    """All engines on one workload. Speeds are relative to each of `speed_references`; `token_reference` is the engine with the right tokens."""

    workload: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    speed_references: list[str]
    token_reference: str
    engines: list[EngineResult]

    def ratios(self, engine: EngineResult) -> dict[str, float]:
        """Median speed of an engine relative to each reference."""
        medians = {other.name: other.median for other in self.engines}
        return {name: engine.median / medians[name] for name in self.speed_references}

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the ratios and extremes of the table."""
        return asdict(self) | {
            "engines": [
                asdict(engine)
                | {"min": min(engine.output_tokens_per_second), "max": max(engine.output_tokens_per_second)}
                | {"ratios": self.ratios(engine)}
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
        names: Engines of `ENGINE_NAMES`, each at most once.
        model_config: The model: all engines load the same files.
        engine_args: Arguments of `EngineArgs` for minivllm; the others get its `max_num_seqs`.
        requests: The workload, which must fit the model.
        gguf: The file for llama.cpp.
        vllm_python, llama_python: Interpreters of their environments; None is this one.

    Raises:
        ConfigError: A name is unknown or repeated, an engine cannot run, or a request does not fit.
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
        kind, _, variant = name.partition("-") if name.startswith(("minivllm-", "vllm-")) else (name, "", "")
        python, settings, install = sys.executable, peer, "run `make setup`"
        if kind == "minivllm":
            args = mine | (OPTIONS[variant] if variant else {})
            if unknown_args := args.keys() - set(EngineArgs.names()):
                raise ConfigError(f"{name} cannot be started: the engine has no argument {', '.join(sorted(unknown_args))}.")
            settings = {"engine_args": args}
        elif kind == "vllm":
            python, install = vllm_python or python, vllm_hint
            settings = peer | {"enforce_eager": variant == "eager", "dtype": "bfloat16" if variant == "bfloat16" else "float32"}
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
    """The context length of all engines: the one asked for, or at least 1,024 tokens if the model allows."""
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
    """Load all engines and warm them up; then in each round, each runs the workload once while the others are stopped.

    Args:
        specs: The engines, from `make_specs`.
        name: The workload's name, for the report.
        requests: The workload.
        rounds: How often each engine runs it.
        use_tqdm: Show progress on standard error.

    Raises:
        ConfigError: An engine cannot be started, fails, or gives a request another number of tokens than it asked for. Whether
            all engines are installed is checked before any is loaded.
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
        speed_references=[name for name in SPEED_REFERENCES if name in names] or names[:1],
        token_reference=token_reference,
        engines=[
            summarize(engine, version, peak, done, right)
            for engine, version, peak, done in zip(engines, versions, memory, runs, strict=True)
        ],
    )


def summarize(
    engine: EngineProcess, versions: dict[str, str], peak_memory_mb: float, runs: list[Run], right: list[list[int]]
) -> EngineResult:
    """An engine's rounds, with its tokens compared to the right ones."""
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


def format_comparison(comparison: Comparison) -> str:
    """The engines as a table of text."""
    references = [f"x {name}" for name in comparison.speed_references]
    headers = ("engine", "tokens/s", "min", "max", *references, "load", "memory", "same requests", "same tokens")
    rows = [
        (
            engine.name,
            f"{engine.median:.1f}",
            f"{min(engine.output_tokens_per_second):.1f}",
            f"{max(engine.output_tokens_per_second):.1f}",
            *(f"{ratio:.2f}" for ratio in comparison.ratios(engine).values()),
            f"{engine.load_seconds:.1f} s",
            f"{engine.peak_memory_mb:.0f} MB",
            f"{engine.equal_requests}/{comparison.num_requests}",
            f"{engine.equal_tokens}/{comparison.output_tokens}",
        )
        for engine in comparison.engines
    ]
    lines = [
        format_table(headers, rows),
        "",
        f"tokens/s: output tokens per second, median of {len(comparison.engines[0].seconds)}. same: as {comparison.token_reference} in "
        "float32; of a request that differs, the tokens before its first difference are counted.",
    ]
    lines += [f"{engine.name} gave other tokens in another round." for engine in comparison.engines if not engine.repeatable]
    return "\n".join(lines)


def find_gguf_file(model: str) -> str | None:
    """The GGUF file that a model was converted from, if it was."""
    if packaged := PACKAGED_MODELS.get(model.lower()):
        return str(find_packaged_file(packaged))
    return model if model.endswith(".gguf") else None


def run(arguments: argparse.Namespace) -> None:
    """Compare the engines, print a table, and measure the quality of quantized weights."""
    check_writable(arguments.json)
    if arguments.quantization or arguments.dtype not in ("auto", "float32"):
        raise ConfigError(
            "Name minivllm-bfloat16, minivllm-int8 or minivllm-int8-bfloat16 as an engine instead of --dtype and --quantization."
        )
    config = find_model_config(arguments)
    name, requests = one_workload(arguments, config)
    specs = make_specs(
        arguments.engines, config, options_for(EngineArgs, arguments), requests,
        gguf=find_gguf_file(arguments.model), vllm_python=arguments.vllm_python, llama_python=arguments.llama_python,
    )  # fmt: skip
    comparison = compare(specs, name, requests, arguments.rounds)
    title = (
        f"{arguments.model}, {name}: {comparison.num_requests} requests, {comparison.prompt_tokens} prompt tokens, "
        f"{comparison.output_tokens} output tokens, at most {arguments.max_num_seqs} running"
    )
    table, results = format_comparison(comparison), {"comparison": comparison.to_json()}
    quantizations = [engine.removeprefix("minivllm-") for engine in arguments.engines if engine.startswith("minivllm-")]
    if quantizations:  # no speed of quantized weights without their quality
        qualities = measure_qualities(arguments.model, quantizations)
        table += f"\n\n{format_qualities(qualities)}"
        results["quality"] = [vars(quality) for quality in qualities]
    origin = {"model": arguments.model, "max_num_seqs": arguments.max_num_seqs}
    report(title, table, origin | results, file=arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--engines", nargs="+", choices=ENGINE_NAMES, metavar="ENGINE", required=True, help=", ".join(ENGINE_NAMES)
    )
    group.add_argument("--rounds", type=int, default=3, help="how often each engine runs the workload (default: %(default)s)")
    group.add_argument("--vllm-python", metavar="PATH", help="the Python of the environment with vLLM (default: this one)")
    group.add_argument("--llama-python", metavar="PATH", help="the one with llama-cpp-python (default: this one)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    add_workload_options(parser)
    add_engine_options(parser)
    parser.set_defaults(max_num_seqs=16)
    try:
        run(parser.parse_args(argv))
    except MinivllmError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
