"""Parameters in Orbax's format: written from any mesh, restored straight to any other, each device only its part.

One Orbax checkpoint has every parameter by its dotted path, with the shape it has on one device; a large one is cut
into pieces, along an axis that no mesh splits. Invariant: what is restored is bit for bit what was written. Host memory
holds a few pieces at a time, not a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from tqdm import tqdm

from jaxllm.model_config import ModelConfig
from jaxllm.models.expansion import Expansion, stored_specs, whole_axis

PIECE_SIZE = 1 << 27
"""Numbers of one array in a checkpoint, at most: to read one takes Orbax four times its bytes. Part of the format."""
BYTES_AT_ONCE = 1 << 28
"""Of arrays that are restored together: GPUs read them from pinned buffers, which stay."""
CONCURRENT_GB = 1
"""What Orbax may hold in host memory; each array has to fit."""
CHUNK_BYTES = 32 << 20
"""Arrays are cut into chunks so that a device need not read what belongs to others."""


def write_params(folder: Path, params: dict[str, jax.Array]) -> None:
    """Writes parameters to a new folder, all or nothing.

    Args:
        params: with the shapes of `stored_specs`, on any mesh; emptied, so that no array lies beside its pieces.
    """
    pieces: dict[str, jax.Array] = {}
    for path in list(params):
        pieces |= _cut(path, params.pop(path))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in pieces}
    with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(folder.absolute(), ocp.args.PyTreeSave(pieces, save_args))


def restore_params(
    folder: Path, model: ModelConfig, specs: Mapping[str, jax.ShapeDtypeStruct], progress: bool = True
) -> dict[str, jax.Array]:
    """Every parameter of `specs`, by dotted path, with the shape, dtype and sharding its spec asks for.

    Args:
        folder: of `write_params`.
        model: as the checkpoint has it.
        progress: show a bar, if standard error is a terminal.

    Raises:
        ValueError: other parameters lie there.
    """
    stored, params = stored_specs(specs, model), {}
    pieces = {path: _piece_specs(path, spec) for path, spec in stored.items()}
    flat = {name: spec for of_one in pieces.values() for name, spec in of_one.items()}
    # disable=None: no bar where standard error is not a terminal.
    disable = None if progress else True
    total = sum(map(_num_bytes, flat.values()))
    bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=disable, leave=False)
    with bar, ocp.Checkpointer(_handler()) as checkpointer:
        _check(checkpointer, folder, flat)
        arrays = _restore_all(checkpointer, folder, flat, bar)
        for path, spec in specs.items():
            restored = [next(arrays) for _ in pieces[path]]
            params[path] = _assemble(restored, whole_axis(path), Expansion.of(path, spec, model), spec)
    return params


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # it makes weights hardly smaller, only slower
        restore_concurrent_gb=CONCURRENT_GB,
        save_concurrent_gb=CONCURRENT_GB,
        save_device_host_concurrent_gb=CONCURRENT_GB,
    )


def _bounds(path: str, array: jax.ShapeDtypeStruct | jax.Array) -> dict[str, tuple[int, int]]:
    """The pieces of a parameter, by their names in a checkpoint: where they begin and end along its whole axis.

    They are nearly equal, each of at least one row.
    """
    size = array.shape[whole_axis(path)]
    count = min(size, -(-array.size // PIECE_SIZE)) or 1
    names = [path] if count == 1 else [f"{path}.{number}" for number in range(count)]
    ends = [size * number // count for number in range(count + 1)]
    return dict(zip(names, itertools.pairwise(ends), strict=True))


def _cut(path: str, array: jax.Array) -> dict[str, jax.Array]:
    """A parameter's pieces by their names in a checkpoint, each on the devices of the whole."""
    bounds, axis = _bounds(path, array), whole_axis(path)
    if len(bounds) == 1:
        return {path: array}
    return {name: jax.lax.slice_in_dim(array, start, end, axis=axis) for name, (start, end) in bounds.items()}


def _piece_specs(path: str, spec: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """What `_cut` makes of an array like this."""
    axis = whole_axis(path) % len(spec.shape)
    before, after = spec.shape[:axis], spec.shape[axis + 1 :]
    return {
        name: jax.ShapeDtypeStruct((*before, end - start, *after), spec.dtype, sharding=spec.sharding)
        for name, (start, end) in _bounds(path, spec).items()
    }


def _check(checkpointer: ocp.Checkpointer, folder: Path, stored: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    metadata = checkpointer.metadata(folder.absolute()).item_metadata
    if metadata is None:
        raise ValueError(f"{folder} is not whole: convert the model again")
    found = {name: tuple(array.shape) for name, array in metadata.items()}
    wrong = [name for name, spec in stored.items() if found.get(name) != spec.shape]
    wrong += sorted(found.keys() - stored.keys())
    if wrong:
        raise ValueError(
            f"{folder} holds other parameters than its model has ({', '.join(wrong[:3])}): convert it again"
        )


def _restore_all(
    checkpointer: ocp.Checkpointer, folder: Path, specs: Mapping[str, jax.ShapeDtypeStruct], bar: tqdm
) -> Iterator[jax.Array]:
    """Every array in order, read a batch at a time."""
    for batch in _batches(specs):
        restored = _restore(checkpointer, folder, batch)
        bar.update(sum(map(_num_bytes, batch.values())))
        for name in batch:
            yield restored.pop(name)


def _restore(
    checkpointer: ocp.Checkpointer, folder: Path, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=spec.sharding, global_shape=spec.shape, dtype=spec.dtype)
        for name, spec in batch.items()
    }
    request = ocp.args.PyTreeRestore(dict(batch), arguments, partial_restore=True)
    return jax.block_until_ready(checkpointer.restore(folder.absolute(), request))


def _assemble(pieces: Sequence[jax.Array], axis: int, expansion: Expansion, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """The parameter as the devices hold it; where that is another array, what was read is freed."""
    if len(pieces) == 1 and expansion.changes_nothing:
        return pieces[0]

    def assemble(*pieces: jax.Array) -> jax.Array:
        return expansion.apply(jnp.concatenate(pieces, axis))

    assembled = jax.block_until_ready(jax.jit(assemble, out_shardings=spec.sharding)(*pieces))
    for piece in pieces:
        piece.delete()
    return assembled


def _batches(specs: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """The same specs in order, in runs of at most BYTES_AT_ONCE, or one that is larger."""
    batch, size = {}, 0
    for name, spec in specs.items():
        if batch and size + _num_bytes(spec) > BYTES_AT_ONCE:
            yield batch
            batch, size = {}, 0
        batch[name] = spec
        size += _num_bytes(spec)
    if batch:
        yield batch


def _num_bytes(spec: jax.ShapeDtypeStruct | jax.Array) -> int:
    return spec.size * spec.dtype.itemsize
