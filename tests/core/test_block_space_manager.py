"""Paging, in small worked examples. Random workloads are in test_invariants.py."""

from __future__ import annotations

import itertools
from array import array

import pytest

from minivllm import SamplingParams
from minivllm.core.block_allocator import BlockAllocator
from minivllm.core.block_space_manager import BlockSpaceManager
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.scheduler_output import FREED_BLOCK

_ids = itertools.count()


def make_sequence(tokens: int | list[int], **params) -> Sequence:
    token_ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    request = Request(EngineCoreRequest("r", token_ids, SamplingParams(**params), max_num_tokens=1000))
    return Sequence(next(_ids), request)


def allocate_and_compute(manager: BlockSpaceManager, seq: Sequence) -> int:
    """Admit and compute a sequence; the number of cached tokens."""
    cached = manager.find_cached_blocks(seq)
    assert manager.can_allocate(seq, cached)
    manager.allocate(seq, cached)
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_full_blocks(seq)
    return len(cached) * manager.block_size


@pytest.mark.parametrize("num_tokens,num_blocks", [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_prompt_takes_its_length_over_the_block_size_rounded_up(num_tokens, num_blocks):
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=10)
    seq = make_sequence(num_tokens)
    manager.allocate(seq)
    assert len(manager.get_block_table(seq)) == num_blocks
    assert manager.get_num_free_gpu_blocks() == 10 - num_blocks


def test_a_table_grows_at_the_block_boundary_and_only_there():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=10)
    seq = make_sequence(3)
    allocate_and_compute(manager, seq)
    lengths = []
    for token in range(6):
        seq.token_ids.append(token)
        assert manager.append_slots(seq) is None
        seq.num_computed_tokens += 1
        lengths.append(len(manager.get_block_table(seq)))
    assert lengths == [1, 2, 2, 2, 2, 3]


def test_the_watermark_is_kept_at_admission_but_not_for_growth():
    manager = BlockSpaceManager(block_size=1, num_gpu_blocks=10, watermark=0.2)
    assert manager.can_allocate(make_sequence(8))
    assert not manager.can_allocate(make_sequence(9))
    assert manager.can_allocate(make_sequence(10), keep_watermark=False)
    seq = make_sequence(8)
    allocate_and_compute(manager, seq)
    seq.token_ids.append(0)
    assert manager.can_append_slots(seq)


def test_a_fork_shares_all_blocks_and_copies_the_last_one_before_it_writes():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=10)
    parent = make_sequence(6)
    allocate_and_compute(manager, parent)
    child = parent.fork(next(_ids), 1)
    manager.fork(parent, child)
    first, last = manager.get_block_table(parent)
    assert manager.get_block_table(child) == [first, last]
    assert manager.get_num_free_gpu_blocks() == 8

    parent.token_ids.append(1)
    source, destination = manager.append_slots(parent)
    assert source == last
    assert manager.get_block_table(parent) == [first, destination]
    assert manager.get_block_table(child) == [first, last]
    child.token_ids.append(2)
    assert manager.append_slots(child) is None, "the last owner writes in place"
    assert manager.gpu_allocator.ref_counts[first] == 2

    manager.free(parent)
    manager.free(child)
    assert manager.get_num_free_gpu_blocks() == 10


def test_a_fork_at_a_block_boundary_copies_nothing():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=10)
    parent = make_sequence(8)
    allocate_and_compute(manager, parent)
    child = parent.fork(next(_ids), 1)
    manager.fork(parent, child)
    for seq in (parent, child):
        seq.token_ids.append(7)
        assert manager.append_slots(seq) is None
    assert manager.get_block_table(parent)[:2] == manager.get_block_table(child)[:2]
    assert manager.get_block_table(parent)[2] != manager.get_block_table(child)[2]


def test_copy_on_write_needs_a_free_block():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=1)
    parent = make_sequence(3)
    allocate_and_compute(manager, parent)
    child = parent.fork(next(_ids), 1)
    manager.fork(parent, child)
    parent.token_ids.append(1)
    assert not manager.can_append_slots(parent)
    manager.free(child)
    assert manager.can_append_slots(parent)


def test_swapping_moves_a_table_to_the_host_and_back():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=4, num_cpu_blocks=3)
    seq = make_sequence(10)
    allocate_and_compute(manager, seq)
    table = list(manager.get_block_table(seq))
    assert manager.can_swap_out(seq)
    out = manager.swap_out(seq)
    assert [block for block, _ in out] == table
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (4, 0)
    back = manager.swap_in(seq)
    assert [host for host, _ in back] == [host for _, host in out]
    assert manager.get_block_table(seq) == [block for _, block in back]
    assert manager.get_num_free_cpu_blocks() == 3


