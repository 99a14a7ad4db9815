"""Where the server listens, and how many connections it may hold.

The invariant: an address that another server listens on is an error at once; it is never taken away from it.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65536
"""Each connection is one. The usual limit, 1024, is less than clients that may wait."""


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError: the address is taken, or is none of this machine."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def check_free(path: str) -> None:
    """Raises OSError if a server listens on this Unix socket. A file that one left behind may be replaced."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(path)
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, "another server listens on this socket", path)


def allow_connections(number: int) -> None:
    """As many as the system lets this process have; a warning if those are fewer than `number`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, MAX_OPEN_FILES, number)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < number:
        logger.warning(
            "only %d files can be open, connections included, but %d requests may be answered or wait: clients beyond "
            "are cut off instead of being told; raise the limit (ulimit -n), or lower max_waiting_requests",
            most,
            number,
        )
