"""Which blocks hold which request's K/V: one block table per request, and what requests share of them.

Invariants: block i of a request's table holds its tokens [i * block_size, (i + 1) * block_size), and a
table is gone as soon as its request is freed. Only full blocks have several holders, so nobody writes to
a block that another request reads: a fork gets a copy of the block that its parent has begun, before it
writes. A block can be found by its contents only if the host knows all of its tokens and launched steps,
or the one being planned, write them: within a step K/V are written before attention reads. A request is swapped
out exactly as long as the host tier says so, and has no table then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxllm.memory import CacheSize
from jaxllm.request import Request
from jaxllm.scheduling.block_hash import hash_blocks
from jaxllm.scheduling.block_pool import BlockPool
from jaxllm.scheduling.host_tier import HostTier, Swapped
from jaxllm.scheduling.kv_stats import KVStats, PrefixCacheStats
from jaxllm.scheduling.plan import BlockCopy, SwapIn, SwapOut
from jaxllm.scheduling.swap_rule import SwapRule


class NewBlocks(NamedTuple):
    """The part of a block table that the device was not told of yet."""

    first: int
    """Index in the table of the first of `ids`; 0 if there are none."""
    ids: tuple[int, ...]


NO_NEW_BLOCKS = NewBlocks(0, ())


class Moves(NamedTuple):
    """Copies of blocks that a plan needs before its step writes anything; its fields are `StepPlan`'s."""

    copies: tuple[BlockCopy, ...]
    swap_out: tuple[SwapOut, ...]
    swap_in: tuple[SwapIn, ...]


class Shared(NamedTuple):
    """K/V that a request need not compute."""

    block_ids: Sequence[int | None]
    """Full blocks of the device, held by others or free; None where host memory has the contents."""
    num_tokens: int
    """Tokens in all of them and in `begun`."""
    begun: int | None = None
    """A further block of which a copy is needed; its owner goes on writing to it."""
    host_ids: tuple[int, ...] = ()
    """One for each None. The last one may hold a block that is not full."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request."""

    request: Request
    ids: list[int] = field(default_factory=list)
    num_registered: int = 0
    """Blocks at the table's beginning that were offered to the prefix cache."""


