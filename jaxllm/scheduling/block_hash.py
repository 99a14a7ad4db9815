"""Names for the contents of full blocks: equal names mean equal tokens, from the first of the sequence on.

Block i's hash covers the hash of block i - 1 and its own token ids, so one look-up compares all tokens up
to its end. SHA-256, as a collision would show one user another's K/V. What else has to be equal for blocks
to be shared (a cache salt) is the chain's beginning.
"""

from __future__ import annotations

import struct
from hashlib import sha256

from jaxllm.request import Request


def hash_blocks(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """Hashes of a request's blocks, at least the first `num_blocks`, all of whose tokens are known.

    They are kept with the request: each block is hashed once, whatever happens to the request.
    """
    hashes = request.block_hashes
    if len(hashes) < num_blocks:
        token_ids = request.get_token_ids(len(hashes) * block_size, num_blocks * block_size)
        parent, layout = hashes[-1] if hashes else _root(request.cache_salt), f"{block_size}i"
        for start in range(0, len(token_ids), block_size):
            parent = sha256(parent + struct.pack(layout, *token_ids[start : start + block_size])).digest()
            hashes.append(parent)
    return hashes


def _root(salt: str | None) -> bytes:
    return b"" if salt is None else sha256(salt.encode()).digest()
