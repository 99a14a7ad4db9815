"""`jaxllm profile`: records decode steps, shows where their time goes, and says where the recording lies.

The invariant: with `--json -`, standard output holds the JSON only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxllm.bench.profile import profile_decode, to_report
from jaxllm.llm import LLM
from jaxllm.profiling import tables
from jaxllm.serving.cli_commands import Profile
from jaxllm.serving.cli_flags import get_fields
from jaxllm.serving.cli_output import check_writable

STANDARD_OUTPUT = "-"
_WIDTH_OF_FILES = 200
"""In characters, where nothing says how wide a line may be."""


def run(command: Profile) -> None:
    settings = command.recording.make_settings()
    if command.json not in (None, STANDARD_OUTPUT):
        check_writable(command.json, "json")
    fields = get_fields(command.engine.make_config())
    with LLM(**fields) as llm:
        profile = profile_decode(llm.engine, settings)
        report = to_report(profile, llm.engine, settings)
    console = Console(stderr=command.json == STANDARD_OUTPUT, highlight=False)
    _show(profile.tables, console)
    console.print(f"timeline: {profile.timeline}", soft_wrap=True)
    console.print(f"trace, for Perfetto and XProf: {profile.folder}", soft_wrap=True)
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    if command.json == STANDARD_OUTPUT:
        print(text, end="")
    elif command.json is not None:
        path = Path(command.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _show(shown: Iterable[tables.Table], console: Console) -> None:
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    for one in shown:
        table = Table(
            title=one.title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False
        )
        for index, name in enumerate(one.columns):
            table.add_column(name, justify="left" if one.is_text(index) else "right", overflow="fold")
        for row in one.rows:
            table.add_row(*map(Text, row))
        console.print(table)
