"""Checks the engine on a GPU: `make gpu-check`. Needs no network and installs nothing; uses the packages that are there.

1. Every kernel test, with the Triton kernels compiled.
2. The engine in bfloat16 on a model of Qwen3-0.6B's sizes with random weights: its logits must be as close to those of
   transformers in float32 as transformers' own in bfloat16 are.
3. CUDA graphs: a replay gives exactly what the same step gives without a graph, and a generation the same tokens.
4. How fast a generation is with graphs and without, and the kernels against the device's limits (benchmarks/gpu_kernels.py).

What is measured goes into a JSON file, with device and date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from minivllm import LLM, SamplingParams  # noqa: E402
from minivllm.bench.machine import describe_machine  # noqa: E402
from minivllm.request import Request, Sequence  # noqa: E402
from minivllm.scheduler_output import ScheduledSequence  # noqa: E402

TESTS = ["tests/test_kernels.py", "tests/test_attention_backends.py", "tests/test_models.py"]
NOT_HERE = "not smollm2"
"""The default model is a package that this machine need not have."""
QWEN3 = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""The sizes of Qwen3-0.6B."""


def run_tests() -> bool:
    """The tests that need no more than pytest and hypothesis."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NOT_HERE, *TESTS]
    print("$", *command[1:], flush=True)
    return subprocess.call(command, cwd=ROOT) == 0


def make_model(folder: Path) -> None:
    """Random weights of Qwen3-0.6B's sizes, in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones, which would hide a mistake
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
            elif "embed" in name:  # logits that differ: a model with the usual ones is undecided between all tokens
                torch.nn.init.normal_(parameter, std=0.2)
    model.cpu().save_pretrained(folder)


def random_prompts(lengths: list[int]) -> list[list[int]]:
    """Token ids of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, QWEN3["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def load(folder: Path, **options: object) -> LLM:
    """An engine on that model."""
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64, **options)


@torch.inference_mode()
def check_logits(folder: Path) -> bool:
    """Ragged batch in, logits of every position out; against transformers one prompt at a time."""
    from transformers import AutoModelForCausalLM

    prompts = random_prompts([1, 15, 16, 17, 300, 1000])
    expected, theirs = (
        [model(torch.tensor([prompt], device="cuda")).logits[0].float().cpu() for prompt in prompts]
        for model in (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval() for dtype in (torch.float32, torch.bfloat16))
    )  # fmt: skip
    worker = load(folder, dtype="bfloat16", enforce_eager=True, num_gpu_blocks_override=200).llm_engine.executor.worker
    scheduled, used = [], 0
    for i, prompt in enumerate(prompts):
        count = -(-len(prompt) // 16)
        seq = Sequence(i, Request(str(i), prompt, SamplingParams(), max_num_tokens=2048))
        scheduled.append(ScheduledSequence(seq, len(prompt), list(range(used, used + count))[::-1]))
        used += count
    runner, caches = worker.model_runner, worker.cache_engine.gpu_cache
    inputs = runner.prepare_inputs(scheduled, num_blocks=200)
    hidden = runner.model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
    ours = [runner.model.compute_logits(part).float().cpu() for part in hidden.split([len(prompt) for prompt in prompts])]

    def error(logits: list[torch.Tensor]) -> float:
        return float((torch.cat(logits) - torch.cat(expected)).norm() / torch.cat(expected).norm())

    print(f"relative error of bfloat16 logits: ours {error(ours):.4f}, transformers' {error(theirs):.4f}")
    return error(ours) < 1.25 * error(theirs)


@torch.inference_mode()
def check_replay(folder: Path) -> bool:
    """A replayed graph against the same padded step, kernel by kernel."""
    worker = load(folder, dtype="bfloat16", num_gpu_blocks_override=600).llm_engine.executor.worker
    runner, caches = worker.model_runner, worker.cache_engine.gpu_cache
    graphs = runner.graphs
    if graphs is None:
        print("no CUDA graphs were captured")
        return False
    equal = True
    for num_seqs in (1, 3, 8, 33, 64):
        lengths = [1 + (7 * i) % 120 for i in range(num_seqs)]
        scheduled = []
        for i, length in enumerate(lengths):
            seq = Sequence(i, Request(str(i), [5 + i] * (length + 1), SamplingParams(), max_num_tokens=2048))
            seq.num_computed_tokens = length
            scheduled.append(ScheduledSequence(seq, 1, [i * 9 + j for j in range(length // 16 + 1)]))
        inputs = runner.prepare_inputs(scheduled, num_blocks=600)
        replayed = graphs.run(inputs).clone()
        size = next(size for size in graphs.sizes if size >= num_seqs)
        padded = graphs.inputs.view(size)
        eager = runner.model(padded.input_ids, padded.positions, caches, padded.metadata)[:num_seqs]
        equal &= torch.equal(replayed, eager)
    print(f"replayed steps equal eager ones exactly: {equal}")
    return equal


def check_generation(folder: Path) -> tuple[bool, dict]:
    """Tokens with and without graphs in float32, and tokens per second of both in bfloat16."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = random_prompts([1 + 11 * i % 200 for i in range(40)])
    tokens, speeds = {}, {}
    for dtype in ("float32", "bfloat16"):
        for name, enforce_eager in (("eager", True), ("graphs", False)):
            llm = load(folder, dtype=dtype, enforce_eager=enforce_eager, num_gpu_blocks_override=4000)
            llm.generate(prompts[:2], params, use_tqdm=False)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            speeds[f"{dtype}, {name}"] = len(prompts) * 64 / (time.perf_counter() - start)
            tokens[dtype, name] = [output.outputs[0].token_ids for output in outputs]
            del llm
            torch.cuda.empty_cache()
    for name, speed in speeds.items():
        print(f"40 requests of 64 tokens, {name}: {speed:,.0f} tokens/s")
    equal = tokens["float32", "eager"] == tokens["float32", "graphs"]
    print(f"equal tokens with graphs on and off, float32: {equal}")
    return equal, speeds


def main() -> int:
    """All of it; 0 if everything passed (a missed speed goal is said, but is no failure)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file (default: benchmarks/results/gpu_check_DATE.json)")
    parser.add_argument("--skip-tests", action="store_true", help="only the engine and the benchmark")
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes (some minutes)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device that torch can use here. Without one, `make test` runs the same kernels interpreted.")
        return 1
    out = args.out or ROOT / f"benchmarks/results/gpu_check_{datetime.date.today().isoformat()}.json"
    print(describe_machine(), flush=True)
    checks = {} if args.skip_tests else {"kernel tests": run_tests()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        checks["bfloat16 logits"] = check_logits(folder)
        checks["replays"] = check_replay(folder)
        checks["tokens with and without graphs"], speeds = check_generation(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    benchmark = [sys.executable, "benchmarks/gpu_kernels.py", "--out", str(out), *(["--sweep"] if args.sweep else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # minivllm need not be installed
    checks["benchmark"] = subprocess.call(benchmark, cwd=ROOT, env=environment) == 0
    result = json.loads(out.read_text()) if checks["benchmark"] else {"machine": describe_machine()}
    out.write_text(json.dumps({"checks": checks, "tokens_per_second": speeds, **result}, indent=1) + "\n")
    print()
    for name, passed in checks.items():
        print(f"{'passed' if passed else 'FAILED'}  {name}")
    missed = [kernel["name"] for kernel in result.get("kernels", []) if kernel["goal"] and not kernel["met"]]
    print(f"goals missed: {', '.join(missed) or 'none'}\nwritten to {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
