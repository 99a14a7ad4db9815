"""How device memory is divided: arithmetic on bytes, blocks and tokens, and the reports of it. No devices.

The number of K/V cache blocks is part of every compiled shape. Invariant: it follows from numbers that are the
same at every start (the configuration, the device's size, the model's, the largest step's temporaries), never
from what happens to be free, so that the same start finds its compiled programs again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

GIB = 1 << 30
BLOCK_ROUNDING = 256
TEMP_ROUNDING = 256 << 20
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128
"""Tokens; what block_size="auto" chooses from."""
MAX_BLOCK_BYTES = 2 << 20
MIN_BLOCKS_OF_LONGEST = 16
MOST_IMBALANCE = 10.0
"""Percent; more deserves a warning."""


def calculate_kv_cache_blocks(  # noqa: PLR0913 - what decides the number is what it takes
    gpu_memory_gb: float,
    model_size_gb: float,
    block_size: int = 16,
    num_layers: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype_size: int = 2,
    gpu_memory_utilization: float = 0.9,
) -> int:
    """How many K/V cache blocks fit beside a model on one GPU; times `block_size` it is the tokens they hold.

    A block takes 2 (keys and values) x block_size x num_layers x num_kv_heads x head_dim x dtype_size bytes.
    The number is rounded down to a multiple of 256, unless it is below. For 80 GB, 14 GB of weights and 32 K/V heads:

        memory for blocks    80 x 0.9 - 14 = 58 GB (of 2**30 bytes)
        one block            2 x 16 x 32 x 32 x 128 x 2 = 8,388,608 bytes
        blocks               58 x 2**30 / 8,388,608 = 7,424 = 29 x 256
        tokens               7,424 x 16 = 118,784

    An engine also sets the temporaries of its largest step aside, which only a compiler knows: about 0.5 GB more
    in `model_size_gb` stands for them. One of an engine's blocks is the null block, which no request gets.

    Args:
        gpu_memory_gb: memory of the GPU, in units of 2**30 bytes, as are all sizes here.
        model_size_gb: weights on this GPU.
        block_size: tokens in a block.
        num_kv_heads: K/V heads on this GPU: the model's, divided by tensor_parallel_size.
        dtype_size: bytes of one cached number.
        gpu_memory_utilization: share of the GPU's memory that may be taken.

    Raises:
        ValueError: a value is out of range, or not a single block fits.
    """
    counts = {
        "block_size": block_size,
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype_size": dtype_size,
    }
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r} has to be a whole number of at least 1")
    if not gpu_memory_gb > 0:
        raise ValueError(f"gpu_memory_gb={gpu_memory_gb!r} has to be above 0")
    if not model_size_gb >= 0:
        raise ValueError(f"model_size_gb={model_size_gb!r} has to be at least 0")
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization!r} has to be above 0 and at most 1")
    # Whole bytes: products of decimal fractions are a little off.
    available = round((gpu_memory_gb * gpu_memory_utilization - model_size_gb) * GIB)
    block_bytes = 2 * block_size * num_layers * num_kv_heads * head_dim * dtype_size
    if available < block_bytes:
        raise ValueError(
            f"model_size_gb={model_size_gb} leaves no room for a K/V cache: {gpu_memory_utilization} of "
            f"{gpu_memory_gb} GB and one block lack {show_bytes(block_bytes - available)}. Take a GPU with more memory, "
            "raise gpu_memory_utilization, or split the model over more GPUs"
        )
    return round_blocks(available // block_bytes)


def round_blocks(blocks: int, needed: int = 0) -> int:
    """Down to a multiple of 256, as a measured number may be a little different at the next start.

    Few blocks stay as they are, and the number does not fall below `needed` if it was not.
    """
    if blocks <= BLOCK_ROUNDING:
        return blocks
    return max(blocks // BLOCK_ROUNDING * BLOCK_ROUNDING, min(blocks, needed))


def choose_block_size(bytes_per_token: int, max_model_len: int) -> int:
    """The block size that "auto" stands for: the largest of 16, 32, 64 and 128 that wastes little.

    Large blocks mean short tables and long reads. But a request's last block is half empty on average, so a block
    takes at most 2 MiB (1 MiB is wasted per request) and the longest request has at least 16 (3 % are wasted). 16
    where even that is too much.

    Args:
        bytes_per_token: K and V of all layers on one device.
        max_model_len: tokens of the longest request.
    """
    size = LARGEST_BLOCK
    while size > SMALLEST_BLOCK and (
        size * bytes_per_token > MAX_BLOCK_BYTES or size * MIN_BLOCKS_OF_LONGEST > max_model_len
    ):
        size //= 2
    return size


@dataclass(frozen=True)
class CacheSize:
    """The measured size of the K/V cache: returned by the runner, handed to the scheduler."""

    num_blocks: int
    """Device blocks, block 0 (the null block that padding points at) included."""
    block_size: int
    """Tokens per block."""
    host_chunks: int = 0
    """Chunks of host memory that blocks can be copied to."""
    chunk_blocks: int = 1
    """Blocks in a chunk, which is what one transfer moves."""

    @property
    def num_tokens(self) -> int:
        """Tokens the blocks that requests can own hold together."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk of host memory."""
        return self.chunk_blocks * self.block_size


