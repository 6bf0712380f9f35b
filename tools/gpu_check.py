"""Checks the engine on a GPU: `make gpu-check`. Needs no network and installs nothing.

1. The kernels against the device's limits (benchmarks/gpu_kernels.py).
2. The engine in bfloat16, on a model of Qwen3-0.6B's sizes with random weights: its logits must be as close to those of
   transformers in float32 as transformers' own bfloat16 logits are.
3. CUDA graphs: a replay must give exactly the output of the same step without a graph, and a generation the same tokens. Speed with
   graphs and without, and with two steps in flight, of which random draws, log-probabilities and several continuations are compared, too.
4. Two ranks: with NCCL if there are two GPUs, else both on the one GPU over gloo, for correctness alone. The tokens must be those of one.
5. Lessons 05 and 06 and their solutions from top to bottom, their kernels compiled; what they print is saved.
6. All kernel tests, with the Triton kernels compiled, and those of transfers: launching a step must not wait for the GPU.

The results are saved as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from minivllm import LLM, SamplingParams  # noqa: E402
from minivllm.bench.report import find_origin, to_json  # noqa: E402
from minivllm.request import EngineCoreRequest, Request, Sequence  # noqa: E402
from minivllm.scheduler_output import ScheduledSequence  # noqa: E402
from minivllm.worker.worker import Worker  # noqa: E402

TESTS = [
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_rope_and_cache.py",
    "tests/kernels/test_attention_backends.py",
    "tests/model/test_models.py",
    "tests/model/test_model_input.py",
    "tests/model/test_decode_graphs.py",
    "tests/model/test_transfer.py",
]
NOT_HERE = "not smollm2"
"""The default model comes from a package that may not be installed here."""
LESSONS = [f"{folder}/{name}.ipynb" for folder in ("notebooks", "solutions") for name in ("05_triton", "06_paged_attention")]
"""Notebooks about kernels."""
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""The sizes of Qwen3-0.6B."""


def run_tests() -> bool:
    """The tests that need only pytest and hypothesis."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NOT_HERE, *TESTS]
    print("$", *command[1:], flush=True)
    return subprocess.call(command, cwd=ROOT, env=os.environ | {"HYPOTHESIS_PROFILE": "gpu-check"}) == 0


def run_benchmark(out: Path, sweep: bool) -> tuple[bool, dict]:
    """The kernels against the device's limits."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # minivllm need not be installed
    command = [sys.executable, "benchmarks/gpu_kernels.py", "--out", str(out), *(["--sweep"] if sweep else [])]
    passed = subprocess.call(command, cwd=ROOT, env=environment) == 0
    return passed, json.loads(out.read_text()) if passed else {}


def run_lesson(file: str) -> tuple[bool | None, str]:
    """A notebook about kernels. Returns whether it ran to its end (None: it could not be run here), and what its cells printed."""
    needed = ("nbformat", "nbclient", "ipykernel")
    try:
        nbformat, nbclient, _ = map(importlib.import_module, needed)
    except ImportError as error:  # one of these, or what it needs itself
        return None, f"{file} was not run: {error}. A notebook needs {', '.join(needed)} and what these need."
    notebook = nbformat.read(ROOT / file, as_version=4)
    for cell in notebook.cells:  # what can be solved in two languages is checked in Triton
        cell.source = re.sub(r"written\((\w+)_loops, \w+_kernel\)", r"written(\1_kernel, \1_loops)", cell.source)
    try:
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str((ROOT / file).parent)}}).execute()
    except nbclient.exceptions.CellExecutionError as error:
        return False, str(error)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return True, "".join(output.text for output in outputs if output.output_type == "stream")


def make_model(folder: Path) -> None:
    """Random weights of Qwen3-0.6B's sizes, in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN3))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a mistake
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
            elif "embed" in name:  # with the usual ones, all logits would be nearly equal
                torch.nn.init.normal_(parameter, std=0.2)
    model.cpu().save_pretrained(folder)


def random_prompts(lengths: list[int]) -> list[list[int]]:
    """Token ids of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, QWEN3["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def load(folder: Path, **options: object) -> LLM:
    """An engine on that model."""
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64, **options)


