"""The same tokens whether a request's K/V were swapped out, computed again or never given up, or came from the host.

The engines have 12 blocks of 16 tokens for requests that want five times as many, and chunks of host memory of two
blocks, so that every request is moved about. Answers are held against the dense model.
"""

from __future__ import annotations

import pytest
from sharing_workload import RememberingOracle, check, make_requests, run
from tiny_model import write_model

from jaxllm import LLMEngine
from jaxllm.debug import memory_stats, print_memory_stats
from jaxllm.memory import SwapCosts
from jaxllm.runner import host_memory
from jaxllm.scheduling.swap_rule import SwapRule

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "num_gpu_blocks_override": 13,
    "preemption_mode": "swap",
    "swap_space": 0.01,
}
LITTLE = 0.0001
"""GiB: four chunks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("swap") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """A cache folder of its own: variants of the same shapes share what is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(host_memory, "CHUNK_TOKENS", 32)
        yield


@pytest.fixture(scope="module")
def oracle():
    return RememberingOracle()


VARIANTS = {
    "swapped": {},
    "swapped, three steps in flight": {"max_steps_in_flight": 3},
    "swapped, nothing shared": {"enable_prefix_caching": False},
    "swapped, two devices": {"tensor_parallel_size": 2},
    "swapped, three devices": {"tensor_parallel_size": 3, "max_steps_in_flight": 3},
    "some swapped": {"swap_space": LITTLE},
    "auto": {"preemption_mode": "auto"},
    "recomputed": {"preemption_mode": "recompute", "swap_space": 0},
    "recomputed, blocks kept": {"preemption_mode": "recompute"},
    "swapped, synchronous": {"max_steps_in_flight": 1},
}
SLOW = ("recomputed, blocks kept", "swapped, synchronous", "swapped, three devices")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS])
def test_what_is_given_up_comes_back(name, folder, oracle):
    with LLMEngine(str(folder), **OPTIONS | VARIANTS[name]) as engine:
        scheduler, host = engine.core.scheduler, engine.core.runner.host
        scheduler.kv.host.rule = SwapRule(engine.config.preemption_mode)
        if name == "auto":  # those with few tokens are computed again
            rule = SwapRule("auto", SwapCosts(host.chunk_bytes, out_seconds=12.0, in_seconds=12.0, token_seconds=1.0))
            scheduler.kv.host.rule = rule
        swapped: set[str] = set()
        step = engine.core.step

        def watched():
            outputs = step()
            swapped.update(one.request_id for one in scheduler.waiting if one.status.value == "swapped")
            return outputs

        engine.core.step = watched
        requests = make_requests(n=2)
        answers = run(engine, requests)
        lost, moved = scheduler.thrash.num_lost_tokens, host.num_out > 0 < host.num_in
        assert scheduler.num_preemptions > 5 and engine.core.runner.num_compiles_since_ready == 0
        assert (len(swapped) > 3) == (not name.startswith("recomputed"))
        assert (lost > 0) == (not name.startswith("swapped")), "what is swapped is not computed again"
        assert moved == (name != "recomputed")
        assert scheduler.kv.num_used_blocks == scheduler.kv.stats().host.used_blocks == 0
    check(oracle, requests, answers)


def test_what_comes_from_the_host_is_as_good_as_new(folder, oracle, capsys):
    """One after the other, so that nobody is preempted; each needs blocks that the one before it left behind."""
    requests = make_requests()
    others = [([7] * 100, requests[index][1]) for index in (0, 1)]
    order = [requests[6], requests[3], others[0], requests[6], requests[3], others[1], requests[6]]
    with LLMEngine(str(folder), **OPTIONS) as engine:
        kv = engine.core.scheduler.kv
        kv.host.rule = SwapRule()  # not what this machine's speed makes of it
        answers = [run(engine, [given])[0] for given in order]
        found = [answer[0][0].num_cached_tokens for answer in answers]
        assert found == [0, 0, 0, 80, 48, 96, 80]
        assert 200 < kv.stats().prefix_cache.host_hits <= kv.stats().prefix_cache.hits == sum(found)
        assert engine.core.scheduler.num_preemptions == engine.core.runner.num_compiles_since_ready == 0
        stats, chunk_bytes = memory_stats(engine), engine.core.runner.host.chunk_bytes
        assert stats.swap.bytes_in >= stats.pool.prefix_cache.host_hits // 32 * chunk_bytes
        assert stats.swap.bytes_out > 0 and stats.swap.costs.chunk_bytes == chunk_bytes
        assert stats.swap.host_bytes == stats.pool.host.total_blocks // 2 * chunk_bytes
        print_memory_stats(engine)
        shown = capsys.readouterr().out
        assert "Host memory: 10." in shown and "0 of 0 swapped requests" in shown and "At the start 24.0 KiB" in shown
    check(oracle, order, answers)
