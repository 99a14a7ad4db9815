"""Where an engine's model comes from: its configuration, its tokenizer's place and its weights, by `load_format`.

Invariant: files stay open only inside the `with` statement, in which the weights are loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from jaxllm.config import EngineConfig, LoadFormat
from jaxllm.model_config import ModelConfig
from jaxllm.models.checkpoint import open_checkpoint
from jaxllm.models.dummy import dummy_model, dummy_params
from jaxllm.models.hub import resolve_model
from jaxllm.models.loader import load_params
from jaxllm.models.orbax_folder import PARAMS, find_tokenizer, is_orbax_folder, read_model


@dataclass(frozen=True)
class ModelSource:
    """A model that is about to be loaded."""

    config: ModelConfig
    tokenizer_path: Path | None
    """The file or folder that has the model's tokenizer; None if it has none."""
    load: Callable[[Mapping[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
    """Makes the parameters of these specs, by dotted path."""


def open_source(config: EngineConfig) -> AbstractContextManager[ModelSource]:
    """The source `config.load_format` names, of the model `config.model` names.

    Raises:
        ValueError: there is no such model, it is broken, or it is not supported.
    """
    return _OPENERS[config.load_format](config)


@contextmanager
def _open_checkpoint(config: EngineConfig) -> Iterator[ModelSource]:
    path = resolve_model(config.model)
    if is_orbax_folder(path):
        model = read_model(path)
        # Imported only here: orbax takes a second.
        restore = importlib.import_module("jaxllm.models.orbax_checkpoint").restore_params
        yield ModelSource(model, find_tokenizer(path), partial(restore, path / PARAMS, model))
        return
    with open_checkpoint(path) as checkpoint:
        yield ModelSource(checkpoint.config, path, partial(load_params, checkpoint))


@contextmanager
def _open_dummy(config: EngineConfig) -> Iterator[ModelSource]:
    model, path = dummy_model(config.model)
    tokenizer_path = find_tokenizer(path) if path is not None and path.is_dir() else path
    yield ModelSource(model, tokenizer_path, partial(dummy_params, model, seed=config.seed))


_OPENERS: Mapping[LoadFormat, Callable[[EngineConfig], AbstractContextManager[ModelSource]]] = {
    "auto": _open_checkpoint,
    "dummy": _open_dummy,
}
