"""The pictures of a kernel's way through a paged cache are those of what it has read."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")  # there is none for macOS
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from minivllm.errors import ConfigError
from minivllm.kernels.accesses import record_accesses
from minivllm.viz.palette import request_color
from minivllm.viz.walk import draw_tiles, draw_walk, find_tiles, find_walk, show_walk

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"), reason="records interpreted kernels"
)


def decode(tables, lengths, block_size=4, num_blocks=12, num_kv_heads=1):
    """A recorded launch of the package's decode kernel."""
    from minivllm.kernels.triton import paged_decode_attention

    cache = torch.randn(num_blocks, block_size, num_kv_heads, 16)
    tables, lengths = torch.tensor(tables, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    with record_accesses() as launches:
        paged_decode_attention(
            torch.randn(len(lengths), num_kv_heads, 16), cache, cache.clone(), tables, lengths, 0.25, num_splits=1
        )
    return launches[0]


def prefill(tables, lengths, starts, block_size=4, num_blocks=12):
    from minivllm.kernels.triton import paged_prefill_attention

    cache = torch.randn(num_blocks, block_size, 1, 16)
    tables, lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in (tables, lengths, starts))
    with record_accesses() as launches:
        paged_prefill_attention(torch.randn(int(starts[-1]), 1, 16), cache, cache.clone(), tables, lengths, starts, 0.25)
    return launches[0]


TABLES, LENGTHS = [[9, 2, 7], [4, 11, 0]], [10, 5]


def boxes(figure, label):
    found = [collection for collection in figure.axes[0].collections if collection.get_label() == label]
    return sum(len(collection.get_paths()) for collection in found)


