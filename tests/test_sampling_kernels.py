"""Summaries, thresholds and draws of both backends against NumPy, on ragged sizes and degenerate logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from test_sampler import make_sampling, make_tables

from jaxllm.kernels import sampling_threshold_pallas
from jaxllm.kernels.gumbel import GROUP, HALF, gumbel
from jaxllm.kernels.ordered_bits import LOWEST, order_bits, unorder_bits
from jaxllm.kernels.sampling import draw, find_threshold, summarize, top_tokens
from jaxllm.kernels.sampling_xla import largest_with_mass
from jaxllm.runner.device_state import Asks
from jaxllm.runner.logit_changes import Rows
from jaxllm.runner.sampler import sample

BACKENDS = ("xla", "pallas_interpret")
CAPACITY = sampling_threshold_pallas.CAPACITY


@pytest.fixture(scope="module", autouse=True)
def short_lists():
    """The interpreter copies whole lists wherever a kernel writes to one, and compiles what is unrolled for long: lists
    are short here, but in one test.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CAPACITY": 256, "WAYS": 4, "UNROLL": 1}.items():
            patch.setattr(sampling_threshold_pallas, name, value)
        sampling_threshold_pallas.find_threshold.clear_cache()
        yield
    sampling_threshold_pallas.find_threshold.clear_cache()


each_backend = pytest.mark.parametrize("backend", BACKENDS)
SIZES = [1, 7, GROUP, GROUP + 1, 64 * GROUP, 64 * GROUP + 5, 20000]
"""Below, at and beyond a group and a chunk."""


@partial(jax.jit, static_argnames="backend")
def threshold_of(logits, scale, top_k, top_p, min_p=None, *, backend):
    summary = summarize(logits, scale, backend=backend)
    return find_threshold(logits, summary, scale, top_k, top_p, min_p, backend=backend)


@partial(jax.jit, static_argnames="backend")
def choose(logits, scale, top_k, top_p, keys, positions, backend):
    summary = summarize(logits, scale, backend=backend)
    threshold = find_threshold(logits, summary, scale, top_k, top_p, backend=backend)
    return draw(logits, summary.peak, scale, threshold, keys, positions, backend=backend)


