"""The checks of the modules: attention, MLP, decoder layer, the whole model.

Each is tried with correct modules inside, or with spies that remember what they were given, so that one mistake fails one check.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.course.lessons.lesson_02 import reference
from minivllm.course.lessons.lesson_02.situations import (
    Spy,
    Suspect,
    expect,
    expect_close,
    make_ragged,
    make_shape,
    make_tensor,
    randomize,
)
from minivllm.course.lessons.model_shape import ModelShape

_ROUNDS = 8


# -- attention -------------------------------------------------------------------------------------------------------


def make_attention(cls: type, shape: ModelShape, rng: random.Random) -> Any:
    """A learner's attention with random weights, and with correct norms and rotary positions inside."""
    made = cls(shape, reference.Rotary(shape.rotary_dim, shape.rope_theta, shape.max_position))
    if shape.qk_norm:
        made.q_norm = reference.Norm(shape.head_dim, shape.rms_norm_eps)
        made.k_norm = reference.Norm(shape.head_dim, shape.rms_norm_eps)
    randomize(made, rng)
    return made


class Attender:
    """The function passed to attention: remembers queries, keys and values, and attends."""

    def __init__(self, starts: Tensor) -> None:
        self.starts = starts
        self.seen: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention."""
        self.seen = (q, k, v)
        return reference.causal_attention(q, k, v, self.starts)


@torch.no_grad()
def check_attention(cls: type) -> None:
    """`LlamaAttention`: what it passes to `attend`, and what it does with the result."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"attention {seed}")
        shape = make_shape(rng, qk_norm=seed % 2 == 1)
        made = make_attention(cls, shape, rng)
        lengths, starts, positions = make_ragged(rng)
        positions = positions + rng.randrange(9)  # prompts need not begin at 0: a chunk does not
        x = make_tensor(rng, sum(lengths), shape.hidden_size)
        expected, got = Attender(starts), Attender(starts)
        output = reference.Attention.forward(_as_reference(made, shape), x, positions, expected)
        mine = made(x.clone(), positions, got)
        said = (
            f"{shape.num_heads} query heads, {shape.num_kv_heads} KV heads, head_dim {shape.head_dim}, qk_norm {shape.qk_norm}."
        )
        expect(said, "arguments of `attend`", 3, len(got.seen), "the call of attend: queries, keys, values")
        suspects = _heads_suspects(made, shape, x, positions)
        looks = (
            "the rows of qkv_proj: queries first",
            "the rows of qkv_proj: keys after all queries",
            "the rows of qkv_proj: values come last",
        )
        for place, name in enumerate(("q", "k", "v")):
            look = f"{looks[place]}; then norm, if there is one, and rotation; values are neither normalized nor rotated"
            expect_close(f"{said} What `attend` gets.", name, expected.seen[place], got.seen[place], look, suspects[name])
        flat = reference.causal_attention(*expected.seen, starts)
        wrong = [
            (flat.transpose(0, 1).reshape(len(x), -1) @ made.o_proj.weight.T, "how the heads of a token are joined: flatten(1)"),
            (flat.flatten(1), "o_proj: it is missing"),
        ]
        expect_close(said, "output", output, mine, "the heads of a token side by side, then o_proj", wrong)


def _as_reference(made: Any, shape: ModelShape) -> Any:
    """A correct attention that shares the learner's parameters."""
    correct = reference.Attention(shape, made.rotary)
    correct.qkv_proj, correct.o_proj, correct.q_norm, correct.k_norm = made.qkv_proj, made.o_proj, made.q_norm, made.k_norm
    return correct


def _heads_suspects(made: Any, shape: ModelShape, x: Tensor, positions: Tensor) -> dict[str, list[Suspect]]:
    """What `attend` gets after common mistakes."""
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    heads = (x @ made.qkv_proj.weight.T).view(len(x), -1, shape.head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    rotary = made.rotary
    turned = [rotary(positions, q), rotary(positions, k)]
    suspects: dict[str, list[Suspect]] = {
        "q": [(q, "the rotation: queries are not rotated")],
        "k": [
            (k, "the rotation: keys are not rotated"),
            (v, "the rows of qkv_proj: keys come before values"),
            (rotary(positions, v), "the rows of qkv_proj: keys come before values"),
        ],
        "v": [
            (rotary(positions, v), "the rotation: values are not rotated"),
            (k, "the rows of qkv_proj: values come last"),
            (turned[1], "the rows of qkv_proj: values come last"),
        ],
    }
    if shape.qk_norm:
        for name, part, norm, other in (("q", q, made.q_norm, made.k_norm), ("k", k, made.k_norm, made.q_norm)):
            flat = part.flatten(1)
            wide = (flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + norm.eps)).view_as(part) * norm.weight
            suspects[name] += [
                (norm(rotary(positions, part)), f"the order: {name}_norm comes before the rotation"),
                (rotary(positions, part), f"{name}_norm: it is missing"),
                (norm(part), f"the rotation: {name} is not rotated"),
                (rotary(positions, other(part)), f"the weights: {name} has its own norm, {name}_norm"),
                (rotary(positions, wide), f"{name}_norm: each head is normalized by itself, not all of a token's heads together"),
            ]
        suspects["v"] += [(made.k_norm(v), "the norm: values are not normalized")]
    return suspects


