"""Where jaxllm keeps what it can make or fetch again: pulled models, compiled programs, tokenizers' merges.

Invariant: deleting the folder loses nothing but time, and the history of what was typed in `jaxllm chat`.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder; it may not exist yet.

    JAXLLM_CACHE names it; by default it is `jaxllm` in XDG_CACHE_HOME, or in ~/.cache.
    """
    if chosen := os.environ.get("JAXLLM_CACHE"):
        return Path(chosen).expanduser().absolute()
    # The XDG specification tells to ignore a relative path.
    user_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (user_cache if user_cache.is_absolute() else Path.home() / ".cache") / "jaxllm"
