"""Random small models and inputs for the checks of lesson 02, and the comparison of tensors."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.course.lessons.model_shape import ModelShape

Suspect = tuple[Tensor, str]
"""What a common mistake would give, and where to look then."""


def make_shape(rng: random.Random, **fixed: Any) -> ModelShape:
    """A small model of random proportions, in which no two sizes are equal by chance where that would hide a mistake."""
    num_kv_heads = rng.choice((2, 3))
    numbers: dict[str, Any] = {
        "hidden_size": 36,
        "intermediate_size": rng.choice((20, 44)),
        "num_layers": rng.choice((2, 3)),
        "num_heads": 2 * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 8,
        "rotary_dim": rng.choice((4, 8)),
        "rope_theta": rng.choice((100.0, 10000.0)),
        "max_position": 64,
        "vocab_size": 50,
        "rms_norm_eps": 1e-5,
        "qk_norm": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    return ModelShape(**numbers | fixed)


def make_generator(rng: random.Random) -> torch.Generator:
    """Random numbers on the CPU, whatever the default device is."""
    return torch.Generator(device="cpu").manual_seed(rng.getrandbits(32))


def make_tensor(rng: random.Random, *size: int, scale: float = 1.0) -> Tensor:
    """Normal random numbers in float32."""
    return scale * torch.randn(size, generator=make_generator(rng), dtype=torch.float32)


@torch.no_grad()
def randomize(module: nn.Module, rng: random.Random) -> None:
    """Fill all parameters, the weights of norms among them, which would hide mistakes if they were all 1."""
    for parameter in module.parameters():
        spread = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        parameter.copy_(make_tensor(rng, *parameter.shape, scale=spread) + (1.0 if parameter.ndim == 1 else 0.0))


def make_ragged(rng: random.Random, num_prompts: int = 3) -> tuple[list[int], Tensor, Tensor]:
    """Lengths of prompts, one of which has a single token; where each begins in the rows; the position of each row."""
    lengths = [1, *(rng.randint(3, 7) for _ in range(num_prompts - 1))]
    rng.shuffle(lengths)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return lengths, starts, torch.cat([torch.arange(length) for length in lengths])


def expect(said: str, what: str, expected: Any, got: Any, look: str) -> None:
    """Unless the two are equal, raise an AssertionError that says what was expected, what was returned, and where to look."""
    if expected != got:
        raise AssertionError(f"{said}\nExpected {what}: {expected}\nGot {what}: {got}\nLook at {look}.")


def expect_close(
    said: str, what: str, expected: Tensor, got: Any, look: str, suspects: Iterable[Suspect] = (), tolerance: float = 1e-4
) -> None:
    """Unless the two tensors are equal up to rounding, raise an AssertionError as `expect` does.

    If the tensor equals a suspect, the message says so; otherwise it shows the number that differs the most.
    """
    expect(
        said,
        f"type of {what}",
        "Tensor",
        "Tensor" if isinstance(got, Tensor) else type(got).__name__,
        f"what is returned as {what}",
    )
    hint = next((hint for wrong, hint in suspects if is_suspect(wrong, expected, got, tolerance)), None)
    expect(said, f"shape of {what}", list(expected.shape), list(got.shape), hint or f"the shapes on the way to {what}")
    expect(said, f"dtype of {what}", expected.dtype, got.dtype, f"the dtypes on the way to {what}")
    if is_close(expected, got, tolerance):
        return
    look = hint or look
    difference = (expected.detach().double() - got.detach().double()).abs().nan_to_num(nan=torch.inf)
    place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
    where = f"{what}{place}"
    wanted, came = float(expected.detach()[tuple(place)]), float(got.detach()[tuple(place)])
    raise AssertionError(f"{said}\nExpected {where}: {wanted:.5g}\nGot {where}: {came:.5g}\nLook at {look}.")


def is_close(expected: Tensor, got: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two tensors of one shape differ by no more than rounding."""
    limit = tolerance * max(1.0, float(expected.detach().abs().nan_to_num(nan=0.0).max()))
    one, other = (x.detach().double().nan_to_num(nan=1e30) for x in (expected, got))
    return bool(((one - other).abs() <= limit).all())


def is_suspect(wrong: Tensor, expected: Tensor, got: Tensor, tolerance: float) -> bool:
    """Whether a result is what a mistake gives, and not what is right."""
    if wrong.shape != got.shape or not is_close(wrong, got, tolerance):
        return False
    return wrong.shape != expected.shape or not is_close(wrong, expected, tolerance)


class Spy(nn.Module):
    """A stand-in for a module: remembers its calls, and returns a seeded random linear map of its input."""

    def __init__(self, size: int, rng: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(make_tensor(rng, size, size, scale=size**-0.5), requires_grad=False)
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, *arguments: Any) -> Tensor:
        """A seeded random linear map of the first argument."""
        self.calls.append(arguments)
        return arguments[0] @ self.weight.T