# -- MLP -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_mlp(cls: type) -> None:
    """`LlamaMLP`."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"mlp {seed}")
        shape = make_shape(rng)
        made = cls(shape)
        randomize(made, rng)
        x = make_tensor(rng, 5, shape.hidden_size, scale=2.0)
        gate, up = (x @ made.gate_up_proj.weight.T).chunk(2, dim=-1)
        even, odd = (x @ made.gate_up_proj.weight.T).unflatten(-1, (-1, 2)).unbind(-1)
        suspects = [
            (gate * F.silu(up), "which half is the gate: the first. It goes through silu, the second does not"),
            (F.silu(gate * up), "where silu is: on the gate alone, before the product"),
            (F.silu(gate) * F.silu(up), "where silu is: on the gate alone"),
            (F.gelu(gate) * up, "the activation: silu(x) is x * sigmoid(x), not gelu"),
            (gate.relu() * up, "the activation: silu, not relu"),
            (gate.sigmoid() * up, "the activation: silu(x) is x * sigmoid(x), not sigmoid alone"),
            (F.silu(even) * odd, "the halves: gate and up are one after the other, not interleaved"),
            (F.silu(gate) + up, "what is done with the two: they are multiplied"),
        ]
        down = [(hidden @ made.down_proj.weight.T, hint) for hidden, hint in suspects]
        expected = reference.MLP.forward(made, x)
        said = f"hidden_size {shape.hidden_size}, intermediate_size {shape.intermediate_size}."
        look = "gate_up_proj, its two halves, silu, the product, down_proj"
        expect_close(said, "output", expected, made(x.clone()), look, down)


# -- decoder layer ---------------------------------------------------------------------------------------------------


def make_layer(cls: type, shape: ModelShape, rng: random.Random) -> tuple[Any, Spy, Spy]:
    """A learner's layer with correct norms, and with spies for attention and MLP."""
    made = cls(shape, reference.Rotary(shape.rotary_dim, shape.rope_theta, shape.max_position))
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(made, name, reference.Norm(shape.hidden_size, shape.rms_norm_eps))
    attention, mlp = Spy(shape.hidden_size, rng), Spy(shape.hidden_size, rng)
    made.self_attn, made.mlp = attention, mlp
    randomize(made.input_layernorm, rng)
    randomize(made.post_attention_layernorm, rng)
    return made, attention, mlp


@torch.no_grad()
def check_layer(cls: type) -> None:
    """`LlamaDecoderLayer`: what attention and MLP get, and how the stream passes them."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"layer {seed}")
        shape = make_shape(rng)
        made, attention, mlp = make_layer(cls, shape, rng)
        x, residual = make_tensor(rng, 5, shape.hidden_size), make_tensor(rng, 5, shape.hidden_size)
        stream = None if seed % 2 else residual
        positions, attend = torch.arange(5) + seed, Attender(torch.tensor([0, 5]))
        got = made(x.clone(), None if stream is None else stream.clone(), positions, attend)
        said = "The first layer: residual is None." if stream is None else "A layer in the middle."
        before, after = made.input_layernorm, made.post_attention_layernorm
        total = x if stream is None else stream + x
        added = before(total) @ attention.weight.T
        middle = total + added
        expect(said, "calls of self_attn and of mlp", [1, 1], [len(attention.calls), len(mlp.calls)], "what the layer calls")
        suspects = [
            (before(x), "what is normalized first: the stream after adding x, not x alone"),
            (total, "input_layernorm: attention reads the normalized stream"),
            (after(total), "the norms: input_layernorm comes first"),
        ]
        expect_close(said, "input of self_attn", before(total), attention.calls[0][0], "input_layernorm.add_and_norm", suspects)
        passed = [value is wanted for value, wanted in zip(attention.calls[0][1:], (positions, attend), strict=False)]
        expect(said, "positions and attend passed on", [True, True], passed, "self_attn(x, positions, attend)")
        suspects = [
            (after(added), "what the MLP reads: the norm of the whole stream, not only of attention's output"),
            (after(total), "what the MLP reads: the stream after attention has added to it"),
            (after(before(total) + added), "the residual: it is the stream before the norm, not what comes out of the norm"),
            (middle, "post_attention_layernorm: the MLP reads the normalized stream"),
            (before(middle), "the norms: the MLP's is post_attention_layernorm"),
        ]
        look = "post_attention_layernorm.add_and_norm: what attention adds, and the stream"
        expect_close(said, "input of mlp", after(middle), mlp.calls[0][0], look, suspects)
        expect(said, "number of results", 2, len(got), "what the layer returns: x and residual")
        last = after(middle) @ mlp.weight.T
        suspects = [
            (middle + last, "the first result: the next layer adds it to the stream, not this one"),
            (middle, "the order of the results: what the MLP adds, then the stream"),
        ]
        expect_close(said, "x", last, got[0], "the first result: what the MLP adds", suspects)
        suspects = [
            (after(middle), "the residual: it is the stream before the norm"),
            (total, "the residual: attention has added to it"),
            (middle + last, "the residual: what the MLP adds is not yet in it"),
        ]
        expect_close(said, "residual", middle, got[1], "the second result: the stream that the MLP will be added to", suspects)


# -- the whole -------------------------------------------------------------------------------------------------------


class SpyLayer(Spy):
    """A stand-in for a decoder layer."""

    def forward(self, *arguments: Any) -> Any:
        """A seeded random map of the stream, and the stream."""
        x, residual = arguments[:2]
        stream = x if residual is None else residual + x
        self.calls.append(arguments)
        return stream @ self.weight.T, stream


def make_model(cls: type, shape: ModelShape, rng: random.Random) -> tuple[Any, list[SpyLayer]]:
    """A learner's language model with spies for layers and a correct last norm."""
    names = cls.__init__.__globals__  # those of the notebook
    before = names.get("RotaryEmbedding")
    try:
        names["RotaryEmbedding"] = reference.Rotary
        made = cls(shape)
    finally:
        names["RotaryEmbedding"] = before
    layers = [SpyLayer(shape.hidden_size, rng) for _ in range(shape.num_layers)]
    made.model.layers = nn.ModuleList(layers)
    made.model.norm = reference.Norm(shape.hidden_size, shape.rms_norm_eps)
    randomize(made.model.norm, rng)
    with torch.no_grad():
        made.model.embed_tokens.weight.copy_(make_tensor(rng, shape.vocab_size, shape.hidden_size))
    return made, layers


