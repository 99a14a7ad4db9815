"""`jaxllm serve` as a process over a real engine: OpenAI's package, equal texts, load, and ways to end."""

import asyncio
import concurrent.futures
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import openai
import pytest
from served_model import CONTEXT, FLAGS, VOCAB, write_served_model
from server_process import ServerProcess, events

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = [{"role": "user", "content": "Hello there"}]
ENDLESS = {"prompt": ["a"] * 40, "max_tokens": 500, "ignore_eos": True}
"""Takes longer than any test waits."""
PROMPTS = ["The sea is", "né 你好", "x" * 100, "A"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with ServerProcess([str(model), *FLAGS, "--max-logprobs", "-1"], tmp_path_factory.mktemp("log") / "log") as made:
        yield made.wait_ready()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def complete(server, **body):
    return httpx2.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 8} | body, timeout=60)


def used_blocks(server):
    return httpx2.get(f"{server.url}/debug/memory").json()["pool"]["used_blocks"]


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_the_openai_package(client):
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 30
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason == "length"
    several = client.chat.completions.create(**asked, n=3)
    assert several.choices[0].message.content == answer.choices[0].message.content
    assert len({choice.message.content for choice in several.choices}) == 3
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match=f"{CONTEXT} tokens"):
        client.completions.create(model="tiny", prompt="x" * CONTEXT)


def test_stop_and_logprobs(client):
    asked = {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**asked, logprobs=2).choices[0]
    stop = whole.text[4:6]
    cut = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert len(whole.logprobs.tokens) == 40
    assert all(
        max(top.values()) == pytest.approx(logprob, abs=1e-6)  # greedy
        for top, logprob in zip(whole.logprobs.top_logprobs, whole.logprobs.token_logprobs, strict=True)
    )
    told = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3
    ).choices[0].logprobs.content  # fmt: skip
    assert [len(one.top_logprobs) for one in told] == [3] * 5


def test_logprobs_of_all_tokens(client):
    """-1, and more than 20, as the server's --max-logprobs allows."""
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "seed": 4, "logprobs": True, "top_logprobs": -1}
    told = client.chat.completions.create(**asked).choices[0].logprobs.content
    sizes = {len(one.top_logprobs) for one in told}
    assert len(told) == 5 and sizes == {VOCAB}
    for one in told:
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) == pytest.approx(1, abs=1e-4)
    chunks = client.chat.completions.create(**asked, stream=True)
    assert [one for chunk in chunks if (made := chunk.choices[0].logprobs) for one in made.content] == told
    extra = {"prompt_logprobs": -1, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    whole = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=3, logprobs=25, extra_body=extra
    ).choices[0]
    # Tokens of one text are told once.
    assert all(20 < len(top) <= 26 for top in whole.logprobs.top_logprobs)
    assert [one and len(one) for one in whole.prompt_logprobs] == [None, *[VOCAB] * 4]


def test_a_prompt_scored_by_harnesses_is_the_answer_scored(client):
    """log p(answer) is the same, told of the answer or, in another request, of the prompt."""
    answer = client.completions.create(
        model="tiny", prompt=list(b"Hello"), temperature=0, max_tokens=10, logprobs=1, extra_body={"return_token_ids": True}
    ).choices[0]  # fmt: skip
    prompt = [*b"Hello", *answer.token_ids]
    told = client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert told.logprobs.token_logprobs[5:] == pytest.approx(answer.logprobs.token_logprobs, abs=1e-4)


CHOICES = {
    "prompt": ("hi", ["a", "é"], [1, 2, 3], [[200, 7], [195]], "🙂 🙂 "),
    "n": (1, 1, 2, 3),
    "max_tokens": (0, 1, 3, 12, 40),
    "logprobs": (None, 0, 1, 3),
    "stop": ((), ["\ufffd"], [" ", "e", "t"]),
    "return_token_ids": (False, True),
    "include_stop_str_in_output": (False, True),
    "ignore_eos": (False, True),
    "temperature": (0, 1),
}


def joined(chunks):
    """What was told of each choice, in pieces or not."""
    told = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = told.setdefault(choice["index"], {"text": "", "tokens": [], "places": [], "logprobs": []})
        whole["text"] += choice["text"]
        whole["tokens"] += choice.get("token_ids") or []
        told_of_tokens = choice["logprobs"] or dict.fromkeys(("tokens", "text_offset", "token_logprobs"), ())
        whole["places"] += zip(told_of_tokens["tokens"], told_of_tokens["text_offset"], strict=True)
        whole["logprobs"] += [one or 0.0 for one in told_of_tokens["token_logprobs"]]
        if choice["finish_reason"]:
            whole["end"] = choice["finish_reason"], choice["stop_reason"]
    return told


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_is_the_whole_answer_in_pieces(server, echo):
    chosen = random.Random(echo)
    for seed in range(40):
        body = {name: chosen.choice(choices) for name, choices in CHOICES.items()} | {"seed": seed, "echo": echo}
        body["max_tokens"] = body["max_tokens"] or int(not echo)
        whole = complete(server, **body).json()
        *chunks, last = events(complete(server, **body, stream=True, stream_options={"include_usage": True}))
        assert "error" not in last, (body, last)
        expected = joined([whole])
        for one in expected.values():
            one["logprobs"] = pytest.approx(one["logprobs"], abs=1e-3)
        assert joined(chunks) == expected, body
        for name in ("prompt_tokens", "completion_tokens"):
            assert last["usage"][name] == whole["usage"][name], body


