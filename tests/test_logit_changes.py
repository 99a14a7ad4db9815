"""What requests ask to be done to their logits: penalties, biases, tokens that cannot come, processors; what is counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_sampler import (
    LOGITS,
    NUM_DRAWS,
    VOCAB,
    among,
    check_distribution,
    check_only_token,
    draw,
    exact_logprobs,
    make_tables,
    run,
    softmax,
)

from jaxllm.runner.device_state import EXCLUDED, IN_PROMPT, MOST_COUNTED, ONCE, Asks, state_specs
from jaxllm.runner.logit_changes import note_tokens


def test_repetition_penalty_makes_seen_tokens_less_likely():
    """Positive logits are divided by it and negative ones multiplied (arXiv:1909.05858)."""
    rng = np.random.default_rng(3)
    num_rows = NUM_DRAWS
    logits = rng.standard_normal((num_rows, VOCAB)).astype(np.float32)
    seen = rng.random((num_rows, VOCAB)) < 0.5
    penalty = rng.choice([0.7, 1.0, 1.5, 4.0], num_rows).astype(np.float32)
    changed = np.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    adjusted = np.where(seen, changed, logits)
    tokens, logprobs = run(logits, seen=seen, repetition_penalty=penalty, temperature=0.0)
    assert np.array_equal(tokens, adjusted.argmax(axis=-1))
    assert (tokens != logits.argmax(axis=-1)).mean() > 0.1
    assert np.allclose(logprobs, exact_logprobs(logits, tokens), atol=1e-5)


def test_repetition_penalty_changes_the_distribution_that_is_sampled():
    logits = np.array([2.0, 1.0, -1.0, -0.5, 0.0, 1.5, 0.3, -2.0])
    seen = np.array([True, False, True, False, True, True, False, False])
    tokens = draw(logits, seen=np.tile(seen, (NUM_DRAWS, 1)), repetition_penalty=1.5)
    penalised = np.where(seen, np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
    check_distribution(tokens, softmax(penalised))


COUNTS = np.array([0, 1, 3, 0, 2, 1, 0, 40])


def test_presence_and_frequency_penalties_are_of_the_answer():
    came = COUNTS > 0
    prompt = np.tile(np.arange(VOCAB) < 4, (NUM_DRAWS, 1))
    tokens = draw(seen=prompt, counts=COUNTS, presence_penalty=0.7, frequency_penalty=0.2)
    check_distribution(tokens, softmax(LOGITS - 0.7 * came - 0.2 * COUNTS))
    rewarded = draw(counts=COUNTS, presence_penalty=-0.5, frequency_penalty=0.0)
    check_distribution(rewarded, softmax(LOGITS + 0.5 * came))


def test_the_penalties_together_and_with_filters():
    prompt = np.arange(VOCAB) < 2
    factor = np.where(prompt | (COUNTS > 0), 1.2, 1.0)
    changed = LOGITS / factor - 0.3 * COUNTS - 0.1 * (COUNTS > 0)
    given = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1, "temperature": 0.8}
    tokens = draw(seen=np.tile(prompt, (NUM_DRAWS, 1)), counts=COUNTS, top_k=4, **given)
    check_distribution(tokens, among(np.argsort(-changed)[:4], softmax(changed, 0.8)))


def test_biases_and_allowed_tokens():
    biases = {0: -1.5, 4: 2.0, 7: -100.0}
    changed = LOGITS + np.array([biases.get(token, 0) for token in range(VOCAB)])
    tables = make_tables(NUM_DRAWS, biases=biases)
    check_distribution(draw(tables=tables, asks=Asks.TABLES.value), among(range(7), softmax(changed)))
    allowed = np.isin(np.arange(VOCAB), [1, 3, 4])
    asks = Asks.TABLES | Asks.ONLY_ALLOWED
    tokens = draw(tables=tables, excluded=~allowed, asks=asks.value, top_p=0.95)
    check_distribution(tokens, among([3, 4], softmax(changed)))


def test_tables_and_history_of_rows_that_do_not_ask_are_not_read():
    tables = make_tables(NUM_DRAWS, biases={3: 50}, words=[[0]])
    asks = np.where(np.arange(NUM_DRAWS) == 0, (Asks.TABLES | Asks.ONLY_ALLOWED).value, 0)
    tokens = draw(tables=tables, excluded=np.arange(VOCAB) == 2, asks=asks, counts=9, frequency_penalty=1.0)
    check_distribution(tokens[1:], softmax(LOGITS))
    assert tokens[0] == 3


@pytest.mark.parametrize(
    ("recent", "kept"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7]),
        ([5, 1], [1, 3, 4, 5, 6, 7]),
        ([7, 5, 1], [1, 4, 5, 6, 7]),
        ([1, 5], [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_last_token_of_a_bad_word_cannot_come(recent, kept):
    words = [[0], [1, 2], [7, 5, 1, 3], [6, 5, 1, 4]]
    tables = make_tables(NUM_DRAWS, words=words, recent=recent)
    check_distribution(draw(tables=tables, asks=Asks.TABLES.value), among(kept))


def test_where_nothing_may_come_the_most_likely_token_does():
    for temperature in (0.0, 1.0):
        check_only_token(draw(excluded=True, asks=Asks.ONLY_ALLOWED.value, temperature=temperature), 0)


def test_processors_apply_to_every_row_before_penalties():
    def mask_odd(logits):
        return jnp.where(jnp.arange(VOCAB) % 2 == 0, logits, -jnp.inf)

    def negate(logits):
        return -logits

    check_distribution(draw(processors=(mask_odd,)), among([0, 2, 4, 6]))
    tokens = draw(processors=(negate,), counts=COUNTS, repetition_penalty=2.0, frequency_penalty=0.0)
    check_distribution(tokens, softmax(np.where(COUNTS > 0, -2 * LOGITS, -LOGITS)))


def test_sampled_tokens_are_counted_and_remembered():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), state_specs(3, 2, VOCAB, mesh))
    words = np.zeros((4, VOCAB), np.uint16)
    words[1, 5] = IN_PROMPT | EXCLUDED
    words[2, 6] = IN_PROMPT + (MOST_COUNTED - 1) * ONCE
    state = state._replace(history=jnp.asarray(words))
    for token_ids in ([5, 6, 1], [5, 6, 2], [4, 6, 3]):
        state = jax.jit(note_tokens)(state, jnp.array([1, 2, 4]), jnp.array(token_ids))
    expected = words.copy()
    expected[1, 5] += 2 * ONCE
    expected[1, 4] += ONCE
    expected[2, 6] = IN_PROMPT + MOST_COUNTED * ONCE
    assert np.array_equal(state.history, expected), "of a seat past the last nothing is noted"
    assert state.tables.recent[1, -4:].tolist() == [0, 5, 5, 4] and not state.tables.recent[3].any()
