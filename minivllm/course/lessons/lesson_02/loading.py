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
from minivllm.course.lessons.lesson_02.situations import expect, expect_close, make_shape, make_tensor, randomize
from minivllm.course.lessons.model_shape import ModelShape

Weights = list[tuple[str, Tensor]]
ReadCheckpoint = Callable[[Path], Iterable[tuple[str, Tensor]]]
LoadWeights = Callable[[Any, Iterable[tuple[str, Tensor]]], None]

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_BEFORE = 7.0
"""What all parameters are before loading."""
_NOT_TIED = "this model is not tied, so its lm_head.weight is loaded as any other"


def make_weights(shape: ModelShape, rng: random.Random) -> tuple[Weights, dict[str, Tensor]]:
    """A random checkpoint of a model, in random order, and what the parameters must be after loading."""
    model = reference.LanguageModel(shape)
    randomize(model, rng)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights: Weights = []
    for name, tensor in expected.items():
        fused = next((fused for fused in _PARTS if f".{fused}." in name), None)
        if fused is None:
            weights.append((name, tensor))
            continue
        q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rows = [q_rows, kv_rows, kv_rows] if fused == "qkv_proj" else [shape.intermediate_size] * 2
        parts = zip(_PARTS[fused], tensor.split(rows), strict=True)
        weights += [(name.replace(fused, part), rows.clone()) for part, rows in parts]
    rng.shuffle(weights)
    return weights, expected


def make_load_shape(rng: random.Random, **fixed: Any) -> ModelShape:
    """A small model in which o_proj is square, so that a transposed weight has the right shape."""
    return make_shape(rng, **{"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2} | fixed)


@contextmanager
def checkpoint(weights: Weights, num_files: int) -> Iterator[Path]:
    """A folder with a checkpoint in several safetensors files, and with other files that belong to a model."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(num_files):
            part = {key: tensor.contiguous() for key, tensor in weights[number::num_files]}
            file = "model.safetensors" if num_files == 1 else f"model-{number + 1:05}-of-{num_files:05}.safetensors"
            save_file(part, folder / file)
        if num_files > 1:
            files = {
                name: f"model-{place % num_files + 1:05}-of-{num_files:05}.safetensors" for place, (name, _) in enumerate(weights)
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
        (folder / "config.json").write_text("{}")
        yield folder


def check_read_checkpoint(read_checkpoint: ReadCheckpoint) -> None:
    """`read_checkpoint`: the names and tensors of all files."""
    for seed in range(3):
        rng = random.Random(f"read {seed}")
        weights, _ = make_weights(make_load_shape(rng), rng)
        with checkpoint(weights, seed + 1) as folder:
            said = (
                f"A folder with {seed + 1} safetensors file{'s, their index, which is JSON,' if seed else ''} and a config.json."
            )
            try:
                pairs = list(read_checkpoint(folder))
            except SafetensorError as error:
                look = "which files are read: those whose name ends in .safetensors"
                expect(said, "error", "none", f"{type(error).__name__}: {error}", look)
                raise
            names = sorted(name for name, _ in pairs)
            look = "which files are read, and the keys of each"
            expect(said, "number of tensors", len(weights), len(names), look)
            expect(said, "names", sorted(name for name, _ in weights), names, look)
            for name, tensor in weights:
                expect_close(said, name, tensor, dict(pairs)[name], "get_tensor(name)", tolerance=0.0)


def check_load_weights(load_weights: LoadWeights) -> None:
    """`load_weights`: everything in its place, and an error with a name for what is missing, left over or of another shape."""
    for seed in range(6):
        rng = random.Random(f"load {seed}")
        shape = make_load_shape(rng, tie_word_embeddings=seed % 2 == 0, qk_norm=seed % 3 == 0)
        weights, expected = make_weights(shape, rng)
        said = f"{shape.num_layers} layers, qk_norm {shape.qk_norm}, tie_word_embeddings {shape.tie_word_embeddings}."
        if shape.tie_word_embeddings and seed % 4 == 0:
            weights.insert(rng.randrange(len(weights)), ("lm_head.weight", expected["model.embed_tokens.weight"] + 1))
            said += " The checkpoint has a lm_head.weight all the same, which a tied model does not need."
        try:
            model = load(load_weights, shape, weights)
        except ValueError as error:
            if shape.tie_word_embeddings or "lm_head.weight" not in str(error):
                raise
            expect(said, "error", "none", f"ValueError: {error}", f"when lm_head.weight is skipped: {_NOT_TIED}")
            raise
        for name, parameter in model.named_parameters():
            look = f"where {name} comes from" + ("" if "proj" not in name else ": which rows, and in which order")
            unchanged = "what is copied: the parameter is unchanged. Assigning only changes the dictionary; use `copy_`"
            if name == "lm_head.weight":
                unchanged += f". And {_NOT_TIED}"
            wrong = [
                (turn_squares(expected[name]), "the orientation: a weight of nn.Linear is [out, in], as in the checkpoint"),
                (torch.full_like(expected[name], _BEFORE), unchanged),
            ]
            expect_close(said, name, expected[name], parameter, look, wrong, tolerance=0.0)
        expect(said, "lm_head.weight is model.embed_tokens.weight", shape.tie_word_embeddings,
               model.lm_head.weight is model.model.embed_tokens.weight, "copying into parameters, not replacing them")  # fmt: skip
        for what, name, broken in break_weights(weights, shape, rng):
            error = catch(load_weights, shape, broken)
            said_error = f"{said} {what}"
            kind = "ValueError" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}" if error else "no error"
            look = "what is counted, and what is compared before copying"
            if error:
                look += ": raise a ValueError that has the tensor's name"
            expect(said_error, "error", "ValueError", kind, look)
            named = name in str(error)
            expect(said_error, f"the name {name} in the message", True, named, f"the message, which is {str(error)!r}")


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


def catch(load_weights: LoadWeights, shape: ModelShape, weights: Weights) -> Exception | None:
    """The error that loading raises, if it does."""
    try:
        load(load_weights, shape, weights)
    except NotImplementedError:
        raise
    except Exception as error:
        return error
    return None


def break_weights(weights: Weights, shape: ModelShape, rng: random.Random) -> Iterator[tuple[str, str, Weights]]:
    """Checkpoints that do not fit: what is wrong, the name that the message must have, the checkpoint."""
    names = [name for name, _ in weights if name != "lm_head.weight"]
    layer = f"model.layers.{rng.randrange(shape.num_layers)}"
    needed = {"k_proj": f"{layer}.self_attn.k_proj.weight", "up_proj": f"{layer}.mlp.up_proj.weight", "norm": "model.norm.weight",
              "embed": "model.embed_tokens.weight", "any": rng.choice(names)}  # fmt: skip
    if not shape.tie_word_embeddings:
        needed["head"] = "lm_head.weight"
    for name in needed.values():
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
