"""Tests of the names of blocks: equal exactly where all tokens up to the block's end, and the salt, are."""

from __future__ import annotations

import hashlib

from doubles import prompt_request
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.scheduling.block_hash import hash_blocks

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
SALTS = st.sampled_from([None, "a", "b"])


@given(one=TOKENS, other=TOKENS, salts=st.tuples(SALTS, SALTS), block_size=st.integers(1, 4))
def test_hashes_are_equal_exactly_where_tokens_and_salt_are(one, other, salts, block_size):
    hashes = []
    for prompt, salt in zip((one, other), salts, strict=True):
        request = prompt_request("a", prompt, 5)
        request.cache_salt = salt
        hashes.append(hash_blocks(request, len(prompt) // block_size, block_size))
    for number, (first, second) in enumerate(zip(*hashes, strict=False), start=1):
        end = number * block_size
        assert (first == second) == (one[:end] == other[:end] and salts[0] == salts[1])
    assert len({*hashes[0]}) == len(hashes[0]), "equal blocks at two places are not the same"


def test_the_chain_grows_with_the_request_and_is_computed_once():
    request = prompt_request("a", [1, 2, 3, 4, 5], 9)
    first = list(hash_blocks(request, 2, 2))
    for token_id in (6, 7, 8):
        request.append_tokens([token_id], [0.0])
    request.prompt_ids = (9, 9, 9, 9, 5)  # what was hashed is not looked at again
    longer = hash_blocks(request, 4, 2)
    assert longer[:2] == first and longer is request.block_hashes
    whole = prompt_request("b", [1, 2, 3, 4, 5, 6, 7, 8], 9)
    assert hash_blocks(whole, 4, 2) == longer


def test_large_token_ids_differ():
    """Ids that are equal in their lowest bytes."""
    hashes = [hash_blocks(prompt_request("a", [token], 5), 1, 1)[0] for token in (1, 257, 65537, 2**24 + 1, 2**31 - 1)]
    assert len({*hashes}) == 5 and all(len(name) == hashlib.sha256().digest_size for name in hashes)
