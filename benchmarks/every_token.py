"""Kills a replica after each of the 40 tokens of requests of many kinds, and compares what the clients receive with undisturbed answers.

    python benchmarks/every_token.py --json tokens.json
    python benchmarks/every_token.py --dtype bfloat16 --json tokens.json
    python benchmarks/every_token.py --quantization int8 --json tokens.json

The requests go over HTTP to one of a server's two replicas, which is killed when one of them has received a given number of tokens. The answers and their
log-probabilities are compared with those of `LLM`. This is repeated until a request of each kind was killed at every position.

In float32 they must be equal. In bfloat16 and int8, a token that is computed together with its prompt can differ in its last bits from one that was decoded. So where
an answer differs, this shows that rounding alone decided: an engine in this process that recomputes prompt and output and continues from there gives exactly
the client's answer, and at the first token that differs, the log-probabilities of both candidates move against each other by at most `TIE` nats. The server runs without chunked
prefill, where the rest of a step could decide, too. The exit status is 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from server_process import ServerProcess, start_server
from streams import MODEL, Stream, all_ready, ask, fault
from tqdm import tqdm

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.bench.report import format_table, report
from minivllm.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.request import EngineCoreRequest, RequestMetrics, Resumption

LENGTH = 40
PROMPT = "Here is a short story about a fox who wanted to learn how to read.\n\n"
LIFE_SECONDS = 4.0
"""How long all replicas live before one is killed."""
TIE = 0.5
"""Nats by which rounding may move the score of one token against another's."""
CANDIDATES = 1000
"""Tokens whose log-probabilities are looked at where an answer differs."""


@dataclass(frozen=True)
class Kind:
    """A kind of request: parameters of the API, by which of its routes, and whether the answer is streamed."""

    params: dict[str, Any]
    chat: bool = False
    streamed: bool = True

    def sampling_params(self) -> SamplingParams:
        """The same for `LLM`."""
        params = dict(self.params)
        if "top_logprobs" in params:
            params["logprobs"] = params.pop("top_logprobs")
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        return SamplingParams(**params)


SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 9}},
    "required": ["names"],
}
"""Of an answer that is longer than `LENGTH`."""