def make_logits(vocab, num_rows=8):
    """Wide, narrow and flat rows, rows of few different numbers, and such of which little is left."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((num_rows, vocab)).astype(np.float32) * rng.choice([0.3, 3, 30], (num_rows, 1))
    logits[1] = np.round(logits[1])
    logits[2] = 5.0
    logits[3] = -np.inf
    logits[3, vocab // 2] = -3.0
    logits[4, rng.random(vocab) < 0.99] = -np.inf
    logits[4, -1] = 1.0
    logits[5] = np.sort(logits[5])
    return logits.astype(np.float32)


def threshold_range(logits, scale, top_k, top_p):
    """By sorting, in float64: the least and the largest threshold that float32 masses may lead to.

    Where everything is kept, -inf is as good as the smallest logit.
    """
    if top_k == 0 and top_p == 1:
        return -np.inf, -np.inf
    kept = np.sort(logits)[::-1]
    lowest = kept[min(top_k or len(kept), len(kept)) - 1]
    unreached = lowest if 0 < top_k < len(kept) else -np.inf
    kept = kept[kept >= lowest]
    if top_p == 1:
        return unreached, lowest
    mass = np.cumsum(np.exp((kept.astype(np.float64) - kept[0]) * scale))
    target = np.float64(np.float32(top_p)) * mass[-1]
    reached = np.searchsorted(mass, target * np.array([1 + 1e-5, 1 - 1e-5]))
    return tuple(kept[at] if at < len(kept) else unreached for at in reached)


@each_backend
@pytest.mark.parametrize("vocab", SIZES)
def test_summary(backend, vocab):
    logits = make_logits(vocab)
    found = jax.jit(partial(summarize, backend=backend))(jnp.asarray(logits), jnp.ones(len(logits)))
    np.testing.assert_array_equal(found.peak, logits.max(axis=1))
    np.testing.assert_array_equal(found.most_likely, logits.argmax(axis=1))
    exact = logits.max(axis=1) + np.log(np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True)).sum(1))
    np.testing.assert_allclose(found.log_total, exact, rtol=1e-6, atol=1e-6)


FILTERS = [(0, 1.0), (1, 1.0), (40, 1.0), (10**6, 1.0), (0, 0.5), (0, 0.95), (40, 0.9), (3000, 0.99), (1, 0.1)]
"""top_k and top_p."""


@pytest.mark.parametrize(
    ("backend", "vocab"), [*(("xla", size) for size in SIZES), *(("pallas_interpret", size) for size in SIZES[1::2])]
)
def test_threshold_is_exact(backend, vocab):
    logits = np.repeat(make_logits(vocab), len(FILTERS), axis=0)
    scales = np.repeat(np.array([1, 0.5, 2, 1, 1.4, 10, 0.1, 1], np.float32), len(FILTERS))
    top_k, top_p = (np.tile(column, 8) for column in zip(*FILTERS, strict=True))
    found = threshold_of(logits, scales, top_k.astype(np.int32), top_p.astype(np.float32), backend=backend)
    for row, threshold in enumerate(np.asarray(found)):
        least, largest = threshold_range(logits[row], scales[row], top_k[row], top_p[row])
        assert least <= threshold <= largest, (row, top_k[row], top_p[row])


@each_backend
def test_a_mass_that_rounding_puts_out_of_reach_keeps_everything_that_top_k_keeps(backend):
    logits = np.tile(np.linspace(0, 1, 300, dtype=np.float32), (2, 1))
    top_k, top_p = np.array([0, 200], np.int32), np.full(2, 1 - 2**-24, np.float32)
    found = threshold_of(logits, np.ones(2, np.float32), top_k, top_p, backend=backend)
    kept = (logits >= np.asarray(found)[:, None]).sum(axis=1)
    assert kept[0] in (299, 300) and kept[1] in (199, 200)


def random_choice(vocab, num_rows, seed=0):
    """Logits and parameters of every kind."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((num_rows, vocab)).astype(np.float32) * 3,
        rng.choice([0.5, 1, 1.7], num_rows).astype(np.float32),
        rng.choice([0, 1, 5, 100], num_rows).astype(np.int32),
        rng.choice([1, 0.5, 0.9], num_rows).astype(np.float32),
        rng.integers(0, 2**32, (num_rows, 2), np.uint32),
        rng.integers(0, 2**31, num_rows, np.int32),
    )


def test_both_backends_draw_the_same_tokens():
    arguments = random_choice(64 * GROUP + 5, 24)
    np.testing.assert_array_equal(*(choose(*arguments, backend=backend) for backend in BACKENDS))


@each_backend
def test_logits_of_a_short_type_are_as_good_as_their_float32_values(backend):
    logits, *others = random_choice(300, 8, seed=4)
    short = jnp.asarray(logits, jnp.bfloat16)
    tokens = choose(short, *others, backend=backend)
    assert np.array_equal(tokens, choose(short.astype(jnp.float32), *others, backend="xla"))


@each_backend
def test_rows_are_the_same_in_any_batch(backend):
    arguments = random_choice(64 * GROUP + 5, 9)
    together = np.asarray(choose(*arguments, backend=backend))
    alone = [int(choose(*(part[row : row + 1] for part in arguments), backend=backend)[0]) for row in range(9)]
    assert together.tolist() == alone


def test_the_sampler_gives_the_same_on_both_backends():
    """With penalties, tables, stop tokens, greedy rows and seeds in one batch."""
    rng = np.random.default_rng(5)
    num_rows, vocab = 16, 700
    sampling = make_sampling(
        num_rows,
        vocab,
        temperature=rng.choice([0, 0.7, 1.5], num_rows),
        top_k=rng.choice([0, 9], num_rows),
        top_p=rng.choice([1, 0.7], num_rows),
        min_p=rng.choice([0, 0.02], num_rows),
        repetition_penalty=rng.choice([1, 1.3], num_rows),
        presence_penalty=rng.choice([0, 0.6], num_rows),
        asks=rng.choice([0, *Asks], num_rows),
        min_len=rng.choice([0, 10], num_rows),
        key=rng.integers(0, 2**32, (num_rows, 2), np.uint32),
        stop_ids=rng.integers(0, vocab, (num_rows, 32)),
    )
    logits = jnp.asarray(rng.standard_normal((num_rows, vocab)) * 3, jnp.float32)
    history = jnp.asarray(rng.choice([0, 1, 2, 5, 9], (num_rows, vocab)), jnp.uint16)
    tables = make_tables(num_rows, vocab, biases={5: 3, 600: -4}, words=[[1], [2, 3]], recent=[2])
    levels = {
        "everything": sampling,
        "nothing changed": sampling._replace(asks=jnp.zeros(num_rows, int), min_len=jnp.zeros(num_rows, int)),
    }
    levels["greedy"] = levels["nothing changed"]._replace(temperature=jnp.zeros(num_rows))
    samplers = [jax.jit(partial(sample, backend=backend)) for backend in BACKENDS]
    for name, level in levels.items():
        rows = Rows(level, jnp.arange(num_rows), jnp.full(num_rows, 5))
        one, other = (run(logits, rows, history, tables) for run in samplers)
        assert np.array_equal(one.token_ids, other.token_ids), name
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, err_msg=name)
        assert np.array_equal(one.details.token_ids, other.details.token_ids), name
        np.testing.assert_allclose(one.details.logprobs, other.details.logprobs, atol=1e-5, err_msg=name)


