"""What happens to every request, whatever its route: an id, a line in the log, and the question for a key.

The invariant: nothing here touches the parts of a body, so that a stream costs nothing more.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.serving.errors import ApiError, error_response
from jaxllm.serving.generation import ClientGone
from jaxllm.serving.metrics import Metrics
from jaxllm.serving.streaming import CLIENT_LEFT, SEND_PART

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
CLIENT_GONE = 499
OPEN_PATHS = frozenset({"/health", "/ping"})
_WATCHED_PATHS = frozenset({"/metrics", "/debug/requests"})
"""What is asked every second by somebody who watches: no news for the log."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Observed:
    """Gives every request an id, which the response tells too, and logs and counts how it ended.

    Args:
        routes: paths that are counted by their names; all others are "other".
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started = CLIENT_GONE, time.monotonic()
        asked = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        # Anything else could write lines of its own into the log.
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        scope.setdefault("state", {})[SEND_PART] = send
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            pass  # nobody is left to answer; the status says so in the log and the metrics
        except Exception as error:
            if status is not CLIENT_GONE:  # it broke off
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            self._note(scope, request_id, status, time.monotonic() - started)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        path = _route_path(scope)
        self._metrics.count_response(path if path in self._routes else "other", status)
        if status == 429:
            self._metrics.count_rejection()
        level = logging.DEBUG if path in OPEN_PATHS | _WATCHED_PATHS else logging.INFO
        if not logger.isEnabledFor(level):
            return
        state = State(scope["state"])
        counter, user = getattr(state, "counter", None), getattr(state, "user", None)
        tokens = f", {counter.num_prompt} tokens read, {counter.num_generated} written" if counter else ""
        who = f", user {user!r}" if user else ""
        who += ", the client left" if scope["state"].get(CLIENT_LEFT) else ""
        logger.log(level, "%s %s %r %d in %.3f s%s%s", request_id, scope["method"], path, status, seconds, tokens, who)


class KeyRequired:
    """Refuses requests without one of the keys, but for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or _route_path(scope) in OPEN_PATHS
        if is_open or self._is_known(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "Incorrect API key provided: send one of this server's as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = key.strip().encode()
        # All are compared, each in the same time whatever is wrong with it.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _route_path(scope: Scope) -> str:
    """The path without what a proxy put before it."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path
