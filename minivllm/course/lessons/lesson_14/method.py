"""The check of lesson 14 for a linear method in 8 bits, and the threads that its product runs in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.core.dispatcher import Dispatcher
from torch import Tensor

from minivllm.course.lessons.lesson_02.situations import make_tensor
from minivllm.course.lessons.lesson_14.rounding import SMALLEST, find_scales, hadamard, some_outliers, to_int8
from minivllm.course.lessons.ranks import situation
from minivllm.course.lessons.tensors import Suspect, expect_close
from minivllm.course.observations import expect, rounds
from minivllm.distributed.parallel_state import SingleRank
from minivllm.layers.linear import Linear
from minivllm.layers.linear_methods import LinearMethod

WITHIN = 4e-3
"""How far an output may be from the right one, relative to the largest: a number that lies between two integers may go either way."""
OUTPUTS_PER_PART = 256
"""Enough that a thread is worth its call."""


def largest_block(size: int) -> int:
    """The largest power of two that divides a size: as many numbers a rotation mixes. 64 for 576, and 512 for 1,536."""
    return size & -size


def in_threads(multiply_some: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Run a compiled loop over some outputs in the engine's threads, over all outputs.

    Args:
        multiply_some: Of `x`, `weight`, `first`, `last` and `out`, as in the exercise, with `@njit` before it.

    Returns:
        From `[tokens, inputs]` and `[outputs, inputs]`, int8, to the sums, `[tokens, outputs]` int32.
    """
    from minivllm.kernels.cpu.launch import use_threads_of_torch
    from minivllm.kernels.cpu.native.thread_pool import parallel_for

    compiled = multiply_some if isinstance(multiply_some, Dispatcher) else njit(multiply_some)

    @njit(error_model="numpy")
    def multiply_part(part: Any, num_parts: Any, x: Any, weight: Any, out: Any) -> None:
        compiled(x, weight, len(weight) * part // num_parts, len(weight) * (part + 1) // num_parts, out)

    @njit(error_model="numpy")
    def run(x: Any, weight: Any, out: Any, num_threads: Any, num_parts: Any) -> None:
        parallel_for(num_threads, num_parts, multiply_part, (num_parts, x, weight, out))

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=torch.int32)
        num_parts = max(1, len(weight) // OUTPUTS_PER_PART)
        run(x.contiguous().numpy(), weight.numpy(), out.numpy(), use_threads_of_torch(), num_parts)
        return out

    return multiply


@njit(error_model="numpy")
def _round_inputs(x: Any, block: Any, integers: Any, scales: Any) -> None:
    """The butterflies of a Hadamard transform, in steps of 1, 2, 4, …; then the largest magnitude, and integers."""
    for row in range(x.shape[0]):
        numbers = x[row].copy()
        half = 1
        while half < block:
            for start in range(0, len(numbers), 2 * half):
                for i in range(start, start + half):
                    first, second = numbers[i], numbers[i + half]
                    numbers[i], numbers[i + half] = first + second, first - second
            half *= 2
        largest = np.float32(0)
        for i in range(len(numbers)):
            largest = max(largest, abs(numbers[i]))
        length = np.float32(np.sqrt(block))
        scales[row, 0] = max(largest / length / np.float32(127), np.float32(SMALLEST))
        step = np.float32(1) / (scales[row, 0] * length)
        for i in range(len(numbers)):
            integers[row, i] = np.int8(np.rint(numbers[i] * step))


def round_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate and round in one compiled call: a dozen of torch's calls take longer than the product of one token.

    Args:
        x: `[tokens, inputs]`, float32.

    Returns:
        What `to_int8(rotate(x, largest_block(inputs)), scales)` gives, and the scales, `[tokens, 1]`.
    """
    integers, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1)
    _round_inputs(x.contiguous().numpy(), largest_block(x.shape[1]), integers.numpy(), scales.numpy())
    return integers, scales


def pack(integers: Tensor, scales: Tensor) -> Any:
    """Rotated 8-bit weights in the order in which the engine's compiled layers read them.

    Args:
        integers: `[outputs, inputs]`, int8; inputs are a multiple of 64.
        scales: `[outputs, 1]`.
    """
    from minivllm.kernels.cpu.linear_int8 import INPUT_ZERO, PackedInt8Weight

    packed = PackedInt8Weight(*integers.shape)

    def keep(first: int, rows: Tensor) -> Tensor:
        part = slice(first, first + len(rows))
        packed.scales[part] = (
            scales[part, 0] / largest_block(rows.shape[1]) ** 0.5
        ).numpy()  # the engine's transform is not divided
        packed.corrections[part] = (-INPUT_ZERO * rows.sum(dim=1, dtype=torch.int32)).numpy()
        return rows.contiguous()

    packed._round = keep  # type: ignore[method-assign]
    packed.set_rows(0, integers)
    del packed._round
    return packed


def make_layer(method_cls: Any, weight: Tensor, bias: Tensor | None) -> tuple[Linear, Any]:
    """One of the package's linear layers, computed by a learner's method, with these weights loaded."""
    platform: Any = SimpleNamespace(group=SingleRank(), make_linear_method=method_cls)
    layer = Linear(weight.shape[1], weight.shape[0], bias is not None, platform)
    assert layer.weight is not None
    layer.weight.data.copy_(weight)
    if bias is not None and layer.bias is not None:
        layer.bias.data.copy_(bias)
    layer.process_weights_after_loading()
    return layer, layer.method


def compute(x: Tensor, weight: Tensor, bias: Tensor | None, rotated: tuple[bool, bool] = (True, True)) -> Tensor:
    """What the method computes: both rotated, rounded with a scale for each row, multiplied, and scaled back."""
    x, weight = (_rotate(y) if is_rotated else y for y, is_rotated in zip((x, weight), rotated, strict=True))
    inputs, weights = find_scales(x), find_scales(weight)
    sums = to_int8(x, inputs).double() @ to_int8(weight, weights).double().T
    outputs = (sums * inputs * weights.T).float()
    return outputs if bias is None else outputs + bias


def _rotate(x: Tensor) -> Tensor:
    block = largest_block(x.shape[1])
    return (x.reshape(-1, block) @ hadamard(block)).view(x.shape)


def _output_suspects(x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Suspect]:
    right, plain = compute(x, weight, bias), compute(x, weight, None)
    inputs, weights = find_scales(_rotate(x)), find_scales(_rotate(weight))
    yield (
        compute(x, weight, bias, (False, True)),
        "the inputs: they are rotated once, as the weight is. round_inputs does that; rotated before it, they are what they were",
    )
    yield (
        compute(x, weight, bias, (True, False)),
        "the weight: it is rotated as the inputs are, or the two do not belong together",
    )
    yield compute(x, weight, bias, (False, False)), "the rotation: without it, the outliers leave few steps to all other inputs"
    whole = _rotate(x)
    scale = (whole.abs().amax() / 127).expand(len(x), 1)
    sums = to_int8(whole, scale).float() @ to_int8(_rotate(weight), weights).float().T
    yield (
        sums * scale * weights.T + (0 if bias is None else bias),
        "the scales of the inputs: each row has its own, or a token depends on the others in its batch",
    )
    before = find_scales(weight)
    sums = to_int8(whole, inputs).float() @ to_int8(_rotate(weight), before).float().T
    yield (
        sums * inputs * before.T + (0 if bias is None else bias),
        "process_weights_after_loading: rotate first, then find the scales of what is rotated",
    )
    yield plain / inputs + (0 if bias is None else bias), "the inputs' scales: the sums are in their steps, so multiply by them"
    yield (
        plain / weights.T + (0 if bias is None else bias),
        "the weight's scales: the sums are in their steps, so multiply by them",
    )
    if bias is not None:
        yield plain, "the bias: the method adds it, and at the end: the scales are not its own"
        yield right + bias, "the bias: it is added once"
        yield (
            (plain / (inputs * weights.T) + bias) * inputs * weights.T,
            "the bias: it is added at the end: the scales are not its own",
        )


def check_method(method_cls: Any) -> None:
    """A linear method in the package's own layer: outputs, memory, and rows for an embedding."""
    for rng in rounds("method", 6):
        outputs, inputs, tokens = rng.randint(3, 9), 64 * rng.randint(1, 3), rng.randint(2, 4)
        weight, x = some_outliers(rng, outputs, inputs) * 0.02, some_outliers(rng, tokens, inputs)
        x[rng.randrange(tokens)] *= 300
        bias = 3 * make_tensor(rng, outputs) if rng.random() < 0.6 else None
        said = f"A layer of {inputs} inputs and {outputs} outputs, {'without' if bias is None else 'with'} bias; {tokens} tokens."
        with situation(said):
            layer, method = make_layer(method_cls, weight, bias)
        _check_memory(said, layer, method, weight)
        for place in rng.sample(range(tokens), tokens):
            row = x[place : place + 1]
            with situation(said):
                output = layer(x.clone())
            suspects = [(wrong[place : place + 1], hint) for wrong, hint in _output_suspects(x, weight, bias)]
            expected, got = compute(row, weight, bias), output[place : place + 1] if isinstance(output, Tensor) else output
            what = f"output of token {place}"
            expect_close(said, what, expected, got, "apply: rotate, round, multiply, scale, add the bias", suspects, WITHIN)
        _check_rows(said, rng, method, weight)


def _check_memory(said: str, layer: Linear, method: LinearMethod, weight: Tensor) -> None:
    held = sum(x.untyped_storage().nbytes() for x in _tensors(vars(method)))
    look = "process_weights_after_loading: the layer gives up its weight, layer.weight = None, and the method keeps integers and scales"
    expect(said, "weight of the layer after loading", None, None if layer.weight is None else list(layer.weight.shape), look)
    expect(said, "is the method smaller than half of the float32 weight?", True, 2 * held < weight.nbytes, look)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _check_rows(said: str, rng: random.Random, method: LinearMethod, weight: Tensor) -> None:
    wanted = torch.tensor([rng.randrange(len(weight)) for _ in range(3)])
    said += f" get_rows({wanted.tolist()})."
    rotated = _rotate(weight)
    scales = find_scales(rotated)
    integers = to_int8(rotated, scales).float()
    with situation(said):
        rows = method.get_rows(wanted)
    suspects = [
        ((integers * scales)[wanted], "the rotation: rotated once more, a row is what it was"),
        (_rotate(integers)[wanted], "the scales of these rows"),
        (integers[wanted], "the scales and the rotation: both must be undone"),
    ]
    expect_close(
        said,
        "rows",
        _rotate(integers * scales)[wanted],
        rows,
        "the rows of the integers, their scales, the rotation",
        suspects,
        WITHIN,
    )
