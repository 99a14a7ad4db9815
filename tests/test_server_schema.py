"""Schemathesis against the server's own description: no 5xx, and no response that the description does not foresee."""

import subprocess
import sys

import httpx2
from server_process import fake_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
SECONDS = 30


def test_schemathesis(tmp_path):
    program = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    options = ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-examples", "25", "--no-color"]
    options += ["--max-time", str(SECONDS), "--generation-deterministic", "--continue-on-failure"]
    with fake_server() as server:
        command = [sys.executable, "-c", program, "run", f"{server.url}/openapi.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        metrics = httpx2.get(f"{server.url}/metrics").text
    # It has to have come past the checks of the request, too.
    for route in ("/v1/chat/completions", "/v1/completions", "/detokenize"):
        assert f'route="{route}",status="200"' in metrics
        assert f'route="{route}",status="400"' in metrics
