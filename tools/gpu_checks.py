"""The checks of `make gpu-check` that compare what the engine computes on a GPU: each runs in a process of its own.

python tools/gpu_checks.py NAME --model FOLDER --out FILE
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_model import QWEN3  # noqa: E402

from minivllm import LLM, SamplingParams  # noqa: E402
from minivllm.outputs import RequestOutput  # noqa: E402
from minivllm.request import EngineCoreRequest, Request, Sequence  # noqa: E402
from minivllm.scheduler_output import ScheduledSequence  # noqa: E402
from minivllm.worker.worker import Worker  # noqa: E402

LESSONS = [f"{folder}/{name}.ipynb" for folder in ("notebooks", "solutions") for name in ("05_triton", "06_paged_attention")]
"""Notebooks about kernels."""
NOT_RUN = 2
"""The status of a check that could not be run here."""


def make_model(folder: Path) -> bool:
    """Random weights of Qwen3-0.6B's sizes, in float32, as transformers saves them."""
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
    return True


def random_prompts(lengths: list[int]) -> list[list[int]]:
    """Token ids of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, QWEN3["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def load(folder: Path, **options: object) -> LLM:
    """An engine on that model."""
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64, **options)


def generate(folder: Path, prompts: list, params: object, **options: object) -> list[RequestOutput]:
    """What an engine of its own makes of these prompts, in float32; its memory is free again."""
    llm = load(folder, dtype="float32", **{"num_gpu_blocks_override": 1000} | options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return outputs


def check_logits(folder: Path) -> bool:
    """Logits of every position of a ragged batch, and then of a decode, against transformers one prompt at a time."""
    from transformers import AutoModelForCausalLM

    prompts = random_prompts([2, 15, 16, 17, 300, 1000])
    expected, theirs = (
        [compute_logits(model, prompt) for prompt in prompts]
        for model in (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval() for dtype in (torch.float32, torch.bfloat16))
    )  # fmt: skip
    tables, used = [], 0
    for prompt in prompts:
        count = -(-len(prompt) // 16)
        tables.append(list(range(used, used + count))[::-1])
        used += count
    passed = True
    for kernels, enforce_eager in (("as written", True), ("fused", False)):
        worker = load(
            folder, dtype="bfloat16", enforce_eager=enforce_eager, num_gpu_blocks_override=200
        ).llm_engine.executor.worker
        worker.model_runner.graphs = None  # what `replays` compares
        seqs = [
            Sequence(i, Request(EngineCoreRequest(str(i), ids, SamplingParams(), max_num_tokens=2048)))
            for i, ids in enumerate(prompts)
        ]
        # All but the last token as a prefill, the last one as a decode.
        ours = run_step(worker, seqs, [len(prompt) - 1 for prompt in prompts], tables)
        for seq, prompt in zip(seqs, prompts, strict=True):
            seq.num_computed_tokens = len(prompt) - 1
        decoded = run_step(worker, seqs, [1] * len(prompts), tables)
        for name, logits, rows in (("prefill", ours, slice(None, -1)), ("decode", decoded, slice(-1, None))):
            wanted = torch.cat([part[rows] for part in expected])
            error, reference = (
                float((x - wanted).norm() / wanted.norm()) for x in (logits, torch.cat([part[rows] for part in theirs]))
            )
            print(f"relative error of bfloat16 logits, {name}, {kernels}: ours {error:.4f}, transformers' {reference:.4f}")
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
    """Replayed graphs against the same padded steps run eagerly: decodes, and chunks of prompts beside decodes."""
    worker = load(folder, dtype="bfloat16", num_gpu_blocks_override=600).llm_engine.executor.worker
    runner, caches = worker.model_runner, worker.cache_engine.gpu_cache
    graphs = runner.graphs
    if graphs is None:
        print("no CUDA graphs were captured")
        return False
    equal = True
    for num_seqs, num_chunks in ((1, 0), (3, 0), (8, 0), (33, 0), (64, 0), (1, 1), (5, 2), (64, 7), (20, 20)):
        scheduled = []
        for i in range(num_seqs):
            length, num_new = 1 + (7 * i) % 90, 1 + (11 * i + 10) % 50 if i < num_chunks else 1
            ids, table = [5 + i] * (length + num_new), [i * 9 + j for j in range((length + num_new - 1) // 16 + 1)]
            seq = Sequence(i, Request(EngineCoreRequest(str(i), ids, SamplingParams(), max_num_tokens=2048)))
            seq.num_computed_tokens = length
            scheduled.append(ScheduledSequence(seq, num_new, table).to_data())
        inputs = runner.prepare_inputs(scheduled, num_blocks=600)
        with torch.inference_mode():
            replayed = graphs.run(inputs).clone()
            size = graphs.find_size(len(inputs.input_ids), *inputs.metadata.block_tables.shape)
            padded = graphs.inputs.view(size)
            eager = runner.model(padded.input_ids, padded.positions, caches, padded.metadata)
            logits = graphs.get_logits(inputs)
            equal &= torch.equal(replayed, eager[: len(replayed)])
            if size.is_decode:
                equal &= logits is not None and torch.equal(logits, runner.model.compute_logits(eager)[:num_seqs])
    print(f"replayed steps equal eager ones exactly: {equal}")
    return equal


WAYS = {
    "eagerly": {"enforce_eager": True},
    "with graphs": {},
    "with graphs and two steps in flight": {"async_scheduling": True},
    "swapped out and in": {"num_gpu_blocks_override": 120, "preemption_mode": "swap", "swap_space": 2.0},
}


def check_generation(folder: Path) -> bool:
    """Tokens with and without graphs, with two steps in flight, and with so few blocks that sequences are swapped, in float32.

    The requests finish one after another, so that batches of many sizes are padded. In bfloat16 a padded batch may be multiplied in
    another order, and near ties fall either way: there check_replay compares.
    """
    params = [SamplingParams(temperature=0, max_tokens=40 + i, ignore_eos=True) for i in range(37)]
    prompts = random_prompts([1 + 11 * i % 200 for i in range(37)])
    tokens = {}
    for name, options in WAYS.items():
        outputs = generate(folder, prompts, params, **options)
        tokens[name] = [output.outputs[0].token_ids for output in outputs]
    different = [name for name in WAYS if tokens[name] != tokens["eagerly"]]
    print(f"other tokens than eagerly, float32: {', '.join(different) or 'none'}")
    return not different


def check_steps_in_flight(folder: Path) -> bool:
    """Two steps in flight against one: draws, several continuations, stop tokens and log-probabilities, in float32."""
    wishes = (
        {"logprobs": 3},
        {"n": 3},
        {"top_k": 20, "min_p": 0.01, "frequency_penalty": 0.5},
        {"temperature": 0, "logit_bias": {5: 3.0}, "min_tokens": 9},
    )
    stops = list(range(0, QWEN3["vocab_size"], 97))
    params = [SamplingParams(max_tokens=30 + i, seed=i, stop_token_ids=stops, **wishes[i % 4]) for i in range(24)]
    prompts = random_prompts([1 + 11 * i % 200 for i in range(24)])
    found, logprobs = [], []
    for async_scheduling in (False, True):
        outputs = generate(folder, prompts, params, async_scheduling=async_scheduling)
        completions = [c for output in outputs for c in output.outputs]
        found.append([(c.token_ids, c.finish_reason, c.stop_reason) for c in completions])
        entries = [entry for c in completions for entry in c.logprobs or ()]
        logprobs.append(torch.tensor([logprob.logprob for entry in entries for logprob in list(entry.values())[:3]]))
    equal = found[0] == found[1] and torch.allclose(*logprobs, atol=1e-3)
    print(f"equal draws, reasons and log-probabilities with two steps in flight, float32: {equal}")
    return equal


RANKS = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, two steps in flight": {"tensor_parallel_size": 2, "async_scheduling": True},
    "two stages": {"pipeline_parallel_size": 2},
}


def check_ranks(folder: Path) -> bool:
    """Tokens of several ranks and stages against those of one rank, in float32."""
    if torch.cuda.device_count() == 1:
        print("NCCL is not checked: there is one GPU. Two ranks share it, over gloo.")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = random_prompts([1 + 11 * i % 200 for i in range(16)])
    tokens = {}
    for name, options in RANKS.items():
        tokens[name] = [output.outputs[0].token_ids for output in generate(folder, prompts, params, **options)]
    different = [name for name in RANKS if tokens[name] != tokens["one rank"]]
    print(f"other tokens than on one rank, float32: {', '.join(different) or 'none'}")
    return not different


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


CHECKS: dict[str, Callable[[Path], bool]] = {
    "model": make_model,
    "logits": check_logits,
    "replays": check_replay,
    "tokens": check_generation,
    "draws": check_steps_in_flight,
    "ranks": check_ranks,
}


def main() -> int:
    """0 if the check passed, 1 if it failed, 2 if it could not be run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*CHECKS, *LESSONS))
    parser.add_argument("--model", type=Path, help="the folder that `model` has made")
    parser.add_argument("--out", type=Path, help="for what a lesson prints, as JSON")
    args = parser.parse_args()
    if args.name in CHECKS:
        if args.model is None:
            parser.error(f"{args.name} needs --model, the folder of the model.")
        if not torch.cuda.is_available():
            print("There is no CUDA device that torch can use here.")
            return NOT_RUN
        return 0 if CHECKS[args.name](args.model) else 1
    passed, printed = run_lesson(args.name)
    print(printed)
    if args.out is not None:
        args.out.write_text(json.dumps({"printed": printed}))
    return NOT_RUN if passed is None else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
