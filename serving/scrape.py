"""What a running server tells of itself over HTTP: its metrics at a moment, and its unfinished requests.

The invariant: nothing is asked but what answers without work for the engine, a few times a second at most.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jaxllm.serving.metrics import PREFIX

_TIMEOUT = 5.0
"""Seconds."""

type _Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Sample:
    """A server's metrics at a moment."""

    time: float
    """Of `time.monotonic`."""
    values: Mapping[tuple[str, _Labels], float]
    """By name, without the prefix, and labels."""

    def get(self, name: str, **labels: str) -> float | None:
        """The sum over all labels that are not given; None if there is no such metric."""
        asked = frozenset(labels.items())
        found = [value for (known, own), value in self.values.items() if known == name and asked <= own]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """A metric's values by one of its labels."""
        return {dict(own)[label]: value for (known, own), value in self.values.items() if known == name}

    @property
    def model_name(self) -> str:
        return next((dict(labels)["model_name"] for _, labels in self.values if dict(labels).get("model_name")), "?")


class ServerProbe:
    """Asks one server.

    Args:
        url: its address, which may end in /v1.
        api_key: what it wants to see, if it wants a key.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r} is no address: write http://HOST:PORT")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def sample(self) -> Sample:
        """Its metrics now.

        Raises:
            ValueError: it wants a key, or another one; or it is no server of jaxllm.
            OSError: it cannot be reached.
        """
        status, text = self._get("/metrics")
        if status in (401, 403):
            message = f"{self.url} refuses this key" if self._headers else f"{self.url} wants a key"
            raise ValueError(f"{message}: give one of the server's as --api-key, or in JAXLLM_API_KEY")
        values = _parse(text) if status == 200 else {}
        if not values:
            what = f"/metrics answers {status}" if status != 200 else f"/metrics has nothing that begins with {PREFIX}"
            raise ValueError(f"{self.url} is no server of jaxllm: its {what}")
        return Sample(time.monotonic(), values)

    def requests(self) -> list[dict[str, Any]] | None:
        """Its unfinished requests, or None while it does not tell them: the model is being loaded, the engine hangs."""
        try:
            status, text = self._get("/debug/requests")
        except OSError:  # if the whole server is gone, the next sample says so
            return None
        return json.loads(text)["requests"] if status == 200 else None

    def _get(self, path: str) -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                return response.status, response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(errors="replace")
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise OSError(f"no server answers at {self.url}: {reason or type(error).__name__}") from error


def _parse(text: str) -> dict[tuple[str, _Labels], float]:
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:  # a page of something else
        return {}
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for sample in samples
        if sample.name.startswith(PREFIX)
    }
