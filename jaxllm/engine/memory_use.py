"""How much memory is in use now, as numbers that a long run's trend can be seen by.

Invariant: asking takes microseconds, and never waits for a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def device_bytes(devices: Iterable[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What this process holds on each device, by names as "gpu:0", and what it may take there.

    Nothing of a device whose platform does not say it (a CPU).
    """
    in_use: dict[str, int] = {}
    limit: dict[str, int] = {}
    for device in devices:
        stats = device.memory_stats() or {}
        name = f"{device.platform}:{device.id}"
        if "bytes_in_use" in stats:
            in_use[name] = stats["bytes_in_use"]
        if "bytes_limit" in stats:
            limit[name] = stats["bytes_limit"]
    return in_use, limit
