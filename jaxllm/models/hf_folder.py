"""The files of a Hugging Face model folder: which there are, and what their JSON says.

Invariant: what is missing or broken is an error that names the file and the remedy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of generation_config.json, and what `SamplingParams` calls them."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object: download it again")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the end-of-sequence tokens of generation_config.json where that has some.

    Raises:
        ValueError: there is no config.json, or a file is broken.
    """
    if not (folder / "config.json").is_file():
        files = [file.name for file in folder.glob("*.gguf")]
        remedy = f"name one of its GGUF files ({files[0]})" if files else "give a Hugging Face model folder"
        raise ValueError(f"{folder} has no config.json: {remedy}")
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        fields |= {} if eos is None else {"eos_token_id": eos}
    return fields


def read_sampling_defaults(folder: Path) -> tuple[tuple[str, float | int], ...]:
    """Sampling parameters that generation_config.json recommends, by the names of `SamplingParams`.

    Raises:
        ValueError: the file is broken.
    """
    file = folder / "generation_config.json"
    fields = read_json(file) if file.is_file() else {}
    found = {name: fields.get(field) for field, name in SAMPLING_FIELDS.items()}
    return tuple((name, value) for name, value in found.items() if value is not None)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights.

    Raises:
        ValueError: there are none, or one that the index names is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        remedy = "download all of it, or save the model with save_pretrained(safe_serialization=True)"
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}: {remedy}")
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{folder / INDEX} has no weight_map: download it again")
    files = [folder / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, named in {INDEX}: download the missing files")
    return files
