"""What a trace does not say and its reading needs: the model, the programs, the device. Files beside the trace.

Invariants: with them, a session can be read by another process, on another machine, and later. Whoever records writes
down what it knows and works nothing out: it has requests to serve.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxllm.profiling.hlo import Operations, read_operations
from jaxllm.profiling.work import Sizes

FACTS_FILE = "session.json"
TEXT_SUFFIX = ".hlo.txt"
"""Of the file with a program's text; before it stands the program's name."""


@dataclass(frozen=True)
class SessionFacts:
    """One session's."""

    described: Mapping[str, str | int]
    """What ran, and on what, for a person."""
    device_kind: str
    sizes: Sizes
    programs: Mapping[str, str]
    """What the trace calls the program of each bucket."""
    texts: Mapping[str, str]
    """Each of these programs, as XLA prints it."""
    num_unread: int = 0
    """Calls that were launched before the session and read within it."""
    unprofiled_step_ms: float | None = None

    @cached_property
    def operations(self) -> Mapping[str, Operations]:
        """Of each of these programs."""
        return {program: read_operations(text) for program, text in self.texts.items()}

    def write(self, folder: Path) -> None:
        for program, text in self.texts.items():
            (folder / f"{program}{TEXT_SUFFIX}").write_text(text, encoding="utf-8")
        facts = dataclasses.asdict(dataclasses.replace(self, texts={}))
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> SessionFacts:
        """What `write` wrote.

        Raises:
            ValueError: the folder is not one of ours.
        """
        path = folder / FACTS_FILE
        if not path.is_file():
            raise ValueError(f"{folder} has no {FACTS_FILE}: name the folder of a session that jaxllm recorded")
        found = json.loads(path.read_text(encoding="utf-8"))
        found["sizes"] = Sizes(**found["sizes"])
        found["texts"] = {
            path.name.removesuffix(TEXT_SUFFIX): path.read_text(encoding="utf-8")
            for path in folder.glob(f"*{TEXT_SUFFIX}")
        }
        return cls(**found)
