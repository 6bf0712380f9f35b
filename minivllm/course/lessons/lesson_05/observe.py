"""Observes a learner's kernels from outside: random launches, their outputs, and the memory they touched.

See `lesson_04.observe`. Numbers that depend on the order of arithmetic are reported rounded, and only if they are far from where
the rounding changes; which ones are reported does not depend on the learner.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_05 import rows, tiles
from minivllm.course.lessons.lesson_05.engine import KernelOps
from minivllm.kernels.accesses import record_accesses

_ROUNDS = 10
_Observe = Callable[[Any, random.Random], list[Any]]
_MAKERS = rows.MAKERS | tiles.MAKERS


def _report(got: Tensor, expected: Tensor) -> list[float]:
    """The numbers in hundredths of the largest one, rounded, at places where a small error does not change the rounding."""
    largest = expected.abs().max().clamp(min=1e-6)
    scaled = expected * 100 / largest
    safe = ((scaled - scaled.floor()) - 0.5).abs() > 0.2
    return torch.round(got.double() * 100 / largest)[safe].tolist()


def _observe(name: str) -> _Observe:
    def observe(kernel: Any, rng: random.Random) -> list[Any]:
        observations: list[Any] = []
        for number in range(_ROUNDS):
            generator = torch.Generator().manual_seed(rng.getrandbits(32))
            case = _MAKERS[name](rng, generator, (torch.float32, torch.float16)[number % 2])
            with record_accesses() as launches:
                kernel[case.grid](*case.arguments.values(), **case.constants)
            tensors = [key for key, value in case.arguments.items() if isinstance(value, Tensor)]
            reads = {key: launches[-1].num_bytes("load", index) for index, key in enumerate(tensors)}
            much = [key for key, least in case.least.items() if reads[key] > least * case.arguments[key].element_size()]
            left = [_report(case.arguments[key], expected) for key, expected in case.outputs.items()]
            observations.append([left, much, [problem.kind for problem in launches[-1].problems()]])
        return observations

    return observe


def _observe_engine(kernels: Any, rng: random.Random) -> list[Any]:
    """The kernels as the layers of the engine call them."""
    observations: list[Any] = []
    ops = KernelOps(*kernels)
    for _ in range(_ROUNDS):
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        tokens, size = rng.randint(1, 4), rng.randint(2, 40)
        x, residual, gate = (torch.randn(tokens, width, generator=generator) for width in (size, size, 2 * size))
        weight = torch.randn(size, generator=generator)
        total = x.double() + residual.double()
        norm = total * (total.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        first, second = gate.double().chunk(2, dim=1)
        got = [*ops.add_rms_norm(x, residual, weight, 1e-5), ops.silu_and_mul(gate)]
        wanted = [norm, total, torch.nn.functional.silu(first) * second]
        observations.append([_report(mine, exact) for mine, exact in zip(got, wanted, strict=True)])
    return observations


OBSERVERS: Mapping[str, tuple[str, _Observe]] = {
    "check-add": ("add", _observe("add")),
    "check-scale": ("scale_rows", _observe("scale_rows")),
    "check-reduce": ("max_and_sum", _observe("max_and_sum")),
    "check-softmax": ("softmax", _observe("softmax")),
    "check-silu": ("silu_and_mul", _observe("silu_and_mul")),
    "check-norm": ("add_rms_norm", _observe("add_rms_norm")),
    "check-gather": ("gather", _observe("gather")),
    "check-transpose": ("transpose", _observe("transpose")),
    "check-matmul": ("matmul", _observe("matmul")),
    "check-running": ("running_max_and_sum", _observe("running_max_and_sum")),
    "check-engine": ("KERNELS", _observe_engine),
}
"""For each check, the kernel it tests, and how to observe it."""
