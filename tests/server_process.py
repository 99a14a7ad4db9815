"""Servers for tests: one in a thread over a fake engine, and one that is a real process over a real one."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import uvicorn
from fake_async_llm import FakeAsyncLLM

from jaxllm.serving.app import create_app
from jaxllm.serving.http_protocol import HttpProtocol
from jaxllm.serving.server_settings import ServerSettings
from jaxllm.serving.service import Service

READY_SECONDS = 120


class FakeServer:
    """An application over a `FakeAsyncLLM`, in a thread with a loop of its own."""

    def __init__(self, engine: FakeAsyncLLM, settings: ServerSettings):
        self.engine = engine
        self.service: Service | None = None
        self._settings = settings
        self._thread = threading.Thread(target=self._run)
        self._loop = asyncio.new_event_loop()
        self._bound = threading.Event()

    def __enter__(self):
        self._thread.start()
        assert self._bound.wait(10)
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def call(self, function, *arguments):
        """Run in the server's loop; a coroutine is waited for."""

        async def run():
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _run(self):
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self):
        self.service = Service(self.engine, "fake-model", self._settings)
        app = create_app(self.service)
        config = uvicorn.Config(
            app, http=HttpProtocol, port=0, log_config=None, lifespan="off", ws="none", access_log=False,
            root_path=self._settings.root_path, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        await asyncio.gather(self._server._serve(None), self._tell_port())

    async def _tell_port(self):
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self._bound.set()


@contextlib.contextmanager
def fake_server(engine=None, **settings):
    with FakeServer(engine or FakeAsyncLLM(), ServerSettings(**settings)) as server:
        yield server


class ServerProcess:
    """`jaxllm serve` as a process.

    Args:
        arguments: behind `serve`.
        log: file for what it says.
    """

    def __init__(self, arguments: list[str], log: Path, **environment: str):
        command = [sys.executable, "-c", "import sys; from jaxllm.serving.cli import main; sys.exit(main())"]
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "serve", *arguments, "--port", "0"],
                stdout=file,
                stderr=file,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            )

    def __enter__(self):
        self._wait(lambda: self.address is not None)
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def address(self) -> str | None:
        found = re.search(r"listening on (\S+)", self.log)
        return found[1] if found else None

    @property
    def url(self) -> str:
        assert self.address is not None, self.log
        return self.address

    def wait_ready(self):
        self._wait(lambda: httpx2.get(f"{self.url}/health").status_code == 200)
        return self

    def engine_pid(self) -> int:
        """The process that computes: the child with the most memory."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return max(map(int, children), key=resident_bytes)

    def _wait(self, is_done):
        deadline = time.monotonic() + READY_SECONDS
        while not is_done():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.log}"
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def events(response) -> list:
    """The events of a stream; asserts that it is whole."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
