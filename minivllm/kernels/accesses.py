"""Which program of a Triton kernel reads and writes which memory, and two kinds of mistakes that this shows.

    with record_accesses() as launches:
        kernel[(4,)](x, y, out, 100, BLOCK=32)
    print(launches[0].problems())

Triton's interpreter runs the programs one by one in NumPy. Here each of its loads and stores is noted down on the way. A tensor argument becomes a
made-up address, so far from all others that whatever the kernel adds to it, one can tell which tensor was meant. An access outside the tensor is noted
and not made: a load gives NaN (0 for whole numbers), a store is dropped. Elements that a mask leaves out without an `other` are undefined, and NaN here too.

On a GPU, kernels that are launched while this records are interpreted too, on copies in host memory.

What it does not know: locks and flags (programs that wait for one another look like a conflict), whether two programs write the same number (it names
that, too), pointers that are cast to another width or come out of memory, and the order of the threads within a program.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from torch import Tensor

from minivllm.errors import KernelError

Program = tuple[int, int, int]

_TAG_SHIFT = 52
"""The number of a tensor argument, counted from 1, stands in an address above this bit: real addresses are smaller."""
_MIDDLE = 1 << (_TAG_SHIFT - 1)
_LOWEST, _HIGHEST = 1 << 12, 1 << 47
"""Real addresses of programs lie in between."""
_BFLOAT16_NAN = 0x7FC0
_MOST_NAMED = 3
"""Places that a sentence names."""


@dataclass(frozen=True)
class TensorArgument:
    """A tensor that a kernel was given.

    Attributes:
        name: The kernel's parameter.
        shape, stride: The tensor's; the stride counts elements.
        item_size: Bytes of an element.
        address: Of its first element, in host memory.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    item_size: int
    address: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    def find_elements(self, byte_offsets: np.ndarray) -> np.ndarray:
        """The elements that begin at these distances from the first one, counted in row-major order; -1 where none does."""
        offsets, remainder = np.divmod(byte_offsets, self.item_size)
        if self._is_contiguous:
            return np.where((offsets >= 0) & (offsets < self.num_elements) & (remainder == 0), offsets, -1)
        places, numbers = self._places
        if not len(places):
            return np.full(offsets.shape, -1)
        found = np.minimum(np.searchsorted(places, offsets), len(places) - 1)
        return np.where((places[found] == offsets) & (remainder == 0), numbers[found], -1)

    @property
    def _is_contiguous(self) -> bool:
        steps = np.cumprod([1, *self.shape[:0:-1]])[: len(self.shape)][::-1]
        return all(size == 1 or stride == step for size, stride, step in zip(self.shape, self.stride, steps, strict=True))

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the elements lie, in ascending order and counted in elements from the first; and their numbers."""
        places = np.zeros(self.shape, np.int64)
        for dim, (size, stride) in enumerate(zip(self.shape, self.stride, strict=True)):
            places += (stride * np.arange(size)).reshape([-1 if other == dim else 1 for other in range(len(self.shape))])
        numbers = np.argsort(places, axis=None, kind="stable")
        return places.ravel()[numbers], numbers


@dataclass(frozen=True)
class Access:
    """What one load, store or atomic operation of one program did with one tensor. Elements that the mask leaves out are not in it.

    Attributes:
        program: Its `tl.program_id` for the axes 0, 1, 2.
        kind: "load", "store" or "atomic".
        tensor: The number of the tensor among the launch's.
        elements: Those that were touched, counted in row-major order; -1 outside the tensor.
        byte_offsets: Where each of them begins, from the tensor's first element.
        num_masked: Elements that the mask left out.
        place: The file and line of the operation.
    """

    program: Program
    kind: str
    tensor: int
    elements: np.ndarray
    byte_offsets: np.ndarray
    num_masked: int
    place: tuple[str, int]

    @property
    def source(self) -> str:
        """The line of the kernel in which it stands."""
        return linecache.getline(*self.place).strip()


class Problem(NamedTuple):
    """A mistake in a launch.

    Attributes:
        kind: "outside": an access outside the tensor. "race": several programs, or one store several times, write one element, and any of them may come last.
            "order": a program reads what another one writes, and nobody knows which comes first.
        tensor: The number of the tensor among the launch's.
        elements: The elements in question; for "outside", distances from the first element, in elements.
        programs: Who did it.
        sentence: The same in words.
    """

    kind: str
    tensor: int
    elements: tuple[int, ...]
    programs: tuple[Program, ...]
    sentence: str


@dataclass
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: Its name.
        grid: Programs along the axes 0, 1, 2.
        tensors: Its tensor arguments.
        accesses: In the order in which they were made: program after program.
    """

    kernel: str
    grid: Program
    tensors: list[TensorArgument]
    accesses: list[Access] = field(default_factory=list)
    _known: tuple[int, list[Problem]] = field(default=(-1, []), repr=False)

    def num_bytes(self, kind: str, tensor: int | None = None) -> int:
        """Bytes that all programs moved by accesses of this kind. Elements that one access touches several times count once."""
        return sum(
            len(np.unique(access.byte_offsets)) * self.tensors[access.tensor].item_size
            for access in self.accesses
            if access.kind == kind and tensor in (None, access.tensor)
        )

    def problems(self) -> list[Problem]:
        """What is wrong with it: accesses outside the tensors, and places where the order of the programs decides."""
        if self._known[0] != len(self.accesses):
            self._known = (len(self.accesses), [*self._find_outside(), *self._find_conflicts()])
        return self._known[1]

    def _find_outside(self) -> Iterator[Problem]:
        for number, tensor in enumerate(self.tensors):
            for kind, verb in (("load", "reads"), ("store", "writes"), ("atomic", "updates")):
                found = [
                    (access, access.byte_offsets[access.elements < 0])
                    for access in self.accesses
                    if access.tensor == number and access.kind == kind and (access.elements < 0).any()
                ]
                if not found:
                    continue
                programs = tuple(dict.fromkeys(access.program for access, _ in found))
                offsets = np.unique(np.concatenate([outside for _, outside in found])) // tensor.item_size
                sentence = (
                    f"{name_programs(programs, self.grid)} {_conjugate(verb, programs)} outside {tensor.name}, which {_describe(tensor)}: "
                    f"at {_name_offsets(offsets)} (`{found[0][0].source}`)"
                )
                yield Problem("outside", number, tuple(map(int, offsets)), programs, sentence)

    def _find_conflicts(self) -> Iterator[Problem]:
        """Places that several programs touch, of which at least one writes."""
        seen: dict[int, dict[str, set[Program]]] = {}  # by address: programs by kind of access
        twice: dict[int, set[Program]] = {}
        element_at: dict[int, tuple[int, int]] = {}
        suspicious = self._find_suspicious()
        for access in self.accesses if len(suspicious) else ():
            inside = access.elements >= 0
            unique, first, counts = np.unique(self._addresses(access), return_index=True, return_counts=True)
            for index in np.isin(unique, suspicious).nonzero()[0].tolist():
                address = int(unique[index])
                seen.setdefault(address, {}).setdefault(access.kind, set()).add(access.program)
                if access.kind != "load" or address not in element_at:
                    element_at[address] = (access.tensor, int(access.elements[inside][first[index]]))
                if counts[index] > 1 and access.kind == "store":
                    twice.setdefault(address, set()).add(access.program)
        found: dict[tuple[str, int], dict[int, set[Program]]] = {}
        for address, by_kind in seen.items():
            loads, stores, atomics = (by_kind.get(kind, set()) for kind in ("load", "store", "atomic"))
            tensor, element = element_at[address]
            if stores and len(stores | atomics) > 1:
                found.setdefault(("race", tensor), {})[element] = stores | atomics
            elif address in twice:
                found.setdefault(("race", tensor), {})[element] = twice[address]
            elif len(loads | stores | atomics) > 1 and loads:
                found.setdefault(("order", tensor), {})[element] = loads | stores | atomics
        for (kind, number), by_element in sorted(found.items()):
            elements = tuple(sorted(by_element))
            programs = tuple(sorted(set().union(*by_element.values())))
            example = by_element[elements[0]]
            where = f"{self.tensors[number].name}{_index(self.tensors[number], elements[0])}"
            more = f", and {len(elements) - 1} more like it" if len(elements) > 1 else ""
            if kind == "order":
                what = f"One program writes {where}, and another reads it: {name_programs(sorted(example), self.grid)}; which comes first is not known"
            elif len(example) > 1:
                what = f"{name_programs(sorted(example), self.grid)} write {where}: which of them comes last is not known"
            else:
                what = f"{name_programs(sorted(example), self.grid)} writes {where} several times in one store: which of them comes last is not known"
            yield Problem(kind, number, elements, programs, what + more)

    def _addresses(self, access: Access) -> np.ndarray:
        """Where the elements of an access are that lie inside the tensor."""
        return self.tensors[access.tensor].address + access.byte_offsets[access.elements >= 0]

    def _find_suspicious(self) -> np.ndarray:
        """Addresses that somebody writes and several programs touch, or that one store writes several times."""
        programs = {program: number for number, program in enumerate(dict.fromkeys(access.program for access in self.accesses))}
        places, owners, written, twice = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
        for access in self.accesses:
            unique, counts = np.unique(self._addresses(access), return_counts=True)
            places.append(unique)
            owners.append(np.full(len(unique), programs[access.program]))
            if access.kind != "load":
                written.append(unique)
                twice.append(unique[counts > 1] if access.kind == "store" else unique[:0])
        place, owner = np.concatenate(places), np.concatenate(owners)
        kept = np.isin(place, np.unique(np.concatenate(written)))
        place, owner = place[kept], owner[kept]
        order = np.argsort(place, kind="stable")
        place, owner = place[order], owner[order]
        starts = np.flatnonzero(np.diff(place, prepend=-1)) if len(place) else np.zeros(0, np.int64)
        if not len(starts):
            return starts
        shared = np.minimum.reduceat(owner, starts) != np.maximum.reduceat(owner, starts)
        return np.union1d(place[starts][shared], np.concatenate(twice))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _describe(tensor: TensorArgument) -> str:
    return (
        f"is [{', '.join(map(str, tensor.shape))}]" if len(tensor.shape) > 1 else f"has {_count(tensor.num_elements, 'element')}"
    )


