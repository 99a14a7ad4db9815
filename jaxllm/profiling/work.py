"""What a step has to do at the least: bytes it has to read and write, and floating-point operations.

By arithmetic from the model's sizes and from what was in the step; padding is not counted. Invariant: everything is
of one device; a model on several is split evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.config import ITEMSIZES
from jaxllm.model_config import ModelConfig
from jaxllm.profiling.stages import ATTENTION, EMBED, HEAD, MLP, PAGED_ATTENTION, SAMPLE, WRITE_KV

_FLOAT32_BYTES = 4


class Load(NamedTuple):
    """What was in steps, all together."""

    steps: float
    rows: float
    """Rows of each step, added up."""
    tokens: float
    contexts: float
    """Tokens that each row has K/V of at the end of each step."""
    attended: float
    """Pairs of a token and one that it sees."""
    sampled: float
    """Rows that got a token."""

    def per_step(self) -> Load:
        return Load(*(number / self.steps for number in self))


class Work(NamedTuple):
    """Of one stage."""

    num_bytes: float
    flops: float


@dataclass(frozen=True)
class Sizes:
    """What the work depends on besides the load: sizes of the whole model."""

    hidden: int
    query: int
    """Width of all query heads together."""
    kv: int
    """Width of all key heads together."""
    intermediate: int
    vocab: int
    windows: Sequence[int | None]
    """Of each layer: how many tokens one sees; None: all before it."""
    itemsize: int
    """Bytes of a number of activations and of the K/V cache."""
    num_devices: int
    weights: Mapping[str, int]
    """Bytes of the weights that a step reads on one device, by stage; a table of tokens is read by rows."""

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, num_devices: int, weights: Mapping[str, int]) -> Sizes:
        return cls(
            model.hidden_size,
            model.num_heads * model.head_dim,
            model.num_kv_heads * model.head_dim,
            model.intermediate_size,
            model.vocab_size,
            [kind.window for kind in model.layer_kinds],
            ITEMSIZES[dtype],
            num_devices,
            dict(weights),
        )


def work_of(load: Load, sizes: Sizes) -> dict[str, Work]:
    """The work of each stage under a load, over all layers."""
    num_layers, kv_bytes = len(sizes.windows), 2 * sizes.kv * sizes.itemsize
    contexts, attended = _seen(load, sizes)
    written = Work(load.tokens * kv_bytes * num_layers, 0)
    paged = Work(contexts * kv_bytes, 4 * attended * sizes.query)
    projections = 4 * load.tokens * sizes.hidden * (sizes.query + sizes.kv) * num_layers
    logits = load.rows * sizes.vocab
    split = {
        EMBED: Work(2 * load.tokens * sizes.hidden * sizes.itemsize, 0),
        f"{ATTENTION}/{WRITE_KV}": written,
        f"{ATTENTION}/{PAGED_ATTENTION}": paged,
        ATTENTION: Work(written.num_bytes + paged.num_bytes, projections + paged.flops),
        MLP: Work(0, 6 * load.tokens * sizes.hidden * sizes.intermediate * num_layers),
        HEAD: Work(0, 2 * logits * sizes.hidden),
    }
    # Every device has all logits, and its own weights.
    whole = {HEAD: logits * _FLOAT32_BYTES, SAMPLE: logits * _FLOAT32_BYTES}
    for stage, size in sizes.weights.items():
        whole[stage] = whole.get(stage, 0) + size * load.steps
    nothing = Work(0, 0)
    return {
        stage: Work(
            split.get(stage, nothing).num_bytes / sizes.num_devices + whole.get(stage, 0),
            split.get(stage, nothing).flops / sizes.num_devices,
        )
        for stage in (*split, SAMPLE)
    }


def _seen(load: Load, sizes: Sizes) -> tuple[float, float]:
    """K/V tokens that are read, and pairs of tokens that are multiplied, over all layers.

    A window cuts off what is beyond it of the average context.
    """
    contexts = attended = 0.0
    for window in sizes.windows:
        contexts += load.contexts if window is None else min(load.contexts, load.rows * window)
        attended += load.attended if window is None else min(load.attended, load.tokens * window)
    return contexts, attended
