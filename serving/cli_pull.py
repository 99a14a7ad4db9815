"""`jaxllm pull`: fetches a model by its short name, or lists the names.

The invariant: standard output holds the answer (a path, or the list) only.
"""

from __future__ import annotations

from jaxllm.models import hub
from jaxllm.models.registry import REGISTRY, RegistryEntry
from jaxllm.serving.cli_small_commands import Pull


def run(command: Pull) -> None:
    if command.name is not None:
        print(hub.pull(command.name))
        return
    for entry in REGISTRY.values():
        print(_describe(entry))


def _describe(entry: RegistryEntry) -> str:
    state = ", pulled" if entry.is_pulled else ""
    return f"{entry.name}  ({entry.size / 1e6:.0f} MB, {entry.license}{state})\n    {entry.description}"
