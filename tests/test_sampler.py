"""What each sampling parameter does to the distribution of a row's token, and that rows are independent."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner.device_state import (
    ANY_TOKEN,
    EXCLUDED,
    IN_PROMPT,
    NO_TOKEN,
    ONCE,
    Asks,
    SamplingState,
    Tables,
)
from jaxllm.runner.logit_changes import Rows
from jaxllm.runner.sampler import sample
from jaxllm.runner.token_details import unpack_details
from jaxllm.sampling_params import MAX_SUPPRESSED_TOKEN_IDS, PACKED_LOGPROBS

VOCAB = 8
NUM_DRAWS = 4096
LOGITS = np.log(np.array([0.3, 0.02, 0.2, 0.13, 0.05, 0.1, 0.15, 0.05], np.float32)) + 4
"""Of a distribution with a tie, in no order; log-probabilities and a constant."""
CHI_SQUARE = {0: 1e-9, 1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}
"""What a right sampler exceeds once in a thousand seeds, by degrees of freedom."""


@partial(jax.jit, static_argnames=("backend", "processors"))
def jitted(logits, sampling, history, tables, lengths, backend="xla", processors=()):
    rows = Rows(sampling, jnp.arange(len(logits)), lengths)
    return sample(logits, rows, history, tables, backend=backend, processors=processors)


DTYPES = {"key": np.uint32} | dict.fromkeys(("top_k", "min_len", "stop_ids", "asks"), np.int32)


def make_sampling(num_rows, vocab=VOCAB, **fields):
    """Sampling state of these rows: 1 for every row where a field is one number; by default plain sampling."""
    defaults = dict.fromkeys(SamplingState._fields, 0) | {
        "temperature": 1.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "key": [1, 2],
        "stop_ids": vocab,
    }
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    if "asks" not in fields and any(name in fields for name in penalties):
        fields["asks"] = Asks.PENALTIES.value
    widths = {"key": (2,), "stop_ids": (MAX_SUPPRESSED_TOKEN_IDS,)}
    arrays = {}
    for name, default in defaults.items():
        value = np.asarray(fields.pop(name, default), DTYPES.get(name, np.float32))
        if value.ndim == 1 and name not in widths:
            value = value.reshape(num_rows)
        arrays[name] = np.broadcast_to(value, (num_rows, *widths.get(name, ())))
    assert not fields, f"no such fields: {fields}"
    return SamplingState(**arrays)


def make_tables(num_rows, vocab=VOCAB, biases=(), words=(), recent=()):
    """The same for every row: biases by token, bad words as lists of tokens, and the last tokens of the answer."""
    bias_ids, amounts = np.full((num_rows, 16), vocab, np.int32), np.zeros((num_rows, 16), np.float32)
    for index, (token, amount) in enumerate(dict(biases).items()):
        bias_ids[:, index], amounts[:, index] = token, amount
    bad_words = np.full((num_rows, 8, 4), ANY_TOKEN, np.int32)
    bad_words[:, :, -1] = vocab
    for index, word in enumerate(words):
        bad_words[:, index, 4 - len(word) :] = word
    latest = np.full((num_rows, 3), NO_TOKEN, np.int32)
    if len(recent):
        latest[:, 3 - len(recent[-3:]) :] = recent[-3:]
    return Tables(bias_ids, amounts, bad_words, latest)


def run(logits, lengths=0, seen=None, backend="xla", **fields):
    """Tokens and log-probabilities, as NumPy arrays; `seen` are tokens of the prompt, `counts` those of the answer."""
    num_rows, vocab = logits.shape
    history = np.zeros((num_rows, vocab), np.uint16) if seen is None else seen.astype(np.uint16) * IN_PROMPT
    history = history + (np.asarray(fields.pop("counts", 0)) * ONCE).astype(np.uint16)
    history = np.where(fields.pop("excluded", False), history | EXCLUDED, history).astype(np.uint16)
    tables = fields.pop("tables", None) or make_tables(num_rows, vocab)
    processors = fields.pop("processors", ())
    lengths = np.broadcast_to(np.asarray(lengths, np.int32), (num_rows,))
    sampling = make_sampling(num_rows, vocab, **fields)
    sampled = jitted(logits.astype(np.float32), sampling, history, tables, lengths, backend, processors)
    return np.asarray(sampled.token_ids), np.asarray(sampled.logprobs)


def draw(logits=LOGITS, **fields):
    """A token at each of many positions, all under one key."""
    logits = np.tile(np.asarray(logits, np.float32), (NUM_DRAWS, 1))
    return run(logits, np.arange(NUM_DRAWS), **fields)[0]


def check_distribution(tokens, probabilities):
    """Pearson's chi-square test; tokens of probability 0 must not come at all."""
    probabilities = np.asarray(probabilities, np.float64) / np.sum(probabilities)
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, f"tokens that cannot come did: {counts}"
    expected = len(tokens) * probabilities[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE[possible.sum() - 1], f"{counts[possible]} instead of {expected}"


def check_only_token(tokens, token):
    assert set(tokens) == {token}


def softmax(logits, temperature=1.0):
    weights = np.exp((np.asarray(logits, np.float64) - np.max(logits)) / temperature)
    return weights / weights.sum()


def among(tokens, probabilities=None):
    """The distribution of LOGITS, or another one, without any but these tokens."""
    probabilities = softmax(LOGITS) if probabilities is None else probabilities
    return np.where(np.isin(np.arange(len(probabilities)), tokens), probabilities, 0)


def test_temperature_0_takes_the_most_likely_token():
    logits = np.random.default_rng(0).standard_normal((NUM_DRAWS, VOCAB)).astype(np.float32)
    tokens, _ = run(logits, temperature=0.0, top_p=0.1, top_k=3)
    assert np.array_equal(tokens, logits.argmax(axis=-1))


def test_greedy_takes_the_first_of_equals():
    check_only_token(draw([1, 3, 0, 3, 2, 3, 0, 0], temperature=0.0), 1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 100.0])