def test_a_walk_has_each_block_once_in_the_order_of_the_table():
    visits = find_walk(decode(TABLES, LENGTHS), "key_ptr")
    assert [(program[0], block, slots) for program, block, slots in visits] == [
        (0, 9, [0, 1, 2, 3]), (0, 2, [0, 1, 2, 3]), (0, 7, [0, 1]), (1, 4, [0, 1, 2, 3]), (1, 11, [0]),
    ]  # fmt: skip
    assert len(find_walk(decode(TABLES, LENGTHS), "key_ptr", program=(1, 0, 0))) == 2


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_walk_reads_every_slot_of_a_context_and_no_other(data):
    block_size = data.draw(st.sampled_from([1, 2, 4]))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(30)))
    tables = [order[9 * i : 9 * i + 9] for i in range(len(lengths))]
    visits = find_walk(decode(tables, lengths, block_size, num_blocks=30), "key_ptr")
    read = [(program[0], block, slot) for program, block, slots in visits for slot in slots]
    wanted = [
        (i, tables[i][position // block_size], position % block_size) for i, n in enumerate(lengths) for position in range(n)
    ]
    assert sorted(read) == sorted(wanted)


def test_what_is_read_is_drawn_and_what_is_not_stays_white():
    launch = decode(TABLES, LENGTHS)
    figure = draw_walk(launch, tensor="key_ptr")
    assert boxes(figure, "slots") == 12 * 4
    assert boxes(figure, "sequence 0") == 10 and boxes(figure, "sequence 1") == 5
    numbers = [text.get_text() for text in figure.axes[0].texts if text.get_zorder() == 5]
    assert numbers == ["0", "1", "2", "0", "1"]
    assert figure.get_suptitle() == "_decode: 5 of 12 blocks are read, 5 visits"
    [first] = [collection for collection in figure.axes[0].collections if collection.get_label() == "sequence 0"][:1]
    assert to_hex(first.get_facecolor()[0]) == request_color(0).lower()


def test_a_step_frames_one_visit_and_hides_later_ones():
    figure = draw_walk(decode(TABLES, LENGTHS), 1, tensor="key_ptr")
    assert boxes(figure, "sequence 0") == 8 and boxes(figure, "sequence 1") == 0 and boxes(figure, "now") == 1
    assert "visit 2: program 0 reads 4 of 4 slots of block 2" in figure.get_suptitle()
    with pytest.raises(ConfigError, match="no step 5: the walk has 5"):
        draw_walk(decode(TABLES, LENGTHS), 5, tensor="key_ptr")


def test_the_tiles_of_a_ragged_prefill_see_what_is_before_them():
    starts = [0, 10, 12]
    grids, _ = find_tiles(prefill(TABLES, LENGTHS, starts), TABLES, LENGTHS, starts, "key_ptr", "out_ptr")
    assert [grid.shape for grid in grids] == [(10, 10), (2, 5)]
    assert np.array_equal(grids[0] == 1, np.tril(np.ones((10, 10), bool)))
    assert np.array_equal(grids[1] == 1, [[True] * 4 + [False], [True] * 5])
    figure = draw_tiles(prefill(TABLES, LENGTHS, starts), TABLES, LENGTHS, starts, "key_ptr", "out_ptr")
    counts = sum(55 if axes is figure.axes[0] else 9 for axes in figure.axes)
    assert figure.get_suptitle().startswith(f"_prefill: {counts} scores count")
    assert [axes.get_title() for axes in figure.axes] == ["sequence 0: 10 new of 10", "sequence 1: 2 new of 5"]


def test_a_batch_without_sequences_is_drawn_too():
    launch = prefill(TABLES, LENGTHS, [0, 10, 12])
    assert draw_tiles(launch, [], [], [0], "key_ptr", "out_ptr").axes


def test_a_block_that_two_sequences_share_has_a_stripe_for_each():
    figure = draw_walk(decode([[1, 2], [1, 3]], [8, 6]), tensor="key_ptr")
    numbers = [text.get_text() for text in figure.axes[0].texts if text.get_zorder() == 5]
    assert numbers == ["0", "1", "0", "1"]
    heights = {round(text.get_position()[1] % 1, 2) for text in figure.axes[0].texts if text.get_zorder() == 5}
    assert heights == {0.45, 0.6, 0.75}


@pytest.mark.parametrize("count", [1, 7, 12])
def test_many_sequences_and_none_that_is_read_are_drawn(count):
    tables, lengths, starts = [[i, 0] for i in range(count)], [4] * count, list(range(0, 2 * count + 1, 2))
    assert draw_walk(decode(tables, lengths), tensor="key_ptr").axes
    assert len(draw_tiles(prefill(tables, lengths, starts), tables, lengths, starts, "key_ptr", "out_ptr").axes) == count
    nothing = decode([[1]], [0])
    assert draw_walk(nothing, tensor="key_ptr").axes
    with pytest.raises(ConfigError, match="Nothing was read of key_ptr"):
        draw_walk(nothing, 0, tensor="key_ptr")


def test_what_is_no_paged_cache_is_refused():
    launch = decode(TABLES, LENGTHS)
    with pytest.raises(ConfigError, match="no tensor 'cache', only out_ptr, "):
        find_walk(launch, "cache")
    with pytest.raises(ConfigError, match=r"tables_ptr has shape \[2, 3\], but a paged cache is"):
        find_walk(launch, "tables_ptr")
    with pytest.raises(ConfigError, match="no tensor 'output', only"):
        find_tiles(launch, TABLES, LENGTHS, [0, 1, 2], "key_ptr", "output")
    with pytest.raises(ConfigError, match="No Triton kernel was launched"):
        show_walk(print)


def test_the_player_goes_through_the_visits():
    from minivllm.kernels.triton import paged_decode_attention

    cache = torch.randn(12, 4, 1, 16)
    tables, lengths = torch.tensor(TABLES, dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)
    box = show_walk(
        paged_decode_attention, torch.randn(2, 1, 16), cache, cache.clone(), tables, lengths, 0.25, tensor="key_ptr", num_splits=1
    )
    assert box.slider.max == 5
    before = box.children[1].value
    box.slider.value = 3
    assert box.children[1].value != before
