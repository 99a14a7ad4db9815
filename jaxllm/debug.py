"""Looking inside a running engine: where its memory went, and what every unfinished request is doing.

Each function takes an `LLM` or an `LLMEngine`, as data or printed as a table. Invariant: looking changes nothing,
and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxllm.engine.engine import LLMEngine
from jaxllm.engine.inspection import (
    NUM_LAST_TOKENS,
    MemoryStats,
    PoolStats,
    SequenceState,
    SwapStats,
    inspect_memory,
    inspect_requests,
)
from jaxllm.memory import DeviceMemory, show_bytes
from jaxllm.scheduling.kv_stats import HostStats

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

WIDTH_OF_FILES = 200
"""In characters, where nothing says how wide a line may be."""


class HasEngine(Protocol):
    """An `LLM`, for example."""

    engine: LLMEngine


type Source = LLMEngine | HasEngine


def memory_stats(source: Source) -> MemoryStats:
    """What an engine holds on its devices, and how the blocks of its K/V cache are used."""
    return inspect_memory(_engine_of(source).core)


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
    if pool.host.total_blocks:
        _print_swap(console, pool.host, cache.host_hits, stats.swap)


def debug_sequence_states(source: Source) -> list[SequenceState]:
    """Every unfinished request: running ones in the order of their admission, then waiting ones by arrival."""
    return inspect_requests(_engine_of(source).core)


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


def _print_swap(console: Console, host: HostStats, hits: int, swap: SwapStats) -> None:
    console.print(
        f"Host memory: {show_bytes(swap.host_bytes)}, {host.total_blocks:,} blocks; {host.used_blocks:,} of "
        f"{host.num_swapped:,} swapped requests, {host.cached_blocks:,} cached, {hits:,} tokens came from there. "
        f"{show_bytes(swap.bytes_out)} were copied there, {show_bytes(swap.bytes_in)} back."
    )
    if (costs := swap.costs) is not None:
        console.print(
            f"At the start {show_bytes(costs.chunk_bytes)} took {1e3 * costs.out_seconds:.3g} ms there and "
            f"{1e3 * costs.in_seconds:.3g} ms back, and computing a token {1e6 * costs.token_seconds:.3g} us."
        )


def _engine_of(source: Source) -> LLMEngine:
    return source if isinstance(source, LLMEngine) else source.engine


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
