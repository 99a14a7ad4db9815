"""What clients do wrong, or on purpose: it harms nobody else, and they are told."""

import concurrent.futures
import contextlib
import itertools
import json
import logging
import re
import socket
import subprocess
import time
from types import SimpleNamespace

import httpx2
import pytest
from fake_async_llm import FakeAsyncLLM, fake_text
from prometheus_client.parser import text_string_to_metric_families
from server_process import fake_server
from test_server_end import EndingServer

from jaxllm.serving import admission, http_protocol, listening
from jaxllm.serving.admission import Admission
from jaxllm.serving.errors import ApiError
from jaxllm.serving.http_protocol import MAX_HEAD_BYTES
from jaxllm.serving.protocol_chat import MAX_MESSAGES, ChatCompletionRequest
from jaxllm.serving.protocol_completions import CompletionRequest
from jaxllm.serving.requests import parse_request

BODY = json.dumps({"prompt": "Hello", "seed": 0, "max_tokens": 8}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    with fake_server() as made:
        yield made


def post(server, path="/v1/completions", headers=None, **body):
    return httpx2.post(server.url + path, json={"prompt": "Hello", "seed": 0, "max_tokens": 8} | body, headers=headers)


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@contextlib.contextmanager
def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as made:
        yield made


def answer(connection) -> tuple[int, dict]:
    """Status and body of the next response."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split()[1]), json.loads(body)


def pieces(data: bytes, size: int):
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.parametrize(
    "body", [b"Content-Length: %d\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("together", [True, False])
def test_an_offer_of_http2_changes_nothing(server, body, together):
    """Java's clients make one with every request; twice, as connections are kept."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\nupgrade: h2c\r\n"
    head, _, content = (HEAD + offer + body % (len(BODY), BODY)).partition(b"\r\n\r\n")
    parts = [head + b"\r\n\r\n" + content] if together else [head + b"\r\n\r\n", content]
    with connect(server) as connection:
        for _ in range(2):
            for part in parts:
                connection.sendall(part)
                time.sleep(0.02)
            status, response = answer(connection)
            assert (status, response["choices"][0]["text"]) == (200, fake_text("Hello", 8))


ENDLESS = {
    "many headers": (HEAD, b"x-a: %b\r\n" % (b"v" * 500)),
    "a long header": (HEAD + b"x-a: ", b"v" * 500),
    "a long path": (b"GET /", b"v" * 500),
    "trailers": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x-a: %b\r\n" % (b"v" * 500)),
    "a chunk's extension": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"v" * 500),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_read_before_a_request_is_bounded(kind):
    """Whatever the key: it is not known yet."""
    start, more = ENDLESS[kind]
    with fake_server(api_key=("k",)) as server, connect(server) as connection:
        connection.sendall(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(20 * MAX_HEAD_BYTES // len(more)):
                connection.sendall(more)
            assert b" 431 " in connection.recv(1000)  # or it waits for more, and this for an answer


def test_a_large_head_is_told(server):
    with connect(server) as connection:
        for part in pieces(HEAD + b"x: " + b"v" * MAX_HEAD_BYTES, 8192):
            connection.sendall(part)
        status, body = answer(connection)
        assert (status, body["error"]["code"], set(body["error"])) == (
            431,
            "too_large",
            {"message", "type", "param", "code"},
        )
        assert connection.recv(1) == b""
    assert post(server, headers={"x": "v" * (MAX_HEAD_BYTES // 2)}).status_code == 200


def test_a_head_that_does_not_come_is_given_up(server, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        time.sleep(0.5)  # its body may take longer
        connection.sendall(BODY)
        assert answer(connection)[0] == 200
        time.sleep(0.5)  # and so may the next request
        connection.sendall(HEAD[:20])
        assert answer(connection)[0] == 408
        assert connection.recv(1) == b""
    with connect(server) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("data", [b"garbage\r\n\r\n", HEAD + b"Content-Length: x\r\n\r\n"])
def test_what_is_no_request_gets_the_body_of_every_error(server, data):
    with connect(server) as connection:
        connection.sendall(data)
        status, body = answer(connection)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_taken(server, media_type):
    """Pages of any site may send these to a server on their visitor's machine."""
    for path in ("/v1/completions", "/abort_requests"):
        response = httpx2.post(server.url + path, content=BODY, headers={"content-type": media_type})
        assert error_of(response, 415)["code"] == "unsupported_media_type"
    for given in ("application/json;charset=utf-8", "Application/JSON"):
        response = httpx2.post(f"{server.url}/v1/completions", content=BODY, headers={"content-type": given})
        assert response.status_code == 200


MANY = 200_000


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}, "prompt[0]"),
        (CompletionRequest, {"prompt": [[1.5]] * MANY}, "prompt[0][0]"),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}, "stop[0]"),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}, "logit_bias.0"),
        (CompletionRequest, {"prompt": "a"} | dict.fromkeys((f"field{index}" for index in range(MANY)), 1), "field0"),
        (ChatCompletionRequest, {"messages": [{"role": "x", "content": 1}] * MANY}, "messages[0].role"),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages[0].content[0]"),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}, "messages"),
    ],
)
def test_a_body_full_of_mistakes_costs_what_one_does(kind, body, param):
    """All of a server stands still while a body is checked."""
    raw = json.dumps(body).encode()
    started = time.process_time()
    with pytest.raises(ApiError) as caught:
        parse_request(raw, kind)
    assert time.process_time() - started < 1
    assert caught.value.param == param
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["Hello there"] * 300_000},
        {"prompt": ["x" * 150] * 1028, "n": 2},
        {"bad_words": ["word"] * MANY},
        {"stop": [f"end{index}" for index in range(MANY)]},
        {"stop_token_ids": [*range(MANY), -1]},
        {"logit_bias": dict.fromkeys(map(str, range(MANY)), 1)},
    ],
)
def test_what_is_too_much_is_refused_before_it_is_worked_on(server, body):
    text = json.dumps({"prompt": "a", "max_tokens": 1} | body)
    started = time.process_time()  # of this process, which the server is a thread of
    error_of(httpx2.post(f"{server.url}/v1/completions", content=text, headers={"content-type": "application/json"}))
    assert time.process_time() - started < 1.5


