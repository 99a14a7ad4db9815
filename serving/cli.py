"""The `jaxllm` command: parses the command line, runs a subcommand, and turns errors into messages.

The invariant: whatever goes wrong ends with one message on standard error that fits on a screen, without a traceback
(--debug shows it), and with an exit code that tells whose turn it is: see `EXIT_CODES`.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import tyro
from rich.console import Console
from rich.text import Text

from jaxllm.logs import set_up_log
from jaxllm.models.wheel_download import DownloadError
from jaxllm.serving.cli_commands import MODULES, AnyCommand, Command

OUTSIDE_ERROR = 1
USER_ERROR = 2
INTERRUPTED = 130

EXIT_CODES = (
    "Exit codes: 0 done; 1 something failed that the command line cannot help (a network, a file, memory, a bug); "
    "2 a flag, a value or an input is wrong; 130 stopped with Ctrl-C."
)

EXTRAS = {
    **dict.fromkeys(("starlette", "uvicorn", "pydantic", "prometheus_client", "msgspec"), "serve"),
    **dict.fromkeys(("aiohttp", "matplotlib"), "bench"),
}
"""Packages that only some commands need, and what installs them."""

_MAX_MESSAGE_LINES = 15
_OUT_OF_MEMORY = (
    "There is not enough memory. What needs less: a lower --max-model-len, --max-num-seqs or --kv-cache-memory-bytes, "
    "a smaller --dtype, a smaller model."
)
_UNEXPECTED = (
    "This was not foreseen: it is a bug of jaxllm, or of a library it uses. --debug shows where it happened, "
    "`jaxllm env` prints what else a report of it needs."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default this process's); returns the exit code."""
    _mend_streams()
    try:
        try:
            return _run(parse(arguments))
        finally:
            # Not left to Python's end, which reports it where a reader like `head` has gone.
            sys.stdout.flush()
    except KeyboardInterrupt:
        # On a line of its own, behind a progress bar and the terminal's ^C.
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return OUTSIDE_ERROR


def parse(arguments: Sequence[str] | None = None) -> AnyCommand:
    """The command that was typed; help and mistakes are printed and end the program."""
    # tyro looks at standard output only, also for what goes to standard error, and knows no NO_COLOR.
    tyro._experimental_options["ansi_codes"] = (
        sys.stdout.isatty() and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    )
    return tyro.cli(
        Command,
        prog="jaxllm",
        description=f"Inference and serving of large language models in JAX.\n\n{EXIT_CODES}",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _mend_streams() -> None:
    """Have all three streams, and lose no answer to a character that one of them does not know."""
    if sys.stdin is None:  # closed, and the next file to be opened would get its number
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _run(command: AnyCommand) -> int:
    try:
        set_up_log()
        importlib.import_module(MODULES[type(command)]).run(command)
    except BrokenPipeError:
        raise
    except ValueError as error:
        _report(error, str(error), command.debug)
        return USER_ERROR
    except ModuleNotFoundError as error:
        _report(error, _describe_missing(error), command.debug)
        return OUTSIDE_ERROR
    except (DownloadError, OSError) as error:
        _report(error, str(error), command.debug)
        return OUTSIDE_ERROR
    except Exception as error:  # noqa: BLE001 - the last resort: a user is shown a message, not a stack
        _report(error, _describe_unexpected(error), command.debug)
        return OUTSIDE_ERROR
    return 0


def _report(error: Exception, message: str, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def _describe_missing(error: ModuleNotFoundError) -> str:
    extra = EXTRAS.get((error.name or "").split(".")[0])
    if extra is None:
        return _describe_unexpected(error)
    return f"this command needs the package {error.name}: pip install 'jaxllm[{extra}]'"


def _describe_unexpected(error: Exception) -> str:
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    if len(lines) > _MAX_MESSAGE_LINES:
        lines = [*lines[:_MAX_MESSAGE_LINES], "..."]
    is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
    return "\n".join([*lines, _OUT_OF_MEMORY if is_memory else _UNEXPECTED])


def _drop_output() -> None:
    """Nobody reads standard output any more: without this, Python complains about it once more while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
