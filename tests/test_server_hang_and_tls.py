"""A real server process whose engine hangs, and one that speaks HTTPS."""

import concurrent.futures
import os
import shutil
import signal
import ssl
import subprocess
import time

import httpx2
import openai
import pytest
from served_model import FLAGS, write_served_model
from server_process import ServerProcess, events

ENDLESS = {"prompt": ["a"] * 40, "max_tokens": 500, "ignore_eos": True}
"""Takes longer than any test waits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Only the first server compiles; the other finds its programs."""
    place = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(place / "cache"))
        yield write_served_model(place / "model")


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as made:
        yield made


def complete(server, **body):
    return httpx2.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 8} | body, timeout=60)


def test_an_engine_that_hangs(model, tmp_path, pool):
    flags = [str(model), *FLAGS, "--engine-timeout", "2"]
    with ServerProcess(flags, tmp_path / "log") as server:
        server.wait_ready()
        waiting = [pool.submit(complete, server, **ENDLESS, stream=stream) for stream in (False, True)]
        while httpx2.get(f"{server.url}/load").json()["server_load"] < 2:
            time.sleep(0.01)
        engine_pid = server.engine_pid()
        os.kill(engine_pid, signal.SIGSTOP)
        stopped = time.monotonic()
        whole, streamed = (one.result() for one in waiting)
        assert 2 <= time.monotonic() - stopped < 5
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_dead")
        assert "hangs: no step was finished for 2 s" in whole.json()["error"]["message"]
        assert streamed.status_code == 500 or events(streamed)[-1]["error"]["code"] == "engine_dead"
        assert complete(server).status_code == httpx2.get(f"{server.url}/health").status_code == 503
        assert "hangs" in httpx2.get(f"{server.url}/health").json()["error"]["message"]
        assert httpx2.get(f"{server.url}/metrics").status_code == 200
        assert server.process.wait(15) == 1
        assert not os.path.exists(f"/proc/{engine_pid}"), "it is not left behind"
        assert "hangs" in server.log and "Traceback" not in server.log


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate for 127.0.0.1 and of its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("making a certificate needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    extensions = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    done = subprocess.run([*command, *extensions, "-keyout", key, "-out", made], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made, key


def test_https_and_a_log_at_debug(model, certificate, tmp_path):
    made, key = certificate
    flags = [str(model), *FLAGS, "--ssl-certfile", str(made), "--ssl-keyfile", str(key), "--api-key", "k"]
    trusting = ssl.create_default_context(cafile=made)
    log = tmp_path / "log"
    with ServerProcess(flags, log, JAXLLM_LOG="debug") as server, httpx2.Client(verify=trusting) as http:
        assert server.url.startswith("https://127.0.0.1:")
        while http.get(f"{server.url}/health").status_code != 200:
            assert server.process.poll() is None, server.log
            time.sleep(0.05)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", http_client=http) as client:
            asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "seed": 1}
            whole = client.completions.create(**asked).choices[0].text
            assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole
        with pytest.raises(httpx2.ConnectError, match="self-signed"):
            httpx2.get(f"{server.url}/health")
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{server.url.replace('https', 'http')}/health")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    # Both processes heed JAXLLM_LOG, and say everything once.
    lines = server.log.splitlines()
    steps = [line for line in lines if "DEBUG jaxllm.engine.step_log: step: " in line]
    assert len(steps) >= 2 * 20
    # Two lines of one millisecond may be equal; with two handlers every line would be there twice.
    assert len(set(lines)) > 0.9 * len(lines)
    assert not any("jax._src" in line for line in lines)