def test_variables_of_a_chat_template_may_have_any_name(server):
    messages = [{"role": "user", "content": "Hi"}]
    for name in ("self", "loop", "context", "raise_exception"):
        body = {"messages": messages, "max_tokens": 4, "chat_template_kwargs": {name: 1}}
        assert httpx2.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200, name


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"priority": 2**40}, "priority"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"stop": ["a"] * 1000}, "stop"),
    ],
)
def test_the_field_that_is_wrong_is_named(server, body, param):
    error = error_of(post(server, **body))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


def metric(server, name, **labels):
    families = text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").text)
    samples = itertools.chain.from_iterable(family.samples for family in families)
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


def ends(server, reason):
    return metric(server, "jaxllm:request_success_total", finished_reason=reason)


def test_answers_that_nobody_waited_for_are_counted(caplog):
    caplog.set_level(logging.INFO, "jaxllm.serving.middleware")
    with fake_server(FakeAsyncLLM(step_seconds=0.01, max_num_seqs=2)) as server:
        assert post(server, headers={"x-request-timeout": "0.05"}, n=2, max_tokens=100).status_code == 504
        assert ends(server, "abort") == 2
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 100, "stream": True}
        ) as stream:
            next(stream.iter_raw())
        while server.engine.running or ends(server, "abort") < 3:
            time.sleep(0.01)
        assert [
            line.endswith("the client left") for line in caplog.messages if " 200 in " in line and "metrics" not in line
        ] == [True]
        assert error_of(post(server, allowed_token_ids=[999]))
        assert post(server).status_code == 200
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(post, server, max_tokens=100)
            while not server.engine.running:
                time.sleep(0.01)
            server.call(server.engine.die)
            assert waiting.result().status_code == 500
        assert [ends(server, reason) for reason in ("abort", "length", "error")] == [3, 1, 1]
        for name in ("request_params_n", "request_prompt_tokens", "request_generation_tokens"):
            assert metric(server, f"jaxllm:{name}_count") == 1, "of those that were answered whole"


def test_retry_after_does_not_count_the_time_when_nobody_was_there(monkeypatch):
    now = 0.0
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now))
    entrance = Admission(max_waiting=20)
    for _ in range(50):
        with entrance.enter("a", 2):
            now += 0.4
        now += 3600
    with contextlib.ExitStack() as stack:
        for index in range(21):
            stack.enter_context(entrance.enter(str(index), 1))
        with pytest.raises(ApiError) as caught:
            stack.enter_context(entrance.enter("late", 1))
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "2"})


def test_a_second_server_does_not_take_a_unix_socket(tmp_path):
    path = str(tmp_path / "socket")
    first = EndingServer(uds=path)
    second = EndingServer(uds=path, wait_for="")
    code, log = second.end()
    assert (code, "another server listens" in log) == (1, True)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=path)) as client:
        assert client.get("http://local/health").status_code == 200
    first.process.kill()
    first.end()
    third = EndingServer(uds=path)  # what the first one left behind is in nobody's way
    third.process.terminate()
    assert third.end()[0] == 0


def test_more_clients_than_a_process_may_usually_have_files(monkeypatch):
    popen = subprocess.Popen

    def with_few_files(command, **options):
        return popen(["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *command], **options)

    monkeypatch.setattr(subprocess, "Popen", with_few_files)
    server = EndingServer(max_waiting_requests=2)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(connect(server))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer(connection)[0] == 200
    server.process.terminate()
    assert server.end()[0] == 0


def test_a_limit_of_files_that_is_too_low_is_told(monkeypatch, caplog):
    monkeypatch.setattr(
        listening, "resource", SimpleNamespace(RLIMIT_NOFILE=0, RLIM_INFINITY=-1, getrlimit=lambda _: (99, 99))
    )
    listening.allow_connections(99)
    assert not caplog.messages
    listening.allow_connections(100)
    assert "ulimit -n" in caplog.text
