"""What the recorder says that a kernel reads and writes: against a model in plain Python, on planted mistakes, and on the package's kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import attention_cases, make_attention_case

pytest.importorskip("triton")  # there is none for macOS
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from minivllm.errors import KernelError
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.launches import TensorArgument

FEW = settings(max_examples=max(5, settings().max_examples // 6))


@triton.jit
def copy_rows(out_ptr, x_ptr, num_columns, x_stride, out_stride, shift, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < limit
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * out_stride + columns + shift, x, mask=inside)


@triton.jit
def overlap(out_ptr, x_ptr, step, num_elements, BLOCK: tl.constexpr):
    places = tl.program_id(0) * step + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < num_elements)
    tl.store(out_ptr + places, x, mask=places < num_elements)


@triton.jit
def store_modulo(out_ptr, modulus, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + places % modulus, places.to(tl.float32))


@triton.jit
def sum_masked(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + places, mask=places < size), axis=0))


@triton.jit
def sum_masked_or_0(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + places, mask=places < size, other=0.0), axis=0))


@triton.jit
def add_up(out_ptr, x_ptr, num_elements, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < num_elements, other=0.0)
    tl.atomic_add(out_ptr, tl.sum(x, axis=0))


@triton.jit
def through_a_block_pointer(out_ptr, x_ptr, rows, columns, CHECK: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (rows, columns), (columns, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    out = tl.make_block_ptr(out_ptr, (rows, columns), (columns, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    if CHECK:
        tl.store(out, tl.load(x, boundary_check=(0, 1)), boundary_check=(0, 1))
    else:
        tl.store(out, tl.load(x, boundary_check=(0,)), boundary_check=(0, 1))


@triton.jit
def from_a_tuple(ptrs, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ptrs[1] + places, tl.load(ptrs[0] + places), mask=places < size)


@triton.jit
def through_a_descriptor(descriptor, BLOCK: tl.constexpr):
    descriptor.store([0, 0], tl.zeros([BLOCK, BLOCK], tl.float32))


@triton.jit
def at_any_address(x_ptr, far):
    tl.load(x_ptr + far.to(tl.int64))


@triton.jit
def nothing_at_all(x_ptr):
    pass


@triton.jit
def add_and_read(out_ptr, total_ptr):
    tl.atomic_add(total_ptr, 1.0)
    tl.store(out_ptr + tl.program_id(0), tl.load(total_ptr))


@triton.jit
def _helper(x_ptr, place):
    return tl.load(x_ptr + place)


@triton.jit
def with_a_helper(out_ptr, x_ptr):
    tl.store(out_ptr + tl.program_id(0), _helper(x_ptr, tl.program_id(0) + 1))


def record(launch, *args, **kwargs):
    """The only launch."""
    with record_accesses() as launches:
        launch(*args, **kwargs)
    (recorded,) = launches
    return recorded


def kinds(launch):
    return [problem.kind for problem in launch.problems()]


@FEW
@given(
    rows=st.integers(1, 4), columns=st.integers(1, 20), gap=st.integers(0, 3), shift=st.integers(-3, 3), more=st.integers(-1, 3),
    log_block=st.integers(0, 4),
)  # fmt: skip
def test_outside_is_what_is_not_an_element(rows, columns, gap, shift, more, log_block):
    """Any mixture of shifted stores and masks that let too much through, in tensors whose rows lie apart."""
    block = 2**log_block
    x = torch.randn(rows, columns + gap)[:, :columns]
    whole = torch.full((rows + 2, columns + gap), 7.0)
    out = whole[1:-1, :columns]
    limit = columns + more
    num_blocks = -(-max(limit, 1) // block)
    launch = record(copy_rows[(rows, num_blocks)], out, x, columns, x.stride(0), out.stride(0), shift, limit, BLOCK=block)
    stride = columns + gap
    wanted = {"load": set(), "store": set()}
    elements = {row * stride + column for row in range(rows) for column in range(columns)}
    writers: dict[int, set] = {}
    for row in range(rows):
        for column in range(min(limit, num_blocks * block)):
            read, written = row * stride + column, row * stride + column + shift
            wanted["load"] |= {read} - elements
            wanted["store"] |= {written} - elements
            if written in elements:
                writers.setdefault(written, set()).add((row, column // block, 0))
    problems = launch.problems()
    for number, kind in ((0, "store"), (1, "load")):
        found = [set(problem.elements) for problem in problems if problem.kind == "outside" and problem.tensor == number]
        assert found == ([wanted[kind]] if wanted[kind] else [])
    raced = {place for place, programs in writers.items() if len(programs) > 1}
    number = {place: index for index, place in enumerate(sorted(elements))}
    assert [set(p.elements) for p in problems if p.kind == "race"] == ([{number[place] for place in raced}] if raced else [])
    outside = whole.clone()
    outside[1:-1, :columns] = 7.0
    assert (outside == 7.0).all(), "nothing may be written outside of the tensor"


@FEW
@given(num_programs=st.integers(1, 5), step=st.integers(1, 9), log_block=st.integers(0, 3))
def test_races_are_where_programs_overlap(num_programs, step, log_block):
    block = 2**log_block
    size = (num_programs - 1) * step + block
    launch = record(overlap[(num_programs,)], torch.zeros(size), torch.randn(size), step, size, BLOCK=block)
    touched = [place for program in range(num_programs) for place in range(program * step, program * step + block)]
    twice = {place for place in touched if touched.count(place) > 1}
    assert [set(problem.elements) for problem in launch.problems()] == ([twice] if twice else [])
    assert kinds(launch) == (["race"] if twice else [])
    assert launch.num_bytes("load") == launch.num_bytes("store") == 4 * num_programs * block


def test_what_is_recorded_of_an_access():
    x, out = torch.randn(10), torch.zeros(10)
    launch = record(overlap[(3,)], out, x, 4, 10, BLOCK=4)
    assert launch.kernel == "overlap" and launch.grid == (3, 1, 1)
    assert [(tensor.name, tensor.shape, tensor.item_size) for tensor in launch.tensors] == [
        ("out_ptr", (10,), 4),
        ("x_ptr", (10,), 4),
    ]
    assert [(access.program[0], access.kind, access.tensor) for access in launch.accesses] == [
        (program, kind, tensor) for program in range(3) for kind, tensor in (("load", 1), ("store", 0))
    ]
    assert launch.accesses[4].elements.tolist() == [8, 9] and launch.accesses[4].num_masked == 2
    assert launch.accesses[0].source.startswith("x = tl.load(x_ptr + places")
    assert launch.accesses[1].source.startswith("tl.store(out_ptr + places")
    assert torch.equal(out, x)
    assert launch.problems() == []


def test_reads_of_what_others_write():
    x = torch.arange(9.0)
    problems = record(overlap[(2,)], x[1:], x[:-1], 4, 8, BLOCK=4).problems()
    assert [(problem.kind, problem.elements, problem.programs) for problem in problems] == [
        ("order", (3,), ((0, 0, 0), (1, 0, 0)))
    ]
    assert "One program writes out_ptr[3], and another reads it: Programs 0 and 1" in problems[0].sentence


def test_one_program_in_place_is_no_problem():
    x = torch.arange(8.0)
    assert record(overlap[(2,)], x, x, 4, 8, BLOCK=4).problems() == []


def test_one_store_that_writes_a_place_twice():
    (problem,) = record(store_modulo[(1,)], torch.zeros(8), 3, BLOCK=8).problems()
    assert problem.kind == "race" and problem.elements == (0, 1, 2)
    assert problem.sentence.startswith("Program 0 writes out_ptr[0] several times in one store")
    assert record(store_modulo[(1,)], torch.zeros(8), 8, BLOCK=8).problems() == []


def test_atomics_do_not_race():
    x, out = torch.arange(10.0), torch.zeros(1)
    launch = record(add_up[(3,)], out, x, 10, BLOCK=4)
    assert launch.problems() == [] and out.item() == 45 and launch.num_bytes("atomic") == 12
    (problem,) = record(add_up[(3,)], torch.zeros(0), x, 10, BLOCK=4).problems()
    assert problem.kind == "outside" and "update outside out_ptr" in problem.sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_load_outside_gives_nan(dtype):
    x, out = torch.ones(3, dtype=dtype), torch.zeros(2, 4, dtype=dtype)
    launch = record(copy_rows[(1, 1)], out, x, 4, 4, 4, 0, 4, BLOCK=4)
    assert kinds(launch) == ["outside"]
    assert out[0, :3].tolist() == [1, 1, 1] and out[0, 3].isnan()


def test_what_a_mask_leaves_out_is_undefined_without_an_other():
    x, sums = torch.ones(6), torch.zeros(3)
    for number, kernel in enumerate((sum_masked, sum_masked_or_0)):
        assert record(kernel[(1,)], sums[number:], x, 6, BLOCK=8).problems() == []
    assert sums[0].isnan() and sums[1] == 6


def test_whole_numbers_outside_are_zero():
    out = torch.full((4,), 5)
    record(overlap[(1,)], out, torch.ones(2, dtype=torch.int64), 4, 4, BLOCK=4)
    assert out.tolist() == [1, 1, 0, 0]


def test_far_outside_is_still_the_tensor_that_was_meant():
    """However near another tensor is in memory, and however far the kernel reaches."""
    both = torch.zeros(16)
    for far in (8, 10**6, 10**9):
        (problem,) = record(copy_rows[(1, 1)], both[:8], both[8:], 8, 0, 0, far, 8, BLOCK=8).problems()
        assert problem.tensor == 0 and problem.elements == tuple(range(far, far + 8))
        assert not both.any()
    assert "at offsets 1000000000, 1000000001, 1000000002 and 5 more" in problem.sentence


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("check", [True, False])
def test_block_pointers(check):
    x, out = torch.randn(3, 5), torch.zeros(3, 5)
    launch = record(through_a_block_pointer[(1,)], out, x, 3, 5, CHECK=check, BLOCK=8)
    outside = [problem.elements for problem in launch.problems()]
    assert outside == ([] if check else [(15, 16, 17)])  # past the ends of the rows are other rows, or nothing
    assert torch.equal(out, x)


def test_tensors_in_a_tuple():
    launch = record(from_a_tuple[(2,)], (torch.ones(6), torch.zeros(6)), 6, BLOCK=4)
    assert [tensor.name for tensor in launch.tensors] == ["ptrs[0]", "ptrs[1]"]
    assert [problem.sentence.split(":")[0] for problem in launch.problems()] == [
        "Program 1 reads outside ptrs[0], which has 6 elements"
    ]


def test_descriptors():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.ones(8, 4)
    launch = record(through_a_descriptor[(2,)], TensorDescriptor(x, (8, 4), (4, 1), [4, 4]), BLOCK=4)
    assert [(problem.kind, len(problem.elements)) for problem in launch.problems()] == [("race", 16)]
    x.fill_(1)
    launch = record(through_a_descriptor[(1,)], TensorDescriptor(x[:3], (4, 4), (4, 1), [4, 4]), BLOCK=4)
    assert [problem.elements for problem in launch.problems()] == [(12, 13, 14, 15)]
    assert x[3].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("far", [2**59, -(2**60)])
def test_an_address_of_nobody_is_refused_before_it_is_read(far):
    with pytest.raises(interpreter.InterpreterError, match="belongs to no tensor"):
        record(at_any_address[(1,)], torch.zeros(4), far)


def test_a_kernel_that_touches_nothing():
    launch = record(nothing_at_all[(3, 2)], torch.zeros(4))
    assert launch.grid == (3, 2, 1) and launch.accesses == launch.problems() == []


def test_reading_what_others_add_to_depends_on_the_order():
    assert kinds(record(add_and_read[(3,)], torch.zeros(3), torch.zeros(1))) == ["order"]
    assert kinds(record(add_and_read[(1,)], torch.zeros(3), torch.zeros(1))) == []


def test_large_launches_are_judged_quickly():
    x = torch.zeros(300_000)
    launch = record(overlap[(5,)], torch.zeros(300_000), x, 2**16, 300_000, BLOCK=2**16)
    assert launch.problems() == [] and launch.problems() is launch.problems()


def test_recording_leaves_the_language_as_it_was(tmp_path):
    """Compiled kernels call helpers of Triton's own library, which the interpreter would leave changed."""
    script = tmp_path / "kernel.py"
    script.write_text(
        "import torch, triton, triton.language as tl\n"
        "from minivllm.kernels.accesses import record_accesses\n"
        "@triton.jit\n"
        "def add_up(out_ptr, x_ptr, BLOCK: tl.constexpr):\n"
        "    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0) + tl.zeros([8], tl.float32).max(axis=0))\n"
        "places = (tl, tl.core, tl.math, tl.tensor, tl.dtype)\n"
        "before = [dict(vars(place)) for place in places]\n"
        "with record_accesses() as launches:\n"
        "    add_up[(1,)](torch.zeros(1), torch.ones(8), BLOCK=8)\n"
        "same = [vars(place).get(name) is value for place, names in zip(places, before) for name, value in names.items()]\n"
        "print(launches[0].problems(), all(same))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment).stdout
    assert said == "[] True\n"


def test_helpers_and_their_lines():
    launch = record(with_a_helper[(2,)], torch.zeros(2), torch.arange(3.0))
    assert launch.problems() == []
    assert [access.source for access in launch.accesses[:2]] == [
        "return tl.load(x_ptr + place)",
        "tl.store(out_ptr + tl.program_id(0), _helper(x_ptr, tl.program_id(0) + 1))",
    ]


def test_compiled_kernels_are_interpreted_meanwhile():
    """On a machine with a GPU all kernels, the library's own too, are compiled ones."""
    x, out = torch.arange(3.0), torch.zeros(2)
    compiled = JITFunction(with_a_helper.fn)
    with_a_helper.fn.__globals__["_helper"] = JITFunction(_helper.fn)
    try:
        assert len(record(compiled[(2,)], out, x).accesses) == 4
    finally:
        with_a_helper.fn.__globals__["_helper"] = _helper
    assert out.tolist() == [1, 2]


def test_everything_is_as_before_afterwards():
    owners = (interpreter, interpreter.GridExecutor, interpreter.interpreter_builder, JITFunction)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(interpreter.InterpreterError), record_accesses() as launches:
        overlap[(2,)](torch.zeros(4), None, 1, 4, BLOCK=4)
    assert len(launches) == 1
    assert [{name: value for name, value in vars(owner).items() if not name.startswith("grid_")} for owner in owners] == [
        {name: value for name, value in names.items() if not name.startswith("grid_")} for names in before
    ]
    out = torch.zeros(4)
    overlap[(1,)](out, torch.ones(4), 4, 4, BLOCK=4)
    assert out.tolist() == [1, 1, 1, 1] and len(launches) == 1


def test_no_recorder_within_a_recorder():
    with record_accesses(), pytest.raises(KernelError, match="does not work inside"), record_accesses():
        pass
    with record_accesses():
        pass


def test_triton_may_be_missing():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from minivllm.kernels.accesses import record_accesses\n"
        "from minivllm.errors import KernelError\n"
        "try:\n    record_accesses().__enter__()\nexcept KernelError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "To record what a Triton kernel does, Triton must be installed: it exists for Linux only.\n"


@given(shape=st.lists(st.integers(0, 4), max_size=3), data=st.data())
def test_elements_of_any_view(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.zeros([size + 2 for size in shape])[tuple(slice(1, 1 + size) for size in shape)].permute(order)
    argument = TensorArgument("x", tuple(tensor.shape), tensor.stride(), 4, 0)
    numbers = torch.full((1000,), -1)
    numbers.as_strided(tensor.shape, tensor.stride(), 300).copy_(torch.arange(tensor.numel()).view(tensor.shape))
    found = argument.find_elements(4 * (np.arange(1000) - 300))
    assert found.tolist() == numbers.tolist()
    assert (argument.find_elements(4 * np.arange(1000) + 2) == -1).all()


# -- the package's own kernels -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels():
    from minivllm.kernels import triton as kernels

    if not kernels.INTERPRETED:
        pytest.skip("on a GPU the package's kernels choose their launch for a GPU")
    return kernels


def assert_silent(launches):
    assert launches
    for launch in launches:
        assert launch.accesses and launch.problems() == []


@FEW
@given(rows=st.integers(1, 5), size=st.integers(1, 70), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_packages_kernels_on_rows_make_no_mistakes(kernels, rows, size, dtype):
    x = torch.randn(rows, 2 * size, dtype=dtype)
    cos, sin = torch.randn(50, 2), torch.randn(50, 2)
    with record_accesses() as launches:
        kernels.rms_norm(x, torch.randn(2 * size, dtype=dtype), 1e-5)
        kernels.add_rms_norm(x[:, :size], x[:, size:], torch.randn(size, dtype=dtype), 1e-5)
        kernels.silu_and_mul(x)
        kernels.rotary_embedding(
            torch.arange(rows), torch.randn(rows, 3, 4, dtype=dtype), torch.randn(rows, 1, 4, dtype=dtype), cos, sin
        )
    assert_silent(launches)


@FEW
@given(data=st.data())
def test_the_packages_cache_kernels_make_no_mistakes(kernels, data):
    heads, size, block_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    tokens = data.draw(st.integers(1, 8))
    caches = [torch.zeros(6, block_size, heads, size) for _ in range(2)]
    slots = (
        data.draw(st.lists(st.integers(0, 6 * block_size - 1), min_size=tokens, max_size=tokens, unique=True))
        if tokens <= 6 * block_size
        else []
    )
    if slots:
        slots[0] = -1
        with record_accesses() as launches:
            kernels.reshape_and_cache(
                torch.randn(tokens, heads, size), torch.randn(tokens, heads, size), *caches, torch.tensor(slots)
            )
            query, cos, sin = torch.randn(tokens, 2 * heads, 2 * size), torch.randn(9, size), torch.randn(9, size)
            both = [torch.zeros(6, block_size, heads, 2 * size) for _ in range(2)]
            positions = torch.arange(tokens)
            weights = query[0, 0], query[0, 0], 1e-5
            key = torch.randn(tokens, heads, 2 * size)
            kernels.norm_rope_and_cache(positions, query, key, key.clone(), cos, sin, *both, torch.tensor(slots), *weights)
        assert_silent(launches)
    with record_accesses() as launches:
        blocks, swap_space = torch.stack(caches), torch.stack(caches, dim=1).transpose(0, 1)
        kernels.copy_blocks(blocks, blocks, [(0, 1), (1, 2), (4, 5)])
        kernels.copy_blocks(blocks, swap_space, [(0, 1), (1, 0)])
    assert_silent(launches)


@pytest.mark.slow
@FEW
@given(data=st.data(), num_splits=st.integers(1, 3))
def test_the_packages_attention_makes_no_mistakes(kernels, data, num_splits):
    decode, prefill = data.draw(attention_cases("cpu", decode=True)), data.draw(attention_cases("cpu", decode=False))
    with record_accesses() as launches:
        kernels.paged_decode_attention(*decode.args, num_splits=num_splits)
        kernels.paged_prefill_attention(*prefill.ragged_args)
    for launch in launches:
        assert launch.problems() == []


def test_attention_reads_each_key_once(kernels):
    """A key is read once for all query heads that share it."""
    case = make_attention_case([37], [1], heads=(64, 1, 3))
    with record_accesses() as launches:
        kernels.paged_decode_attention(*case.args, num_splits=1)
    (launch,) = launches
    names = [tensor.name for tensor in launch.tensors]
    assert launch.num_bytes("load", names.index("key_ptr")) == 37 * 64 * 4


@triton.jit
def sum_between(out_ptr, x_ptr, first, last, BLOCK: tl.constexpr):
    total = 0.0
    for start in range(first, last, BLOCK):
        places = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + places, mask=places < last, other=0.0))
    tl.store(out_ptr, total)


def test_a_loop_over_scalars_runs_with_any_numpy(monkeypatch):
    """Triton before 3.7 makes whole numbers of arrays of one element, which NumPy refuses since 2.5, and deprecated before: here it refuses, too."""
    original = interpreter._patch_lang_tensor

    def as_before(tensor, *scope):
        original(tensor, *scope)
        tensor.__index__ = lambda scalar: refuse(scalar.handle.data)

    def refuse(data):
        assert data.ndim > 0
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", as_before)
    x, out = torch.arange(20.0), torch.zeros(1)
    with record_accesses() as launches:
        sum_between[(1,)](out, x, 3, 17, BLOCK=4)
    assert out.item() == sum(range(3, 17)) and not launches[0].problems()
