"""`minivllm generate` completes prompts; `minivllm chat` holds a conversation in the terminal."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import TYPE_CHECKING

from minivllm.config import EngineArgs
from minivllm.entrypoints.cli.options import add_command, add_engine_options, add_option, add_save_trace_option, options_for
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM


def add_generate_commands(commands) -> None:  # noqa: ANN001
    """Register both commands."""
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

    llm = LLM(**options_for(EngineArgs, arguments), trace=arguments.save_trace is not None)
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    if llm.llm_engine.trace is not None:
        llm.llm_engine.trace.save(arguments.save_trace)
    for output in outputs:
        if arguments.json:
            completions = [{"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in output.outputs]
            print(json.dumps({"prompt": output.prompt, "outputs": completions, "error": output.error}, ensure_ascii=False))
            continue
        prompt = f"\033[1m{output.prompt}\033[0m" if sys.stdout is not None and sys.stdout.isatty() else output.prompt
        for completion in output.outputs:
            print(f"{prompt}{completion.text}\n")
    return 1 if any(output.error for output in outputs) else 0


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise RequestError("The prompt is - but there is no standard input to read it from.")
    return sys.stdin.read().rstrip("\n")


def run_chat(arguments: argparse.Namespace) -> int:
    """Read messages and stream the answers, until /exit or Ctrl-D."""
    params = _sampling_params(arguments)
    if sys.stdin is None:
        raise RequestError("There is no standard input to read messages from.")
    from minivllm.entrypoints.llm import LLM

    print(f"Loading {arguments.model} ...", file=sys.stderr)
    llm = LLM(**options_for(EngineArgs, arguments) | {"enable_prefix_caching": True})  # each turn starts with all earlier ones
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(opening)
    print("Write a message. /clear forgets the conversation, /exit ends it, Ctrl-C stops an answer.", file=sys.stderr)
    for turn in itertools.count():
        try:
            text = input("\n> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            break
        if text in ("/exit", "/quit"):
            break
        if text == "/clear":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _stream_answer(llm, f"chat-{turn}", llm.get_tokenizer().apply_chat_template(messages), params)
        except RequestError as error:
            print(f"{error} /clear starts a new conversation.", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def _stream_answer(llm: LLM, request_id: str, prompt: list[int], params: SamplingParams) -> str:
    """Print the answer as it is generated. Returns its text, cut short if Ctrl-C stopped it."""
    engine = llm.llm_engine
    engine.add_request(request_id, prompt, params)
    answer = ""
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error:
                    print(output.error, file=sys.stderr)
                    continue
                text = output.outputs[0].text
                print(text[len(answer) :], end="", flush=True)
                answer = text
    except KeyboardInterrupt:
        engine.abort_request(request_id)
    print()
    return answer
