"""Which program of a Triton kernel reads and writes which memory, and two kinds of mistakes that this shows.

    with record_accesses() as launches:
        kernel[(4,)](x, y, out, 100, BLOCK=32)
    print(launches[0].problems())

Triton's interpreter runs the programs one by one in NumPy; here each load and store is recorded. A tensor argument becomes a made-up address, so far
from all others that any offset from it still tells which tensor was meant. An access outside the tensor is recorded but not made: a load gives NaN (0
for integers), a store is dropped. Elements that are masked off without an `other` are undefined: NaN here, too.

On a GPU, kernels launched during the recording are interpreted too, on copies in host memory.

It does not know about locks and flags (programs that wait for one another look like a conflict), equal values (two programs that write the same number
are reported, too), pointers that are cast to another width or loaded from memory, and the order of the threads within a program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels.launches import Access, Launch, TensorArgument

_TAG_SHIFT = 52
"""The number of a tensor argument, counted from 1, stands in an address above this bit: real addresses are smaller."""
_MIDDLE = 1 << (_TAG_SHIFT - 1)
_LOWEST, _HIGHEST = 1 << 12, 1 << 47
"""Real addresses of programs lie in between."""
_BFLOAT16_NAN = 0x7FC0


@contextmanager
def record_accesses() -> Iterator[list[Launch]]:
    """Interpret the Triton kernels launched in the `with` block. Gives the list of launches, which grows as they run.

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
        (interpreter, "_patch_lang_tensor", partial(_patch_tensor, interpreter._patch_lang_tensor)),
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


def _patch_tensor(original: Callable[..., None], tensor: Any, *scope: Any) -> None:
    """Make Triton's tensors ready for the interpreter, as it does, and let `range` take its scalars, arrays of one element: Triton before 3.7 uses a
    conversion of these that NumPy has refused since 2.5."""
    original(tensor, *scope)
    tensor.__index__ = lambda scalar: int(scalar.handle.data.item())


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
            is_bfloat16 = str(ptrs.get_element_ty()) == "bf16"
            value = _BFLOAT16_NAN if is_bfloat16 else np.nan if result.data.dtype.kind == "f" else 0
            result.data = np.where(undefined, value, result.data).astype(result.data.dtype)
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
