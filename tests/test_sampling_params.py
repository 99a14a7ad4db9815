"""`SamplingParams` and `BeamSearchParams`: what is not valid is named, with the remedy."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from jaxllm import BeamSearchParams, SamplingParams
from jaxllm.runner.device_state import Asks

BAD = [
    ({"temperature": -1}, "temperature=-1 is not valid: use 0"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"temperature": True}, "temperature=True"),
    ({"top_p": 0}, "top_p=0 is not valid"),
    ({"top_k": 1.5}, "top_k=1.5 is not valid"),
    ({"min_p": 1.1}, "min_p=1.1 is not valid: use from 0"),
    ({"min_p": float("nan")}, "min_p=nan"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 is not valid"),
    ({"presence_penalty": 3}, "presence_penalty=3 is not valid: use a number from -2 to 2"),
    ({"frequency_penalty": "1"}, "frequency_penalty='1' is not valid"),
    ({"seed": "x"}, "seed='x' is not valid"),
    ({"logit_bias": [1]}, r"logit_bias=\[1\] is not valid: use a dictionary"),
    ({"logit_bias": {-1: 0}}, "logit_bias: token=-1 is not valid"),
    ({"logit_bias": {7: 101}}, r"logit_bias\[7\]=101 is not valid: use a number from -100 to 100"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 tokens: give 1024 at the most"),
    ({"allowed_token_ids": []}, "allows no token at all"),
    ({"allowed_token_ids": [2, "x"]}, "allowed_token_ids='x' is not valid"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids='12' is not valid: use a list"),
    ({"bad_words": ["a", " "]}, "bad_words=' ' is not valid"),
    ({"bad_words": "word"}, "bad_words='word' is not valid: use a list"),
    ({"max_tokens": 0}, "max_tokens=0 is not valid"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens=20 is above max_tokens=10: raise max_tokens or lower"),
    ({"stop": [""]}, "stop='' is not valid"),
    ({"stop": "x", "detokenize": False}, "needs text: leave detokenize=True"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1 is not valid"),
    ({"logprobs": -2}, "logprobs=-2 is not valid: use a number of tokens of 0 or above, -1 for all, or None"),
    ({"prompt_logprobs": True}, "prompt_logprobs=True is not valid"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1 is not valid: use True or False"),
    ({"skip_special_tokens": None}, "skip_special_tokens=None is not valid"),
    ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens=0 is not valid: use True or False"),
    ({"n": 0}, "n=0 is not valid"),
    ({"output_kind": "DELTA"}, "output_kind='DELTA' is not valid"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_not_valid_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("name", ["priority", "best_of", "structured_outputs", "guided_json"])
def test_what_is_not_supported_is_refused_by_name(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


def test_numbers_of_numpy_are_as_good_as_those_of_python():
    bias = {np.int64(3): np.float32(1)}
    params = SamplingParams(temperature=np.float32(1), top_k=np.int64(3), logit_bias=bias, logprobs=np.int32(2))
    bias[np.int64(4)] = np.float32(5)
    assert params.logit_bias == {3: 1}, "what the caller keeps is copied"
    assert pickle.loads(pickle.dumps(params)) == params
    short = SamplingParams(min_tokens=np.int8(100), max_tokens=np.int8(120), presence_penalty=np.float16(0.5))
    assert [type(value) for value in (short.min_tokens, short.max_tokens, short.presence_penalty)] == [int, int, float]
    with pytest.raises(ValueError, match="use a smaller number"):
        SamplingParams(temperature=Fraction(10**400))


def test_only_what_is_asked_for_is_asked_for():
    assert Asks.of(SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, min_tokens=3)) == 0
    assert Asks.of(SamplingParams(logit_bias={})) == 0
    assert Asks.of(SamplingParams(logprobs=21)) == Asks.of(SamplingParams(logprobs=-1)) == 0, "the host finds those"
    asked = {
        Asks.PENALTIES: ({"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}),
        Asks.ONLY_ALLOWED: ({"allowed_token_ids": [1]},),
        Asks.TABLES: ({"logit_bias": {1: 1}}, {"bad_words": ["x"]}),
        Asks.LOGPROBS: ({"logprobs": 0}, {"logprobs": 20}),
    }
    for asks, cases in asked.items():
        assert all(Asks.of(SamplingParams(**fields)) == asks for fields in cases)


BAD_BEAMS = [
    ({"beam_width": 0}, "beam_width=0 is not valid"),
    ({"max_tokens": 0}, "max_tokens=0 is not valid"),
    ({"temperature": 0.5}, "temperature=0.5 is not supported by beam search: use 0"),
    ({"length_penalty": float("inf")}, "length_penalty=inf is not valid"),
    ({"early_stopping": "always"}, "early_stopping='always' is not valid: use True, False or 'never'"),
    ({"early_stopping": 1}, "early_stopping=1 is not valid"),
    ({"length_penalty": 1e308}, "length_penalty=1e\\+308 is not valid: use a number from -50 to 50"),
    ({"ignore_eos": 0}, "ignore_eos=0 is not valid"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_BEAMS, ids=lambda value: str(value)[:40])
def test_beams_that_are_not_valid_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5} | fields)
