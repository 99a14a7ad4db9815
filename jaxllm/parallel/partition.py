"""How a model's heads and layers are shared out to devices that cannot share them evenly.

Heads have places: as many K/V heads on every device, each with as many query heads. Invariant: a place holds one
head of the model or nothing (zeros, which add nothing to what a layer computes); every query head has exactly one
place, with its K/V head on the same device; a K/V head may have several. Where all places hold heads and no head
has two, the model on the devices is the model as it is.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.model_config import ModelConfig

logger = logging.getLogger(__name__)

SHARE_MULTIPLE = 16
"""What a device's share of the intermediate size is padded to, if it has to be padded: tensor cores' tiles."""
EMPTY = -1


@dataclass(frozen=True)
class HeadPlacement:
    """Which head of the model each place holds."""

    kv_heads: int
    """Of the model."""
    group: int
    """Query heads of the model that share one K/V head."""
    num_devices: int

    @property
    def group_places(self) -> int:
        """Places for query heads beside each K/V head: a group is cut where there are several devices for it."""
        return -(-self.group // max(self.num_devices // self.kv_heads, 1))

    @property
    def copies(self) -> int:
        """Places that hold the same K/V head."""
        return -(-self.group // self.group_places)

    @property
    def kv_places(self) -> int:
        """Places for K/V heads, on all devices."""
        return self._per_device * self.num_devices

    @property
    def idle_devices(self) -> int:
        """Devices without a single head."""
        return self.num_devices - -(-self.kv_heads * self.copies // self._per_device)

    @property
    def empty_share(self) -> float:
        """Share of the places for query heads that hold none."""
        return 1 - self.kv_heads * self.group / (self.kv_places * self.group_places)

    def kv_head(self, place: int) -> int:
        """The K/V head at this place, or EMPTY."""
        return place // self.copies if place < self.kv_heads * self.copies else EMPTY

    def query_head(self, place: int, index: int) -> int:
        """The query head beside the K/V head at this place, or EMPTY."""
        head, in_group = self.kv_head(place), place % self.copies * self.group_places + index
        return EMPTY if head == EMPTY or in_group >= self.group else head * self.group + in_group

    @property
    def _per_device(self) -> int:
        return -(-self.kv_heads * self.copies // self.num_devices)


def place_heads(model: ModelConfig, size: int) -> HeadPlacement:
    """The places of a model's heads on `size` devices."""
    return HeadPlacement(model.num_kv_heads, model.group_size, size)


def split_over(model: ModelConfig, size: int) -> ModelConfig:
    """The model as `size` devices compute it: its heads are places, its intermediate size is padded.

    The vocabulary stays what it is: only tables have rows for more.

    Args:
        model: as the checkpoint has it.

    Raises:
        ValueError: some devices would have nothing to do; the message lists the sizes that work.
    """
    if why := _obstacle(model, size):
        sizes = ", ".join(str(n) for n in _sizes(model) if not _obstacle(model, n))
        raise ValueError(f"tensor_parallel_size={size} {why}: this model works with {sizes}")
    if slow := _losses(model, size):
        good = ", ".join(str(n) for n in _sizes(model) if not _obstacle(model, n) and not _losses(model, n))
        logger.warning("tensor_parallel_size=%d is slow: %s. Sizes without loss: %s", size, "; ".join(slow), good)
    heads = place_heads(model, size)
    return dataclasses.replace(
        model,
        num_kv_heads=heads.kv_places,
        num_heads=heads.kv_places * heads.group_places,
        intermediate_size=_share(model, size) * size,
    )


def _sizes(model: ModelConfig) -> Iterator[int]:
    return iter(range(1, model.num_heads + 1))


def _share(model: ModelConfig, size: int) -> int:
    """Each device's part of the intermediate size."""
    share, rest = divmod(model.intermediate_size, size)
    return -(-(share + 1) // SHARE_MULTIPLE) * SHARE_MULTIPLE if rest else share


def _obstacle(model: ModelConfig, size: int) -> str:
    """Why the model cannot be split so; empty if it can."""
    heads = place_heads(model, size)
    shape = f"{model.num_heads} query and {model.num_kv_heads} K/V heads"
    if heads.idle_devices:
        return f"leaves {heads.idle_devices} devices without a head ({shape})"
    if model.qk_norm == "all" and heads.empty_share:
        return f"does not divide the heads ({shape}), over all of which queries and keys are normalised"
    return ""


def _losses(model: ModelConfig, size: int) -> list[str]:
    """What devices do in vain."""
    losses = []
    if empty := place_heads(model, size).empty_share:
        shape = f"{model.num_heads} query and {model.num_kv_heads} K/V heads"
        losses.append(f"{100 * empty:.0f} % of the places for query heads stay empty ({shape})")
    if model.intermediate_size % size:
        losses.append(f"the intermediate size {model.intermediate_size} is padded to {_share(model, size) * size}")
    return losses
