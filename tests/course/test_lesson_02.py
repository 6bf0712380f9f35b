"""Lesson 02's checks, tested as code is: the solution passes, a stub fails, and a plausible mistake fails where it belongs.

`tests/support/mutate_lesson.py 02` makes many more mistakes, small ones.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest
import torch
from lesson_cells import ROOT as ROOT_FOLDER
from lesson_cells import Cell, edited, read_cells, run_cells, untouched, without_earlier_checks

from minivllm.course.lessons import lesson_02
from minivllm.course.lessons.lesson_02 import reference, situations
from minivllm.course.lessons.lesson_02.engine import first_difference
from minivllm.course.lessons.lesson_02.loading import make_weights
from minivllm.course.lessons.model_shape import ModelShape
from minivllm.models.registry import MODELS

NORM, ROTARY = "a norm divides by the root mean square", "positions turn the first channels of a head"
ATTEND, ATTENTION = "a token sees its own prompt, up to itself", "queries, keys and values come from one matrix"
MLP, LAYER, MODEL = "the gate goes through silu, up does not", "the stream goes past both blocks", "token ids in, logits out"
READ, LOAD = "every tensor of every file is read", "every weight finds its place, or an error names it"
LOGITS, ENGINE = "the real weights give transformers' logits", "the engine generates the same tokens"
TEXT = "the real model writes the same text"

ROOT = "root = torch.sqrt(x32.pow(2).mean(dim=-1, keepdim=True) + self.eps)"
SCALED = "return (x32 / root * self.weight).to(x.dtype)"
STREAM = "stream = x if residual is None else residual + x"
PAIR = "return self(stream), stream"
ANGLES = "return torch.outer(positions, base ** (-2 * pairs / self.rotary_dim))"
TABLES = "cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # the same for all heads"
HALVES = "a, b = turned.chunk(2, dim=-1)"
TURN = "turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)"
REST = "return torch.cat((turned.to(x.dtype), rest), dim=-1)"
REPEAT = "k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)"
SCORES = 'scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * q.shape[-1] ** -0.5'
FUTURE = "future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)"
WEIGHTS = "weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)"
SPLIT = "q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)"
QK_NORM = "q, k = self.q_norm(q), self.k_norm(k)"
QK_TURN = "q, k = self.rotary(positions, q), self.rotary(positions, k)"
JOIN = "return self.o_proj(attend(q, k, v).flatten(1))"
CHUNK = "gate, up = self.gate_up_proj(x).chunk(2, dim=-1)"
SWIGLU = "return self.down_proj(F.silu(gate) * up)"
FIRST = "x, residual = self.input_layernorm.add_and_norm(x, residual)"
SECOND = "x, residual = self.post_attention_layernorm.add_and_norm(x, residual)"
ATTENDED = "x = self.self_attn(x, positions, attend)"
RETURN = "return self.mlp(x), residual"
EMBED = "x, residual = self.embed_tokens(input_ids), None"
LOOP = "x, residual = layer(x, residual, positions, attend)"
LAST = "return self.norm.add_and_norm(x, residual)[0]"
HEAD = "self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)"
TIE = "self.lm_head.weight = self.model.embed_tokens.weight"
FILES = 'for file in sorted(folder.glob("*.safetensors")):'
SKIP = 'if name == "lm_head.weight" and is_tied:'
LEFT_OVER = 'if name not in places:\n            raise ValueError(f"The model has no place for {name}.")\n'
WRONG_SHAPE = '        if view.shape != tensor.shape:\n            raise ValueError(f"{name} has the shape {list(tensor.shape)}, but its place has {list(view.shape)}.")\n'
COPY = "view.copy_(tensor)"
MISSING = "    if places:\n        raise ValueError(f\"The checkpoint lacks {', '.join(places)}.\")\n"
ATTENDS = (
    "        attends = [\n            partial(backend, kv_cache=kv_cache, metadata=metadata)\n"
    "            for backend, kv_cache in zip(self.backends, kv_caches, strict=True)\n        ]\n"
)

WRONG = {
    # the norm
    "eps outside the root": (NORM, ROOT, "root = torch.sqrt(x32.pow(2).mean(dim=-1, keepdim=True)) + self.eps"),
    "no eps": (NORM, ROOT, "root = torch.sqrt(x32.pow(2).mean(dim=-1, keepdim=True))"),
    "the sum for the mean": (NORM, ROOT, "root = torch.sqrt(x32.pow(2).sum(dim=-1, keepdim=True) + self.eps)"),
    "one mean for all rows": (NORM, ROOT, "root = torch.sqrt(x32.pow(2).mean() + self.eps)"),
    "the mean over the tokens": (NORM, ROOT, "root = torch.sqrt(x32.pow(2).mean(dim=0, keepdim=True) + self.eps)"),
    "layer norm": (NORM, "x32 = x.float()", "x32 = x.float() - x.float().mean(dim=-1, keepdim=True)"),
    "no root": (NORM, ROOT, "root = x32.pow(2).mean(dim=-1, keepdim=True) + self.eps"),
    "norm in half precision": (NORM, "x32 = x.float()", "x32 = x"),
    "float32 comes out": (NORM, SCALED, "return x32 / root * self.weight"),
    "no weight": (NORM, SCALED, "return (x32 / root).to(x.dtype)"),
    "Gemma's weight": (NORM, SCALED, "return (x32 / root * (1 + self.weight)).to(x.dtype)"),
    "the stream is not added to": (NORM, STREAM, "stream = x if residual is None else residual"),
    "the residual is the norm": (NORM, PAIR, "return self(stream), self(stream)"),
    "x alone is normalized": (NORM, PAIR, "return self(x), stream"),
    "the pair the other way round": (NORM, PAIR, "return stream, self(stream)"),
    "no beginning": (NORM, STREAM, "stream = residual + x"),
    # rotary positions
    "interleaved pairs": (ROTARY, HALVES, "a, b = turned[..., ::2], turned[..., 1::2]"),
    "interleaved pairs, put back in turns": (
        ROTARY,
        HALVES + "\n        " + TURN,
        "a, b = turned[..., ::2], turned[..., 1::2]\n"
        "        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)",
    ),
    "turned backwards": (ROTARY, TURN, "turned = torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)"),
    "the halves exchanged": (ROTARY, TURN, "turned = torch.cat((b * cos + a * sin, a * cos - b * sin), dim=-1)"),
    "two sines subtracted": (ROTARY, TURN, "turned = torch.cat((a * cos - b * sin, b * cos - a * sin), dim=-1)"),
    "two sines added": (ROTARY, TURN, "turned = torch.cat((a * cos + b * sin, b * cos + a * sin), dim=-1)"),
    "positions off by one": (ROTARY, "positions = torch.arange(max_position, dtype=torch.float32)", "positions = 1 + torch.arange(max_position, dtype=torch.float32)"),
    "positions off by one when they are looked up": (ROTARY, TABLES, "cos, sin = self.cos[positions - 1][:, None], self.sin[positions - 1][:, None]"),
    "the row for the position": (ROTARY, TABLES, "cos, sin = self.cos[: len(x)][:, None], self.sin[: len(x)][:, None]"),
    "every position is the first": (ROTARY, TABLES, "cos, sin = self.cos[0 * positions][:, None], self.sin[0 * positions][:, None]"),
    "the exponent without its 2": (ROTARY, ANGLES, "return torch.outer(positions, base ** (-pairs / self.rotary_dim))"),
    "frequencies that rise": (ROTARY, ANGLES, "return torch.outer(positions, base ** (2 * pairs / self.rotary_dim))"),
    "angles in half precision": (
        ROTARY,
        "positions = torch.arange(max_position, dtype=torch.float32)",
        "positions = torch.arange(max_position, dtype=torch.get_default_dtype())",
    ),
    "all channels are turned": (ROTARY, "turned, rest = x[..., : self.rotary_dim].float(), x[..., self.rotary_dim :]", "turned, rest = x.float(), x[..., :0]"),
    "the last channels are turned": (
        ROTARY,
        "turned, rest = x[..., : self.rotary_dim].float(), x[..., self.rotary_dim :]",
        "turned, rest = x[..., -self.rotary_dim :].float(), x[..., : -self.rotary_dim]",
    ),
    "the rest is dropped": (ROTARY, REST, "return turned.to(x.dtype)"),
    "the rest is zero": (ROTARY, REST, "return torch.cat((turned.to(x.dtype), 0 * rest), dim=-1)"),
    "half precision becomes float32": (ROTARY, REST, "return torch.cat((turned, rest.float()), dim=-1)"),
    # attention
    "KV heads tiled": (ATTEND, REPEAT, "k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)"),
    "values tiled": (ATTEND, REPEAT, "k, v = k.repeat_interleave(group, dim=1), v.repeat(1, group, 1)"),
    "the next token is seen": (ATTEND, FUTURE, FUTURE.replace("triu(1)", "triu(2)")),
    "a token does not see itself": (ATTEND, FUTURE, FUTURE.replace("triu(1)", "triu(0)")),
    "everything is seen": (ATTEND, WEIGHTS, "weights = scores.softmax(dim=-1)"),
    "the past is hidden": (ATTEND, FUTURE, FUTURE.replace("triu(1)", "tril(-1)")),
    "the mask is 0": (ATTEND, WEIGHTS, "weights = scores.masked_fill(future, 0).softmax(dim=-1)"),
    "the mask comes after the softmax": (ATTEND, WEIGHTS, "weights = scores.softmax(dim=-1).masked_fill(future, 0)"),
    "softmax over the queries": (ATTEND, WEIGHTS, WEIGHTS.replace("dim=-1", "dim=1")),
    "no scale": (ATTEND, SCORES, SCORES.replace(" * q.shape[-1] ** -0.5", "")),
    "the scale of all heads": (ATTEND, SCORES, SCORES.replace("q.shape[-1] **", "(q.shape[1] * q.shape[2]) **")),
    "divided by the width": (ATTEND, SCORES, SCORES.replace("q.shape[-1] ** -0.5", "q.shape[-1] ** -1.0")),
    "prompts see one another": (ATTEND, "for start, end in pairwise(query_start_loc.tolist()):", "for start, end in [(0, len(q))]:"),
    "the last prompt is left out": (ATTEND, "for start, end in pairwise(query_start_loc.tolist()):", "for start, end in pairwise(query_start_loc.tolist()[:-1]):"),
    # the attention module
    "keys before queries": (ATTENTION, SPLIT, "k, q, v = heads.split([self.num_kv_heads, self.num_heads, self.num_kv_heads], dim=1)"),
    "values before keys": (ATTENTION, SPLIT, SPLIT.replace("q, k, v =", "q, v, k =")),
    "norm after the rotation": (
        ATTENTION,
        "        if self.q_norm is not None:\n            q, k = self.q_norm(q), self.k_norm(k)\n        q, k = self.rotary(positions, q), self.rotary(positions, k)\n",
        "        q, k = self.rotary(positions, q), self.rotary(positions, k)\n        if self.q_norm is not None:\n            q, k = self.q_norm(q), self.k_norm(k)\n",
    ),
    "no norm": (ATTENTION, QK_NORM, "pass"),
    "one norm for both": (ATTENTION, QK_NORM, "q, k = self.q_norm(q), self.q_norm(k)"),
    "the norms exchanged": (ATTENTION, QK_NORM, "q, k = self.k_norm(q), self.q_norm(k)"),
    "values are normalized": (ATTENTION, QK_NORM, "q, k, v = self.q_norm(q), self.k_norm(k), self.k_norm(v)"),
    "only queries are turned": (ATTENTION, QK_TURN, "q = self.rotary(positions, q)"),
    "values are turned": (ATTENTION, QK_TURN, "q, k, v = (self.rotary(positions, y) for y in (q, k, v))"),
    "no output projection": (ATTENTION, JOIN, "return attend(q, k, v).flatten(1)"),
    "the heads side by side, tokens last": (ATTENTION, JOIN, "return self.o_proj(attend(q, k, v).transpose(0, 1).reshape(len(x), -1))"),
    "positions from the rows": (ATTENTION, QK_TURN, "positions = torch.arange(len(x))\n        " + QK_TURN),
    # SwiGLU
    "gate and up exchanged": (MLP, CHUNK, CHUNK.replace("gate, up =", "up, gate =")),
    "gate and up in turns": (MLP, CHUNK, "gate, up = self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)"),
    "gelu": (MLP, SWIGLU, "return self.down_proj(F.gelu(gate) * up)"),
    "silu of the product": (MLP, SWIGLU, "return self.down_proj(F.silu(gate * up))"),
    "sigmoid": (MLP, SWIGLU, "return self.down_proj(F.sigmoid(gate) * up)"),
    # the layer
    "residual taken after the norm": (LAYER, FIRST, "x = residual = self.input_layernorm.add_and_norm(x, residual)[0]"),
    "the stream's residual is normalized in the middle": (LAYER, SECOND, "x = residual = self.post_attention_layernorm.add_and_norm(x, residual)[0]"),
    "the norms of a layer exchanged": (
        LAYER,
        f"{FIRST}\n        {ATTENDED}\n        {SECOND}",
        "x, residual = self.post_attention_layernorm.add_and_norm(x, residual)\n"
        "        x = self.self_attn(x, positions, attend)\n"
        "        x, residual = self.input_layernorm.add_and_norm(x, residual)",
    ),
    "norm after the block": (LAYER, f"{FIRST}\n        {ATTENDED}", "x = self.input_layernorm(self.self_attn(x, positions, attend))"),
    "attention is not added": (LAYER, SECOND, "x = self.post_attention_layernorm(x)"),
    "added twice": (LAYER, RETURN, "return residual + self.mlp(x), residual"),
    "the MLP is left out of the pair": (LAYER, RETURN, "self.mlp(x)\n        return x, residual"),
    "the layer's pair the other way round": (LAYER, RETURN, "return residual, self.mlp(x)"),
    # the whole
    "the stream begins twice": (MODEL, EMBED, "x = residual = self.embed_tokens(input_ids)"),
    "layers beside one another": (MODEL, LOOP, "x, residual = layer(x, None, positions, attend)"),
    "every layer gets the first attend": (MODEL, LOOP, "x, residual = layer(x, residual, positions, attends[0])"),
    "backwards through the layers": (MODEL, "for layer, attend in zip(self.layers, attends, strict=True):", "for layer, attend in zip(reversed(self.layers), reversed(attends), strict=True):"),
    "the last MLP is not added": (MODEL, LAST, "return self.norm(residual)"),
    "no last norm": (MODEL, LAST, "return x + residual"),
    "the head is not tied": (MODEL, TIE, "pass"),
    "the head is a copy": (MODEL, TIE, "self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight.data.clone())"),
    "always tied": (MODEL, "if shape.tie_word_embeddings:", "if True:"),
    "a head with a bias": (MODEL, HEAD, HEAD.replace(", bias=False", "")),
    "the norm a second time": (MODEL, "return self.lm_head(hidden)", "return self.lm_head(self.model.norm(hidden))"),
    # the weights
    "one file only": (READ, FILES, 'for file in sorted(folder.glob("*.safetensors"))[:1]:'),
    "the index is read, too": (READ, FILES, 'for file in sorted(folder.glob("*safetensors*")):'),
    "a fixed name": (READ, FILES, 'for file in [folder / "model.safetensors"]:'),
    "a square weight transposed": (LOAD, COPY, "view.copy_(tensor.t() if tensor.ndim == 2 and len(set(tensor.shape)) == 1 else tensor)"),
    "what is left over is ignored": (LOAD, LEFT_OVER, "if name not in places:\n            continue\n"),
    "what is left over is a KeyError": (LOAD, LEFT_OVER, "pass\n"),
    "what is missing stays random": (LOAD, MISSING, ""),
    "any shape that can be stretched": (LOAD, WRONG_SHAPE, ""),
    "only the rows are compared": (LOAD, "if view.shape != tensor.shape:", "if view.shape[0] != tensor.shape[0]:"),
    "assigned in the dictionary": (LOAD, COPY, "places[name] = tensor\n        del places[name]"),
    "the number of numbers is enough": (LOAD, "if view.shape != tensor.shape:", "if view.numel() != tensor.numel():"),
    "a message without the name": (LOAD, "raise ValueError(f\"The checkpoint lacks {', '.join(places)}.\")", 'raise ValueError("The checkpoint lacks a tensor.")'),
    "a tied head that is left over": (LOAD, SKIP, "if False:"),
    "a tied head that overwrites the embedding": (
        LOAD,
        SKIP + "\n            continue\n",
        'if name == "lm_head.weight":\n            name = "model.embed_tokens.weight" if is_tied else name\n',
    ),
    "an untied head is skipped": (LOAD, SKIP, 'if name == "lm_head.weight":'),
    "parameters are replaced": (LOAD, COPY, "places[name] = tensor\n        places.pop(name)"),
    # in the engine
    "forward raises": (ENGINE, "return self.language_model(input_ids, positions, attends)", "return self.language_model(input_ids, attends)"),
    "forward is not written": (ENGINE, "return self.language_model(input_ids, positions, attends)", 'raise NotImplementedError("write this")'),
    "logits of the wrong shape": (ENGINE, "return self.language_model.compute_logits(hidden)", "return self.language_model.compute_logits(hidden)[0]"),
    "one's own attention in the engine": (
        ENGINE, ATTENDS, "        attends = [lambda q, k, v: causal_attention(q, k, v, metadata.query_start_loc)] * len(kv_caches)\n",
    ),
    "a lambda that sees the last layer": (
        ENGINE, ATTENDS, "        attends = []\n        for backend, kv_cache in zip(self.backends, kv_caches):\n"
        "            attends.append(lambda q, k, v: backend(q, k, v, kv_cache, metadata))\n",
    ),
    "the first layer's cache for all": (ENGINE, "partial(backend, kv_cache=kv_cache, metadata=metadata)", "partial(backend, kv_cache=kv_caches[0], metadata=metadata)"),
    "the engine's positions are not used": (ENGINE, "return self.language_model(input_ids, positions, attends)", "return self.language_model(input_ids, torch.arange(len(input_ids), device=input_ids.device), attends)"),
}  # fmt: skip
"""What is wrong: the check that must be the first to fail, the passage of the answer, and what stands there instead."""

SAYS = {
    "eps outside the root": "eps is added: to the mean, inside the root",
    "the sum for the mean": "you divide by the root of the sum",
    "one mean for all rows": "one for each row",
    "layer norm": "an RMSNorm does not take off",
    "norm in half precision": "the precision of the norm: float32",
    "float32 comes out": "dtype of RMSNorm(x): torch.float16",
    "the residual is the norm": "The residual is taken before the norm",
    "x alone is normalized": "not x alone",
    "interleaved pairs, put back in turns": "not with its neighbour",
    "turned backwards": "You turn backwards",
    "positions off by one": "they begin at 0",
    "positions off by one when they are looked up": "they are off by one",
    "the row for the position": "each row has its own",
    "the exponent without its 2": "it falls by 2 / rotary_dim",
    "angles in half precision": "301 does not exist in bfloat16",
    "the rest is zero": "they stay",
    "half precision becomes float32": "return what x has",
    "KV heads tiled": "they do not take turns",
    "the next token is seen": "a token sees the next one",
    "a token does not see itself": "a token does not see itself",
    "everything is seen": "must not see what comes after it",
    "the mask is 0": "-inf is",
    "the mask comes after the softmax": "before the softmax",
    "softmax over the queries": "over all keys add up to 1",
    "no scale": "and yours are not",
    "the scale of all heads": "the width of one head, not of all",
    "divided by the width": "not by 1 / head_dim",
    "prompts see one another": "one prompt must not see the other",
    "values before keys": "keys come before values",
    "norm after the rotation": "q_norm comes before the rotation",
    "no norm": "q_norm: it is missing",
    "one norm for both": "k has its own norm, k_norm",
    "values are normalized": "values are not normalized",
    "only queries are turned": "keys are not rotated",
    "values are turned": "values are not rotated",
    "no output projection": "o_proj: it is missing",
    "the heads side by side, tokens last": "how the heads of a token are joined",
    "gate and up exchanged": "which half is the gate: the first",
    "gate and up in turns": "not in turns",
    "gelu": "not gelu",
    "silu of the product": "on the gate alone, before the product",
    "residual taken after the norm": "it is the stream before the norm",
    "the norms of a layer exchanged": "input_layernorm comes first",
    "added twice": "the next layer adds it to the stream",
    "the layer's pair the other way round": "what the MLP adds",
    "every layer gets the first attend": "each layer has its own",
    "the last MLP is not added": "x of the last layer is not added yet",
    "no last norm": "the last norm is missing",
    "the head is not tied": "the very same Parameter",
    "the head is a copy": "not a copy",
    "a square weight transposed": "the orientation",
    "what is left over is ignored": "is left over: the model has no place for it",
    "what is missing stays random": "is missing",
    "any shape that can be stretched": "which is not that of its place",
    "the index is read, too": "ends in .safetensors",
    "only the rows are compared": "which is not that of its place",
    "assigned in the dictionary": "the parameter is unchanged",
    "what is left over is a KeyError": "raise a ValueError",
    "an untied head is skipped": "this model is not tied",
    "forward raises": "positional argument",
    "forward is not written": "write this",
    "the engine's positions are not used": "in a decode step they do not start at 0",
    "a message without the name": "in the message",
    "a tied head that is left over": "lm_head.weight",
    "one's own attention in the engine": "come from the cache",
    "a lambda that sees the last layer": "each layer has its own backend and its own cache",
    "the first layer's cache for all": "each layer has its own backend and its own cache",
}
"""Words of the message that name the trouble."""

ALSO_RIGHT = {
    "rsqrt, the weight in the dtype of x": [(SCALED, "return (x32 * torch.rsqrt(x32.square().mean(-1, True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)")],
    "torch's own norm": [
        ("        x32 = x.float()\n        " + ROOT + "\n        " + SCALED, "        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)"),
    ],
    "rotation in the dtype of x": [
        (TABLES, "cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)"),
        ("x[..., : self.rotary_dim].float(), x[...", "x[..., : self.rotary_dim], x[..."),
    ],
    "rotation with complex numbers": [
        (HALVES + "\n        " + TURN,
         HALVES + "\n        turned = torch.complex(a, b) * torch.complex(cos, sin)\n        turned = torch.cat((turned.real, turned.imag), dim=-1)"),
    ],
    "rotate_half, as in transformers": [
        (TURN, "cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)\n        turned = turned * cos + torch.cat((-b, a), dim=-1) * sin"),
        (ANGLES, "return positions[:, None] / base ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim)[None]"),
    ],
    "torch's own attention": [
        (f"        {SCORES}\n        {FUTURE}\n        {WEIGHTS}\n" + '        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[start:end]))',
         "        parts = (x[start:end].transpose(0, 1) for x in (q, k, v))\n"
         "        outputs.append(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1))"),
    ],
    "one mask for all prompts": [
        ("for start, end in pairwise(query_start_loc.tolist()):", "for start, end in [(0, len(q))]:"),
        (FUTURE, "owner = torch.searchsorted(query_start_loc[1:].long(), torch.arange(len(q)), right=True)\n"
                 "        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1) | (owner[:, None] != owner[None])"),
    ],
    "rows of the matrix by hand": [
        ("heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)",
         "rows = self.qkv_proj(x)\n        n, m = self.num_heads * self.head_dim, (self.num_heads + self.num_kv_heads) * self.head_dim\n"
         "        q, k, v = (part.reshape(len(x), -1, self.head_dim) for part in (rows[:, :n], rows[:, n:m], rows[:, m:]))"),
        (SPLIT, "pass"),
    ],
    "the layer without add_and_norm": [
        (FIRST, "residual = x if residual is None else x + residual\n        x = self.input_layernorm(residual)"),
        (SECOND, "residual = residual + x\n        x = self.post_attention_layernorm(residual)"),
    ],
    "a head of functions": [("return self.lm_head(hidden)", "return hidden @ self.lm_head.weight.mT"), (LAST, "return self.norm(x + residual)")],
    "places ticked off": [
        ("view = places.pop(name)", "view = places[name]\n        found.add(name)"),
        ("places = find_places(model)", "places, found = find_places(model), set()"),
        (MISSING, "    for name in places:\n        if name not in found:\n            raise ValueError(name)\n"),
    ],
    "a function that makes functions": [
        (ATTENDS, "        def bind(i):\n            return lambda q, k, v: self.backends[i](q, k, v, kv_caches[i], metadata)\n\n"
                  "        attends = [bind(i) for i in range(len(kv_caches))]\n"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def cells():
    return read_cells("02")


@pytest.fixture(autouse=True)
def _registered_as_before():
    """The last check registers a class, as a learner's kernel should keep it; other tests should not."""
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(cells):
    outcome = run_cells([Cell(cell.name, untouched(cell.source), cell.kind) for cell in cells])
    assert outcome.failed == list(outcome.checks) and outcome.broken == {} and outcome.points == 0
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


