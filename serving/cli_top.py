"""`jaxllm top`: a server's load, live in a terminal, or one look at it.

The invariant: a server that cannot be watched from the start is an error; one that goes away later is said on the
screen, which goes on when it is back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time

from rich.console import Console
from rich.live import Live

from jaxllm.serving.cli_small_commands import Top
from jaxllm.serving.scrape import Sample, ServerProbe
from jaxllm.serving.server_settings import KEYS_VARIABLE
from jaxllm.serving.top_screen import Moment, draw


def run(command: Top) -> None:
    if not command.interval > 0:
        raise ValueError(f"interval={command.interval} is no time to wait: use seconds above 0")
    if not command.once and not sys.stdout.isatty():
        raise ValueError("standard output is no terminal: --once prints one look at the server")
    probe = ServerProbe(command.url, command.api_key or os.environ.get(KEYS_VARIABLE, "").partition(",")[0] or None)
    first = probe.sample()
    time.sleep(command.interval)
    moment = _look(probe, first)
    console = Console(highlight=False)
    if command.once:
        console.print(draw(moment))
        return
    screen = Live(draw(moment), console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), screen as live:
        while True:
            time.sleep(command.interval)
            moment = _look_again(probe, moment)
            live.update(draw(moment), refresh=True)


def _look(probe: ServerProbe, before: Sample) -> Moment:
    return Moment(probe.url, before, probe.sample(), probe.requests())


def _look_again(probe: ServerProbe, last: Moment) -> Moment:
    try:
        return _look(probe, last.now)
    except (OSError, ValueError) as error:
        return dataclasses.replace(last, trouble=str(error))
