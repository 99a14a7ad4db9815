"""What a profile is told of the host's work, and of every call: how much there was to compute.

Invariant: with no profiler session, an annotation costs a fraction of a microsecond, whatever the step.
"""

from __future__ import annotations

import contextlib

from jax.profiler import StepTraceAnnotation, TraceAnnotation

from jaxllm.scheduling.plan import PlanRow, StepPlan

type Annotation = contextlib.AbstractContextManager[object]

_NOTHING: Annotation = contextlib.nullcontext()


def annotate(name: str) -> Annotation:
    """Marks a stretch of the host's time, by one of the names in `jaxllm.profiling.host_work`."""
    return TraceAnnotation(name) if TraceAnnotation.is_enabled() else _NOTHING


def annotate_step() -> Annotation:
    """Marks one turn of the engine, as XProf marks steps."""
    return StepTraceAnnotation("step") if TraceAnnotation.is_enabled() else _NOTHING


def annotate_launch(plan: StepPlan, bucket: str) -> Annotation:
    """Marks the launch of a plan in the named bucket."""
    if not TraceAnnotation.is_enabled():
        return _NOTHING
    rows = plan.rows
    return TraceAnnotation(
        "launch",
        bucket=bucket,
        steps=plan.num_steps,
        rows=sum(row.num_steps for row in rows),
        tokens=sum(row.num_tokens * row.num_steps for row in rows),
        contexts=sum(_contexts(row) for row in rows),
        attended=sum(_attended(row) for row in rows),
        sampled=sum(row.num_steps for row in rows if row.samples),
    )


def _contexts(row: PlanRow) -> int:
    """Tokens that have K/V at the end of each of the row's steps, added up."""
    return row.num_steps * row.end + row.num_steps * (row.num_steps - 1) // 2


def _attended(row: PlanRow) -> int:
    """Pairs of a token that is computed and one that it sees."""
    if row.num_steps > 1:
        return _contexts(row)
    return row.num_tokens * row.start + row.num_tokens * (row.num_tokens + 1) // 2