@pytest.mark.slow
@pytest.mark.parametrize("name", [cell.name for cell in read_cells("02") if cell.kind == "answer"])
def test_one_floor_left_out_fails_its_own_check_first(cells, name):
    number = [cell.name for cell in cells if cell.kind == "answer"].index(name)
    outcome = run_cells(
        [Cell(cell.name, untouched(cell.source), cell.kind) if cell.name == name else cell for cell in cells],
    )
    wanted = [NORM, ROTARY, ATTEND, ATTENTION, MLP, LAYER, MODEL, READ, LOAD, ENGINE][number]
    assert outcome.failed[0] == wanted and outcome.broken == {}
    assert set(outcome.failed) == {wanted, ENGINE} - ({ENGINE} if wanted in (ATTEND, READ) else set())


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solution_fails_where_it_is_wrong_and_hears_why(cells, name):
    first, old, new = WRONG[name]
    outcome = run_cells(without_earlier_checks(cells, edited(cells, old, new)), stop_at_failure=True)
    assert outcome.failed == [first]
    assert outcome.broken == {}
    error = outcome.checks[first]
    if isinstance(error, AssertionError):
        assert "xpected" in str(error) and "ook at" in str(error)
    assert SAYS.get(name, "") in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO_RIGHT)
def test_another_right_solution_passes(cells, name):
    for old, new in ALSO_RIGHT[name]:
        cells = edited(cells, old, new)
    outcome = run_cells(cells)
    assert outcome.failed == [] and outcome.broken == {}


