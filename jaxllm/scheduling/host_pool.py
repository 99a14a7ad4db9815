"""Which K/V blocks host memory has, by name and by holder: ids and counts, never the memory.

Host memory is a fixed number of chunks of `chunk_blocks` blocks each. One transfer writes a whole chunk, so blocks
are kept and forgotten a chunk at a time, the least recently used first.
Invariants: a chunk can be overwritten exactly when nobody holds a block of it; a block has a hash exactly when the
hash map leads to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class HostPool:
    """Ids of host blocks: block `row` of chunk `chunk` is `chunk * chunk_blocks + row`."""

    def __init__(self, num_chunks: int, chunk_blocks: int) -> None:
        assert chunk_blocks >= 1, "a chunk has blocks"
        self.num_chunks, self.chunk_blocks = num_chunks, chunk_blocks
        self.num_held = 0
        """Blocks with a holder."""
        self._hashes: list[bytes | None] = [None] * self.num_blocks
        self._holders = [0] * self.num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._held_in = [0] * num_chunks
        """Blocks with a holder, by chunk."""
        self._unheld = OrderedDict.fromkeys(range(num_chunks))
        """Chunks that can be overwritten, the first to go first."""

    @property
    def num_blocks(self) -> int:
        return self.num_chunks * self.chunk_blocks

    @property
    def num_named(self) -> int:
        """Blocks that can be found by their contents."""
        return len(self._by_hash)

    @property
    def room(self) -> int:
        """Chunks that can be overwritten."""
        return len(self._unheld)

    def chunk_of(self, block_id: int) -> int:
        return block_id // self.chunk_blocks

    def find(self, block_hash: bytes) -> int | None:
        """The block with these contents; None if there is none."""
        return self._by_hash.get(block_hash)

    def touch(self, block_id: int) -> None:
        """The block was of use: its chunk is the last to be overwritten."""
        chunk = self.chunk_of(block_id)
        if chunk in self._unheld:
            self._unheld.move_to_end(chunk)

    def write(self, hashes: Sequence[bytes | None]) -> list[int]:
        """Forget a chunk's contents and give it new ones, with these names (None: nobody can find it); the blocks.

        The caller made sure that there is room. Contents that another block has already stay without a name.
        """
        assert 0 < len(hashes) <= self.chunk_blocks, "a chunk is written at once"
        chunk, _ = self._unheld.popitem(last=False)
        first = chunk * self.chunk_blocks
        for block_id in range(first, first + self.chunk_blocks):
            if (old := self._hashes[block_id]) is not None:
                del self._by_hash[old]
                self._hashes[block_id] = None
        self._unheld[chunk] = None
        block_ids = list(range(first, first + len(hashes)))
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash is not None:
                self.name(block_id, block_hash)
        return block_ids

    def name(self, block_id: int, block_hash: bytes) -> None:
        """Make a block findable, unless it is, or another one has the same contents."""
        if self._hashes[block_id] is None and self._by_hash.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def hold(self, block_ids: Iterable[int]) -> None:
        """Give every block one more holder: its chunk is not overwritten."""
        for block_id in block_ids:
            self._holders[block_id] += 1
            if self._holders[block_id] == 1:
                chunk = self.chunk_of(block_id)
                self.num_held += 1
                self._held_in[chunk] += 1
                self._unheld.pop(chunk, None)

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one holder from every block. What can be found stays until its chunk is needed."""
        for block_id in block_ids:
            assert self._holders[block_id] > 0, f"host block {block_id} is released but nobody holds it"
            self._holders[block_id] -= 1
            if self._holders[block_id] == 0:
                chunk = self.chunk_of(block_id)
                self.num_held -= 1
                self._held_in[chunk] -= 1
                if self._held_in[chunk] == 0:
                    self._unheld[chunk] = None
                    if not self._has_names(chunk):
                        self._unheld.move_to_end(chunk, last=False)

    def forget_contents(self) -> None:
        """Nothing can be found any more; only while no block is held."""
        assert self.num_held == 0, "host blocks are in use"
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def check_invariants(self) -> None:
        """Walk the whole pool (for tests): names, holders and the list of chunks are as promised."""
        named = {block_hash: block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert named == self._by_hash, "the host's hash map and its blocks' hashes differ"
        assert min(self._holders, default=0) >= 0, "a host block has fewer than no holders"
        held = [block_id for block_id, count in enumerate(self._holders) if count > 0]
        assert len(held) == self.num_held, "held host blocks do not add up"
        counts = [0] * self.num_chunks
        for block_id in held:
            counts[self.chunk_of(block_id)] += 1
        assert counts == self._held_in, "held blocks of a chunk do not add up"
        unheld = {chunk for chunk, count in enumerate(counts) if count == 0}
        assert set(self._unheld) == unheld, "chunks that can be overwritten and chunks without a holder differ"

    def _has_names(self, chunk: int) -> bool:
        first = chunk * self.chunk_blocks
        return any(block_hash is not None for block_hash in self._hashes[first : first + self.chunk_blocks])
