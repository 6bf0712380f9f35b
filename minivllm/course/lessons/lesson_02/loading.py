"""The checks of loading: every tensor of a checkpoint in its place, or an error that names it."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from minivllm.course.lessons.lesson_02 import reference
from minivllm.course.lessons.lesson_02.situations import make_shape, make_tensor, randomize
from minivllm.course.lessons.model_shape import ModelShape
from minivllm.course.lessons.tensors import expect_close
from minivllm.course.observations import expect, rounds

Weights = list[tuple[str, Tensor]]
ReadCheckpoint = Callable[[Path], Iterable[tuple[str, Tensor]]]
LoadWeights = Callable[[Any, Iterable[tuple[str, Tensor]]], None]

_BEFORE = 7.0
"""What all parameters are before loading."""
_NOT_TIED = "this model is not tied, so its lm_head.weight is loaded as any other"


def make_weights(shape: ModelShape, rng: random.Random) -> tuple[Weights, dict[str, Tensor]]:
    """A random checkpoint of a model, in random order, and what the parameters must be after loading."""
    model = reference.LanguageModel(shape)
    randomize(model, rng)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    q_rows, kv_rows, mlp_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.intermediate_size
    parts = {
        "qkv_proj": {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": mlp_rows, "up_proj": mlp_rows},
    }
    weights: Weights = []
    for name, tensor in expected.items():
        module = name.split(".")[-2]
        rows = parts.get(module, {module: len(tensor)})
        pieces = zip(rows, tensor.split(list(rows.values())), strict=True)
        weights += [(name.replace(module, part), piece.clone()) for part, piece in pieces]
    rng.shuffle(weights)
    return weights, expected


def make_load_shape(rng: random.Random, **fixed: Any) -> ModelShape:
    """A small model in which o_proj is square, so that a transposed weight has the right shape."""
    return make_shape(rng, **{"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2} | fixed)


@contextmanager
def checkpoint(weights: Weights, num_files: int, config: dict[str, Any]) -> Iterator[Path]:
    """A folder with a checkpoint in one or several safetensors files, and with other files that belong to a model."""
    from safetensors.torch import save_file

    names = [f"-{number + 1:05}-of-{num_files:05}" for number in range(num_files)] if num_files > 1 else [""]
    files = [f"model{name}.safetensors" for name in names]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, file in enumerate(files):
            save_file({name: tensor.contiguous() for name, tensor in weights[number::num_files]}, folder / file)
        if num_files > 1:
            index = {"weight_map": {name: files[place % num_files] for place, (name, _) in enumerate(weights)}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def check_read_checkpoint(read_checkpoint: ReadCheckpoint) -> None:
    """`read_checkpoint`: the names and tensors of all files."""
    for number, rng in enumerate(rounds("read", 3)):
        weights, _ = make_weights(make_load_shape(rng), rng)
        index = "s, their index, which is JSON," if number else ""
        said = f"A folder with {number + 1} safetensors file{index} and a config.json."
        with checkpoint(weights, number + 1, {}) as folder:
            try:
                pairs = list(read_checkpoint(folder))
            except SafetensorError as error:
                look = "which files are read: those whose name ends in .safetensors"
                expect(said, "error", "none", f"{type(error).__name__}: {error}", look)
        names, got = (sorted(name for name, _ in tensors) for tensors in (weights, pairs))
        look = "which files are read, and the keys of each"
        expect(said, "number of tensors", len(names), len(got), look)
        expect(said, "names", names, got, look)
        for name, tensor in weights:
            expect_close(said, name, tensor, dict(pairs)[name], "get_tensor(name)", tolerance=0.0)


def check_load_weights(load_weights: LoadWeights) -> None:
    """`load_weights`: everything in its place, and an error with a name for what is missing, left over or of another shape."""
    for number, rng in enumerate(rounds("load", 6)):
        shape = make_load_shape(rng, tie_word_embeddings=number % 2 == 0, qk_norm=number % 3 == 0)
        weights, expected = make_weights(shape, rng)
        said = f"{shape.num_layers} layers, qk_norm {shape.qk_norm}, tie_word_embeddings {shape.tie_word_embeddings}."
        if number % 4 == 0:
            weights.insert(rng.randrange(len(weights)), ("lm_head.weight", expected["model.embed_tokens.weight"] + 1))
            said += " The checkpoint has a lm_head.weight all the same, which a tied model does not need."
        _check_places(said, load_weights, shape, weights, expected)
        for what, name, broken in break_weights(weights, shape, rng):
            _check_error(f"{said} {what}", load_weights, shape, broken, name)


def _check_places(said: str, load_weights: LoadWeights, shape: ModelShape, weights: Weights, expected: dict[str, Tensor]) -> None:
    try:
        model = load(load_weights, shape, weights)
    except ValueError as error:
        if not shape.tie_word_embeddings and "lm_head.weight" in str(error):
            expect(said, "error", "none", f"ValueError: {error}", f"when lm_head.weight is skipped: {_NOT_TIED}")
        raise
    for name, parameter in model.named_parameters():
        look = f"where {name} comes from" + (": which rows, and in which order" if "proj" in name else "")
        unchanged = "what is copied: the parameter is unchanged. Assigning only changes the dictionary; use `copy_`"
        wrong = [
            (turn_squares(expected[name]), "the orientation: a weight of nn.Linear is [out, in], as in the checkpoint"),
            (torch.full_like(expected[name], _BEFORE), unchanged + (f". And {_NOT_TIED}" if name == "lm_head.weight" else "")),
        ]
        expect_close(said, name, expected[name], parameter, look, wrong, tolerance=0.0)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    look = "copying into parameters, not replacing them"
    expect(said, "lm_head.weight is model.embed_tokens.weight", shape.tie_word_embeddings, is_tied, look)


def _check_error(said: str, load_weights: LoadWeights, shape: ModelShape, broken: Weights, name: str) -> None:
    kind, message = "no error", ""
    look = "what is counted, and what is compared before copying"
    try:
        load(load_weights, shape, broken)
    except NotImplementedError:
        raise
    except Exception as error:
        kind, message = "ValueError" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}", str(error)
        look += ": raise a ValueError that has the tensor's name"
    expect(said, "error", "ValueError", kind, look)
    expect(said, f"the name {name} in the message", True, name in message, f"the message, which is {message!r}")


def turn_squares(weight: Tensor) -> Tensor:
    """A weight whose first square part is transposed, which has the right shape all the same."""
    size = weight.shape[-1]
    return weight if weight.ndim == 1 or len(weight) < size else torch.cat((weight[:size].t(), weight[size:]))


def load(load_weights: LoadWeights, shape: ModelShape, weights: Weights) -> reference.LanguageModel:
    """A model with the parameters' names of the exercise, filled by the learner's function."""
    model = reference.LanguageModel(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(_BEFORE)
    load_weights(model, ((name, tensor.clone()) for name, tensor in weights))
    return model


def break_weights(weights: Weights, shape: ModelShape, rng: random.Random) -> Iterator[tuple[str, str, Weights]]:
    """Checkpoints that do not fit: what is wrong, the name that the message must have, the checkpoint."""
    layer = f"model.layers.{rng.randrange(shape.num_layers)}"
    needed = [f"{layer}.self_attn.k_proj.weight", f"{layer}.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
    needed += [rng.choice([name for name, _ in weights if name != "lm_head.weight"])]
    needed += [] if shape.tie_word_embeddings else ["lm_head.weight"]
    for name in needed:
        yield f"{name} is missing.", name, [pair for pair in weights if pair[0] != name]
    for name in (f"{layer}.self_attn.q_proj.bias", f"model.layers.{shape.num_layers}.mlp.up_proj.weight", "model.other.weight"):
        extra = (name, torch.zeros(shape.hidden_size))
        yield f"{name} is left over: the model has no place for it.", name, [*weights, extra]
    wrong = {
        "model.norm.weight": torch.ones(1),
        f"{layer}.input_layernorm.weight": torch.ones(shape.hidden_size + 1),
        f"{layer}.self_attn.v_proj.weight": torch.ones(1, shape.hidden_size),
        f"{layer}.self_attn.k_proj.weight": torch.ones(shape.num_heads * shape.head_dim, shape.hidden_size),
        f"{layer}.mlp.up_proj.weight": torch.ones(shape.intermediate_size, 1),
        f"{layer}.mlp.gate_proj.weight": torch.ones(shape.hidden_size, shape.intermediate_size),
        "model.embed_tokens.weight": make_tensor(rng, shape.vocab_size + 1, shape.hidden_size),
    }
    for name, tensor in wrong.items():
        said = f"{name} has the shape {list(tensor.shape)}, which is not that of its place."
        yield said, name, [(key, tensor if key == name else value) for key, value in weights]