def test_what_is_said_about_a_wrong_solution_is_about_one_that_exists():
    assert set(SAYS) <= set(WRONG)


@pytest.mark.parametrize("mistake", ["eps outside the root", "interleaved pairs", "KV heads tiled"])
def test_a_mistake_on_a_lower_floor_fails_no_check_of_a_floor_above_it(cells, mistake):
    first, old, new = WRONG[mistake]
    outcome = run_cells([cell for cell in edited(cells, old, new) if cell.name != "check-engine"])
    assert outcome.failed == [first]


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_what_the_checks_compare_with_is_what_transformers_computes(family):
    """The parts in `reference.py`, put together as the exercise says, on random weights."""
    import transformers

    shape = situations.make_shape(
        random.Random(family), rotary_dim=8, qk_norm=family == "Qwen3", tie_word_embeddings=family == "Qwen3"
    )
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=64, rms_norm_eps=shape.rms_norm_eps, rope_theta=shape.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}, tie_word_embeddings=shape.tie_word_embeddings,
    )  # fmt: skip
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    weights, expected = make_weights(shape, random.Random(1))
    theirs.load_state_dict(dict(weights), strict=not shape.tie_word_embeddings)
    made = ModelShape.from_config(config.to_dict() | {"architectures": [f"{family}ForCausalLM"]})
    assert made == shape
    model = reference.LanguageModel(shape)
    model.load_state_dict(expected, strict=not shape.tie_word_embeddings)
    input_ids, positions = torch.arange(9), torch.arange(9)
    x, residual = model.model.embed_tokens(input_ids), None
    for layer in model.model.layers:
        x, residual = layer.input_layernorm.add_and_norm(x, residual)
        x = layer.self_attn(x, positions, lambda q, k, v: reference.causal_attention(q, k, v, torch.tensor([0, 9])))
        x, residual = layer.post_attention_layernorm.add_and_norm(x, residual)
        x = layer.mlp(x)
    ours = model.lm_head(model.model.norm.add_and_norm(x, residual)[0])
    assert (ours - theirs(input_ids[None]).logits[0]).abs().max() < 1e-4


