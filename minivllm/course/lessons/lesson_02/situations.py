"""Random small models and inputs for the checks of lesson 02."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.course.lessons.model_shape import ModelShape


def make_shape(rng: random.Random, **fixed: Any) -> ModelShape:
    """A small model of random proportions, in which no two sizes are equal by chance where that would hide a mistake."""
    num_kv_heads = rng.choice((2, 3))
    numbers: dict[str, Any] = {
        "hidden_size": 36, "intermediate_size": rng.choice((20, 44)), "num_layers": rng.choice((2, 3)), "num_heads": 2 * num_kv_heads,
        "num_kv_heads": num_kv_heads, "head_dim": 8, "rotary_dim": rng.choice((4, 8)), "rope_theta": rng.choice((100.0, 10000.0)),
        "max_position": 64, "vocab_size": 50, "rms_norm_eps": 1e-5, "qk_norm": rng.random() < 0.5, "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    return ModelShape(**numbers | fixed)


def make_tensor(rng: random.Random, *size: int, scale: float = 1.0) -> Tensor:
    """Normal random numbers in float32, on the CPU, whatever the default device is."""
    generator = torch.Generator(device="cpu").manual_seed(rng.getrandbits(32))
    return scale * torch.randn(size, generator=generator, dtype=torch.float32)


@torch.no_grad()
def randomize(module: nn.Module, rng: random.Random) -> None:
    """Fill all parameters, the weights of norms among them, which would hide mistakes if they were all 1."""
    for parameter in module.parameters():
        is_norm = parameter.ndim == 1
        values = make_tensor(rng, *parameter.shape, scale=0.3 if is_norm else parameter.shape[-1] ** -0.5)
        parameter.copy_(values + 1 if is_norm else values)


def make_ragged(rng: random.Random, num_prompts: int = 3) -> tuple[list[int], Tensor, Tensor]:
    """Lengths of prompts, one of which has a single token; where each begins in the rows; the position of each row."""
    lengths = [1, *(rng.randint(3, 7) for _ in range(num_prompts - 1))]
    rng.shuffle(lengths)
    return lengths, *lay_out(lengths)


def lay_out(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Prompts in one flat batch: where each begins in the rows, and the end of the last; the position of each row."""
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return starts, torch.cat([torch.arange(length) for length in lengths])


class Spy(nn.Module):
    """A stand-in for a module: remembers its calls, and returns a random linear map of its input."""

    def __init__(self, size: int, rng: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(make_tensor(rng, size, size, scale=size**-0.5), requires_grad=False)
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, *arguments: Any) -> Tensor:
        """A random linear map of the first argument."""
        self.calls.append(arguments)
        return arguments[0] @ self.weight.T


class SpyLayer(Spy):
    """A stand-in for a decoder layer."""

    def forward(self, x: Tensor, residual: Tensor | None, *others: Any) -> Any:
        """A random linear map of the stream, and the stream."""
        stream = x if residual is None else residual + x
        self.calls.append((x, residual, *others))
        return stream @ self.weight.T, stream
