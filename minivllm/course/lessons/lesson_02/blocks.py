"""The checks of the modules: attention, MLP, decoder layer, the whole model.

Each is tried with correct modules inside, or with spies that remember what they were given, so that one mistake fails one check.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.course.lessons.lesson_02 import reference
from minivllm.course.lessons.lesson_02.situations import Spy, SpyLayer, make_ragged, make_shape, make_tensor, randomize
from minivllm.course.lessons.model_shape import ModelShape
from minivllm.course.lessons.tensors import Suspect, expect_close
from minivllm.course.observations import expect, rounds

_ROUNDS = 8


def make_attention(cls: type, shape: ModelShape, rng: random.Random) -> tuple[Any, reference.Attention]:
    """A learner's attention with random weights, with correct norms and rotary positions inside; and a correct one with the same weights."""
    rotary = reference.Rotary(shape.rotary_dim, shape.rope_theta, shape.max_position)
    made, correct = cls(shape, rotary), reference.Attention(shape, rotary)
    if shape.qk_norm:
        made.q_norm, made.k_norm = (reference.Norm(shape.head_dim, shape.rms_norm_eps) for _ in range(2))
    randomize(made, rng)
    correct.load_state_dict(made.state_dict())
    return made, correct


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
    for number, rng in enumerate(rounds("attention", _ROUNDS)):
        shape = make_shape(rng, qk_norm=number % 2 == 1)
        made, correct = make_attention(cls, shape, rng)
        lengths, starts, positions = make_ragged(rng)
        positions = positions + rng.randrange(9)  # prompts need not begin at 0: a chunk does not
        x = make_tensor(rng, sum(lengths), shape.hidden_size)
        expected, got = Attender(starts), Attender(starts)
        output, mine = correct(x, positions, expected), made(x.clone(), positions, got)
        said = f"{shape.num_heads} query heads, {shape.num_kv_heads} KV heads of {shape.head_dim}, qk_norm {shape.qk_norm}."
        expect(said, "arguments of `attend`", 3, len(got.seen), "the call of attend: queries, keys, values")
        suspects = _heads_suspects(correct, shape, x, positions)
        places = {"q": "queries first", "k": "keys after all queries", "v": "values come last"}
        for (name, place), right, given in zip(places.items(), expected.seen, got.seen, strict=True):
            look = f"the rows of qkv_proj: {place}; then norm, if there is one, and rotation; values are neither normalized nor rotated"
            expect_close(f"{said} What `attend` gets.", name, right, given, look, suspects[name])
        heads = reference.causal_attention(*expected.seen, starts)
        wrong = [
            (correct.o_proj(heads.transpose(0, 1).reshape(len(x), -1)), "how the heads of a token are joined: flatten(1)"),
            (heads.flatten(1), "o_proj: it is missing"),
        ]
        expect_close(said, "output", output, mine, "the heads of a token side by side, then o_proj", wrong)


def _heads_suspects(attention: reference.Attention, shape: ModelShape, x: Tensor, positions: Tensor) -> dict[str, list[Suspect]]:
    """What `attend` gets after common mistakes."""
    q, k, v = attention.qkv_proj(x).view(len(x), -1, shape.head_dim).split(attention.heads, dim=1)
    last = "the rows of qkv_proj: values come last"
    before_values = "the rows of qkv_proj: keys come before values"

    def turn(heads: Tensor) -> Tensor:
        return attention.rotary(positions, heads)

    suspects: dict[str, list[Suspect]] = {
        "q": [(q, "the rotation: queries are not rotated")],
        "k": [(k, "the rotation: keys are not rotated"), (v, before_values), (turn(v), before_values)],
        "v": [(turn(v), "the rotation: values are not rotated"), (k, last), (turn(k), last)],
    }
    if attention.q_norm is None or attention.k_norm is None:
        return suspects
    for name, part, norm, other in (("q", q, attention.q_norm, attention.k_norm), ("k", k, attention.k_norm, attention.q_norm)):
        flat = part.flatten(1)
        wide = (flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + norm.eps)).view_as(part) * norm.weight
        suspects[name] += [
            (norm(turn(part)), f"the order: {name}_norm comes before the rotation"),
            (turn(part), f"{name}_norm: it is missing"),
            (norm(part), f"the rotation: {name} is not rotated"),
            (turn(other(part)), f"the weights: {name} has its own norm, {name}_norm"),
            (turn(wide), f"{name}_norm: each head is normalized by itself, not all of a token's heads together"),
        ]
    suspects["v"] += [(attention.k_norm(v), "the norm: values are not normalized")]
    return suspects


