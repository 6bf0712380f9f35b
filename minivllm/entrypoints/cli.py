"""The command line: `minivllm generate`, `chat`, `bench offline`, `doctor` and `demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

from minivllm import __version__
from minivllm.config import DTYPES, POLICIES, PREEMPTION_MODES, QUANTIZATIONS, EngineArgs
from minivllm.errors import ConfigError, MinivllmError, RequestError
from minivllm.sampling_params import SamplingParams

_CHOICES = {
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "device": ("auto", "cpu", "cuda"),
    "attention_backend": ("auto", "torch", "cpu", "triton"),
    "scheduling_policy": POLICIES,
    "preemption_mode": PREEMPTION_MODES,
}
_NOT_ON_THE_COMMAND_LINE = {"model", "scheduler_cls", "block_space_manager_cls", "skip_tokenizer_init", "trace"}


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status; what a person did wrong is told in one sentence."""
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except MinivllmError as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nminivllm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `minivllm ... | head`
        sys.stderr.close()
        return 1
    except OSError as error:
        print(f"minivllm: {error.filename or 'a stream'} cannot be used: {error.strerror}.", file=sys.stderr)
        return 2
    except UnicodeError as error:
        print(f"minivllm: text that cannot be read or written in this terminal's encoding: {error}.", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="minivllm", description="An LLM serving engine with vLLM's architecture, small enough to read."
    )
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = _add(
        commands, "generate", run_generate, "complete prompts", 'minivllm generate "The capital of France is" --temperature 0'
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to complete; - reads one prompt from standard input")
    generate.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    _add_sampling_options(generate, max_tokens=64)
    _add_engine_options(generate)

    chat = _add(commands, "chat", run_chat, "talk with the model; its answers stream", "minivllm chat --temperature 0.7")
    chat.add_argument("--system", metavar="TEXT", help="a system message at the start of the conversation")
    _add_sampling_options(chat, max_tokens=512)
    _add_engine_options(chat)

    bench = commands.add_parser("bench", help="measure", description="Measure the engine on this machine.")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    offline = _add(
        benches, "offline", run_bench_offline, "static against continuous batching on one workload",
        "minivllm bench offline --distribution longtail --plot timelines.png",
    )  # fmt: skip
    _add_bench_options(offline)
    scheduler = _add(
        benches, "scheduler", run_bench_scheduler, "what scheduling costs, with the model taken out", "minivllm bench scheduler"
    )
    scheduler.add_argument("--running", type=int, default=256, help="sequences in the batch (default: %(default)s)")
    scheduler.add_argument(
        "--waiting", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000], help="queue lengths (default: %(default)s)"
    )

    _add(commands, "doctor", run_doctor, "say what this machine can do", "minivllm doctor")

    demo = _add(commands, "demo", run_demo, "show what the engine does, in three minutes", "minivllm demo --output out")
    demo.add_argument(
        "--output", type=Path, default=Path("out"), metavar="FOLDER", help="where pictures go (default: %(default)s)"
    )
    return parser


def _add(commands, name: str, run: Callable, summary: str, example: str) -> argparse.ArgumentParser:  # noqa: ANN001
    description = summary[0].upper() + summary[1:] + "."
    parser = commands.add_parser(name, help=summary, description=description, epilog=f"Example: {example}")
    parser.set_defaults(run=run)
    return parser


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=0.8, help="0 always takes the most likely token (default: %(default)s)"
    )
    group.add_argument(
        "--top-p", type=float, default=0.95, help="keep the most likely tokens up to this probability (default: %(default)s)"
    )
    group.add_argument("--top-k", type=int, default=0, help="keep so many tokens; 0 keeps all (default: %(default)s)")
    group.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens at least so likely relative to the best (default: %(default)s)"
    )
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 repeats less (default: %(default)s)")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="generate at most so many tokens (default: %(default)s)"
    )
    group.add_argument("--n", type=int, default=1, help="continuations of each prompt (default: %(default)s)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    group.add_argument("--sampling-seed", type=int, metavar="SEED", help="makes a request's random choices repeatable")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that are arguments of `EngineArgs`, with its defaults and its own words."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default=EngineArgs.model, help=f"{EngineArgs.help_for('model')} (default: %(default)s)")
    for field in fields(EngineArgs):
        if field.name in _NOT_ON_THE_COMMAND_LINE:
            continue
        option = "--" + field.name.replace("_", "-")
        help_text = EngineArgs.help_for(field.name).replace("%", "%%")
        assert field.default is not MISSING
        if field.type == "bool":
            group.add_argument(option, action="store_true", help=help_text)
            continue
        kind = int if "int" in str(field.type) else float if field.type == "float" else str
        if field.default is not None:
            help_text += " (default: %(default)s)"
        group.add_argument(option, type=kind, default=field.default, choices=_CHOICES.get(field.name), help=help_text)


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    from minivllm.bench.workloads import DISTRIBUTIONS

    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload", type=Path, metavar="FILE", help="a JSON list of {'ids': prompt tokens, 'out': tokens to generate}"
    )
    group.add_argument(
        "--distribution",
        nargs="+",
        choices=DISTRIBUTIONS,
        default=list(DISTRIBUTIONS),
        help="lengths of generated requests (default: both)",
    )
    group.add_argument("--num-requests", type=int, default=32, help="generated requests (default: %(default)s)")
    group.add_argument("--mean-prompt-len", type=int, default=32, help="tokens (default: %(default)s)")
    group.add_argument("--mean-output-len", type=int, default=48, help="tokens (default: %(default)s)")
    group.add_argument("--workload-seed", type=int, default=0, help="of lengths and tokens (default: %(default)s)")
    group.add_argument(
        "--scheduler",
        nargs="+",
        choices=("static", "continuous"),
        default=["static", "continuous"],
        help="policies to compare (default: both)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    group.add_argument("--plot", type=_picture, metavar="FILE", help="draw the timelines of the last workload here")
    _add_engine_options(parser)
    parser.set_defaults(max_num_seqs=16)


def _picture(name: str) -> Path:
    """A file name with an ending that a picture can have."""
    path = Path(name)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{name} must end in .png, .pdf or .svg")
    return path


def _engine_args(arguments: argparse.Namespace) -> dict:
    """The keyword arguments for `LLM` that were given on the command line."""
    return {name: getattr(arguments, name) for name in EngineArgs.names() if hasattr(arguments, name)}


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        n=arguments.n,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        seed=arguments.sampling_seed,
    )


