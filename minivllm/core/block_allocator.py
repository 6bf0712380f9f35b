"""A pool of equal cache blocks on one device: which are free, how often each is referenced, what each holds.

The lowest layer of paging. It deals in block numbers only; the memory behind them belongs to the CacheEngine.
Mirrors `vllm/v1/core/block_pool.py`.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockAllocator:
    """Hands out block numbers 0 .. num_blocks - 1 and counts references to them.

    A block is free as soon as its last reference is released, but its contents stay cached: with prefix caching, its hash stays
    registered until the block is handed out again. Free blocks that the prefix cache cannot find are handed out first, starting with the most
    recently freed one, whose memory is probably still in the processor's cache; then the blocks that it can find, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without references, including those with cached contents."""
        return len(self._free)

    def allocate(self) -> int:
        """Take the next free block; its old contents leave the prefix cache.

        Raises:
            IndexError: No block is free. Ask `num_free` first.
        """
        if not self._free:
            raise IndexError("no free block: ask num_free before allocate")
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block, possibly a free one that the prefix cache found."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Release a reference. The last one frees the block: it goes to the end of the line, or to the front if it has no hash."""
        if self.ref_counts[block] == 0:
            raise ValueError(f"block {block} is released more often than it was taken")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    # -- what the blocks hold (prefix caching) -------------------------------------------------------------------

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds these tokens after this prefix, or None."""
        return self._block_of.get(block_hash)

    def cache(self, block: int, block_hash: bytes) -> None:
        """Register a block with computed keys and values. If another block already holds the same, that one stays registered."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks in use stay in use."""
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

    def get_cached_blocks(self) -> frozenset[int]:
        """The blocks, free or not, with cached contents."""
        return frozenset(self._block_of.values())

    def get_free_blocks(self) -> list[int]:
        """The blocks without references, in the order in which they are handed out."""
        return list(self._free)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._block_of[block_hash]
