"""Speculative decoding by prompt lookup: output tokens/s with and without it, alone and in a batch.

    python benchmarks/speculative_decoding.py

Two kinds of prompts. "repeating": a text, to be written again with one change, so that the answer follows the prompt. "ordinary": a
sentence to continue. Two engines, one with draft tokens and one without, take the same prompts in turns, greedily, past end-of-sequence
tokens. Only decoding differs, so neither first tokens nor the time until all requests have theirs are counted.

"accepted" is the share of accepted draft tokens; "tokens/step" what a sequence gets in a step on average.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from prompts import SENTENCES

from minivllm import LLM, SamplingParams
from minivllm.bench.report import format_table, report

KINDS = ("repeating", "ordinary")


@dataclass
class Run:
    """One engine and batch: output tokens per second of decoding, and what the draft tokens were worth."""

    tokens_per_second: float
    acceptance_rate: float
    tokens_per_step: float
    token_ids: list[list[int]]


def make_prompts(llm: LLM, kind: str, batch_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts as token ids, each put together from other sentences."""
    rng, tokenizer = random.Random(seed), llm.get_tokenizer()
    prompts = []
    for _ in range(batch_size):
        if kind == "ordinary":
            prompts.append(tokenizer.encode(rng.choice(SENTENCES[:6])))
            continue
        text = "\n".join(rng.sample(SENTENCES[:9], 5))
        message = f"Write this text again, word for word, with the title 'Copy' above it:\n\n{text}"
        prompts.append(tokenizer.apply_chat_template([{"role": "user", "content": message}]))
    return prompts


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Run:
    """Answer the prompts, all there from the start."""
    trace = llm.llm_engine.start_trace()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    decodes = [step for step in trace if step.phase == "decode"]
    parts = [part for step in decodes for part in step.scheduled]
    num_drafts, num_accepted = sum(part.num_drafts for part in parts), sum(part.num_accepted for part in parts)
    num_tokens = len(prompts) * (max_tokens - 1)
    return Run(
        tokens_per_second=num_tokens / (decodes[-1].end - decodes[0].start),
        acceptance_rate=num_accepted / num_drafts if num_drafts else 0.0,
        tokens_per_step=num_tokens / len(parts),
        token_ids=[output.outputs[0].token_ids for output in outputs],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    args = parser.parse_args()
    common = {"max_num_seqs": max(args.batch_sizes), "max_model_len": 1024, "num_gpu_blocks_override": 1024}
    engines = {
        "without": LLM(args.model, **common),
        "with": LLM(args.model, num_speculative_tokens=args.num_speculative_tokens, **common),
    }
    rows, measurements = [], []
    for kind in KINDS:
        for batch_size in args.batch_sizes:
            prompts = make_prompts(engines["without"], kind, batch_size)
            runs: dict[str, list[Run]] = {name: [] for name in engines}
            for repeat in range(args.repeats + 1):
                for name, llm in engines.items():
                    result = run(llm, prompts, args.max_tokens)
                    if repeat > 0:  # the first round warms up
                        runs[name].append(result)
            speeds = {name: statistics.median(result.tokens_per_second for result in results) for name, results in runs.items()}
            plain, speculative = runs["without"][-1], runs["with"][-1]
            num_same = sum(a == b for a, b in zip(plain.token_ids, speculative.token_ids, strict=True))
            rows.append(
                (
                    kind,
                    batch_size,
                    f"{speeds['without']:.1f} t/s",
                    f"{speeds['with']:.1f} t/s",
                    f"{speeds['with'] / speeds['without']:.2f}",
                    f"{speculative.acceptance_rate:.0%}",
                    f"{speculative.tokens_per_step:.2f}",
                    f"{num_same} of {batch_size}",
                )
            )
            print(*rows[-1], flush=True)
            runs_without_tokens = {
                name: [{key: value for key, value in asdict(result).items() if key != "token_ids"} for result in results]
                for name, results in runs.items()
            }
            measurements.append({"text": kind, "batch_size": batch_size, "same_tokens": num_same, "runs": runs_without_tokens})
    headers = ("text", "batch", "without", "with", "ratio", "accepted", "tokens/step", "same tokens")
    runs_in_turns = "one run each" if args.repeats == 1 else f"median of {args.repeats} runs in turns"
    title = f"{args.model}, up to {args.num_speculative_tokens} draft tokens, {args.max_tokens} tokens each, {runs_in_turns}"
    report(title, format_table(headers, rows), {"model": args.model, "results": measurements}, file=args.json)


if __name__ == "__main__":
    main()
