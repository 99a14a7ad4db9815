"""Who computes an operation that has several implementations."""

from __future__ import annotations

from typing import Literal

type Backend = Literal["xla", "pallas", "pallas_interpret"]
"""XLA on any device; Pallas (Triton lowering) on NVIDIA GPUs; the same kernels interpreted on a CPU, for tests."""
