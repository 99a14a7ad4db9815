"""The fixed shapes a step may have. One bucket is one compiled executable.

Two ladders: decode buckets, where every row is one token, and mixed buckets for everything else, with as
many rows as there can be. Every plan the scheduler can make fits a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_BUCKETS = 16
MAX_DECODE_BUCKETS = 11
MAX_HALVINGS = 5
SMALLEST_MIXED = {"cpu": 32, "gpu": 128}
"""On a GPU: the first token of a short prompt, alone, comes from the smallest one."""


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


def make_ladder(max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> BucketLadder:
    """The ladders for these largest steps.

    On a GPU decode sizes are powers of two and, above 64, steps of 64; mixed sizes are halvings of the token
    budget, and a small one. On a CPU, compiling takes longest and padding costs least (16 rows take twice as long as one): there are few sizes.
    """
    if platform == "cpu":
        decode_sizes = [16**power for power in range(5)]
        factor, most = 4, 3
    else:
        steps = list(range(128, 257, 64)) + [1 << power for power in range(9, 17)]
        decode_sizes = [1 << power for power in range(7)] + steps
        factor, most = 2, MAX_HALVINGS
    decode_sizes = _thin_out([size for size in decode_sizes if size < max_num_seqs] + [max_num_seqs])
    decode = tuple(Bucket(size, size, admits=False) for size in decode_sizes)
    smallest = SMALLEST_MIXED["cpu" if platform == "cpu" else "gpu"]
    mixed_sizes = _mixed_sizes(max_num_batched_tokens, factor, most, smallest)
    if platform != "cpu" and smallest < mixed_sizes[0] and len(decode) + len(mixed_sizes) < MAX_BUCKETS:
        mixed_sizes = [smallest, *mixed_sizes]
    mixed = tuple(Bucket(size, min(size, max_num_seqs), admits=True) for size in mixed_sizes)
    return BucketLadder(decode, mixed)


def _thin_out(sizes: list[int]) -> list[int]:
    """Leaves out every other size, small ones first, until they are few enough: small steps are cheap to pad."""
    excess = max(len(sizes) - MAX_DECODE_BUCKETS, 0)
    dropped = range(1, 2 * excess, 2)
    return [size for index, size in enumerate(sizes) if index not in dropped]


def _mixed_sizes(largest: int, factor: int, most: int, smallest: int) -> list[int]:
    sizes = [largest]
    while len(sizes) < most and sizes[-1] > smallest:
        sizes.append(-(-sizes[-1] // factor))
    return sizes[::-1]
