"""Which blocks hold which request's K/V: one block table per request, grown as it is computed.

Invariant: block i of a request's table holds its tokens [i * block_size, (i + 1) * block_size), and
a table is gone as soon as its request is freed. `grow` names every block it adds exactly once, for the
device to be told: a request that was freed and comes back has a new table, hence names all of it.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from jaxllm.config import CacheSize
from jaxllm.request import Request
from jaxllm.scheduling.block_pool import BlockPool


class NewBlocks(NamedTuple):
    """The part of a block table that the device was not told of yet."""

    first: int
    """Index in the table of the first of `ids`; 0 if there are none."""
    ids: tuple[int, ...]


NO_NEW_BLOCKS = NewBlocks(0, ())


class KVManager:
    """Block tables of the requests that hold K/V, over one pool of device blocks."""

    def __init__(self, cache_size: CacheSize) -> None:
        self.block_size = cache_size.block_size
        self.pool = BlockPool(cache_size.num_blocks)
        self._tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_blocks - self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that is held, from 0 to 1."""
        return self.num_used_blocks / max(self.num_blocks, 1)

    def num_new_blocks(self, request: Request, end: int) -> int:
        """Blocks `request` still lacks for the K/V of its tokens [0, end)."""
        return max(-(-end // self.block_size) - len(self._tables.get(request.request_id, ())), 0)

    def grow(self, request: Request, end: int) -> NewBlocks | None:
        """Make room for tokens [0, end) of `request`: all of it, or None and nothing changed.

        The answer names what the device has to be told before it computes these tokens, so it has to
        go into the plan that is being built. Of a request that had no table that is all of its blocks.
        Nothing is new (and nobody has to ask) while `end` is at most `request.num_slots`.
        """
        num_new = self.num_new_blocks(request, end)
        if num_new == 0:
            return NO_NEW_BLOCKS
        if num_new > self.pool.num_free:
            return None
        table = self._tables.setdefault(request.request_id, [])
        new = NewBlocks(len(table), tuple(self.pool.allocate(num_new)))
        table += new.ids
        request.num_slots = len(table) * self.block_size
        return new

    def free(self, request: Request) -> None:
        """Give all of a request's blocks back.

        Launched steps may still write to them. Whoever gets the blocks next writes in a later step,
        and the device runs steps in order, so it never reads what a step before its own left behind.
        """
        self.pool.release(self._tables.pop(request.request_id, ()))
        request.num_slots = 0

    def block_ids(self, request: Request) -> tuple[int, ...]:
        """A request's block table; empty while it holds no K/V."""
        return tuple(self._tables.get(request.request_id, ()))

    def holders(self) -> set[str]:
        """Ids of the requests that hold blocks."""
        return set(self._tables)

    def check_invariants(self) -> None:
        """Walk pool and tables (for tests): the tables account for every reference, none is stale."""
        self.pool.check_invariants()
        holders = Counter(block_id for table in self._tables.values() for block_id in table)
        assert len(holders) == self.num_used_blocks, "a block is held that is in no table"
        for block_id, count in holders.items():
            assert self.pool.ref_count(block_id) == count, f"block {block_id} has another number of holders"
        for request_id, table in self._tables.items():
            assert table, f"request {request_id} has an empty table"
            assert len(set(table)) == len(table), f"request {request_id} holds a block twice"
