"""The whole model of a learner: against transformers on real weights, and in the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minivllm.course.lessons.lesson_02.loading import LoadWeights, ReadCheckpoint, checkpoint, make_load_shape, make_weights
from minivllm.course.lessons.lesson_02.situations import lay_out
from minivllm.course.lessons.model_shape import ModelShape
from minivllm.course.lessons.tensors import is_close
from minivllm.course.observations import expect, expect_number, seeded
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.registry import MODELS, ModelRegistry
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

LANGUAGES = {
    "English": "The capital of France is Paris, and the capital of Nepal is",
    "Nepali": "नेपालको राजधानी काठमाडौँ हो।",
    "Chinese": "今天天气很好，我们去公园散步。",
    "German": "Früher war alles besser, sagte der Großvater und",
    "Arabic": "القطة تجلس على الحصيرة",
    "Russian": "Однажды в студёную зимнюю пору",
    "Japanese": "吾輩は猫である。名前はまだ無い。",
    "Spanish": "El niño comió una manzana porque",
    "Greek": "Εν αρχή ην ο λόγος",
    "Python": "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
}
"""A prompt in each of ten languages."""
LIMIT = 1e-3
"""The largest difference allowed from transformers' logits."""
FAMILIES: dict[type[Any], dict[str, Any]] = {
    LlamaForCausalLM: {"qk_norm": False, "tie_word_embeddings": True},
    Qwen3ForCausalLM: {"qk_norm": True, "tie_word_embeddings": False},
}
"""The package's classes of two architectures, and what is special about them."""


def check_logits(
    model_cls: type, read_checkpoint: ReadCheckpoint, load_weights: LoadWeights, causal_attention: Callable[..., Tensor]
) -> float:
    """The model with the real weights: ten prompts of ten languages in one flat batch, against transformers.

    Returns:
        The largest difference between two logits.
    """
    from minivllm.engine.tokenizer import Tokenizer
    from minivllm.models.hub import resolve_model

    folder = resolve_model("smollm2-135m")
    prompts = [Tokenizer(folder).encode(text) for text in LANGUAGES.values()]
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), max_position=512)
    model = model_cls(shape)  # first, so that an unwritten method is reported at once
    load_weights(model, read_checkpoint(folder))
    (expected, on_the_way), (logits, mine) = run_transformers(folder, prompts), run_flat(model, shape, prompts, causal_attention)
    differences = [float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in zip(expected, logits, strict=True)]
    what = "largest difference to transformers' logits"
    look = f"{first_difference(on_the_way, mine)}: it is the first module whose output differs from transformers'"
    for language, difference in zip(LANGUAGES, differences, strict=True):
        expect_number(f"The ten prompts in one flat batch, the one in {language}.", what, 0.0, difference, look, tolerance=LIMIT)
    return max(differences)