def test_temperature(temperature):
    check_distribution(draw(temperature=temperature), softmax(LOGITS, temperature))


def test_the_key_draws_as_well_as_the_position():
    keys = np.random.default_rng(0).integers(0, 2**32, (NUM_DRAWS, 2), np.uint32)
    tokens, _ = run(np.tile(LOGITS, (NUM_DRAWS, 1)), 17, key=keys)
    check_distribution(tokens, softmax(LOGITS))


def test_a_low_temperature_is_nearly_greedy():
    assert (draw(temperature=1e-4) == 0).all()


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [0]), (2, [0, 2]), (5, [0, 2, 3, 5, 6]), (8, range(8)), (99, range(8))]
)
def test_top_k(top_k, kept):
    check_distribution(draw(top_k=top_k), among(kept))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, [0]), (0.29, [0]), (0.31, [0, 2]), (0.49, [0, 2]), (0.51, [0, 2, 6]), (0.97, [0, 2, 3, 4, 5, 6, 7])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    check_distribution(draw(top_p=top_p), among(kept))


def test_top_p_is_of_the_distribution_at_the_temperature():
    """At temperature 0.5 the best token alone has 0.48 of the probability, at 1 it has 0.3."""
    check_only_token(draw(top_p=0.45, temperature=0.5), 0)
    check_distribution(draw(top_p=0.45), among([0, 2]))


def test_top_p_is_of_what_top_k_keeps():
    """Of the best two tokens alone the first has 0.6, enough for 0.55; of all tokens it has 0.3."""
    check_only_token(draw(top_k=2, top_p=0.55), 0)
    check_distribution(draw(top_k=2, top_p=0.65), among([0, 2]))
    check_distribution(draw(top_k=3, top_p=0.99), among([0, 2, 6]))


def test_equal_logits_pass_together():
    """No order of equals is better than another: all of those at the border are kept."""
    tied = np.array([2.0, 1.0, 2.0, 2.0, 0.0, -1.0, 0.5, -2.0])
    check_distribution(draw(tied, top_k=1), among([0, 2, 3], softmax(tied)))
    check_distribution(draw(tied, top_k=2), among([0, 2, 3], softmax(tied)))
    check_distribution(draw(tied, top_p=0.1), among([0, 2, 3], softmax(tied)))
    check_distribution(draw(np.zeros(VOCAB), top_k=3), np.ones(VOCAB))
    check_distribution(draw(np.zeros(VOCAB), top_p=0.5), np.ones(VOCAB))


