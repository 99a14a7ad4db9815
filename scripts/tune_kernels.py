"""Finds how the attention kernels run fastest on this GPU, and writes that to kernels/launches.json.

    .venv/bin/python scripts/tune_kernels.py [--quick] [--head-dim 128 --group 4 --kv-heads 8] [--kernel decode]

Every way is first compared with the XLA backend in float32, on inputs with NaN in all that must not be read. It is
then timed as a step does it: prepared once and called many times, on K/V too large for the cache of the GPU. The way
with the least geometric mean over all shapes is written, unless the one in the table is as good: another way may
change the low bits of results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bench.attention import MOST_ERROR, make_inputs
from jaxllm.bench.settings import Extent, KernelSettings
from jaxllm.bench.timing import seconds_per_call
from jaxllm.kernels import paged_chunks, paged_decode
from jaxllm.kernels.launches import TABLE, Kernel, Launch, find_launch
from jaxllm.kernels.paged_walk import Call, Options, Shape
from jaxllm.kernels.query_tiles import Sizes
from jaxllm.kernels.ragged_paged_attention import ragged_paged_attention

MODULES = {"decode": paged_decode, "chunks": paged_chunks}
CALLS = {"decode": 32, "chunks": 8}
"""Calls of a kernel in one compiled program."""
READ_BYTES = 200_000_000
"""K/V that these calls go through before they come back to what they read first; the cache of an H200 has 50 MB."""
HOPELESS = 2.0
"""A way that takes so many times as long as the best for one shape is not tried on the others."""
AS_GOOD = 1.01

WHOLE = 1 << 20
"""A split that no context is longer than."""

type Grid = dict[str, tuple[int, ...]]
"""What is tried for each field of a launch."""
GRIDS: dict[Kernel, Grid] = {
    "decode": {
        "split": (128, 256, 512),
        "context_tile": (32, 64, 128),
        "rows": (16,),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 6),
    },
    "chunks": {
        "split": (1024, WHOLE),
        "context_tile": (32, 64, 128),
        "rows": (64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
}
QUICK_GRIDS: dict[Kernel, Grid] = {
    "decode": GRIDS["decode"]
    | {"split": (256,), "context_tile": (32, 64), "num_warps": (2, 4), "num_stages": (3, 4, 6)},
    "chunks": GRIDS["chunks"]
    | {"split": (WHOLE,), "context_tile": (64,), "rows": (64, 128, 256), "num_stages": (2, 3)},
}
SHAPES = {"decode": "1x540,64x540,256x540,256x1024,64x4096,8x8192", "chunks": "1x8192,4x2048,16x512"}
QUICK_SHAPES = {"decode": "1x540,64x1024,8x8192", "chunks": "1x4096,16x512"}


class Problem(NamedTuple):
    """Attention of one shape, and the right answer."""

    kernel: Kernel
    extent: Extent
    q: jax.Array
    caches: list[tuple[jax.Array, jax.Array]]
    rows: tuple[jax.Array, ...]
    """Block tables, lengths of contexts, first query of each row."""
    expected: jax.Array


class Way(NamedTuple):
    """A launch, and the seconds of a call for each shape."""

    launch: Launch
    seconds: tuple[float, ...]

    @property
    def score(self) -> float:
        return math.exp(sum(map(math.log, self.seconds)) / len(self.seconds))


def launches_of(grid: Grid, kernel: Kernel, group: int, current: Launch) -> list[Launch]:
    """The current launch, then all of a grid that make sense."""
    everything = (Launch._make(values) for values in itertools.product(*(grid[field] for field in Launch._fields)))
    possible = (
        launch
        for launch in everything
        if launch.split % launch.context_tile == 0 and (kernel == "decode" or launch.rows >= group)
    )
    return list(dict.fromkeys([current, *possible]))


def make_problem(kernel: Kernel, extent: Extent, settings: KernelSettings) -> Problem:
    """Random inputs: `extent.rows` contexts, of which all tokens (chunks) or the last one (decode) are queries."""
    unused = np.random.default_rng(0).integers(0, settings.block_size, extent.rows)
    contexts = np.maximum(extent.context - unused, 1).astype(np.int32)
    inputs = make_inputs(settings, contexts, contexts if kernel == "chunks" else np.ones_like(contexts), seed=0)
    q, k_cache, v_cache, *rows = inputs
    wide = [array.astype(jnp.float32) for array in (q, k_cache, v_cache)]
    with jax.default_matmul_precision("highest"):
        expected = ragged_paged_attention(*wide, *rows, scale=settings.head_dim**-0.5)
    num_sets = min(-(-READ_BYTES // (2 * k_cache.nbytes)), CALLS[kernel])
    others = [(jnp.copy(k_cache), jnp.copy(v_cache)) for _ in range(num_sets - 1)]
    return Problem(kernel, extent, q, [(k_cache, v_cache), *others], tuple(rows), expected)


def lower_calls(problem: Problem, launch: Launch, num_calls: int) -> jax.stages.Lowered:
    """A program of many calls, each on the result of the one before it, that returns the first and the last result."""
    module, k_cache = MODULES[problem.kernel], problem.caches[0][0]
    num_tokens, num_heads, head_dim = problem.q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    shape = Shape(num_kv_heads, group, head_dim, block_size)
    options = Options(head_dim**-0.5, window=None, soft_cap=None, sinks=None, k_scale=1.0, v_scale=1.0)
    kernel_call = Call(shape, options, launch, interpret=jax.default_backend() == "cpu")

    @jax.jit  # lowered once
    def attend(q, k_cache, v_cache, work):
        pages = (cache.reshape(-1, num_kv_heads, head_dim) for cache in (k_cache, v_cache))
        return module.attend(q, *pages, work, kernel_call)

    def run(q, caches, rows):
        work = module.prepare(*rows, Sizes(num_tokens, block_size, group, head_dim), launch)
        first = q = attend(q.reshape(num_tokens, num_kv_heads, group, head_dim), *caches[0], work)
        for call in range(1, num_calls):
            q = attend(q, *caches[call % len(caches)], work)
        return first.reshape(num_tokens, num_heads, head_dim), q

    return jax.jit(run).lower(problem.q, problem.caches, problem.rows)


def measure(problem: Problem, compiled: jax.stages.Compiled | str, limit: float, num_calls: int) -> float | str:
    """Seconds of a call; or why there are none."""
    if isinstance(compiled, str):
        return compiled
    arguments = (problem.q, problem.caches, problem.rows)
    try:
        found = compiled(*arguments)[0].astype(jnp.float32)
        error = float(jnp.linalg.norm(found - problem.expected) / jnp.linalg.norm(problem.expected))
        if not error < limit:
            return f"wrong: relative error {error:.1e}"
        return seconds_per_call(compiled, *arguments) / num_calls
    except jax.errors.JaxRuntimeError as refusal:
        return first_line(refusal)


def finish(lowered: jax.stages.Lowered) -> jax.stages.Compiled | str:
    """The program, or why the compiler refuses it (mostly: tiles that do not fit)."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as refusal:
        return first_line(refusal)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]