@torch.inference_mode()
def run_transformers(folder: Path, prompts: list[list[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each prompt, and the outputs of all attention and MLP modules, the prompts one after another."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would clutter the learner's output
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        if has_bar:
            logging.enable_progress_bar()
    with recorded(model) as outputs:
        logits = [model(torch.tensor([prompt], device="cpu")).logits[0] for prompt in prompts]
    return logits, {name: torch.cat([part[0] for part in parts]) for name, parts in outputs.items()}


@torch.inference_mode()
def run_flat(
    model: Any, shape: ModelShape, prompts: list[list[int]], causal_attention: Callable[..., Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same of a learner's model, which takes all prompts at once."""
    lengths = [len(prompt) for prompt in prompts]
    starts, positions = lay_out(lengths)
    attends = [lambda q, k, v: causal_attention(q, k, v, starts)] * shape.num_layers
    with recorded(model) as outputs:
        hidden = model(torch.cat([torch.tensor(prompt) for prompt in prompts]), positions, attends)
    return list(model.compute_logits(hidden).split(lengths)), {name: torch.cat(parts) for name, parts in outputs.items()}


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Keep what every attention and MLP module returns, by the module's name."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str, _: nn.Module, __: Any, output: Any) -> None:
        outputs.setdefault(name, []).append(output[0] if isinstance(output, tuple) else output)

    wanted = [(name, module) for name, module in model.named_modules() if name.endswith((".self_attn", ".mlp"))]
    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in wanted]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(theirs: dict[str, Tensor], mine: dict[str, Tensor]) -> str:
    """The first module whose output is not transformers', in the order of the layers."""
    wrong = (name for name, output in theirs.items() if name not in mine or not is_close(output, mine[name], 1e-3))
    return next(wrong, "the head")


_NO_CACHE = "forward, attends and load_weights of MyLlama: layer i attends with self.backends[i], which sees the cache, and not with your causal_attention, which does not"
_ONE_CACHE = "how attends are made: each layer has its own backend and its own cache. The first token is right, and from then on keys and values of earlier tokens come from the cache"
_FROM_0 = "positions. Pass on `positions` unchanged: in a decode step they do not start at 0"


def check_engine(cls: type) -> None:
    """The registered class in the engine, on tiny random models of two families: the same tokens as with the package's."""
    for own, special in FAMILIES.items():
        rng = seeded(f"engine {own.__name__}")
        shape = make_load_shape(rng, rotary_dim=8, **special)
        prompts = [[rng.randrange(3, shape.vocab_size) for _ in range(length)] for length in (3, 17, 1, 9)]
        with checkpoint(make_weights(shape, rng)[0], 2, config_of(own.__name__, shape)) as folder:
            mine, theirs = (generate(folder, own.__name__, model, prompts) for model in (cls, own))
            from_0 = generate(folder, own.__name__, _count_from_0(own), prompts) if mine != theirs else None
        for kind, expected, got in zip(("greedy", "with a seed"), theirs, mine, strict=True):
            said = f"A tiny {own.__name__} with random weights, four prompts, {kind}."
            is_begun = [tokens[0] for tokens in expected] == [tokens[0] for tokens in got]
            expect(said, "tokens", expected, got, _FROM_0 if mine == from_0 else _ONE_CACHE if is_begun else _NO_CACHE)


def config_of(architecture: str, shape: ModelShape) -> dict[str, Any]:
    """The config.json of a model."""
    theirs = {
        "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
        "max_position": "max_position_embeddings",
    }  # fmt: skip
    return {"architectures": [architecture], "eos_token_id": 2} | {theirs.get(name, name): x for name, x in vars(shape).items()}


def generate(folder: Path, architecture: str, cls: type[Any], prompts: list[list[int]]) -> list[list[list[int]]]:
    """Tokens that an engine generates, greedy and with seeds, if a class computes the models of this architecture."""
    from minivllm import LLM

    with patch.dict(MODELS):  # restored afterwards
        ModelRegistry.register_model(architecture, cls)
        llm = LLM(
            str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=24, block_size=4, max_num_seqs=4, max_model_len=60,
            dtype="float32", enforce_eager=True, attention_backend="torch",
        )  # fmt: skip
    raised = _keep_errors(llm.llm_engine.executor.worker.model_runner.model)
    tokens = []
    for temperature in (0, 0.7):
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=12, ignore_eos=True) for i in range(len(prompts))]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if raised:  # the engine has printed it, and goes on without the requests of the step
            raise raised[0]
        failed = next((output.error for output in outputs if output.error), None)
        said = f"A tiny {architecture}: the engine finished the requests without tokens."
        expect(said, "error", None, failed, "the traceback above, and at what your model returns")
        tokens.append([output.outputs[0].token_ids for output in outputs])
    return tokens


def _keep_errors(model: Any) -> list[Exception]:
    """Remember what a model raises in a step: the engine catches it."""
    raised: list[Exception] = []

    def run(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            raised.append(error)
            raise

    model.forward, model.compute_logits = partial(run, model.forward), partial(run, model.compute_logits)
    return raised


def _count_from_0(own: type[Any]) -> type:
    """The package's class with a common mistake: positions counted by row."""

    def forward(self: Any, input_ids: Tensor, positions: Tensor, *others: Any) -> Any:
        return own.forward(self, input_ids, torch.arange(len(input_ids), device=input_ids.device), *others)

    return type("CountsFrom0", (own,), {"forward": forward})


_GREEDY = SamplingParams(temperature=0, max_tokens=24)
_TEXTS = {
    "The capital of France is": _GREEDY,
    "Once upon a time there was a king who": SamplingParams(temperature=0.8, seed=7, max_tokens=24),
    "Water boils at": _GREEDY,
    "def fibonacci(n):": SamplingParams(temperature=0.8, top_p=0.9, seed=8, max_tokens=24),
}


def check_text(llm: LLM) -> list[str]:
    """The class in an `LLM("smollm2-135m")` made after it was registered: the texts that the package's class writes, greedy and with seeds.

    Returns:
        The prompts with their texts.
    """
    from minivllm.models.weights import load_model

    def write() -> list[str]:
        outputs = llm.generate(list(_TEXTS), list(_TEXTS.values()), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    worker = llm.llm_engine.executor.worker
    look = "ModelRegistry.register_model, which comes before LLM(...)"
    is_package = isinstance(worker.model_runner.model, LlamaForCausalLM)
    expect("LLM('smollm2-135m').", "model is the package's", False, is_package, look)
    mine = write()
    package = load_model(replace(llm.llm_engine.model_config, model_cls=LlamaForCausalLM), worker.platform)
    with patch.object(worker.model_runner, "model", package):  # under the same engine, so that only the model differs
        theirs = write()
    look = "check_logits and check_engine first; if both pass, at what only the real model has: 30 layers, 9 query heads"
    for prompt, expected, got in zip(_TEXTS, theirs, mine, strict=True):
        expect(f"The prompt {prompt!r}.", "text", repr(expected), repr(got), look)
    return [prompt + text for prompt, text in zip(_TEXTS, mine, strict=True)]
