"""What may be chosen from a row of logits, as the implementations of `find_threshold` are told."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Choice(NamedTuple):
    """Of each row; a filter that is not asked for has the value named here."""

    top_k: Int[Array, " rows"]
    """Not above the vocabulary's size; 0."""
    top_p: Float[Array, " rows"]
    """1."""
    least: Float[Array, " rows"]
    """No smaller logit passes; -inf."""