@torch.no_grad()
def check_mlp(cls: type) -> None:
    """`LlamaMLP`."""
    for rng in rounds("mlp", _ROUNDS):
        shape = make_shape(rng)
        made = cls(shape)
        randomize(made, rng)
        x = make_tensor(rng, 5, shape.hidden_size, scale=2.0)
        rows = made.gate_up_proj(x)
        (gate, up), (even, odd) = rows.chunk(2, dim=-1), rows.unflatten(-1, (-1, 2)).unbind(-1)
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
        down = [(made.down_proj(hidden), hint) for hidden, hint in suspects]
        said = f"hidden_size {shape.hidden_size}, intermediate_size {shape.intermediate_size}."
        look = "gate_up_proj, its two halves, silu, the product, down_proj"
        expect_close(said, "output", reference.MLP.forward(made, x), made(x.clone()), look, down)


@torch.no_grad()
def check_layer(cls: type) -> None:
    """`LlamaDecoderLayer`: what attention and MLP get, and how the stream passes them."""
    for number, rng in enumerate(rounds("layer", _ROUNDS)):
        shape = make_shape(rng)
        made = cls(shape, reference.Rotary(shape.rotary_dim, shape.rope_theta, shape.max_position))
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(made, name, reference.Norm(shape.hidden_size, shape.rms_norm_eps))
        made.self_attn, made.mlp = attention, mlp = Spy(shape.hidden_size, rng), Spy(shape.hidden_size, rng)
        randomize(made, rng)
        x, residual = make_tensor(rng, 5, shape.hidden_size), make_tensor(rng, 5, shape.hidden_size)
        stream = None if number % 2 else residual
        positions, attend = torch.arange(5) + number, Attender(torch.tensor([0, 5]))
        got = made(x.clone(), None if stream is None else stream.clone(), positions, attend)
        said = "The first layer: residual is None." if stream is None else "A layer in the middle."
        expect(said, "calls of self_attn and of mlp", [1, 1], [len(attention.calls), len(mlp.calls)], "what the layer calls")
        passed = [value is wanted for value, wanted in zip(attention.calls[0][1:], (positions, attend), strict=False)]
        expect(said, "positions and attend passed on", [True, True], passed, "self_attn(x, positions, attend)")
        expect(said, "number of results", 2, len(got), "what the layer returns: x and residual")
        came = (attention.calls[0][0], mlp.calls[0][0], *got)
        for (what, expected, look, suspects), mine in zip(_layer_stages(made, x, stream), came, strict=True):
            expect_close(said, what, expected, mine, look, suspects)


def _layer_stages(layer: Any, x: Tensor, residual: Tensor | None) -> list[tuple[str, Tensor, str, list[Suspect]]]:
    """What a layer passes on and returns, in order: the name, the right value, where to look, and what common mistakes give."""
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    total = x if residual is None else residual + x
    added = before(total) @ layer.self_attn.weight.T
    middle = total + added
    last = after(middle) @ layer.mlp.weight.T
    return [
        ("input of self_attn", before(total), "input_layernorm.add_and_norm", [
            (before(x), "what is normalized first: the stream after adding x, not x alone"),
            (total, "input_layernorm: attention reads the normalized stream"),
            (after(total), "the norms: input_layernorm comes first"),
        ]),
        ("input of mlp", after(middle), "post_attention_layernorm.add_and_norm: what attention adds, and the stream", [
            (after(added), "what the MLP reads: the norm of the whole stream, not only of attention's output"),
            (after(total), "what the MLP reads: the stream after attention has added to it"),
            (after(before(total) + added), "the residual: it is the stream before the norm, not what comes out of the norm"),
            (middle, "post_attention_layernorm: the MLP reads the normalized stream"),
            (before(middle), "the norms: the MLP's is post_attention_layernorm"),
        ]),
        ("x", last, "the first result: what the MLP adds", [
            (middle + last, "the first result: the next layer adds it to the stream, not this one"),
            (middle, "the order of the results: what the MLP adds, then the stream"),
        ]),
        ("residual", middle, "the second result: the stream that the MLP will be added to", [
            (after(middle), "the residual: it is the stream before the norm"),
            (total, "the residual: attention has added to it"),
            (middle + last, "the residual: what the MLP adds is not yet in it"),
        ]),
    ]  # fmt: skip


