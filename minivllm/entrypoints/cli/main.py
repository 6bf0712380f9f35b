"""The command line: `minivllm generate`, `chat`, `serve`, `bench`, `simulate`, `trace`, `course`, `grade`, `doctor` and `demo`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from minivllm import __version__
from minivllm.entrypoints.cli.bench import add_benchmarks
from minivllm.entrypoints.cli.bench_serve import add_bench_serve
from minivllm.entrypoints.cli.course import add_course_command
from minivllm.entrypoints.cli.grade import add_grade_command
from minivllm.entrypoints.cli.options import (
    add_command,
    add_engine_options,
    add_option,
    add_save_trace_option,
    check_writable,
    engine_args,
)
from minivllm.entrypoints.cli.replicas import add_replicas_command
from minivllm.entrypoints.cli.serve import add_make_key_command, add_serve_command
from minivllm.entrypoints.cli.simulate import add_calibrate, add_simulate
from minivllm.entrypoints.cli.trace import add_trace_commands, with_trace_command
from minivllm.errors import MinivllmError, RequestError
from minivllm.sampling_params import SamplingParams


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status; a user's mistake is reported in one sentence."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = make_parser().parse_args(with_trace_command(argv))
    arguments.command = shlex.join(["minivllm", *argv])
    try:
        for name in ("json", "plot", "save_trace"):  # find out before the work that its results cannot be saved
            if isinstance(path := getattr(arguments, name, None), Path):
                check_writable(path)
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
        print(f"minivllm: some text cannot be read or written in this terminal's encoding: {error}.", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="minivllm", description="An LLM serving engine with vLLM's architecture, small enough to read."
    )
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = add_command(
        commands, "generate", run_generate, "complete prompts", 'minivllm generate "The capital of France is" --temperature 0'
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to complete; - reads one prompt from standard input")
    add_option(generate, "--json", False, "print one JSON object per prompt")
    add_save_trace_option(generate)
    _add_sampling_options(generate, max_tokens=64)
    add_engine_options(generate)

    chat = add_command(commands, "chat", run_chat, "talk to the model; answers stream", "minivllm chat --temperature 0.7")
    add_option(chat, "--system TEXT", str, "a system message at the start of the conversation")
    _add_sampling_options(chat, max_tokens=512)
    add_engine_options(chat)

    add_serve_command(commands)
    add_make_key_command(commands)
    add_replicas_command(commands)

    bench = commands.add_parser("bench", help="measure", description="Measure the engine on this machine.")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    add_benchmarks(benches)
    add_bench_serve(benches)
    add_calibrate(benches)

    add_simulate(commands)

    trace = commands.add_parser("trace", help="draw or export a saved trace", description="Draw or export a saved trace.")
    add_trace_commands(trace.add_subparsers(title="commands", required=True, metavar="COMMAND"))

    add_course_command(commands)
    add_grade_command(commands)

    add_command(commands, "doctor", run_doctor, "report what this machine can do", "minivllm doctor")

    demo = add_command(commands, "demo", run_demo, "show what the engine does, in a minute", "minivllm demo --output out")
    demo.add_argument(
        "topic", nargs="?", choices=("batching", "failover"), default="batching",
        help="batching (the default): static against continuous; failover: kill a replica in the middle of its answers",
    )  # fmt: skip
    add_option(demo, "--output FOLDER", Path("out"), "where to save the picture")
    return parser


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    add_option(group, "--temperature", 0.8, "0 always picks the most likely token")
    add_option(group, "--top-p", 0.95, "sample from the most likely tokens that add up to this probability")
    add_option(group, "--top-k", 0, "sample from this many most likely tokens; 0 is no limit")
    add_option(group, "--min-p", 0.0, "drop tokens less likely than this fraction of the best one")
    add_option(group, "--repetition-penalty", 1.0, "above 1 discourages repetition")
    add_option(group, "--max-tokens", max_tokens, "maximum number of tokens to generate")
    add_option(group, "--n", 1, "completions per prompt")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be given several times")
    add_option(group, "--sampling-seed SEED", int, "makes sampling reproducible")


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    names = ("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop")
    return SamplingParams(**{name: getattr(arguments, name) for name in names}, seed=arguments.sampling_seed)


def run_generate(arguments: argparse.Namespace) -> int:
    """Complete the prompts and print them with their completions."""
    params = _sampling_params(arguments)
    prompts = [_read_standard_input() if prompt == "-" else prompt for prompt in arguments.prompts]
    from minivllm.entrypoints.llm import LLM

    llm = LLM(**engine_args(arguments), trace=arguments.save_trace is not None)
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    if llm.llm_engine.trace is not None:
        llm.llm_engine.trace.save(arguments.save_trace)
    for output in outputs:
        if arguments.json:
            completions = [{"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in output.outputs]
            print(json.dumps({"prompt": output.prompt, "outputs": completions, "error": output.error}, ensure_ascii=False))
            continue
        prompt = f"\033[1m{output.prompt}\033[0m" if sys.stdout.isatty() else output.prompt
        for completion in output.outputs:
            print(f"{prompt}{completion.text}\n")
    return 1 if any(output.error for output in outputs) else 0


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise RequestError("The prompt is - but there is no standard input to read it from.")
    return sys.stdin.read().rstrip("\n")


def run_chat(arguments: argparse.Namespace) -> int:
    """Talk to the model until /exit or the end of input."""
    params = _sampling_params(arguments)
    if sys.stdin is None:
        raise RequestError("There is no standard input to read messages from.")
    from minivllm.entrypoints.cli.chat import chat_loop
    from minivllm.entrypoints.llm import LLM

    print(f"Loading {arguments.model} ...", file=sys.stderr)
    args = engine_args(arguments) | {"enable_prefix_caching": True}  # each turn starts with all the earlier ones
    chat_loop(LLM(**args), params, arguments.system)
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """Report what this machine can do."""
    from minivllm.entrypoints.cli.doctor import examine

    return examine()


def run_demo(arguments: argparse.Namespace) -> int:
    """Show what the engine does."""
    if arguments.topic == "failover":
        from minivllm.entrypoints.cli.demo_failover import demo_failover

        return demo_failover()
    from minivllm.entrypoints.cli.demo import demo

    demo(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
