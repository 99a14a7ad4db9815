"""An H200 to compile for, on a machine without a GPU.

Needs the packages jax-cuda13-pjrt and jax-cuda13-plugin of jax's version, without their dependencies. XLA lowers and
compiles as it does on the GPU, to machine code, but it cannot measure: products get default tiles.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGET = Path(__file__).with_name("data") / "h200_target.txtpb"
"""What XLA knows of the GPU, as it writes it itself with --xla_dump_to."""


def make_mesh(axis: str, size: int = 1) -> Mesh:
    """H200s that programs can be compiled for and nothing can be put on. To be called before JAX has devices."""
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu,cuda"}
    jax.config.update("jax_platforms", "cpu,cuda")
    topology = topologies.get_topology_desc("", "cuda", target_config=TARGET.read_text(), topology=f"1x1x{size}")
    return Mesh(np.array(topology.devices[:size]), (axis,))


def lowering_for(mesh: Mesh):
    """A context: Pallas asks the abstract mesh which device it lowers for."""
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=device))


def array(mesh: Mesh, shape: tuple[int, ...], dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