FILTERS = [
    {},
    {"min_p": 0.2},
    {"top_k": 3},
    {"top_p": 0.5},
    {"top_p": 1 - 2**-24},
    {"top_k": 3, "top_p": 0.9},
    {"temperature": 0.0},
]
each_filter = pytest.mark.parametrize("fields", FILTERS, ids=str)


@each_filter
def test_degenerate_logits(fields):
    only = np.full(VOCAB, -np.inf)
    only[5] = -3.0
    check_only_token(draw(only, **fields), 5)
    huge = np.array([-1e30, 1e30, -1e30, -3e38, 0, 1, 2, 3])
    check_only_token(draw(huge, **fields), 1)
    low = np.full(VOCAB, -1e30)
    low[6] = -0.9e30
    check_only_token(draw(low, **fields), 6)


@each_filter
def test_rows_with_different_parameters_do_not_meet(fields):
    """Every row of a batch in which all parameters differ has the token it has alone."""
    rng = np.random.default_rng(1)
    num_rows = 16
    logits = rng.standard_normal((num_rows, 40)).astype(np.float32) * 3
    seen = rng.random((num_rows, 40)) < 0.3
    neighbours = {
        "temperature": rng.choice([0, 0.7, 1.5], num_rows),
        "top_k": rng.choice([0, 2, 7], num_rows),
        "top_p": rng.choice([1, 0.4, 0.9], num_rows),
        "min_p": rng.choice([0, 0.05], num_rows),
        "repetition_penalty": rng.choice([1, 1.3], num_rows),
        "frequency_penalty": rng.choice([0, 0.5], num_rows),
        "asks": rng.choice([0, *Asks], num_rows),
        "min_len": rng.choice([0, 1000], num_rows),
        "stop_ids": rng.integers(0, 41, (num_rows, MAX_SUPPRESSED_TOKEN_IDS)),
        "key": rng.integers(0, 2**32, (num_rows, 2), np.uint32),
    }
    lengths = rng.integers(0, 100, num_rows)
    for row in range(0, num_rows, 3):
        plain = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
        mine = dict.fromkeys(("top_k", "min_p", "frequency_penalty", "asks", "min_len"), 0) | plain | fields
        for name, value in mine.items():
            neighbours[name][row] = value
    together, together_logprobs = run(logits, lengths, seen, **neighbours)
    for row in range(num_rows):
        one = slice(row, row + 1)
        parameters = {name: value[one] for name, value in neighbours.items()}
        alone, logprob = run(logits[one], lengths[one], seen[one], **parameters)
        assert alone == together[one]
        assert logprob == pytest.approx(together_logprobs[one], abs=1e-5)


def test_rows_are_taken_by_their_seats():
    sampling = make_sampling(2, 4, temperature=0.0, repetition_penalty=0.5)
    history = (np.eye(3, 4) * IN_PROMPT).astype(np.uint16)
    rows = Rows(sampling, jnp.array([2, 1]), jnp.zeros(2, jnp.int32))
    sampled = jax.jit(sample)(jnp.ones((2, 4)), rows, history, make_tables(3, 4))
    assert sampled.token_ids.tolist() == [2, 1], "a penalty below 1 makes the only seen token of the seat the best"


def test_a_token_depends_on_key_and_position_and_on_nothing_else():
    logits = np.zeros((16, 40))
    tokens, _ = run(logits, np.arange(16))
    order = np.random.default_rng(0).permutation(16)
    assert np.array_equal(run(logits, order)[0], tokens[order])
    assert len(set(tokens)) > 8, "positions share their random numbers"
    for position in range(16):
        assert run(logits[:1], position)[0] == tokens[position]


@pytest.mark.parametrize("other", [[1, 3], [3, 2], [2, 1]])
def test_both_halves_of_the_key_matter(other):
    logits = np.zeros((NUM_DRAWS, VOCAB))
    mine, others = (run(logits, np.arange(NUM_DRAWS), key=key)[0] for key in ([1, 2], other))
    assert np.mean(mine == others) == pytest.approx(1 / VOCAB, abs=0.02)


