"""What a launch of a Triton kernel did with its tensors, as `accesses.record_accesses` notes it, and the mistakes that this shows."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

Program = tuple[int, int, int]

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
        elements: Which were touched, counted in row-major order; -1 outside the tensor.
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
            "order": a program reads what another one writes, and which comes first is not known.
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
        """Addresses that are written and that several programs touch, or that one store writes several times."""
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
    return f"is {list(tensor.shape)}" if len(tensor.shape) > 1 else f"has {_count(tensor.num_elements, 'element')}"


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
