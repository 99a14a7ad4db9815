"""What `jaxllm top` shows: a server at a moment, and how fast it was since the moment before.

The invariant: a number that the server does not tell is a dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxllm.memory import show_bytes
from jaxllm.serving.scrape import Sample

MAX_REQUESTS = 10
_PANEL_WIDTH, _PANEL_HEIGHT = 39, 10
"""In characters: two beside each other fit a terminal of 80."""
_BAR = 10
"""Characters."""
_LONGEST_ID = 25
"""Characters that are shown."""
_FULL = 0.9
"""Share of a pool from which on it is nearly full."""


@dataclass(frozen=True)
class Moment:
    """Two samples of a server, and its requests at the later one."""

    url: str
    before: Sample
    now: Sample
    requests: Sequence[Mapping[str, Any]] | None
    """None: it does not tell."""
    trouble: str | None = None
    """Why there is nothing newer."""

    def rate(self, name: str) -> float | None:
        """Growth per second of a counter."""
        grown, seconds = self.grown(name), self.now.time - self.before.time
        return None if grown is None or seconds <= 0 else grown / seconds

    def grown(self, name: str) -> float | None:
        before, now = self.before.get(name), self.now.get(name)
        # Less than before: it is another server.
        return None if before is None or now is None or now < before else now - before

    def ratio(self, over: str, under: str) -> float | None:
        """Growth of one counter by that of another."""
        upper, lower = self.grown(over), self.grown(under)
        return upper / lower if upper is not None and lower else None


def draw(moment: Moment) -> RenderableType:
    """The screen."""
    parts: list[RenderableType] = [_title(moment)]
    if moment.now.get("num_requests_running") is None:
        parts.append(Text("The engine does not answer: it is loading the model, hangs, or died.", "yellow"))
    panels = [_requests(moment), _speed(moment), _pools(moment), _memory(moment)]
    parts.append(Columns(panels))
    if moment.requests:
        parts.append(_oldest(moment.requests))
    return Group(*parts)


def _title(moment: Moment) -> Text:
    title = Text.assemble(("jaxllm top  ", "bold cyan"), (moment.now.model_name, "bold"), f"  {moment.url}")
    if moment.trouble:
        title.append(f"  {moment.trouble}", "bold red")
    return title


def _requests(moment: Moment) -> Panel:
    now = moment.now
    compiles = now.get("compiles_since_ready_total")
    return _panel(
        "requests",
        {
            "running": _count(now.get("num_requests_running")),
            "waiting": _count(now.get("num_requests_waiting")),
            "swapped": _count(now.get("num_requests_swapped")),
            "finished": _with_rate(now.get("request_success_total") or 0.0, moment.rate("request_success_total")),
            "preemptions": _with_rate(now.get("num_preemptions_total"), moment.rate("num_preemptions_total")),
            "refused (429)": _count(now.get("admission_rejections_total")),
            "compiles since ready": Text(_count(compiles), "bold red" if compiles else ""),
        },
    )


def _speed(moment: Moment) -> Panel:
    padded, asked = moment.grown("padded_step_tokens_total"), moment.grown("step_tokens_total")
    return _panel(
        "speed",
        {
            "tokens/s in": _number(moment.rate("prompt_tokens_total")),
            "tokens/s out": _number(moment.rate("generation_tokens_total")),
            "steps/s": _number(moment.rate("engine_steps_total")),
            "step": _milliseconds(moment.ratio("engine_step_seconds_total", "engine_steps_total")),
            "tokens a step": _number(moment.ratio("step_tokens_total", "engine_steps_total")),
            "padding": _percent(1 - asked / padded if asked is not None and padded else None),
            "between tokens": _milliseconds(
                moment.ratio("inter_token_latency_seconds_sum", "inter_token_latency_seconds_count")
            ),
            "to first token": _milliseconds(
                moment.ratio("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count")
            ),
        },
    )


def _pools(moment: Moment) -> Panel:
    now = moment.now
    queries, hits = now.get("prefix_cache_queries_total"), now.get("prefix_cache_hits_total")
    return _panel(
        "K/V pools",
        {
            "device": _bar(now.get("kv_cache_usage_perc")),
            "host": _bar(now.get("cpu_cache_usage_perc")),
            "prefix hits": _percent(moment.ratio("prefix_cache_hits_total", "prefix_cache_queries_total")),
            "hits since ready": _percent(hits / queries if hits is not None and queries else None),
            "swapped out": f"{_bytes(moment.rate('swapped_out_bytes_total'))}/s",
            "swapped in": f"{_bytes(moment.rate('swapped_in_bytes_total'))}/s",
        },
    )


def _memory(moment: Moment) -> Panel:
    now = moment.now
    rows: dict[str, RenderableType] = {
        f"{process} process": _bytes(value)
        for process, value in sorted(now.by_label("process_resident_memory_bytes", "process").items())
    }
    limits = now.by_label("device_memory_limit_bytes", "device")
    for device, used in now.by_label("device_memory_used_bytes", "device").items():
        rows[device] = f"{_bytes(used)} of {_bytes(limits.get(device))}"
    return _panel("memory", rows)


def _oldest(requests: Sequence[Mapping[str, Any]]) -> Panel:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in ("request", "state", "tokens", "computed", "blocks", "preempted", "age"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right", no_wrap=True)
    ordered = sorted(requests, key=lambda one: -one.get("age", 0.0))
    for one in ordered[:MAX_REQUESTS]:
        table.add_row(
            _shorten(str(one["request_id"])),
            str(one.get("status", "-")),
            _count(one.get("num_tokens")),
            _count(one.get("num_computed")),
            str(len(one.get("block_ids", ()))),
            _count(one.get("num_preemptions")),
            f"{one.get('age', 0.0):.1f} s",
        )
    shown = f"the {MAX_REQUESTS} oldest of {len(requests)}" if len(requests) > MAX_REQUESTS else "oldest first"
    return Panel(table, title=f"unfinished requests, {shown}", title_align="left", border_style="dim")


def _shorten(request_id: str) -> str:
    """The beginning tells the API, the end which of them it is."""
    return request_id if len(request_id) <= _LONGEST_ID else f"{request_id[:12]}…{request_id[12 - _LONGEST_ID :]}"


def _panel(title: str, rows: Mapping[str, RenderableType]) -> Panel:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in rows.items():
        table.add_row(name, value)
    return Panel(table, title=title, title_align="left", border_style="dim", width=_PANEL_WIDTH, height=_PANEL_HEIGHT)


def _bar(share: float | None) -> RenderableType:
    if share is None:
        return "-"
    filled = round(_BAR * min(share, 1.0))
    style = "red" if share >= _FULL else "green"
    return Text.assemble(("█" * filled, style), ("░" * (_BAR - filled), "dim"), f" {_percent(share):>7}")


def _with_rate(total: float | None, rate: float | None) -> str:
    return _count(total) if rate is None else f"{_count(total)} ({rate:.1f}/s)"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _bytes(value: float | None) -> str:
    return "-" if value is None else show_bytes(round(value))
