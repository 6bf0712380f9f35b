"""Linear layers for the few rows of a decode step: `x @ W.T + b` at the speed of reading `W` once.

A general matrix product, made for large matrices, is far from that with 16 rows. Instead:

- The weight is packed once, when it is loaded, in panels of 16 output features. A panel holds its 16 numbers for the first
  input feature, then for the second, and so on, so that a thread reads memory sequentially.
- The sums of up to 24 rows of `x`, for the 16 outputs of a panel, stay in vector registers while the panel is read: one
  vector is loaded, and used for one multiply-add per row.
- Memory is prefetched a few thousand bytes ahead.

Compilers do not keep an array of sums in registers. So the innermost loop, `multiply_panels`, is written in LLVM
IR; it is this loop:

    for k in range(in_features):
        for row in range(rows):
            sums[row, :] += x[k, row] * panel[k, :]

Each output is summed in the order of the input features, whatever the number of rows: the numbers of a sequence are
bitwise the same, alone or in a batch. Goto and van de Geijn, 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from minivllm.errors import KernelError
from minivllm.kernels.cpu.launch import constant, use_threads_of_torch
from minivllm.kernels.cpu.thread_pool import parallel_for

if TYPE_CHECKING:
    from minivllm.kernels.cpu.linear_int8 import PackedInt8Weight

PANEL = 16
"""Output features of a panel: the float32 numbers of one AVX-512 register."""
_HAS_AVX512 = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
FEW_ROWS = (1, 2, 4, 8, 12, 16, 20, 24) if _HAS_AVX512 else (1, 2, 4, 6)
"""Batch sizes that read each panel once; a kernel is compiled for each. Their sums must fit the vector registers: AVX-512 has
32, AVX2 has 16 of half the size."""
MANY_ROWS, MANY_PANELS = (12, 2) if _HAS_AVX512 else (3, 2)
"""Larger batches go in tiles of this many rows and panels: each number of `x` that is loaded is used twice."""
PREFETCH_DISTANCE = 64
"""How many vectors ahead memory is prefetched: 4 KiB."""
PART_BYTES = 2**17
"""How much of a weight a thread takes at a time: little, so that no thread waits long for the last part; the panels stay in the
second-level cache while all rows pass by."""
PARALLEL_NUMBERS = 2**13
"""A transposition of fewer numbers is not worth a second thread."""


class PackedWeight:
    """A weight in the layout of `packed_linear`.

    Args:
        weight: `[out_features, in_features]`, float32 on the CPU; copied.
        bias: `[out_features]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_weight(weight)
        self.out_features, self.in_features = weight.shape
        num_panels = -(-self.out_features // PANEL)
        panels = np.zeros((num_panels, self.in_features, PANEL), np.float32)
        whole = self.out_features // PANEL
        torch.from_numpy(panels)[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, self.in_features).transpose(1, 2)
        if whole < num_panels:
            rest = weight[whole * PANEL :]
            torch.from_numpy(panels)[whole, :, : len(rest)] = rest.t()
        self.panels = panels
        self.bias = np.zeros(num_panels * PANEL, np.float32)
        if bias is not None:
            self.bias[: self.out_features] = bias.numpy()

    @property
    def fills_panels(self) -> bool:
        """Whether the outputs are whole panels, which compiled callers need."""
        return self.out_features % PANEL == 0

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What `multiply` takes as the weight."""
        return self.panels, self.bias

    @property
    def multiply(self) -> Any:
        """The compiled product."""
        return multiply_float32


def check_weight(weight: Tensor) -> None:
    """Raise KernelError unless this weight can be packed."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.dim() != 2:
        raise KernelError(
            f"A {weight.dtype} weight of shape {list(weight.shape)} on {weight.device} cannot be packed: only float32 matrices on the CPU can."
        )


def packed_linear(weight: PackedWeight | PackedInt8Weight, x: Tensor) -> Tensor:
    """`x @ W.T + b` for any number of rows.

    Args:
        weight: The packed `W` and `b`.
        x: `[num_tokens, in_features]`, float32.

    Returns:
        `[num_tokens, out_features]`.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32 or x.device.type != "cpu":
        raise KernelError(
            f"x is {list(x.shape)} of {x.dtype} on {x.device}, but [num_tokens, {weight.in_features}] of float32 on the CPU is needed."
        )
    num_rows = x.shape[0]
    tile, width = (few_rows(num_rows), 1) if num_rows <= FEW_ROWS[-1] else (MANY_ROWS, MANY_PANELS)
    out = x.new_empty(-(-num_rows // tile) * tile, len(weight.panels) * PANEL)
    num_threads = use_threads_of_torch()
    weight.multiply(x.contiguous().numpy(), weight.arrays, out.numpy(), num_threads, constant(tile), constant(width))
    return out if out.shape == (num_rows, weight.out_features) else out[:num_rows, : weight.out_features]


def few_rows(num_rows: int) -> int:
    """The batch size of `FEW_ROWS`, to which the output is padded, for a batch of at most 24."""
    return next(rows for rows in FEW_ROWS if rows >= num_rows)


@intrinsic
def multiply_panels(
    typing_context: Any, x: Any, panels: Any, first_panel: Any, bias: Any, out: Any, first_row: Any, rows: Any, width: Any
) -> Any:
    """Some rows by some panels: `out` = bias + the sum over k of `x[k, row]` times `panels[panel, k, :]`.

    `rows` and `width` are the `constant` of the number of rows and panels; `x` is `[in_features, rows]`. Numbers are float32,
    or int32 that stand for four 8-bit integers each, unsigned in `x` and signed in `panels`, with int32 sums.
    """
    num_rows, num_panels = len(rows), len(width)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list) -> Any:
        def array(i: int) -> Any:
            return context.make_array(signature.args[i])(context, builder, arguments[i])

        def index(i: int) -> Any:
            return context.cast(builder, arguments[i], signature.args[i], types.intp)

        int32, int64 = ir.IntType(32), ir.IntType(64)
        # LLVM 21 has given the instruction's inputs the type of bytes.
        has_bytes = llvmlite.binding.llvm_version_info[0] >= 21
        is_int8 = signature.args[1].dtype == types.int32
        vector, byte_pointer = ir.VectorType(int32 if is_int8 else ir.FloatType(), PANEL), ir.IntType(8).as_pointer()
        undefined = ir.Constant(vector, ir.Undefined)
        to_all = ir.Constant(ir.VectorType(int32, PANEL), [0] * PANEL)
        if is_int8:
            inputs = ir.VectorType(ir.IntType(8), 4 * PANEL) if has_bytes else vector
            dot = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector, inputs, inputs]), "llvm.x86.avx512.vpdpbusd.512"
            )

            def multiply_add(numbers: Any, weight: Any, total: Any) -> Any:
                return builder.call(dot, [total, builder.bitcast(numbers, inputs), builder.bitcast(weight, inputs)])
        else:
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{PANEL}f32")

            def multiply_add(numbers: Any, weight: Any, total: Any) -> Any:
                return builder.call(fma, [numbers, weight, total])

        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32]), "llvm.prefetch.p0"
        )

        def at(start: Any, offset: Any) -> Any:
            return builder.gep(start, [offset])

        def as_vector(address: Any) -> Any:
            return builder.bitcast(address, vector.as_pointer())

        in_features = cgutils.unpack_tuple(builder, array(1).shape)[1]
        out_width = cgutils.unpack_tuple(builder, array(4).shape)[1]
        first_output = builder.mul(index(2), int64(PANEL))
        panel_size = builder.mul(in_features, int64(PANEL))
        weights = at(array(1).data, builder.mul(index(2), panel_size))
        corner = at(array(4).data, builder.add(builder.mul(index(5), out_width), first_output))
        sums = [[cgutils.alloca_once(builder, vector) for _ in range(num_panels)] for _ in range(num_rows)]
        for panel in range(num_panels):
            start = builder.load(as_vector(at(array(3).data, builder.add(first_output, int64(panel * PANEL)))), align=4)
            for row in range(num_rows):
                builder.store(start, sums[row][panel])
        with cgutils.for_range(builder, in_features) as loop:
            weight = []
            for panel in range(num_panels):
                offset = builder.add(builder.mul(panel_size, int64(panel)), builder.mul(loop.index, int64(PANEL)))
                weight.append(builder.load(as_vector(at(weights, offset)), align=4))
                ahead = builder.bitcast(at(weights, builder.add(offset, int64(PANEL * PREFETCH_DISTANCE))), byte_pointer)
                builder.call(prefetch, [ahead, int32(0), int32(3), int32(1)])  # to read, to keep, data
            column = at(array(0).data, builder.mul(loop.index, int64(num_rows)))
            for row in range(num_rows):
                number = builder.insert_element(undefined, builder.load(at(column, int64(row))), int32(0))
                repeated = builder.shuffle_vector(number, undefined, to_all)
                for panel in range(num_panels):
                    total = builder.load(sums[row][panel])
                    builder.store(multiply_add(repeated, weight[panel], total), sums[row][panel])
        for row in range(num_rows):
            for panel in range(num_panels):
                offset = builder.add(builder.mul(out_width, int64(row)), int64(panel * PANEL))
                builder.store(builder.load(sums[row][panel]), as_vector(at(corner, offset)), align=4)
        return context.get_dummy_value()

    return types.void(x, panels, first_panel, bias, out, first_row, rows, width), generate


@njit(error_model="numpy")
def _transpose_part(part, num_parts, x, columns, rows):
    num_tiles, in_features, _ = columns.shape
    for i in range(num_tiles):
        tokens = x[i * len(rows) : (i + 1) * len(rows)]
        for k in range(in_features * part // num_parts, in_features * (part + 1) // num_parts):
            if len(tokens) == len(rows):
                for row in range(len(rows)):
                    columns[i, k, row] = tokens[row, k]
            else:  # the last tile is filled up with its last row
                for row in range(len(rows)):
                    columns[i, k, row] = tokens[min(row, len(tokens) - 1), k]


@njit(error_model="numpy")
def _multiply_part(part, size, columns, panels, bias, out, rows, width):
    """`size` panels by all rows."""
    first, last = part * size, min((part + 1) * size, len(panels))
    odd = (last - first) % len(width)
    for i in range(len(columns)):
        for panel in range(first, last - odd, len(width)):
            multiply_panels(columns[i], panels, panel, bias, out, i * len(rows), rows, width)
        for panel in range(last - odd, last):
            multiply_panels(columns[i], panels, panel, bias, out, i * len(rows), rows, (None,))


@njit(error_model="numpy")
def transpose_tiles(x, num_tiles, num_threads, rows):
    """`[num_tiles, in_features, len(rows)]`: the rows of `x`, tile by tile."""
    columns = np.empty((num_tiles, x.shape[1], len(rows)), x.dtype)
    num_parts = 1 if columns.size < PARALLEL_NUMBERS else num_threads
    parallel_for(num_threads, num_parts, _transpose_part, (num_parts, x, columns, rows))
    return columns


@njit(error_model="numpy")
def panels_per_part(panels, width):
    """How many panels a thread takes at a time."""
    return max(len(width), PART_BYTES // (4 * panels.shape[1] * panels.shape[2]))


@njit(error_model="numpy", cache=True)
def multiply_float32(x, weight, out, num_threads, rows, width):
    """`x @ W.T + b`, the arrays of `W` and `b` in `weight`. `out` has the rows of `x`, and as many more as fill the last tile."""
    panels, bias = weight
    columns = transpose_tiles(x, out.shape[0] // len(rows), num_threads, rows)
    size = panels_per_part(panels, width)
    parallel_for(num_threads, -(-len(panels) // size), _multiply_part, (size, columns, panels, bias, out, rows, width))
