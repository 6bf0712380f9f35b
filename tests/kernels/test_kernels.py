"""Every Triton and CPU kernel against the reference in double precision. On a GPU the Triton kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BLOCK_SIZES,
    CPU_SHAPES,
    DTYPES,
    HEADS,
    Guarded,
    assert_close,
    attention_cases,
    guarded_results,
    make_attention_case,
)

from minivllm.errors import KernelError
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops

pytest.importorskip("triton")  # there is none for macOS
numba = pytest.importorskip("numba")
from minivllm.kernels import cpu, triton
from minivllm.kernels.cpu.launch import as_numpy, load
from minivllm.kernels.triton.decode_attention import MAX_SPLITS, TOKENS_PER_SPLIT, choose_num_splits
from minivllm.kernels.triton.prefill_attention import choose_tiles

TRITON_DEVICE = "cpu" if triton.INTERPRETED else "cuda"
FEWER = settings(max_examples=settings().max_examples // 3)
"""Interpreted kernels are slow."""

both = pytest.mark.parametrize(("kernels", "device"), [(cpu, "cpu"), (triton, TRITON_DEVICE)], ids=["cpu", "triton"])


# -- attention ---------------------------------------------------------------------------------------------------------


def check_decode(kernels, case, **options):
    with guarded_results():
        out = kernels.paged_decode_attention(*case.args, **options)
    assert_close(out, reference.paged_decode_attention(*case.reference_args))
    for guarded in (case.key_cache, case.value_cache):
        guarded.check()


def check_prefill(kernels, case):
    with guarded_results():
        out = kernels.paged_prefill_attention(*case.ragged_args)
    assert_close(out, reference.paged_prefill_attention(*case.ragged_reference_args))
    for guarded in (case.key_cache, case.value_cache):
        guarded.check()


@pytest.mark.slow
@both
@FEWER
@given(data=st.data())
def test_decode_attention(kernels, device, data):
    check_decode(kernels, data.draw(attention_cases(device, decode=True, cpu=kernels is cpu)))


@pytest.mark.slow
@both
@FEWER
@given(data=st.data())
def test_prefill_attention(kernels, device, data):
    check_prefill(kernels, data.draw(attention_cases(device, decode=False, cpu=kernels is cpu)))


def attend_by_definition(query, keys, values, tables, context_lens, query_start_loc, scale, window):
    """Token by token, each over the keys that it sees."""
    output, (_, block_size, num_kv_heads, _) = torch.zeros_like(query), keys.shape
    starts, group = query_start_loc.tolist(), query.shape[1] // num_kv_heads
    for seq, context_len in enumerate(context_lens.tolist()):
        for row in range(starts[seq], starts[seq + 1]):
            position = context_len - (starts[seq + 1] - row)
            seen = [i for i in range(context_len) if i <= position and (not window or i > position - window)]
            slots = torch.tensor([int(tables[seq, i // block_size]) * block_size + i % block_size for i in seen])
            k, v = (x.flatten(0, 1)[slots].repeat_interleave(group, dim=1) for x in (keys, values))
            weights = (torch.einsum("hd,thd->ht", query[row], k) * scale).softmax(dim=-1)
            output[row] = torch.einsum("ht,thd->hd", weights, v)
    return output


WINDOWS = [1, 2, 15, 16, 17, 40, 1000]


@pytest.mark.parametrize("window", [0, *WINDOWS])
def test_the_reference_sees_what_the_definition_says(window):
    """A token at position p sees p - window + 1 to p; what blocks before all windows hold, here NaN, is not read."""
    case = make_attention_case([1, 40, 70, 33], [1, 40, 5, 1], (16, 2, 2), window=window)
    query, _, _, tables, lengths, starts = case.ragged_reference_args[:6]
    # Slots behind a context must be finite for the reference, but what comes before a window need not be.
    caches = [torch.where(x.tensor.isnan().flatten(1).all(1)[:, None, None, None], torch.nan, clean)
              for x, clean in ((case.key_cache, case.clean_keys), (case.value_cache, case.clean_values))]  # fmt: skip
    assert torch.isnan(caches[0][tables[2, 0]]).all() == (0 < window < 50), "the first block of 70 tokens, 5 of which are new"
    expected = attend_by_definition(query, *caches, tables, lengths, starts, case.scale, window)
    args = query, *caches, tables, lengths
    assert (reference.paged_prefill_attention(*args, starts, case.scale, window) - expected).abs().max() < 1e-12
    last = starts[1:] - 1
    tables = tables.clone()
    for table, length in zip(tables, lengths.tolist(), strict=True):
        table[-(-length // 16) :] = table[(length - 1) // 16]  # a block of its own
    decode = reference.paged_decode_attention(query[last], *caches, tables, lengths, case.scale, window)
    assert (decode - expected[last]).abs().max() < 1e-12


@both
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(kernels, device, window):
    """Prompts, chunks and decodes, whose first tiles are partly or wholly behind the windows of some rows."""
    check_prefill(kernels, make_attention_case([1, 40, 130, 70], [1, 40, 70, 1], padding=2, window=window, device=device))
    check_decode(kernels, make_attention_case([1, 40, 130, 0, 64], [1] * 5, window=window, device=device))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dtype", "strided"), CPU_SHAPES)
@pytest.mark.parametrize("window", [1, 40, 300])
def test_windows_of_long_contexts(heads, dtype, strided, window):
    """Splits and pieces share the window, not the context."""
    settings = {"heads": heads, "dtype": dtype, "strided": strided, "window": window}
    check_decode(cpu, make_attention_case([900, 300], [1, 1], **settings))
    check_prefill(cpu, make_attention_case([900, 300], [300, 200], **settings))
    check_decode(triton, make_attention_case([900, 300], [1, 1], **settings, device=TRITON_DEVICE), num_splits=4)


def test_a_window_as_wide_as_the_context_changes_nothing():
    """To the last bit, in the kernels whose loops then are the same."""
    case = make_attention_case([100, 7, 40], [60, 7, 1])
    assert torch.equal(cpu.paged_prefill_attention(*case.ragged_args, 1000), cpu.paged_prefill_attention(*case.ragged_args))


@pytest.mark.parametrize(("heads", "block_size", "rows"), [((128, 1, 4), 16, 256), ((96, 1, 3), 16, 128), ((128, 1, 2), 32, 128)])
def test_prefill_attention_of_long_prompts(heads, block_size, rows):
    """Large tiles, the last of which is partly filled, behind a cached prefix."""
    assert choose_tiles(128, 2, heads[2], block_size, 513)[0] == rows
    check_prefill(triton, make_attention_case([530], [513], heads, block_size, torch.float16, TRITON_DEVICE))


@pytest.mark.slow
@FEWER
@given(data=st.data(), num_splits=st.integers(1, 7))
def test_triton_decode_attention_split_over_the_context(data, num_splits):
    check_decode(triton, data.draw(attention_cases(TRITON_DEVICE, decode=True)), num_splits=num_splits)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_cpu_decode_attention_with_any_number_of_threads(num_threads):
    before = torch.get_num_threads()
    case = make_attention_case([1, 300, 0, 64, 33], [1] * 5)
    try:
        torch.set_num_threads(num_threads)
        check_decode(cpu, case)
    finally:
        torch.set_num_threads(before)


def test_numbers_of_16_bits_are_understood_by_numba():
    """Every one of them: zeros, subnormals, infinities and NaN too."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)

    @numba.njit
    def load_all(numbers, out):
        for i in range(len(numbers)):
            out[i] = load(numbers[i])

    for dtype in (torch.float16, torch.bfloat16):
        numbers = patterns.view(dtype)
        out = torch.empty(2**16)
        load_all(as_numpy(numbers), out.numpy())
        expected = numbers.float()
        assert torch.equal(torch.isnan(out), torch.isnan(expected))
        assert torch.equal(out.nan_to_num(7.0).view(torch.int32), expected.nan_to_num(7.0).view(torch.int32))


