"""What the grader asks of a learner's model from outside: random input, and what comes out.

See `lesson_04.observe`. Numbers are reported in hundredths, as whole numbers, and only where the correct result is not near the border
between two of them: rounding, which differs between right solutions, then cannot change a report. As in the checks, correct parts stand
for the stages below.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_02 import reference
from minivllm.course.lessons.lesson_02.blocks import Attender, make_attention, make_layer, make_model
from minivllm.course.lessons.lesson_02.engine import FAMILIES, generate, model_folder
from minivllm.course.lessons.lesson_02.loading import break_weights, checkpoint, load, make_load_shape, make_weights
from minivllm.course.lessons.lesson_02.situations import make_ragged, make_shape, make_tensor, randomize

_ROUNDS = 6
_Observe = Callable[[Any, random.Random], list[Any]]


def report(got: Any, expected: Tensor) -> list[Any]:
    """Shape, dtype and hundredths of a result; None where the correct result is too near to a border."""
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return [str(type(got).__name__), list(getattr(got, "shape", ()))]
    exact, came = (
        100 * expected.detach().double().flatten(),
        (100 * got.detach().double().flatten()).nan_to_num(nan=1e9, posinf=1e9),
    )
    is_safe = ((exact - exact.round()).abs() < 0.45).tolist()
    return [
        str(got.dtype),
        list(got.shape),
        [round(value) if safe else None for value, safe in zip(came.tolist(), is_safe, strict=True)],
    ]


def _observe_norm(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        norm = cls(8, rng.choice((1e-6, 1e-2)))
        randomize(norm, rng)
        x, residual = make_tensor(rng, 3, 8, scale=rng.choice((0.05, 1.0))), make_tensor(rng, 3, 8)
        observations.append(report(norm(x), reference.Norm.forward(norm, x)))
        large = make_tensor(rng, 2, 3, 8, scale=500.0).to(torch.float16)
        got = norm(large)
        observations.append([str(got.dtype), bool(got.isfinite().all()), (got.float().abs() > 0.05).sum().item() > 8])
        for stream in (residual, None):
            results = norm.add_and_norm(x.clone(), None if stream is None else stream.clone())
            expected = reference.Norm.add_and_norm(norm, x, stream)
            observations += [report(got, right) for got, right in zip(results, expected, strict=True)]
    return observations


def _observe_rotary(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        head_dim, rotary_dim, base = rng.choice((8, 16)), rng.choice((4, 8)), rng.choice((100.0, 10000.0))
        made, table = cls(rotary_dim, base, 40), reference.angles(rotary_dim, base, 40)
        positions, x = torch.tensor([rng.randrange(40) for _ in range(4)]), make_tensor(rng, 4, 2, head_dim)
        observations.append(report(made.angles(base, 40), table))
        observations.append(report(made(positions, x), reference.rotate(positions, x, table)))
    return observations


def _observe_attend(attend: Callable[..., Tensor], rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        lengths, starts, _ = make_ragged(rng)
        num_heads, num_kv_heads = rng.choice(((6, 2), (6, 3), (3, 3)))
        q = make_tensor(rng, sum(lengths), num_heads, 8, scale=2.0)
        k, v = (make_tensor(rng, sum(lengths), num_kv_heads, 8) for _ in range(2))
        observations.append(report(attend(q, k, v, starts), reference.causal_attention(q, k, v, starts)))
    return observations


def _observe_attention(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for number in range(_ROUNDS):
        shape = make_shape(rng, qk_norm=number % 2 == 1)
        made = make_attention(cls, shape, rng)
        correct = reference.Attention(shape, made.rotary)
        correct.load_state_dict(made.state_dict())
        lengths, starts, positions = make_ragged(rng)
        x, mine, theirs = make_tensor(rng, sum(lengths), shape.hidden_size), Attender(starts), Attender(starts)
        observations.append(report(made(x, positions, mine), correct(x, positions, theirs)))
        observations += [report(got, right) for got, right in zip(mine.seen, theirs.seen, strict=True)]
    return observations


def _observe_mlp(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for _ in range(_ROUNDS):
        shape = make_shape(rng)
        made = cls(shape)
        randomize(made, rng)
        x = make_tensor(rng, 3, shape.hidden_size, scale=2.0)
        observations.append(report(made(x), reference.MLP.forward(made, x)))
    return observations


def _observe_layer(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for number in range(_ROUNDS):
        shape = make_shape(rng)
        made, attention, mlp = make_layer(cls, shape, rng)
        x, residual = make_tensor(rng, 4, shape.hidden_size), make_tensor(rng, 4, shape.hidden_size)
        stream = None if number % 2 else residual
        attend = Attender(torch.tensor([0, 4]))
        got = made(x, stream, torch.arange(4), attend)
        normed, total = made.input_layernorm.add_and_norm(x, stream)
        read, middle = made.post_attention_layernorm.add_and_norm(normed @ attention.weight.T, total)
        seen = (attention.calls[0][0], mlp.calls[0][0], *got)
        observations += [report(was, right) for was, right in zip(seen, (normed, read, read @ mlp.weight.T, middle), strict=True)]
        observations.append([len(attention.calls), len(mlp.calls), attention.calls[0][2] is attend])
    return observations


def _observe_model(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for number in range(_ROUNDS):
        shape = make_shape(rng, tie_word_embeddings=number % 2 == 0)
        made, layers = make_model(cls, shape, rng)
        input_ids = torch.tensor([rng.randrange(shape.vocab_size) for _ in range(4)])
        attends = [Attender(torch.tensor([0, 4])) for _ in layers]
        hidden = made(input_ids, torch.arange(4), attends)
        x, residual = made.model.embed_tokens.weight[input_ids], None
        for layer in layers:
            stream = x if residual is None else residual + x
            x, residual = stream @ layer.weight.T, stream
        observations.append(report(hidden, made.model.norm.add_and_norm(x, residual)[0]))
        observations.append([attends.index(layer.calls[0][3]) for layer in layers])
        observations.append([made.lm_head.weight is made.model.embed_tokens.weight, made.lm_head.bias is None])
        made.lm_head.weight.copy_(make_tensor(rng, *made.lm_head.weight.shape))
        given = make_tensor(rng, 2, shape.hidden_size)
        observations.append(report(made.compute_logits(given), given @ made.lm_head.weight.T))
    return observations


def _observe_reading(read_checkpoint: Callable[..., Any], rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for number in range(3):
        weights, _ = make_weights(make_load_shape(rng), rng)
        with checkpoint(weights, number + 1) as folder:
            pairs = dict(read_checkpoint(folder))
        observations.append(sorted(pairs))
        observations += [report(pairs[name], tensor) for name, tensor in weights]
    return observations


def _observe_loading(load_weights: Callable[..., None], rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for number in range(4):
        shape = make_load_shape(rng, tie_word_embeddings=number % 2 == 0)
        weights, expected = make_weights(shape, rng)
        model = load(load_weights, shape, weights)
        observations += [[name, report(parameter, expected[name])] for name, parameter in model.named_parameters()]
        for _, name, broken in break_weights(weights, shape, rng):
            try:
                load(load_weights, shape, broken)
            except ValueError as error:
                observations.append([name, name in str(error)])
            else:
                observations.append([name, "no error"])
    return observations


def _observe_engine(cls: type, rng: random.Random) -> list[Any]:
    observations: list[Any] = []
    for architecture, special in FAMILIES.items():
        shape = make_load_shape(rng, rotary_dim=8, **special)
        prompts = [[rng.randrange(3, shape.vocab_size) for _ in range(rng.randint(1, 20))] for _ in range(3)]
        with model_folder(architecture, shape, rng) as folder:
            observations += generate(folder, architecture, cls, prompts)
    return observations


def _without_gradients(observe: _Observe) -> _Observe:
    return torch.no_grad()(observe)


OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-norm": ("RMSNorm", _without_gradients(_observe_norm)),
    "check-rotary": ("RotaryEmbedding", _without_gradients(_observe_rotary)),
    "check-attend": ("causal_attention", _without_gradients(_observe_attend)),
    "check-attention": ("LlamaAttention", _without_gradients(_observe_attention)),
    "check-mlp": ("LlamaMLP", _without_gradients(_observe_mlp)),
    "check-layer": ("LlamaDecoderLayer", _without_gradients(_observe_layer)),
    "check-model": ("LanguageModel", _without_gradients(_observe_model)),
    "check-read": ("read_checkpoint", _observe_reading),
    "check-load": ("load_weights", _observe_loading),
    "check-logits": ("MyLlama", _observe_engine),
    "check-engine": ("MyLlama", _observe_engine),
    "check-text": ("MyLlama", _observe_engine),
}
"""For each check, the class or function it tests, and how to observe it."""
