"""How often a request gets another token because of what else runs, with chunked prefill: arrivals at random against alone.

    python benchmarks/tokens_in_chunks.py --json tokens_in_chunks.json

On a CPU there should be none: a decode beside a chunk is computed by the same kernel as alone, unless a chunk has a single token.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from tqdm import tqdm

from minivllm import LLM, SamplingParams
from minivllm.bench.report import format_table, report

WAYS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
PROMPTS = (
    "Once upon a time there was a king who",
    "The capital of France is",
    "A recipe for bread: take flour and",
    "def main():\n    ",
)
NUM_TOKENS = 12
CHUNK = 24


def generate_staggered(llm: LLM, params: list[SamplingParams], rng: random.Random) -> list[list[int]]:
    """The tokens of all prompts, which arrive within ten steps."""
    arrivals = sorted(rng.randrange(10) for _ in PROMPTS)
    engine, tokens, step, next_one = llm.llm_engine, {}, 0, 0
    while next_one < len(PROMPTS) or engine.has_unfinished_requests():
        while next_one < len(PROMPTS) and arrivals[next_one] <= step:
            engine.add_request(str(next_one), PROMPTS[next_one], params[next_one])
            next_one += 1
        for output in engine.step():
            if output.finished:
                tokens[int(output.request_id)] = output.outputs[0].token_ids
        step += 1
    return [tokens[number] for number in range(len(PROMPTS))]


def count_changed(way: str, temperature: float, num_runs: int) -> int:
    """The texts that differ from those of the same requests alone."""
    llm = LLM(
        "smollm2-135m", max_num_seqs=4, max_model_len=256, enable_chunked_prefill=True, max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=64 * 2**20, **WAYS[way],
    )  # fmt: skip
    changed = 0
    for run in tqdm(range(num_runs), desc=f"{way}, temperature {temperature:g}", leave=False):
        params = [
            SamplingParams(temperature=temperature, seed=run * len(PROMPTS) + i, max_tokens=NUM_TOKENS, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        alone = [
            llm.generate([prompt], each, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, each in zip(PROMPTS, params, strict=True)
        ]
        changed += sum(a != b for a, b in zip(alone, generate_staggered(llm, params, random.Random(run)), strict=True))
    return changed


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [
        {
            "way": way,
            "temperature": temperature,
            "texts": args.runs * len(PROMPTS),
            "changed": count_changed(way, temperature, args.runs),
        }
        for way in WAYS
        for temperature in (0.0, 0.9)
    ]
    title = f"Texts of {NUM_TOKENS} tokens, steps of at most {CHUNK}, 4 requests that arrive within ten steps"
    columns = ("way", "temperature", "texts", "changed")
    table = format_table(columns, [[str(row[column]) for column in columns] for row in rows])
    report(title, table, {"rows": rows}, file=args.json)


if __name__ == "__main__":
    main()
