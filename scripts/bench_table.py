"""Writes the tables of measured numbers from benchmarks/*.json: all into benchmarks/README.md, the main ones into README.md.

    .venv/bin/python scripts/bench_table.py [--check]

What lies between the two markers in these files is replaced. Of a figure that was measured several times on the same
kind of machine, the newest is taken. --check writes nothing and fails if a file is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- benchmarks: begin. Written by scripts/bench_table.py from benchmarks/*.json. -->"
END = "<!-- benchmarks: end -->"
NO_MODEL = "value"
MAIN = re.compile(
    r"process start|decode step, context|one stream|time to first token|nano-vllm's benchmark, (greedy|sampled)|"
    r"prompts of|nothing shared|prefix cached|streams: (output|TTFT|ITL)|restor|all at once|decode attention, \d+ x \d+ tokens, 32|"
    r"prompt attention|sampler"
)
"""Figures for README.md."""


@dataclass(frozen=True)
class Entry:
    """A figure and the report it is from."""

    figure: dict[str, Any]
    report: dict[str, Any]

    @property
    def machine(self) -> str:
        machine = self.report["machine"]
        return f"{machine['count']} x {machine['device']}"

    @property
    def column(self) -> str:
        """The model, without the folders it may lie in, and what was chosen that makes another measurement of it."""
        if self.report["model"] is None:
            return NO_MODEL
        return ", ".join([Path(self.report["model"]).name, *_choices(self.report["parameters"]["engine"])])

    @property
    def key(self) -> tuple[str, str, str]:
        """Figures of one key are measurements of the same thing."""
        return self.machine, self.column, self.figure["name"]

    @property
    def cell(self) -> str:
        value, unit, details = self.figure["value"], self.figure["unit"], self.figure["details"]
        text = f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
        return text + (f" ({details['share']:.0%})" if "share" in details else "")

    @property
    def source(self) -> str:
        """When, with what, and how the report was made."""
        report, machine = self.report, self.report["machine"]
        versions = [f"jax {machine['jax']}"] + [f"driver {machine['driver']}"] * bool(machine["driver"])
        commit = report["commit"]
        versions += [f"commit {commit[:12]}{'-dirty' * commit.endswith('-dirty')}"] if commit else []
        return f"`{report['command']}` ({report['date'][:10]}, {', '.join(versions)})"


def _choices(engine: dict[str, Any]) -> Iterator[str]:
    if engine.get("enforce_eager"):
        yield "eager"
    if engine.get("dtype", "auto") not in ("auto", "bfloat16"):
        yield engine["dtype"]
    if engine.get("attention_backend", "auto") != "auto":
        yield f"{engine['attention_backend']} attention"
    if engine.get("disable_custom_all_reduce"):
        yield "NCCL"
    if engine.get("batch_invariant"):
        yield "batch-invariant"


def read_entries(folder: Path) -> list[Entry]:
    """Every figure below a folder, the newest last.

    Raises:
        ValueError: a figure's result was wrong, so that its time says nothing.
    """
    reports = []
    for file in sorted(folder.glob("*.json")):
        reports.append(json.loads(file.read_text(encoding="utf-8")))
        if wrong := [figure["name"] for figure in reports[-1]["figures"] if figure["details"].get("correct") is False]:
            raise ValueError(f"{file.name}: {wrong[0]} was timed with a wrong result: remove the file")
    reports.sort(key=lambda report: report["date"])
    return [Entry(figure, report) for report in reports for figure in report["figures"]]


def make_text(entries: Iterable[Entry]) -> str:
    """Markdown: a table for each machine, models side by side, and one for what needs no model."""
    newest = {entry.key: entry for entry in entries}  # a later one replaces an earlier one, and keeps its place
    machines = dict.fromkeys(entry.machine for entry in newest.values())
    return "\n".join(_section(name, [one for one in newest.values() if one.machine == name]) for name in machines)


def _section(machine: str, entries: Sequence[Entry]) -> str:
    with_model = [entry for entry in entries if entry.column != NO_MODEL]
    without = [entry for entry in entries if entry.column == NO_MODEL]
    tables = [_table(group) for group in (with_model, without) if group]
    sources = "\n".join(f"- {source}" for source in dict.fromkeys(entry.source for entry in entries))
    weights = " Weights are random where the command says `dummy`." if with_model else ""
    shares = " In brackets: the share of what the device can do." if any("(" in entry.cell for entry in without) else ""
    parts = [
        f"On {machine} ({entries[-1].report['machine']['cpu']}).{weights}{shares}",
        *tables,
        f"Measured by:\n{sources}",
    ]
    return "\n\n".join(parts) + "\n"


def _table(entries: Sequence[Entry]) -> str:
    columns = list(dict.fromkeys(entry.column for entry in entries))
    names = list(dict.fromkeys(entry.figure["name"] for entry in entries))
    cells = {(entry.figure["name"], entry.column): entry.cell for entry in entries}
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(cells.get((name, column), "") for column in columns)] for name in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace(readme: str, text: str) -> str:
    """The README with `text` between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file lacks one of the markers: put {BEGIN} and {END} where the table belongs")
    return f"{before}{BEGIN}\n{text}{END}{after}"


def make_files() -> dict[Path, str]:
    """Both files as they should be."""
    entries = read_entries(ROOT / "benchmarks")
    main = [entry for entry in entries if MAIN.search(entry.figure["name"])]
    chosen = {ROOT / "README.md": main, ROOT / "benchmarks" / "README.md": entries}
    return {file: replace(file.read_text(encoding="utf-8"), make_text(some)) for file, some in chosen.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    arguments = parser.parse_args()
    changed = {file: text for file, text in make_files().items() if file.read_text(encoding="utf-8") != text}
    for file, text in changed.items():
        if arguments.check:
            print(f"{file.relative_to(ROOT)} is not up to date: run scripts/bench_table.py", file=sys.stderr)
        else:
            file.write_text(text, encoding="utf-8")
    return len(changed) if arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