def _index(tensor: TensorArgument, element: int) -> str:
    """An element as one would write it behind the tensor's name."""
    return f"[{', '.join(map(str, np.unravel_index(element, tensor.shape)))}]" if tensor.shape else ""


def _conjugate(verb: str, programs: Sequence[Program]) -> str:
    return verb if len(programs) == 1 else verb.removesuffix("s")


def name_programs(programs: Sequence[Program], grid: Program) -> str:
    """Programs in words: "Program 3", "Programs (0, 1) and (0, 2)", "Programs 0, 1, 2 and 5 more"."""
    num_axes = max((axis + 1 for axis in range(3) if grid[axis] > 1), default=1)
    names = [str(program[0]) if num_axes == 1 else str(program[:num_axes]) for program in programs]
    return ("Program " if len(names) == 1 else "Programs ") + _join(names)


def _name_offsets(offsets: np.ndarray) -> str:
    return f"offset {offsets[0]}" if len(offsets) == 1 else f"offsets {_join([str(offset) for offset in offsets])}"


def _join(names: list[str]) -> str:
    if len(names) > _MOST_NAMED + 1:
        return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@contextmanager
def record_accesses() -> Iterator[list[Launch]]:
    """Interpret all Triton kernels that are launched meanwhile, and note down what they do. Gives the list of launches, which fills up.

    Raises:
        KernelError: Triton is not installed, or this records already.
    """
    try:
        from triton.runtime import interpreter, jit
    except ImportError:
        raise KernelError("To record what a Triton kernel does, Triton must be installed: it exists for Linux only.") from None
    if isinstance(interpreter._implicit_cvt, partial):
        raise KernelError("record_accesses() does not work inside record_accesses().")
    recorder = _Recorder(interpreter)
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    replacements: list[tuple[Any, str, Any]] = [
        (interpreter, "_implicit_cvt", partial(recorder.convert, interpreter._implicit_cvt)),
        (builder, "set_grid_dim", partial(recorder.set_grid, builder.set_grid_dim)),
        (builder, "create_masked_load", partial(recorder.load, builder.create_masked_load)),
        (builder, "create_masked_store", partial(recorder.store, builder.create_masked_store)),
        (builder, "create_atomic_rmw", partial(recorder.update, builder.create_atomic_rmw)),
        (builder, "create_atomic_cas", partial(recorder.compare_and_swap, builder.create_atomic_cas)),
        (executor, "_init_args_hst", _as_method(recorder.begin_launch, executor._init_args_hst)),
        (jit.JITFunction, "run", _as_method(recorder.run_compiled)),
        # So that `x.sum(axis=0)` finds x: compiled functions are no methods of a tensor otherwise.
        (
            jit.JITFunction,
            "__get__",
            lambda function, tensor, owner=None: function if tensor is None else partial(function, tensor),
        ),
        (jit.JITFunction, "__call__", _as_method(recorder.call_compiled)),
    ]
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(patch.object(*replacement, create=True))
        yield recorder.launches


