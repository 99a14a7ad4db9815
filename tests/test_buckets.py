"""Every plan fits a bucket, and there are few of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.runner.buckets import Bucket, make_ladder

MAX_EXECUTABLES = 16

platforms = st.sampled_from(["cpu", "gpu"])
counts = st.one_of(st.integers(1, 300), st.integers(1, 1 << 18))


@st.composite
def limits(draw):
    """max_num_seqs, and a token budget that is not below it."""
    max_num_seqs = draw(counts)
    return max_num_seqs, max_num_seqs + draw(st.one_of(st.just(0), counts))


@given(limits(), platforms)
def test_a_ladder_is_short_and_its_sizes_increase(limits, platform):
    max_num_seqs, budget = limits
    ladder = make_ladder(max_num_seqs, budget, platform)
    assert len(ladder.all) <= MAX_EXECUTABLES
    assert len({bucket.name for bucket in ladder.all}) == len(ladder.all)
    for buckets, largest in ((ladder.decode, max_num_seqs), (ladder.mixed, budget)):
        sizes = [bucket.tokens for bucket in buckets]
        assert sizes == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] == largest
    assert all(bucket.rows == bucket.tokens and not bucket.admits for bucket in ladder.decode)
    assert all(bucket.rows == min(bucket.tokens, max_num_seqs) and bucket.admits for bucket in ladder.mixed)


@given(limits(), platforms, st.data())
def test_every_plan_fits_the_smallest_bucket_that_holds_it(limits, platform, data):
    max_num_seqs, budget = limits
    ladder = make_ladder(max_num_seqs, budget, platform)
    num_rows = data.draw(st.integers(1, max_num_seqs))
    num_tokens = data.draw(st.one_of(st.just(num_rows), st.integers(num_rows, budget)))
    admits = data.draw(st.booleans())
    bucket = ladder.select(num_tokens, num_rows, admits)
    assert bucket.tokens >= num_tokens and bucket.rows >= num_rows
    decodes = num_tokens == num_rows and not admits
    assert bucket.admits == (not decodes)
    smaller = [other for other in (ladder.decode if decodes else ladder.mixed) if other < bucket]
    assert all(other.tokens < num_tokens or other.rows < num_rows for other in smaller)


@given(limits())
def test_padding_of_a_decode_step_is_bounded_on_a_gpu(limits):
    """A step is at most padded to twice its rows, or four times where there are very many sizes."""
    max_num_seqs, budget = limits
    sizes = [bucket.rows for bucket in make_ladder(max_num_seqs, budget, "gpu").decode]
    limit = 2 if max_num_seqs <= 512 else 4
    assert sizes[0] == 1
    assert all(large <= limit * small for small, large in pairwise(sizes))


def test_the_default_ladders():
    gpu, cpu = make_ladder(256, 8192, "gpu"), make_ladder(16, 128, "cpu")
    assert [bucket.rows for bucket in gpu.decode] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    assert [bucket.tokens for bucket in gpu.mixed] == [128, 512, 1024, 2048, 4096, 8192]
    assert [bucket.rows for bucket in cpu.decode] == [1, 16]
    assert [bucket.tokens for bucket in cpu.mixed] == [32, 128]


def test_all_begins_with_what_takes_longest_to_compile():
    ladder = make_ladder(16, 128, "cpu")
    assert ladder.all == (Bucket(128, 16, True), Bucket(32, 16, True), Bucket(16, 16, False), Bucket(1, 1, False))


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(129, 1), (17, 17)])
def test_a_plan_over_the_limits_is_a_broken_invariant(num_tokens, num_rows):
    with pytest.raises(AssertionError, match=f"no bucket for {num_tokens} tokens in {num_rows} rows"):
        make_ladder(16, 128, "cpu").select(num_tokens, num_rows, admits=False)
