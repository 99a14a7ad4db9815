"""A plan packed into one buffer, unpacked inside a compiled function, and applied to the state of the device."""

from __future__ import annotations

import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_sampler import make_tables

from jaxllm.request import Request
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.device_state import ONCE, Asks, DeviceState, SamplingState
from jaxllm.runner.sampler import Sample
from jaxllm.runner.step import apply_changes, lay_out_tokens, place_tokens, remember
from jaxllm.runner.step_input import FLOAT_FIELDS, LARGEST, SMALLEST, StepInput, StepLayout, most_admitted_blocks
from jaxllm.runner.token_details import no_details
from jaxllm.sampling_params import MAX_SUPPRESSED_TOKEN_IDS, SamplingParams
from jaxllm.scheduling.plan import PlanRow, StepPlan

BLOCK_SIZE, NUM_SEATS, MAX_BLOCKS, VOCAB = 4, 6, 10, 100
NUM_BLOCKS = 1000
TRASH = NUM_SEATS
ADMITTED_BLOCKS = 25
"""Of rows that take their seats in a step: two and a half tables of the longest request."""
FIRST_SAMPLED = 40
"""Token that the first row samples; each other row samples the next one."""
MAX_LEN = BLOCK_SIZE * MAX_BLOCKS
LAYOUTS = {
    name: StepLayout(bucket, ADMITTED_BLOCKS, TRASH, VOCAB)
    for name, bucket in {
        "mixed": Bucket(24, NUM_SEATS, admits=True),
        "mixed with more rows than tokens": Bucket(3, NUM_SEATS, admits=True),
        "decode": Bucket(4, 4, admits=False),
    }.items()
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


UNPACK = {layout: jax.jit(layout.unpack) for layout in LAYOUTS.values()}


def model_on(backend):
    """What of a model decides how its attention is prepared."""
    setting = SimpleNamespace(backend=backend, batch_invariant=False)
    return SimpleNamespace(setting=setting, config=SimpleNamespace(group_size=2, head_dim=64))


def pack_and_unpack(layout, plan) -> StepInput:
    packed = layout.pack(plan)
    assert packed.dtype == np.int32 and packed.shape == (layout.size,)
    return jax.tree.map(np.asarray, UNPACK[layout](packed))


def random_request(rng, num_tokens, num_known):
    """A request of `num_tokens` tokens, all but the last few of which are known."""
    prompt_len = rng.randint(1, min(num_known, num_tokens - 1) if num_tokens > 1 else 1)
    params = SamplingParams(
        temperature=rng.choice([0, 1, 0.7, 1e-6, 123.456]),
        top_p=rng.choice([1, 0.9, 1e-9]),
        top_k=rng.choice([-1, 0, 1, 50, 10**12]),
        min_p=rng.choice([0, 0.1]),
        repetition_penalty=rng.choice([1, 1.1, 0.5]),
        presence_penalty=rng.choice([0, -2, 1.5]),
        frequency_penalty=rng.choice([0, -0.1, 0.3]),
        logit_bias=rng.choice([None, {3: 1.0}]),
        logprobs=rng.choice([None, 0, 5]),
        min_tokens=rng.choice([0, 3, 10**12]),
        max_tokens=None,
        stop_token_ids=rng.sample([0, 5, 50, VOCAB - 1, VOCAB, 10**12], rng.randint(0, 6)),
    )
    seed = rng.choice([0, 1, 7, -1, -(2**40), 2**32, 2**63, 2**64 - 1, 2**64 + 5, rng.getrandbits(64)])
    prompt = tuple(rng.randrange(VOCAB) for _ in range(prompt_len))
    request = Request(str(seed), prompt, params, frozenset({2}), MAX_LEN, seed)
    request.output_ids = [rng.randrange(VOCAB) for _ in range(num_known - prompt_len)]
    request.num_known, request.num_tokens = num_known, num_tokens
    return request


def random_row(rng, seat, budget, admits):
    """A chunk of known tokens, or the one token that is still on the device; part of an admitted one is cached."""
    admitted = admits and rng.random() < 0.5
    pending = not admitted and rng.random() < 0.4
    start = rng.choice([0, rng.randint(0, MAX_LEN - budget)]) if admitted else rng.randint(1, MAX_LEN - budget)
    num_tokens = 1 if pending else rng.randint(1, budget)
    end = start + num_tokens
    num_known = start if pending else rng.randint(end, MAX_LEN)
    last = max(end, num_known)
    first_new = 0 if admitted else -(-start // BLOCK_SIZE)
    new = -(-last // BLOCK_SIZE) if admitted else rng.randint(0, first_new < MAX_BLOCKS)
    return PlanRow(
        request=random_request(rng, last, num_known),
        seat=seat,
        start=start,
        num_tokens=num_tokens,
        num_known=num_known,
        first_new_block=first_new if new else 0,
        new_block_ids=tuple(rng.randint(1, 10**6) for _ in range(new)),
        admitted=admitted,
        samples=end == last,
    )


def random_plan(rng, layout):
    """Rows on different seats that fit the layout's bucket."""
    bucket = layout.bucket
    num_rows = rng.randint(1, min(bucket.rows, bucket.tokens))
    spare = bucket.tokens - num_rows if bucket.admits else 0
    rows = []
    room = layout.admitted_blocks
    for seat in rng.sample(range(NUM_SEATS), num_rows):
        rows.append(random_row(rng, seat, 1 + rng.randint(0, spare), bucket.admits and room >= MAX_BLOCKS))
        spare -= rows[-1].num_tokens - 1
        room -= len(rows[-1].new_block_ids) if rows[-1].admitted else 0
    return StepPlan(tuple(rows))


def known_tokens(row):
    """What the host sends of a row; 0 where it does not know."""
    tokens = [*row.request.prompt_ids, *row.request.output_ids]
    return [tokens[position] if position < row.num_known else 0 for position in range(row.start, row.end)]


def plans(test):
    """Runs a test with random plans (a smaller seed is not a simpler plan, so nothing is shrunk)."""

    @settings(max_examples=25, deadline=None, phases=[Phase.generate])
    @given(seed=st.integers(0, 2**32))
    def run(layout, seed):
        test(layout, random.Random(seed))

    return run


@each_layout
@plans
def test_rows_survive_packing(layout, rng):
    plan = random_plan(rng, layout)
    step = pack_and_unpack(layout, plan)
    count, bucket = len(plan.rows), layout.bucket
    tokens = [token for row in plan.rows for token in known_tokens(row)]
    assert step.token_ids.tolist() == tokens + [0] * (bucket.tokens - len(tokens))
    assert np.diff(step.query_start).tolist() == [row.num_tokens for row in plan.rows] + [0] * (bucket.rows - count)
    assert step.query_start[0] == 0
    columns = {"seats": ("seat", TRASH), "context_lens": ("end", 0), "samples": ("samples", False)}
    for name, (field, padding) in columns.items():
        expected = [getattr(row, field) for row in plan.rows] + [padding] * (bucket.rows - count)
        assert getattr(step, name).tolist() == expected, name
    pending = [row.start >= row.num_known for row in plan.rows]
    assert step.pending.tolist() == pending + [False] * (bucket.rows - count)


@each_layout
@plans
def test_table_changes_survive_packing(layout, rng):
    plan = random_plan(rng, layout)
    step = pack_and_unpack(layout, plan)
    blocks, count = [block for row in plan.rows for block in row.new_block_ids], len(plan.rows)
    padding = [0] * (layout.bucket.rows - count)
    assert step.new_blocks.tolist() == blocks + [0] * (len(step.new_blocks) - len(blocks))
    assert step.first_block.tolist() == [row.first_new_block for row in plan.rows] + padding
    assert np.diff(step.block_start).tolist() == [len(row.new_block_ids) for row in plan.rows] + padding
    assert step.block_start[0] == 0


@each_layout
@plans
def test_sampling_of_admitted_rows_survives_packing(layout, rng):
    plan = random_plan(rng, layout)
    step = pack_and_unpack(layout, plan)
    admitted = [row for row in plan.rows if row.admitted]
    padding = [TRASH] * (len(step.admitted_seats) - len(admitted))
    assert step.admitted_seats.tolist() == [row.seat for row in admitted] + padding
    for index, row in enumerate(admitted):
        check_sampling(row.request, SamplingState(*(field[index] for field in step.admitted)))


def check_sampling(request, state):
    """Every number as the sampler wants it; those too large for the device are as good as the largest."""
    params = request.params
    for name in FLOAT_FIELDS:
        assert getattr(state, name) == np.float32(getattr(params, name)), name
    assert min(state.top_k, VOCAB) == min(max(params.top_k, 0), VOCAB) and (state.top_k == 0) == (params.top_k <= 0)
    assert state.asks == Asks.of(params)
    assert state.key.dtype == np.uint32
    assert int(state.key[0]) << 32 | int(state.key[1]) == request.seed % 2**64
    stops = sorted(stop for stop in request.stop_token_ids if stop < VOCAB) if params.min_tokens else []
    unused = [VOCAB] * (MAX_SUPPRESSED_TOKEN_IDS - len(stops))
    assert state.stop_ids.tolist() == stops + unused
    assert state.min_len == (min(request.prompt_len + params.min_tokens, 2**31 - 1) if params.min_tokens else 0)


@pytest.mark.parametrize(("number", "packed"), [(1e300, LARGEST), (5e-324, SMALLEST)])
def test_numbers_that_no_float32_holds_stay_within_its_range(number, packed):
    params = SamplingParams(temperature=number, repetition_penalty=number, top_p=min(number, 1))
    request = Request("extreme", (1,), params, frozenset(), MAX_LEN, seed=0)
    row = PlanRow(request, 0, 0, 1, 1, 0, (1,), admitted=True, samples=True)
    state = pack_and_unpack(LAYOUTS["mixed"], StepPlan((row,))).admitted
    assert state.temperature[0] == state.repetition_penalty[0] == np.float32(packed)
    assert state.top_p[0] == np.float32(min(packed, 1))


def test_as_many_stop_tokens_as_there_is_room_for():
    stops = range(1, MAX_SUPPRESSED_TOKEN_IDS + 1)
    params = SamplingParams(min_tokens=1, stop_token_ids=stops, ignore_eos=True)
    request = Request("stops", (1,), params, frozenset({99}), MAX_LEN, seed=0)
    row = PlanRow(request, 0, 0, 1, 1, 0, (1,), admitted=True, samples=True)
    state = pack_and_unpack(LAYOUTS["mixed"], StepPlan((row,))).admitted
    assert state.stop_ids[0].tolist() == list(stops)


@each_layout
def test_the_most_a_bucket_holds_fits(layout):
    """Every row but the last begins a block; that one takes its seat with as many as the step can name."""
    rows = min(layout.bucket.rows, layout.bucket.tokens)
    request = Request("full", tuple(range(1, 60)), SamplingParams(), frozenset(), 60, seed=0)
    plan_rows = [PlanRow(request, seat, 4, 1, 59, 1, (7,), admitted=False, samples=False) for seat in range(rows)]
    if layout.bucket.admits:
        table = tuple(range(1, 1 + ADMITTED_BLOCKS))
        plan_rows[-1] = PlanRow(request, rows, 4, 1, 59, 0, table, admitted=True, samples=False)
    step = pack_and_unpack(layout, StepPlan(tuple(plan_rows)))
    assert (step.new_blocks > 0).sum() == rows + (ADMITTED_BLOCKS - 1 if layout.bucket.admits else 0)


@pytest.mark.parametrize(("max_blocks", "num_seats", "most"), [(8192, 256, 8192), (10, 16, 160), (128, 256, 4096)])
def test_a_step_can_name_the_longest_table(max_blocks, num_seats, most):
    assert most_admitted_blocks(max_blocks, num_seats) == most


def random_state(rng):
    """Device state full of random numbers, as NumPy arrays."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    seats = NUM_SEATS + 1
    sampling = SamplingState(
        temperature=numbers.random(seats, np.float32),
        top_p=numbers.random(seats, np.float32),
        top_k=numbers.integers(0, 9, seats, np.int32),
        min_p=numbers.random(seats, np.float32),
        repetition_penalty=numbers.random(seats, np.float32),
        presence_penalty=numbers.random(seats, np.float32),
        frequency_penalty=numbers.random(seats, np.float32),
        asks=numbers.integers(0, 16, seats, np.int32),
        key=numbers.integers(0, 2**32, (seats, 2), np.uint32),
        min_len=numbers.integers(0, 9, seats, np.int32),
        stop_ids=numbers.integers(0, VOCAB, (seats, MAX_SUPPRESSED_TOKEN_IDS), np.int32),
    )
    last_token = numbers.integers(0, VOCAB, seats, np.int32)
    block_table = numbers.integers(1, 1000, (seats, MAX_BLOCKS), np.int32)
    history = numbers.integers(0, 1000, (seats, VOCAB), np.uint16)
    return DeviceState(last_token, block_table, sampling, history, make_tables(seats, VOCAB))


@jax.jit
def all_parts(state: DeviceState, step: StepInput, sampled: Sample):
    """The parts of `run_step` around the model, one after the other."""
    changed = apply_changes(state, step)
    tokens = lay_out_tokens(changed, step)
    model = model_on("xla")
    placement = place_tokens(model, changed, step, tokens, (NUM_BLOCKS, BLOCK_SIZE))
    return changed, tokens, placement, remember(changed, step, sampled)


def run_parts(rng, layout):
    """A random plan on a random state: the plan, the state before, and what the parts return."""
    plan, state = random_plan(rng, layout), random_state(rng)
    num_rows = layout.bucket.rows
    token_ids = FIRST_SAMPLED + np.arange(num_rows, dtype=np.int32)
    sampled = Sample(token_ids, np.zeros(num_rows, np.float32), no_details(num_rows))
    parts = all_parts(state, pack_and_unpack(layout, plan), sampled)
    return plan, state, jax.tree.map(np.asarray, parts)


@each_layout
def test_only_steps_that_admit_are_prepared_for_rows_of_many_tokens(layout):
    rng = random.Random(0)
    model = model_on("pallas")

    def place(state, step):
        return place_tokens(model, state, step, lay_out_tokens(state, step), (NUM_BLOCKS, BLOCK_SIZE))

    placement = jax.eval_shape(place, random_state(rng), pack_and_unpack(layout, random_plan(rng, layout)))
    assert (placement.attention_work.chunks is not None) == layout.bucket.admits


@each_layout
@plans
def test_changes_reach_their_seats_and_no_other(layout, rng):
    plan, before, (after, *_) = run_parts(rng, layout)
    table = before.block_table.copy()
    for row in plan.rows:
        table[row.seat, row.first_new_block : row.first_new_block + len(row.new_block_ids)] = row.new_block_ids
    assert np.array_equal(after.block_table[:TRASH], table[:TRASH])
    admitted = {row.seat: row for row in plan.rows if row.admitted}
    for seat in range(NUM_SEATS):
        old, new = (SamplingState(*(field[seat] for field in state.sampling)) for state in (before, after))
        if seat in admitted:
            check_sampling(admitted[seat].request, new)
        else:
            assert all(map(np.array_equal, old, new))
    assert np.array_equal(after.history, before.history)
    assert np.array_equal(after.last_token, before.last_token)


@each_layout
@plans
def test_every_token_knows_its_seat_and_position(layout, rng):
    """Pending tokens are the ones their seats sampled last; padding sits on the trash seat."""
    plan, before, (_, tokens, *_) = run_parts(rng, layout)
    expected = []
    for row in plan.rows:
        ids = known_tokens(row) if row.end <= row.num_known else [before.last_token[row.seat]]
        expected += zip(ids, [row.seat] * row.num_tokens, range(row.start, row.end), strict=True)
    found = np.stack([tokens.ids, tokens.seat, tokens.position], axis=1).tolist()
    assert found[: len(expected)] == [list(map(int, token)) for token in expected]
    padding = layout.bucket.tokens - len(expected)
    assert tokens.valid.tolist() == [True] * len(expected) + [False] * padding
    assert [entry[1:] for entry in found[len(expected) :]] == [[TRASH, 0]] * padding


@each_layout
@plans
def test_every_token_has_its_slot_and_padding_none(layout, rng):
    plan, _, (after, tokens, placement, _) = run_parts(rng, layout)
    slots = list(zip(placement.block.tolist(), placement.offset.tolist(), strict=True))
    expected = [
        (int(after.block_table[row.seat, position // BLOCK_SIZE]), position % BLOCK_SIZE)
        for row in plan.rows
        for position in range(row.start, row.end)
    ]
    assert slots[: len(expected)] == expected
    assert all(block == NUM_BLOCKS for block, _ in slots[len(expected) :]), "padding would be written"
    work = placement.attention_work
    assert sorted(work.tiles.position[work.tiles.valid].tolist()) == sorted(tokens.position[tokens.valid].tolist())


@each_layout
@plans
def test_seats_remember_what_their_rows_sampled(layout, rng):
    plan, before, (*_, after) = run_parts(rng, layout)
    expected, history, recent = before.last_token.copy(), before.history.copy(), before.tables.recent.copy()
    for index, row in enumerate(plan.rows):
        if row.samples:
            expected[row.seat] = FIRST_SAMPLED + index
            history[row.seat, FIRST_SAMPLED + index] += ONCE
            recent[row.seat] = [*recent[row.seat][1:], FIRST_SAMPLED + index]
    assert np.array_equal(after.last_token, expected)
    assert np.array_equal(after.history, history)
    assert np.array_equal(after.tables.recent, recent)
