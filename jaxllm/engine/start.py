"""Starting an engine core: from the user's choices to a runner whose steps are compiled.

Invariant: what is wrong with the choices or the model is a ValueError before any weight is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.model_config import ModelConfig
from jaxllm.models.hub import resolve_model
from jaxllm.models.source import open_source
from jaxllm.parallel.mesh import make_mesh, prepare_devices
from jaxllm.parallel.partition import split_over
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.scheduling.policy_choice import make_order

logger = logging.getLogger(__name__)


def start_core(config: EngineConfig, take_source: Callable[[ModelConfig, Path | None], None]) -> EngineCore:
    """An engine core that is ready.

    Args:
        config: the user's choices; `core.runner.config` has them resolved.
        take_source: gets the model's facts and the place of the tokenizer (None: there is none) before weights load.

    Raises:
        ValueError: the model, a field or their combination is not usable; the message says why.
    """
    started = time.perf_counter()
    make_order(config.scheduling_policy)  # for its errors
    make_progress_lock()
    prepare_devices(config)
    with open_source(config) as source:
        mesh = make_mesh(config)
        on_mesh = split_over(source.config, mesh.size)
        resolved = config.resolve(on_mesh, mesh.devices.flat[0].platform)
        take_source(source.config, resolve_model(config.tokenizer) if config.tokenizer else source.tokenizer_path)
        runner = ModelRunner(resolved, on_mesh, mesh)
        runner.start(source.load)
    core = EngineCore(runner)
    seconds, size = time.perf_counter() - started, runner.size
    logger.info("%s ready after %.1f s, K/V cache of %d tokens", config.model, seconds, size.num_tokens)
    return core


def make_progress_lock() -> None:
    """Makes the lock that all progress bars share, before the threads that compile need it.

    In a thread of its own: Ctrl-C, which reaches the main one only, would leave it locked for ever.
    """
    thread = threading.Thread(target=tqdm.get_lock)
    thread.start()
    thread.join()
