"""The troubleshooting page: the commands, flags, routes and metrics that it names are there."""

import re
from pathlib import Path

import pytest

import jaxllm
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.serving.app import ENDPOINTS
from jaxllm.serving.cli import main
from jaxllm.serving.metrics import Metrics

PAGE = (Path(jaxllm.__file__).parent / "TROUBLESHOOTING.md").read_text()


def flags_by_command() -> dict[tuple[str, ...], set[str]]:
    """Flags that the page gives to commands; those that stand alone are an engine's or a server's."""
    page = PAGE.replace("\\\n", " ")
    commands: dict[tuple[str, ...], set[str]] = {("serve",): set(re.findall(r"`(--[a-z-]+)", page))}
    for line in re.findall(r"\bjaxllm ([^\n`|]+)", page):
        words = line.partition("  #")[0].split()
        command = tuple(words[: 2 if words[0] == "bench" else 1])
        commands.setdefault(command, set()).update(word for word in words if word.startswith("--"))
    return commands


NAMED = flags_by_command()
ELSEWHERE = {"--cuda-graph-trace", "--delay", "--once"}
"""Named by themselves, but no flags of an engine: those of nsys and of `jaxllm top`."""


def test_the_page_names_what_it_is_for():
    assert {("top",), ("profile",), ("generate",), ("env",), ("bench", "latency"), ("bench", "serve")} <= NAMED.keys()
    assert {"--steps", "--rows", "--context"} <= NAMED["profile",]
    assert "with llm.profile(" in PAGE and hasattr(jaxllm.LLM, "profile")


@pytest.mark.parametrize("command", [pytest.param(one, id=" ".join(one)) for one in NAMED])
def test_its_flags_are_there(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert NAMED[command] - known <= ELSEWHERE


def test_its_routes_and_metrics_are_there():
    paths = {one.path for one in ENDPOINTS}
    named = set(re.findall(r"(?:localhost:8000|`|GET |POST )(/\w+(?:/\w+)*)", PAGE))
    assert len(named) > 6 and named <= paths | {"/metrics"}
    text = Metrics("m").render(EngineStats(device_bytes_in_use={"a": 1}, device_bytes_limit={"a": 1}), 0, False)
    metrics = set(re.findall(r"jaxllm:\w+", PAGE)) | {"jaxllm:kv_cache_usage_perc"}
    assert all(name in text for name in metrics)
