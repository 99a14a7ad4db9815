"""The folder that a converted model lies in: its facts and its tokenizer, beside the parameters in Orbax's format.

    config.json       facts of the model, in jaxllm's own words; written last, so that half a folder is none
    params/           see orbax_checkpoint.py
    tokenizer files   a Hugging Face folder's as they were, or tokenizer.gguf: a GGUF file without its tensors

Invariant: nothing here needs the orbax package, which takes a second to import.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from jaxllm.model_config import LayerKind, ModelConfig, RopeConfig
from jaxllm.models.hf_folder import read_json

CONFIG, PARAMS, TOKENIZER_GGUF = "config.json", "params", "tokenizer.gguf"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""A folder with one of them has a tokenizer."""
_FORMAT_KEY, _FORMAT = "jaxllm_format", 2
_COPIED = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt")


def is_orbax_folder(path: Path) -> bool:
    """Whether a converted model lies there, whole."""
    return (path / PARAMS).is_dir() and (path / CONFIG).is_file() and _FORMAT_KEY in read_json(path / CONFIG)


def check_free(folder: Path) -> None:
    """Raises ValueError unless a model can be written there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name a new folder, or remove it")


def write_facts(folder: Path, model: ModelConfig, tokenizer: Path | None) -> None:
    """Makes the folder with the parameters a model.

    Args:
        model: as the checkpoint it came from has it.
        tokenizer: a GGUF file or Hugging Face folder that has the model's.
    """
    if tokenizer is not None and tokenizer.is_file():
        # Imported only here: no other format needs the gguf package.
        importlib.import_module("jaxllm.models.gguf_file").copy_metadata(tokenizer, folder / TOKENIZER_GGUF)
    elif tokenizer is not None:
        for file in (file for pattern in _COPIED for file in tokenizer.glob(pattern) if file.is_file()):
            shutil.copyfile(file, folder / file.name)
    fields = {_FORMAT_KEY: _FORMAT, "model": dataclasses.asdict(model)}
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def read_model(folder: Path) -> ModelConfig:
    """What `write_facts` was told.

    Raises:
        ValueError: the folder is of another format, or broken.
    """
    fields = read_json(folder / CONFIG)
    if fields.get(_FORMAT_KEY) != _FORMAT:
        raise ValueError(f"{folder} has format {fields.get(_FORMAT_KEY)}, not {_FORMAT}: convert the model again")
    try:
        model = _tuples(fields["model"])
        layers = tuple(
            LayerKind(kind["window"], kind["rope"] and RopeConfig(**kind["rope"])) for kind in model["layers"]
        )
        return ModelConfig(**model | {"rope": RopeConfig(**model["rope"]), "layers": layers})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} does not describe a model ({error}): convert the model again") from error


def find_tokenizer(folder: Path) -> Path | None:
    """The file or folder that has the tokenizer of a model folder, converted or not; None if there is none."""
    if (folder / TOKENIZER_GGUF).is_file():
        return folder / TOKENIZER_GGUF
    return folder if any((folder / name).is_file() for name in TOKENIZER_FILES) else None


def _tuples(value: Any) -> Any:
    """The same with tuples, which JSON does not have, in place of lists."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {name: _tuples(part) for name, part in value.items()} if isinstance(value, dict) else value
