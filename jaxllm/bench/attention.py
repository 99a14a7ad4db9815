"""Paged attention by itself: bytes or FLOPs per second, and whether the result is right.

Invariant: what is timed is compared with the float32 oracle (the "xla" backend) on the same inputs, which are
random; whatever attention must not read (the null block, unused slots, blocks of nobody) is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bench.report import Figure, round_to
from jaxllm.bench.settings import Extent, KernelSettings, Mixture
from jaxllm.bench.timing import choose_backend, seconds_per_call
from jaxllm.kernels.backend import Backend
from jaxllm.kernels.ragged_paged_attention import Sizes, attend, prepare_attention

LAYERS = 8
"""Calls in one compiled function, each on the result of the one before it, as the layers of a step are."""
MOST_ERROR = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-4}
"""Norm of the difference to the oracle, by its norm."""
_SPARE_BLOCKS = 4


class Inputs(NamedTuple):
    """Arguments of `ragged_paged_attention`, and what they amount to."""

    q: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    block_tables: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array


def measure_attention(settings: KernelSettings, seed: int) -> Iterator[Figure]:
    """Decode, then chunks, then both in one step."""
    for extent in settings.decode:
        yield _decode_figure(extent, settings, seed)
    for tokens in settings.chunk:
        yield _chunk_figure(tokens, settings, seed)
    for mixture in settings.mixed:
        yield _mixed_figure(mixture, settings, seed)


def make_inputs(settings: KernelSettings, context_lens: np.ndarray, query_lens: np.ndarray, seed: int) -> Inputs:
    """Random queries and a cache in which each row's blocks lie anywhere.

    Args:
        context_lens: tokens of each row, its queries included; int32 [rows].
        query_lens: the last ones of them that are queries; int32 [rows].
    """
    tables, used = _lay_out(context_lens, settings.block_size, np.random.default_rng(seed))
    keys = jax.random.split(jax.random.key(seed), 3)
    dtype = jnp.dtype(settings.dtype)
    q = jax.random.normal(keys[0], (int(query_lens.sum()), settings.num_heads, settings.head_dim), dtype)
    make = jax.jit(partial(_poisoned, num_kv_heads=settings.num_kv_heads, head_dim=settings.head_dim, dtype=dtype))
    cu_q_lens = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    rows = (jnp.asarray(tables), jnp.asarray(context_lens, jnp.int32), jnp.asarray(cu_q_lens))
    return Inputs(q, make(keys[1], used), make(keys[2], used), *rows)


def _lay_out(context_lens: np.ndarray, block_size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Block tables, and which slots of [blocks, block_size] hold a token; block 0 is the null block."""
    counts = -(-context_lens // block_size)
    num_blocks = 1 + int(counts.sum()) + _SPARE_BLOCKS
    order = rng.permutation(np.arange(1, num_blocks))
    tables = np.zeros((len(context_lens), counts.max()), np.int32)
    used = np.zeros((num_blocks, block_size), bool)
    for row, (count, length) in enumerate(zip(counts, context_lens, strict=True)):
        tables[row, :count], order = order[:count], order[count:]
        used[tables[row, :count]] = (np.arange(count * block_size) < length).reshape(count, block_size)
    return tables, used


def _poisoned(key: jax.Array, used: jax.Array, num_kv_heads: int, head_dim: int, dtype: Any) -> jax.Array:
    values = jax.random.normal(key, (*used.shape, num_kv_heads, head_dim), dtype)
    return jnp.where(used[:, :, None, None], values, jnp.nan)


def relative_error(inputs: Inputs, sizes: Sizes, backend: Backend) -> float:
    """Of the backend, against float32; NaN if anything in its result is."""
    wide = (array.astype(jnp.float32) for array in inputs[:3])
    with jax.default_matmul_precision("highest"):
        expected = _attend(*wide, _prepare(inputs, sizes, "xla"), backend="xla", calls=1)
    result = _attend(*inputs[:3], _prepare(inputs, sizes, backend), backend=backend, calls=1)
    difference = jnp.linalg.norm(result.astype(jnp.float32) - expected)
    return float(difference / jnp.linalg.norm(expected))


def _prepare(inputs: Inputs, sizes: Sizes, backend: Backend) -> Any:
    return jax.jit(partial(prepare_attention, sizes=sizes, backend=backend))(*inputs[3:])


@partial(jax.jit, static_argnames=("backend", "calls"))
def _attend(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, work: Any, *, backend: Backend, calls: int):
    for _ in range(calls):
        q = attend(q, k_cache, v_cache, work, scale=q.shape[-1] ** -0.5, backend=backend)
    return q


def _measure(inputs: Inputs, settings: KernelSettings) -> tuple[float, dict[str, float | str | bool]]:
    """Seconds of one attention, and its details."""
    num_tokens, group = inputs.q.shape[0], settings.num_heads // settings.num_kv_heads
    sizes = Sizes(num_tokens, settings.block_size, group, settings.head_dim, num_tokens == inputs.kv_lens.shape[0])
    backend = choose_backend(settings)
    call = partial(_attend, backend=backend, calls=LAYERS)
    seconds = seconds_per_call(call, *inputs[:3], _prepare(inputs, sizes, backend)) / LAYERS
    error = relative_error(inputs, sizes, backend)
    correct = error < MOST_ERROR[settings.dtype]
    shown = round_to(error, 3) if error == error else "NaN"
    return seconds, {"us": round_to(seconds * 1e6), "relative_error": shown, "correct": correct, "backend": backend}


def _decode_figure(extent: Extent, settings: KernelSettings, seed: int) -> Figure:
    context_lens = _decode_contexts(extent, settings, seed)
    seconds, details = _measure(make_inputs(settings, context_lens, np.ones_like(context_lens), seed), settings)
    speed = _read_bytes(context_lens, settings) / seconds / 1e12
    name = f"decode attention, {extent.rows} x {extent.context} tokens{_shape_note(settings)}"
    return Figure(name, round_to(speed), "TB/s", {"share": round_to(speed / settings.read_ceiling, 3), **details})


def _chunk_figure(tokens: int, settings: KernelSettings, seed: int) -> Figure:
    lens = np.array([tokens], np.int32)
    seconds, details = _measure(make_inputs(settings, lens, lens, seed), settings)
    speed = _prompt_flops(lens, settings) / seconds / 1e12
    name = f"prompt attention, {tokens} tokens{_shape_note(settings)}"
    return Figure(name, round_to(speed), "TFLOP/s", {"share": round_to(speed / settings.compute_ceiling, 3), **details})


def _mixed_figure(mixture: Mixture, settings: KernelSettings, seed: int) -> Figure:
    """Its floor is all K/V read once, or the prompts' products, whichever takes longer: they could be done at once."""
    decoded = _decode_contexts(Extent(mixture.rows, mixture.context), settings, seed)
    prompts = np.full(mixture.prompts, mixture.prompt_len, np.int32)
    context_lens = np.concatenate([decoded, prompts])
    inputs = make_inputs(settings, context_lens, np.concatenate([np.ones_like(decoded), prompts]), seed)
    seconds, details = _measure(inputs, settings)
    details.pop("us")
    read = _read_bytes(context_lens, settings) / (settings.read_ceiling * 1e12)
    computed = _prompt_flops(prompts, settings) / (settings.compute_ceiling * 1e12)
    floors = {"bytes_us": round_to(read * 1e6), "flops_us": round_to(computed * 1e6)}
    name = f"decode attention, {mixture.rows} x {mixture.context} tokens, beside prompts, "
    name += f"{mixture.prompts} x {mixture.prompt_len} tokens{_shape_note(settings)}"
    share = round_to(max(read, computed) / seconds, 3)
    return Figure(name, round_to(seconds * 1e6), "us", {"share": share, **floors, **details})


def _decode_contexts(extent: Extent, settings: KernelSettings, seed: int) -> np.ndarray:
    """Not whole blocks, so that the last one of each row has unused slots."""
    unused = np.random.default_rng(seed).integers(0, settings.block_size, extent.rows)
    return np.maximum(extent.context - unused, 1).astype(np.int32)


def _read_bytes(context_lens: np.ndarray, settings: KernelSettings) -> int:
    itemsize = jnp.dtype(settings.dtype).itemsize
    return 2 * int(context_lens.sum()) * settings.num_kv_heads * settings.head_dim * itemsize


def _prompt_flops(lens: np.ndarray, settings: KernelSettings) -> float:
    """Half of each square is masked."""
    squares = int((lens.astype(np.int64) ** 2).sum())
    return 4 * squares / 2 * settings.head_dim * settings.num_heads


def _shape_note(settings: KernelSettings) -> str:
    return f", {settings.num_heads}/{settings.num_kv_heads} heads of {settings.head_dim}, {settings.dtype}"
