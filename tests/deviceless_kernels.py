"""Prints, as JSON, why a kernel cannot be compiled for an H200: a message by the name of the case, empty where it can.
Run by test_deviceless.py, with a Python that has what `h200` needs; the cases are that file's parameters.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import h200
import jax
import jax.numpy as jnp

from jaxllm.kernels import ragged_paged_attention_pallas
from jaxllm.kernels.add_rms_norm import add_rms_norm
from jaxllm.kernels.launches import Launch
from jaxllm.kernels.ragged_paged_attention import ragged_paged_attention
from jaxllm.kernels.rotate_and_write import HeadNorm, rotate_and_write
from jaxllm.kernels.sampling import draw, find_threshold, summarize, top_tokens

NUM_BLOCKS, CONTEXT = 64, 4096
HEAD_DIMS, PAGES = (64, 80, 96, 128, 256), (16, 32, 64, 128)
DECODES, CHUNKS = ((4, 4), (64, 64)), (512, 8)
"""Tokens and rows; as many of each are a decode step, others have chunks beside single tokens."""

type Array = Callable[..., jax.ShapeDtypeStruct]
"""Of a shape and a dtype."""


class Attention(NamedTuple):
    tokens: int
    rows: int
    group: int = 4
    head_dim: int = 128
    page: int = 16
    dtype: Any = jnp.bfloat16
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to
    sinks: bool = False

    def lower(self, array: Array) -> jax.stages.Lowered:
        heads = 2 * self.group
        cache = array((NUM_BLOCKS, self.page, 2, self.head_dim), self.dtype)
        rows = [
            array(shape, jnp.int32) for shape in ((self.rows, CONTEXT // self.page), (self.rows,), (self.rows + 1,))
        ]

        def attend(q, k, v, tables, kv_lens, cu_q_lens, sinks):
            options = {
                **self.options,
                "sinks": sinks if self.sinks else None,
                "single_queries": self.tokens == self.rows,
            }
            return ragged_paged_attention(
                q, k, v, tables, kv_lens, cu_q_lens, scale=0.1, backend="pallas", **options
            )  # fmt: skip

        q, sinks = array((self.tokens, heads, self.head_dim), self.dtype), array((heads,))
        return jax.jit(attend).lower(q, cache, cache, *rows, sinks)


class Oversized(NamedTuple):
    """What must not compile: its tiles do not fit into the shared memory."""

    def lower(self, array: Array) -> jax.stages.Lowered:
        launch = Launch(split=256, context_tile=256, rows=16, num_warps=4, num_stages=6)
        with mock.patch.object(ragged_paged_attention_pallas, "find_launch", lambda *_: launch):
            return Attention(4, 4).lower(array)


class Rotation(NamedTuple):
    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    half: int
    norm: bool
    splits: int = 1

    def lower(self, array: Array) -> jax.stages.Lowered:
        dtype = jnp.float32 if self.splits > 1 else jnp.bfloat16
        qkv = array((self.splits, self.tokens, self.kv_heads, self.group + 2, self.head_dim), dtype)
        angles, cache = (
            array((self.tokens, self.half)),
            array((NUM_BLOCKS, 16, self.kv_heads, self.head_dim), "bfloat16"),
        )
        token, scale = array((self.tokens,), jnp.int32), array((self.group + 1, self.head_dim))

        def rotate(scale, *arrays):
            norm = HeadNorm(scale, 1e-6) if self.norm else None
            return rotate_and_write(*arrays, norm=norm, dtype=jnp.dtype("bfloat16"), backend="pallas")

        return jax.jit(rotate, donate_argnums=(4, 5)).lower(scale, qkv, angles, angles, cache, cache, token, token)


class Norm(NamedTuple):
    tokens: int
    hidden: int
    splits: int
    """Parts of what is added; 0 for nothing."""

    def lower(self, array: Array) -> jax.stages.Lowered:
        x, scale = array((self.tokens, self.hidden), jnp.bfloat16), array((self.hidden,))
        norm = partial(add_rms_norm, eps=1e-5, backend="pallas")
        if self.splits == 0:
            return jax.jit(lambda x, scale: norm(x, None, scale)).lower(x, scale)
        return jax.jit(norm).lower(x, array((self.splits, self.tokens, self.hidden)), scale)


class Sampling(NamedTuple):
    rows: int
    vocab: int
    dtype: Any

    def lower(self, array: Array) -> jax.stages.Lowered:
        def choose(logits, scale, top_k, top_p, min_p, keys, positions):
            summary = summarize(logits, scale, backend="pallas")
            threshold = find_threshold(logits, summary, scale, top_k, top_p, min_p, backend="pallas")
            drawn = draw(logits, summary.peak, scale, threshold, keys, positions, backend="pallas")
            return drawn, top_tokens(logits, summary, 20, backend="pallas")

        row, integer = array((self.rows,)), array((self.rows,), jnp.int32)
        keys = array((self.rows, 2), jnp.uint32)
        return jax.jit(choose).lower(array((self.rows, self.vocab), self.dtype), row, integer, row, row, keys, integer)


def _attention_cases():
    """Groups with head sizes and pages in turn, then the options and types."""
    for kind, groups in (("decode", (1, 2, 3, 4, 6, 7, 9, 12, 15, 16)), ("chunks", (1, 3, 5, 7, 9, 16))):
        for index, group in enumerate(groups):
            head_dim, page = HEAD_DIMS[index % len(HEAD_DIMS)], PAGES[index % len(PAGES)]
            tokens, rows = CHUNKS if kind == "chunks" else DECODES[index % len(DECODES)]
            yield (
                f"{kind}, group {group}, head_dim {head_dim}, page {page}",
                Attention(tokens, rows, group, head_dim, page),
            )
    for kind, (tokens, rows) in (("decode", DECODES[-1]), ("chunks", CHUNKS)):
        yield f"{kind}, window", Attention(tokens, rows, options={"window": 1000})
        yield f"{kind}, soft cap", Attention(tokens, rows, options={"soft_cap": 50.0})
        yield f"{kind}, sinks", Attention(tokens, rows, 7, 64, sinks=True)
        every = {"window": 1000, "soft_cap": 50.0}
        yield f"{kind}, every option", Attention(tokens, rows, 3, 80, 32, options=every, sinks=True)
        yield f"{kind}, large step", Attention(256 if kind == "decode" else 8192, 256)
        for head_dim in (128, 256):
            yield f"{kind}, float32, head_dim {head_dim}", Attention(tokens, rows, head_dim=head_dim, dtype=jnp.float32)


TOO_LARGE = "more shared memory than there is"
CASES: dict[str, Any] = {
    **dict(_attention_cases()),
    TOO_LARGE: Oversized(),
    "rotate": Rotation(64, 8, 4, 128, 64, norm=False),
    "rotate, in parts": Rotation(1, 8, 4, 128, 64, norm=False, splits=4),
    "rotate, normed": Rotation(64, 8, 2, 128, 64, norm=True),
    "rotate, many tokens": Rotation(8192, 8, 4, 128, 64, norm=False),
    "rotate, many tokens, normed": Rotation(300, 1, 4, 256, 128, norm=True),
    "rotate, odd sizes": Rotation(16, 3, 3, 80, 40, norm=True),
    "rotate, a part": Rotation(16, 2, 1, 96, 16, norm=True, splits=2),
    "rotate, a part, not normed": Rotation(300, 2, 9, 96, 24, norm=False),
    "norm": Norm(64, 4096, 1),
    "norm, in parts": Norm(1, 4096, 8),
    "norm, nothing added": Norm(64, 4096, 0),
    "norm, odd size": Norm(8192, 5120, 1),
    "norm, small": Norm(3, 576, 4),
    "sampling, bfloat16": Sampling(64, 128256, jnp.bfloat16),
    "sampling, float32": Sampling(1, 49152, jnp.float32),
}


def explain(lowered: jax.stages.Lowered) -> str:
    """Why it cannot be compiled."""
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    warnings.simplefilter("ignore")
    mesh = h200.make_mesh("tensor")
    with ThreadPoolExecutor(os.cpu_count()) as pool, h200.lowering_for(mesh):
        pending = {name: pool.submit(explain, case.lower(partial(h200.array, mesh))) for name, case in CASES.items()}
    print(json.dumps({name: future.result() for name, future in pending.items()}))


if __name__ == "__main__":
    main()
