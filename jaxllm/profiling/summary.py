"""What a session says about the engine's steps: plain values, and no arithmetic.

Invariant: the stages of a bucket and its idle time add up to what the device took for it; the time of a step by the
host's clock, `step_ms`, is measured apart from that, and says whether anything is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.profiling.ceilings import Ceiling
from jaxllm.profiling.host_work import READ
from jaxllm.profiling.work import Load


@dataclass(frozen=True)
class StageTime:
    """One stage of a bucket's steps; those of all layers together. All numbers are of one step."""

    name: str
    """ "attention/paged_attention" is a part of "attention"."""
    ms: float
    share: float
    """Of the time of the step on the device."""
    gigabytes: float | None
    """What it has to read and write at the least; None: not known."""
    gigaflops: float | None
    tb_per_s: float | None
    tflop_per_s: float | None


@dataclass(frozen=True)
class BucketTime:
    """The steps of one compiled program. Times are milliseconds of one step."""

    name: str
    calls: int
    steps: int
    load: Load
    """Of one step, on average."""
    step_ms: float | None
    """From one step's tokens to the next's, by the host's clock; None: too few steps to tell."""
    busy_ms: float
    """The device computed."""
    idle_ms: float
    """It waited for the host, or for memory to be copied, while a step was in flight."""
    stages: Sequence[StageTime]
    layers: Mapping[str, Sequence[float]]
    """Of stages that layers have: milliseconds in each layer."""

    @property
    def accounted(self) -> float | None:
        """Stages and idle time as a share of `step_ms`: 1 if nothing is missing."""
        return (self.busy_ms + self.idle_ms) / self.step_ms if self.step_ms else None


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name and stage, over all layers, in one step."""

    name: str
    stage: str
    bucket: str
    ms: float
    count: float
    us_each: float


@dataclass(frozen=True)
class Gap:
    """A stretch in which the device had nothing to do although a step was in flight."""

    us: float
    after: str
    """The stage of what ran before."""
    before: str
    host: str
    """What the host did for the longest part of it."""


@dataclass(frozen=True)
class HostTime:
    """A part of the host's work in one step, in milliseconds."""

    name: str
    hidden_ms: float
    """While the device worked."""
    exposed_ms: float
    """While it did not."""


@dataclass(frozen=True)
class Summary:
    """One session."""

    facts: Mapping[str, object]
    """What ran, and on what."""
    ceiling: Ceiling | None
    """None: nobody measured this device."""
    unprofiled_step_ms: float | None
    """The same steps just before, with nothing recorded; None: not measured."""
    steps: int
    buckets: Sequence[BucketTime]
    """The one that took longest first."""
    kernels: Sequence[KernelTime]
    """The longest."""
    gaps: Sequence[Gap]
    """The longest."""
    others: Mapping[str, float]
    """Programs that were no steps, as those that seat requests, and their milliseconds in all."""
    host: Sequence[HostTime]

    @property
    def host_ms(self) -> tuple[float, float]:
        """The host's own work in one step, waiting for the device left out: hidden behind the device, and not."""
        own = [part for part in self.host if part.name != READ]
        return sum(part.hidden_ms for part in own), sum(part.exposed_ms for part in own)

    def to_dict(self) -> dict[str, Any]:
        """As dictionaries and lists, for JSON."""
        found = dataclasses.asdict(self)
        for bucket, one in zip(found["buckets"], self.buckets, strict=True):
            bucket["load"] = one.load._asdict()
            bucket["accounted"] = one.accounted
        hidden, exposed = self.host_ms
        return found | {"host_ms": {"hidden": hidden, "exposed": exposed}}
