"""`jaxllm top`: what it reads from a server, what it shows, and what it says where there is nothing to show."""

import concurrent.futures
import http.server
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import httpx2
import pytest
from fake_async_llm import FakeAsyncLLM
from rich.console import Console
from server_process import fake_server

from jaxllm.engine.engine_stats import EngineStats
from jaxllm.serving.cli import main
from jaxllm.serving.metrics import Metrics
from jaxllm.serving.scrape import Sample, ServerProbe
from jaxllm.serving.top_screen import Moment, draw

LONG = {"prompt": "Hello", "max_tokens": 100, "seed": 0}
"""A request that takes a second."""


@pytest.fixture(scope="module")
def busy():
    """A server with a key, and three requests, of which two run."""
    engine = FakeAsyncLLM(step_seconds=0.05, max_num_seqs=2)
    with fake_server(engine, api_key=("k",)) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        headers = {"Authorization": "Bearer k"}
        url = f"{server.url}/v1/completions"
        running = [
            pool.submit(httpx2.post, url, json=LONG | {"request_id": f"n{n}"}, headers=headers) for n in range(3)
        ]
        while len(engine.running) < 3:
            time.sleep(0.01)
        yield server
        ids = {"request_ids": [f"cmpl-n{n}" for n in range(3)]}
        httpx2.post(f"{server.url}/abort_requests", json=ids, headers=headers)
        assert all(one.result().status_code == 200 for one in running)
        time.sleep(0.1)  # for the step that runs


def sample_of(stats: EngineStats | None, at: float) -> Sample:
    """Through the very text that a server sends."""
    probe = ServerProbe("http://x", None)
    probe._get = lambda path: (200, Metrics("tiny").render(stats, 0, with_vllm_names=True))
    return Sample(at, probe.sample().values)


def text_of(moment: Moment, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(draw(moment))
    return console.file.getvalue()


def value_after(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if f"│ {name}  " in line)
    return line.split(f"│ {name}  ")[1].split("│")[0].strip()


def test_one_look_at_a_server(busy, capsys, monkeypatch):
    monkeypatch.setenv("JAXLLM_API_KEY", "k,other")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", f"{busy.url}/v1", "--once", "--interval", "0.3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"jaxllm top  fake-model  {busy.url}")
    assert (value_after(text, "running"), value_after(text, "waiting")) == ("2", "1")
    assert float(value_after(text, "tokens/s out")) > 10
    assert re.search("[MG]iB$", value_after(text, "server process"))
    assert value_after(text, "step") == "-", "a fake engine has no steps"
    assert "unfinished requests, oldest first" in text and "cmpl-n2-0" in text
    assert max(map(len, text.splitlines())) <= 80


def test_rates_are_of_the_time_between_two_looks():
    before = EngineStats(num_generated_tokens=100, num_steps=10, step_seconds=1.0, prefix_cache_queries=100)
    now = EngineStats(
        num_running=5,
        num_swapped=2,
        num_generated_tokens=300,
        num_steps=30,
        step_seconds=1.25,
        num_step_tokens=300,
        num_padded_tokens=400,
        prefix_cache_queries=300,
        prefix_cache_hits=50,
        kv_cache_usage=0.95,
        host_cache_usage=0.5,
        num_preemptions=4,
        num_compiles_since_ready=1,
        bytes_swapped_out=3 << 20,
        resident_bytes=700 << 20,
        device_bytes_in_use={"gpu:0": 60 << 30, "gpu:1": 61 << 30},
        device_bytes_limit={"gpu:0": 70 << 30, "gpu:1": 70 << 30},
    )
    moment = Moment("http://x", sample_of(before, 100.0), sample_of(now, 102.0), None)
    text = text_of(moment)
    expected = {
        "running": "5",
        "swapped": "2",
        "preemptions": "4 (2.0/s)",
        "compiles since ready": "1",
        "tokens/s out": "100.0",
        "steps/s": "10.0",
        "step": "12.50 ms",
        "tokens a step": "15.0",
        "padding": "25.0 %",
        "device": "██████████  95.0 %",
        "host": "█████░░░░░  50.0 %",
        "prefix hits": "25.0 %",
        "hits since ready": "16.7 %",
        "swapped out": "1.5 MiB/s",
        "engine process": "700.0 MiB",
        "gpu:0": "60.0 GiB of 70.0 GiB",
        "gpu:1": "61.0 GiB of 70.0 GiB",
    }
    assert {name: value_after(text, name) for name in expected} == expected
    assert "unfinished" not in text
    restarted = Moment("http://x", moment.now, sample_of(before, 103.0), [], trouble="no server answers")
    text = text_of(restarted, width=160)
    assert value_after(text, "tokens/s out") == "-", "less than before is another server"
    assert "no server answers" in text.splitlines()[0]


