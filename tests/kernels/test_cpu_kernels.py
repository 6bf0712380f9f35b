"""The CPU kernels around attention: linear layers with packed weights, and the small loops over rows."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, HEADS, assert_close

from minivllm.errors import KernelError
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops

pytest.importorskip("numba")
from minivllm.kernels import cpu
from minivllm.kernels.cpu import linear as linear_kernel
from minivllm.kernels.cpu.native import features

ROWS = st.sampled_from([0, 1, 2, 3, 5, 11, 12, 13, 16, 17, 24, 25, 32, 33, 40, 100])
SIZES = st.sampled_from([1, 2, 24, 64, 80, 100, 576, 1536])
SEEDS = st.integers(0, 2**31)


def random(shape, seed, dtype=torch.float32, strided=False):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + (16 if strided else 0), generator=generator)
    return wide.to(dtype)[..., : shape[-1]]


# -- linear layers -----------------------------------------------------------------------------------------------------


KINDS = {torch.float32: cpu.PackedWeight, torch.bfloat16: cpu.PackedBfloat16Weight}
"""How a weight is packed, by the dtype that its numbers and those of `x` are rounded to."""


@pytest.mark.parametrize("dtype", KINDS)
@given(
    rows=ROWS,
    in_features=st.sampled_from([1, 3, 16, 64, 100, 576]),
    out_features=st.sampled_from([1, 5, 15, 16, 17, 48, 100, 200]),
    bias=st.booleans(),
    strided=st.booleans(),
    seed=SEEDS,
)
def test_packed_linear(dtype, rows, in_features, out_features, bias, strided, seed):
    x, weight = random((rows, in_features), seed, strided=strided), random((out_features, in_features), seed + 1)
    b = random((out_features,), seed + 2) if bias else None
    product = cpu.packed_linear(KINDS[dtype].of(weight, b), x)
    assert product.dtype == torch.float32
    x, weight = (numbers.to(dtype).double() for numbers in (x, weight))
    expected = F.linear(x, weight, None if b is None else b.double())
    size = F.linear(x.abs(), weight.abs())  # of what is summed: terms may cancel
    assert ((product - expected).abs() <= 1e-6 * size + 1e-6).all()


@pytest.mark.parametrize("dtype", KINDS)
@given(rows=ROWS.filter(bool), seed=SEEDS)
def test_a_row_has_the_same_product_to_the_last_bit_in_any_batch(dtype, rows, seed):
    weight = KINDS[dtype].of(random((100, 200), seed), random((100,), seed + 1))
    x = random((rows, 200), seed + 2)
    together = cpu.packed_linear(weight, x)
    assert all(torch.equal(cpu.packed_linear(weight, x[i : i + 1])[0], together[i]) for i in range(rows))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_packed_linear_with_any_number_of_threads(num_threads):
    weight, x = random((70, 50), 0), random((3, 50), 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert_close(cpu.packed_linear(cpu.PackedWeight.of(weight), x), F.linear(x.double(), weight.double()))
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    context_lens=st.lists(st.one_of(st.integers(0, 70), st.integers(120, 140), st.integers(4000, 4200)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 16, 24, 64]),
    num_threads=st.integers(1, 4),
    seed=SEEDS,
)
def test_decode_attention_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    dtype, context_lens, block_size, num_threads, seed
):
    num_blocks = -(-max(1, *context_lens) // block_size)
    query, keys, values = (
        random(shape, seed + i, dtype)
        for i, shape in enumerate([(len(context_lens), 4, 16), *[(num_blocks, block_size, 2, 16)] * 2])
    )
    generator = torch.Generator().manual_seed(seed)
    tables = torch.stack([torch.randperm(num_blocks, generator=generator).int() for _ in context_lens])
    lens = torch.tensor(context_lens, dtype=torch.int32)

    def attend(rows):
        return cpu.paged_decode_attention(query[rows].contiguous(), keys, values, tables[rows].contiguous(), lens[rows], 0.25)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [attend(slice(i, i + 1))[0] for i in range(len(context_lens))]
        torch.set_num_threads(num_threads)
        together = attend(slice(0, len(context_lens)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
@given(
    chunks=st.lists(st.one_of(st.integers(2, 5), st.integers(30, 35), st.integers(60, 130)), min_size=1, max_size=4),
    mates=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), max_size=4),
    heads=st.sampled_from([(64, 1, 3), (20, 1, 9), (1, 2, 1)] if settings().max_examples >= 100 else [(64, 1, 3), (20, 1, 9)]),
    block_size=st.sampled_from([1, 16, 24]),
    seed=SEEDS,
)
def test_prefill_attention_has_the_same_bits_in_any_chunks_and_in_any_batch(dtype, chunks, mates, heads, block_size, seed):
    """A chunk with other sequences in its batch, against the whole prompt alone; a decode among them, against the decode kernel. Queries are
    float32 beside a cache of bfloat16, as in the engine."""
    head_dim, num_kv_heads, group = heads
    length = sum(chunks)
    lengths = [length, *(new + before for new, before in mates)]
    num_blocks = -(-max(lengths) // block_size)
    queries = [random((n, num_kv_heads * group, head_dim), seed + i) for i, n in enumerate(lengths)]
    caches = [random((num_blocks, block_size, num_kv_heads, head_dim), seed + 20 + i, dtype) for i in range(2)]
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randperm(num_blocks, generator=generator).int() for _ in lengths]

    def attend(*parts):
        """Of each sequence some rows, from one to another."""
        query = torch.cat([queries[seq][first:last] for seq, first, last in parts])
        starts = torch.tensor([0, *accumulate(last - first for _, first, last in parts)], dtype=torch.int32)
        ends = torch.tensor([last for *_, last in parts], dtype=torch.int32)
        table = torch.stack([tables[seq] for seq, *_ in parts])
        return cpu.paged_prefill_attention.unchecked(query, *caches, table, ends, starts, 0.25).split(starts.diff().tolist())

    (whole,) = attend((0, 0, length))
    others = [(i, before, before + new) for i, (new, before) in enumerate(mates, start=1)]
    for first, last in pairwise([0, *accumulate(chunks)]):
        results = attend(*others[:1], (0, first, last), *others[1:])
        assert torch.equal(results[min(1, len(others))], whole[first:last])
        for (seq, before, end), result in zip(others, (*results[:1], *results[2:]), strict=False):
            if end - before == 1:
                alone = cpu.paged_decode_attention.unchecked(
                    queries[seq][before:end], *caches, tables[seq][None], torch.tensor([end], dtype=torch.int32), 0.25
                )
                assert torch.equal(result, alone)


def test_panels_of_many_parts():
    """Threads take a megabyte's weight in many parts."""
    weight, x = random((30000, 64), 0), random((30, 64), 1)
    packed = cpu.PackedWeight.of(weight)
    assert packed.panels.nbytes > 4 * linear_kernel.PART_BYTES
    assert_close(cpu.packed_linear(packed, x), F.linear(x.double(), weight.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_does_not_matter(dtype):
    x, weight = random((3, 64), 0), random((48, 64), 1)
    packed = cpu.PackedWeight.of(weight)
    try:
        torch.set_default_dtype(dtype)
        results = cpu.silu_and_mul(x), cpu.rms_norm(x, x[0], 1e-5), cpu.packed_linear(packed, x), cpu.hadamard_transform(x)
        assert all(result.dtype == torch.float32 for result in results)
        keys = torch.arange(3, dtype=torch.int32)
        assert torch.equal(cpu.random_uniform(keys, 70), reference.random_uniform(keys, 70))
    finally:
        torch.set_default_dtype(torch.float32)


@given(
    bits=st.integers(0, 2**32 - 1)
    | st.sampled_from(
        [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x7F800001, 0x00000001, 0x80000000]
    )
)
def test_inputs_are_rounded_to_bfloat16_as_torch_does(bits):
    """Ties, what rounds up to infinity, subnormals, infinities and NaN."""
    x = torch.tensor([[bits]], dtype=torch.uint32).view(torch.float32)
    product, expected = cpu.packed_linear(cpu.PackedBfloat16Weight.of(torch.ones(1, 1)), x), x.bfloat16().float()
    if (cpu.HAS_BFLOAT16_DOT or cpu.HAS_BFLOAT16_AMX) and expected.abs() < torch.finfo(torch.float32).tiny:
        expected = torch.zeros(1, 1)  # the instructions take subnormal numbers for zero
    assert torch.equal(product, expected) or bool(product.isnan() & x.isnan())


def test_a_bfloat16_weight_is_packed_as_it_is():
    weight, x = random((48, 64), 0), random((3, 64), 1)
    packed = cpu.PackedBfloat16Weight.of(weight.bfloat16(), random((48,), 2).bfloat16())
    assert packed.panels.nbytes == 2 * weight.numel()
    assert torch.equal(
        cpu.packed_linear(packed, x),
        cpu.packed_linear(cpu.PackedBfloat16Weight.of(weight.bfloat16().float(), random((48,), 2).bfloat16().float()), x),
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, parts",
    [
        pytest.param("", (), marks=pytest.mark.nightly),
        ("-avx512f", ()),
        ("-avx512vnni", ("products",)),
        ("+avx512bf16", ()),
        ("-avx512bf16", ("products",)),
    ],
)
def test_kernels_on_other_processors(changes, parts):
    """As this processor is, and as those that have fewer instructions of its own: `kernels.cpu.native.features`."""
    environment = {**os.environ, "MINIVLLM_CPU_FEATURES": changes}
    ask = [sys.executable, "-c", "from minivllm.kernels.cpu.native import features; print(features.USED)"]
    used = subprocess.run(ask, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    if changes and used == str(features.USED):
        pytest.skip("changes nothing on this processor")
    script = Path(__file__).parents[1] / "support" / "other_processors.py"
    subprocess.run([sys.executable, str(script), *parts], env=environment, check=True)


@pytest.mark.parametrize("kind", [cpu.PackedWeight, cpu.PackedBfloat16Weight, cpu.PackedInt8Weight])
def test_nan_stays_in_its_row(kind):
    x = random((14, 64), 0)
    x[5, 3] = float("nan")
    product = cpu.packed_linear(kind.of(random((40, 64), 1)), x)
    assert product[5].isnan().all()
    assert not torch.cat((product[:5], product[6:])).isnan().any()


def test_packed_linear_refuses():
    weight = cpu.PackedWeight.of(torch.zeros(4, 8))
    for x, message in (
        (torch.zeros(2, 7), "x is .2, 7. of .*, but .num_tokens, 8. of float32 on the CPU is needed"),
        (torch.zeros(8), "x is .8. of"),
        (torch.zeros(2, 8).half(), "of torch.float16 on cpu, but"),
        (torch.zeros(2, 8, device="meta"), "of torch.float32 on meta, but"),
    ):
        with pytest.raises(KernelError, match=message):
            cpu.packed_linear(weight, x)
    for wrong in (torch.zeros(4, 8).double(), torch.zeros(4), torch.zeros(4, 8, device="meta")):
        for kind in (cpu.PackedWeight, cpu.PackedBfloat16Weight, cpu.PackedInt8Weight):
            with pytest.raises(KernelError, match="cannot be packed: only float32, float16 and bfloat16 matrices on the CPU can"):
                kind.of(wrong)


@pytest.mark.parametrize("kind", [cpu.PackedWeight, cpu.PackedBfloat16Weight, cpu.PackedInt8Weight])
@pytest.mark.parametrize("shape", [(16, 8), (37, 5), (4097, 3), (1, 1)])
def test_rows_of_a_packed_weight_are_those_of_the_weight(kind, shape):
    weight = random(shape, 0).bfloat16()
    packed, outputs = kind.of(weight), torch.randint(shape[0], (2 * shape[0],), generator=torch.Generator().manual_seed(1))
    if kind is cpu.PackedInt8Weight:
        expected = reference.restore_weight(*reference.round_weight(weight.float()), shape[1])
    else:
        expected = weight.float()
    rows = packed.get_rows(outputs)
    assert rows.dtype == torch.float32 and torch.equal(rows, expected[outputs])
    assert rows.is_contiguous(), "compiled layers read it by its address"
    assert packed.get_rows(outputs[:0]).shape == (0, shape[1])
    for wrong in (-1, shape[0]):
        with pytest.raises(KernelError, match=f"The rows must be from 0 to {shape[0] - 1}, not .* to "):
            packed.get_rows(torch.tensor([0, wrong]))


@pytest.mark.parametrize("kind", [cpu.PackedWeight, cpu.PackedBfloat16Weight, cpu.PackedInt8Weight])
@given(cuts=st.lists(st.integers(0, 70), max_size=5), shape=st.tuples(st.integers(1, 70), st.integers(1, 9)), seed=SEEDS)
def test_a_weight_may_be_packed_in_any_pieces(kind, cuts, shape, seed):
    weight = random(shape, seed)
    whole, pieces = kind.of(weight), kind(*shape)
    edges = [0, *sorted(min(cut, shape[0]) for cut in cuts), shape[0]]
    for first, last in reversed(list(pairwise(edges))):
        pieces.set_rows(first, weight[first:last])
    for ours, theirs in zip(pieces.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# -- rows --------------------------------------------------------------------------------------------------------------


@given(rows=ROWS, heads=st.integers(0, 4), size=SIZES, dtype=st.sampled_from(DTYPES), strided=st.booleans(), seed=SEEDS)
def test_rms_norm(rows, heads, size, dtype, strided, seed):
    shape = (rows, heads, size) if heads else (rows, size)
    x, weight = random(shape, seed, dtype, strided), random((size,), seed + 1, dtype)
    assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


@given(rows=ROWS, size=SIZES, dtype=st.sampled_from(DTYPES), strided=st.booleans(), seed=SEEDS)
def test_add_rms_norm(rows, size, dtype, strided, seed):
    x, residual = (random((rows, size), seed + i, dtype, strided) for i in range(2))
    weight = random((size,), seed + 2, dtype)
    before = x.clone(), residual.clone()
    expected = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    for ours, theirs in zip(cpu.add_rms_norm(x, residual, weight, 1e-5), expected, strict=True):
        assert_close(ours, theirs)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1]), "the inputs are left as they are"


@pytest.mark.slow
@given(
    rows=ROWS,
    heads=st.sampled_from(HEADS),
    layout=st.sampled_from(["fused", "apart", "gaps"]),
    dtype=st.sampled_from(DTYPES),
    positions_dtype=st.sampled_from([torch.int64, torch.int32]),
    seed=SEEDS,
)
def test_rotary_embedding(rows, heads, layout, dtype, positions_dtype, seed):
    """Queries and keys as views of one fused output, as tensors of their own, or with gaps between heads."""
    head_dim, num_kv_heads, group = heads
    num_heads = num_kv_heads * group
    fused = random((rows, num_heads + num_kv_heads, head_dim), seed, dtype, strided=layout == "gaps")
    query, key = fused.split([num_heads, num_kv_heads], dim=1)
    if layout == "apart":
        query, key = query.contiguous(), key.contiguous()
    angles = torch.rand(50, head_dim // 2, generator=torch.Generator().manual_seed(seed)) * 6
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(seed))
    tables = angles.cos(), angles.sin()
    result = cpu.rotary_embedding(positions.to(positions_dtype), query, key, *tables)
    for ours, theirs in zip(result, reference.rotary_embedding(positions, query, key, *tables), strict=True):
        assert ours.dtype == dtype
        assert_close(ours, theirs)


@given(rows=ROWS, size=SIZES, dtype=st.sampled_from(DTYPES), strided=st.booleans(), scale=st.sampled_from([1, 50]), seed=SEEDS)
def test_silu_and_mul(rows, size, dtype, strided, scale, seed):
    x = random((rows, 2 * size), seed, dtype, strided) * scale
    assert_close(cpu.silu_and_mul(x), reference.silu_and_mul(x.double()))


def test_silu_of_numbers_at_the_ends():
    gates = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0, float("-inf"), float("nan")]])
    gated = cpu.silu_and_mul(torch.cat((gates, torch.ones_like(gates)), dim=1))[0]
    assert gated[:5].tolist() == pytest.approx([0, 0, 0, 90, 200], abs=1e-30)
    assert gated[6].isnan()


