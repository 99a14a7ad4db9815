"""What devices can do at best: measured, not out of a data sheet. No JAX.

Invariant: a device that nobody measured has no ceiling, and no share of one is ever made up for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ceiling:
    """The most of one device."""

    read: float
    """TB/s that its memory is read at."""
    compute: float
    """TFLOP/s of bfloat16 matrix products."""


H200 = Ceiling(read=4.32, compute=756.0)
"""Reading: the sum of 4 GB. Products: 8192 x 8192 x 8192, through XLA."""

CEILINGS: Mapping[str, Ceiling] = {"NVIDIA H200": H200}
"""By what JAX calls the kind of a device."""
