"""Logits on several devices, whether they can share a model evenly or not: those of transformers, as on one device.

Heads are repeated or padded, and intermediate size and vocabulary are padded where they have to be.
"""

import numpy as np
import pytest
from test_families_logits import CHUNK, TINY, TOLERANCE, Sequence, relative

from jaxllm.models.checkpoint import open_checkpoint
from jaxllm.parallel.partition import place_heads, split_over

CASES = [("llama", 4), ("qwen2", 6), ("qwen3", 4), ("olmo2", 6), ("gemma3", 4)]
"""All have 6 query and 2 K/V heads: on 4 devices places stay empty, on 6 everything but heads is padded. Between them:
biases, norms of single heads and of all, a tied table."""


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits(name, size):
    with open_checkpoint(TINY / name) as checkpoint:
        config = checkpoint.config
    expected = np.load(TINY / name / "expected.npz")
    token_ids = expected["token_ids"]
    sequence = Sequence(TINY / name, split_over(config, size), size)
    found = sequence.logits(token_ids, range(CHUNK, len(token_ids) + 1, CHUNK), CHUNK)
    error = relative(found, expected["logits"])
    print(f"{name} on {size} devices: {error:.1e}, {place_heads(config, size)}")
    assert error < TOLERANCE
