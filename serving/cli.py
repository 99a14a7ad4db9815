"""The `jaxllm` command: parses the command line, runs a subcommand, and turns errors into messages.

The invariant: a mistake of the user (a flag, a value, a model that does not exist) ends with one message on standard
error and exit code 2, without a traceback; --debug adds it. Other exit codes: 1 for what went wrong outside the
program (a download, a file), 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import tyro
from rich.console import Console
from rich.text import Text

from jaxllm.models.wheel_download import DownloadError
from jaxllm.serving.cli_commands import MODULES, Chat, Command, Generate, Pull

USER_ERROR = 2
OUTSIDE_ERROR = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default this process's); returns the exit code."""
    command = parse(arguments)
    try:
        importlib.import_module(MODULES[type(command)]).run(command)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return OUTSIDE_ERROR
    except ValueError as error:
        _report(error, command.debug)
        return USER_ERROR
    except (DownloadError, OSError) as error:
        _report(error, command.debug)
        return OUTSIDE_ERROR
    return 0


def parse(arguments: Sequence[str] | None = None) -> Generate | Chat | Pull:
    """The command that was typed; help and mistakes are printed and end the program."""
    return tyro.cli(
        Command,
        prog="jaxllm",
        description="Inference and serving of large language models in JAX.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _report(error: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def _drop_output() -> None:
    """Nobody reads standard output any more: without this, Python complains about it once more while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
