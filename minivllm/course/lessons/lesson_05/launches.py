"""How the checks of lesson 05 launch a learner's kernel and report on it.

Every launch is interpreted and recorded, on a GPU too, so that out-of-bounds reads and writes are found and do no harm.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.paged_kernels import function_of
from minivllm.course.lessons.tensors import see_tensor
from minivllm.course.observations import fail, require, rounds, see
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.launches import Launch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
"""The largest error allowed, as a share of the largest number in the result."""


def cases(name: str, count: int) -> Iterator[Case]:
    """Random situations for a kernel, in float32 and float16 by turns."""
    for number, rng in enumerate(rounds(name, count)):
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        yield Case(rng, generator, (torch.float32, torch.float16)[number % 2])


class Case:
    """A situation in which a kernel is launched.

    Args:
        rng, generator: Its random numbers.
        dtype: Of its tensors.
    """

    def __init__(self, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> None:
        self.rng, self.generator, self.dtype = rng, generator, dtype

    def output(self, *shape: int, dtype: torch.dtype | None = None, gap: int = 0) -> Tensor:
        """A tensor to be written, full of NaN; its rows lie `gap` numbers apart."""
        return torch.full((*shape[:-1], shape[-1] + gap), torch.nan, dtype=dtype or self.dtype)[..., : shape[-1]]

    def input(self, *shape: int, scale: float = 1.0, gap: int = 0) -> Tensor:
        """Random numbers; rows lie `gap` numbers apart, with NaN between them."""
        return self.output(*shape, gap=gap).copy_(scale * torch.randn(*shape, generator=self.generator))

    def run(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        outputs: Mapping[Tensor, tuple[Tensor, str]],
        least: Mapping[Tensor, int] | None = None,
        **constants: int,
    ) -> None:
        """Launch a kernel and compare.

        Args:
            kernel, grid, args, constants: The launch.
            outputs: By tensor, what it must hold afterwards, in double precision, and where to look if it does not.
            least: How many elements of a tensor must be read, over all programs; for others, each of an input once, and none of an output.
        """
        call = describe_call(kernel, grid, *args, **constants)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        recorded = launch(call, kernel, grid, *args, **constants)
        numbers = {tensor: number for number, tensor in enumerate(tensors)}
        for tensor, number in numbers.items():
            same = tensor in outputs or torch.equal(tensor.nan_to_num(7.0), before[number].nan_to_num(7.0))
            changed = f"{call}\nThe launch changed {recorded.tensors[number].name}, which must only be read"
            require(True, same, f"{changed}. Look at the pointers of your stores.")
        for tensor, (expected, look) in outputs.items():
            compare_output(call, recorded, numbers[tensor], tensor, expected, look)
        reads = {tensor: 0 if tensor in outputs else tensor.numel() for tensor in tensors} | dict(least or {})
        see([recorded.num_bytes("load", numbers[tensor]) > count * tensor.element_size() for tensor, count in reads.items()])
        check_reads(call, recorded, {numbers[tensor]: count for tensor, count in reads.items()})


def launch(call: str, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> Launch:
    """Launch a kernel once.

    Raises:
        NotImplementedError: The kernel is not written yet.
        AssertionError: It raises something else, or touches forbidden memory.
    """
    if not hasattr(kernel, "run"):
        name = getattr(kernel, "__name__", str(kernel))
        fail(f"{name} is a {type(kernel).__name__}, not a kernel: keep the line `@triton.jit` above `def {name}`.")
    with explained(call, kernel), record_accesses() as launches:
        kernel[grid](*args, **constants)
    see([problem.kind for problem in launches[-1].problems()])
    refuse_problems(call, kernel, launches[-1])
    return launches[-1]


def refuse_problems(call: str, kernel: Any, recorded: Launch) -> None:
    """Raise an AssertionError about the first access outside of a tensor, or conflict of programs, if a launch has any."""
    look = {
        "outside": "the mask: elements beyond the end must be masked off, in loads and in stores; and at the addresses",
        "race": "the places that a program writes: no other program may write them",
        "order": "what a program reads: no other program may write it",
    }
    for first in recorded.problems():
        name = getattr(kernel, "__name__", "kernel")
        fail(f"{call}\n{first.sentence}.\nLook at {look[first.kind]}. `show_accesses({name}[grid], ...)` draws it.")


def describe_call(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> str:
    """A launch in words: tensors by shape and dtype, numbers as they are."""
    said = [_describe(value) for value in args] + [f"{name}={value}" for name, value in constants.items()]
    return f"{getattr(kernel, '__name__', 'kernel')}[{grid}]({', '.join(said)})"


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value:g}" if isinstance(value, float) else str(value)
    shape = ", ".join(map(str, value.shape))
    apart = "" if value.is_contiguous() else ", rows apart"
    return f"<{str(value.dtype).removeprefix('torch.')} [{shape}]{apart}>"


@contextmanager
def explained(call: str, kernel: Any) -> Iterator[None]:
    """Errors of the kernel itself, with its line, not those of the interpreter that ran it."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, NotImplementedError) and str(cause) == "write this":
            raise cause from None
        file = function_of(kernel).__code__.co_filename
        lines = [frame.line for frame in traceback.extract_tb(cause.__traceback__) if frame.line and frame.filename == file]
        where = f" in the line `{lines[-1]}`" if lines else ""
        fail(f"{call}\nThe kernel raised {type(cause).__name__}{where}: {cause}")


