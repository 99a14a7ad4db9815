"""What a trace does not say and its reading needs: the model, the programs, the device. A file beside the trace.

Invariant: with it, a session can be read by another process, on another machine, and later.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.profiling.hlo import Operation, Operations
from jaxllm.profiling.work import Sizes

FACTS_FILE = "session.json"


@dataclass(frozen=True)
class SessionFacts:
    """One session's."""

    described: Mapping[str, str | int]
    """What ran, and on what, for a person."""
    device_kind: str
    sizes: Sizes
    programs: Mapping[str, str]
    """What the trace calls the program of each bucket."""
    operations: Mapping[str, Operations]
    """Of each of these programs."""
    num_unread: int = 0
    """Calls that were launched before the session and read within it."""
    unprofiled_step_ms: float | None = None

    def write(self, folder: Path) -> None:
        (folder / FACTS_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

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
        found["operations"] = {
            program: {name: Operation(*operation) for name, operation in operations.items()}
            for program, operations in found["operations"].items()
        }
        return cls(**found)
