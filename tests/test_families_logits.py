"""Each family's logits against transformers': the whole prompt at once, in chunks, and token by token.

The checkpoints in data/tiny are random, small and beyond their windows; scripts/make_tiny_checkpoints.py
makes them and the logits they have to give.
"""

from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxllm.kernels.ragged_paged_attention import Sizes, prepare_attention
from jaxllm.memory import CacheSize
from jaxllm.models.attention import Placement
from jaxllm.models.checkpoint import open_checkpoint
from jaxllm.models.layers import Setting
from jaxllm.models.loader import load_params
from jaxllm.models.parameters import define_model
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.runner.kv_cache import allocate, cache_specs

TINY = Path(__file__).parent / "data" / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir())
FAMILIES = [name for name in NAMES if not (TINY / name / "weights_of.txt").exists()]
CONTEXTS = {"phi3-longrope-short": 64}
"""Longest context allowed, where it is not all that the model can: decides which factors longrope uses."""
TOLERANCE = 1e-4
CHUNK, BLOCK_SIZE, NUM_BLOCKS = 16, 4, 32
QUICK = {"xla_backend_optimization_level": 0}
"""These executables run a few times: compiling takes all of the time."""


def relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


class Sequence:
    """One model with the cache of one request, whose blocks lie anywhere; gives the logits of every position."""

    def __init__(self, folder, config, num_devices=1):
        mesh = Mesh(np.array(jax.devices()[:num_devices]), (TENSOR_AXIS,))
        self.definition = define_model(config, Setting(jnp.dtype("float32"), mesh, "xla"))
        with open_checkpoint(folder) as checkpoint:
            self.leaves = self.definition.leaves(load_params(checkpoint, self.definition.specs, progress=False))
        self.specs = cache_specs(CacheSize(NUM_BLOCKS, BLOCK_SIZE), config, jnp.dtype("float32"), mesh)
        blocks = np.random.default_rng(5).permutation(NUM_BLOCKS - 1) + 1
        self.table = jnp.asarray(blocks[None], jnp.int32)

        def step(leaves, cache, token_ids, start, count):
            return run(self.definition.merge(leaves), cache, token_ids, start, count, self.table)

        self.step = jax.jit(step, donate_argnums=1, compiler_options=QUICK)

    def logits(self, token_ids, ends, size):
        """Computes the tokens in steps that end at `ends`, each padded to `size` tokens."""
        cache, found = allocate(self.specs), []
        for start, end in pairwise([0, *ends]):
            padded = np.zeros(size, np.int32)
            padded[: end - start] = token_ids[start:end]
            logits, cache = self.step(self.leaves, cache, padded, start, end - start)
            found.append(np.asarray(logits)[: end - start])
        return np.concatenate(found)


def run(model, cache, token_ids, start, count, table):
    """One step of one row: `count` tokens from position `start` on; what is past them is padding."""
    index = jnp.arange(token_ids.shape[0])
    positions = jnp.where(index < count, start + index, 0)
    work = prepare_attention(
        table,
        jnp.array([start + count]),
        jnp.array([0, count]),
        sizes=Sizes(token_ids.shape[0], BLOCK_SIZE, model.config.group_size, model.config.head_dim),
    )
    blocks = jnp.where(index < count, table[0, positions // BLOCK_SIZE], 0)
    hidden, cache = model(token_ids, positions, cache, Placement(blocks, positions % BLOCK_SIZE, work))
    return model.logits(hidden), cache


@lru_cache
def checkpoint_folder(name, scratch):
    """The checkpoint, its weights linked in where they are another's."""
    folder = TINY / name
    if name in FAMILIES:
        return folder
    linked = scratch / name
    linked.mkdir()
    (linked / "config.json").symlink_to(folder / "config.json")
    weights = TINY / (folder / "weights_of.txt").read_text().strip() / "model.safetensors"
    (linked / "model.safetensors").symlink_to(weights)
    return linked


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def load(name, scratch, num_devices=1):
    folder = checkpoint_folder(name, scratch)
    with open_checkpoint(folder) as checkpoint:
        config = checkpoint.config
    config = config.for_context(CONTEXTS.get(name, config.max_position_embeddings))
    expected = np.load(TINY / name / "expected.npz")
    return Sequence(folder, config, num_devices), expected["token_ids"], expected["logits"]


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, scratch):
    sequence, token_ids, expected = load(name, scratch)
    count = len(token_ids)
    steps = {"whole": ([count], count), "decode": (range(1, count + 1), 1)}
    if name in FAMILIES:  # the others differ in the angles only
        steps["chunked"] = ([5, 21, 28, 44, count], CHUNK)
    errors = {kind: relative(sequence.logits(token_ids, *how), expected) for kind, how in steps.items()}
    print(name, {kind: f"{error:.1e}" for kind, error in errors.items()})
    assert max(errors.values()) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_two_devices_compute_the_same(name, scratch):
    sequence, token_ids, expected = load(name, scratch, num_devices=2)
    found = sequence.logits(token_ids, range(CHUNK, len(token_ids) + 1, CHUNK), CHUNK)
    assert relative(found, expected) < TOLERANCE


def test_layers_of_one_kind_are_traced_once(scratch):
    sequence, _, _ = load("gemma3", scratch)
    cache = allocate(sequence.specs)
    lowered = sequence.step.lower(sequence.leaves, cache, np.zeros(1, np.int32), 0, 1).as_text()
    # Both kinds, and the first layer once more: nothing is added to the stream before it.
    assert lowered.count("func.func private @_run_layer") == 3
    assert lowered.count("call @_run_layer") == 4
