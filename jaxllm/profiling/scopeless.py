"""The stage of operations that have no scope, told by the operations around them.

XLA on a CPU drops the scopes of matrix products that it rewrites, which can be a third of a step. Invariant: an
operation that takes results of several stages, and whose result goes to several, stays without: no guess is made
between two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from jaxllm.profiling.stages import common_stage, is_whole, without_part


def infer_stages(operands: Mapping[str, Sequence[str]], stages: dict[str, str | None]) -> None:
    """Gives operations of one computation, which have no stage, that of what they take or, failing this, of who takes
    their result.

    What they take goes first: a product between two stages is the last operation of the first one, as the norm or the
    sum that follows it is fused into the second. It is in a part of a stage only if those that take its result are.

    Args:
        operands: of each operation, by names, in the program's order.
        stages: of all of them; filled in.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for name, taken in operands.items():
        for one in taken:
            users[one].append(name)
    for name, taken in operands.items():
        before = common_stage(stages[one] for one in taken)
        if before and not is_whole(stages[name]):
            after = [stages[one] for one in users[name]]
            stages[name] = common_stage([before, *after]) or without_part(before)
    for name in reversed(list(operands)):
        if not is_whole(stages[name]):
            stages[name] = common_stage(stages[one] for one in users[name]) or stages[name]
