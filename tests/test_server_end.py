"""How the server ends, over a fake engine in a process of its own: signals, and an engine that dies."""

import concurrent.futures
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from server_process import events

TESTS = Path(__file__).parent
PROGRAM = """
import asyncio, json, logging, sys
sys.path.insert(0, sys.argv[1])
from fake_async_llm import FakeAsyncLLM
from jaxllm.serving import server
from jaxllm.serving.server_settings import ServerSettings

async def main():
    engine = FakeAsyncLLM(step_seconds=0.01, max_model_len=1000, is_loaded=False)
    if "dies" in sys.argv:
        server.DEAD_SECONDS = 1.0
        asyncio.get_running_loop().call_later(1.5, engine.die)
    made = server.make_server(engine, "fake", ServerSettings(**json.loads(sys.argv[2])))
    await made.run_until_end()

logging.basicConfig(level="INFO")
asyncio.run(main())
"""
LONG = {"prompt": "Hello", "max_tokens": 150}
"""A second and a half."""


class EndingServer:
    """The program above; its log is read as far as it has to be."""

    def __init__(self, *arguments, wait_for="fake is ready", **settings):
        command = [sys.executable, "-c", PROGRAM, str(TESTS), json.dumps({"port": 0} | settings), *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        if "uds" not in settings:
            self.url = self._read_until("listening on ").split()[-1]
        self._read_until(wait_for)

    def _read_until(self, text):
        for line in self.process.stderr:
            if text in line:
                return line
        raise AssertionError(f"it ended with {self.process.wait()}")

    def complete(self, **body):
        return httpx2.post(f"{self.url}/v1/completions", json=LONG | body, timeout=30)

    def wait_for_load(self, number):
        while httpx2.get(f"{self.url}/load").json()["server_load"] != number:
            time.sleep(0.01)

    def end(self):
        code = self.process.wait(10)
        log = self.process.stderr.read()
        self.process.stderr.close()
        return code, log


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish(pool, number):
    server = EndingServer()
    running = [pool.submit(server.complete, stream=stream) for stream in (False, True)]
    server.wait_for_load(2)
    server.process.send_signal(number)
    while (health := httpx2.get(f"{server.url}/health")).status_code == 200:
        time.sleep(0.01)
    refused = server.complete()
    assert (health.status_code, refused.status_code, refused.headers["retry-after"]) == (503, 503, "1")
    whole, streamed = (one.result() for one in running)
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    assert events(streamed)[-1]["choices"][0]["finish_reason"] == "length"
    code, log = server.end()
    assert code == 0
    assert "Traceback" not in log


def test_what_takes_too_long_is_aborted(pool):
    server = EndingServer(shutdown_timeout=0.2)
    running = [pool.submit(server.complete, max_tokens=900, stream=stream) for stream in (False, True)]
    server.wait_for_load(2)
    server.process.send_signal(signal.SIGTERM)
    whole, streamed = (one.result() for one in running)
    assert whole.json()["choices"][0]["finish_reason"] == "abort"
    assert events(streamed)[-1]["choices"][0]["finish_reason"] == "abort"
    assert server.end()[0] == 0


def test_the_second_signal_ends_at_once(pool):
    server = EndingServer(shutdown_timeout=60)
    running = pool.submit(server.complete, max_tokens=900)
    server.wait_for_load(1)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    server.process.send_signal(signal.SIGTERM)
    assert running.result().json()["choices"][0]["finish_reason"] == "abort"
    assert server.end()[0] == 0
    assert time.monotonic() - started < 5


def test_a_dead_engine_is_told_for_a_while_and_fails_the_process():
    server = EndingServer("dies")
    while (health := httpx2.get(f"{server.url}/health")).status_code == 200:
        time.sleep(0.02)
    died = time.monotonic()
    assert "was killed" in health.json()["error"]["message"]
    code, log = server.end()
    assert (code, 0.8 < time.monotonic() - died < 4) == (1, True)
    assert "EngineDeadError: its process was killed" in log


def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "socket")
    server = EndingServer(uds=path)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=path)) as client:
        assert client.get("http://local/health").status_code == 200
    server.process.terminate()
    assert server.end()[0] == 0