@torch.no_grad()
def check_model(cls: type) -> None:
    """`LanguageModel`: the way from token ids to hidden states, and the head."""
    for seed in range(_ROUNDS):
        rng = random.Random(f"model {seed}")
        shape = make_shape(rng, tie_word_embeddings=seed % 2 == 0)
        made, layers = make_model(cls, shape, rng)
        input_ids = torch.tensor([rng.randrange(shape.vocab_size) for _ in range(6)])
        positions = torch.arange(6)
        attends: list[Callable[..., Any]] = [Attender(torch.tensor([0, 6])) for _ in layers]
        hidden = made(input_ids, positions, attends)
        said = f"{shape.num_layers} layers, tie_word_embeddings {shape.tie_word_embeddings}."
        expect(said, "calls of each layer", [1] * len(layers), [len(layer.calls) for layer in layers], "the loop over the layers")
        x, residual = made.model.embed_tokens.weight[input_ids], None
        for number, layer in enumerate(layers):
            call = layer.calls[0]
            look = "what the layers pass on: x and residual. The first gets the embeddings and None"
            expect_close(said, f"x of layer {number}", x, call[0], look)
            expect(said, f"residual of layer {number} is None", residual is None, call[1] is None, look)
            if residual is not None:
                expect_close(said, f"residual of layer {number}", residual, call[1], look)
            expect(said, f"positions passed to layer {number}", True, call[2] is positions, "what the layers are called with")
            which = next((i for i, attend in enumerate(attends) if call[3] is attend), None)
            expect(said, f"the attend of layer {number}", number, which, "attends: each layer has its own")
            x, residual = SpyLayer.forward(layer, x, residual)
        assert residual is not None
        suspects = [
            (made.model.norm(x), "the end: what the last layer returns is added to the stream, and then normalized"),
            (made.model.norm(residual), "the end: x of the last layer is not added yet"),
            (residual + x, "the end: the last norm is missing"),
        ]
        expect_close(said, "hidden states", made.model.norm(residual + x), hidden, "model.norm.add_and_norm at the end", suspects)
        _check_head(made, shape, said, make_tensor(rng, 3, shape.hidden_size), rng)


def _check_head(made: Any, shape: ModelShape, said: str, hidden: Tensor, rng: random.Random) -> None:
    head, embedding = made.lm_head.weight, made.model.embed_tokens.weight
    expect(
        said, "shape of lm_head.weight", [shape.vocab_size, shape.hidden_size], list(head.shape), "lm_head: hidden to vocabulary"
    )
    expect(said, "bias of lm_head", None, made.lm_head.bias, "lm_head: it has no bias")
    look = "lm_head.weight: with tie_word_embeddings it is the very same Parameter as model.embed_tokens.weight, not a copy; else its own"
    expect(said, "lm_head.weight is model.embed_tokens.weight", shape.tie_word_embeddings, head is embedding, look)
    head.copy_(make_tensor(rng, *head.shape))
    expected = hidden @ head.T
    expect_close(
        said, "compute_logits(hidden)", expected, made.compute_logits(hidden), "compute_logits: the head, and nothing else"
    )