def test_stop_tokens_cannot_come_before_min_tokens():
    """Positions count the prompt: the token at position `min_len` is the first that may end the answer."""
    stops = np.full(MAX_SUPPRESSED_TOKEN_IDS, VOCAB)
    stops[:2] = 0, 6
    half = NUM_DRAWS // 2
    tokens = draw(stop_ids=stops, min_len=half)
    check_distribution(tokens[:half], among([1, 2, 3, 4, 5, 7]))
    check_distribution(tokens[half:], softmax(LOGITS))
    greedy = draw(stop_ids=stops, min_len=half, temperature=0.0)
    assert set(greedy[:half]) == {2} and set(greedy[half:]) == {0}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(1.0, [0]), (0.7, [0]), (0.6, [0, 2]), (0.4, [0, 2, 3, 6]), (0.1, [0, 2, 3, 4, 5, 6, 7])]
)
def test_min_p_is_a_share_of_the_most_likely_tokens_probability(min_p, kept):
    check_distribution(draw(min_p=min_p), among(kept))


def test_min_p_comes_after_the_temperature_and_before_the_others():
    check_distribution(draw(min_p=0.4, temperature=2.0), among([0, 2, 3, 4, 5, 6, 7], softmax(LOGITS, 2.0)))
    check_distribution(draw(min_p=0.4, top_k=3), among([0, 2, 6]))
    # Of what is left 0.3, 0.2, 0.15, 0.13: half is reached by the first two, of all tokens by three.
    check_distribution(draw(min_p=0.4, top_p=0.6), among([0, 2]))
    check_distribution(draw(top_p=0.6), among([0, 2, 6]))


def test_suppressing_every_token_but_one_under_every_filter():
    stops = np.full(MAX_SUPPRESSED_TOKEN_IDS, VOCAB)
    stops[:7] = 0, 1, 2, 3, 5, 6, 7
    for fields in FILTERS:
        check_only_token(draw(stop_ids=stops, min_len=NUM_DRAWS, **fields), 4)


def exact_logprobs(logits, tokens):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    table = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return table[np.arange(len(tokens)), tokens]


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.0}, {"temperature": 0.3, "top_k": 2, "top_p": 0.5, "repetition_penalty": 3.0}]
)
def test_logprobs_are_of_the_raw_distribution(fields):
    logits = np.random.default_rng(5).standard_normal((NUM_DRAWS, VOCAB)).astype(np.float32) * 10
    tokens, logprobs = run(logits, np.arange(NUM_DRAWS), seen=np.ones(logits.shape, bool), **fields)
    assert np.allclose(logprobs, exact_logprobs(logits, tokens), atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
def test_details_are_of_the_raw_distribution(backend):
    rng = np.random.default_rng(7)
    logits = np.round(rng.standard_normal((6, 300)) * 4).astype(np.float32)  # with ties
    asks = (Asks.LOGPROBS | Asks.PENALTIES).value
    rows = Rows(make_sampling(6, 300, asks=asks, repetition_penalty=3.0), jnp.arange(6), jnp.arange(6))
    history = np.full((6, 300), IN_PROMPT, np.uint16)
    found = jax.jit(partial(sample, backend=backend))(logits, rows, history, make_tables(6, 300))
    token_ids = np.asarray(found.token_ids)
    chosen = logits[np.arange(6), token_ids]
    assert found.details.ranks.tolist() == (logits >= chosen[:, None]).sum(axis=1).tolist()
    best = np.argsort(-logits, axis=1, kind="stable")[:, :PACKED_LOGPROBS]
    assert np.array_equal(found.details.token_ids, best)
    tokens = best.reshape(-1)
    repeated = np.repeat(logits, PACKED_LOGPROBS, axis=0)
    assert np.allclose(found.details.logprobs.reshape(-1), exact_logprobs(repeated, tokens), atol=1e-5)
    unpacked = unpack_details(np.asarray(found.details.pack()), found.logprobs.tolist(), 3)
    assert [one.top_token_ids for one in unpacked] == best[:, :3].tolist()
    assert [one.rank for one in unpacked] == found.details.ranks.tolist()
    assert np.allclose([one.top_logprobs for one in unpacked], found.details.logprobs[:, :3])
