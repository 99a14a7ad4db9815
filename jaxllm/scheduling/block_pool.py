"""Who holds which block of the K/V cache, and which contents can be found again: ids and counts, never the memory.

Invariants: a block other than the null block is in one of the two free lists exactly when its reference
count is 0, so free and held blocks always add up to the pool. A block has a hash exactly when the hash map
leads to it; it keeps its hash while it is free (lazy release), until the block is handed out again. Block 0
is the null block: padding points at it, it is never handed out and never counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NULL_BLOCK_ID = 0


class Block:
    """One block's entry: how many tables hold it, what it contains, and its place in a free list."""

    __slots__ = ("hash", "id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        """Names the tokens of a full block and all before them; None: nobody can find the contents."""
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
    """Hands out block ids, counts their holders and finds contents again.

    Free blocks without a hash are handed out before those with one, whose contents may be wanted again;
    in both cases the least recently freed goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, "a pool has at least its null block"
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._by_hash: dict[bytes, Block] = {}
        self._blank = FreeList()
        self._cached = FreeList()
        self.num_free = num_blocks - 1
        """Blocks without a holder, those with contents to find again included."""
        self.num_shared = 0
        """Blocks with several holders."""
        for block in self._blocks[1:]:
            self._blank.append(block)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_blank(self) -> int:
        """Free blocks without contents that can be found: they are handed out first."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be found."""
        return len(self._cached)

    def evictable(self) -> Iterator[tuple[int, bytes]]:
        """Free blocks whose contents can be found, with their hashes, in the order in which they would be forgotten."""
        for block in self._cached:
            assert block.hash is not None, f"block {block.id} has no hash"
            yield block.id, block.hash

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._blocks[block_id].ref_count

    def find(self, block_hash: bytes) -> int | None:
        """The block with these contents, held or free; None if there is none."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.id

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make the contents of a held block findable; if another block has the same, that one stays the one found."""
        block = self._blocks[block_id]
        assert block.ref_count > 0 and block.hash is None, f"block {block_id} cannot take a hash"
        if self._by_hash.setdefault(block_hash, block) is block:
            block.hash = block_hash

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out blocks with one holder each; the caller made sure that so many are free."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks are wanted, {self.num_free} are free"
        ids: list[int] = []
        for _ in range(num_blocks):
            block = self._blank.popleft() if self._blank else self._forget(self._cached.popleft())
            block.ref_count = 1
            ids.append(block.id)
        self.num_free -= num_blocks
        return ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Give every block one more holder; free ones leave their free list."""
        for block_id in block_ids:
            block = self._held_or_free(block_id)
            if block.ref_count == 0:
                self._free_list(block).remove(block)
                self.num_free -= 1
            elif block.ref_count == 1:
                self.num_shared += 1
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
                self._free_list(block).append(block)
                self.num_free += 1
            elif block.ref_count == 1:
                self.num_shared -= 1

    def forget_contents(self) -> None:
        """Nothing can be found any more; only while no block is held."""
        assert self.num_free == self.num_blocks, "blocks are in use"
        while self._cached:
            self._blank.append(self._forget(self._cached.popleft()))

    def check_invariants(self) -> None:
        """Walk the whole pool (for tests): links, counts, hashes and the null block are as promised."""
        for free, has_hash in ((self._blank, False), (self._cached, True)):
            listed = list(free)
            assert len(listed) == len(free), "a free list's length is not what it says"
            unheld = {b.id for b in self._blocks[1:] if b.ref_count == 0 and (b.hash is not None) == has_hash}
            assert {block.id for block in listed} == unheld, "free blocks and blocks without a holder differ"
            assert len(unheld) == len(listed), "a block is in a free list twice"
            for block in listed:
                assert block.next.prev is block and block.prev.next is block, f"links of block {block.id} are broken"
        assert self.num_free == len(self._blank) + len(self._cached), "the number of free blocks is not what it says"
        assert all(block.ref_count >= 0 for block in self._blocks), "a reference count is below 0"
        null = self._blocks[NULL_BLOCK_ID]
        assert null.ref_count == 0 and null.hash is None, "the null block was handed out"
        hashed = {block.hash: block for block in self._blocks if block.hash is not None}
        assert hashed == self._by_hash, "the hash map and the blocks' hashes differ"
        assert self.num_shared == sum(block.ref_count > 1 for block in self._blocks), "shared blocks do not add up"

    def _free_list(self, block: Block) -> FreeList:
        return self._blank if block.hash is None else self._cached

    def _forget(self, block: Block) -> Block:
        assert block.hash is not None, f"block {block.id} has no hash"
        del self._by_hash[block.hash]
        block.hash = None
        return block

    def _held_or_free(self, block_id: int) -> Block:
        assert block_id != NULL_BLOCK_ID, "the null block has no holders"
        return self._blocks[block_id]
