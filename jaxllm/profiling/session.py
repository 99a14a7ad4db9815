"""Recording a profile of a running engine.

JAX records it, in its own layout: the folder of a session opens in Perfetto and in XProf as it is. Steps run as they
always do, in CUDA graphs, but one a call: of a loop in a graph only the first turn is recorded. Nothing is compiled for
a session. Invariants: what runs on the device within a session was launched within it; the engine's steps wait for
`end` only, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

import jax

from jaxllm.profiling.host_work import SETTLED
from jaxllm.profiling.session_facts import SessionFacts
from jaxllm.profiling.stages import ATTENTION, HEAD, MLP
from jaxllm.profiling.work import Sizes
from jaxllm.runner.annotations import annotate
from jaxllm.runner.device_memory import shard_bytes
from jaxllm.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MEMORY_FILE = "memory.pprof"
"""What lies in the devices' memory, and who put it there: for `pprof`."""
_RUNS = Path("plugins", "profile")
"""Where XProf looks for sessions."""
_ANNOTATED_BY_HAND = 2
"""Host tracing that includes `TraceAnnotation`."""


class ProfilerSession:
    """A session that runs from when it is made until `end`; then `write` is due.

    Args:
        runner: the engine's; its launched steps are waited for.
        folder: where to write to. Several sessions may be written to one folder.
        num_unread: steps that are launched and not read yet.

    Raises:
        ValueError: another session runs in this process.
        OSError: the folder cannot be written to.
    """

    def __init__(self, runner: ModelRunner, folder: Path, num_unread: int):
        self.unprofiled_step_ms: float | None = None
        """Milliseconds of a step with nothing recorded, where somebody measured them for comparison."""
        self.is_written = False
        """It is, or it is lost: another session can begin."""
        self._is_recording = True
        self._runner, self._num_unread = runner, num_unread
        self._used: dict[str, jax.stages.Compiled] = {}
        # Seconds are too coarse for JAX's own name to be the session's alone.
        name = f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}_{time.time_ns() // 1000 % 10**6:06d}"
        self.folder = folder / _RUNS / name
        self.folder.mkdir(parents=True)
        self._settle()
        for executables in (runner.executables, runner.scoring):
            executables.used.clear()
        options = jax.profiler.ProfileOptions()
        options.session_id = name
        options.host_tracer_level = _ANNOTATED_BY_HAND
        options.python_tracer_level = 0  # every call of a Python function: that would be another program
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            self.folder.rmdir()
            raise ValueError(f"no profile can be recorded: {error}") from error

    def end(self) -> None:
        """Ends it, between two steps of the engine: those that are launched from now on are no part of it.

        Raises:
            OSError: the folder cannot be written to any more; the session is lost.
        """
        try:
            self._settle()
            with annotate(SETTLED):
                runner = self._runner
                self._used = {**runner.executables.get_used(), **runner.scoring.get_used()}
                jax.profiler.save_device_memory_profile(self.folder / MEMORY_FILE)
        except BaseException:
            self.is_written = True
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.stop()
            raise

    def write(self) -> Path:
        """Stops the recorder, which takes seconds; may run in a thread, beside the engine's steps.

        Returns:
            The session's folder, which holds everything that was recorded.
        """
        try:
            self.stop()
            self._facts().write(self.folder)
        finally:
            self.is_written = True
        return self.folder

    def stop(self) -> None:
        """Stops the recorder, once.

        Where JAX cannot write, it keeps what it recorded, and begins nothing else until it is told to stop again.
        """
        if self._is_recording:
            jax.profiler.stop_trace()
            self._is_recording = False

    def _settle(self) -> None:
        """Waits for what was launched."""
        jax.block_until_ready((self._runner.cache, self._runner.state))

    def _facts(self) -> SessionFacts:
        runner = self._runner
        # As the runner names its functions, and JAX the programs of functions.
        programs = {name: f"jit_{name.replace('-', '_')}" for name in self._used}
        texts = {programs[name]: _text_of(compiled, programs[name]) for name, compiled in self._used.items()}
        dtype = runner.programs.dtype.name
        sizes = Sizes.of(runner.model, dtype, runner.mesh.size, _weight_bytes(runner))
        kind = runner.mesh.devices.flat[0].device_kind
        return SessionFacts(
            _describe(runner, kind), kind, sizes, programs, texts, self._num_unread, self.unprofiled_step_ms
        )


def _text_of(compiled: jax.stages.Compiled, program: str) -> str:
    """Empty where XLA cannot print it: the scopes in the trace have to do then."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        logger.warning("the text of %s is missing, and stages of its kernels may be: %s", program, error)
        return ""


def _describe(runner: ModelRunner, device_kind: str) -> dict[str, str | int]:
    return {
        "model": runner.config.model,
        "dtype": runner.programs.dtype.name,
        "devices": f"{runner.mesh.size} x {device_kind}",
        "graphs": _graphs(runner),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _graphs(runner: ModelRunner) -> str:
    """Whether what was recorded ran as CUDA graphs."""
    return "none" if runner.programs.platform == "cpu" or runner.config.enforce_eager else "on"


def _weight_bytes(runner: ModelRunner) -> dict[str, int]:
    """Bytes that a step reads on one device, by stage: everything but the table that tokens are looked up in."""
    weights = {ATTENTION: 0, MLP: 0, HEAD: 0}
    tied = runner.model.tie_word_embeddings
    for name, spec in runner.programs.definition.specs.items():
        stage = _stage_of_parameter(name, tied)
        if stage is not None:
            weights[stage] += shard_bytes([spec])
    return weights


def _stage_of_parameter(name: str, tied: bool) -> str | None:
    top, *rest = name.split(".")
    if top == "layers":
        return MLP if rest[1].startswith("mlp") else ATTENTION
    return HEAD if top != "embed" or tied else None