class KVManager:
    """Block tables of the requests that hold K/V, over one pool of device blocks."""

    def __init__(
        self, cache_size: CacheSize, enable_prefix_caching: bool = True, swap_rule: SwapRule | None = None
    ) -> None:
        self.block_size = cache_size.block_size
        self.pool = BlockPool(cache_size.num_blocks)
        self.host = HostTier(self.pool, cache_size, swap_rule or SwapRule())
        self._enable_prefix_caching = enable_prefix_caching
        self._tables: dict[str, BlockTable] = {}
        self._copies: list[BlockCopy] = []
        self._queries = self._hits = self._host_hits = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_blocks - self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that is held, from 0 to 1."""
        return self.num_used_blocks / max(self.num_blocks, 1)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the K/V of so many tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, reserve: int = 0) -> NewBlocks | None:
        """Give a request without blocks a table for all of its tokens; None and nothing changed if they do not fit.

        What is in the cache is shared, and what is in host memory is brought back; both count as computed from now
        on: `num_computed` is set. At least the last token is left to compute, as something has to be sampled from.

        Args:
            reserve: blocks that have to stay free.
        """
        num_blocks = self.blocks_for(request.num_tokens)
        if self.pool.num_free <= reserve:  # saves the look-up, step after step, while there is no room
            return None
        shared = self._find_shared(request)
        held = [block_id for block_id in shared.block_ids if block_id is not None]
        num_new = num_blocks - len(held)
        num_revived = sum(self.pool.ref_count(block_id) == 0 for block_id in held)
        if num_new + num_revived + reserve > self.pool.num_free:
            return None
        self.pool.share(held)
        self.host.read(shared.host_ids)
        new = iter(self._allocate(num_new))
        ids = [next(new) if block_id is None else block_id for block_id in shared.block_ids]
        ids += new
        if shared.begun is not None:
            self._copies.append(BlockCopy(shared.begun, ids[len(shared.block_ids)]))
        self._tables[request.request_id] = BlockTable(request, ids, shared.num_tokens // self.block_size)
        request.num_computed = shared.num_tokens
        self._bring_back(request, shared, ids)
        return NewBlocks(0, tuple(ids))

    def grow(self, request: Request, end: int) -> NewBlocks | None:
        """Make room for tokens [0, end) of an admitted request: all of it, or None and nothing changed.

        The answer names what the device has to be told before it computes these tokens, so it has to
        go into the plan that is being built, with a row that computes them. Nobody has to ask while `end`
        is at most `request.num_slots`, which is at a block's end: there, blocks that became full are registered.
        """
        table, new = self._tables[request.request_id], NO_NEW_BLOCKS
        num_blocks = -(-end // self.block_size)
        num_new = num_blocks - len(table.ids)
        if num_new > 0:
            if num_new > self.pool.num_free:
                return None
            new = NewBlocks(len(table.ids), tuple(self._allocate(num_new)))
            table.ids += new.ids
        request.num_slots = num_blocks * self.block_size
        self._register(table, end)
        return new

    def swap_out(self, request: Request) -> bool:
        """Keep the K/V of a running request in host memory, if that pays and there is room; its blocks are freed next.

        Steps that were launched may still write to them; the copies are made after those. Blocks that others hold,
        too, are copied like the rest. The next `admit` of the request brings its K/V back.
        """
        return self.host.swap_out(request, self._tables[request.request_id].ids)

    def forget_swapped(self, request: Request) -> None:
        """A request that may be swapped out ended."""
        self.host.forget(request)

    def free(self, request: Request) -> None:
        """Give all of a request's blocks back; full ones stay findable until memory is needed.

        Launched steps may still write to them, but never to a token that the host knows. Whoever gets a block
        next writes in a later step, and the device runs steps in order, so it never reads what a step before
        its own left behind.
        """
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._register(table, request.num_computed)
            self.pool.release(table.ids)
        request.num_slots = 0

    def take_moves(self) -> Moves:
        """Copies that the plan being built needs before its first write; each is named once.

        Only a plan that is launched may take them: others leave them to the next one.
        """
        copies, self._copies = tuple(self._copies), []
        return Moves(copies, *self.host.take_moves())

    def reset_prefix_cache(self) -> bool:
        """Forget all contents; False and nothing changed while requests hold blocks, here or in host memory."""
        if self._tables or self.host.num_swapped:
            return False
        self.pool.forget_contents()
        self.host.forget_contents()
        return True

    def block_ids(self, request: Request) -> tuple[int, ...]:
        """A request's block table; empty while it holds no K/V."""
        table = self._tables.get(request.request_id)
        return () if table is None else tuple(table.ids)

    def holders(self) -> set[str]:
        """Ids of the requests that hold blocks."""
        return set(self._tables)

    def stats(self) -> KVStats:
        """What the cache holds now; any thread may ask."""
        tables = list(self._tables.values())
        num_duplicates = sum(len(table.ids) for table in tables) - self.num_used_blocks
        num_tokens = sum(min(table.request.num_computed, len(table.ids) * self.block_size) for table in tables)
        return KVStats(
            total_blocks=self.num_blocks,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            used_blocks=self.num_used_blocks,
            shared_blocks=self.pool.num_shared,
            used_tokens=num_tokens - num_duplicates * self.block_size,  # only full blocks are shared
            prefix_cache=PrefixCacheStats(self._queries, self._hits, self._host_hits),
            host=self.host.stats(),
        )

    def check_invariants(self) -> None:
        """Walk pool and tables (for tests): the tables account for every reference, none is stale."""
        self.pool.check_invariants()
        self.host.check_invariants()
        holders = Counter(block_id for table in self._tables.values() for block_id in table.ids)
        assert len(holders) == self.num_used_blocks, "a block is held that is in no table"
        for block_id, count in holders.items():
            assert self.pool.ref_count(block_id) == count, f"block {block_id} has another number of holders"
        for request_id, table in self._tables.items():
            assert table.ids, f"request {request_id} has an empty table"
            assert len(set(table.ids)) == len(table.ids), f"request {request_id} holds a block twice"
            num_full = table.request.num_computed // self.block_size
            begun = [block_id for block_id in table.ids[num_full:] if holders[block_id] > 1]
            assert not begun, f"request {request_id} shares blocks that are not full: {begun}"

    def _allocate(self, num_blocks: int) -> list[int]:
        self.host.keep_evicted(num_blocks)
        return self.pool.allocate(num_blocks)

    def _bring_back(self, request: Request, shared: Shared, ids: list[int]) -> None:
        """Plan the copies of what host memory has of an admitted request, and count what was found."""
        places = [index for index, block_id in enumerate(shared.block_ids) if block_id is None]
        for index, host_id in zip(places, shared.host_ids, strict=True):
            self.host.bring(host_id, ids[index])
            if self._enable_prefix_caching and (index + 1) * self.block_size <= shared.num_tokens:
                self.pool.register(ids[index], request.block_hashes[index])
        if self.host.swapped(request):
            self.host.forget(request)
        else:
            self._queries += request.num_tokens
            self._hits += shared.num_tokens
            self._host_hits += len(places) * self.block_size

    def _find_shared(self, request: Request) -> Shared:
        if (swapped := self.host.swapped(request)) is not None:
            return self._find_swapped(request, swapped)
        parent = request.parent
        # Of a parent that was preempted, parts may be computed only now, too late to be copied in this step.
        if parent is not None and parent.seat is not None and parent.num_preemptions + request.num_preemptions == 0:
            return self._fork(parent, request)
        # What is to be scored of a prompt has to be computed.
        if not self._enable_prefix_caching or request.prompt_details is not None:
            return Shared([], 0)
        num_most = (request.num_tokens - 1) // self.block_size
        block_ids: list[int | None] = []
        host_ids: list[int] = []
        for block_hash in hash_blocks(request, num_most, self.block_size)[:num_most]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                host_id = self.host.find(block_hash)
                if host_id is None:
                    break
                host_ids.append(host_id)
            block_ids.append(block_id)
        return Shared(block_ids, len(block_ids) * self.block_size, host_ids=tuple(host_ids))

    def _find_swapped(self, request: Request, swapped: Swapped) -> Shared:
        """All that a swapped request had; what the device still has is not brought from the host."""
        num_full = swapped.num_tokens // self.block_size if self._enable_prefix_caching else 0
        hashes = hash_blocks(request, num_full, self.block_size)[:num_full]
        block_ids = [self.pool.find(block_hash) for block_hash in hashes]
        block_ids += [None] * (len(swapped.block_ids) - num_full)
        missing = (host for host, found in zip(swapped.block_ids, block_ids, strict=True) if found is None)
        return Shared(block_ids, swapped.num_tokens, host_ids=tuple(missing))

    def _fork(self, parent: Request, child: Request) -> Shared:
        """All of the prompt but its last token; earlier steps computed it for the parent."""
        num_tokens = child.prompt_len - 1
        num_full, num_begun = divmod(num_tokens, self.block_size)
        ids = self._tables[parent.request_id].ids
        child.block_hashes = parent.block_hashes[:num_full]
        return Shared(ids[:num_full], num_tokens, ids[num_full] if num_begun else None)

    def _register(self, table: BlockTable, num_computed: int) -> None:
        """Make blocks findable whose tokens are all known and, up to `num_computed`, computed."""
        request = table.request
        num_full, done = min(num_computed, request.num_known) // self.block_size, table.num_registered
        if num_full > done and self._enable_prefix_caching:
            hashes = hash_blocks(request, num_full, self.block_size)
            for index in range(done, num_full):
                self.pool.register(table.ids[index], hashes[index])
            table.num_registered = num_full
