"""Ranks of a user's own policy that cannot be compared: who is told, and that nobody else notices."""

from __future__ import annotations

import numpy as np
import pytest
from doubles import FakeEngine, make_request

from jaxllm.memory import CacheSize
from jaxllm.scheduling.policy import RankedOrder
from jaxllm.scheduling.policy_choice import make_order
from jaxllm.scheduling.scheduler import StepLimits


class ByLabel(RankedOrder):
    """A policy whose ranks are what a test says."""

    def __init__(self):
        super().__init__()
        self.ranks = {}

    def rank(self, request, is_back):
        return self.ranks.get(request.request_id, (0, 1.5))


UNLIKE = [(0, "gold"), (0,), (0, 1, 2), 7, "gold", [0, 1], (0, None), (0, np.zeros(2)), None]


@pytest.mark.parametrize("rank", UNLIKE, ids=str)
def test_a_rank_unlike_the_others_is_refused_and_nobody_else_notices(rank):
    engine = FakeEngine(StepLimits(2, 64), CacheSize(101, 4), waiting=make_order(ByLabel()))
    order = engine.scheduler.waiting
    order.ranks["odd"] = rank
    engine.add(make_request("a", 4, 3))
    with pytest.raises(ValueError) as raised:
        engine.add(make_request("odd", 4, 3))
    assert str(raised.value) == (
        f"scheduling_policy: ByLabel.rank returned {rank!r}, and (0, 1.5) before, which cannot be compared: have it "
        "return a tuple, always of the same length, with numbers (or texts) at the same places"
    )
    engine.add(make_request("b", 4, 3))
    engine.check_invariants()
    engine.run()
    assert {name: len(answer) for name, answer in engine.answers.items()} == {"a": 3, "odd": 0, "b": 3}


def test_a_first_rank_that_nothing_could_be_compared_with_is_refused():
    order = ByLabel()
    order.ranks = {"a": ({},), "c": (True, np.float32(2))}
    with pytest.raises(ValueError, match=r"ByLabel\.rank returned \({},\), which cannot be compared: have it"):
        order.push(make_request("a", 4, 3))
    order.push(make_request("b", 4, 3))
    order.push(make_request("c", 4, 3))  # kinds of numbers may differ
    assert [request.request_id for request in order] == ["b", "c"]


def test_who_comes_back_with_such_a_rank_is_next_and_nobody_is_lost(caplog):
    engine = FakeEngine(StepLimits(2, 64), CacheSize(7, 4), waiting=make_order(ByLabel()))
    for name in "abc":
        engine.add(make_request(name, 7, 12))
    engine.step()
    engine.scheduler.waiting.ranks = dict.fromkeys("ab", (0, "back"))
    engine.run()
    engine.check_invariants()
    assert engine.scheduler.num_preemptions > 0
    assert "ByLabel.rank returned (0, 'back'), and (0, 1.5) before, which cannot be compared" in caplog.text
    assert list(engine.finish_reasons)[-1] == "c" and {len(answer) for answer in engine.answers.values()} == {12}