def compare(
    call: str, got: Tensor, expected: Tensor, tolerance: float, name: Callable[[list[int]], str], remark: Callable[[list[int]], str], look: str
) -> None:  # fmt: skip
    """Raise an AssertionError about the first number that differs from the exact one.

    Args:
        call: The launch in words.
        got, expected: Actual and expected contents.
        tolerance: The largest error, as a share of the largest number expected.
        name, remark: Of a place, what is there, and what there is to say about the number that came.
        look: Where to look.
    """
    wanted, mine = expected.double(), got.double()
    largest = max([1e-3, *wanted[wanted.isfinite()].abs().tolist()])
    see_tensor(wanted / largest, mine / largest, tolerance)
    difference = (mine - wanted).abs().nan_to_num(nan=torch.inf)
    difference[mine == wanted] = 0  # infinity minus infinity is NaN
    bad = (difference > tolerance * largest).nonzero().tolist()
    for place in bad[:1]:
        what, right, came = name(place), float(wanted[tuple(place)]), float(mine[tuple(place)])
        shown = f"Expected {what}: {right:.6g}\nGot {what}: {came:.6g}{remark(place)}"
        fail(f"{call}\n{shown}\n{len(bad)} of {got.numel()} numbers are wrong. Look at {look}.")


def compare_output(call: str, recorded: Launch, number: int, got: Tensor, expected: Tensor, look: str) -> None:
    """As `compare`, for the launch's tensor of this number: whether a wrong number was stored at all is in what was recorded."""

    def remark(place: list[int]) -> str:
        stores = [access.elements for access in recorded.accesses if access.tensor == number and access.kind != "load"]
        element = int(torch.arange(got.numel()).view(got.shape)[tuple(place)])  # counted in row-major order
        if not any(element in elements for elements in stores):
            return ", as before the launch: it was not written"
        return _STORED_NAN if got[tuple(place)].isnan() else ""

    name = recorded.tensors[number].name
    compare(call, got, expected, TOLERANCE.get(got.dtype, 0.0), lambda place: f"{name}{place}", remark, look)


_STORED_NAN = ", which the kernel stored. Did it compute with elements that were masked off without an `other`, or with infinity?"
_READ_ONCE = (
    "the loads: load a number once, keep it, and use it as often as you like; and load none you do not need: memory is far"
)


def check_reads(call: str, recorded: Launch, least: Mapping[int, int]) -> None:
    """Raise an AssertionError if a launch reads more of a tensor than necessary.

    Args:
        call: The launch in words.
        recorded: What it did.
        least: By the tensor's number, how many of its elements must be read, over all programs.
    """
    for number, elements in least.items():
        tensor = recorded.tensors[number]
        read, must = recorded.num_bytes("load", number), elements * tensor.item_size
        if read > must:
            much = f"{read / must:.3g} times as much as it must" if must else "and none of it is needed"
            came = f"Expected reads of {tensor.name}: {must} bytes\nGot reads of {tensor.name}: {read} bytes, {much}"
            fail(f"{call}\n{came}\nLook at {_READ_ONCE}.")
