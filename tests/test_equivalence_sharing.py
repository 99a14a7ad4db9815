"""The same tokens whatever is shared: from a cold cache or a warm one, forked or alone, held against the dense model.

Prompts are of two families that begin alike, half of the requests are greedy and half sampled under a seed, with
and without a repetition penalty, which has to know of tokens that were not computed for the request.
"""

import dataclasses

import pytest
from sharing_workload import LENGTHS, RememberingOracle, check, make_requests, run
from tiny_model import CONTEXT, write_model

from jaxllm import LLM, LLMEngine, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("sharing") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def executables(tmp_path_factory):
    """A cache folder of its own: variants of the same shapes share what is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def oracle():
    return RememberingOracle()


VARIANTS = {
    "synchronous": {"max_steps_in_flight": 1},
    "three steps in flight": {"max_steps_in_flight": 3},
    "preempted, tensor parallel, in chunks": {
        "num_gpu_blocks_override": 21,
        "tensor_parallel_size": 3,
        "max_num_batched_tokens": 24,
    },
}


SLOW = ("synchronous",)
"""Each compiles an engine of its own; what they vary, others that run always vary, too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS])
def test_a_warm_cache_and_forks_change_no_token(name, folder, oracle):
    options = {"max_num_seqs": 16, "max_model_len": CONTEXT} | VARIANTS[name]
    with LLMEngine(str(folder), dtype="float32", **options) as engine:
        kv, requests, forked = engine.core.scheduler.kv, make_requests(), make_requests(n=3)
        answers = [(requests, run(engine, requests))]
        cold = kv.stats().prefix_cache
        answers.append((requests, warm := run(engine, requests)))
        assert kv.stats().prefix_cache.hits - cold.hits > cold.hits, "the second time there is more to find"
        if "preempted" not in name:
            cached = [answers[0][0].num_cached_tokens for answers in warm]
            assert cached == [(length - 1) // 16 * 16 for length in LENGTHS]
        assert engine.reset_prefix_cache()
        answers.append((forked, run(engine, forked)))
        assert ("preempted" in name) == (engine.core.scheduler.num_preemptions > 0)
        assert engine.core.runner.num_compiles_since_ready == 0
        assert kv.num_used_blocks == 0
    for given, found in answers:
        check(oracle, given, found)


def test_forks_without_prefix_caching(folder, oracle):
    with LLMEngine(str(folder), dtype="float32", max_num_seqs=16, enable_prefix_caching=False) as engine:
        forked = make_requests(n=3)
        check(oracle, forked, answers := run(engine, forked))
        assert all(output.num_cached_tokens == 0 for (output, _), *_ in answers)
        again = run(engine, forked[:1])
        assert again[0][0][0].num_cached_tokens == 0


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32", max_num_seqs=16) as llm:
        yield llm


PROMPT = list(range(1, 41))
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def test_several_answers_are_those_of_single_requests(llm: LLM):
    params = SamplingParams(n=4, seed=7, max_tokens=12, repetition_penalty=1.2, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3] and output.finished
    singles = [dataclasses.replace(params, n=1, seed=7 + index) for index in range(4)]
    alone = [one.outputs[0] for one in llm.generate([PROMPT] * 4, singles)]
    assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in alone]
    assert [answer.text for answer in output.outputs] == [answer.text for answer in alone]


def test_without_a_seed_answers_differ(llm: LLM):
    (output,) = llm.generate([PROMPT], SamplingParams(n=3, max_tokens=8, ignore_eos=True))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3


def test_answers_of_one_request_end_by_themselves(llm: LLM):
    params = SamplingParams(n=4, seed=1, max_tokens=30, temperature=1.5)
    (output,) = llm.generate([PROMPT], params)
    token = output.outputs[2].token_ids[3]
    (stopped,) = llm.generate([PROMPT], dataclasses.replace(params, stop_token_ids=[token]))
    assert stopped.outputs[2].stop_reason == token and len(stopped.outputs[2].token_ids) <= 4
    for before, after in zip(output.outputs, stopped.outputs, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
    assert len({len(answer.token_ids) for answer in stopped.outputs}) > 1


def test_aborting_ends_all_answers(llm: LLM):
    engine = llm.engine
    engine.add_request("a", PROMPT, dataclasses.replace(GREEDY, n=3, max_tokens=50))
    for _ in range(4):
        engine.step()
    with pytest.raises(ValueError, match="request_id='1_a' is in use"):
        engine.add_request("1_a", PROMPT, GREEDY)
    assert not llm.reset_prefix_cache(), "requests are running"
    output = engine.abort_request("a")
    assert output is not None and output.finished
    assert [answer.finish_reason for answer in output.outputs] == ["abort"] * 3
    assert not engine.has_unfinished_requests() and engine.abort_request("a") is None


def test_salts_keep_prompts_apart(llm: LLM):
    def cached(**salt: str) -> int:
        return llm.generate([{"prompt_token_ids": PROMPT, **salt}], GREEDY)[0].num_cached_tokens

    assert llm.reset_prefix_cache()
    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [
        *(0, 32, 0, 0, 32)
    ]
    with pytest.raises(ValueError, match="cache_salt=5 is not valid"):
        llm.generate([{"prompt_token_ids": PROMPT, "cache_salt": 5}], GREEDY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="cache_salt='' is not valid"):
        cached(cache_salt="")


def test_prefix_caching_is_on_or_off():
    with pytest.raises(ValueError, match="enable_prefix_caching='yes' has the wrong type"):
        LLMEngine("model", enable_prefix_caching="yes")
