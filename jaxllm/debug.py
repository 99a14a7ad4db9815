"""Looking inside a running engine: where its memory went, and what every unfinished request is doing.

Each function takes an `LLM` or an `LLMEngine`, as data or printed as a table. Invariant: looking changes nothing,
and never waits for a device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxllm.engine.engine import LLMEngine
from jaxllm.memory import DeviceMemory, imbalance_percent, show_bytes
from jaxllm.scheduling.kv_manager import KVManager
from jaxllm.scheduling.kv_stats import KVStats

__all__ = [
    "DeviceMemory",
    "MemoryStats",
    "PoolStats",
    "SequenceState",
    "debug_sequence_states",
    "memory_stats",
    "print_memory_stats",
    "print_sequence_states",
]

NUM_LAST_TOKENS = 10
WIDTH_OF_FILES = 200
"""In characters, where nothing says how wide a line may be."""


class HasEngine(Protocol):
    """An `LLM`, for example."""

    engine: LLMEngine


type Source = LLMEngine | HasEngine


@dataclass(frozen=True)
class PoolStats(KVStats):
    """The K/V cache's blocks, the null block left out."""

    block_size: int
    """Tokens in a block."""
    waste_percent: float
    """Share of the used blocks' slots that is empty."""


@dataclass(frozen=True)
class MemoryStats:
    """Where an engine's memory went."""

    devices: tuple[DeviceMemory, ...]
    pool: PoolStats
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
    """waiting, waiting for fork (another request computes their prompt) or running."""
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


def memory_stats(source: Source) -> MemoryStats:
    """What an engine holds on its devices, and how the blocks of its K/V cache are used."""
    core = _engine_of(source).core
    devices = core.runner.memory_report()
    return MemoryStats(devices, _pool_stats(core.scheduler.kv), imbalance_percent([device.total for device in devices]))


def print_memory_stats(source: Source) -> None:
    """Prints `memory_stats` as tables."""
    stats, console = memory_stats(source), _console()
    columns = ("device", "weights", "K/V cache", "state", "temporaries", "together", "in use", "limit")
    console.print(_table(columns, [_device_row(device) for device in stats.devices]))
    if len(stats.devices) > 1:
        console.print(f"The fullest device holds {stats.imbalance_percent:.1f} % more than the average.")
    console.print()
    pool = stats.pool
    columns = (
        "blocks",
        "tokens in each",
        "used",
        "of these shared",
        "tokens in use",
        "waste",
        "free",
        "of these cached",
    )
    row = [f"{pool.total_blocks:,}", f"{pool.block_size}", f"{pool.used_blocks:,}", f"{pool.shared_blocks:,}"]
    row += [f"{pool.used_tokens:,}", f"{pool.waste_percent:.1f} %", f"{pool.free_blocks:,}", f"{pool.cached_blocks:,}"]
    console.print(_table(columns, [row]))
    cache = pool.prefix_cache
    console.print(f"Prefix cache: {cache.hits:,} of {cache.queries:,} tokens were there already.")


def debug_sequence_states(source: Source) -> list[SequenceState]:
    """Every unfinished request: running ones in the order of their admission, then waiting ones by arrival."""
    scheduler, now = _engine_of(source).core.scheduler, time.monotonic()
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


def print_sequence_states(source: Source) -> None:
    """Prints `debug_sequence_states` as a table."""
    states, console = debug_sequence_states(source), _console()
    columns = ("request", "state", "blocks", "computed", "preempted", "age", f"last {NUM_LAST_TOKENS} token ids")
    rows = [
        (
            state.request_id,
            state.status,
            str(len(state.block_ids)),
            f"{state.num_computed}/{state.num_tokens}",
            str(state.num_preemptions),
            f"{state.age:.1f} s",
            " ".join(map(str, state.last_token_ids)),
        )
        for state in states
    ]
    console.print(_table(columns, rows, left=("request", "state", columns[-1])))


def _engine_of(source: Source) -> LLMEngine:
    return source if isinstance(source, LLMEngine) else source.engine


def _pool_stats(kv: KVManager) -> PoolStats:
    stats = kv.stats()
    slots = stats.used_blocks * kv.block_size
    waste = 100 * (1 - stats.used_tokens / slots) if slots else 0.0
    return PoolStats(**vars(stats), block_size=kv.block_size, waste_percent=waste)


def _device_row(device: DeviceMemory) -> tuple[str, ...]:
    sizes = (device.weights, device.kv_cache, device.state, device.temp, device.total, device.in_use, device.limit)
    return (device.device, *("not known" if size is None else show_bytes(size) for size in sizes))


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    return console


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ("device",)) -> Table:
    """Texts of the columns `left` begin at the same place, numbers of the others end there."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
