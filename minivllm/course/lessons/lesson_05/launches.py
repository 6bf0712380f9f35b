"""How the checks of lesson 05 launch a learner's kernel and report on it.

Every launch is interpreted and recorded, on a GPU too, so that out-of-bounds reads and writes are found and do no harm.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minivllm.course.lessons.paged_kernels import function_of
from minivllm.course.observations import fail
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.launches import Launch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
"""The largest error allowed, as a share of the largest number in the result."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> Launch:
    """Launch a kernel once.

    Raises:
        NotImplementedError: The kernel is not written yet.
        AssertionError: It raises something else, or touches forbidden memory.
    """
    name = getattr(kernel, "__name__", str(kernel))
    assert hasattr(kernel, "run"), (
        f"{name} is a {type(kernel).__name__}, not a kernel: keep the line `@triton.jit` above `def {name}`."
    )
    call = describe_call(kernel, grid, *args, **constants)
    with explained(call, kernel), record_accesses() as launches:
        kernel[grid](*args, **constants)
    recorded = launches[-1]
    refuse_problems(call, kernel, recorded)
    return recorded


def refuse_problems(call: str, kernel: Any, recorded: Launch) -> None:
    """Raise an AssertionError about the first access outside of a tensor, or conflict of programs, if a launch has any."""
    problems = recorded.problems()
    if problems:
        first = problems[0]
        look = {
            "outside": "the mask: elements beyond the end must be masked off, in loads and in stores; and at the addresses",
            "race": "the places that a program writes: no other program may write them",
            "order": "what a program reads: no other program may write it",
        }[first.kind]
        fail(
            f"{call}\n{first.sentence}.\nLook at {look}. `show_accesses({getattr(kernel, '__name__', 'kernel')}[grid], ...)` draws it."
        )


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


def make_output(shape: Sequence[int], dtype: torch.dtype, gap: int = 0) -> Tensor:
    """A tensor to be written, full of NaN; its rows lie `gap` numbers apart."""
    return torch.full((*shape[:-1], shape[-1] + gap), torch.nan, dtype=dtype)[..., : shape[-1]]


def make_input(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, *, scale: float = 1.0, gap: int = 0
) -> Tensor:
    """Random numbers; rows lie `gap` numbers apart, with NaN between them."""
    x = make_output(shape, dtype, gap)
    x.copy_(scale * torch.randn(*shape, generator=generator))
    return x


def find_stored(recorded: Launch, number: int) -> set[int]:
    """The elements of a tensor that the launch has stored, counted in row-major order."""
    stores = [access.elements for access in recorded.accesses if access.tensor == number and access.kind != "load"]
    return {element for elements in stores for element in elements.tolist()}


def compare(call: str, name: str, got: Tensor, expected: Tensor, look: str, stored: set[int]) -> None:
    """Raise an AssertionError about the first number that differs from the exact one, which is given in double precision.

    Args:
        call: The launch in words.
        name: The output's.
        got, expected: Its actual and expected contents.
        look: Where to look.
        stored: The elements that were written.
    """
    wanted = expected.double()
    error = (got.double() - wanted).abs().nan_to_num(nan=torch.inf)
    largest = float(wanted[wanted.isfinite()].abs().max()) if wanted.isfinite().any() else 1.0
    bad = (error > TOLERANCE.get(got.dtype, 0.0) * max(largest, 1e-6)).nonzero()
    if not len(bad):
        return
    place = tuple(bad[0].tolist())
    index = f"{name}[{', '.join(map(str, place))}]"
    number = int(torch.arange(got.numel()).view(got.shape)[place])
    seen = f"{float(got[place]):.6g}"
    if number not in stored:
        seen += ", as before the launch: it was not written"
    elif seen == "nan":
        seen += (
            ", which the kernel stored. Did it compute with elements that were masked off without an `other`, or with infinity?"
        )
    fail(
        f"{call}\nExpected {index}: {float(wanted[place]):.6g}\nGot {index}: {seen}\n{len(bad)} of {got.numel()} numbers are wrong. Look at {look}."
    )


def check_reads(call: str, recorded: Launch, least: dict[int, int]) -> None:
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
            fail(
                f"{call}\nExpected reads of {tensor.name}: {must} bytes\nGot reads of {tensor.name}: {read} bytes, {much}\n"
                f"Look at the loads: load a number once, keep it, and use it as often as you like; and load none you do not need. Memory is far away."
            )


def check_unchanged(call: str, names: Sequence[str], tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Raise an AssertionError if an input was written to."""
    for name, tensor, old in zip(names, tensors, before, strict=True):
        if not torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0)):
            raise AssertionError(
                f"{call}\nThe launch changed {name}, which must only be read. Look at the pointers of your stores."
            )
