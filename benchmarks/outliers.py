"""What the Hadamard transform does to the inputs of linear layers: outliers, and the error of rounding to 8 bits, with it and without.

    python benchmarks/outliers.py

A row's largest number sets the size of its 127 steps. So what counts is how many times larger it is than the others: than their root mean square.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from quality import TEXT, WINDOW, compute_logits
from torch import Tensor

from minivllm.bench.report import format_table, report
from minivllm.config import EngineArgs
from minivllm.entrypoints.cli.options import check_writable
from minivllm.entrypoints.llm import LLM
from minivllm.kernels.reference import hadamard_transform
from minivllm.layers.linear import Linear


def measure_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """How many times the root mean square the largest number of each row is, and the error of rounding, relative to the row."""
    scales = x.abs().amax(dim=1, keepdim=True) / 127
    error = (x / scales).round() * scales - x
    size = x.shape[1] ** 0.5
    return x.abs().amax(dim=1) / x.norm(dim=1) * size, error.norm(dim=1) / x.norm(dim=1)


@torch.inference_mode()
def measure_inputs(llm: LLM, num_tokens: int) -> dict[str, dict[str, float]]:
    """For each kind of linear layer, medians and largest values over all layers and tokens."""
    engine = llm.llm_engine
    runner = engine.executor.worker.model_runner
    engine.executor.worker.platform.runs_compiled_layers = False  # so that every layer is called, and its hook
    rows: dict[tuple[str, str], list[Tensor]] = defaultdict(list)

    names = {module: name.rpartition(".")[2] for name, module in runner.model.named_modules() if isinstance(module, Linear)}

    def record(layer: Linear, args: tuple[Tensor, ...]) -> None:
        for way, numbers in (("before", args[0]), ("after", hadamard_transform(args[0]))):
            rows[names[layer], way].append(torch.stack(measure_rows(numbers)))

    for module in names:
        module.register_forward_pre_hook(record)
    compute_logits(engine, engine.tokenizer.encode(TEXT)[:num_tokens])
    results: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, way), parts in rows.items():
        largest, error = torch.cat(parts, dim=1)
        results[name] |= {
            f"largest, median, {way}": largest.median().item(),
            f"largest, {way}": largest.max().item(),
            f"error, median, {way}": error.median().item(),
            f"error, {way}": error.max().item(),
        }
    return results


def format_inputs(results: dict[str, dict[str, float]], num_tokens: int) -> str:
    """The measurement as a table of text, with a title."""
    header = [
        "inputs of",
        "largest, median",
        "after",
        "largest of all",
        "after",
        "error, median",
        "after",
        "worst error",
        "after",
    ]
    rows = []
    for name, result in results.items():
        row = [name]
        for what in ("largest, median, ", "largest, ", "error, median, ", "error, "):
            form = "{:.1%}" if what.startswith("error") else "{:.1f}"
            row += [form.format(result[what + way]) for way in ("before", "after")]
        rows.append(tuple(row))
    title = f"Inputs of linear layers, at {num_tokens} tokens of prose: the largest number of a row, in units of its root mean square, and\n"
    title += "the error of rounding the row to 8 bits; before and after the Hadamard transform"
    return f"{title}\n\n{format_table(tuple(header), rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineArgs.model, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=WINDOW, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    check_writable(arguments.json)
    llm = LLM(arguments.model, device="cpu", dtype="float32", num_gpu_blocks_override=64, max_num_seqs=1)
    results = measure_inputs(llm, arguments.tokens)
    report(
        arguments.model,
        format_inputs(results, arguments.tokens),
        {"model": arguments.model, "results": results},
        file=arguments.json,
    )


if __name__ == "__main__":
    main()
