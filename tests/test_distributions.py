"""Log-probabilities of all tokens: `logprobs=-1` and more than 20, of answers and prompts, held against the dense model.

One engine does four steps a call where it may, computes prompts in chunks of 32 tokens and has blocks for so few
requests that it preempts.
"""

import dataclasses

import jax
import numpy as np
import pytest
from doubles import FakeEngine, prompt_request
from tiny_model import CONTEXT, VOCAB, Oracle, log_softmax, make_prompt, write_model

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.request_maker import MAX_PROMPT_LOGPROBS, RequestMaker
from jaxllm.memory import CacheSize
from jaxllm.model_config import ModelConfig
from jaxllm.runner.distributions import (
    AHEAD,
    CHUNK,
    DistributionShape,
    PendingDistributions,
    find_details,
    may_be_wanted,
)
from jaxllm.runner.logprob_seats import AnswerPlace, PromptPart
from jaxllm.sampling_params import RequestOutputKind, is_wide
from jaxllm.scheduling.plan import StepOutput
from jaxllm.scheduling.scheduler import StepLimits

CLOSE = 1e-4
STEPS = 4
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "compilation_cache": False}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("distributions") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    fields = {"max_logprobs": -1, "num_scheduler_steps": STEPS, "num_gpu_blocks_override": 16}
    with LLM(str(folder), **SETTINGS, **fields) as llm:
        yield llm
        assert llm.engine.core.scheduler.kv.num_used_blocks == 0, "a test leaked blocks"


@pytest.fixture(autouse=True)
def watch(request):
    """The device waits for the host, so that calls do several steps; nothing compiles."""
    if "llm" not in request.fixturenames:
        yield
        return
    core = request.getfixturevalue("llm").engine.core
    core._pacer.num_steps, before = STEPS, core.runner.num_compiles_since_ready
    yield
    assert core.runner.num_compiles_since_ready == before


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def check(table, token_ids, found, num_top):
    """`found` has for each token itself first, then the best `num_top` (-1: all) in order, as a row of `table` has them."""
    assert len(found) == len(token_ids) == len(table)
    for exact, token, entries in zip(table, token_ids, found, strict=True):
        first, *others = entries
        assert first == token
        told = np.array([entry.logprob for entry in entries.values()])
        assert np.abs(told - exact[[*entries]]).max() < CLOSE
        others = [entries[other] for other in others]
        keys = [(-one.logprob, other) for other, one in list(entries.items())[1:]]
        assert keys == sorted(keys), "not in order, or of equals not the smaller id first"
        assert [one.rank for one in others] == sorted({*range(1, len(others) + 2)} - {entries[token].rank})[
            : len(others)
        ]
        count = VOCAB if num_top == -1 else min(num_top, VOCAB)
        assert count <= len(entries) <= count + 1
        if count == VOCAB:
            assert sorted(entries) == list(range(VOCAB))
            assert np.exp(told).sum() == pytest.approx(1, abs=1e-5)
        else:
            least = np.sort(exact)[-count]
            assert all(exact[other] > least - CLOSE for other in entries if other != token)
        assert abs(np.sort(exact)[-entries[token].rank] - exact[token]) < CLOSE


CASES = [
    {"logprobs": -1},
    {"logprobs": 21, "temperature": 0.9, "seed": 3, "top_k": 40},
    {"logprobs": None},
    {"logprobs": 5, "prompt_logprobs": -1},
    {"logprobs": 1000, "prompt_logprobs": 3, "repetition_penalty": 1.5},
    {"logprobs": -1, "prompt_logprobs": 30, "temperature": 1.0, "seed": 9},
]


def check_outputs(outputs, params, oracle):
    for output, param in zip(outputs, params, strict=True):
        (answer,) = output.outputs
        table = log_softmax(oracle.logits(output.prompt_token_ids + answer.token_ids))
        start = len(output.prompt_token_ids)
        if param.logprobs is None:
            assert answer.logprobs is None
        else:
            check(table[start - 1 : -1], answer.token_ids, answer.logprobs, param.logprobs)
            total = sum(one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True))
            assert answer.cumulative_logprob == pytest.approx(total, abs=1e-4)
        if param.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs[0] is None
            check(table[: start - 1], output.prompt_token_ids[1:], output.prompt_logprobs[1:], param.prompt_logprobs)