def _as_method(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A plain function, to which a class hands its instance."""
    return lambda instance, *args, **kwargs: function(*first, instance, *args, **kwargs)


class _Recorder:
    """Stands between the interpreter and the memory."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.builder = interpreter.interpreter_builder
        self.folder = str(Path(interpreter.__file__).parents[1])
        """Triton's own."""
        self.launches: list[Launch] = []
        self.arguments: dict[int, int] = {}
        """By `id` of a tensor of the current launch: its number among the launch's tensors."""
        self.kept: list[Any] = []
        """The tensors of all launches: while they are kept, no two of them have one address."""

    # -- launches ----------------------------------------------------------------------------------------------------

    def begin_launch(self, original: Callable[..., Any], executor: Any, args: Any, kwargs: Any) -> Any:
        """Note the tensor arguments, after the interpreter has brought them to the host."""
        args, kwargs = original(executor, args, kwargs)
        launch = Launch(executor.fn.__name__, (0, 0, 0), [])
        self.launches.append(launch)
        self.arguments = {}
        for name, value in [*zip(executor.arg_names, args, strict=False), *kwargs.items()]:
            self._note_argument(name, value)
        return args, kwargs

    def _note_argument(self, name: str, value: Any) -> None:
        """Give a tensor a number; those in a tuple, and that of a descriptor, have names like `parts[0]` and `descriptor.base`."""
        if isinstance(value, tuple):
            for number, part in enumerate(value):
                self._note_argument(f"{name}[{number}]", part)
            return
        if hasattr(value, "block_shape"):
            self._note_argument(f"{name}.base", value.base)
            return
        tensor, tensors = self.interpreter._unwrap_tensor(value), self.launches[-1].tensors
        if isinstance(tensor, Tensor):
            self.arguments[id(value)] = len(tensors)
            self.kept.append(value)
            tensors.append(TensorArgument(name, tuple(tensor.shape), tensor.stride(), tensor.element_size(), tensor.data_ptr()))

    def set_grid(self, original: Callable[..., Any], *grid: int) -> None:
        """Note how many programs there are."""
        original(*grid)
        self.launches[-1].grid = self.builder.grid_dim

    def convert(self, original: Callable[..., Any], value: Any) -> Any:
        """An argument as the kernel sees it: a tensor of the launch gets its made-up address."""
        converted = original(value)
        number = self.arguments.get(id(value))
        if number is not None:
            converted.handle.data = np.array([((number + 1) << _TAG_SHIFT) + _MIDDLE], np.uint64)
        return converted

    def run_compiled(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A launch of a kernel that was defined to be compiled."""
        return self.interpreter.InterpretedFunction(function.fn).run(*args, **kwargs)

    def call_compiled(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of such a function from within a kernel."""
        rewritten = self.interpreter.InterpretedFunction(function.fn).rewrite()
        scope = self.interpreter._patch_lang(function.fn)  # which the interpreter itself would not take back
        try:
            return rewritten(*args, **kwargs)
        finally:
            scope.restore()

    # -- accesses ----------------------------------------------------------------------------------------------------

    def load(self, original: Callable[..., Any], ptrs: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        real, allowed, wanted = self._note("load", ptrs, mask)
        result = original(real, allowed, other, *options, **named)
        has_other = other is not None or wanted.size == 1  # of a single element, the interpreter loses an `other` of 0
        undefined = ~allowed.data & wanted if has_other else ~allowed.data
        if undefined.any():
            kind = result.data.dtype.kind
            is_bfloat16 = str(ptrs.get_element_ty()) == "bf16"
            result.data = np.where(undefined, _BFLOAT16_NAN if is_bfloat16 else np.nan if kind == "f" else 0, result.data).astype(
                result.data.dtype
            )
        return result

    def store(self, original: Callable[..., Any], ptrs: Any, value: Any, mask: Any, *options: Any, **named: Any) -> Any:
        real, allowed, _ = self._note("store", ptrs, mask)
        return original(real, value, allowed, *options, **named)

    def update(self, original: Callable[..., Any], operation: Any, ptr: Any, value: Any, mask: Any, *options: Any) -> Any:
        real, allowed, _ = self._note("atomic", ptr, mask)
        return original(operation, real, value, allowed, *options)

    def compare_and_swap(self, original: Callable[..., Any], ptr: Any, *options: Any) -> Any:
        real, allowed, _ = self._note("atomic", ptr, None)
        if not allowed.data.all():
            raise KernelError("An atomic_cas is outside its tensor, and cannot be left out.")
        return original(real, *options)

    def _note(self, kind: str, ptrs: Any, mask: Any) -> tuple[Any, Any, np.ndarray]:
        """Note an access. Returns the true addresses, the mask of what lies inside the tensors, and the mask as the kernel gave it."""
        addresses = ptrs.data
        wanted = np.ones(addresses.shape, bool) if mask is None else np.broadcast_to(mask.data, addresses.shape).astype(bool)
        launch, program = self.launches[-1], self.builder.grid_idx
        tags = (addresses >> np.uint64(_TAG_SHIFT)).astype(np.int64) - 1
        real, allowed = addresses.copy(), wanted.copy()
        place = _find_place(sys._getframe(2), self.folder)
        for number in np.unique(tags[wanted]).tolist():
            if not 0 <= number < len(launch.tensors):  # the kernel has the address from elsewhere
                unknown = addresses[wanted & (tags == number)]
                if number >= 0 or unknown.min() < _LOWEST or unknown.max() >= _HIGHEST:
                    raise KernelError(f"Program {program} of {launch.kernel} asks for an address that belongs to no tensor.")
                continue
            tensor, here = launch.tensors[number], wanted & (tags == number)
            start = np.uint64(((number + 1) << _TAG_SHIFT) + _MIDDLE)
            byte_offsets = (addresses[here] - start).astype(np.int64)
            elements = tensor.find_elements(byte_offsets)
            real[here] = np.uint64(tensor.address) + byte_offsets.astype(np.uint64)
            allowed[here] = elements >= 0
            num_masked = int(addresses.size - wanted.sum())
            launch.accesses.append(Access(program, kind, number, elements, byte_offsets, num_masked, place))
        handle = self.interpreter.TensorHandle
        return handle(real, ptrs.dtype), handle(allowed, self.interpreter.tl.int1), wanted


def _find_place(frame: FrameType | None, folder: str) -> tuple[str, int]:
    """The file and line of the kernel that made the call: the first that is not Triton's own."""
    while frame is not None and frame.f_code.co_filename.startswith((folder, __file__)):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
