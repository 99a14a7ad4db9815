"""The log: who decides what it shows, that no line comes twice, and what an engine says of its steps."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxllm.engine import step_log
from jaxllm.engine.step_log import StepLog
from jaxllm.logs import get_level
from jaxllm.outputs import TokenOutput
from jaxllm.runner.buckets import Bucket, BucketLadder
from jaxllm.scheduling.kv_stats import PrefixCacheStats
from jaxllm.scheduling.plan import PlanRow, StepPlan

PROGRAM = """
import logging, sys
from jaxllm.logs import set_up_log
{}
set_up_log()
set_up_log()
{}
for level in ("debug", "info", "warning", "error"):
    getattr(logging.getLogger("jaxllm.engine.x"), level)("this is %s", level)
    getattr(logging.getLogger("other"), level)("another's %s", level)
"""
BASIC = "logging.basicConfig(level=logging.DEBUG)"


@pytest.mark.parametrize(
    ("variable", "before", "after", "shown"),
    [
        (None, "", "", ["warning", "error"]),
        ("debug", "", "", ["debug", "info", "warning", "error"]),
        ("INFO", "", "", ["info", "warning", "error"]),
        ("error", "", "", ["error"]),
        (None, BASIC, "", ["debug", "info", "warning", "error"]),
        ("debug", BASIC, "", ["debug", "info", "warning", "error"]),
        ("debug", "", BASIC, ["debug", "info", "warning", "error"]),
        ("error", BASIC, "", ["error"]),
        ("debug", "logging.getLogger('jaxllm').setLevel('ERROR')", "", ["error"]),
    ],
)
def test_who_decides_what_is_shown(variable, before, after, shown):
    environment = {**os.environ, **({"JAXLLM_LOG": variable} if variable else {})}
    command = [sys.executable, "-c", PROGRAM.format(before, after)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = [line for line in done.stderr.splitlines() if "this is" in line]
    assert [line.rpartition(" ")[2] for line in lines] == shown
    others = [line for line in done.stderr.splitlines() if "another's" in line]
    assert len(others) == (4 if BASIC in (before, after) else 2), "what others log is none of our business"


def test_a_wrong_level_is_named(monkeypatch):
    monkeypatch.setenv("JAXLLM_LOG", "loud")
    with pytest.raises(ValueError, match="JAXLLM_LOG='loud' is not a level: use one of debug, info"):
        get_level("info")
    command = [sys.executable, "-c", "import sys; from jaxllm.serving.cli import main; sys.exit(main(['pull']))"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "JAXLLM_LOG='loud'" in done.stderr


def make_log():
    kv = SimpleNamespace(num_free_blocks=7, usage=0.25, stats=lambda: SimpleNamespace(prefix_cache=kv.prefix_cache))
    kv.prefix_cache = PrefixCacheStats()
    scheduler = SimpleNamespace(num_running=3, num_waiting=2, num_swapped=1, kv=kv)
    ladder = BucketLadder(
        (
            Bucket(4, 4, False),
            Bucket(256, 256, False),
        ),
        (Bucket(16, 4, True),),
    )
    return StepLog(scheduler, SimpleNamespace(programs=SimpleNamespace(ladder=ladder))), kv


def make_step(num_rows=3, *, prompt_len=0, num_tokens=1):
    """A plan whose rows compute tokens of a prompt (or behind it), and its outputs: a token each."""
    request = SimpleNamespace(prompt_len=prompt_len)
    rows = [PlanRow(request, seat, 0, num_tokens, 0, 0, (), prompt_len > 0, True) for seat in range(num_rows)]
    return StepPlan(tuple(rows)), [TokenOutput(str(seat), (5,), (-1.0,)) for seat in range(num_rows)]


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: now[0])

    def run(log, step, seconds):
        log.begin()
        now[0] += seconds
        log.end(*step)

    run.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    return run


def test_a_line_per_step_at_debug(clock, caplog):
    caplog.set_level(logging.DEBUG, "jaxllm")
    log, _ = make_log()
    clock(log, make_step(2, prompt_len=9, num_tokens=5), 0.0125)
    clock(log, make_step(3), 0.002)
    assert [record.getMessage() for record in caplog.records] == [
        "step: 12.50 ms, rows 2, tokens 10 of mixed-16 (padding 38%), steps 1; running 3, waiting 1, swapped 1, free blocks 7",
        "step: 2.00 ms, rows 3, tokens 3 of decode-4 (padding 25%), steps 1; running 3, waiting 1, swapped 1, free blocks 7",
    ]
    assert math.isclose(log.seconds, 0.0145)


def test_a_line_per_ten_seconds_of_work_at_info(clock, caplog):
    caplog.set_level(logging.INFO, "jaxllm")
    log, kv = make_log()
    clock(log, make_step(), 1.0)  # the first one begins an interval
    kv.prefix_cache = PrefixCacheStats(200, 50)
    for _ in range(4):
        clock(log, make_step(2, prompt_len=9, num_tokens=5), 1.0)
    for _ in range(6):
        clock(log, make_step(), 1.0)
    line = "20.0 tokens/s in, 2.6 out; running 3, waiting 1, swapped 1; K/V cache 25.0% used, prefix hits 25.0%"
    assert [record.getMessage() for record in caplog.records] == [line]
    caplog.clear()
    clock.wait(3600)  # idle: no line, and no mean over the hour
    for _ in range(10):
        clock(log, make_step(), 1.0)
    assert caplog.records == []
    clock(log, make_step(), 1.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("0.0 tokens/s in, 3.0 out") and "prefix hits 0.0%" in record.getMessage()


def test_it_costs_nothing_when_it_is_off(caplog):
    """Two microseconds are 0.2 % of the fastest step there is: one row of a model of 0.6 billion weights on an H200."""
    caplog.set_level(logging.WARNING, "jaxllm")
    log, _ = make_log()
    step = make_step(256)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(2000):
            log.begin()
            log.end(*step)
        seconds.append((time.perf_counter() - started) / 2000)
    print(f"{1e6 * min(seconds):.2f} us a step")
    assert min(seconds) < 5e-6
    assert caplog.records == []
