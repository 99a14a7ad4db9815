"""What can be typed after `jaxllm`: one frozen dataclass per subcommand, from which tyro makes flags and help.

The invariant: no flag is written down twice. Engine and sampling flags are the fields of `EngineConfig` and
`SamplingParams`, with their defaults and their docstrings as help; only what differs on a command line is said here.
This module imports nothing heavy, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg, subcommand

from jaxllm.config import EngineConfig
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineFlags(EngineConfig):
    """How the model is loaded and run."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]

    def __post_init__(self) -> None:
        """No check here, where the message would name tyro's insides: `make_config` checks."""

    def make_config(self) -> EngineConfig:
        return EngineConfig(**get_fields(self))


@dataclass(frozen=True)
class SamplingFlags(SamplingParams):
    """How an answer is sampled and when it ends."""

    # `--seed` is the engine's, and makes a whole run repeatable; this one is every request's own.
    seed: Annotated[int | None, arg(name="sampling-seed")] = None
    max_tokens: int | None = 256
    # Given once per value: a flag that takes many values would swallow the prompts behind it.
    stop: UseAppendAction[tuple[str, ...]] = ()
    stop_token_ids: UseAppendAction[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        """No check here, where the message would name tyro's insides: `make_params` checks."""

    def make_params(self) -> SamplingParams:
        return SamplingParams(**get_fields(self))


@dataclass(frozen=True)
class ChatSamplingFlags(SamplingFlags):
    """How an answer is sampled and when it ends."""

    max_tokens: int | None = 512


@dataclass(frozen=True)
class PromptFlags:
    """What the model is given."""

    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="[PROMPT ...]")] = ()
    """Texts to complete, all in one batch; without any, standard input is read, one prompt a line."""
    chat: FlagCreatePairsOff[bool] = False
    """Put each prompt to the model as a user's message, in its chat template."""


@dataclass(frozen=True)
class Generate:
    """Complete prompts, and print each with its answer."""

    engine: EngineFlags
    prompt: PromptFlags = field(default_factory=PromptFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    debug: FlagCreatePairsOff[bool] = False
    """Show where an error came from."""


@dataclass(frozen=True)
class Chat:
    """Talk with a model. Ctrl-C stops an answer; /reset forgets the conversation; /exit or Ctrl-D leaves."""

    engine: EngineFlags
    system: str | None = None
    """Instructions that the conversation begins with."""
    sampling: ChatSamplingFlags = field(default_factory=ChatSamplingFlags)
    debug: FlagCreatePairsOff[bool] = False
    """Show where an error came from."""


@dataclass(frozen=True)
class Pull:
    """Download a model into the cache folder; without a name, list those that have one."""

    name: Annotated[Positional[str | None], arg(metavar="[NAME]")] = None
    """Short name of the model."""
    debug: FlagCreatePairsOff[bool] = False
    """Show where an error came from."""


Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Pull, subcommand("pull")]
)

MODULES: dict[type, str] = {
    Generate: "jaxllm.serving.cli_generate",
    Chat: "jaxllm.serving.cli_chat",
    Pull: "jaxllm.serving.cli_pull",
}
"""The module whose `run` executes a command; imported only then, because most of them import JAX."""


def get_fields(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass as keyword arguments."""
    return {item.name: getattr(instance, item.name) for item in dataclasses.fields(instance)}