def test_a_sequence_larger_than_the_host_cannot_be_swapped_out():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=4, num_cpu_blocks=2)
    seq = make_sequence(10)
    allocate_and_compute(manager, seq)
    assert not manager.can_swap_out(seq)


def test_the_prefix_cache_finds_full_blocks_of_the_same_beginning():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=20, enable_prefix_caching=True)
    first = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert allocate_and_compute(manager, first) == 0
    second = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert allocate_and_compute(manager, second) == 8
    assert manager.get_block_table(second)[:2] == manager.get_block_table(first)[:2]
    third = make_sequence([1, 2, 3, 4, 0, 6, 7, 8, 9])
    assert allocate_and_compute(manager, third) == 4
    shifted = make_sequence([5, 6, 7, 8, 9])
    assert allocate_and_compute(manager, shifted) == 0, "the same tokens after another beginning are not the same block"


def test_the_last_token_is_always_left_to_compute():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=20, enable_prefix_caching=True)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    allocate_and_compute(manager, make_sequence(tokens))
    assert allocate_and_compute(manager, make_sequence(tokens)) == 4


def test_a_block_that_is_allocated_but_not_computed_is_not_matched():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=20, enable_prefix_caching=True)
    tokens = [1, 2, 3, 4, 5]
    first, second = make_sequence(tokens), make_sequence(tokens)
    manager.allocate(first, manager.find_cached_blocks(first))
    assert manager.find_cached_blocks(second) == []


def test_freed_blocks_stay_cached_until_they_are_needed_least_recently_used_first():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=4, enable_prefix_caching=True)
    old, new = make_sequence([1, 1, 1, 1, 2, 2, 2, 2]), make_sequence([3, 3, 3, 3, 4, 4, 4, 4])
    for seq in (old, new):
        allocate_and_compute(manager, seq)
        manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 4
    other = make_sequence([9, 9, 9, 9, 9])
    allocate_and_compute(manager, other)  # takes two blocks: the old ones
    assert manager.find_cached_blocks(make_sequence([1, 1, 1, 1, 5])) == []
    assert len(manager.find_cached_blocks(make_sequence([3, 3, 3, 3, 4, 4, 4, 4, 5]))) == 2


def test_a_cached_block_in_the_free_list_counts_once():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=3, watermark=0, enable_prefix_caching=True)
    first = make_sequence([1] * 8)
    allocate_and_compute(manager, first)
    manager.free(first)
    second = make_sequence([1] * 8 + [2] * 4)
    cached = manager.find_cached_blocks(second)
    assert len(cached) == 2
    assert manager.can_allocate(second, cached), "two cached blocks and a fresh one are all three blocks"
    third = make_sequence([1] * 8 + [2] * 5)
    assert not manager.can_allocate(third, manager.find_cached_blocks(third)), "it would need a fourth"


def test_resetting_the_prefix_cache_forgets_everything():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=4, enable_prefix_caching=True)
    seq = make_sequence([1] * 5)
    allocate_and_compute(manager, seq)
    manager.reset_prefix_cache()
    assert manager.find_cached_blocks(make_sequence([1] * 5)) == []


def test_prompt_logprobs_read_no_cache_because_they_need_every_position():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=4, enable_prefix_caching=True)
    allocate_and_compute(manager, make_sequence([1] * 5))
    assert manager.find_cached_blocks(make_sequence([1] * 5, prompt_logprobs=1)) == []


def test_drafts_get_the_slots_there_are():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=3, watermark=0)
    seq = make_sequence(6)
    allocate_and_compute(manager, seq)
    assert manager.append_draft_slots(seq, 2) == 2, "the second block has room for two more"
    assert len(manager.get_block_table(seq)) == 2
    assert manager.append_draft_slots(seq, 5) == 5
    assert manager.append_draft_slots(seq, 10) == 6, "and the third block is the last"
    manager.free_draft_slots(seq)
    assert len(manager.get_block_table(seq)) == 2
    assert manager.get_num_free_gpu_blocks() == 1


def test_wrong_drafts_cost_the_prefix_cache_no_more_than_a_block():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=5, enable_prefix_caching=True, watermark=0)
    remembered = make_sequence([1] * 12)
    allocate_and_compute(manager, remembered)
    manager.free(remembered)
    seq = make_sequence([2] * 4)
    allocate_and_compute(manager, seq)
    for _ in range(3):
        assert manager.append_draft_slots(seq, 4) == 4
        manager.free_draft_slots(seq)
    assert len(manager.find_cached_blocks(make_sequence([1] * 13))) == 3


