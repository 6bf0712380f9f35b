"""What a schema costs a batch: 16 sequences, none or half of them with a JSON schema, in turns in one engine; and the time that a mask takes.

    python benchmarks/structured_outputs.py --json structured.json

The masks come from random walks through the grammars below, from one that forces every token to free text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from tqdm import tqdm

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.bench.report import format_table, report
from minivllm.core.structured_output import GrammarCompiler
from minivllm.worker.sampler import allowed_tokens

NUM_SEQUENCES, LENGTH = 16, 64
NUM_WALKS, WALK_TOKENS = 20, 100
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"enum": ["Rome", "Oslo"]}}},
        "scores": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["name", "email", "born", "address", "scores"],
}
GRAMMARS = {
    "any object": StructuredOutputsParams(json_object=True),
    "a person": StructuredOutputsParams(json=PERSON),
    "a long text": StructuredOutputsParams(
        json={"type": "object", "properties": {"text": {"type": "string", "minLength": 2000}}, "required": ["text"]}
    ),
    "a regular expression": StructuredOutputsParams(regex=r"([A-Z][a-z]+ )*\d{1,3}(\.\d+)?"),
    "a choice": StructuredOutputsParams(choice=[f"the number {i}" for i in range(1000)]),
}


def time_steps(llm: LLM, num_structured: int) -> float:
    """The median time of a decode step of 16 sequences, in milliseconds."""
    long_text = GRAMMARS["a long text"]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=LENGTH,
            ignore_eos=True,
            structured_outputs=long_text if i < num_structured else None,
        )
        for i in range(NUM_SEQUENCES)
    ]
    engine = llm.llm_engine
    for i in range(NUM_SEQUENCES):
        engine.add_request(f"{i}", f"Once upon a time, number {i}", params[i])
    times = []
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        engine.step()
        if len(engine.scheduler.running) == NUM_SEQUENCES:
            times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]) * 1000


def time_masks(
    compiler: GrammarCompiler, wanted: StructuredOutputsParams, eos_token_ids: tuple[int, ...], vocab_size: int
) -> list[float]:
    """Milliseconds of each mask on random walks."""
    rng = random.Random(0)
    times = []
    for _ in range(NUM_WALKS):
        grammar = compiler.compile(wanted, eos_token_ids)
        for _ in range(WALK_TOKENS):
            begin = time.perf_counter()
            [mask] = grammar.masks()
            times.append((time.perf_counter() - begin) * 1000)
            allowed = allowed_tokens(mask, vocab_size).nonzero().flatten().tolist()
            if not grammar.accept_token(rng.choice(allowed)):
                break
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often each is timed, in turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()

    llm = LLM(arguments.model, max_num_seqs=NUM_SEQUENCES, kv_cache_memory_bytes=256 * 2**20)
    steps: dict[int, list[float]] = {0: [], NUM_SEQUENCES // 2: [], NUM_SEQUENCES: []}
    for count in steps:
        time_steps(llm, count)
    for _ in tqdm(range(arguments.rounds), desc="steps", dynamic_ncols=True):
        for count, times in steps.items():
            times.append(time_steps(llm, count))
    config = llm.llm_engine.model_config
    compiler = GrammarCompiler(config.path, config.vocab_size)
    masks = {name: time_masks(compiler, wanted, config.eos_token_ids, config.vocab_size) for name, wanted in GRAMMARS.items()}

    rows = [
        (
            f"{count} of {NUM_SEQUENCES}",
            f"{statistics.median(times):.2f} ms",
            f"{statistics.median(a / b for a, b in zip(times, steps[0], strict=True)):.3f}",
        )
        for count, times in steps.items()
    ]
    table = format_table(("sequences with a schema", "decode step (median)", "to none"), rows)
    rows = [
        (
            name,
            len(times),
            f"{statistics.median(times):.3f} ms",
            f"{sorted(times)[len(times) * 99 // 100]:.3f} ms",
            f"{max(times):.3f} ms",
        )
        for name, times in masks.items()
    ]
    table += "\n\n" + format_table(("grammar", "masks", "median", "p99", "longest"), rows)
    report("Structured outputs: steps and masks", table, {"steps_ms": steps, "masks_ms": masks}, file=arguments.json)


if __name__ == "__main__":
    main()