def try_all(
    kernel: Kernel, extents: Iterable[Extent], launches: Sequence[Launch], settings: KernelSettings, num_calls: int
) -> list[Way]:
    """Every launch on every shape; those that fail, or are hopeless, leave."""
    ways = [Way(launch, ()) for launch in launches]
    for extent in extents:
        problem = make_problem(kernel, extent, settings)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = list(pool.map(finish, (lower_calls(problem, way.launch, num_calls) for way in ways)))
        measured = []
        for way, program in zip(ways, programs, strict=True):
            seconds = measure(problem, program, MOST_ERROR[settings.dtype], num_calls)
            if isinstance(seconds, str):
                print(f"{kernel} {extent}: {tuple(way.launch)}: {seconds}", file=sys.stderr)
            else:
                measured.append(way._replace(seconds=(*way.seconds, seconds)))
        best = min((way.seconds[-1] for way in measured), default=0.0)
        ways = [way for way in measured if way.seconds[-1] <= HOPELESS * best]
        print(f"{kernel} {extent}: best {best * 1e6:.1f} us, {len(ways)} of {len(programs)} go on", file=sys.stderr)
    return sorted(ways, key=lambda way: way.score)


def choose(ways: Sequence[Way], current: Launch) -> Way:
    """The fastest, or the current one where that is as good."""
    kept = next((way for way in ways if way.launch == current), None)
    return kept if kept and kept.score <= AS_GOOD * ways[0].score else ways[0]