def test_releasing_a_block_twice_is_an_error():
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.release(block)
    with pytest.raises(ValueError, match="more often than it was taken"):
        allocator.release(block)


def test_an_empty_pool_says_so():
    allocator = BlockAllocator(1)
    allocator.allocate()
    with pytest.raises(IndexError, match="no free block"):
        allocator.allocate()


def make_salted(token_ids: list[int], cache_salt: str | None) -> Sequence:
    return Sequence(
        next(_ids), Request(EngineCoreRequest("r", token_ids, SamplingParams(), max_num_tokens=1000, cache_salt=cache_salt))
    )


def test_only_requests_with_the_same_salt_share_blocks():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=40, enable_prefix_caching=True)
    tokens = list(range(13))
    found = [allocate_and_compute(manager, make_salted(tokens, salt)) for salt in (None, "a", "b", "a", None, "\ud800", "")]
    assert found == [0, 0, 0, 12, 12, 0, 0]


def test_no_salt_stands_for_a_block():
    tokens = list(range(1, 9))
    salt = array("q", tokens[:4]).tobytes().decode()  # what the first block is hashed from
    plain, salted = make_salted(tokens, None), make_salted(tokens[4:], salt)
    assert not set(plain.extend_block_hashes(4)) & set(salted.extend_block_hashes(4))


def test_blocks_that_nobody_can_find_are_handed_out_first_the_last_one_freed_before_the_others():
    allocator = BlockAllocator(6)
    blocks = [allocator.allocate() for _ in range(5)]
    for block in (0, 1):
        allocator.cache(block, bytes([block]))
    for block in (3, 1, 4, 0, 2):
        allocator.release(block)
    order = [2, 4, 3, 5, 1, 0]  # block 5 was never used; 1 was freed before 0, and both can be found
    assert allocator.get_free_blocks() == order
    assert [allocator.allocate() for _ in order] == order
    assert blocks == [0, 1, 2, 3, 4]


def test_a_freed_table_is_handed_out_again_in_its_order():
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=10)
    first, second = make_sequence(14), make_sequence(14)
    manager.allocate(first)
    table = list(manager.get_block_table(first))
    manager.free(first)
    manager.allocate(second)
    assert manager.get_block_table(second) == table


# -- sliding windows -------------------------------------------------------------------------------------------------------


def make_windowed(window: int, num_gpu_blocks: int = 10, max_new_tokens: int | None = None, **options) -> BlockSpaceManager:
    manager = BlockSpaceManager(block_size=4, num_gpu_blocks=num_gpu_blocks, **options)
    manager.use_window(window, max_new_tokens)
    return manager


def compute(manager: BlockSpaceManager, seq: Sequence, num_tokens: int) -> None:
    """The next tokens have been computed."""
    seq.num_computed_tokens += num_tokens
    manager.cache_full_blocks(seq)
    manager.free_blocks_behind_window(seq)


@pytest.mark.parametrize(
    ("window", "num_freed"),
    [(1, [0, 0, 0, 0, 1, 1, 1, 1, 2]), (4, [0, 0, 0, 0, 0, 0, 0, 1, 1]), (5, [0, 0, 0, 0, 0, 0, 0, 0, 1]), (0, [0] * 9)],
)
def test_a_block_is_freed_when_the_next_token_sees_none_of_it(window, num_freed):
    """With a window of 4, the token at position 7 sees 4 to 7, and block 0 holds 0 to 3."""
    manager = make_windowed(window)
    seq = make_sequence(12)
    manager.allocate(seq)
    first, *others = list(manager.get_block_table(seq))
    seen = []
    for _ in range(9):
        seen.append(manager.get_block_table(seq).count(FREED_BLOCK))
        assert manager.get_num_free_gpu_blocks() == 7 + seen[-1]
        compute(manager, seq, 1)
    assert seen == num_freed
    assert manager.get_block_table(seq)[2] == others[1]
    assert manager.gpu_allocator.ref_counts[first] == (window == 0)
    manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 10
    assert not manager.num_freed_blocks


def test_a_step_in_flight_still_looks_at_its_blocks():
    manager = make_windowed(1)
    seq = make_sequence(8)
    manager.allocate(seq)
    seq.num_tokens_in_flight = 5
    compute(manager, seq, 8)
    assert FREED_BLOCK not in manager.get_block_table(seq)
    seq.num_tokens_in_flight = 4
    manager.free_blocks_behind_window(seq)
    assert manager.get_block_table(seq)[0] == FREED_BLOCK