@dataclass(frozen=True)
class SwapCosts:
    """What it takes to bring K/V back that a request gives up, as measured when the engine started."""

    chunk_bytes: int
    """Bytes of one transfer, on all devices together."""
    out_seconds: float
    """A transfer to the host."""
    in_seconds: float
    """A transfer from the host."""
    token_seconds: float
    """Computing the K/V of one token, among many."""

    def of_swap(self, chunks_out: int, chunks_in: int) -> float:
        """Seconds of so many transfers."""
        return chunks_out * self.out_seconds + chunks_in * self.in_seconds

    def of_computing(self, num_tokens: int) -> float:
        """Seconds of computing so many tokens again."""
        return num_tokens * self.token_seconds


def expected_waste(block_size: int) -> float:
    """Slots of a request's last block that are empty on average, if every length is equally likely."""
    return (block_size - 1) / 2


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one device, by what they are set aside for."""

    limit: int
    """What an engine may take: gpu_memory_utilization of the device's memory."""
    weights: int
    state: int
    """What is kept per request besides K/V: block tables, sampling parameters, tokens that came."""
    temp: int
    """Temporaries of the largest step."""
    staged: int = 0
    """K/V on their way to host memory or back."""

    @property
    def reserved_temp(self) -> int:
        """`temp`, rounded up: a compiler may choose differently next time; and as much again for what nobody counts."""
        return (-(-self.temp // TEMP_ROUNDING) + 1) * TEMP_ROUNDING

    @property
    def for_cache(self) -> int:
        """What is left for the K/V cache; below 0 where the rest is too large by itself."""
        return self.limit - self.weights - self.state - self.reserved_temp - self.staged


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes an engine holds on one device."""

    device: str
    weights: int
    kv_cache: int
    state: int
    """What is kept per request besides K/V."""
    temp: int
    """Temporaries of the largest compiled step, taken while it runs."""
    in_use: int | None
    """What this process holds on the device, whoever asked for it; None where the platform does not say."""
    limit: int | None
    """What this process may take; None where the platform does not say."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.state + self.temp


def imbalance_percent(sizes: list[int]) -> float:
    """How much more than the average the largest of `sizes` is, in percent."""
    average = sum(sizes) / len(sizes)
    return 100 * (max(sizes) / average - 1) if average else 0.0


def imbalance_of(devices: Sequence[DeviceMemory]) -> float:
    """`imbalance_percent` of what an engine holds on its devices; warns where it is more than MOST_IMBALANCE."""
    percent = imbalance_percent([device.total for device in devices])
    if percent > MOST_IMBALANCE:
        fullest = max(devices, key=lambda device: device.total)
        logger.warning(
            "%s holds %s, %.0f %% more than devices do on average: it limits the K/V cache of all of them. "
            "Choose a tensor_parallel_size that divides the model",
            *(fullest.device, show_bytes(fullest.total), percent),
        )
    return percent


def show_bytes(size: int) -> str:
    """12 B, 3.4 KiB, 5.6 MiB, 7.8 GiB."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
