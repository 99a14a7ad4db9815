"""What the host says about itself and the program: what a figure's report needs besides the figure. No JAX.

Invariant: what cannot be found out is None, and no reason for a benchmark to fail.
"""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_MAX_SECONDS = 30


def cpu_model() -> str:
    """The processor's name."""
    # Only some architectures have this line.
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.machine()


def gpu_driver() -> str | None:
    """Version of the NVIDIA driver."""
    answer = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def git_commit() -> str | None:
    """The commit of the checkout this module lies in, with "-dirty" if files were changed since."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return None
    return _output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def command_line() -> str:
    """What was typed, without the program's folder."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MAX_SECONDS)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
