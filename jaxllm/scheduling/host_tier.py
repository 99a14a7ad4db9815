"""K/V in host memory: of requests that were swapped out, and of cached blocks that the device needed for others.

It plans copies between device blocks and chunks of host memory, and knows which contents have a copy: a block whose
host copy is current is not copied again. Full blocks never change, so a copy with their hash is current for ever.
Copies of a plan are made before its step writes anything, those to the host first; they find what the steps launched
before left behind. So whoever is given a block next cannot spoil a copy.
Invariants: a block of a swapped request is held until it is back or gone, so that its K/V can always come back; a
chunk is not written again between the plan that chose to read it and the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched, islice

from jaxllm.memory import CacheSize
from jaxllm.request import Request
from jaxllm.scheduling.block_hash import hash_blocks
from jaxllm.scheduling.block_pool import BlockPool
from jaxllm.scheduling.host_pool import HostPool
from jaxllm.scheduling.kv_stats import HostStats
from jaxllm.scheduling.plan import SwapIn, SwapOut
from jaxllm.scheduling.swap_rule import SwapRule

LOOKAHEAD = 4
"""Chunks' worth of cached blocks that are looked through for more to copy, where a chunk has room for more."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a swapped request has in host memory."""

    block_ids: list[int]
    """Host blocks, in the order of its table."""
    num_tokens: int
    """Tokens whose K/V are in them."""


