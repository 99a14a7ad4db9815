"""Changes of logits and filters against the processors of transformers, whose values scripts/make_sampling_golden.py made.

There the tokens of prompt and answer are one sequence; here all of it is the answer where a processor reads it.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampler import make_sampling, make_tables

from jaxllm.kernels.sampling import find_threshold, summarize
from jaxllm.runner.device_state import NO_TOKEN, ONCE, Asks, Tables
from jaxllm.runner.logit_changes import Rows, change_logits

GOLDEN = np.load(Path(__file__).parent / "data" / "hf_processors.npz")
LOGITS, TOKEN_IDS = GOLDEN["logits"], GOLDEN["token_ids"]
ROWS, VOCAB = LOGITS.shape
BIASES = {5: 1.5, 9: -2.0, 20: 100.0, 31: -100.0, 49: 0.25}
EOS = [3, 7]


def change(tables=None, **fields):
    history = np.stack([np.bincount(row, minlength=VOCAB) for row in TOKEN_IDS]).astype(np.uint16) * ONCE
    rows = Rows(make_sampling(ROWS, VOCAB, **fields), jnp.arange(ROWS), jnp.full(ROWS, TOKEN_IDS.shape[1]))
    return jax.jit(change_logits)(LOGITS, rows, history, tables or make_tables(ROWS, VOCAB))


def check(found, name):
    expected = GOLDEN[name]
    assert np.array_equal(np.isneginf(found), np.isneginf(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert not np.array_equal(expected, LOGITS) or name == "min_tokens_reached", "the processor did nothing"


@pytest.mark.parametrize(("name", "penalty"), [("repetition_penalty", 1.3), ("repetition_reward", 0.6)])
def test_repetition_penalty(name, penalty):
    check(change(repetition_penalty=penalty), name)


def test_bad_words():
    words = GOLDEN["words"]
    bad_words = np.full((ROWS, len(words), words.shape[1]), -1, np.int32)
    bad_words[:] = words
    empty = make_tables(ROWS, VOCAB)
    recent = np.full((ROWS, words.shape[1] - 1), NO_TOKEN, np.int32)
    recent[:] = TOKEN_IDS[:, -recent.shape[1] :]
    check(change(Tables(empty.bias_ids, empty.biases, bad_words, recent), asks=Asks.TABLES.value), "bad_words")


def test_logit_bias():
    check(change(make_tables(ROWS, VOCAB, biases=BIASES), asks=Asks.TABLES.value), "logit_bias")


@pytest.mark.parametrize(("name", "more"), [("min_tokens", 1), ("min_tokens_reached", 0)])
def test_min_tokens(name, more):
    stop_ids = np.full(32, VOCAB)
    stop_ids[: len(EOS)] = EOS
    check(change(min_len=TOKEN_IDS.shape[1] + more, stop_ids=stop_ids), name)


@pytest.mark.parametrize(
    ("name", "values"), [("top_k", (7, 1.0, 0.0)), ("top_p", (0, 0.8, 0.0)), ("min_p", (0, 1.0, 0.1))]
)
def test_filters(name, values):
    top_k, top_p, min_p = (jnp.full(ROWS, value, dtype) for value, dtype in zip(values, "iff", strict=True))
    logits, scale = jnp.asarray(LOGITS), jnp.ones(ROWS)
    threshold = find_threshold(logits, summarize(logits, scale), scale, top_k, top_p, min_p)
    check(np.where(np.asarray(threshold)[:, None] <= LOGITS, LOGITS, -np.inf), name)
