"""A request's priority on its way: from `LLM`, `AsyncLLM` and HTTP to the scheduler, and where it is refused."""

import asyncio
import re

import httpx2
import pytest
from fake_async_llm import FakeAsyncLLM
from server_process import fake_server
from tiny_model import write_model

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.engine.async_llm import AsyncLLM

SETTINGS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "device": "cpu",
    "scheduling_policy": "priority",
}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The second engine finds the programs of the first."""
    place = tmp_path_factory.mktemp("priority")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(place / "cache"))
        patch.setenv("JAX_NUM_CPU_DEVICES", "8")
        yield write_model(place / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def ended(llm, monkeypatch):
    """The requests' numbers from 0 on, in the order they end."""
    ids, step = [], llm.engine.step

    def noting_step():
        outputs = step()
        ids.extend(int(output.request_id) for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(llm.engine, "step", noting_step)
    return lambda: [one - min(ids) for one in ids]


def test_llm_answers_the_urgent_first_and_returns_all_in_order(llm, ended):
    prompts = ["one", "two", "three", "four"]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, priority=[2, 5, -1, 2])
    assert [output.prompt for output in outputs] == prompts
    assert ended() == [2, 0, 3, 1]
    answers = [output.outputs[0].token_ids for output in outputs]
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    assert answers == plain, "what is answered does not depend on when"


def test_llm_answers_the_urgent_conversation_first(llm, ended):
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    outputs = llm.chat(conversations, PARAMS, use_tqdm=False, priority=[3, -4, 0])
    assert ended() == [1, 2, 0]
    plain = llm.chat(conversations, PARAMS, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    with pytest.raises(ValueError, match=re.escape("priority=[1] is not valid for 3 prompts")):
        llm.chat(conversations, PARAMS, use_tqdm=False, priority=[1])


def test_a_request_that_the_policy_cannot_rank_leaves_nothing_behind(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.scheduler.waiting, "rank", lambda request, is_back: ("urgent",))
        with pytest.raises(ValueError, match=r"PriorityOrder.rank returned \('urgent',\), and \(-?\d, .* before"):
            llm.engine.add_request("again", "one", PARAMS)
        with pytest.raises(ValueError, match=r"prompt 0 of 1: scheduling_policy: PriorityOrder\.rank"):
            llm.generate("one", PARAMS, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    llm.engine.add_request("again", "one", PARAMS)
    assert llm.engine.abort_request("again") is not None


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1], "priority=[1] is not valid for 2 prompts: give a list of one each"),
        (3, "priority=3 is not valid for 2 prompts: give a list of one each"),
        ([0, "high"], "prompt 1 of 2: priority='high' is not valid: use a whole number"),
        ([True, 0], "prompt 0 of 2: priority=True is not valid: use a whole number"),
        ([0, 10**400], "prompt 1 of 2: priority is not valid: use a number from -2147483647 to 2147483647"),
    ],
)
def test_priorities_that_are_not_valid_are_named(llm, priority, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate(["a", "b"], PARAMS, use_tqdm=False, priority=priority)
    assert not llm.engine.has_unfinished_requests()


def test_a_policy_that_cannot_be_imported_is_named_before_a_model_is_looked_for():
    with pytest.raises(ValueError, match=r"scheduling_policy='no_such_module:Order' cannot be imported"):
        LLM("no/such/model", scheduling_policy="no_such_module:Order")


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_a_policy_that_ignores_priority_refuses_it(policy):
    maker = FakeAsyncLLM(policy=policy)._maker
    assert maker.make("a", [1], None)[1].priority == 0
    with pytest.raises(ValueError, match=f"priority=-1 means nothing under scheduling_policy='{policy}': start the"):
        maker.make("a", [1], None, -1)


def test_all_answers_to_a_prompt_have_its_priority():
    _, request = FakeAsyncLLM(policy="dynamic")._maker.make("a", [1], SamplingParams(n=3), 7)
    assert [one.priority for one in (request, *request.children)] == [7, 7, 7]


def test_async_llm_answers_the_urgent_first(folder, llm):
    ended = []

    async def ask(engine, name, max_tokens, priority):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        async for output in engine.generate(name, params, name, priority):
            if output.finished:
                ended.append(name)

    async def main():
        engine = AsyncLLM(EngineConfig(str(folder), **SETTINGS), in_process=True)
        await engine.start()
        try:
            first = asyncio.create_task(ask(engine, "first", 60, 5))
            while not (await engine.stats()).num_running:
                await asyncio.sleep(0.001)
            others = [("low", 9), ("high", 1), ("mid", 5)]
            await asyncio.gather(first, *(ask(engine, name, 4, priority) for name, priority in others))
        finally:
            await engine.shutdown(5)

    asyncio.run(main())
    assert ended.index("high") < ended.index("mid") < ended.index("low")


def test_priorities_reach_the_engine_over_http():
    with fake_server(FakeAsyncLLM(policy="priority")) as server:
        bodies = (
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "priority": -2}),
            ("completions", {"prompt": ["a", "b"], "priority": 4}),
            ("completions", {"prompt": "a"}),
        )
        for path, body in bodies:
            assert httpx2.post(f"{server.url}/v1/{path}", json=body | {"max_tokens": 2}).status_code == 200
        assert server.engine.priorities == [-2, 4, 4, 0]


def test_a_server_without_priorities_names_the_field_and_the_remedy():
    with fake_server() as server:
        response = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "priority": 1})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "priority")
        assert "scheduling_policy='priority' or 'dynamic'" in error["message"]
