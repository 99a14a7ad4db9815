"""What an engine core holds: its memory, its blocks and its unfinished requests, as data.

Invariant: looking changes nothing, and never waits for a device.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from jaxllm.engine.core import EngineCore
from jaxllm.memory import DeviceMemory, SwapCosts, imbalance_of
from jaxllm.scheduling.kv_manager import KVManager
from jaxllm.scheduling.kv_stats import KVStats

NUM_LAST_TOKENS = 10


@dataclass(frozen=True)
class PoolStats(KVStats):
    """The K/V cache's blocks, the null block left out."""

    block_size: int
    """Tokens in a block."""
    waste_percent: float
    """Share of the used blocks' slots that is empty."""


@dataclass(frozen=True)
class SwapStats:
    """Host memory for K/V, and the copies between it and the devices."""

    host_bytes: int
    """Set aside for K/V, whatever they hold."""
    bytes_out: int
    bytes_in: int
    costs: SwapCosts | None
    """As measured at the start; None where there is no host memory, and with enforce_eager."""


@dataclass(frozen=True)
class MemoryStats:
    """Where an engine's memory went."""

    devices: tuple[DeviceMemory, ...]
    pool: PoolStats
    swap: SwapStats
    imbalance_percent: float
    """How much more than the average the fullest device holds."""

    def to_dict(self) -> dict[str, Any]:
        """As dictionaries and lists, for JSON."""
        return dataclasses.asdict(self) | {"devices": [dataclasses.asdict(device) for device in self.devices]}


@dataclass(frozen=True)
class SequenceState:
    """An unfinished request, as the scheduler sees it."""

    request_id: str
    status: str
    """waiting, waiting for fork (another request computes their prompt), swapped or running."""
    last_token_ids: tuple[int, ...]
    """The last 10 that the host knows, prompt included."""
    block_ids: tuple[int, ...]
    """K/V cache blocks it holds, in the order of its tokens."""
    num_computed: int
    """Tokens whose K/V are in the cache, or will be once the launched steps ran."""
    num_tokens: int
    """Tokens of prompt and answer, with those that launched steps will bring."""
    num_preemptions: int
    age: float
    """Seconds since it was added."""

    def to_dict(self) -> dict[str, Any]:
        """As dictionaries and lists, for JSON."""
        return dataclasses.asdict(self) | {
            "last_token_ids": list(self.last_token_ids),
            "block_ids": list(self.block_ids),
        }


def inspect_memory(core: EngineCore) -> MemoryStats:
    """What an engine holds on its devices, and how the blocks of its K/V cache are used."""
    devices = core.runner.memory_report()
    host, size = core.runner.host, core.runner.size
    held, gone, back = (chunks * host.chunk_bytes for chunks in (size.host_chunks, host.num_out, host.num_in))
    swap = SwapStats(held, gone, back, core.runner.swap_costs)
    return MemoryStats(devices, _pool_stats(core.scheduler.kv), swap, imbalance_of(devices))


def inspect_requests(core: EngineCore) -> list[SequenceState]:
    """Every unfinished request: running ones in the order of their admission, then waiting ones by arrival."""
    scheduler, now = core.scheduler, time.monotonic()
    running = list(scheduler.running.values())
    waiting = [request for request in list(scheduler.requests.values()) if request.request_id not in scheduler.running]
    return [
        SequenceState(
            request.request_id,
            request.status.value,
            tuple(request.get_token_ids(max(request.num_known - NUM_LAST_TOKENS, 0))),
            scheduler.kv.block_ids(request),
            request.num_computed,
            request.num_tokens,
            request.num_preemptions,
            now - request.arrival_time,
        )
        for request in [*running, *sorted(waiting, key=lambda request: request.arrival_time)]
    ]


def _pool_stats(kv: KVManager) -> PoolStats:
    stats = kv.stats()
    slots = stats.used_blocks * kv.block_size
    waste = 100 * (1 - stats.used_tokens / slots) if slots else 0.0
    return PoolStats(**vars(stats), block_size=kv.block_size, waste_percent=waste)
