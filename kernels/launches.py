"""How attention kernels are run on a GPU: the tuning table in `launches.json`, made by `scripts/tune_kernels`.

The size of a split and of a tile of the context decide the order of sums, hence the bits of a result; they
depend on the GPU and the model's shape alone, never on a step's rows.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

TABLE = Path(__file__).with_name("launches.json")
type Kernel = Literal["decode", "chunks", "invariant_decode", "invariant_chunks"]
"""Those of the second pair sum in the same order: their splits and tiles of the context are equal."""


class Launch(NamedTuple):
    """What tuning chooses."""

    split: int
    """Tokens of context that are summed up on their own; a multiple of `context_tile`."""
    context_tile: int
    """Tokens of context that are taken at once."""
    rows: int
    """Queries times heads of a group that a program owns; of no meaning to decoding."""
    num_warps: int
    num_stages: int


def find_launch(kernel: Kernel, device_kind: str, head_dim: int) -> Launch:
    """The entry of this GPU for the smallest head size that is not below `head_dim`.

    Args:
        kernel: which one.
        device_kind: as JAX names the device; a GPU the table does not know is treated as its first.
        head_dim: of the model.
    """
    table = _read_table()
    entries = table.get(device_kind, next(iter(table.values())))[kernel]
    fitting = [entry for entry in entries if entry["head_dim"] >= head_dim] or entries[-1:]
    return Launch(*(fitting[0][field] for field in Launch._fields))


@cache
def _read_table() -> dict:
    return json.loads(TABLE.read_text())
