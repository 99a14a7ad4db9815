"""A session as a page: what the host and the device did, side by side, and the tables below.

Invariant: the page is one file, which loads nothing. A session that is too long for a browser is cut at its end, and
the page says so.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.profiling.attribution import Attributed
from jaxllm.profiling.host_time import in_flight
from jaxllm.profiling.host_work import HOST_WORK, STEP
from jaxllm.profiling.spans import intersect, subtract, union
from jaxllm.profiling.stages import without_layer
from jaxllm.profiling.summarize import SHORTEST_GAP_NS, Session
from jaxllm.profiling.tables import Table
from jaxllm.profiling.trace import HostEvent

MAX_EVENTS = 60_000
IDLE = "idle"
_TEMPLATE = Path(__file__).with_name("timeline.html")
_US = 1e3
"""Nanoseconds."""


def make_page(session: Session, tables: Sequence[Table]) -> str:
    """The page's HTML."""
    title = (
        f"{session.facts.described.get('model', 'jaxllm')}: {sum(call.load.steps for call in session.calls):.0f} steps"
    )
    lanes = _Lanes(session).make()
    # A "</script>" in a name would end the script that holds it.
    data = json.dumps(lanes, separators=(",", ":")).replace("</", "<\\/")
    page = _TEMPLATE.read_text(encoding="utf-8")
    filled = {"TITLE": html.escape(title), "TABLES": "\n".join(map(_table, tables)), "DATA": data}
    for name, text in filled.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


class _Lanes:
    """The lanes of a page. An event is [start, duration, name, kind, detail]: microseconds, and numbers of texts."""

    def __init__(self, session: Session):
        self._session = session
        self._texts: dict[str, int] = {}
        starts = [one.event.start for one in session.events] + [event.start for event in session.trace.host]
        self._begin = min(starts)
        ordered = sorted(starts)
        self._end = ordered[MAX_EVENTS] if len(ordered) > MAX_EVENTS else float("inf")

    def make(self) -> dict[str, Any]:
        """As the page's script reads it."""
        host, session = self._session.trace.host, self._session
        owners = {id(one.event): one for one in session.events}
        lanes = [
            self._lane("host: steps", self._of_host(event for event in host if event.name == STEP)),
            self._lane("host: work", self._of_host(event for event in host if event.name in HOST_WORK)),
            self._lane("device: idle", self._idle()),
        ]
        for lane in session.trace.lanes:
            owned = [owners[id(event)] for event in lane.events if id(event) in owners]
            if owned:
                lanes.append(self._lane(f"device: {lane.name}", self._of_device(owned)))
        shown = sum(len(lane["events"]) for lane in lanes)
        cut = "" if self._end == float("inf") else f"The session is cut: these are its first {shown} events."
        return {"lanes": lanes, "texts": list(self._texts), "note": cut}

    def _lane(self, name: str, events: Iterable[list[float]]) -> dict[str, Any]:
        last = (self._end - self._begin) / _US
        return {"name": name, "events": [event for event in events if event[0] < last]}

    def _of_host(self, events: Iterable[HostEvent]) -> Iterable[list[float]]:
        for event in events:
            facts = ", ".join(f"{name} {value}" for name, value in event.facts.items() if not name.startswith("_"))
            yield self._event(event[:2], event.name, event.name, facts)

    def _of_device(self, events: Iterable[Attributed]) -> Iterable[list[float]]:
        for one in events:
            event = one.event
            detail = "\n".join(filter(None, (one.stage, event.operation, one.program)))
            yield self._event(event[:2], event.name, without_layer(one.stage), detail)

    def _idle(self) -> Iterable[list[float]]:
        busy = union(one.event[:2] for one in self._session.events)
        active = intersect(in_flight(self._session.calls, busy[-1][1]), [(busy[0][0], busy[-1][1])])
        for gap in subtract(active, busy):
            if gap[1] - gap[0] > SHORTEST_GAP_NS:
                yield self._event(gap, IDLE, IDLE, "a step was in flight, and nothing ran")

    def _event(self, span: Sequence[float], name: str, kind: str, detail: str) -> list[float]:
        start, end = span
        times = (start - self._begin) / _US, (end - start) / _US
        return [*(round(time, 3) for time in times), *map(self._text, (name, kind, detail))]

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))


def _table(table: Table) -> str:
    head = "".join(_cell("th", table, index, name) for index, name in enumerate(table.columns))
    rows = (
        "<tr>" + "".join(_cell("td", table, index, cell) for index, cell in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    body = "".join(itertools.chain(rows))
    return (
        f"<section><h2>{html.escape(table.title)}</h2><div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _cell(tag: str, table: Table, index: int, text: str) -> str:
    kind = "" if table.is_text(index) else " class=number"
    indent = "&emsp;" if text.startswith("  ") else ""
    return f"<{tag}{kind}>{indent}{html.escape(text.strip())}</{tag}>"
