"""From any model to a folder in Orbax's format (`jaxllm convert`).

Invariant: the folder is a model only once all of it is written.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax.numpy as jnp

from jaxllm.config import EngineConfig
from jaxllm.memory import show_bytes
from jaxllm.models.expansion import stored_specs
from jaxllm.models.layers import Setting
from jaxllm.models.orbax_checkpoint import write_params
from jaxllm.models.orbax_folder import PARAMS, check_free, write_facts
from jaxllm.models.parameters import define_model
from jaxllm.models.source import open_source
from jaxllm.parallel.mesh import make_mesh, prepare_devices
from jaxllm.parallel.partition import split_over


def convert(config: EngineConfig, folder: Path) -> None:
    """Writes the model `config` names to a new folder, from which `LLM` then restores it.

    The whole model lies on the devices meanwhile: `tensor_parallel_size` of them share it.

    Args:
        config: dtype="auto" is the checkpoint's own type.

    Raises:
        ValueError: the model is not usable, or the folder is in use.
        OSError: there is no room for it, or it cannot be written.
    """
    check_free(folder)
    prepare_devices(config)
    with open_source(config) as source:
        model, mesh = source.config, make_mesh(config)
        dtype = model.dtype if config.dtype == "auto" else config.dtype
        definition = define_model(split_over(model, mesh.size), Setting(jnp.dtype(dtype), mesh, "xla"))
        specs = stored_specs(definition.specs, model)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _check_room(folder, sum(spec.size * spec.dtype.itemsize for spec in specs.values()))
            write_params(folder / PARAMS, source.load(specs))
            write_facts(folder, dataclasses.replace(model, dtype=dtype), source.tokenizer_path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # it was empty; half a model would be in the way of the next try
            raise


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(
            f"{folder} has no room for the model: it takes {show_bytes(num_bytes)}, and {show_bytes(free)} are free"
        )
