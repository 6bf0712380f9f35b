"""Compiles every Triton kernel for a GPU of compute capability 9.0 (Hopper), on a machine that needs to have none.

    python tests/support/compile_triton_kernels.py

The interpreter runs much that the compiler refuses. Triton compiles for any GPU if told which; only running needs one. So a
driver that pretends stands in for the real one, and each launch ends after compiling. Prints what each kernel takes.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch

torch.cuda.is_available = lambda: True  # so that minivllm does not turn on the interpreter

import triton
from kernel_cases import HEADS, make_attention_case
from lesson_cells import read_cells
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minivllm.course.lessons import paged_kernels
from minivllm.kernels import triton as kernels
from minivllm.kernels.triton import cache, decode_attention, penalties, prefill_attention, rope_and_cache, rows, sampling

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may use on a Hopper GPU."""


class PretendedDriver:
    """As much of a driver as compiling needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


compiled = {}


def compile_only(self, *args, grid, warmup, **kwargs):
    """In place of a launch."""
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    if kernel.hash not in compiled:
        compiled[kernel.hash] = kernel
        report(self.fn.__name__, kernel)


def report(name, kernel):
    shared = kernel.metadata.shared
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(source), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    label = "?" if registers is None else f"{registers[1]} registers, {spilled[1]} bytes spilled"
    matrix_unit = "wgmma" if "wgmma" in kernel.asm["ptx"] else "mma" if "mma.sync" in kernel.asm["ptx"] else "-"
    print(f"{name:<22}{CASE!s:<44}{shared:>8} bytes shared, {label}, {matrix_unit}", flush=True)
    assert shared <= SHARED_MEMORY, f"{name} needs {shared} bytes of shared memory"
    assert spilled is None or spilled[1] == "0", f"{name} needs more registers than there are"


run = JITFunction.run
JITFunction.run = compile_only
driver.set_active(PretendedDriver())
for module in (cache, decode_attention, penalties, prefill_attention, rope_and_cache, rows, sampling):
    module.check_launch = lambda *args: None  # the tensors lie on the CPU; nothing will touch them


def compile_attention(heads, dtype, block_size, num_seqs=3, window=0):
    settings = {"heads": heads, "block_size": block_size, "dtype": dtype, "window": window}
    case = make_attention_case([40, 1, 100][:num_seqs], [1, 1, 30][:num_seqs], **settings)
    kernels.paged_prefill_attention(*case.ragged_args)
    case = make_attention_case([600], [600], **settings)  # long enough for large tiles
    kernels.paged_prefill_attention(*case.ragged_args)
    case = make_attention_case([40, 1, 100][:num_seqs], [1, 1, 1][:num_seqs], **settings)
    for num_splits in (1, 3):
        kernels.paged_decode_attention(*case.args, num_splits=num_splits)


def compile_others(heads, dtype):
    head_dim, num_kv_heads, group = heads
    query = torch.zeros(3, num_kv_heads * group, head_dim, dtype=dtype)
    key = torch.zeros(3, num_kv_heads, head_dim, dtype=dtype)
    hidden = torch.zeros(3, 576, dtype=dtype)
    blocks = torch.zeros(4, 16, num_kv_heads, head_dim, dtype=dtype)
    angles = torch.zeros(10, head_dim // 2)
    kernels.reshape_and_cache(key, key, blocks, blocks.clone(), torch.arange(3))
    kernels.copy_blocks(blocks[None], blocks[None], [(0, 1)])
    kernels.copy_blocks(blocks[None], blocks[:, None].clone().transpose(0, 1), [(0, 1)])  # as blocks lie in the swap space
    kernels.rms_norm(hidden, hidden[0], 1e-5)
    kernels.rms_norm(query, query[0, 0], 1e-5)
    kernels.add_rms_norm(hidden, hidden, hidden[0], 1e-5)
    kernels.silu_and_mul(hidden)
    kernels.rotary_embedding(torch.arange(3), query, key, angles, angles)
    for norm in ((), (query[0, 0], key[0, 0], 1e-5)):
        caches = blocks, blocks.clone()
        kernels.norm_rope_and_cache(torch.arange(3), query, key, key, angles, angles, *caches, torch.arange(3), *norm)


def compile_sampling(dtype, vocab_size):
    logits, column = torch.zeros(3, vocab_size, dtype=dtype), torch.ones(3)
    keys, top_k = torch.zeros(3, dtype=torch.int32), torch.full((3,), vocab_size)
    kernels.random_uniform(keys, vocab_size)
    counts, places = torch.zeros(3, vocab_size, dtype=torch.int32), torch.arange(3)
    kernels.penalize(logits.float(), places, counts, places, column, column, column)
    for thresholds in (None, kernels.filter_thresholds(logits, column, column, top_k, column)):
        kernels.draw(logits, column, keys, thresholds)


FEW = [
    ((128, 8, 4), torch.bfloat16, 16),
    ((64, 3, 3), torch.float32, 16),
    ((80, 2, 1), torch.float16, 8),
    ((256, 1, 1), torch.bfloat16, 64),
    ((256, 1, 1), torch.float32, 32),
    ((32, 1, 2), torch.float16, 32),
]
ALL = [*FEW, *itertools.product([*HEADS, (128, 8, 8)], (torch.float32, torch.float16, torch.bfloat16), (8, 16, 32, 64))]

for CASE in ALL if "--all" in sys.argv else FEW:
    compile_attention(*CASE)
    compile_others(*CASE[:2])
CASE = "a step's inputs"
of_tokens, of_seqs = torch.zeros(3, 16, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
tables = torch.zeros(8, 64, dtype=torch.int32)
kernels.unpack_inputs(torch.zeros(4096, dtype=torch.uint8), *of_tokens, of_seqs[:8], tables, of_seqs)
CASE = (*FEW[0], "one sequence")
compile_attention(*FEW[0], num_seqs=1)
for case in FEW[:3]:
    CASE = (*case, "a window")
    compile_attention(*case, window=50)
for dtype, vocab_size in itertools.product((torch.bfloat16, torch.float16, torch.float32), (151936, 50257)):
    CASE = dtype, vocab_size
    compile_sampling(dtype, vocab_size)


def compile_lesson():
    """The kernels of lesson 06's solution, as its engine launches them."""
    space = {}
    for cell in read_cells("06"):
        if cell.name in ("setup", "write-kernel", "decode-kernel", "prefill-kernel"):
            linecache.cache[cell.name] = len(cell.source), None, cell.source.splitlines(keepends=True), cell.name
            exec(compile(cell.source, cell.name, "exec"), space)
    query, key, cache = torch.zeros(3, 9, 64), torch.zeros(3, 3, 64), torch.zeros(4, 16, 3, 64)
    tables, lengths, starts = (
        torch.zeros(3, 4, dtype=torch.int32),
        torch.ones(3, dtype=torch.int32),
        torch.arange(4, dtype=torch.int32),
    )
    paged_kernels.launch_write(space["write_kernel"], key, key, cache, cache, torch.arange(3))
    paged_kernels.launch_decode(space["decode_kernel"], query, cache, cache, tables, lengths, 0.125, 64)
    paged_kernels.launch_prefill(space["prefill_kernel"], query, cache, cache, tables, lengths, starts, 0.125)


CASE = "lesson 06"
compile_lesson()

names = {kernel.name for kernel in compiled.values()}
print(f"{len(compiled)} kernels compiled: {', '.join(sorted(names))}")
