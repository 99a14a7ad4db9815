"""What devices say about their memory: the budget of an engine, a check that it is really there, a report.

Invariant: the budget has nothing in it that changes from start to start. What happens to be in use only decides
whether the engine may start at all.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.memory import DeviceMemory, show_bytes

logger = logging.getLogger(__name__)

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Bytes this process may take on each device: gpu_memory_utilization of its memory, rounded by XLA.

    None where a platform does not say (a CPU).
    """
    stats = [device.memory_stats() for device in devices]
    limits = [each["bytes_limit"] for each in stats if each and "bytes_limit" in each]
    return min(limits) if len(limits) == len(devices) else None


def check_room(devices: Sequence[Any], cache: int, rest: int) -> None:
    """Makes sure that every device has what an engine is about to take: bytes of K/V cache, and of all the rest.

    Raises:
        ValueError: the memory is taken, by this process or by another one.
    """
    for device in devices:
        if device.memory_stats() is None:
            continue
        # XLA takes its share of a GPU at the first allocation; only then it is known whether it got all of it.
        jax.device_put(np.zeros(1, np.int8), device).block_until_ready()
        stats = device.memory_stats()
        in_use, limit = stats["bytes_in_use"], stats["bytes_limit"]
        reserved = min(stats.get("pool_bytes", limit), limit) if _preallocates() else limit
        if cache + rest + in_use > limit:
            why = f"this process holds {show_bytes(in_use)} there already: close other engines and drop arrays"
        elif cache + rest + in_use > reserved:
            why = f"other processes left only {show_bytes(reserved)} (nvidia-smi lists them): end them"
        else:
            continue
        fitting = reserved - in_use - rest
        smaller = f", or set kv_cache_memory_bytes to at most {fitting}" if fitting > 0 else ""
        raise ValueError(
            f"gpu_memory_utilization grants {show_bytes(limit)} of {device}, and the engine needs "
            f"{show_bytes(cache + rest)} ({show_bytes(cache)} of K/V cache), but {why}{smaller}"
        )


def remember(file: Path | None, measure: Callable[[], int]) -> int:
    """What `measure` returned when `file` was written, or now if it cannot be read (None: no file is kept).

    Failing to write costs the next start time, nothing else.
    """
    if file is None:
        return measure()
    try:
        return int(file.read_bytes())
    except (OSError, ValueError):
        value = measure()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete_on_close=False) as written:
            written.write(b"%d" % value)
            written.close()
            os.replace(written.name, file)
    except OSError as error:
        logger.warning("cannot keep a measurement in %s: %s", file, error)
    return value


def shard_bytes(specs: Iterable[Any]) -> int:
    """Bytes on one device of arrays with these shapes, types and shardings."""
    return sum(int(np.prod(spec.sharding.shard_shape(spec.shape))) * spec.dtype.itemsize for spec in specs)


def held_bytes(arrays: Iterable[jax.Array], device: Any) -> int:
    """Bytes that arrays take on `device`; deleted ones take none.

    Their shards are not touched: a step that another thread launches meanwhile deletes those.
    """
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays
        if not array.is_deleted() and device in array.sharding.device_set
    )


def temp_bytes(compiled: Iterable[jax.stages.Compiled]) -> int:
    """Bytes that the largest of these programs needs while it runs: temporaries, and outputs that are no argument."""
    analyses = [analysis for program in compiled if (analysis := program.memory_analysis())]
    return max(
        (one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes for one in analyses), default=0
    )


def report(device: Any, weights: Any, cache: Any, state: Any, temp: int) -> DeviceMemory:
    """What an engine holds on `device`; `weights`, `cache` and `state` are pytrees of arrays."""
    stats = device.memory_stats() or {}
    weight_bytes, cache_bytes, state_bytes = (
        held_bytes(jax.tree.leaves(tree), device) for tree in (weights, cache, state)
    )
    name = f"{device.platform}:{device.id} {device.device_kind}"
    in_use, limit = stats.get("bytes_in_use"), stats.get("bytes_limit")
    return DeviceMemory(name, weight_bytes, cache_bytes, state_bytes, temp, in_use, limit)


def _preallocates() -> bool:
    return os.environ.get(PREALLOCATE, "true").lower() not in ("0", "false")
