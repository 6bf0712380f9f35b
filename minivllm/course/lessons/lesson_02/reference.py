"""What the checks compare with: the parts of a Llama-like model, over the definitions in `minivllm/kernels/reference.py`.

Parameters have the names that the exercise gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.course.lessons.model_shape import ModelShape
from minivllm.kernels import reference


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return reference.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream after adding `x`, normalized and as it is."""
        stream = x if residual is None else residual + x
        return self(stream), stream


def angles(rotary_dim: int, base: float, max_position: int) -> Tensor:
    """`[max_position, rotary_dim / 2]`, float32."""
    frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    return torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)


def rotate(positions: Tensor, x: Tensor, table: Tensor) -> Tensor:
    """Rotate the first channels of `[num_tokens, heads, head_dim]` by the angles `table[positions]`."""
    rotary_dim = 2 * table.shape[1]
    rotated, rest = x[..., :rotary_dim].contiguous(), x[..., rotary_dim:]
    rotated, _ = reference.rotary_embedding(positions, rotated, rotated, table.cos(), table.sin())
    return torch.cat((rotated, rest), dim=-1)


class Rotary(nn.Module):
    """Rotary positions."""

    def __init__(self, rotary_dim: int, base: float, max_position: int) -> None:
        super().__init__()
        self.table = angles(rotary_dim, base, max_position)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """Rotate `[num_tokens, heads, head_dim]`."""
        return rotate(positions, x, self.table)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, query_start_loc: Tensor) -> Tensor:
    """Causal attention of several prompts, one after another in the rows."""
    scale = q.shape[-1] ** -0.5
    prompts = [[x[start:end] for x in (q, k, v)] for start, end in pairwise(query_start_loc.tolist())]
    return torch.cat([reference.causal_attention(q, k.transpose(0, 1), v.transpose(0, 1), scale) for q, k, v in prompts])


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: ModelShape, rotary: nn.Module) -> None:
        super().__init__()
        self.heads, self.head_dim = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], shape.head_dim
        self.qkv_proj = nn.Linear(shape.hidden_size, sum(self.heads) * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (Norm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None for _ in range(2))
        self.rotary = rotary

    def forward(self, x: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """`[num_tokens, hidden_size]` to the same shape."""
        q, k, v = self.qkv_proj(x).view(len(x), -1, self.head_dim).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(positions, q), self.rotary(positions, k)
        return self.o_proj(attend(q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden_size]` to the same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def make_layer(shape: ModelShape, rotary: nn.Module) -> nn.ModuleDict:
    """The parts of a decoder layer."""
    norms = [Norm(shape.hidden_size, shape.rms_norm_eps) for _ in range(2)]
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    return nn.ModuleDict(zip(names, (norms[0], Attention(shape, rotary), norms[1], MLP(shape)), strict=True))


class LanguageModel(nn.Module):
    """All parameters of a model, under the names that the exercise gives them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        rotary = Rotary(shape.rotary_dim, shape.rope_theta, shape.max_position)
        embedding, norm = nn.Embedding(shape.vocab_size, shape.hidden_size), Norm(shape.hidden_size, shape.rms_norm_eps)
        layers = nn.ModuleList(make_layer(shape, rotary) for _ in range(shape.num_layers))
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": layers, "norm": norm})
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.lm_head.weight = embedding.weight
