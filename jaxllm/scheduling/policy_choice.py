"""From the names in `EngineConfig` to the objects that a scheduler works with.

Invariant: every engine has an order of its own; one that a user gives is copied, so that the configuration it
stands in stays as it is.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from jaxllm.config import SCHEDULING_POLICIES, PreemptionVictim
from jaxllm.scheduling.dynamic_order import DynamicOrder
from jaxllm.scheduling.policy import FCFS, AdmissionOrder, PriorityOrder
from jaxllm.scheduling.shortest_first import ShortestFirst
from jaxllm.scheduling.victims import LastJoined, LeastProgress, LowestPriority, VictimChoice

POLICIES: dict[str, Callable[[], AdmissionOrder]] = dict(
    zip(SCHEDULING_POLICIES, (FCFS, PriorityOrder, ShortestFirst, DynamicOrder), strict=True)
)
VICTIMS: dict[PreemptionVictim, Callable[[], VictimChoice]] = {
    "last_joined": LastJoined,
    "least_progress": LeastProgress,
    "lowest_priority": LowestPriority,
}
MEMBERS = (
    *("uses_priority", "preempts", "push", "push_front", "peek", "pop", "remove", "__len__", "__iter__"),
    *("begin_step", "note_finished", "may_preempt"),
)
"""What an order has to have."""


def make_order(policy: object) -> AdmissionOrder:
    """An empty order.

    Args:
        policy: `EngineConfig.scheduling_policy`.

    Raises:
        ValueError: it cannot be imported or made, or is no `AdmissionOrder`.
    """
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    given = _load(policy) if isinstance(policy, str) else policy
    order: Any = _make(given, policy) if inspect.isclass(given) else given
    if missing := [name for name in MEMBERS if not hasattr(order, name)]:
        raise ValueError(
            f"scheduling_policy={policy!r} lacks {', '.join(missing)}: inherit from "
            "jaxllm.scheduling.policy.RankedOrder and write rank, or from AdmissionOrder beside it"
        )
    if len(order) > 0:
        raise ValueError(f"scheduling_policy={policy!r} holds requests already: give a new one")
    return copy.deepcopy(order)


def make_victims(name: PreemptionVictim | None, order: AdmissionOrder) -> VictimChoice:
    """What `EngineConfig.preemption_victim` names, by default what goes with the policy."""
    return VICTIMS[name or ("lowest_priority" if order.uses_priority else "last_joined")]()


def _load(named: str) -> Any:
    module, _, name = named.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"scheduling_policy={named!r} cannot be imported: {error} (is it installed, or its folder in PYTHONPATH?)"
        ) from error


def _make(kind: Any, policy: object) -> Any:
    try:
        return kind()
    except TypeError as error:  # abstract methods are named in it
        raise ValueError(f"scheduling_policy={policy!r} cannot be made: {error}") from error
