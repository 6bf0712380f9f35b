"""The command line: `minivllm generate`, `chat`, `serve`, `replicas`, `make-key`, `bench`, `simulate`, `trace`, `course`, `grade`, `doctor`, `demo`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from minivllm import __version__
from minivllm.entrypoints.cli.bench import add_calibrate, add_latency, add_offline, add_serve, add_sweep
from minivllm.entrypoints.cli.course import add_course_command, add_grade_command
from minivllm.entrypoints.cli.doctor import examine
from minivllm.entrypoints.cli.generate import add_generate_commands
from minivllm.entrypoints.cli.options import add_command, add_option, check_writable
from minivllm.entrypoints.cli.replicas import add_replicas_command
from minivllm.entrypoints.cli.serve import add_make_key_command, add_serve_command
from minivllm.entrypoints.cli.simulate import add_simulate
from minivllm.entrypoints.cli.trace import add_trace_commands, with_trace_command
from minivllm.errors import MinivllmError


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status; a user's mistake is reported in one sentence."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = make_parser().parse_args(with_trace_command(argv))
    arguments.command = shlex.join(["minivllm", *argv])
    try:
        for name in ("json", "plot", "save_trace", "figure"):  # before the work that they are to save
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

    add_generate_commands(commands)
    add_serve_command(commands)
    add_make_key_command(commands)
    add_replicas_command(commands)

    bench = commands.add_parser("bench", help="measure", description="Measure the engine on this machine.")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for add_benchmark in (add_offline, add_latency, add_sweep, add_serve, add_calibrate):
        add_benchmark(benches)

    add_simulate(commands)

    trace = commands.add_parser("trace", help="draw or export a saved trace", description="Draw or export a saved trace.")
    add_trace_commands(trace.add_subparsers(title="commands", required=True, metavar="COMMAND"))

    add_course_command(commands)
    add_grade_command(commands)

    summary = "report what this machine can do, or what a model needs"
    doctor = add_command(commands, "doctor", run_doctor, summary, "minivllm doctor Qwen/Qwen3-0.6B")
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="a known name, a folder, a .gguf file or a Hugging Face name")

    demo = add_command(commands, "demo", run_demo, "show what the engine does, in a minute", "minivllm demo --output out")
    demo.add_argument(
        "topic", nargs="?", choices=("batching", "failover"), default="batching",
        help="batching (the default): static against continuous; failover: kill a replica in the middle of its answers",
    )  # fmt: skip
    add_option(demo, "--output FOLDER", Path("out"), "where to save the picture")
    return parser


def run_doctor(arguments: argparse.Namespace) -> int:
    """Report on this machine, or on a model."""
    if arguments.model is None:
        return examine()
    from minivllm.entrypoints.cli.doctor_model import examine_model

    return examine_model(arguments.model)


def run_demo(arguments: argparse.Namespace) -> int:
    """Show what the engine does."""
    from minivllm.entrypoints.cli.demo import demo, demo_failover

    if arguments.topic == "failover":
        return demo_failover()
    demo(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
