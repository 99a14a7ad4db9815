"""Commands that look at something or move it, and have no flags of an engine: see `cli_commands`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from jaxllm.config import DType, LoadFormat


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """What every command has."""

    debug: FlagCreatePairsOff[bool] = False
    """Show where an error came from."""


@dataclass(frozen=True)
class Top(CommandFlags):
    """Watch a server that runs: requests, tokens per second, step times, K/V pools, memory. Ctrl-C ends it.

    Example: jaxllm top http://localhost:8000
    """

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Address of a server of jaxllm."""
    api_key: Annotated[str | None, arg(metavar="KEY", help_behavior_hint="")] = field(default=None, repr=False)
    """Key of the server, if it wants one; by default what JAXLLM_API_KEY holds."""
    once: FlagCreatePairsOff[bool] = False
    """Print one look at it and end."""
    interval: float = 1.0
    """Seconds between two looks. Rates are those in between."""


@dataclass(frozen=True)
class Convert(CommandFlags):
    """Write a model to a folder that any number of devices loads fast, each only its part (Orbax's format).

    Example: jaxllm convert smollm2-135m-instruct models/smollm2 --dtype bfloat16
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Short name, GGUF file, Hugging Face folder, or hub id."""
    output: Annotated[Positional[str], arg(metavar="OUT")]
    """Folder to make. It is then a MODEL."""
    dtype: DType = "auto"
    """Type of the weights. auto: the checkpoint's, which is float32 if it is quantised."""
    load_format: LoadFormat = "auto"
    """dummy: the weights are random, and MODEL may be a shape that is built in."""
    seed: int = 0
    """Seed of random weights."""
    device: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Where the model lies meanwhile, as "cpu" or "cuda:0"; by default what JAX finds first."""
    tensor_parallel_size: int = 1
    """Number of devices it is split over meanwhile. What is written does not depend on it."""


@dataclass(frozen=True)
class Pull(CommandFlags):
    """Download a model into the cache folder and print its path; without a name, list those that have one.

    Example: jaxllm pull smollm2-135m-instruct
    """

    name: Annotated[Positional[str | None], arg(metavar="[NAME]", help_behavior_hint="")] = None
    """Short name of the model."""


@dataclass(frozen=True)
class Models(CommandFlags):
    """List the model families that are supported, and the models that can be pulled.

    Example: jaxllm models
    """


@dataclass(frozen=True)
class Env(CommandFlags):
    """Print what a bug report needs: versions, machine, devices, settings.

    Example: jaxllm env --json
    """

    json: FlagCreatePairsOff[bool] = False
    """Print it as JSON."""
