"""What JAX sees, as JSON on standard output: `python -m jaxllm.serving.device_report`.

A process of its own for `jaxllm env`, as starting JAX may fail, hang or crash where an installation is broken.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jax

_GIB = 1 << 30


def describe_devices() -> list[str]:
    """One text for each kind of device."""
    counts = Counter(f"{device.device_kind} ({device.platform}){_memory(device)}" for device in jax.devices())
    return [f"{count} x {kind}" for kind, count in counts.items()]


def _memory(device: Any) -> str:
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except RuntimeError:  # this platform does not count
        return ""
    return "" if limit is None else f", {limit / _GIB:.1f} GiB that JAX may use"


if __name__ == "__main__":
    print(json.dumps(describe_devices()))
