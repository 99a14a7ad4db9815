"""The fixed shapes a step may have. One bucket is one compiled executable.

Two ladders: decode buckets, where every row is one token, and mixed buckets for everything else, which
all have the same number of rows. Every plan the scheduler can make fits a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_MIXED_BUCKETS = 5
SMALLEST_MIXED = 32


@dataclass(frozen=True, order=True)
class Bucket:
    """The padded shape of a step."""

    tokens: int
    rows: int
    admits: bool
    """Rows may take a seat in the step (mixed buckets)."""

    @property
    def name(self) -> str:
        return f"{'mixed' if self.admits else 'decode'}-{self.tokens}"


@dataclass(frozen=True)
class BucketLadder:
    """The buckets of one engine, smallest first."""

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.mixed[::-1] + self.decode[::-1]

    def select(self, num_tokens: int, num_rows: int, admits: bool) -> Bucket:
        """The smallest bucket that holds a step; a step whose rows are all one token and seated decodes."""
        decodes = num_tokens == num_rows and not admits
        ladder = self.decode if decodes else self.mixed
        fitting = (bucket for bucket in ladder if bucket.tokens >= num_tokens and bucket.rows >= num_rows)
        bucket = next(fitting, None)
        assert bucket is not None, f"no bucket for {num_tokens} tokens in {num_rows} rows"
        return bucket


def make_ladder(max_num_seqs: int, max_num_batched_tokens: int) -> BucketLadder:
    """Powers of two (and steps of 64 above 64) for decode; halvings of the token budget for mixed steps."""
    decode = tuple(Bucket(rows, rows, admits=False) for rows in _decode_sizes(max_num_seqs))
    mixed = tuple(Bucket(tokens, max_num_seqs, admits=True) for tokens in _mixed_sizes(max_num_batched_tokens))
    return BucketLadder(decode, mixed)


def _decode_sizes(largest: int) -> list[int]:
    powers = [1 << power for power in range(7)]
    steps = list(range(128, 257, 64)) + [1 << power for power in range(9, 17)]
    return [size for size in powers + steps if size < largest] + [largest]


def _mixed_sizes(largest: int) -> list[int]:
    sizes = [largest]
    while len(sizes) < MAX_MIXED_BUCKETS and sizes[-1] > SMALLEST_MIXED:
        sizes.append(-(-sizes[-1] // 2))
    return sizes[::-1]