@pytest.mark.parametrize(("size", "order"), [(1, 64), (64, 64), (100, 128), (576, 64), (1536, 512), (2048, 2048)])
def test_the_hadamard_transform_is_a_product_with_a_hadamard_matrix(size, order):
    matrix = torch.ones(1, 1)
    while len(matrix) < order:  # Sylvester's construction
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    x = torch.randint(-9, 10, (3, size), generator=torch.Generator().manual_seed(size)).float()
    filled = torch.zeros(3, -(-size // 64) * 64)
    filled[:, :size] = x
    assert reference.hadamard_order(size) == order
    expected = (filled.view(3, -1, order) @ matrix).view(filled.shape)
    assert torch.equal(reference.hadamard_transform(x), expected)
    twice = reference.hadamard_transform(expected)
    assert torch.equal(twice[:, :size], order * x) and not twice[:, size:].any()


@given(rows=ROWS, size=st.one_of(SIZES, st.integers(1, 700)), strided=st.booleans(), seed=SEEDS)
def test_the_compiled_hadamard_transform_has_the_bits_of_the_reference(rows, size, strided, seed):
    x = random((rows, size), seed, strided=strided)
    assert torch.equal(cpu.hadamard_transform(x), reference.hadamard_transform(x))


@pytest.mark.parametrize("checks", [Checks.SHAPES, Checks.ALL])
def test_shapes_are_checked_if_the_owner_of_the_operations_wants_it(checks):
    x = torch.zeros(2, 8)
    with pytest.raises(KernelError, match="residual is .1, 8., but must be"):
        Ops(cpu, checks).add_rms_norm(x, x[:1], x[0], 1e-5)
    assert Ops(cpu, Checks.NONE).silu_and_mul(x[:, :3]).shape == (2, 1), "an odd width is not noticed"


def test_compiling_is_told_once_and_counted(caplog):
    from numba.core.event import Event, EventStatus

    notice = cpu._CompilationNotice()
    kernel, other = ({"dispatcher": SimpleNamespace(py_func=function)} for function in (cpu.packed_linear, subprocess.run))
    for what, happens in (
        (other, "start"),
        (kernel, "start"),
        (kernel, "start"),
        (other, "end"),
        (kernel, "end"),
        (kernel, "end"),
    ):
        status = EventStatus.START if happens == "start" else EventStatus.END
        getattr(notice, f"on_{happens}")(Event("numba:compile", status, data=what))
    assert caplog.messages == ["Compiling the CPU kernels for this model, once; it takes some seconds."]
    assert notice.depth == 0
