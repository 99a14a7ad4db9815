"""Random weights where a checkpoint's would be, made on the devices from a configuration alone.

Invariant: an array is made where it belongs, in no memory but its own, so that a model which fits with a
checkpoint's weights fits with these. The same seed gives the same numbers on any number of devices.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import zlib
from collections.abc import Mapping
from functools import lru_cache, reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.models.checkpoint import open_checkpoint
from jaxllm.models.expansion import Expansion
from jaxllm.models.families import family_of_hf
from jaxllm.models.hf_folder import read_config
from jaxllm.models.hub import resolve_model
from jaxllm.models.orbax_folder import is_orbax_folder, read_model
from jaxllm.models.shapes import SHAPES, Shape

DEVIATION = 0.02
"""Standard deviation of everything but the scales of norms, which are 1: what most models are initialised with."""


def dummy_model(name: str) -> tuple[ModelConfig, Path | None]:
    """The configuration of the model called `name`, and its file or folder unless it is a built-in shape.

    No token ends an answer: which ones random weights sample means nothing.

    Raises:
        ValueError: there is no such model or shape, or its configuration is not supported.
    """
    config, path = (_read(SHAPES[name]), None) if name in SHAPES else _find(name)
    return dataclasses.replace(config, eos_token_ids=()), path


def _find(name: str) -> tuple[ModelConfig, Path]:
    try:
        path = resolve_model(name, weights=False)
    except ValueError as error:
        raise ValueError(f"{error}. With load_format='dummy' also a shape: {', '.join(SHAPES)}") from error
    if is_orbax_folder(path):
        return read_model(path), path
    if path.is_dir():
        return _read(read_config(path)), path
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config, path


def _read(fields: Shape) -> ModelConfig:
    return family_of_hf(fields.get("architectures") or ()).config_from_hf(fields)


def dummy_params(model: ModelConfig, specs: Mapping[str, jax.ShapeDtypeStruct], seed: int) -> dict[str, jax.Array]:
    """A random array for each of `specs`, with its shape, dtype and sharding.

    Args:
        model: as a checkpoint would have it.
        specs: by path, as "layers.0.mlp.down.weight".
        seed: of all of them.
    """
    params = {}
    for path, spec in specs.items():
        make = _ones if path.endswith(".scale") else _normal
        make = _maker(make, Expansion.of(path, spec, model), spec.dtype, spec.sharding)
        params[path] = jax.block_until_ready(make(np.uint32(zlib.crc32(f"{seed} {path}".encode()))))
    return params


@lru_cache
def _maker(make, expansion: Expansion, dtype, sharding):
    """Layers share their shapes, so few programs make all arrays."""

    def run(seed):
        return expansion.apply(make(seed, shape=expansion.stored_shape, dtype=dtype))

    return jax.jit(run, out_shardings=sharding)


def _normal(seed: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Each element from the hash of its own index.

    jax.random would hold 16 bytes for every element meanwhile, where the K/V cache may have taken the rest already.
    """
    strides = np.cumprod([1, *shape[:0:-1]], dtype=np.uint32)[::-1]
    axes = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride for axis, stride in enumerate(strides)]
    bits = _hash(_hash(reduce(operator.add, axes)) ^ seed)
    return (_standard_normal(bits) * DEVIATION).astype(dtype)


def _standard_normal(bits: jax.Array) -> jax.Array:
    """Of 32 random bits; never infinite, as what goes into erf_inv is a float32 between -1 and 1."""
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-22 - 1
    return jax.lax.erf_inv(uniform) * math.sqrt(2)


def _hash(x: jax.Array) -> jax.Array:
    """Mixes 32 bits (https://github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _ones(seed: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.ones(shape, dtype)
