"""Which devices an engine runs on, as a mesh with named axes.

There is always a mesh, of one device too: nothing above asks whether there is more than one.
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax.sharding import Mesh

from jaxllm.config import EngineConfig

TENSOR_AXIS = "tensor"
MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""New and old name of the variable; only one may be set."""
DEFAULT_FRACTION = 0.75
HOST_LIMIT, DEFAULT_HOST_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
"""Variable for the most pinned host memory that XLA takes, and how much that is without it."""
SPARE_HOST_GIB = 8
"""For what is not swap_space."""


def prepare_devices(config: EngineConfig) -> None:
    """Tells XLA what it can be told only before JAX starts: the share of a GPU's memory to take, or to take none; and
    how much pinned host memory, where swap_space is a lot.

    A share that the user set in the environment is left alone.

    Raises:
        ValueError: JAX already runs on a GPU with another share.
    """
    on_cpu = config.device is not None and config.device.startswith("cpu")
    chosen = [name for name in MEMORY_FRACTIONS if name in os.environ]
    # JAX has no public way to ask whether it started without starting it.
    if not xla_bridge.backends_are_initialized():
        if on_cpu:
            jax.config.update("jax_platforms", "cpu")
        else:
            if not chosen:
                os.environ[MEMORY_FRACTIONS[0]] = str(config.gpu_memory_utilization)
            pinned = math.ceil((config.swap_space or 0) * config.tensor_parallel_size) + SPARE_HOST_GIB
            if pinned > DEFAULT_HOST_GIB:
                os.environ.setdefault(HOST_LIMIT, str(pinned))
    elif not on_cpu and jax.default_backend() == "gpu":
        share = float(os.environ[chosen[0]]) if chosen else DEFAULT_FRACTION
        if share != config.gpu_memory_utilization:
            raise ValueError(
                f"gpu_memory_utilization={config.gpu_memory_utilization} comes too late: JAX already uses the GPU, with "
                f"{share}. Make the engine before the first JAX call, or set {MEMORY_FRACTIONS[0]} in the environment"
            )


def make_mesh(config: EngineConfig) -> Mesh:
    """A mesh of `tensor_parallel_size` devices, from the one `config.device` names on.

    Raises:
        ValueError: no such platform or too few devices.
    """
    devices = _devices_from(config.device)
    size = config.tensor_parallel_size
    if size > len(devices):
        raise ValueError(
            f"tensor_parallel_size={size} needs {size} devices, but there are {len(devices)} "
            f"({devices[0].device_kind}): lower it, or make more devices visible"
        )
    return Mesh(np.array(devices[:size]), (TENSOR_AXIS,))


def _devices_from(name: str | None) -> list[Any]:
    if name is None:
        return jax.devices()
    platform, _, index = name.partition(":")
    if not platform or (":" in name and not index.isdecimal()):
        raise ValueError(f"device={name!r} is not valid: use a platform and a number, as 'cuda:0' or 'cpu'")
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"device={name!r} is not available: JAX sees {jax.devices()[0].platform} devices only. "
            "For a GPU install 'jaxllm[cuda13]' or 'jaxllm[cuda12]' and check CUDA_VISIBLE_DEVICES"
        ) from error
    start = int(index or 0)
    if start >= len(devices):
        raise ValueError(f"device={name!r} does not exist: there are {len(devices)} {platform} devices")
    return devices[start:]