def check_logits(folder: Path) -> bool:
    """Logits of every position of a ragged batch, and then of a decode, against transformers one prompt at a time."""
    from transformers import AutoModelForCausalLM

    prompts = random_prompts([2, 15, 16, 17, 300, 1000])
    expected, theirs = (
        [compute_logits(model, prompt) for prompt in prompts]
        for model in (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval() for dtype in (torch.float32, torch.bfloat16))
    )  # fmt: skip
    worker = load(folder, dtype="bfloat16", enforce_eager=True, num_gpu_blocks_override=200).llm_engine.executor.worker
    seqs = [
        Sequence(i, Request(EngineCoreRequest(str(i), ids, SamplingParams(), max_num_tokens=2048)))
        for i, ids in enumerate(prompts)
    ]
    tables, used = [], 0
    for prompt in prompts:
        count = -(-len(prompt) // 16)
        tables.append(list(range(used, used + count))[::-1])
        used += count
    # All but the last token as a prefill, the last one as a decode.
    ours = run_step(worker, seqs, [len(prompt) - 1 for prompt in prompts], tables)
    for seq, prompt in zip(seqs, prompts, strict=True):
        seq.num_computed_tokens = len(prompt) - 1
    decoded = run_step(worker, seqs, [1] * len(prompts), tables)
    passed = True
    for name, logits, rows in (("prefill", ours, slice(None, -1)), ("decode", decoded, slice(-1, None))):
        wanted = torch.cat([part[rows] for part in expected])
        error, reference = (
            float((x - wanted).norm() / wanted.norm()) for x in (logits, torch.cat([part[rows] for part in theirs]))
        )
        print(f"relative error of bfloat16 logits, {name}: ours {error:.4f}, transformers' {reference:.4f}")
        passed &= error < 1.25 * reference
    return passed


@torch.inference_mode()
def compute_logits(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """transformers' logits of every position."""
    return model(torch.tensor([prompt], device="cuda")).logits[0].float().cpu()


@torch.inference_mode()
def run_step(worker: Worker, seqs: list[Sequence], num_tokens: list[int], tables: list[list[int]]) -> torch.Tensor:
    """Logits of every row of a step."""
    runner, caches = worker.model_runner, worker.cache_engine.gpu_cache
    scheduled = [ScheduledSequence(*item).to_data() for item in zip(seqs, num_tokens, tables, strict=True)]
    inputs = runner.prepare_inputs(scheduled, num_blocks=len(caches[0][0]))
    return runner.model.compute_logits(runner.model(inputs.input_ids, inputs.positions, caches, inputs.metadata)).float().cpu()


def check_replay(folder: Path) -> bool:
    """A replayed graph against the same padded step run eagerly."""
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
            seq = Sequence(i, Request(EngineCoreRequest(str(i), [5 + i] * (length + 1), SamplingParams(), max_num_tokens=2048)))
            seq.num_computed_tokens = length
            scheduled.append(ScheduledSequence(seq, 1, [i * 9 + j for j in range(length // 16 + 1)]).to_data())
        inputs = runner.prepare_inputs(scheduled, num_blocks=600)
        with torch.inference_mode():
            replayed = graphs.run(inputs).clone()
            size = next(size for size in graphs.sizes if size >= num_seqs)
            padded = graphs.inputs.view(size)
            eager = runner.model(padded.input_ids, padded.positions, caches, padded.metadata)
            logits = graphs.get_logits(num_seqs)
            equal &= torch.equal(replayed, eager[:num_seqs])
            equal &= logits is not None and torch.equal(logits, runner.model.compute_logits(eager)[:num_seqs])
    print(f"replayed steps equal eager ones exactly: {equal}")
    return equal


WAYS = (("eager", True, False), ("graphs", False, False), ("graphs, two steps in flight", False, True))
"""A name, `enforce_eager` and `async_scheduling`."""


def check_generation(folder: Path) -> tuple[bool, dict]:
    """Tokens with and without graphs, and with two steps in flight, in float32; and throughput of all, in bfloat16 too.

    The requests finish one after another, so that batches of many sizes are padded. In bfloat16 a padded batch may be multiplied in
    another order, and near ties fall either way: there check_replay compares.
    """
    params = [SamplingParams(temperature=0, max_tokens=40 + i, ignore_eos=True) for i in range(37)]
    prompts = random_prompts([1 + 11 * i % 200 for i in range(37)])
    tokens, speeds = {}, {}
    for dtype in ("float32", "bfloat16"):
        for name, enforce_eager, async_scheduling in WAYS:
            options = {"enforce_eager": enforce_eager, "async_scheduling": async_scheduling}
            llm = load(folder, dtype=dtype, num_gpu_blocks_override=4000, **options)
            llm.generate(prompts[:2], params[:2], use_tqdm=False)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            speeds[f"{dtype}, {name}"] = sum(param.max_tokens for param in params) / (time.perf_counter() - start)
            tokens[dtype, name] = [output.outputs[0].token_ids for output in outputs]
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    for name, speed in speeds.items():
        print(f"37 requests of 40 to 76 tokens, {name}: {speed:,.0f} tokens/s")
    equal = all(tokens["float32", name] == tokens["float32", "eager"] for name, *_ in WAYS)
    print(f"equal tokens eagerly, with graphs, and with two steps in flight, float32: {equal}")
    return equal, speeds


def check_steps_in_flight(folder: Path) -> bool:
    """Two steps in flight against one: draws, several continuations, stop tokens and log-probabilities, in float32."""
    wishes = (
        {"logprobs": 3},
        {"n": 3},
        {"top_k": 20, "min_p": 0.01},
        {"temperature": 0, "logit_bias": {5: 3.0}, "min_tokens": 9},
    )
    stops = list(range(0, QWEN3["vocab_size"], 97))
    params = [SamplingParams(max_tokens=30 + i, seed=i, stop_token_ids=stops, **wishes[i % 4]) for i in range(24)]
    prompts = random_prompts([1 + 11 * i % 200 for i in range(24)])
    found, logprobs = [], []
    for async_scheduling in (False, True):
        options = {"num_gpu_blocks_override": 4000, "async_scheduling": async_scheduling, "enforce_eager": True}
        llm = load(folder, dtype="float32", **options)
        completions = [c for output in llm.generate(prompts, params, use_tqdm=False) for c in output.outputs]
        found.append([(c.token_ids, c.finish_reason, c.stop_reason) for c in completions])
        entries = [entry for c in completions for entry in c.logprobs or ()]
        logprobs.append(torch.tensor([logprob.logprob for entry in entries for logprob in list(entry.values())[:3]]))
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    equal = found[0] == found[1] and torch.allclose(*logprobs, atol=1e-3)
    print(f"equal draws, reasons and log-probabilities with two steps in flight, float32: {equal}")
    return equal


RANKS = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, two steps in flight": {"tensor_parallel_size": 2, "async_scheduling": True},
    "two stages": {"pipeline_parallel_size": 2},
}


def check_ranks(folder: Path) -> tuple[bool, dict]:
    """Tokens of several ranks and stages against those of one rank, in float32, and throughput of all."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        print("NCCL is not checked: there is one GPU. Two ranks share it, over gloo.")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = random_prompts([1 + 11 * i % 200 for i in range(16)])
    tokens, speeds = {}, {}
    for name, options in RANKS.items():
        llm = load(folder, dtype="float32", num_gpu_blocks_override=2000, **options)
        llm.generate(prompts[:2], params, use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        speeds[f"{name}, {num_gpus} GPUs"] = 16 * 40 / (time.perf_counter() - start)
        tokens[name] = [output.outputs[0].token_ids for output in outputs]
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    different = [name for name in RANKS if tokens[name] != tokens["one rank"]]
    print(f"other tokens than on one rank, float32: {', '.join(different) or 'none'}; tokens/s: {speeds}")
    return not different, speeds


NOT_RUN = 2
"""The status if no check failed, but not all of them were run."""


def summarize(result: dict, out: Path) -> int:
    """Print what passed, what failed and what was not run. Returns the status: 0, 1 if a check failed, else NOT_RUN if one was not run."""
    checks = result["checks"].values()
    print()
    for name, passed in result["checks"].items():
        print(f"{'not run' if passed is None else 'passed' if passed else 'FAILED'}  {name}")
    missed = [kernel["name"] for kernel in result.get("kernels", []) if kernel["goal"] and not kernel["met"]]
    print(f"goals missed: {', '.join(missed) or 'none'}\nwritten to {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")
    return 1 if False in checks else NOT_RUN if None in checks else 0


def main() -> int:
    """All checks; 0 if they were run and passed (a missed speed goal is reported, but not a failure)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file (default: benchmarks/results/gpu_check_DATE.json)")
    parser.add_argument("--skip-tests", action="store_true", help="only the engine and the benchmark")
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes (some minutes)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device that torch can use here. Without one, `make test` runs the same kernels interpreted.")
        return 1
    out = args.out or ROOT / f"benchmarks/results/gpu_check_{datetime.date.today().isoformat()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    result = find_origin() | {"checks": {}}
    print(result["machine"], flush=True)

    def note(name: str, passed: bool | None, **more: object) -> None:
        """Save what is known so far, in case a borrowed machine is taken back."""
        result["checks"][name] = passed
        result.update(more)
        out.write_text(to_json(result))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        passed, numbers = run_benchmark(folder / "kernels.json", args.sweep)
        note("benchmark", passed, **numbers)
        make_model(folder)
        note("bfloat16 logits", check_logits(folder))
        note("replays", check_replay(folder))
        equal, speeds = check_generation(folder)
        note("tokens with graphs and steps in flight", equal, tokens_per_second=speeds)
        note("draws with two steps in flight", check_steps_in_flight(folder))
        equal, speeds = check_ranks(folder)
        note("tokens of several ranks and stages", equal, tokens_per_second_by_ranks=speeds)
    for file in LESSONS:
        passed, printed = run_lesson(file)
        print(printed)
        note(file, passed, **{file: printed})
    if not args.skip_tests:
        note("kernel tests", run_tests())
    return summarize(result, out)


if __name__ == "__main__":
    sys.exit(main())
