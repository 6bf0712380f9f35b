"""Chat in the terminal."""

from __future__ import annotations

import itertools
import sys

from minivllm.entrypoints.llm import LLM
from minivllm.errors import RequestError
from minivllm.sampling_params import SamplingParams


def chat_loop(llm: LLM, params: SamplingParams, system: str | None = None) -> None:
    """Read messages and stream the answers, until /exit or Ctrl-D."""
    tokenizer = llm.get_tokenizer()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    print("Write a message. /clear forgets the conversation, /exit ends it, Ctrl-C stops an answer.", file=sys.stderr)
    for turn in itertools.count():
        try:
            text = input("\n> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _stream_answer(llm, f"chat-{turn}", tokenizer.apply_chat_template(messages), params)
        except RequestError as error:
            print(f"{error} /clear starts a new conversation.", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


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