def test_noise_is_threefry():
    """The words are those of JAX's own implementation, the two of a call `HALF` tokens apart."""
    keys, positions = np.array([[5, 2**32 - 1], [0, 7]], np.uint32), np.array([9, 2**31 - 1], np.int32)
    noise = np.asarray(gumbel(jnp.asarray(keys), jnp.asarray(positions), 3 * GROUP - 5))
    for row in range(2):
        counters = np.arange(3 * HALF, dtype=np.uint32)
        counts = np.concatenate([np.full_like(counters, positions[row]), counters])
        words = np.asarray(threefry_2x32(jnp.asarray(keys[row]), jnp.asarray(counts))).reshape(2, 3, HALF)
        uniform = (words.transpose(1, 0, 2).reshape(-1)[: 3 * GROUP - 5] + 0.5) / 2**32
        np.testing.assert_allclose(noise[row], -np.log(-np.log1p(-uniform)), rtol=2e-5, atol=2e-6)


def test_noise_does_not_depend_on_the_size_of_the_vocabulary():
    keys, positions = jnp.asarray([[1, 2]], jnp.uint32), jnp.asarray([3])
    assert np.array_equal(gumbel(keys, positions, 40)[0], gumbel(keys, positions, 1000)[0, :40])


def test_noise_has_the_tail_of_its_distribution():
    """23 bits, as JAX's own default has, would cut it off at 16: too early for 150,000 tokens."""
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (64, 2), np.uint32))
    noise = np.asarray(gumbel(keys, jnp.zeros(64, jnp.int32), 100_000))
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.005) and noise.std() == pytest.approx(np.pi / 6**0.5, abs=0.005)
    for level in (8, 11, 13):
        expected = noise.size * -np.expm1(-np.exp(-level))
        assert (noise > level).sum() == pytest.approx(expected, abs=4 * expected**0.5)


DENORMAL = np.float32(1e-41)


def random_floats(rng, shape):
    """Of every magnitude and both signs, and among them zeros, denormals, infinities and many ties."""
    bits = rng.integers(0, 2**32, shape, np.uint32)
    values = bits.view(np.float32)
    special = rng.choice([0.0, -0.0, DENORMAL, -DENORMAL, -np.inf, np.inf, 1.0, -1.0], shape).astype(np.float32)
    return np.where(np.isnan(values) | (rng.random(shape) < 0.3), special, values)


def test_bits_have_the_order_of_the_floats():
    values = np.sort(random_floats(np.random.default_rng(4), 2000))
    order = np.asarray(order_bits(jnp.asarray(values))).astype(np.int64)
    assert np.array_equal(
        np.asarray(unorder_bits(order_bits(jnp.asarray(values)))).view(np.int32), values.view(np.int32)
    )
    is_zero = values == 0  # -0 is below 0
    assert (np.diff(order[~is_zero]) >= 0).all() and order.min() == LOWEST


