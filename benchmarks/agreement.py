"""Greedy tokens against transformers in float32: alone, batched, preempted, chunked, with a cold and a warm prefix cache.

    python benchmarks/agreement.py            # 200 prompts, 64 tokens each: about half an hour on 2 cores
    python benchmarks/agreement.py --num-prompts 20 --max-len 200
    python benchmarks/agreement.py --num-prompts 50 --ranks 2 3    # the model split across 2 and across 3 workers

Every way of running must give transformers' tokens. transformers judges each distinct answer in one pass over prompt and answer: at each
position, its most likely token must be ours. By induction, this equals a comparison with its own greedy generation. Where its logits
for the two tokens differ by less than 1e-4, either is right.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from prompts import mixed_prompts
from tqdm import tqdm

from minivllm import LLM, SamplingParams
from minivllm.bench.report import format_table, report

TIE = 1e-4


@dataclass
class Agreement:
    """One way of running: requests and tokens that agree, ties among them, and what was exercised."""

    way: str
    requests: int = 0
    agreeing_requests: int = 0
    tokens: int = 0
    agreeing_tokens: int = 0
    ties: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


class Oracle:
    """transformers in float32. Remembers its judgements, since most answers are the same in all ways."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.judged: dict[tuple[int, ...], tuple[int, int]] = {}

    @torch.inference_mode()
    def judge(self, prompt: list[int], output: list[int]) -> tuple[int, int]:
        """Tokens before the first that differs, and how many of them are ties."""
        key = (len(prompt), *prompt, *output)
        if key not in self.judged:
            token_ids = torch.tensor([prompt + output])
            logits = self.model(token_ids, logits_to_keep=len(output) + 1).logits[0, :-1]
            best = logits.max(dim=-1).values
            ours = logits.gather(-1, torch.tensor(output)[:, None]).squeeze(1)
            wrong = (best - ours > TIE).nonzero()
            agreeing = int(wrong[0]) if len(wrong) else len(output)
            ties = int(((logits.argmax(-1) != torch.tensor(output)) & (best - ours <= TIE))[:agreeing].sum())
            self.judged[key] = (agreeing, ties)
        return self.judged[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-len", type=int, default=900, help="tokens of the longest prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="instead of all this, divide the model among N workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    args = parser.parse_args()

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    results: list[Agreement] = []
    oracle: Oracle | None = None

    def check(way: str, rounds: int = 1, **engine_args) -> int:
        """Run all prompts in one way, twice to warm a cache. Returns the most blocks in use."""
        nonlocal oracle
        llm = LLM(args.model, device="cpu", dtype="float32", trace=True, **engine_args)
        oracle = oracle or Oracle(llm.llm_engine.model_config.path)
        prompts = mixed_prompts(llm.get_tokenizer(), args.num_prompts, args.max_len)
        for i in range(rounds):
            result = Agreement(way if rounds == 1 else f"{way}, {('cold', 'warm')[i]}")
            print(f"{result.way} ...", flush=True)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            result.seconds = time.perf_counter() - start
            for prompt, output in zip(prompts, tqdm(outputs, desc="Asking transformers"), strict=True):
                tokens = output.outputs[0].token_ids
                agreeing, ties = oracle.judge(prompt, tokens)
                result.requests += 1
                result.agreeing_requests += agreeing == len(tokens) == args.max_tokens
                result.tokens += len(tokens)
                result.agreeing_tokens += agreeing
                result.ties += ties
                result.preemptions += output.metrics.num_preemptions
                result.cached_tokens += output.num_cached_tokens
            results.append(result)
        trace = llm.llm_engine.trace
        return trace.config.num_gpu_blocks - min(record.num_free_blocks for record in trace)

    batched = {"max_num_seqs": args.max_num_seqs}
    chunked = batched | {"enable_chunked_prefill": True, "max_num_batched_tokens": 128}
    longest = -(-(args.max_len + args.max_tokens) // 16)
    for ranks in args.ranks or ():
        divided = {"tensor_parallel_size": ranks}
        few_blocks = {"num_gpu_blocks_override": 2 * longest, "enable_prefix_caching": True}
        check(f"{ranks} ranks", **batched, **divided)
        check(f"{ranks} ranks, few blocks, chunked, prefix cache", **chunked, **few_blocks, **divided)
    if not args.ranks:
        check("alone", max_num_seqs=1)
        peak = check("batched", **batched)
        check("8 blocks too few, recompute", num_gpu_blocks_override=peak - 8, **batched)
        check("8 blocks too few, swap", num_gpu_blocks_override=peak - 8, preemption_mode="swap", **batched)
        check("chunked prefill", **chunked)
        check("prefix cache", rounds=2, enable_prefix_caching=True, **batched)
        # A third of the blocks, but enough for the longest request alone.
        few = max(peak // 3, longest)
        everything = chunked | {"enable_prefix_caching": True, "num_gpu_blocks_override": few}
        check("a third of the blocks, chunked, prefix cache", **everything)
        check("the same with swap", preemption_mode="swap", **everything)

    headers = ("way", "requests", "tokens", "ties", "preempted", "cached", "seconds")
    rows = [
        (
            r.way,
            f"{r.agreeing_requests}/{r.requests}",
            f"{r.agreeing_tokens}/{r.tokens}",
            r.ties,
            r.preemptions,
            r.cached_tokens,
            f"{r.seconds:.0f}",
        )
        for r in results
    ]
    title = f"Agreement with transformers, float32, {args.num_prompts} prompts of 1 to {args.max_len} tokens"
    options = {name: value for name, value in vars(args).items() if name != "json"}
    content = {"arguments": options, "results": [asdict(r) for r in results]}
    report(title, format_table(headers, rows), content, file=args.json)
    if any(r.agreeing_requests != r.requests for r in results):
        raise SystemExit("Some tokens differ from transformers.")
    if not all(r.preemptions for r in results if " blocks" in r.way or "swap" in r.way):
        raise SystemExit("Nothing was preempted where something should have been.")


if __name__ == "__main__":
    main()
