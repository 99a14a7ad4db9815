"""Who holds which block of the K/V cache: ids and reference counts, never the memory itself.

Invariant: a block other than the null block is in the free list exactly when its reference count is
0, so free and held blocks always add up to the pool. Block 0 is the null block: padding points at
it, it is never handed out and never counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NULL_BLOCK_ID = 0


class Block:
    """One block's entry: how many tables hold it, and its place in the free list."""

    __slots__ = ("id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.prev = self
        self.next = self


class FreeList:
    """A doubly linked list threaded through the blocks themselves, least recently freed first.

    It is circular through a sentinel, so no link is ever missing; a block outside of the list links
    to itself. Every operation is O(1), taking a block out of the middle included: a free block whose
    contents are wanted again is taken from where it stands.
    """

    def __init__(self) -> None:
        self._sentinel = Block(NULL_BLOCK_ID)
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next
        while block is not self._sentinel:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Make `block` the most recently freed one."""
        assert block.next is block, f"block {block.id} is in the free list already"
        last = self._sentinel.prev
        last.next, block.prev = block, last
        block.next, self._sentinel.prev = self._sentinel, block
        self._len += 1

    def remove(self, block: Block) -> None:
        """Take `block` out, wherever it stands."""
        assert block.next is not block, f"block {block.id} is not in the free list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._len -= 1

    def popleft(self) -> Block:
        """Take the least recently freed block."""
        block = self._sentinel.next
        self.remove(block)
        return block


class BlockPool:
    """Hands out block ids and counts their holders; the least recently freed block goes first."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, "a pool has at least its null block"
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList()
        for block in self._blocks[1:]:
            self._free.append(block)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._blocks[block_id].ref_count

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out blocks with one holder each; the caller made sure that so many are free."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks are wanted, {self.num_free} are free"
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            block.ref_count = 1
        return [block.id for block in blocks]

    def share(self, block_ids: Sequence[int]) -> None:
        """Give every block one more holder; free ones leave the free list."""
        for block_id in block_ids:
            block = self._held_or_free(block_id)
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one holder from every block of a table; blocks without one become free.

        In reverse: the tail of a table is of use to nobody without its head, so it is reused first.
        """
        for block_id in reversed(block_ids):
            block = self._held_or_free(block_id)
            assert block.ref_count > 0, f"block {block_id} is released but nobody holds it"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)

    def check_invariants(self) -> None:
        """Walk the whole pool (for tests): links, counts and the null block are as promised."""
        free_ids = [block.id for block in self._free]
        assert len(free_ids) == self.num_free, "the free list's length is not what it says"
        assert len(set(free_ids)) == len(free_ids), "a block is in the free list twice"
        unheld = {block.id for block in self._blocks[1:] if block.ref_count == 0}
        assert set(free_ids) == unheld, "free blocks and blocks without a holder differ"
        assert all(block.ref_count >= 0 for block in self._blocks), "a reference count is below 0"
        assert self._blocks[NULL_BLOCK_ID].ref_count == 0, "the null block was handed out"
        for block in self._free:
            assert block.next.prev is block and block.prev.next is block, f"links of block {block.id} are broken"

    def _held_or_free(self, block_id: int) -> Block:
        assert block_id != NULL_BLOCK_ID, "the null block has no holders"
        return self._blocks[block_id]
