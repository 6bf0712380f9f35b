"""Paging for the KV cache: a block table per sequence says which blocks hold its tokens' keys and values.

A block holds `block_size` consecutive tokens of one sequence. Token i of a sequence is in block `table[i // block_size]`, at offset
`i % block_size`. Sequences can share blocks: after a fork, or when the prefix cache finds that a prompt begins like an earlier one.
Before a sequence writes to a shared block, it gets its own copy (copy-on-write).

The idea is PagedAttention's (Kwon et al., 2023, arXiv:2309.06180); the interface follows vLLM's
`vllm/core/block_manager.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from minivllm.core.block_allocator import BlockAllocator
from minivllm.request import Sequence
from minivllm.scheduler_output import FREED_BLOCK


class BlockSpaceManager:
    """Owns every block table, and the pools of device and host blocks.

    `allocate`, `append_slots`, `swap_out` and `swap_in` each have a `can_...` counterpart that says whether there are enough blocks.

    Args:
        block_size: Tokens in a block.
        num_gpu_blocks: Blocks on the device (called "gpu" even where the device is a CPU).
        num_cpu_blocks: Blocks in host memory, for swapping.
        watermark: Fraction of the device blocks kept free when sequences are admitted, so that running sequences can grow for a
            while before one of them must be preempted.
        enable_prefix_caching: Let prompts reuse the computed blocks of earlier sequences with the same beginning.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        enable_prefix_caching: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.gpu_allocator = BlockAllocator(num_gpu_blocks)
        self.cpu_allocator = BlockAllocator(num_cpu_blocks)
        self.block_tables: dict[int, list[int]] = {}
        """Device block tables, by sequence id."""
        self.swapped_tables: dict[int, list[int]] = {}
        """Host block tables of swapped-out sequences."""
        self.num_cached_blocks: dict[int, int] = {}
        """How many of a sequence's first blocks are registered in the prefix cache, or came from it."""
        self.window = 0
        """How many tokens back any token sees, if blocks before them are freed; 0 if sequences keep all blocks. See `use_window`."""
        self.max_new_tokens: int | None = None
        """With a window: the tokens that a sequence gets blocks for when it is admitted. None: all."""
        self.num_freed_blocks: dict[int, int] = {}
        """How many of a sequence's first blocks lie behind its window; in their places, tables have `FREED_BLOCK`."""

    def use_window(self, window: int, max_new_tokens: int | None = None) -> None:
        """From now on, free blocks as soon as no token looks at them again, in `free_blocks_behind_window`.

        Args:
            window: How many tokens each token sees, itself included; in a model whose layers differ, the largest number.
            max_new_tokens: The most tokens of a prompt that one step computes, if prompts are computed in chunks. A sequence then gets blocks
                for so many, and more from `append_chunk_slots` as it goes on, so that a prompt may be longer than the cache. None: a prompt is
                computed in one step, and gets all its blocks for it.
        """
        self.window, self.max_new_tokens = window, max_new_tokens

    # -- admission -----------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for this many tokens: the quotient, rounded up."""
        return -(-num_tokens // self.block_size)

    def find_cached_blocks(self, seq: Sequence) -> list[int]:
        """The longest run of prefix-cache blocks that holds the beginning of the sequence.

        The last token is never matched: it must be computed to get the logits for the next one.
        """
        if not self.enable_prefix_caching or seq.request.sampling_params.prompt_logprobs is not None:
            return []
        hashes = seq.extend_block_hashes(self.block_size)
        blocks: list[int] = []
        for block_hash in hashes[: (seq.num_tokens - 1) // self.block_size]:
            block = self.gpu_allocator.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_allocate(
        self,
        seq: Sequence,
        cached_blocks: list[int] | None = None,
        keep_watermark: bool = True,
        without: Collection[Sequence] = (),
    ) -> bool:
        """Whether `allocate(seq, cached_blocks)` would find enough blocks and leave the watermark free, once those in `without` are preempted."""
        cached_blocks, freed = cached_blocks or [], self._blocks_held_only_by(without)
        num_needed = self._num_blocks_to_begin(seq, len(cached_blocks)) - len(cached_blocks)
        cached_blocks = cached_blocks[self._num_blocks_behind(len(cached_blocks) * self.block_size) :]
        # A cached block without references counts as free until it is taken.
        num_needed += sum(self.gpu_allocator.ref_counts[block] == 0 or block in freed for block in cached_blocks)
        watermark = self.watermark_blocks if keep_watermark else 0
        return self.gpu_allocator.num_free + len(freed) - num_needed >= watermark

    def _blocks_held_only_by(self, sequences: Collection[Sequence]) -> set[int]:
        """The device blocks that would be free without these sequences."""
        counts = Counter(block for seq in sequences for block in self._held_blocks(seq))
        return {block for block, count in counts.items() if count == self.gpu_allocator.ref_counts[block]}

    def allocate(self, seq: Sequence, cached_blocks: list[int] | None = None) -> None:
        """Give a sequence its block table: the cached blocks first, then new ones for its other tokens (with a window, for the first of them)."""
        table = list(cached_blocks or [])
        num_freed, num_blocks = self._num_blocks_behind(len(table) * self.block_size), self._num_blocks_to_begin(seq, len(table))
        for block in table[num_freed:]:  # referenced before anything is allocated, so that none of them is handed out
            self.gpu_allocator.share(block)
        self.num_cached_blocks[seq.seq_id] = len(table)
        if num_freed:
            table[:num_freed] = [FREED_BLOCK] * num_freed
            self.num_freed_blocks[seq.seq_id] = num_freed
        for _ in range(num_blocks - len(table)):
            table.append(self.gpu_allocator.allocate())
        self.block_tables[seq.seq_id] = table

    def _num_blocks_to_begin(self, seq: Sequence, num_cached_blocks: int) -> int:
        """The length of the table that a sequence is admitted with."""
        most = seq.num_tokens if self.max_new_tokens is None else num_cached_blocks * self.block_size + self.max_new_tokens
        return self.num_blocks_for(min(seq.num_tokens, most))

    # -- growth --------------------------------------------------------------------------------------------------

    def can_append_slots(self, seq: Sequence) -> bool:
        """Whether `append_slots(seq)` would find enough blocks."""
        num_tokens, num_blocks = seq.num_tokens, len(self.block_tables[seq.seq_id])
        if num_tokens <= num_blocks * self.block_size:  # the common case: room in the last block; at most a copy of it is needed
            return self.gpu_allocator.num_free > 0 or not self._must_copy(seq)
        return self.gpu_allocator.num_free >= self.num_blocks_for(num_tokens) - num_blocks

    def append_slots(self, seq: Sequence) -> tuple[int, int] | None:
        """Make room for all tokens of the sequence, in blocks that it may write to.

        Returns:
            (source, destination) of a block to copy first, if the block that the next token goes to was shared (copy-on-write);
            else None.
        """
        table = self.block_tables[seq.seq_id]
        missing = self.num_blocks_for(seq.num_tokens) - len(table)
        if missing > 0:
            table.extend(self.gpu_allocator.allocate() for _ in range(missing))
            return None
        if self._must_copy(seq):
            position = seq.num_computed_tokens // self.block_size
            source, destination = table[position], self.gpu_allocator.allocate()
            table[position] = destination
            self.gpu_allocator.release(source)
            return source, destination
        return None

    def append_draft_slots(self, seq: Sequence, num_drafts: int) -> int:
        """Make room for draft tokens after the known ones while blocks are free. Called after `append_slots`.

        Returns:
            How many of the `num_drafts` draft tokens there is room for.
        """
        table = self.block_tables[seq.seq_id]
        missing = self.num_blocks_for(seq.num_tokens + num_drafts) - len(table)
        table.extend(self.gpu_allocator.allocate() for _ in range(min(missing, self.gpu_allocator.num_free)))
        return min(num_drafts, len(table) * self.block_size - seq.num_tokens)

    def free_draft_slots(self, seq: Sequence) -> None:
        """Free the blocks beyond the computed tokens: they hold only rejected drafts."""
        table = self.block_tables[seq.seq_id]
        while len(table) > self.num_blocks_for(seq.num_computed_tokens):
            self.gpu_allocator.release(table.pop())

    def append_chunk_slots(self, seq: Sequence, num_tokens: int) -> int:
        """Make room for the next tokens of a prompt while blocks are free.

        Returns:
            How many of the `num_tokens` tokens there is room for.
        """
        table, first = self.block_tables[seq.seq_id], seq.num_computed_tokens
        missing = self.num_blocks_for(first + num_tokens) - len(table)
        table.extend(self.gpu_allocator.allocate() for _ in range(min(missing, self.gpu_allocator.num_free)))
        return min(num_tokens, len(table) * self.block_size - first)

    def _must_copy(self, seq: Sequence) -> bool:
        block = self.block_tables[seq.seq_id][seq.num_computed_tokens // self.block_size]
        return self.gpu_allocator.ref_counts[block] > 1

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Make the sequence's full, computed blocks available to the prefix cache.

        Called after the step that computed them, never before: a block that is only planned, or that a step in flight may fail to compute,
        must not be matched.
        """
        if not self.enable_prefix_caching:
            return
        first = self.num_cached_blocks[seq.seq_id]
        num_full = (seq.num_computed_tokens - seq.num_tokens_in_flight) // self.block_size
        if num_full > first:
            hashes = seq.extend_block_hashes(self.block_size)
            table = self.block_tables[seq.seq_id]
            for i in range(first, num_full):
                self.gpu_allocator.cache(table[i], hashes[i])
            self.num_cached_blocks[seq.seq_id] = num_full

    # -- windows ---------------------------------------------------------------------------------------------

    def free_blocks_behind_window(self, seq: Sequence) -> None:
        """Free the blocks that no later token of the sequence looks at, and put `FREED_BLOCK` in their places.

        Called after `cache_full_blocks`, so that the prefix cache still finds them. Steps in flight count as not computed.
        """
        first, num_freed = seq.num_computed_tokens - seq.num_tokens_in_flight, self.num_freed_blocks.get(seq.seq_id, 0)
        num_behind = self._num_blocks_behind(first)
        if num_behind > num_freed:
            table = self.block_tables[seq.seq_id]
            for i in range(num_freed, num_behind):
                self.gpu_allocator.release(table[i])
                table[i] = FREED_BLOCK
            self.num_freed_blocks[seq.seq_id] = num_behind

    def _num_blocks_behind(self, position: int) -> int:
        """The blocks wholly before the window of the token at this position."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def _held_blocks(self, seq: Sequence) -> list[int]:
        """The device blocks that a sequence still holds."""
        table, num_freed = self.block_tables.get(seq.seq_id, []), self.num_freed_blocks.get(seq.seq_id, 0)
        return table[num_freed:] if num_freed else table

    # -- sharing and freeing ---------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child the parent's blocks: another reference to each, no copy."""
        for block in self._held_blocks(parent):
            self.gpu_allocator.share(block)
        self.block_tables[child.seq_id] = list(self.block_tables[parent.seq_id])
        if parent.seq_id in self.num_freed_blocks:
            self.num_freed_blocks[child.seq_id] = self.num_freed_blocks[parent.seq_id]
        self.num_cached_blocks[child.seq_id] = self.num_cached_blocks[parent.seq_id]

    def free(self, seq: Sequence) -> None:
        """Free all blocks of the sequence, on device and host. Does nothing if it has none.

        The last block is freed first, so that among cached blocks it is evicted first: later prompts most likely share the beginning of a
        text.
        """
        for block in reversed(self._held_blocks(seq)):
            self.gpu_allocator.release(block)
        self.block_tables.pop(seq.seq_id, None)
        num_freed = self.num_freed_blocks.pop(seq.seq_id, 0)
        for block in reversed(self.swapped_tables.pop(seq.seq_id, [])[num_freed:]):
            self.cpu_allocator.release(block)
        self.num_cached_blocks.pop(seq.seq_id, None)

    # -- swapping ------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq: Sequence) -> bool:
        """Whether the host has room for the sequence's blocks."""
        return self.cpu_allocator.num_free >= len(self._held_blocks(seq))

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        """Move the sequence's blocks to the host. Returns (device block, host block) pairs to copy."""
        table = self._held_blocks(seq)
        num_freed = len(self.block_tables.pop(seq.seq_id)) - len(table)
        moves = [(block, self.cpu_allocator.allocate()) for block in table]
        for block in reversed(table):
            self.gpu_allocator.release(block)
        self.swapped_tables[seq.seq_id] = [FREED_BLOCK] * num_freed + [host for _, host in moves]
        return moves

    def can_swap_in(self, seq: Sequence, keep_watermark: bool = True) -> bool:
        """Whether the device has room for the sequence's blocks and its next token."""
        watermark = self.watermark_blocks if keep_watermark else 0
        num_blocks = min(self.num_blocks_for(seq.num_tokens), len(self.swapped_tables[seq.seq_id]) + 1)
        return self.gpu_allocator.num_free - (num_blocks - self.num_freed_blocks.get(seq.seq_id, 0)) >= watermark

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]]:
        """Move the sequence's blocks back to the device. Returns (host block, device block) pairs to copy."""
        num_freed = self.num_freed_blocks.get(seq.seq_id, 0)
        host_table = self.swapped_tables.pop(seq.seq_id)[num_freed:]
        moves = [(host, self.gpu_allocator.allocate()) for host in host_table]
        for host in reversed(host_table):
            self.cpu_allocator.release(host)
        self.block_tables[seq.seq_id] = [FREED_BLOCK] * num_freed + [block for _, block in moves]
        return moves

    # -- inspection -------------------------------------------------------------------------------------------------

    def get_block_table(self, seq: Sequence) -> list[int]:
        """The device blocks of a sequence, in the order of its tokens, `FREED_BLOCK` for those behind its window. This is the manager's own list:
        do not change it.
        """
        return self.block_tables[seq.seq_id]

    def get_num_free_gpu_blocks(self) -> int:
        """Device blocks without references."""
        return self.gpu_allocator.num_free

    def get_num_free_cpu_blocks(self) -> int:
        """Host blocks without references."""
        return self.cpu_allocator.num_free

    def get_free_blocks(self) -> tuple[list[int], list[int]]:
        """The free blocks on the device and on the host, each in the order in which they are handed out."""
        return self.gpu_allocator.get_free_blocks(), self.cpu_allocator.get_free_blocks()

    def get_cached_blocks(self) -> frozenset[int]:
        """The device blocks, free or not, that the prefix cache can find."""
        return self.gpu_allocator.get_cached_blocks()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; blocks in use stay in use."""
        self.gpu_allocator.forget_all()
