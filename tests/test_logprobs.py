"""Log-probabilities of answers and prompts, held against the dense model; and what else an engine has to know of a request.

One engine with a long context, in which prompts are computed in chunks of 128 tokens.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_model import VOCAB, Oracle, log_softmax, make_prompt, write_model

from jaxllm import LLM, SamplingParams
from jaxllm.runner.prompt_scoring import CHUNK
from jaxllm.sampling_params import RequestOutputKind

CONTEXT, CLOSE = 4096, 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("logprobs") / "tiny", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32", max_num_seqs=8, compilation_cache=False) as llm:
        yield llm
        assert llm.engine.core.runner.num_compiles_since_ready == 0
        assert llm.engine.core.scheduler.kv.num_used_blocks == 0, "a test leaked blocks"


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def check(table, token_ids, found, num_top):
    """`found` has for each token itself and the best `num_top`, with the values and ranks of a row of `table`."""
    assert len(found) == len(token_ids)
    for exact, token, entries in zip(table, token_ids, found, strict=True):
        order = np.argsort(-exact)
        assert next(iter(entries)) == token
        assert set(entries) == {token, *order[:num_top].tolist()}
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(exact[other], abs=CLOSE)
            assert order[entry.rank - 1] == other or abs(exact[order[entry.rank - 1]] - exact[other]) < CLOSE


CASES = [
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 20, "temperature": 0.9, "seed": 3, "top_k": 40},
    {"logprobs": 3, "temperature": 1.3, "seed": 5, "min_p": 0.01, "frequency_penalty": 1.0},
    {"logprobs": 2, "repetition_penalty": 1.5, "logit_bias": {4: 3.0}},
    {"logprobs": None},
]


def test_of_answers(llm, oracle):
    """In one batch, with parameters that change what is chosen but not the log-probabilities that are told."""
    prompts = [make_prompt(5 + 9 * index, index) for index in range(len(CASES))]
    params = [dataclasses.replace(GREEDY, **case) for case in CASES]
    for prompt, param, output in zip(prompts, params, llm.generate(prompts, params), strict=True):
        answer = output.outputs[0]
        assert output.prompt_logprobs is None
        if param.logprobs is None:
            assert answer.logprobs is None
            continue
        table = log_softmax(oracle.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1])
        check(table, answer.token_ids, answer.logprobs, param.logprobs)
        total = sum(entries[token].logprob for entries, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-5)
    plain = llm.generate(prompts[0], GREEDY)[0].outputs[0]
    assert plain.token_ids == llm.generate(prompts[0], params[1])[0].outputs[0].token_ids


def test_texts_of_tokens(llm):
    answer = llm.generate("hello", dataclasses.replace(GREEDY, logprobs=3))[0].outputs[0]
    tokenizer = llm.get_tokenizer()
    for entries in answer.logprobs:
        for token, entry in entries.items():
            assert entry.decoded_token == tokenizer.decode([token], skip_special_tokens=False)
    silent = dataclasses.replace(GREEDY, logprobs=3, detokenize=False)
    entries = llm.generate("hello", silent)[0].outputs[0].logprobs[0]
    assert [entry.decoded_token for entry in entries.values()] == [None] * len(entries)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_of_every_kind(llm, kind):
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1, output_kind=kind, n=2)
    llm.engine.add_request(kind.name, make_prompt(150), params)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    delta = kind is RequestOutputKind.DELTA
    for index in range(2):
        answers = [answer for output in outputs for answer in output.outputs if answer.index == index]
        parts = [part for answer in answers for part in answer.logprobs] if delta else answers[-1].logprobs
        assert len(parts) == GREEDY.max_tokens
        assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers)
    told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(told) == (1 if delta else len(outputs)) and len(told[0]) == 150


def test_of_prompts(llm, oracle):
    """Of several at once, shorter and longer than a chunk; a warm cache is not used, and used by those who do not ask."""
    prompts = [make_prompt(length, 7) for length in (1, 2, 130, 129, 300, 128)]
    params = dataclasses.replace(GREEDY, prompt_logprobs=4, max_tokens=2)
    for _ in range(2):
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            assert output.prompt_logprobs[0] is None and output.num_cached_tokens == 0
            check(log_softmax(oracle.logits(prompt))[:-1], prompt[1:], output.prompt_logprobs[1:], 4)
    other = llm.generate(prompts[-1], GREEDY)[0]
    assert other.num_cached_tokens > 0 and other.prompt_logprobs is None


def test_a_long_prompt_takes_little_memory(llm, oracle):
    """Bytes of a call: logits and what is made of them for a chunk of tokens, whatever the prompt's length."""
    prompt = make_prompt(4000, 11)
    (output,) = llm.generate([prompt], dataclasses.replace(GREEDY, prompt_logprobs=1, max_tokens=1))
    check(log_softmax(oracle.logits(prompt[:400])), prompt[1:401], output.prompt_logprobs[1:401], 1)
    (last,) = llm.generate([prompt[:-1]], dataclasses.replace(GREEDY, logprobs=1, max_tokens=1))
    best = next(iter(last.outputs[0].logprobs[0].items()))
    entry = output.prompt_logprobs[-1][best[0]]
    assert entry.logprob == pytest.approx(best[1].logprob, abs=CLOSE)
    for shape, program in llm.engine.core.runner.scoring.compiled.items():
        analysis = program.memory_analysis()
        chunk = min(CHUNK, shape.tokens)
        assert analysis.temp_size_in_bytes <= 8 * chunk * VOCAB * 4 + 64 * shape.tokens * 4


def test_bad_words_do_not_come(llm):
    letters = [llm.get_tokenizer().encode(letter)[0] for letter in "abcdefgh"]
    params = dataclasses.replace(GREEDY, max_tokens=30, allowed_token_ids=letters)
    text = llm.generate("hello", params)[0].outputs[0].text
    assert len(text) == 30 and set(text) <= set("abcdefgh")
    bad_words = []
    for _ in range(4):
        bad_words.append(text[3 : 5 + len(bad_words) % 2])
        text = llm.generate("hello", dataclasses.replace(params, bad_words=bad_words))[0].outputs[0].text
        assert len(text) == 30 and not [word for word in bad_words if word in text]


REFUSED = [
    ({"logit_bias": {VOCAB: 1}}, f"logit_bias has token id {VOCAB}: those of this model are from 0 to {VOCAB - 1}"),
    ({"allowed_token_ids": [3, 10**6]}, "allowed_token_ids has token id 1000000"),
    ({"allowed_token_ids": [3], "min_tokens": 1, "stop_token_ids": [3]}, "allowed_token_ids=.3. are all excluded"),
    ({"bad_words": ["x" * 17]}, "'xxxxxxxxxxxxxxxxx' has 17 tokens, 1 to 16 can be"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_the_model_cannot_do_is_refused(llm, fields, message):
    with pytest.raises(ValueError, match=message):
        llm.generate("hello", SamplingParams(**fields))
    assert not llm.engine.has_unfinished_requests()


def test_words_that_differ_behind_a_space_count_twice(llm, monkeypatch):
    first_character = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(text[0])])
    monkeypatch.setattr(llm.engine.request_maker, "_tokenizer", first_character)
    params = SamplingParams(bad_words=[chr(0x4E00 + number) for number in range(65)])
    with pytest.raises(ValueError, match="bad_words has 130 spellings"):
        llm.engine.add_request("request", [1, 2], params)
