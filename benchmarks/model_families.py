"""Each family of models against transformers in float32, as tiny models with random weights: logits, and greedy tokens in several ways to run them.

    python benchmarks/model_families.py --json families.json

The models and the ways are those of tests/model/test_families.py, which checks the same and more shapes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaConfig, OPTConfig, Qwen3Config, SmolLM3Config

from minivllm import LLM, SamplingParams
from minivllm.bench.report import format_table, report
from minivllm.config import EngineArgs

TESTS = Path(__file__).resolve().parents[1] / "tests"
WAYS = ("one batch", "chunks, prefix cache", "recompute", "swap", "two ranks", "two stages of two ranks")
LENGTHS = (1, 7, 8, 9, 60, 200, 256)
NUM_TOKENS = 50


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="store the results here")
    arguments = parser.parse_args()
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "model")]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINIVLLM_CACHE"] = f"{folder}/cache"  # of the converted GGUF files
        for name, (config, architecture) in tqdm(families().items(), unit="family"):
            results[name] = measure(config, architecture, Path(folder) / name)
    rows = [
        (name, f"{found['error']:.0e}", *(f"{found['tokens'][way]} of {found['num_tokens']}" for way in WAYS), found["gguf"])
        for name, found in results.items()
    ]
    table = format_table(("family", "logits differ by", *WAYS, "GGUF"), rows)
    report("Families of models, tokens equal to those of transformers", table, results, file=arguments.json)


def families() -> dict[str, tuple[Any, str | None]]:
    """By name: a config, and the architecture in GGUF."""
    from test_families import COMMON, FAMILIES, MORE

    opt = {name: value for name, value in COMMON.items() if name not in ("intermediate_size", "num_key_value_heads")}
    return {
        "Llama": (LlamaConfig(**COMMON), "llama"),
        "Mistral, with windows": (MORE["mistral, sliding windows"], None),
        "Qwen2": (FAMILIES["qwen2"], "qwen2"),
        "Qwen3": (Qwen3Config(**COMMON, head_dim=16), "qwen3"),
        "Phi-3": (FAMILIES["phi3"], "phi3"),
        "SmolLM3": (
            SmolLM3Config(**COMMON | {"num_hidden_layers": 4}),
            "smollm3",
        ),  # a GGUF file cannot name other layers without RoPE
        "Gemma 3": (FAMILIES["gemma3"], None),
        "OPT": (OPTConfig(**opt, ffn_dim=96, word_embed_proj_dim=64), None),
    }


@torch.inference_mode()
def measure(config: Any, architecture: str | None, folder: Path) -> dict[str, Any]:
    """The largest difference of logits, and how many tokens are equal in each way."""
    import steps_in_processes
    import test_families
    import test_gguf
    from test_models import engine_logits
    from thread_ranks import engine_on_threads

    options = test_families.OPTIONS
    model = test_families.save_model(config, folder)
    length = (
        64 if config.model_type == "phi3" else 256
    )  # on one side of what longrope was trained for, as transformers chooses by the text
    prompts = test_families.prompts_of([number for number in LENGTHS if number <= length])

    def differ(path: Path) -> float:
        logits = engine_logits(LLM(str(path), **options, max_model_len=length), prompts)
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        return max((ours - theirs).abs().max().item() for ours, theirs in zip(logits, expected, strict=True))

    found: dict[str, Any] = {
        "error": differ(folder),
        "tokens": {},
        "gguf": "as Llama" if config.model_type == "mistral" else "not read",
    }
    prompts_to_go_on = test_families.prompts_of([1, 12, 9, 14], seed=1)
    prompts_to_go_on[3][:8] = prompts_to_go_on[2][:8]
    expected = [test_families.greedy_of_transformers(model, prompt, NUM_TOKENS) for prompt in prompts_to_go_on]
    for way in WAYS:
        more, num_ranks, num_stages = test_families.WAYS[way]
        engine = engine_on_threads(EngineArgs(str(folder), **options | {"max_model_len": length} | more), num_ranks, num_stages)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = steps_in_processes.generate(engine, prompts_to_go_on, params)
        pairs = [
            (ours, theirs)
            for output, of in zip(outputs, expected, strict=True)
            for ours, theirs in zip(output.outputs[0].token_ids, of, strict=True)
        ]
        found["tokens"][way] = sum(ours == theirs for ours, theirs in pairs)
    found["num_tokens"] = NUM_TOKENS * len(expected)
    if architecture is not None:
        file = folder / "model.gguf"
        test_gguf.write_model(file, model, architecture)
        found["gguf"] = f"{differ(file):.0e}"
    return found


if __name__ == "__main__":
    main()