def test_a_server_that_loads_its_model():
    with fake_server(FakeAsyncLLM(is_loaded=False)) as server:
        probe = ServerProbe(server.url, None)
        text = text_of(Moment(server.url, probe.sample(), probe.sample(), probe.requests()))
    assert "The engine does not answer: it is loading the model" in text
    assert value_after(text, "running") == value_after(text, "tokens/s out") == "-"


def test_only_the_oldest_requests_are_listed():
    sample = sample_of(EngineStats(num_running=30), 1.0)
    requests = [{"request_id": "r" * 20 + f"{n:020d}", "age": float(n), "block_ids": [1] * n} for n in range(30)]
    text = text_of(Moment("http://x", sample, sample, requests))
    assert "the 10 oldest of 30" in text
    lines = [line for line in text.splitlines() if "rrr…" in line]
    assert [line.split()[-3] for line in lines] == [f"{n}.0" for n in range(29, 19, -1)]
    assert all("r" * 12 + "…0000000000" in line and len(line) == 80 for line in lines)


class OtherServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if "other" in self.path else 404)
        self.end_headers()
        self.wfile.write(b"go_goroutines 7\n")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def other():
    with http.server.HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def error_of(capsys, *arguments):
    code = main(["top", *arguments, "--once"])
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return code, output.err


def test_what_cannot_be_watched(busy, other, capsys, monkeypatch):
    monkeypatch.delenv("JAXLLM_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "400")
    code, error = error_of(capsys, "http://127.0.0.1:9")
    assert code == 1 and "no server answers at http://127.0.0.1:9: " in error and "refused" in error
    code, error = error_of(capsys, busy.url)
    assert code == 2 and "wants a key: give one of the server's as --api-key, or in JAXLLM_API_KEY" in error
    code, error = error_of(capsys, busy.url, "--api-key", "wrong")
    assert code == 2 and "refuses this key" in error and "wrong" not in error
    code, error = error_of(capsys, other)
    assert code == 2 and "is no server of jaxllm: its /metrics answers 404" in error
    code, error = error_of(capsys, f"{other}/other")
    assert code == 2 and "has nothing that begins with jaxllm:" in error
    code, error = error_of(capsys, "localhost:8000")
    assert code == 2 and "write http://HOST:PORT" in error
    code, error = error_of(capsys, busy.url, "--interval", "0")
    assert code == 2 and "interval=0.0" in error
    assert main(["top", busy.url]) == 2
    assert "--once" in capsys.readouterr().err


def test_it_refreshes_until_ctrl_c(busy):
    ours, theirs = pty.openpty()
    program = "import sys; from jaxllm.serving.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "top", busy.url, "--api-key", "k", "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True)
    os.close(theirs)
    shown = b""
    while shown.count(b"jaxllm top") < 3:
        shown += os.read(ours, 1 << 16)
    process.send_signal(signal.SIGINT)
    drain = threading.Thread(target=read_rest, args=(ours,))
    drain.start()
    _, errors = process.communicate(timeout=20)
    drain.join()
    assert (process.returncode, errors) == (0, b"")
    os.close(ours)


def read_rest(descriptor):
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:  # how Linux says that the other end of a terminal is closed
        pass