def kinds_of_requests(stop: str) -> dict[str, Kind]:
    """The kinds by name. `stop` is a stop string that several tokens make."""
    greedy = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
    seeded = greedy | {"temperature": 0.9, "seed": 5}
    return {
        "greedy": Kind(greedy),
        "greedy, whole": Kind(greedy, streamed=False),
        "seeded": Kind(seeded),
        "three continuations": Kind(seeded | {"n": 3, "seed": 6}),
        "penalties": Kind(greedy | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
        "min_tokens and stop ids": Kind(seeded | {"min_tokens": 30, "stop_token_ids": list(range(0, 2000, 3))}),
        "a stop string": Kind(greedy | {"stop": [stop]}),
        "logprobs": Kind(seeded | {"logprobs": 2, "seed": 8}),
        "bad words": Kind(greedy | {"bad_words": ["the", "a little", "and"]}),
        "JSON of a schema": Kind(seeded | {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "seed": 11}),
        "prompt logprobs, whole": Kind(greedy | {"prompt_logprobs": 1}, streamed=False),
        "chat": Kind(seeded | {"seed": 9}, chat=True),
        "chat, logprobs": Kind(seeded | {"seed": 10, "logprobs": True, "top_logprobs": 2}, chat=True),
        "chat, whole": Kind(greedy, chat=True, streamed=False),
    }


async def kill_at(
    server: ServerProcess, kinds: dict[str, Kind], leader: str, position: int, victim: int
) -> tuple[dict[str, Stream], dict[str, int]]:
    """Send a request of each kind at once to a replica, and kill it when one of them has received this many pieces.

    Returns what came, and how many pieces of each had come by then.
    """
    url, streams = server.base_url, {name: Stream() for name in kinds}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        answer = await all_ready(session, url)
        await asyncio.sleep(LIFE_SECONDS)  # one that dies too soon is started again only after a pause
        tasks = [
            asyncio.create_task(
                ask(session, url, PROMPT, kind.params, streams[name], chat=kind.chat, streamed=kind.streamed, rank=victim)
            )
            for name, kind in kinds.items()
        ]
        while num_pieces(streams[leader]) < position and not streams[leader].error:
            await asyncio.sleep(0.001)
        reached = {name: num_pieces(got) for name, got in streams.items()}
        os.kill(answer["replicas"][victim]["process_id"], signal.SIGKILL)
        await asyncio.gather(*tasks)
    return streams, reached


def num_pieces(got: Stream) -> int:
    """Those of each continuation, which grow side by side."""
    return len(got.times) // max(1, len(got.texts))


async def count_pieces(server: ServerProcess, kinds: dict[str, Kind]) -> dict[str, int]:
    """How many pieces an undisturbed streamed answer of each kind has. One that is not streamed has the tokens of "greedy"."""
    streams = {name: Stream() for name in kinds}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(
            *[
                ask(session, server.base_url, PROMPT, kind.params, streams[name], chat=kind.chat)
                for name, kind in kinds.items()
                if kind.streamed
            ]
        )
    return {name: num_pieces(streams[name if kind.streamed else "greedy"]) for name, kind in kinds.items()}


# -- what rounding may decide ----------------------------------------------------------------------------------------


class Recomputed:
    """The answers to a request whose prompt and output so far are recomputed at some position, as after a preemption.

    Attributes:
        texts: Of each continuation, by the position, its text.
        shifts: Of each continuation, by the position, how far the scores of the two tokens moved against each other, in nats, where it
            chose another than the undisturbed answer; 0 if it is equal.
    """

    def __init__(self, llm: LLM, kind: Kind, undisturbed: RequestOutput) -> None:
        assert undisturbed.prompt_token_ids is not None
        engine = llm.llm_engine
        params = replace(kind.sampling_params(), logprobs=CANDIDATES, stop=[])
        request = engine.input_processor.process_inputs("whole", list(undisturbed.prompt_token_ids), params).core_request
        whole = _run(llm, [request])["whole"]
        positions = range(1, max(len(output.token_ids) for output in undisturbed.outputs))
        requests = []
        for position in positions:
            so_far = {
                index: list(answer.token_ids[:position]) for index, answer in whole.items() if position < len(answer.token_ids)
            }
            requests.append(replace(request, request_id=f"{position}", resumption=Resumption(so_far, RequestMetrics(0.0))))
        answers = _run(llm, requests)
        decode, stops, stop_ids = llm.get_tokenizer().decode, kind.params.get("stop", ()), kind.params.get("stop_token_ids", ())
        self.texts: dict[int, dict[int, str]] = {index: {} for index in whole}
        self.shifts: dict[int, dict[int, float]] = {index: {} for index in whole}
        for position in positions:
            for index, old in whole.items():
                new = answers[f"{position}"].get(index)
                token_ids = list(old.token_ids)
                if new is not None:
                    token_ids[position:] = new.token_ids
                if token_ids[-1] in stop_ids:
                    token_ids.pop()  # it has no text
                self.texts[index][position] = cut(decode(token_ids), stops)
                self.shifts[index][position] = 0.0 if new is None else shift(old, new, position)

    def explain(self, texts: dict[int, str]) -> float | None:
        """How far scores moved at most, if each text is one recomputed at some position, within `TIE`; None if one is not."""
        moved = []
        for index, text in texts.items():
            found = [self.shifts[index][position] for position, known in self.texts[index].items() if known == text]
            if not found or min(found) > TIE:
                return None
            moved.append(min(found))
        return max(moved)


def _run(llm: LLM, requests: list[EngineCoreRequest]) -> dict[str, dict[int, CompletionOutput]]:
    """Compute requests in the engine core; a row's result does not depend on its batch. Returns their new tokens and log-probabilities."""
    core = llm.llm_engine.engine_core.core
    answers: dict[str, dict[int, CompletionOutput]] = {request.request_id: {} for request in requests}
    for request in requests:
        core.add_request(request)
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            for new in output.sequences:
                whole = answers[output.request_id].setdefault(new.index, CompletionOutput(new.index, "", [], None))
                whole.token_ids += new.token_ids
                whole.logprobs = (whole.logprobs or []) + (new.logprobs or [])
    return answers


def shift(old: CompletionOutput, new: CompletionOutput, position: int) -> float:
    """How far two tokens moved against each other where `new`, which begins at a position of `old`, first differs; infinite if one is not among the candidates."""
    assert old.logprobs is not None and new.logprobs is not None
    for offset, mine in enumerate(new.token_ids):
        theirs = old.token_ids[position + offset]
        if mine != theirs:
            before, after = old.logprobs[position + offset], new.logprobs[offset]
            if not {mine, theirs} <= before.keys() & after.keys():
                return float("inf")
            return abs(margin(before, mine, theirs) - margin(after, mine, theirs))
    return 0.0


def margin(logprobs: dict[int, Logprob], mine: int, theirs: int) -> float:
    """By how much one token is likelier than another, in nats."""
    return logprobs[mine].logprob - logprobs[theirs].logprob


def cut(text: str, stops: list[str] | tuple[()]) -> str:
    """The text before the first stop string."""
    return text[: min([len(text), *(text.find(stop) for stop in stops if stop in text)])]


# -- the run ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--positions", type=int, nargs="+", default=list(range(LENGTH)), metavar="N", help="after which tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()

    llm = LLM(MODEL, kv_cache_memory_bytes=512 * 2**20, dtype=arguments.dtype, quantization=arguments.quantization)
    [plain] = llm.generate([PROMPT], kinds_of_requests("<no stop yet>")["greedy"].sampling_params(), use_tqdm=False)
    start = len(llm.get_tokenizer().decode(list(plain.outputs[0].token_ids)[:20]))
    kinds = kinds_of_requests(plain.outputs[0].text[start + 1 : start + 14])
    expected = {name: undisturbed(llm, kind) for name, kind in kinds.items()}
    is_exact = arguments.dtype == "float32" and arguments.quantization is None
    recomputed = {} if is_exact else {name: Recomputed(llm, kind, expected[name]) for name, kind in kinds.items()}
    llm.llm_engine.shutdown()
    del llm

    options = ["--dtype", arguments.dtype] + (["--quantization", arguments.quantization] if arguments.quantization else [])
    options += ["--data-parallel-size", "2", "--max-num-seqs", "32", "--max-model-len", "1024", "--max-replica-deaths", "1000"]
    if not is_exact:
        options.append("--no-enable-chunked-prefill")
    faults, ties = [], []
    tolerance = 1e-3 if is_exact else TIE
    covered: dict[str, set[int]] = {name: set() for name in kinds}
    with start_server(MODEL, *options) as server:
        num_positions = asyncio.run(count_pieces(server, kinds))
        wanted = {name: set(range(count)) & set(arguments.positions) for name, count in num_positions.items()}
        num_kills = 0
        with tqdm(total=sum(map(len, wanted.values())), desc="killed after each token", dynamic_ncols=True) as bar:
            while missing := {name: sorted(wanted[name] - covered[name]) for name in kinds if wanted[name] - covered[name]}:
                leader = (
                    "greedy" if "greedy" in missing else max((name for name in missing if kinds[name].streamed), default="greedy")
                )
                position = missing.get(leader, [num_kills % num_positions["greedy"]])[0]
                streams, reached = asyncio.run(kill_at(server, kinds, leader, position, num_kills % 2))
                num_kills += 1
                for name, got in streams.items():
                    at = reached[name] if kinds[name].streamed else reached["greedy"]
                    bar.update(at in wanted[name] - covered[name])
                    covered[name].add(at)
                    if not (words := fault(got, expected[name], tolerance)):
                        continue
                    nats = recomputed[name].explain(got.texts) if recomputed else None
                    if nats is None:
                        faults.append(f"{name}, after {at}: {words}")
                    else:
                        ties.append({"kind": name, "killed": at, "nats": nats})
        resumed = int(server.metrics()["minivllm:num_resumed_requests_total"])
    rows = [
        (
            name,
            f"{len(covered[name] & wanted[name])} of {len(wanted[name])}",
            sum(tie["kind"] == name for tie in ties),
            sum(words.startswith(f"{name}, after") for words in faults),
        )
        for name in kinds
    ]
    table = format_table(("kind", "positions covered by a kill", "ties that rounding decided", "other differences"), rows)
    table += f"\n\n{num_kills} kills; requests continued on the other replica {resumed} times."
    if ties:
        table += f" The scores of two tokens in a tie moved by at most {max(tie['nats'] for tie in ties):.3f} nats."
    what = arguments.quantization or arguments.dtype
    report(f"Killed after every token, {what}", table, {"faults": faults, "ties": ties, "resumed": resumed}, file=arguments.json)
    print("\n".join(faults[:10]))
    return 1 if faults else 0


def undisturbed(llm: LLM, kind: Kind) -> RequestOutput:
    """The answer of `LLM`."""
    params = kind.sampling_params()
    if kind.chat:
        return llm.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False)[0]
    return llm.generate([PROMPT], params, use_tqdm=False)[0]


if __name__ == "__main__":
    sys.exit(main())