def test_the_openai_package_with_asyncio(server):
    async def answer(client, seed):
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "seed": seed}
        stream = await client.chat.completions.create(**asked, stream=True)
        streamed = "".join([chunk.choices[0].delta.content async for chunk in stream])
        return streamed, (await client.chat.completions.create(**asked)).choices[0].message.content

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(answer(client, seed) for seed in range(12)))

    pairs = asyncio.run(run())
    assert all(streamed == whole for streamed, whole in pairs)
    assert len({whole for _, whole in pairs}) == 12


def test_streamed_text_is_that_of_the_same_request_offline(server, model, tmp_path):
    rows = [{"prompt": p, "max_tokens": 40, "temperature": i % 2, "seed": i} for i, p in enumerate(PROMPTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    program = "import sys; from jaxllm.serving.cli import main; sys.exit(main())"
    flags = FLAGS[: FLAGS.index("--served-model-name")]
    command = [sys.executable, "-c", program, "generate", str(model), "--input", "rows.jsonl", "--output", "o.jsonl"]
    subprocess.run([*command, *flags], cwd=tmp_path, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    offline = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    for row, answer in zip(rows, offline, strict=True):
        chunks = events(complete(server, **row, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["text"]


def test_tenants_with_different_salts_share_nothing(server):
    def cached(salt):
        usage = complete(server, prompt="s" * 100, cache_salt=salt).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 96, 96, 96]


def test_a_client_that_leaves_frees_its_blocks(server):
    body = ENDLESS | {"stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: its end is that of the connection
        next(lines)
        assert used_blocks(server) > 0
    deadline = time.monotonic() + 1
    while used_blocks(server):
        assert time.monotonic() < deadline


def test_debugging_routes(server):
    assert complete(server).status_code == 200
    assert httpx2.get(f"{server.url}/debug/requests").json() == {"requests": []}
    metrics = httpx2.get(f"{server.url}/metrics").text
    assert 'jaxllm:compiles_since_ready_total{model_name="tiny"} 0.0' in metrics
    assert "jaxllm:time_to_first_token_seconds_bucket" in metrics
    found = dict(re.findall(r'jaxllm:process_resident_memory_bytes{model_name="tiny",process="(\w+)"} (\S+)', metrics))
    assert found.keys() == {"server", "engine"} and all(float(size) > 2e7 for size in found.values())
    (seconds,) = re.findall(r"jaxllm:engine_step_seconds_total{.*} (\S+)", metrics)
    assert float(seconds) > 0
    assert httpx2.post(f"{server.url}/reset_prefix_cache").json() == {"success": True}


def test_a_mixed_load_leaves_nothing_behind(model):
    """The short form of what scripts/soak_server.py is for."""
    flags = [flag for flag in FLAGS if flag not in ("--served-model-name", "tiny")]
    script = [
        sys.executable,
        str(ROOT / "scripts" / "soak_server.py"),
        str(model),
        "--streams",
        "40",
        "--seconds",
        "20",
    ]
    done = subprocess.run(
        [*script, *flags], capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def test_sigterm_lets_running_requests_finish(model, tmp_path):
    with (
        ServerProcess([str(model), *FLAGS], tmp_path / "log") as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        server.wait_ready()
        running = pool.submit(complete, server, prompt=["a"] * 8, max_tokens=400, ignore_eos=True, stream=True)
        while not used_blocks(server):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while (refused := httpx2.get(f"{server.url}/health")).status_code == 200:
            time.sleep(0.01)
        assert (refused.status_code, complete(server).status_code) == (503, 503)
        assert events(running.result())[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0


def test_a_killed_engine(model, tmp_path):
    with (
        ServerProcess([str(model), *FLAGS], tmp_path / "log") as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        server.wait_ready()
        waiting = [pool.submit(complete, server, **ENDLESS, stream=stream) for stream in (False, True)]
        while not used_blocks(server):
            time.sleep(0.01)
        killed = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        whole, streamed = (one.result() for one in waiting)
        assert time.monotonic() - killed < 5
        assert whole.json()["error"]["code"] == "engine_dead"
        assert whole.status_code == 500
        assert streamed.status_code == 500 or events(streamed)[-1]["error"]["code"] == "engine_dead"
        health = httpx2.get(f"{server.url}/health")
        assert health.status_code == 503
        assert "engine" in health.json()["error"]["message"]
        assert server.process.wait(15) == 1
        assert time.monotonic() - killed > 9
        assert "Traceback" not in server.log


def test_a_model_that_cannot_be_served(model, tmp_path):
    for flags, code, text in (
        (["--max-model-len", "9999"], 2, "max_model_len=9999"),
        (["--host", "256.0.0.1"], 1, "error:"),
        (["--chat-template", "/nowhere"], 2, "chat_template"),
    ):
        server = ServerProcess([str(model), *flags], tmp_path / "log")
        assert server.process.wait(60) == code, server.log
        assert text in server.log
        assert "Traceback" not in server.log
