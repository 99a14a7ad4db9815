"""The report of a profile, made by another process: whoever serves requests goes on meanwhile, and needs no JAX."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, TypedDict


class ProfileReport(TypedDict):
    """What a session left."""

    folder: str
    """Its files: JAX's trace, summary.json, timeline.html and memory.pprof."""
    summary: dict[str, Any]
    """As in summary.json."""


async def read_apart(folder: str) -> ProfileReport:
    """Reads the session in `folder`.

    Raises:
        ValueError: it holds no step.
    """
    # It finds the modules that this process finds, and needs no device.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "jaxllm.profiling", folder, "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it ended without a word"]
        raise ValueError(f"the profile in {folder} cannot be read: {lines[-1]}")
    return {"folder": folder, "summary": json.loads(output)}
