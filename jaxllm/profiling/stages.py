"""The stages of a step, and how an operation's stage is read off the scopes it was traced in.

A stage is a path of names: "embed", "layer_07/attention/paged_attention". Invariant: what stands in a path is a
`jax.named_scope` of the step, never a primitive or a function of JAX.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable

PREPARE, EMBED, ATTENTION, MLP, HEAD, SAMPLE = "prepare", "embed", "attention", "mlp", "head", "sample"
WRITE_KV, PAGED_ATTENTION = "write_kv", "paged_attention"
OTHER = "other"
"""What has no scope: the loop over steps, copies between the stages."""
TOP_STAGES = (PREPARE, EMBED, ATTENTION, MLP, HEAD, SAMPLE, OTHER)
"""In the order of a step; those of all layers count as one."""
PARTS = {ATTENTION: (WRITE_KV, PAGED_ATTENTION)}
"""Of what some stages consist besides matrix products and norms."""

_NAMES = {*TOP_STAGES, *(part for parts in PARTS.values() for part in parts)} - {OTHER}
_LAYER = re.compile(r"layer_\d+$")


def stage_of(op_name: str) -> str | None:
    """The stage that XLA's `op_name`, as "jit(step)/layer_00/jit(f)/mlp/dot_general", lies in; None if in none."""
    path = [name for name in op_name.split("/") if name in _NAMES or _LAYER.match(name)]
    return "/".join(path) or None


def is_whole(stage: str | None) -> bool:
    """It says more than which layer."""
    return stage is not None and not _LAYER.match(stage)


def most_common(stages: Iterable[str | None]) -> str | None:
    """The stage of what consists of operations of these stages."""
    whole = Counter(stage for stage in stages if is_whole(stage))
    return whole.most_common(1)[0][0] if whole else None


def common_stage(stages: Iterable[str | None]) -> str | None:
    """The innermost stage that all of them lie in; None if there is none. Those that are not known do not count."""
    paths = [stage.split("/") for stage in stages if stage is not None and is_whole(stage)]
    alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    common = "/".join(names[0] for names in alike)
    return common if common and is_whole(common) else None


def without_part(stage: str) -> str:
    """ "layer_07/attention" for "layer_07/attention/write_kv"."""
    names = stage.split("/")
    return "/".join(names[: 2 if _LAYER.match(names[0]) else 1])


def without_layer(stage: str) -> str:
    """The stage of any layer: "attention" for "layer_07/attention"."""
    first, _, rest = stage.partition("/")
    return (rest or OTHER) if _LAYER.match(first) else stage


def layer_of(stage: str) -> int | None:
    """7 for "layer_07/attention"."""
    first = stage.partition("/")[0]
    return int(first.removeprefix("layer_")) if _LAYER.match(first) else None