def test_of_answers_and_prompts_in_one_batch(llm, oracle):
    prompts = [make_prompt(5 + 13 * index, index) for index in range(len(CASES))]
    params = [dataclasses.replace(GREEDY, **case) for case in CASES]
    outputs = llm.generate(prompts, params)
    check_outputs(outputs, params, oracle)
    plain = llm.generate(prompts[2], GREEDY)[0].outputs[0]
    assert plain.token_ids == outputs[2].outputs[0].token_ids, "neighbours changed an answer"
    assert llm.generate(prompts[0], GREEDY)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_of_requests_that_are_preempted(llm, oracle):
    before = llm.engine.core.scheduler.num_preemptions
    prompts = [make_prompt(40, seed) for seed in range(20, 25)]
    params = dataclasses.replace(GREEDY, max_tokens=60, logprobs=-1, prompt_logprobs=25)
    outputs = llm.generate(prompts, params)
    assert llm.engine.core.scheduler.num_preemptions > before, "nobody was preempted"
    check_outputs(outputs, [params] * len(prompts), oracle)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_of_every_kind(llm, oracle, kind):
    prompt, name = make_prompt(70, 31), f"kinds-{kind.name}"
    params = dataclasses.replace(
        GREEDY, logprobs=-1, prompt_logprobs=-1, output_kind=kind, n=2, seed=4, temperature=0.8
    )
    llm.engine.add_request(name, prompt, params)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    delta = kind is RequestOutputKind.DELTA
    for index in range(2):
        answers = [answer for output in outputs for answer in output.outputs if answer.index == index]
        parts = answers if delta else answers[-1:]
        token_ids = [token for one in parts for token in one.token_ids]
        logprobs = [entries for one in parts for entries in one.logprobs]
        check(log_softmax(oracle.logits(prompt + token_ids))[len(prompt) - 1 : -1], token_ids, logprobs, -1)
    told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(told) == (1 if delta else len(outputs))
    check(log_softmax(oracle.logits(prompt))[:-1], prompt[1:], told[0][1:], -1)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9, "seed": 8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_they_cost_calls_but_change_no_token(llm, fields):
    counts, found = llm.engine.core.runner.counts, []
    for num_top in (20, 21):
        llm.engine.core._pacer.num_steps, before = STEPS, counts.calls
        params = dataclasses.replace(GREEDY, max_tokens=41, logprobs=num_top, **fields)
        (output,) = llm.generate(make_prompt(9, 41), params)
        found.append((output.outputs[0], counts.calls - before))
    (packed, few), (wide, many) = found
    assert packed.token_ids == wide.token_ids
    assert few <= 1 + 40 // STEPS + 3 and many >= 41, "several steps a call, and one"
    for entries, others in zip(packed.logprobs, wide.logprobs, strict=True):
        assert all(entries[token].logprob == pytest.approx(others[token].logprob, abs=CLOSE) for token in entries)
        assert all(entries[token].rank == others[token].rank for token in entries)


def test_on_two_devices(folder, oracle):
    fields = {"max_num_seqs": 1, "max_logprobs": -1, "tensor_parallel_size": 2, "device": "cpu"}
    params = [dataclasses.replace(GREEDY, max_tokens=5, **case) for case in CASES[:1] + CASES[3:4]]
    with LLM(str(folder), **SETTINGS | fields) as llm:
        check_outputs(llm.generate([make_prompt(50, 51), make_prompt(3, 52)], params), params, oracle)
        assert llm.engine.core.runner.num_compiles_since_ready == 0


def test_a_call_takes_little_memory(llm):
    """Logits and what is made of them for a chunk of places, whatever the step's size."""
    programs = llm.engine.core.runner.scoring.compiled
    (program,) = (one for shape, one in programs.items() if isinstance(shape, DistributionShape))
    analysis = program.memory_analysis()
    assert analysis.output_size_in_bytes <= 1.1 * CHUNK * VOCAB * 4
    assert analysis.temp_size_in_bytes <= 8 * CHUNK * VOCAB * 4


def test_an_engine_that_nobody_may_ask_has_no_such_programs():
    assert may_be_wanted(-1, 1000) and may_be_wanted(21, 1000) and may_be_wanted(20, 15)
    assert not may_be_wanted(20, 1000) and not may_be_wanted(0, 1000)
    assert [is_wide(number) for number in (None, 0, 20, 21, -1)] == [False, False, False, True, True]


def test_the_best_are_found_as_by_sorting():
    rng = np.random.default_rng(3)
    for count in (-1, 1, 21, 99, 100, 500):
        row = rng.integers(-8, 3, 100).astype(np.float32)  # many are equal, some are 0 or, as if by rounding, above
        row[rng.integers(0, 100, 5)] = -np.inf
        row[rng.integers(0, 100, 5)] = -0.0
        order = sorted(range(100), key=lambda token: (-row[token], token))
        for token in (0, order[0], order[-1]):
            found = find_details(row, token, count)
            assert found.top_token_ids == (order if count == -1 else order[:count])
            assert found.top_logprobs == [row[one] for one in found.top_token_ids]
            assert (found.logprob, found.rank) == (row[token], (row >= row[token]).sum())


