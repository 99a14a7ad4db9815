"""Operating the server, over a fake engine: who may enter, limits, ends of requests, what is measured and logged."""

import asyncio
import concurrent.futures
import json
import logging
import time

import httpx2
import pytest
from fake_async_llm import FakeAsyncLLM, fake_text
from prometheus_client.parser import text_string_to_metric_families
from server_process import events, fake_server

from jaxllm.serving import api_health
from jaxllm.serving.server_settings import ServerSettings

STEP = 0.01
LONG = {"prompt": "Hello", "max_tokens": 100, "seed": 0}
"""A request that takes a second on a `slow` server."""


@pytest.fixture
def slow():
    with fake_server(FakeAsyncLLM(step_seconds=STEP, max_num_seqs=2), max_waiting_requests=1) as made:
        yield made


def complete(server, **body):
    return httpx2.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "seed": 0, "max_tokens": 8} | body)


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


def wait_until(is_true):
    deadline = time.monotonic() + 5
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(8) as made:
        yield made


def metric(server, name, **labels):
    text = httpx2.get(f"{server.url}/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} {labels} in {text}")


def test_keys():
    with fake_server(api_key=("first", "second")) as server:
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing", "/debug/requests", "/load"):
            error = error_of(httpx2.get(server.url + path), 401)
            assert error["code"] == "invalid_api_key"
        for key in ("first", "second"):
            found = httpx2.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert found.status_code == 200
        for header in ("Bearer third", "Bearer", "first", "Basic first", "Bearer firs", "Bearer ä".encode()):
            found = httpx2.get(f"{server.url}/v1/models", headers={"Authorization": header})
            assert found.status_code == 401, header
        assert httpx2.get(f"{server.url}/health").status_code == httpx2.get(f"{server.url}/ping").status_code == 200
        assert "x-request-id" in httpx2.get(f"{server.url}/v1/models").headers


def test_keys_are_not_shown():
    assert "first" not in repr(ServerSettings(api_key=("first",)))