def show(kernel: Kernel, extents: Sequence[Extent], ways: Sequence[Way], current: Launch, chosen: Way) -> None:
    """Prints the twenty fastest, in microseconds."""
    titles = [*Launch._fields, *map(str, extents), "mean", ""]
    print(f"{kernel}, us per call\n" + "".join(f"{title:>13}" for title in titles))
    for way in ways[:20]:
        numbers = (f"{seconds * 1e6:13.1f}" for seconds in (*way.seconds, way.score))
        note = "  chosen" * (way is chosen) + "  current" * (way.launch == current)
        print("".join(f"{value:13}" for value in way.launch) + "".join(numbers) + note)


def update(path: Path, device_kind: str, kernel: Kernel, head_dim: int, launch: Launch) -> None:
    """Writes an entry into the table; a new GPU begins with the entries that held for it until now."""
    table = json.loads((path if path.exists() else TABLE).read_text())
    kernels = table.setdefault(device_kind, json.loads(json.dumps(next(iter(table.values())))))
    others = [entry for entry in kernels[kernel] if entry["head_dim"] != head_dim]
    entries = [*others, {"head_dim": head_dim, **launch._asdict()}]
    kernels[kernel] = sorted(entries, key=lambda entry: entry["head_dim"])
    path.write_text(format_table(table))


def format_table(table: dict[str, dict[str, list[dict[str, int]]]]) -> str:
    """JSON with a line per entry."""

    def block(opening: str, lines: Iterable[str], closing: str, indent: str) -> str:
        return opening + ",".join(f"\n{indent}  {line}" for line in lines) + f"\n{indent}{closing}"

    devices = []
    for device, kernels in table.items():
        lists = [f"{json.dumps(name)}: {block('[', map(json.dumps, kernels[name]), ']', '    ')}" for name in kernels]
        devices.append(f"{json.dumps(device)}: {block('{', lists, '}', '  ')}")
    return block("{", devices, "}", "") + "\n"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--kernel", choices=(*MODULES, "both"), default="both")
    parser.add_argument("--quick", action="store_true", help="fewer ways and shapes")
    for name, default in (("head-dim", 128), ("group", 4), ("kv-heads", 8), ("block-size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=MOST_ERROR, default="bfloat16")
    for kernel in MODULES:
        parser.add_argument(f"--{kernel}-shapes", help="rows x tokens of each row's context, as in 64x4096,8x8192")
    for field in Launch._fields:
        parser.add_argument(f"--{field.replace('_', '-')}", help="what to try instead, as in 64,128")
    parser.add_argument("--calls", type=int, help="of a kernel in one program")
    parser.add_argument("--output", type=Path, default=TABLE, help="the table to write an entry into")
    parsed = parser.parse_args(arguments)
    if jax.default_backend() == "cpu" and parsed.output == TABLE:
        parser.error("this is no GPU: kernels are only interpreted here; name another table with --output")
    return parsed


def tune(kernel: Kernel, options: argparse.Namespace) -> None:
    """Finds, prints and writes the launch of one kernel."""
    settings = KernelSettings(
        num_heads=options.group * options.kv_heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        block_size=options.block_size,
        dtype=options.dtype,
    )
    shapes = getattr(options, f"{kernel}_shapes") or (QUICK_SHAPES if options.quick else SHAPES)[kernel]
    extents = [Extent.parse(text) for text in shapes.split(",")]
    grid = (QUICK_GRIDS if options.quick else GRIDS)[kernel]
    named = {field: getattr(options, field) for field in Launch._fields}
    grid = grid | {field: tuple(map(int, text.split(","))) for field, text in named.items() if text}
    device_kind = jax.devices()[0].device_kind
    current = find_launch(kernel, device_kind, options.head_dim)
    ways = try_all(
        kernel, extents, launches_of(grid, kernel, options.group, current), settings, options.calls or CALLS[kernel]
    )
    if not ways:
        raise SystemExit(f"no way to run {kernel} is right, fits and keeps up on every shape")
    chosen = choose(ways, current)
    show(kernel, extents, ways, current, chosen)
    update(options.output, device_kind, kernel, options.head_dim, chosen.launch)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    kernels: tuple[Kernel, ...] = ("decode", "chunks") if options.kernel == "both" else (options.kernel,)
    for kernel in kernels:
        tune(kernel, options)


if __name__ == "__main__":
    main()