def test_partial_rotary_is_read_from_a_config():
    config = {
        "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 99, "rope_theta": 500.0, "partial_rotary_factor": 0.75,
    }  # fmt: skip
    shape = ModelShape.from_config(config, max_position=7)
    assert (shape.head_dim, shape.rotary_dim, shape.num_kv_heads, shape.max_position) == (16, 12, 2, 7)
    assert not shape.qk_norm and not shape.tie_word_embeddings and shape.rope_theta == 500.0


def test_the_first_module_that_goes_wrong_is_named():
    right = {"model.layers.0.self_attn": torch.ones(3, 4), "model.layers.0.mlp": torch.ones(3, 4)}
    assert first_difference(right, right) == "the head"
    assert first_difference(right, right | {"model.layers.0.mlp": torch.zeros(3, 4)}) == "model.layers.0.mlp"
    assert first_difference(right, {}) == "model.layers.0.self_attn"


@pytest.mark.slow
def test_real_logits_that_are_wrong_name_the_language_and_the_module(cells):
    _, old, new = WRONG["KV heads tiled"]
    namespace = {"__name__": "__main__"}
    for cell in edited(cells, old, new):
        if cell.kind != "check":
            exec(cell.source, namespace)
    names = ("LanguageModel", "read_checkpoint", "load_weights", "causal_attention")
    with pytest.raises(AssertionError) as caught:
        lesson_02.check_logits(*(namespace[name] for name in names))
    assert "the one in English" in str(caught.value)
    assert "Look at model.layers.0.self_attn: it is the first module" in str(caught.value)


@pytest.mark.slow
def test_a_sample_of_small_mistakes_is_caught():
    """In a process of its own: torch's threads in this one would be waited for in each fork."""
    command = [sys.executable, "tests/support/mutate_lesson.py", "02", "--every", "13"]
    result = subprocess.run(command, cwd=ROOT_FOLDER, capture_output=True, text=True)
    count = int(re.search(r"of (\d+) mutants caught", result.stdout)[1])
    assert count >= 12 and result.returncode == 0, result.stdout