@pytest.mark.slow
@both
@pytest.mark.parametrize("length", [1, 4095, pytest.param(32768, marks=pytest.mark.long)])
def test_long_contexts(kernels, device, length):
    """Of one KV head, because the interpreter runs one program after another."""
    case = make_attention_case([length, 5], [1, 1], (64, 1, 3), device=device)
    check_decode(kernels, case)
    check_prefill(kernels, make_attention_case([length], [min(length, 3)], (64, 1, 3), device=device))


@pytest.mark.slow
@both
def test_a_long_prompt_and_decodes_in_one_batch(kernels, device):
    check_prefill(kernels, make_attention_case([257, 100, 64, 300], [257, 1, 1, 130], padding=5, device=device))


@pytest.mark.slow
@both
def test_an_odd_prefix_and_an_odd_group(kernels, device):
    """Rows are taken in pairs, so a pair may belong to two tokens, of which the second sees one key more."""
    for context_len in range(2, 40):
        check_prefill(kernels, make_attention_case([context_len], [2], (64, 1, 3), seed=context_len, device=device))


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_cpu_kernels_leave_the_number_of_threads_alone(num_threads):
    """In a fresh process, where the first call starts the pool of threads."""
    code = (
        "import torch, sys; sys.path.insert(0, 'tests/support'); from kernel_cases import make_attention_case;"
        f"torch.set_num_threads({num_threads}); from minivllm.kernels import cpu;"
        "cpu.paged_decode_attention(*make_attention_case([5], [1]).args); print(torch.get_num_threads())"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == f"{num_threads}\n"


@pytest.mark.slow
@both
def test_results_do_not_depend_on_chance(kernels, device):
    case = make_attention_case([40, 7, 100], [1, 1, 1], device=device)
    first = kernels.paged_decode_attention(*case.args)
    for _ in range(5):
        assert torch.equal(kernels.paged_decode_attention(*case.args), first)


@pytest.mark.slow
@both
def test_large_scores_do_not_overflow(kernels, device):
    """e**1000 is no float; a softmax relative to the largest score never computes it."""
    case = make_attention_case([70, 20], [1, 1], device=device)
    case.query.mul_(1000)
    check_decode(kernels, case)


@pytest.mark.slow
@both
@pytest.mark.parametrize("length", [20, 600])
def test_nan_in_a_context_is_not_hidden(kernels, device, length):
    """The long context is split, among threads or programs."""
    case = make_attention_case([length, 20], [1, 1], device=device)
    case.key_cache.tensor[int(case.block_tables[0, 0]), 3, 0] = float("nan")
    decode = kernels.paged_decode_attention(*case.args, **({"num_splits": 4} if kernels is triton else {}))
    prefill = kernels.paged_prefill_attention(*case.ragged_args)
    for output in (decode, prefill):
        assert torch.isnan(output[0, :3]).all(), "the heads that share the key"
        assert not torch.isnan(output[0, 3:]).any()
        assert not torch.isnan(output[1]).any()


def test_contexts_are_split_until_the_gpu_is_full_but_not_into_crumbs():
    for num_programs in (1, 8, 100, 264, 4096):
        for max_context in (1, 255, 256, 1000, 8192, 32768):
            num_splits = choose_num_splits(num_programs, max_context, num_processors=132)
            assert num_splits == 1 or max_context / num_splits >= TOKENS_PER_SPLIT
            if num_splits < min(MAX_SPLITS, max_context // TOKENS_PER_SPLIT) // 2:
                assert num_programs * num_splits >= 132, "every processor has work"
            if num_programs >= 2 * 132:
                assert num_splits == 1


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@both
@FEWER
@given(
    heads=st.sampled_from(HEADS), block_size=st.sampled_from(BLOCK_SIZES), dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(0, 9), strided=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_reshape_and_cache(kernels, device, heads, block_size, dtype, num_tokens, strided, seed):
    head_dim, num_kv_heads, _ = heads
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 12 // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    key, value = torch.randn(2, num_tokens, num_kv_heads + strided, head_dim + strided, generator=generator).to(dtype).to(device)
    key, value = key[:, :num_kv_heads, :head_dim].contiguous(), value[:, :num_kv_heads, :head_dim]
    if strided:  # keys lie between other heads, values have gaps between heads as well
        key = torch.cat((key, key), dim=1)[:, num_kv_heads:]
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    caches = [Guarded(shape, dtype, device, gap=16 if strided else 0) for _ in range(2)]
    kernels.reshape_and_cache(key, value, caches[0].tensor, caches[1].tensor, slots.to(device))
    for cache, x in zip(caches, (key, value), strict=True):
        cache.check()
        expected = torch.full(shape, float("nan"), dtype=dtype).flatten(0, 1)
        expected[slots[slots >= 0]] = x.cpu()[slots >= 0]
        assert torch.equal(cache.tensor.cpu().flatten(0, 1).nan_to_num(7), expected.nan_to_num(7))


block_pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8, unique_by=lambda pair: pair[1])


@FEWER
@given(pairs=block_pairs, dtype=st.sampled_from(DTYPES), strided=st.booleans(), within=st.booleans())
def test_copy_blocks(pairs, dtype, strided, within):
    """In all caches; within them, also when one copy overwrites the source of another."""
    guarded = Guarded((2 * 10, 16, 3, 80), dtype, TRITON_DEVICE, gap=16 if strided else 0)
    mine = guarded.tensor.unflatten(0, (2, 10)).copy_(torch.randn(2, 10, 16, 3, 80))
    theirs = mine.cpu().clone()
    others = torch.randn(10, 2, 16, 3, 80).to(dtype).transpose(0, 1)  # as blocks lie in the swap space
    expected = theirs.clone()
    for source, destination in pairs:
        expected[:, destination] = (theirs if within else others)[:, source]
    triton.copy_blocks(mine if within else others.to(TRITON_DEVICE), mine, pairs)
    reference.copy_blocks(theirs if within else others, theirs, pairs)
    guarded.check()
    assert torch.equal(mine.cpu(), expected)
    assert torch.equal(theirs, expected)


# -- around attention --------------------------------------------------------------------------------------------------


sizes = st.sampled_from([1, 2, 24, 64, 80, 100, 576, 1024, 1536])
seeds = st.integers(0, 2**31)


def random(shape, dtype, seed, strided=False):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + (16 if strided else 0), generator=generator)
    return wide.to(dtype).to(TRITON_DEVICE)[..., : shape[-1]]


@FEWER
@given(num_tokens=st.integers(0, 5), num_heads=st.integers(0, 4), size=sizes, dtype=st.sampled_from(DTYPES), strided=st.booleans(), seed=seeds)  # fmt: skip
def test_rms_norm(num_tokens, num_heads, size, dtype, strided, seed):
    """Of hidden states, and (with `num_heads`) of each head's query."""
    shape = (num_tokens, num_heads, size) if num_heads else (num_tokens, size)
    x, weight = random(shape, dtype, seed, strided), random((size,), dtype, seed + 1)
    with guarded_results():
        out = triton.rms_norm(x, weight, 1e-5)
    assert_close(out, reference.rms_norm(x.cpu().double(), weight.cpu().double(), 1e-5))


@FEWER
@given(num_tokens=st.integers(0, 5), size=sizes, dtype=st.sampled_from(DTYPES), strided=st.booleans(), seed=seeds)
def test_add_rms_norm(num_tokens, size, dtype, strided, seed):
    x, residual = (random((num_tokens, size), dtype, seed + i, strided) for i in range(2))
    weight = random((size,), dtype, seed + 2)
    with guarded_results():
        results = triton.add_rms_norm(x, residual, weight, 1e-5)
    expected = reference.add_rms_norm(x.cpu().double(), residual.cpu().double(), weight.cpu().double(), 1e-5)
    for result, value in zip(results, expected, strict=True):
        assert_close(result, value)


@FEWER
@given(
    num_tokens=st.integers(0, 5), heads=st.sampled_from(HEADS), dtype=st.sampled_from(DTYPES), strided=st.booleans(), seed=seeds
)
def test_rotary_embedding(num_tokens, heads, dtype, strided, seed):
    head_dim, num_kv_heads, group = heads
    query = random((num_tokens, num_kv_heads * group, head_dim), dtype, seed, strided)
    key = random((num_tokens, num_kv_heads, head_dim), dtype, seed + 1, strided)
    angles = torch.rand(50, head_dim // 2, generator=torch.Generator().manual_seed(seed)) * 6
    positions = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    tables = angles.cos().to(TRITON_DEVICE), angles.sin().to(TRITON_DEVICE)
    with guarded_results():
        results = triton.rotary_embedding(positions.to(TRITON_DEVICE), query, key, *tables)
    expected = reference.rotary_embedding(positions, query.cpu(), key.cpu(), angles.cos(), angles.sin())
    for result, value in zip(results, expected, strict=True):
        assert_close(result, value)


@FEWER
@given(num_tokens=st.integers(0, 5), size=sizes, dtype=st.sampled_from(DTYPES), strided=st.booleans(), seed=seeds)
def test_silu_and_mul(num_tokens, size, dtype, strided, seed):
    x = random((num_tokens, 2 * size), dtype, seed, strided)
    with guarded_results():
        out = triton.silu_and_mul(x)
    assert_close(out, reference.silu_and_mul(x.cpu().double()))


# -- bad input ---------------------------------------------------------------------------------------------------------

QUERY, KEY_CACHE, VALUE_CACHE, TABLES, LENGTHS, STARTS = range(6)


def wider(x):
    """The same numbers with something between them."""
    return torch.stack([x, x], dim=-1)[..., 0]


BAD_ATTENTION = {
    "a query of another dtype": (QUERY, lambda x: x.half(), "query has dtype float16, but key_cache has float32"),
    "a query of another head size": (
        QUERY,
        lambda x: x[..., :32],
        "query is .*, but must be .num_.*, num_kv_heads.group, head_dim. with num_kv_heads = 3, head_dim = 64",
    ),
    "a query of too few heads": (QUERY, lambda x: x[:, :4], "query is .2, 4, 64., but must be .* with num_kv_heads = 3"),
    "a query with gaps": (QUERY, wider, "query has stride 2 in its last dimension"),
    "a query on another device": (QUERY, lambda x: x.to("meta"), "query is on meta, but key_cache on"),
    "caches of integers": (KEY_CACHE, lambda x: x.int(), "key_cache has dtype int32, but must be a float type"),
    "caches of two dtypes": (VALUE_CACHE, lambda x: x.half(), "value_cache has dtype float16, but key_cache has float32"),
    "caches of two shapes": (VALUE_CACHE, lambda x: x[:-1], "value_cache is .* with num_blocks = 5"),
    "a cache with gaps": (KEY_CACHE, wider, "key_cache has stride 2"),
    "a cache of three dimensions": (
        KEY_CACHE,
        lambda x: x[0],
        "key_cache is .*, but must be .num_blocks, block_size, num_kv_heads, head_dim.",
    ),
    "blocks of no tokens": (KEY_CACHE, lambda x: x[:, :0], "its block_size must be at least 1"),
    "tables of floats": (TABLES, lambda x: x.float(), "block_tables has dtype float32, but must be int32 or int64"),
    "too few tables": (TABLES, lambda x: x[:1], "block_tables is .1, 2., but must be .num_seqs, max_blocks. with num_seqs = 2"),
    "lengths of floats": (LENGTHS, lambda x: x.float(), "context_lens has dtype float32"),
    "a length that does not fit its table": (
        LENGTHS,
        lambda x: x + 30,
        "context_lens has 50, but a table of 2 blocks of 16 holds",
    ),
    "a negative length": (LENGTHS, lambda x: x - 21, "context_lens has -16, but"),
    "a block that is not there": (TABLES, lambda x: x + 1000, "block_tables names block 1[0-9]+, but the cache has 5 blocks"),
    "a negative block": (TABLES, lambda x: x - 1000, "block_tables names block -[0-9]+, but"),
}


@pytest.mark.parametrize("name", BAD_ATTENTION)
@pytest.mark.parametrize("kernels", [reference, cpu, triton], ids=["reference", "cpu", "triton"])
def test_attention_refuses(kernels, name):
    position, change, message = BAD_ATTENTION[name]
    case = make_attention_case([5, 20], [1, 1], device=TRITON_DEVICE if kernels is triton else "cpu")
    args = list(case.ragged_args)
    args[position] = change(args[position])
    if "three dimensions" in name or "no tokens" in name or "integers" in name:
        args[VALUE_CACHE] = change(case.value_cache.tensor)
    with pytest.raises(KernelError, match=message):
        kernels.paged_prefill_attention(*args)
    with pytest.raises(KernelError, match=message):
        kernels.paged_decode_attention(*args[:5], args[6])


@pytest.mark.parametrize("kernels", [reference, cpu, triton], ids=["reference", "cpu", "triton"])
def test_attention_refuses_a_negative_window(kernels):
    case = make_attention_case([5, 20], [1, 1], device=TRITON_DEVICE if kernels is triton else "cpu")
    for attend, args in ((kernels.paged_decode_attention, case.args), (kernels.paged_prefill_attention, case.ragged_args)):
        with pytest.raises(KernelError, match="window is -1, but must be a number of tokens, or 0 for no window"):
            attend(*args, -1)


@pytest.mark.parametrize("kernels", [reference, cpu, triton], ids=["reference", "cpu", "triton"])
def test_prefill_attention_refuses_wrong_starts(kernels):
    case = make_attention_case([5, 20], [5, 3], device=TRITON_DEVICE if kernels is triton else "cpu")
    args = list(case.ragged_args)
    for starts, message in (
        ([0, 5], "query_start_loc is .2., but must be .num_seqs.1. with num_seqs = 2"),
        ([1, 5, 8], "query_start_loc must begin with 0"),
        ([0, 5, 4], "never fall"),
        ([0, 5, 9], "end with at most the 8 rows of query"),
        ([0, 6, 8], "Sequence 0 has 6 new tokens, but a context of only 5"),
    ):
        args[STARTS] = torch.tensor(starts, device=case.query.device)
        with pytest.raises(KernelError, match=message):
            kernels.paged_prefill_attention(*args)


@pytest.mark.parametrize("kernels", [reference, cpu, triton], ids=["reference", "cpu", "triton"])
def test_writing_to_the_cache_refuses(kernels):
    device = TRITON_DEVICE if kernels is triton else "cpu"
    cache = torch.zeros(4, 8, 2, 16, device=device)
    key = torch.zeros(3, 2, 16, device=device)
    slots = torch.tensor([0, 1, 2], device=device)
    for args, message in (
        ((key.half(), key, cache, cache, slots), "key has dtype float16, but key_cache has float32"),
        (
            (key, key[:, :1], cache, cache, slots),
            "value is .3, 1, 16., but must be .num_tokens, num_kv_heads, head_dim. with num_kv_heads = 2",
        ),
        ((key, key, cache, cache, slots[:2]), "slot_mapping is .2., but must be .num_tokens. with num_tokens = 3"),
        ((wider(key), key, cache, cache, slots), "key has stride 2"),
        ((key, key, cache, cache, slots.float()), "slot_mapping has dtype float32"),
        ((key, key, cache, cache, slots + 30), "slot_mapping names slot 32, but the cache has 32 slots"),
        ((key, key, cache.to("meta"), cache, slots), "value_cache is on .*, but key_cache on meta"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.reshape_and_cache(*args)


@pytest.mark.parametrize("kernels", [reference, triton], ids=["reference", "triton"])
def test_operations_around_attention_refuse(kernels):
    x = torch.zeros(3, 16, device=TRITON_DEVICE)
    heads = torch.zeros(3, 2, 16, device=TRITON_DEVICE)
    blocks = torch.zeros(2, 4, 3, 2, 16, device=TRITON_DEVICE)
    table = torch.zeros(10, 8, device=TRITON_DEVICE)
    positions = torch.tensor([0, 1, 2], device=TRITON_DEVICE)
    for call, message in (
        (lambda: kernels.rms_norm(x, x[0, :8], 1e-5), "weight is .8., but must be .size. with size = 16"),
        (lambda: kernels.rms_norm(x, x[0].half(), 1e-5), "weight has dtype float16, but x has float32"),
        (lambda: kernels.rms_norm(x.int(), x[0].int(), 1e-5), "x has dtype int32, but must be a float type"),
        (lambda: kernels.rms_norm(wider(x), x[0], 1e-5), "x has stride 2"),
        (lambda: kernels.add_rms_norm(x, x[:2], x[0], 1e-5), "residual is .2, 16., but must be"),
        (lambda: kernels.silu_and_mul(x[:, :3]), "must be .num_tokens, 2.size."),
        (lambda: kernels.silu_and_mul(wider(x)), "x has stride 2"),
        (
            lambda: kernels.rotary_embedding(positions[:2], heads, heads, table, table),
            "positions is .2., but must be .num_tokens. with num_tokens = 3",
        ),
        (
            lambda: kernels.rotary_embedding(positions, heads, heads, table[:, :4], table[:, :4]),
            "cos is .10, 4., but must be .* with pairs = 8",
        ),
        (lambda: kernels.rotary_embedding(positions + 9, heads, heads, table, table), "positions go from 9 to 11"),
        (lambda: kernels.rotary_embedding(positions, heads, heads.half(), table, table), "key has dtype float16"),
        (lambda: kernels.rotary_embedding(positions, heads, heads, table.half(), table), "cos has dtype float16"),
        (lambda: kernels.copy_blocks(blocks, blocks, [(0, 4)]), "Block 0 was to be copied to block 4, but"),
        (lambda: kernels.copy_blocks(blocks, blocks, [(0, 1), (2, 1)]), "to the same block"),
        (lambda: kernels.copy_blocks(blocks, blocks.half(), [(0, 0)]), "dtypes float32 and float16"),
        (lambda: kernels.copy_blocks(blocks, blocks.to("meta"), [(0, 0)]), "devices .* and meta"),
        (lambda: kernels.copy_blocks(blocks, blocks[:, :, :1], [(0, 0)]), "with blocks of one shape"),
        (lambda: kernels.copy_blocks(blocks, blocks[:1], [(0, 0)]), "only as many caches"),
        (lambda: kernels.copy_blocks(heads, heads, [(0, 0)]), "only as many caches"),
    ):
        with pytest.raises(KernelError, match=message):
            call()


@both
def test_what_a_kernel_cannot_take_is_refused(kernels, device):
    case = make_attention_case([5], [1], heads=(512, 1, 1), device=device)
    with pytest.raises(KernelError, match="512 channels, but .* at most 256"):
        kernels.paged_decode_attention(*case.args)
    case = make_attention_case([5], [1], dtype=torch.float64, device=device)
    with pytest.raises(KernelError, match="dtype .*float64, but"):
        kernels.paged_decode_attention(*case.args)
    if kernels is triton:
        many = make_attention_case([5], [1], heads=(32, 1, 200), device=device)
        for attend, args in ((triton.paged_decode_attention, many.args), (triton.paged_prefill_attention, many.ragged_args)):
            with pytest.raises(KernelError, match="200 query heads share a KV head, but .* at most 128"):
                attend(*args)
        case = make_attention_case([5], [1], device=device)
        for num_splits in (0, -1, 1000):
            with pytest.raises(KernelError, match="num_splits is .*, but must be 1 to 64"):
                triton.paged_decode_attention(*case.args, num_splits=num_splits)
    case = make_attention_case([5, 6], [1, 1], device=device)
    with pytest.raises(KernelError, match="query is a view that is negated"):
        kernels.paged_decode_attention(torch._neg_view(case.query), *case.args[1:])
    key, expanded = torch.zeros(1, 3, 64, device=device), torch.zeros(1, 16, 3, 64, device=device).expand(2, -1, -1, -1)
    with pytest.raises(KernelError, match="key_cache is an expanded tensor"):
        kernels.reshape_and_cache(key, key, expanded, expanded, torch.zeros(1, dtype=torch.int64, device=device))


def test_numbers_are_not_read_back_where_only_shapes_are_checked():
    """Positions beyond the tables raise torch's error instead of a sentence; shapes are checked as before."""
    x, table = torch.zeros(1, 1, 4), torch.zeros(3, 2)
    ops = Ops(reference, Checks.SHAPES)
    with pytest.raises(IndexError):
        ops.rotary_embedding(torch.tensor([7]), x, x, table, table)
    with pytest.raises(KernelError, match="positions go from 7 to 7"):
        Ops(reference).rotary_embedding(torch.tensor([7]), x, x, table, table)
    with pytest.raises(KernelError, match="cos is .3, 1., but must be .* with pairs = 2"):
        ops.rotary_embedding(torch.tensor([7]), x, x, table[:, :1], table[:, :1])


def test_importing_kernels_changes_nothing_global():
    """In a fresh process: not the environment, and not the settings of Numba. (How long OpenMP spins, `import minivllm` says, before torch is there.)"""
    code = (
        "import os, numba, minivllm; before = dict(os.environ), {n: getattr(numba.config, n) for n in dir(numba.config) if n.isupper()};"
        "import minivllm.kernels.cpu, minivllm.layers.attention_backends as backends;"
        "backends.TritonAttentionBackend.load_ops();"
        "after = dict(os.environ), {n: getattr(numba.config, n) for n in dir(numba.config) if n.isupper()};"
        "print([k for b, a in zip(before, after) for k in b.keys() | a.keys() if b.get(k) != a.get(k)])"
    )
    theirs = {"TRITON_INTERPRET", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in theirs}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout == "[]\n", result.stderr
