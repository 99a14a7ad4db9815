"""The server's process: loads the model while it answers already, and ends in order.

The invariants: the first SIGTERM or SIGINT lets running requests finish within `shutdown_timeout` while new ones get
503, and then aborts them; the second ends at once. When the engine dies, /health says so for `DEAD_SECONDS`, and then
the process fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Iterator

import uvicorn

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.serving.api_admin import abort
from jaxllm.serving.app import create_app
from jaxllm.serving.http_protocol import HttpProtocol
from jaxllm.serving.listening import allow_connections, check_free, listen
from jaxllm.serving.server_settings import ServerSettings
from jaxllm.serving.service import Service

logger = logging.getLogger(__name__)

DEAD_SECONDS = 10.0
"""For load balancers to see that the engine is dead."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than proxies keep theirs: one that we close while a request comes is an error of the proxy."""
_CLOSING_SECONDS = 5.0
"""For the last events to reach their clients."""


class Server(uvicorn.Server):
    """uvicorn's, with our own way to end."""

    def __init__(self, service: Service) -> None:
        super().__init__(_uvicorn_config(service))
        self._service = service
        self._failure: BaseException | None = None
        self._ending: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[bool]] = set()

    async def run_until_end(self) -> None:
        """Serves until a signal.

        Raises:
            ValueError: the model cannot be loaded.
            EngineDeadError: the engine died.
            OSError: the address cannot be listened on.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._end)
        sockets = self._listen()
        engine = asyncio.create_task(self._run_engine())
        try:
            await self.serve(sockets)
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            await self._service.engine.shutdown(0)
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours are set."""
        yield

    def _listen(self) -> list[socket.socket] | None:
        """Before the model is loaded: an address that is taken is said at once. A Unix socket is uvicorn's to make."""
        if self.config.uds:
            check_free(self.config.uds)
            return None
        host, port = self.config.host, self.config.port
        listener = listen(host, port)
        scheme = "https" if self._service.settings.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        logger.info("listening on %s://%s:%d", scheme, shown, listener.getsockname()[1])
        return [listener]

    async def _run_engine(self) -> None:
        engine = self._service.engine
        try:
            await engine.start()
        except Exception as error:  # noqa: BLE001 - raised again where the server ends
            self._failure = error
            self.should_exit = True
            return
        self._service.metrics.show_config(engine.config)
        allow_connections((engine.config.max_num_seqs or 0) + self._service.settings.max_waiting_requests)
        gc.collect()
        gc.freeze()  # What there is now stays: looking through it again would only delay streams.
        logger.info("%s is ready", self._service.model_name)
        error = await engine.wait_dead()
        if self._service.admission.is_draining:
            return
        logger.error("the engine cannot go on: %s; the server ends in %.0f s", error, DEAD_SECONDS)
        self._failure = error
        await asyncio.sleep(DEAD_SECONDS)
        self.should_exit = True

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._drain())
        else:
            logger.warning("the second signal: ending at once")
            self._abort_all()
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        admission, seconds = self._service.admission, self._service.settings.shutdown_timeout
        admission.is_draining = True
        logger.info("shutting down: %d running requests have %.0f s to finish", len(admission), seconds)
        if not await _is_empty_within(admission.wait_empty(), seconds):
            logger.warning("aborting %d requests that are still running", len(admission))
            self._abort_all()
            await _is_empty_within(admission.wait_empty(), _CLOSING_SECONDS)
        self.should_exit = True

    def _abort_all(self) -> None:
        for request_id in self._service.admission.request_ids:
            task = asyncio.create_task(abort(self._service, request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


async def _is_empty_within(waiting: Awaitable[None], seconds: float) -> bool:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return False
    return True


def make_server(engine: AsyncLLM, model: str, settings: ServerSettings) -> Server:
    """A server of an engine that is not started yet; see `Service`."""
    return Server(Service(engine, model, settings))


def _uvicorn_config(service: Service) -> uvicorn.Config:
    settings = service.settings
    return uvicorn.Config(
        create_app(service),
        http=HttpProtocol,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        root_path=settings.root_path,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=round(_CLOSING_SECONDS),
    )