def run_generate(arguments: argparse.Namespace) -> int:
    """Complete the prompts and print them with their continuations."""
    params = _sampling_params(arguments)
    prompts = [_read_standard_input() if prompt == "-" else prompt for prompt in arguments.prompts]
    from minivllm.entrypoints.llm import LLM

    llm = LLM(**_engine_args(arguments))
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        if arguments.json:
            completions = [{"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in output.outputs]
            print(json.dumps({"prompt": output.prompt, "outputs": completions, "error": output.error}, ensure_ascii=False))
            continue
        for completion in output.outputs:
            print(
                f"\033[1m{output.prompt}\033[0m{completion.text}\n"
                if sys.stdout.isatty()
                else f"{output.prompt}{completion.text}\n"
            )
    return 1 if any(output.error for output in outputs) else 0


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise RequestError("The prompt is - but there is no standard input to read it from.")
    return sys.stdin.read().rstrip("\n")


def run_chat(arguments: argparse.Namespace) -> int:
    """Talk with the model until /exit or the end of input."""
    params = _sampling_params(arguments)
    if sys.stdin is None:
        raise RequestError("There is no standard input to read messages from.")
    from minivllm.entrypoints.chat import chat_loop
    from minivllm.entrypoints.llm import LLM

    print(f"Loading {arguments.model} ...", file=sys.stderr)
    engine_args = _engine_args(arguments) | {"enable_prefix_caching": True}  # each turn begins with all the earlier ones
    chat_loop(LLM(**engine_args), params, arguments.system)
    return 0


def _check_writable(path: Path | None) -> None:
    """Find out beforehand whether a file can be written."""
    if path is None:
        return
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: it must be a file in a folder that exists.")


def run_bench_offline(arguments: argparse.Namespace) -> int:
    """Run each workload under each policy, in turn, and print a table."""
    from minivllm.bench.machine import describe_machine
    from minivllm.bench.offline import format_table, run_offline
    from minivllm.bench.workloads import load_workload, make_workload
    from minivllm.entrypoints.llm import LLM

    for path in (arguments.json, arguments.plot):  # before the work, not after it
        _check_writable(path)
    engine = LLM(**_engine_args(arguments) | {"trace": True}).llm_engine
    config = engine.model_config
    if arguments.workload:
        workloads = {arguments.workload.stem: load_workload(arguments.workload)}
    else:
        workloads = {
            name: make_workload(
                name, arguments.num_requests, mean_prompt_len=arguments.mean_prompt_len, mean_output_len=arguments.mean_output_len,
                vocab_size=config.vocab_size, max_len=config.max_model_len, seed=arguments.workload_seed,
            )
            for name in arguments.distribution
        }  # fmt: skip
    results = [
        run_offline(engine, scheduler, name, requests)
        for name, requests in workloads.items()
        for scheduler in arguments.scheduler
    ]
    print(f"\n{arguments.model}, at most {arguments.max_num_seqs} running; {describe_machine()}\n\n{format_table(results)}")
    if arguments.json:
        report = {"machine": describe_machine(), "model": arguments.model, "results": [result.to_json() for result in results]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.plot:
        from minivllm.viz.timeline import draw_timelines

        last = results[-len(arguments.scheduler) :]
        draw_timelines({result.scheduler: result.trace for result in last}, last[0].workload).savefig(arguments.plot, dpi=150)
        print(f"\nTimelines of the {last[0].workload} workload: {arguments.plot}")
    return 0


def run_bench_scheduler(arguments: argparse.Namespace) -> int:
    """Measure `schedule()` and `update()` for each queue length."""
    from minivllm.bench.machine import describe_machine
    from minivllm.bench.scheduler import format_table, measure_scheduler

    costs = [measure_scheduler(arguments.running, num_waiting) for num_waiting in arguments.waiting]
    print(f"schedule() + update() per step; {describe_machine()}\n\n{format_table(costs)}")
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print what was found, good or bad."""
    from minivllm.entrypoints.doctor import examine

    return examine()


def run_demo(arguments: argparse.Namespace) -> int:
    """Show what the engine does."""
    from minivllm.entrypoints.demo import demo

    demo(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
