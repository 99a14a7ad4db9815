"""A session's folder, read: the summary beside the trace, as JSON, as text and as a page.

Invariant: it needs nothing but the folder, so that a server has it made by another process.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from jaxllm.profiling.session_facts import SessionFacts
from jaxllm.profiling.summarize import Session, summarize
from jaxllm.profiling.summary import Summary
from jaxllm.profiling.tables import Table, make_tables, to_text
from jaxllm.profiling.timeline import make_page
from jaxllm.profiling.trace import read_trace

SUMMARY_FILE, TEXT_FILE, TIMELINE_FILE = "summary.json", "summary.txt", "timeline.html"
PERFETTO_FILE = "perfetto_trace.json.gz"
"""As JAX names it."""


@dataclass(frozen=True)
class Profile:
    """What one session left: files in `folder`, and what they say. Its text is the tables."""

    folder: Path
    summary: Summary

    @property
    def tables(self) -> list[Table]:
        return make_tables(self.summary)

    @property
    def timeline(self) -> Path:
        """A page for a browser, which needs no other file and no network."""
        return self.folder / TIMELINE_FILE

    def __str__(self) -> str:
        return to_text(self.tables)


@dataclass
class Recording:
    """What `with llm.profile(...)` gives."""

    profile: Profile | None = None
    """There from the end of the statement on."""


def write_report(folder: Path) -> Profile:
    """Reads the session that jaxllm recorded in `folder`, and writes what it says beside it.

    Raises:
        ValueError: there is no session, or no step in it.
        OSError: the folder cannot be written to.
    """
    session = Session.of(read_trace(folder), SessionFacts.read(folder))
    profile = Profile(folder, summarize(session))
    written = json.dumps(profile.summary.to_dict(), indent=1, allow_nan=False)
    (folder / SUMMARY_FILE).write_text(written + "\n", encoding="utf-8")
    (folder / TEXT_FILE).write_text(str(profile), encoding="utf-8")
    profile.timeline.write_text(make_page(session, profile.tables), encoding="utf-8")
    for trace in folder.glob("*.trace.json.gz"):
        _write_for_perfetto(trace, folder / PERFETTO_FILE)
    return profile


def _write_for_perfetto(trace: Path, written: Path) -> None:
    """Perfetto may refuse the metadata that XLA writes at the beginning."""
    content = json.loads(gzip.decompress(trace.read_bytes()))
    content.pop("metadata", None)
    written.write_bytes(gzip.compress(json.dumps(content).encode(), compresslevel=5))
