"""`jaxllm convert`: writes a model to a folder in Orbax's format.

The invariant: standard output holds the folder's path only.
"""

from __future__ import annotations

from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.models.conversion import convert
from jaxllm.serving.cli_small_commands import Convert


def run(command: Convert) -> None:
    config = EngineConfig(
        command.model,
        dtype=command.dtype,
        load_format=command.load_format,
        seed=command.seed,
        device=command.device,
        tensor_parallel_size=command.tensor_parallel_size,
    )
    folder = Path(command.output).expanduser()
    convert(config, folder)
    print(folder)