def test_largest_with_mass_is_exact():
    """Against a sort, bit for bit but for the sign of zero; weights are whole numbers, so sums are exact."""
    rng = np.random.default_rng(0)
    values = random_floats(rng, (512, 40))
    weights = rng.integers(0, 5, values.shape).astype(np.float32)
    weights[:, 0] = 1
    target = np.ceil(rng.random(512) * weights.sum(axis=-1)).astype(np.float32)
    found = np.asarray(jax.jit(largest_with_mass)(values, weights, target))
    for row in range(512):
        descending = np.argsort(values[row], kind="stable")[::-1]
        reached = np.searchsorted(np.cumsum(weights[row][descending]), target[row])
        assert found[row] == values[row][descending[reached]]


@each_backend
def test_top_k_of_floats_of_every_magnitude(backend):
    logits = random_floats(np.random.default_rng(1), (32, 1000))
    logits[~np.isfinite(logits)] = 0
    top_k = np.arange(1, 33, dtype=np.int32) * 31
    found = threshold_of(logits, np.ones(32, np.float32), top_k, np.ones(32, np.float32), backend=backend)
    assert np.array_equal(found, [np.sort(row)[-k] for row, k in zip(logits, top_k, strict=True)])


def num_kept(logits, found):
    return (logits >= np.asarray(found)[:, None]).sum(axis=1)


@pytest.mark.parametrize(("capacity", "ways", "num_rows"), [(32, 8, 48), (CAPACITY, 5, 6)])
def test_any_number_of_collected_logits_leads_to_the_same_threshold(monkeypatch, capacity, ways, num_rows):
    """A short list makes the search narrow its bracket, again and again; both backends keep the same tokens."""
    monkeypatch.setattr(sampling_threshold_pallas, "CAPACITY", capacity)
    monkeypatch.setattr(sampling_threshold_pallas, "WAYS", ways)
    rng = np.random.default_rng(capacity)
    vocab = 5000
    logits = np.concatenate([make_logits(vocab)] * 6)[-num_rows:]
    monkeypatch.setattr(sampling_threshold_pallas, "UNROLL", 2)
    logits[0] += 1000
    logits[1] = np.where(rng.random(vocab) < 0.5, 1, 2)
    choices = (
        rng.choice([1, 0.5, 1.4], num_rows).astype(np.float32),
        rng.choice([0, 1, 50, 1000, 3000, vocab], num_rows).astype(np.int32),
        rng.choice([1, 0.95, 0.5], num_rows).astype(np.float32),
        rng.choice([0, 0, 0.01, 0.3], num_rows).astype(np.float32),
    )
    sampling_threshold_pallas.find_threshold.clear_cache()
    # Not through `threshold_of`, whose traces would be those of another capacity.
    found = jax.jit(lambda *given: threshold_of.__wrapped__(*given, backend="pallas_interpret"))(logits, *choices)
    expected = threshold_of(logits, *choices, backend="xla")
    assert np.array_equal(num_kept(logits, found), num_kept(logits, expected))
    sampling_threshold_pallas.find_threshold.clear_cache()


def test_min_p_and_top_p_are_those_of_numpy():
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((24, 900)) * 3).astype(np.float32)
    top_p, min_p = (rng.choice(kinds, 24).astype(np.float32) for kinds in ([1, 0.9, 0.4], [0, 0.02, 0.2]))
    top_k = rng.choice([0, 7], 24).astype(np.int32)
    found = threshold_of(logits, np.full(24, 0.7, np.float32), top_k, top_p, min_p, backend="xla")
    for row in range(24):
        values = np.sort(logits[row].astype(np.float64))[::-1]
        shares = np.exp((values - values[0]) * np.float32(0.7))
        shares = shares[: top_k[row] or None]
        shares = shares[shares >= min_p[row]]
        mass = np.cumsum(shares) / shares.sum()
        expected = 1 + np.searchsorted(mass, top_p[row]) if top_p[row] < 1 else len(shares)
        assert num_kept(logits[row : row + 1], found[row : row + 1]) == [expected]


@each_backend
@pytest.mark.parametrize("count", [1, 20])
def test_the_most_likely_tokens_come_in_order(backend, count):
    logits = make_logits(64 * GROUP + 5)
    logits[3] = np.round(logits[0])
    found = jax.jit(lambda x, s: top_tokens(x, summarize(x, s, backend=backend), count, backend=backend))
    values, tokens = found(jnp.asarray(logits), jnp.ones(len(logits)))
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    assert np.array_equal(tokens, expected)
    assert np.array_equal(values, np.take_along_axis(logits, expected, axis=1))