class HostTier:
    """Copies of device blocks in host memory, which may have no room for any.

    Args:
        device: the pool whose blocks are copied.
    """

    def __init__(self, device: BlockPool, size: CacheSize, rule: SwapRule) -> None:
        self.pool = HostPool(size.host_chunks, size.chunk_blocks)
        self._device, self._block_size, self.rule = device, size.block_size, rule
        self._swapped: dict[Request, Swapped] = {}
        self._out: list[SwapOut] = []
        self._in: list[tuple[int, int]] = []
        """Host blocks and the device blocks that get their contents."""
        self._read: list[int] = []
        """Host blocks that the plan being built reads."""

    @property
    def num_swapped(self) -> int:
        """Requests that are swapped out."""
        return len(self._swapped)

    def keep_evicted(self, num_blocks: int) -> None:
        """So many device blocks are about to be handed out: copy what can still be found in them.

        Those that are next in turn are copied with them as far as the chunk has room, so that a transfer is always
        a full one and most evictions cost none.
        """
        num_evicted = num_blocks - self._device.num_blank
        chunk_tokens = self.pool.chunk_blocks * self._block_size
        if num_evicted <= 0 or not self.pool.room or not self.rule.keeps_evicted(chunk_tokens):
            return
        size, dirty = self.pool.chunk_blocks, list[tuple[int, bytes]]()
        for index, (block_id, block_hash) in enumerate(
            islice(self._device.evictable(), num_evicted + LOOKAHEAD * size)
        ):
            if index >= num_evicted and len(dirty) % size == 0:
                break
            copy = self.pool.find(block_hash)
            if copy is None:
                dirty.append((block_id, block_hash))
            elif index < num_evicted:
                self.pool.touch(copy)
        self._copy_out(dirty[: self.pool.room * size])

    def swap_out(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Copy a request's K/V, or find their copies, and hold them; False and nothing changed if it does not pay or fit.

        Args:
            block_ids: the request's block table. Others may hold the blocks, too.
        """
        num_blocks = -(-request.num_computed // self._block_size)
        if not self.pool.num_chunks or not num_blocks:
            return False
        num_full = min(request.num_computed, request.num_known) // self._block_size
        hashes = hash_blocks(request, num_full, self._block_size)[:num_full]
        copies = [self.pool.find(block_hash) for block_hash in hashes] + [None] * (num_blocks - num_full)
        names = [*hashes, *[None] * (num_blocks - num_full)]
        dirty = [(block_ids[index], names[index]) for index, copy in enumerate(copies) if copy is None]
        found = [copy for copy in copies if copy is not None]
        chunks_out = -(-len(dirty) // self.pool.chunk_blocks)
        chunks_in = chunks_out + len({self.pool.chunk_of(copy) for copy in found})
        self.pool.hold(found)
        if chunks_out > self.pool.room or not self.rule.swaps(request.num_computed, chunks_out, chunks_in):
            self.pool.release(found)
            return False
        written = self._copy_out([*dirty, *self._fillers(-len(dirty) % self.pool.chunk_blocks)])[: len(dirty)]
        self.pool.hold(written)
        remaining = iter(written)
        self._swapped[request] = Swapped(
            [next(remaining) if copy is None else copy for copy in copies], request.num_computed
        )
        return True

    def swapped(self, request: Request) -> Swapped | None:
        """What a request has in host memory; None unless it is swapped out."""
        return self._swapped.get(request)

    def forget(self, request: Request) -> None:
        """A request is back on the device, or gone. Copies of its full blocks can be found until their chunk is needed."""
        swapped = self._swapped.pop(request, None)
        if swapped is not None:
            num_full = min(swapped.num_tokens, request.num_known) // self._block_size
            hashes = hash_blocks(request, num_full, self._block_size)[:num_full]
            for block_id, block_hash in zip(swapped.block_ids, hashes, strict=False):
                self.pool.name(block_id, block_hash)
            self.pool.release(swapped.block_ids)

    def find(self, block_hash: bytes) -> int | None:
        """The host block with these contents."""
        return self.pool.find(block_hash)

    def read(self, host_ids: Sequence[int]) -> None:
        """The plan being built brings these blocks to the device: until then they are not overwritten."""
        self.pool.hold(host_ids)
        self._read += host_ids
        for host_id in host_ids:
            self.pool.touch(host_id)

    def bring(self, host_id: int, block_id: int) -> None:
        """Copy a host block that is read to a device block."""
        self._in.append((host_id, block_id))

    def take_moves(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """Copies that the plan being built needs before its first write; each is named once."""
        moves = tuple(self._out), tuple(self._swap_ins())
        self.pool.release(self._read)
        self._out, self._in, self._read = [], [], []
        return moves

    def forget_contents(self) -> None:
        """Nothing can be found any more; only while nobody is swapped out."""
        self.pool.forget_contents()

    def stats(self) -> HostStats:
        """What host memory holds now."""
        return HostStats(self.pool.num_blocks, self.pool.num_held, self.pool.num_named, self.num_swapped)

    def check_invariants(self) -> None:
        """Walk the pool (for tests): swapped requests and the plan being built account for every holder."""
        self.pool.check_invariants()
        held = {block_id for swapped in self._swapped.values() for block_id in swapped.block_ids} | set(self._read)
        assert len(held) == self.pool.num_held, "a host block is held by nobody who is known"
        for request, swapped in self._swapped.items():
            num_blocks = -(-swapped.num_tokens // self._block_size)
            assert len(swapped.block_ids) == num_blocks, f"{request.request_id} lacks host blocks"
            assert swapped.num_tokens < request.num_tokens, f"{request.request_id}: nothing is left to compute"

    def _fillers(self, count: int) -> Iterator[tuple[int, bytes]]:
        """Cached blocks without a copy, those that are evicted first."""
        candidates = islice(self._device.evictable(), LOOKAHEAD * self.pool.chunk_blocks)
        return islice((block for block in candidates if self.pool.find(block[1]) is None), count)

    def _copy_out(self, blocks: Sequence[tuple[int, bytes | None]]) -> list[int]:
        """Plan copies of device blocks, for which there is room; the host blocks."""
        host_ids: list[int] = []
        for part in batched(blocks, self.pool.chunk_blocks):
            written = self.pool.write([block_hash for _, block_hash in part])
            self._out.append(SwapOut(self.pool.chunk_of(written[0]), tuple(block_id for block_id, _ in part)))
            host_ids += written
        return host_ids

    def _swap_ins(self) -> Iterator[SwapIn]:
        by_chunk: dict[int, list[tuple[int, int]]] = {}
        for host_id, block_id in self._in:
            chunk, row = divmod(host_id, self.pool.chunk_blocks)
            by_chunk.setdefault(chunk, []).append((row, block_id))
        for chunk, pairs in by_chunk.items():
            for part in batched(pairs, self.pool.chunk_blocks):
                yield SwapIn(chunk, *map(tuple, zip(*part, strict=True)))
