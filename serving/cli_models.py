"""`jaxllm models`: which families are supported, which models have a short name, and which shapes are built in.

The invariant: the tables are made from what the loader and `jaxllm pull` themselves use.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxllm.models.families import supported
from jaxllm.models.registry import REGISTRY
from jaxllm.models.shapes import SHAPES
from jaxllm.serving.cli_small_commands import Models

_WIDTH_OF_FILES = 200
"""In characters, where nothing says how wide a line may be: rows stay whole for other programs."""

_GAP, _LEAST_WIDTH = 3, 20
"""Between two columns, and of the last one while the others are whole."""


def run(command: Models) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(_make_table(("family", "Hugging Face architecture", "GGUF", "verified"), supported(), console.width))
    console.print()
    short_names = [
        (entry.name, f"{entry.size / 1e6:.0f} MB", entry.license, "yes" if entry.is_pulled else "no", entry.description)
        for entry in REGISTRY.values()
    ]
    console.print(_make_table(("short name", "size", "licence", "pulled", "what it is"), short_names, console.width))
    console.print()
    shapes = [(name, str(fields["num_hidden_layers"]), str(fields["hidden_size"])) for name, fields in SHAPES.items()]
    console.print(_make_table(("shape for load_format=dummy", "layers", "hidden size"), shapes, console.width))


def _make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """A table with nothing cut: what the last column explains gives way first, then names are folded too."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False, show_edge=False)
    *names, _ = zip(columns, *rows, strict=True)
    width_of_names = sum(max(map(len, column)) + _GAP for column in names)
    for column in columns:
        is_whole = column != columns[-1] and width_of_names + _LEAST_WIDTH <= width
        table.add_column(column, overflow="fold", no_wrap=is_whole)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
