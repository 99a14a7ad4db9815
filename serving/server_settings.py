"""What can be chosen about the server: plain values, from which the command line makes its flags.

The invariant: nothing here is about the engine; that is `EngineConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

KEYS_VARIABLE = "JAXLLM_API_KEY"
"""Holds one key, or several with commas between them."""

SERVER_TOPICS = {
    "server": "host",
    "access": "api_key",
    "limits": "max_waiting_requests",
    "chat": "chat_template",
    "observability": "log_level",
}
"""What the fields are about: a topic begins at the field named here, as in `ENGINE_TOPICS`."""


@dataclass(frozen=True)
class ServerSettings:
    """Every choice a user can make about the server.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and the remedy.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one of the machine's."""
    port: int = 8000
    """Port to listen on; 0 is one that is free, which the log says."""
    uds: str | None = None
    """Unix socket to listen on, instead of host and port."""
    root_path: str = ""
    """Where a proxy in front serves these routes, as /llm."""
    served_model_name: tuple[str, ...] = ()
    """Name that requests call the model by; by default MODEL. Several may be given, answers have the first."""
    ssl_keyfile: str | None = None
    """File of the private key for HTTPS."""
    ssl_certfile: str | None = None
    """File of the certificate for HTTPS."""
    ssl_ca_certs: str | None = None
    """File of certificates; clients have to show one that they signed."""
    in_process: bool = False
    """Run the engine in a thread of the server, for debugging."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Key that every route but /health and /ping wants as "Authorization: Bearer KEY"; several may be given. By default
    what JAXLLM_API_KEY holds, where other users of the machine cannot read it."""
    allowed_origins: tuple[str, ...] = ()
    """Origin whose pages may use the server from a browser (CORS), or *; several may be given."""
    allow_credentials: bool = False
    """Let those pages send cookies along."""

    max_waiting_requests: int = 1024
    """Answers that may wait while --max-num-seqs others run; a request beyond is refused with 429."""
    request_timeout: float | None = None
    """Seconds after which an answer is given up with 504; the header X-Request-Timeout can ask for fewer."""
    max_request_bytes: int = 32 * 2**20
    """Largest body of a request; a larger one is refused with 413."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have to finish after SIGTERM; then they are aborted."""
    engine_timeout: float = 60.0
    """Seconds without a finished step, while there is work, after which the engine counts as dead."""

    chat_template: str | None = None
    """File of a Jinja template that replaces the model's."""
    trust_request_chat_template: bool = False
    """Let a request bring its own chat_template."""
    default_chat_template_kwargs: str | None = None
    """JSON object of variables of the chat template; a request's chat_template_kwargs go before them."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Least important messages that are logged; info has a line per request, debug one per step of the engine. By default
    what JAXLLM_LOG says, or info."""
    log_prompts: bool = False
    """Log the texts of prompts and answers, too."""
    vllm_metrics: bool = False
    """Give every metric a second time under vLLM's prefix, for dashboards that were made for it."""
    profiler_dir: str | None = None
    """Folder that POST /start_profile and /stop_profile record profiles in; without it they are refused."""
    enable_force_include_usage: bool = False
    """End every stream with its usage, as if it had asked for it."""

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("max_waiting_requests", 0), ("max_request_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small: use {least} or above")
        for name in ("request_timeout", "shutdown_timeout", "engine_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} is not a time: use seconds, 0 or above")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(
                f"root_path={self.root_path!r} does not begin with a slash: write {'/' + self.root_path!r}"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile belong together: give both, or neither")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "chat_template"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}={path!r} is not a file")
        if "" in self.api_key:
            raise ValueError("api_key='' is empty: give a key, or leave the flag away to let everybody in")