class FakeProgram:
    """Log-probabilities that tell their places; counts the results that are alive."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, places):
        self.num_calls += 1
        return jax.numpy.asarray(places[:, None] * 100.0 + np.arange(50), np.float32)


def test_chunks_are_computed_while_they_are_read_and_again_after_an_interrupt():
    """Places of a long prompt and of a row that samples, in 5 chunks."""
    length = 4 * CHUNK + 3
    part = PromptPart(0, 7, 1, tuple(index % 50 for index in range(length)), 30)
    program = FakeProgram()
    pending = PendingDistributions(program, [part], [AnswerPlace(1, 99, -1)])
    assert program.num_calls == AHEAD
    reading = pending._read()
    for index in range(2 * CHUNK + 1):
        assert next(reading)[0] == (7 + index) * 100
    assert program.num_calls == AHEAD + 3, "no more than that is on the device"
    for _ in range(2):
        output = StepOutput([[0], [5]], [[-1.0], [-1.0]])
        pending.add_to(output)
        ((row, position, details),) = output.prompts
        assert (row, position, len(details)) == (0, 1, length)
        assert [one.logprob for one in details] == [(7 + index) * 100 + index % 50 for index in range(length)]
        assert all(one.top_token_ids == [*range(49, 19, -1)] for one in details)
        assert [one.logprob for one in output.details[1]] == [99 * 100 + 5] and 0 not in output.details


def test_rows_that_are_read_step_by_step_hold_the_call_to_one_step():
    def num_steps(*requests):
        engine = FakeEngine(StepLimits(4, 32), CacheSize(num_blocks=64, block_size=8))
        engine.max_steps = STEPS
        for request in requests:
            engine.add(request)
        engine.launch()
        engine.read()
        found = engine.launch().num_steps
        engine.run()
        return found

    plain, packed, wide = ((str(number), [3, 4, 5], 9, number) for number in (None, 20, 21))
    made = [lambda one=one: prompt_request(*one[:3], logprobs=one[3]) for one in (plain, packed, wide)]
    assert num_steps(made[0](), made[1]()) == STEPS
    assert num_steps(made[0](), made[2]()) == 1


def make_request(max_logprobs, prompt=(1, 2, 3), vocab_size=VOCAB, **params):
    config = EngineConfig("tiny", max_model_len=CONTEXT, max_logprobs=max_logprobs)
    model = ModelConfig("llama", vocab_size, 8, 1, 1, 1, 8, 8, CONTEXT)
    return RequestMaker(None, config, model).make("a", list(prompt), SamplingParams(**params))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_what_is_more_than_the_engine_tells_is_refused(name):
    for asked in (21, -1):
        message = f"^{name}={asked} is more than max_logprobs=20 allows: ask for 0 to 20, or start .* max_logprobs=-1"
        with pytest.raises(ValueError, match=message):
            make_request(20, **{name: asked})
    make_request(20, **{name: 20})
    make_request(30, **{name: 30})
    make_request(VOCAB, **{name: -1})
    make_request(-1, **{name: 10**9})
    with pytest.raises(ValueError, match=f"{name}=1 is more than max_logprobs=0 allows"):
        make_request(0, **{name: 1})
    with pytest.raises(ValueError, match="max_logprobs=-2 has to be a whole number, -1 for no limit"):
        EngineConfig("tiny", max_logprobs=-2)


def test_more_than_memory_holds_is_refused():
    vocab = MAX_PROMPT_LOGPROBS // 100
    make_request(-1, [1] * 100, vocab, prompt_logprobs=-1)
    with pytest.raises(ValueError, match=r"prompt_logprobs=-1 of 101 tokens are .* shorten the prompt to 100 tokens"):
        make_request(-1, [1] * 101, vocab, prompt_logprobs=-1)
    make_request(-1, [1] * 101, vocab, prompt_logprobs=1000)


def test_a_default_engine_refuses_and_serves_on(folder):
    """Without anything compiled: the check comes first."""
    fields = {"enforce_eager": True, "max_model_len": 48}
    with LLM(str(folder), **SETTINGS, **fields) as llm:
        with pytest.raises(ValueError, match="prompt 0 of 1: logprobs=-1 is more than max_logprobs=20 allows"):
            llm.generate([[1, 2]], SamplingParams(logprobs=-1))
        assert not llm.engine.has_unfinished_requests()
