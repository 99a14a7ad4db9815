"""`jaxllm serve` and `jaxllm bench serve` on the command line."""

import dataclasses
import json

import pytest
from fake_async_llm import FakeAsyncLLM
from server_process import fake_server

from jaxllm.bench.serve_client import Trace
from jaxllm.config import EngineConfig
from jaxllm.serving import cli, cli_serve
from jaxllm.serving.cli_commands import Serve
from jaxllm.serving.server_settings import ServerSettings


def parse_serve(*arguments):
    command = cli.parse(["serve", *arguments])
    assert isinstance(command, Serve)
    return command


def test_flags_are_the_fields():
    command = parse_serve(
        "m", "--port", "9000", "--api-key", "a", "--api-key", "b", "--served-model-name", "x", "--max-model-len", "64",
        "--vllm-metrics", "--request-timeout", "2.5",
    )  # fmt: skip
    assert command.engine.make_config() == EngineConfig("m", max_model_len=64)
    assert command.server.make_settings() == ServerSettings(
        port=9000, api_key=("a", "b"), served_model_name=("x",), vllm_metrics=True, request_timeout=2.5
    )
    assert parse_serve("m").server.make_settings() == ServerSettings()


def test_help_has_every_field(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    for kind in (ServerSettings, EngineConfig):
        for item in dataclasses.fields(kind):
            assert item.name == "model" or "--" + item.name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ssl-keyfile", "/nowhere"], "ssl_keyfile and ssl_certfile"),
        (["--port", "-1"], "port=-1"),
        (["--default-chat-template-kwargs", "[]"], "default_chat_template_kwargs"),
        (["--max-model-len", "0"], "max_model_len=0"),
    ],
)
def test_a_wrong_flag_is_said_at_once(flags, message, capsys):
    assert cli.main(["serve", "m", *flags]) == cli.USER_ERROR
    assert message in capsys.readouterr().err


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(cli_serve.KEYS_VARIABLE, "a, b,")
    assert cli_serve._with_keys(ServerSettings()).api_key == ("a", "b")
    assert cli_serve._with_keys(ServerSettings(api_key=("c",))).api_key == ("c",)


def test_a_missing_package_is_named(monkeypatch, capsys):
    def fail(name):
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette.applications")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    assert cli.main(["serve", "m"]) == cli.OUTSIDE_ERROR
    assert "pip install 'jaxllm[serve]'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def server():
    with fake_server(FakeAsyncLLM(step_seconds=0.002, max_num_seqs=8), max_waiting_requests=8) as made:
        yield made


FLAGS = ["--output-len", "20", "--input-len", "10", "--vocab-size", "250"]


def bench(server, capsys, *flags):
    assert cli.main(["bench", "serve", server.url, "--json", "-", *FLAGS, *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_bench_with_streams_in_flight(server, capsys, tmp_path):
    report = bench(server, capsys, "--concurrency", "1,4", "--plot", str(tmp_path / "plot.svg"))
    names = [figure["name"] for figure in report["figures"]]
    kinds = ("output", "TTFT", "TPOT", "ITL", "E2E")
    assert names == [f"{level}: {kind}" for level in ("1 stream", "4 streams") for kind in kinds]
    figures = dict(zip(names, report["figures"], strict=True))
    output = figures["4 streams: output"]
    assert (output["details"]["requests"], output["details"]["failed"]) == (16, 0)
    assert output["details"]["output_tokens"] == 16 * 20
    for name in ("1 stream", "4 streams"):
        assert figures[f"{name}: TPOT"]["value"] >= 2  # a step takes that long
        shares = [figures[f"{name}: E2E"]["details"][share] for share in ("p50_ms", "p90_ms", "p99_ms", "max_ms")]
        assert shares == sorted(shares)
        assert shares[0] >= 40
    assert report["model"] == "fake-model"
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_bench_with_arrivals_at_random(server, capsys):
    report = bench(server, capsys, "--request-rate", "50", "--num-prompts", "20")
    details = report["figures"][0]["details"]
    assert (details["request_rate"], details["requests"], details["failed"]) == (50, 20, 0)
    assert 0.15 < details["seconds"] < 3


def test_bench_counts_what_fails(server, capsys):
    report = bench(server, capsys, "--concurrency", "30", "--num-prompts", "60")
    details = report["figures"][0]["details"]
    assert 0 < details["failed"] < 60
    assert details["first_failure"].startswith("429")


def test_bench_of_what_is_no_server(server, capsys):
    assert cli.main(["bench", "serve", "http://127.0.0.1:9"]) == cli.OUTSIDE_ERROR
    assert cli.main(["bench", "serve", server.url, "--input-len", "500", "--vocab-size", "250"]) == cli.OUTSIDE_ERROR
    assert "context length" in capsys.readouterr().err
    assert cli.main(["bench", "serve", server.url, "--concurrency", "0"]) == cli.USER_ERROR


def test_bench_with_a_key(capsys, monkeypatch):
    with fake_server(api_key=("secret",)) as server:
        assert cli.main(["bench", "serve", server.url, *FLAGS]) == cli.OUTSIDE_ERROR
        monkeypatch.setenv("JAXLLM_API_KEY", "secret")
        report = bench(server, capsys, "--concurrency", "1")
    assert "secret" not in json.dumps(report)


def test_the_times_of_a_request():
    trace = Trace(sent=1.0, ended=9.0, arrivals=[2.0, 3.0, 5.0], num_tokens=4)
    assert (trace.first, trace.whole, trace.per_token, trace.gaps) == (1.0, 4.0, 1.0, [1.0, 2.0])