def make_model(cls: type, shape: ModelShape, rng: random.Random) -> Any:
    """A learner's language model with spies for layers, a correct last norm, and random weights."""
    names = cls.__init__.__globals__  # those of the notebook
    before = names.get("RotaryEmbedding")
    try:
        names["RotaryEmbedding"] = reference.Rotary
        made: Any = cls(shape)
    finally:
        names["RotaryEmbedding"] = before
    made.model.layers = nn.ModuleList(SpyLayer(shape.hidden_size, rng) for _ in range(shape.num_layers))
    made.model.norm = reference.Norm(shape.hidden_size, shape.rms_norm_eps)
    randomize(made.model.norm, rng)
    made.model.embed_tokens.weight.copy_(make_tensor(rng, shape.vocab_size, shape.hidden_size))
    return made


@torch.no_grad()
def check_model(cls: type) -> None:
    """`LanguageModel`: the way from token ids to hidden states, and the head."""
    for number, rng in enumerate(rounds("model", _ROUNDS)):
        shape = make_shape(rng, tie_word_embeddings=number % 2 == 0)
        made = make_model(cls, shape, rng)
        input_ids, positions = torch.tensor([rng.randrange(shape.vocab_size) for _ in range(6)]), torch.arange(6)
        attends = [Attender(torch.tensor([0, 6])) for _ in made.model.layers]
        hidden = made(input_ids, positions, attends)
        said = f"{shape.num_layers} layers, tie_word_embeddings {shape.tie_word_embeddings}."
        x, residual = _check_layer_calls(said, made.model, input_ids, positions, attends)
        norm = made.model.norm
        suspects = [
            (norm(x), "the end: what the last layer returns is added to the stream, and then normalized"),
            (norm(residual), "the end: x of the last layer is not added yet"),
            (residual + x, "the end: the last norm is missing"),
        ]
        expect_close(said, "hidden states", norm(residual + x), hidden, "model.norm.add_and_norm at the end", suspects)
        _check_head(said, made, shape, rng)


def _check_layer_calls(
    said: str, model: Any, input_ids: Tensor, positions: Tensor, attends: list[Attender]
) -> tuple[Tensor, Tensor]:
    """What each layer was given. Returns what the last one has returned."""
    calls = [len(layer.calls) for layer in model.layers]
    expect(said, "calls of each layer", [1] * len(calls), calls, "the loop over the layers")
    x, residual = model.embed_tokens.weight[input_ids], None
    look = "what the layers pass on: x and residual. The first gets the embeddings and None"
    for number, layer in enumerate(model.layers):
        got_x, got_residual, got_positions, got_attend = layer.calls[0]
        expect_close(said, f"x of layer {number}", x, got_x, look)
        expect(said, f"residual of layer {number} is None", residual is None, got_residual is None, look)
        if residual is not None:
            expect_close(said, f"residual of layer {number}", residual, got_residual, look)
        expect(said, f"positions passed to layer {number}", True, got_positions is positions, "what the layers are called with")
        which = next((i for i, attend in enumerate(attends) if got_attend is attend), None)
        expect(said, f"the attend of layer {number}", number, which, "attends: each layer has its own")
        x, residual = layer(x, residual)
    return x, residual


def _check_head(said: str, made: Any, shape: ModelShape, rng: random.Random) -> None:
    hidden, head = make_tensor(rng, 3, shape.hidden_size), made.lm_head.weight
    sizes = [shape.vocab_size, shape.hidden_size]
    expect(said, "shape of lm_head.weight", sizes, list(head.shape), "lm_head: hidden to vocabulary")
    expect(said, "whether lm_head has a bias", False, made.lm_head.bias is not None, "lm_head: it has no bias")
    look = "lm_head.weight: with tie_word_embeddings it is the very same Parameter as model.embed_tokens.weight, not a copy; else its own"
    is_tied = head is made.model.embed_tokens.weight
    expect(said, "lm_head.weight is model.embed_tokens.weight", shape.tie_word_embeddings, is_tied, look)
    head.copy_(make_tensor(rng, *sizes))
    look = "compute_logits: the head, and nothing else"
    expect_close(said, "compute_logits(hidden)", hidden @ head.T, made.compute_logits(hidden), look)
