"""The tokenizer of a Hugging Face folder: tokenizer.json, its settings and its chat templates.

Invariant: text becomes the very tokens that transformers' AutoTokenizer makes of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from jaxllm.models.hf_folder import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MATCHING = ("special", "normalized", "lstrip", "rstrip", "single_word")


def hf_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; empty if the folder has neither."""
    files = [folder / "special_tokens_map.json", folder / "tokenizer_config.json"]
    settings: dict[str, Any] = {}
    for file in files:
        if file.is_file():
            settings |= {name: value for name, value in read_json(file).items() if value is not None}
    return settings


def hf_backend(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """The folder's tokenizer; a SentencePiece model is converted by the optional transformers package.

    Raises:
        ValueError: the folder has no tokenizer, it is broken, or it needs transformers, which is missing.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _convert(folder)
    backend = _read(file)
    backend.no_truncation()
    backend.no_padding()
    _add_tokens(backend, settings, file)
    return backend


def hf_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Text of the tokens with a role, by their names ("bos_token")."""
    given = {name: settings[name] for name in _SPECIAL_TOKENS if name in settings}
    return {name: token if isinstance(token, str) else token["content"] for name, token in given.items()}


def hf_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; empty if the folder has none. Files win over tokenizer_config.json."""
    given = settings.get("chat_template") or {}
    if isinstance(given, list):
        given = {template["name"]: template["template"] for template in given}
    templates = {"default": given} if isinstance(given, str) else dict(given)
    legacy = folder / "chat_template.json"
    if legacy.is_file() and (template := read_json(legacy).get("chat_template")):
        templates["default"] = template
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return templates | {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def _read(file: Path) -> Tokenizer:
    content = file.read_text(encoding="utf-8", errors="replace")
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with the file
        raise ValueError(f"{file} cannot be read ({error}): download it again, or update tokenizers") from error


def _add_tokens(backend: Tokenizer, settings: Mapping[str, Any], file: Path) -> None:
    """Tokens that only tokenizer_config.json declares, as fine-tuned models have them."""
    declared = settings.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(key), entry) for key, entry in declared.items()):
        if index in backend.get_added_tokens_decoder():
            continue
        options = {name: entry[name] for name in _MATCHING if name in entry}
        backend.add_tokens([AddedToken(entry["content"], **options)])
        if backend.token_to_id(entry["content"]) != index:
            raise ValueError(
                f"{file} does not go with its tokenizer_config.json: token {entry['content']!r} should have id "
                f"{index}. Download both again"
            )


def _convert(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.model").is_file():
        remedy = "download it, or name another folder with tokenizer="
        raise ValueError(f"{folder} has no tokenizer.json: {remedy}")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"{folder} has a tokenizer.model but no tokenizer.json: pip install 'jaxllm[hf]' to convert it"
        ) from error
    backend = getattr(transformers.AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{folder}/tokenizer.model cannot be converted: add the model's tokenizer.json")
    return backend