def test_browsers_of_named_origins_may_use_it():
    with fake_server(api_key=("k",), allowed_origins=("https://a.example",)) as server:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answer = httpx2.options(f"{server.url}/v1/completions", headers={"Origin": "https://a.example", **asked})
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx2.options(f"{server.url}/v1/completions", headers={"Origin": "https://b.example", **asked})
        assert "access-control-allow-origin" not in other.headers
        refused = httpx2.get(f"{server.url}/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_behind_a_proxy_with_a_path():
    with fake_server(root_path="/llm", api_key=("k",)) as server:
        assert httpx2.get(f"{server.url}/health").status_code == 200
        assert httpx2.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def test_a_body_that_is_too_large():
    with fake_server(max_request_bytes=1000) as server:
        assert complete(server, prompt="x" * 900).status_code == 400  # it is read, and longer than the context
        assert error_of(complete(server, prompt="x" * 1000), 413)["code"] == "too_large"
        parts = (b" " * 100 for _ in range(11))  # no length beforehand
        headers = {"Content-Type": "application/json"}
        assert httpx2.post(f"{server.url}/v1/completions", content=parts, headers=headers).status_code == 413


def test_too_many_requests_are_refused(slow, pool):
    running = [pool.submit(complete, slow, **LONG) for _ in range(3)]
    wait_until(lambda: len(slow.service.admission) == 3)
    refused = complete(slow)
    assert error_of(refused, 429)["code"] == "queue_full"
    assert error_of(refused, 429)["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    assert httpx2.get(f"{slow.url}/load").json() == {"server_load": 3}
    assert metric(slow, "jaxllm:num_requests_running") == 2
    assert metric(slow, "jaxllm:num_requests_waiting") == 1
    assert all(one.result().status_code == 200 for one in running)
    assert complete(slow).status_code == 200
    assert metric(slow, "jaxllm:admission_rejections_total") == 1
    assert "asks for 4 answers" in error_of(complete(slow, n=4), 400)["message"]


def test_an_id_that_is_in_use(slow, pool):
    running = pool.submit(complete, slow, **LONG, request_id="mine")
    wait_until(lambda: len(slow.service.admission) == 1)
    assert error_of(complete(slow, request_id="mine"), 400)["param"] == "request_id"
    assert running.result().status_code == 200


def test_an_answer_that_takes_too_long():
    with fake_server(FakeAsyncLLM(step_seconds=STEP), request_timeout=0.2) as server:
        assert error_of(complete(server, **LONG), 504)["type"] == "timeout_error"
        assert len(server.engine.aborted) == 1
        assert not server.engine.running
        stream = complete(server, **LONG, stream=True)
        assert stream.status_code == 200
        assert events(stream)[-1]["error"]["code"] == "timeout"
        assert len(server.engine.aborted) == 2


def test_a_request_can_ask_for_less_time(slow):
    url = f"{slow.url}/v1/completions"
    assert error_of(httpx2.post(url, json=LONG, headers={"X-Request-Timeout": "0.1"}), 504)
    assert error_of(httpx2.post(url, json=LONG, headers={"X-Request-Timeout": "soon"}), 400)
    assert httpx2.post(url, json=LONG, headers={"X-Request-Timeout": "60"}).status_code == 200


@pytest.mark.parametrize("body", [{}, {"prompt": ["a", "b"]}, {"n": 2}])
def test_a_client_that_goes_away(slow, body):
    with httpx2.Client() as client, pytest.raises(httpx2.ReadTimeout):
        client.post(f"{slow.url}/v1/completions", json=LONG | body, timeout=httpx2.Timeout(0.2))
    assert_nothing_runs(slow)
    assert metric(slow, "jaxllm:http_requests_total", route="/v1/completions", status="499") == 1


def test_a_client_that_leaves_a_stream(slow):
    body = LONG | {"stream": True}
    with httpx2.stream("POST", f"{slow.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: its end is that of the connection
        assert next(lines).startswith("data: ")
        assert slow.engine.running
    assert_nothing_runs(slow)


def assert_nothing_runs(slow):
    started = time.monotonic()
    wait_until(lambda: not slow.engine.running)
    assert time.monotonic() - started < 0.3
    assert slow.engine.aborted
    assert len(slow.service.admission) == 0


def test_a_client_that_goes_away_while_it_waits(slow, pool):
    running = [pool.submit(complete, slow, **LONG) for _ in range(2)]
    wait_until(lambda: len(slow.service.admission) == 2)
    with httpx2.Client() as client, pytest.raises(httpx2.ReadTimeout):
        client.post(f"{slow.url}/v1/completions", json=LONG | {"stream": True}, timeout=httpx2.Timeout(0.2))
    wait_until(lambda: len(slow.engine.running) == 2)
    assert all(one.result().status_code == 200 for one in running)


def test_abort_by_id(slow, pool):
    whole = pool.submit(complete, slow, **LONG, request_id="a")
    streamed = pool.submit(complete, slow, **LONG, request_id="b", stream=True)
    wait_until(lambda: len(slow.engine.running) == 2)
    time.sleep(0.1)
    ids = {"request_ids": ["cmpl-a", "cmpl-b", "cmpl-c"]}
    answer = httpx2.post(f"{slow.url}/abort_requests", json=ids)
    assert answer.json() == {"aborted": ["cmpl-a", "cmpl-b"]}
    (choice,) = whole.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert fake_text("Hello", 100).startswith(choice["text"])
    assert events(streamed.result())[-1]["choices"][0]["finish_reason"] == "abort"


def test_an_engine_that_dies(slow, pool):
    whole = pool.submit(complete, slow, **LONG)
    streamed = pool.submit(complete, slow, **LONG, stream=True)
    wait_until(lambda: len(slow.engine.running) == 2)
    time.sleep(0.1)
    slow.call(slow.engine.die)
    assert "was killed" in error_of(whole.result(), 500)["message"]
    assert events(streamed.result())[-1]["error"]["code"] == "engine_dead"
    assert error_of(complete(slow), 503)["type"] == "service_unavailable_error"
    assert error_of(httpx2.get(f"{slow.url}/health"), 503)
    assert httpx2.get(f"{slow.url}/metrics").status_code == 200


def test_before_the_model_is_loaded():
    with fake_server(FakeAsyncLLM(is_loaded=False)) as server:
        for path in ("/health", "/v1/models"):
            response = httpx2.get(server.url + path)
            assert "loaded" in error_of(response, 503)["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert complete(server).status_code == 503
        assert httpx2.get(f"{server.url}/metrics").status_code == 200
        server.call(server.engine.start)
        assert httpx2.get(f"{server.url}/health").status_code == 200


def test_a_server_that_ends_takes_nothing_new(slow, pool):
    running = pool.submit(complete, slow, **LONG)
    wait_until(lambda: len(slow.service.admission) == 1)
    slow.service.admission.is_draining = True
    assert error_of(httpx2.get(f"{slow.url}/health"), 503)
    assert error_of(complete(slow), 503)
    assert running.result().status_code == 200
    slow.call(slow.service.admission.wait_empty)


def test_the_prefix_cache_is_reset(slow):
    url = f"{slow.url}/reset_prefix_cache"
    assert httpx2.post(url).json() == {"success": True}
    slow.engine.reset_result = False
    assert error_of(httpx2.post(url), 409)["code"] == "busy"


def test_looking_inside(slow):
    assert httpx2.get(f"{slow.url}/debug/requests").json() == {"requests": []}
    assert httpx2.get(f"{slow.url}/debug/memory").json() == {"devices": []}
    assert httpx2.get(f"{slow.url}/version").json()["version"]


def test_salts_reach_the_engine(slow):
    for salt in ({"cache_salt": "a"}, {}):
        assert complete(slow, **salt).status_code == 200
    assert slow.engine.salts == ["a", None]


def test_metrics(slow):
    complete(slow, n=2)
    events(complete(slow, stream=True))
    expected = {
        "jaxllm:request_success_total": 3,
        "jaxllm:request_prompt_tokens_count": 2,
        "jaxllm:request_prompt_tokens_sum": 2 * len(slow.engine.tokenizer.encode("Hello")),
        "jaxllm:request_generation_tokens_sum": 24,
        "jaxllm:generation_tokens_total": 24,
        "jaxllm:request_params_n_sum": 3,
        "jaxllm:num_requests_running": 0,
        "jaxllm:compiles_since_ready_total": 0,
    }
    assert {name: metric(slow, name) for name in expected} == expected
    assert metric(slow, "jaxllm:inter_token_latency_seconds_count") >= 5
    assert metric(slow, "jaxllm:request_success_total", finished_reason="length") == 3
    assert metric(slow, "jaxllm:http_requests_total", route="/v1/completions", status="200") == 2


def test_metrics_while_the_engine_does_not_answer(slow, monkeypatch):
    async def hang():
        await asyncio.sleep(60)

    monkeypatch.setattr(api_health, "STATS_SECONDS", 0.1)
    monkeypatch.setattr(slow.engine, "stats", hang)
    text = httpx2.get(f"{slow.url}/metrics").text
    assert "jaxllm:server_load" in text and "jaxllm:num_requests_running" not in text


def test_metrics_by_vllms_names():
    with fake_server(vllm_metrics=True) as server:
        complete(server)
        assert metric(server, "vllm:request_success_total") == metric(server, "jaxllm:request_success_total") == 1


def test_the_log_has_no_prompts(slow, caplog):
    caplog.set_level(logging.DEBUG)
    complete(slow, prompt="secret words", user="ann")
    complete(slow, prompt="secret words", stop=3)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("jaxllm")]
    assert any("/v1/completions' 200" in one and "tokens read, 8 written" in one and "ann" in one for one in messages)
    assert not any("secret" in one for one in messages)


def test_the_log_has_prompts_if_asked_for(caplog):
    caplog.set_level(logging.INFO)
    with fake_server(log_prompts=True) as server:
        complete(server, prompt="secret words")
    text = caplog.text
    assert "secret words" in text
    assert repr(fake_text("secret words", 8)) in text


def test_a_bug_is_a_500_that_says_nothing(slow, caplog, monkeypatch):
    async def explode():
        raise KeyError("details")

    monkeypatch.setattr(slow.engine, "memory", explode)
    response = httpx2.get(f"{slow.url}/debug/memory")
    assert "details" not in json.dumps(error_of(response, 500))
    assert "x-request-id" in response.headers
    assert "KeyError" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("root_path", "llm"),
        ("ssl_keyfile", "x"),
        ("chat_template", "/nowhere"),
        ("api_key", ("",)),
        ("shutdown_timeout", -1.0),
        ("max_request_bytes", 0),
    ],
)
def test_wrong_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        ServerSettings(**{field: value})
