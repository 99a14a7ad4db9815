"""The compiled steps of an engine, one per bucket: all there before the first request, if asked for.

After `compile_all` nothing compiles any more: a call with another shape is an error of the executable
itself. An engine that skips it (enforce_eager) compiles each bucket when it is first met.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Protocol

import jax
from tqdm import tqdm

from jaxllm.runner.executable_store import ExecutableStore

type Signature = tuple[Any, Any]
"""Pytrees of a step's arguments and outputs."""


class Shape(Protocol):
    """What an executable is compiled for, as a `Bucket`; equal ones have one executable."""

    @property
    def name(self) -> str:
        """Of its file."""
        ...

    def __hash__(self) -> int: ...


class Executables[S: Shape]:
    """Compiled executables by bucket, or by another shape."""

    def __init__(
        self,
        lower: Callable[[S], jax.stages.Lowered],
        signature: Callable[[S], Signature],
        store: ExecutableStore | None,
        compiler_options: dict[str, Any],
    ):
        self.lower = lower
        self.signature = signature
        self.store = store
        self.compiler_options = compiler_options
        self.compiled: dict[S, jax.stages.Compiled] = {}
        self.used: set[S] = set()
        """Shapes that were asked for since somebody cleared this."""
        # Tracing holds the interpreter lock: doing one at a time leaves the other cores to the compiler.
        self.tracing = threading.Lock()
        self.cancelled = threading.Event()

    def get(self, bucket: S) -> jax.stages.Compiled:
        """The bucket's executable, compiled now if it was not compiled ahead of time."""
        if bucket not in self.compiled:
            self.compiled[bucket] = self.make(bucket)
        self.used.add(bucket)
        return self.compiled[bucket]

    def get_used(self) -> dict[str, jax.stages.Compiled]:
        """Those that were asked for since `used` was cleared, by the names of their shapes."""
        return {shape.name: self.get(shape) for shape in self.used}

    def compile_all(self, buckets: Sequence[S], progress: bool = True) -> None:
        """Loads or compiles every bucket, in parallel, with a progress bar on a terminal."""
        with ThreadPoolExecutor(max_workers=min(len(buckets), os.cpu_count() or 1)) as pool:
            results = pool.map(self.make, buckets)
            bar = tqdm(results, "compiling", len(buckets), disable=None if progress else True, leave=False)
            self.compiled.update(zip(buckets, bar, strict=True))

    def cancel(self) -> None:
        """Gives up what `compile_all` has not begun yet."""
        self.cancelled.set()

    def make(self, bucket: S) -> jax.stages.Compiled:
        """From disk, or lowered and compiled and then stored.

        Raises:
            CancelledError: after `cancel`.
        """
        if self.cancelled.is_set():
            raise CancelledError
        stored = self.store.load(bucket.name, *self.signature(bucket)) if self.store else None
        if stored is not None:
            return stored
        with self.tracing:
            lowered = self.lower(bucket)
        compiled = lowered.compile(compiler_options=self.compiler_options)
        if self.store:
            self.store.save(bucket.name, compiled)
        return compiled