def test_siblings_share_what_is_left_and_the_last_one_frees_it():
    manager = make_windowed(2)
    parent, child = make_sequence(11), make_sequence(11)
    manager.allocate(parent)
    compute(manager, parent, 6)
    manager.fork(parent, child)
    assert manager.get_block_table(child) == manager.get_block_table(parent)
    assert manager.get_block_table(child)[0] == FREED_BLOCK
    assert manager.get_num_free_gpu_blocks() == 8
    compute(manager, parent, 4)
    assert manager.get_num_free_gpu_blocks() == 8, "the child still has the second block"
    child.num_computed_tokens = 6
    compute(manager, child, 4)
    assert manager.get_num_free_gpu_blocks() == 9
    manager.free(parent)
    manager.free(child)
    assert manager.get_num_free_gpu_blocks() == 10


def test_only_blocks_that_are_held_are_swapped():
    manager = make_windowed(2, num_cpu_blocks=2)
    seq = make_sequence(16)
    manager.allocate(seq)
    assert not manager.can_swap_out(seq)
    compute(manager, seq, 10)
    held = manager.get_block_table(seq)[2:]
    assert manager.can_swap_out(seq)
    out = manager.swap_out(seq)
    assert [block for block, _ in out] == held
    assert manager.swapped_tables[seq.seq_id] == [FREED_BLOCK, FREED_BLOCK, *(host for _, host in out)]
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (10, 0)
    assert manager.can_swap_in(seq)
    back = manager.swap_in(seq)
    assert [host for host, _ in back] == [host for _, host in out]
    assert manager.get_block_table(seq) == [FREED_BLOCK, FREED_BLOCK, *(block for _, block in back)]
    manager.free(seq)
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (10, 2)


def test_freed_blocks_stay_in_the_prefix_cache_and_a_later_prompt_takes_only_those_that_it_sees():
    manager = make_windowed(4, num_gpu_blocks=5, enable_prefix_caching=True)
    first, second = make_sequence(17), make_sequence(17)
    manager.allocate(first)
    table = list(manager.get_block_table(first))
    compute(manager, first, 17)
    assert manager.get_block_table(first) == [FREED_BLOCK] * 3 + table[3:]
    cached = manager.find_cached_blocks(second)
    assert cached == table[:4]
    assert manager.can_allocate(second, cached)
    manager.allocate(second, cached)
    assert manager.get_block_table(second)[:4] == [FREED_BLOCK] * 3 + table[3:4], "its first new token, at 16, sees 13 to 16"
    assert manager.get_num_free_gpu_blocks() == 5 - 3


def test_a_prompt_in_chunks_gets_blocks_as_it_goes_on():
    """Five blocks are enough for 40 tokens, 8 at a time: two for a chunk, and up to two that its first token sees."""
    manager = make_windowed(5, num_gpu_blocks=5, max_new_tokens=8, watermark=0.0)
    seq = make_sequence(40)
    assert manager.can_allocate(seq)
    manager.allocate(seq)
    assert len(manager.get_block_table(seq)) == 2
    for start in range(0, 40, 8):
        assert seq.num_computed_tokens == start
        assert manager.append_chunk_slots(seq, 8) == 8
        compute(manager, seq, 8)
    assert len(manager.get_block_table(seq)) == 10
    other = make_sequence(20)
    assert manager.can_allocate(other)
    manager.allocate(other)
    other.num_computed_tokens = 8
    while manager.get_num_free_gpu_blocks() > 1:
        manager.gpu_allocator.allocate()
    assert manager.append_chunk_slots(other, 8) == 4, "one block is left"
    other.num_computed_tokens = 12
    assert manager.append_chunk_slots(other, 8) == 0


def test_who_would_be_preempted_frees_only_what_it_holds():
    manager = make_windowed(1, num_gpu_blocks=5, watermark=0.0)
    victim = make_sequence(16)
    manager.allocate(victim)
    compute(manager, victim, 12)
    assert manager.get_num_free_gpu_blocks() == 4
    assert manager.can_allocate(make_sequence(20), without=[victim])
    assert not manager.can_allocate(make_sequence(21), without=[victim])


def test_a_prompt_longer_than_the_cache_comes_back_from_the_host():
    """It held one block when it was swapped out, and needs one more for its next token; the rest follow when it goes on."""
    manager = make_windowed(5, num_gpu_blocks=5, num_cpu_blocks=5, max_new_tokens=8, watermark=0.0)
    seq = make_sequence(40)
    manager.allocate(seq)
    compute(manager, seq, 8)
    manager.swap_out(seq)
    assert manager.can_swap_in(seq)
    taken = [manager.gpu_allocator.allocate() for _ in range(4)]
    assert not manager.can_swap_in(seq)
    manager.gpu_allocator.release(taken[0])
    assert manager.can_swap_in(seq)
