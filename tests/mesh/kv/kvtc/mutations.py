"""Ways to spoil the bytes of a kvtc chunk or artifact, drawn from a seeded source."""

from __future__ import annotations

import random
import struct

HEADER_BYTES = 20


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Another string of bytes: cut, stretched, flipped, spliced, or with counts that lie."""
    kind = rng.randrange(7)
    at = rng.randrange(len(data))
    spoilt = bytearray(data)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + rng.randbytes(1 + rng.randrange(40))
    if kind == 2:
        spoilt[at] ^= 1 << rng.randrange(8)
    elif kind == 3:
        spoilt[at : at + 1 + rng.randrange(16)] = rng.randbytes(1 + rng.randrange(16))
    elif kind == 4:
        spoilt[at:at] = rng.randbytes(1 + rng.randrange(8))
    elif kind == 5:  # a count or size of the header
        field = rng.randrange(4, HEADER_BYTES - 3, 4)
        value = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, rng.randrange(2**32), rng.randrange(4096)])
        struct.pack_into("<I", spoilt, field, value)
    else:
        other = rng.randrange(len(data))
        size = 1 + rng.randrange(64)
        spoilt[at : at + size] = data[other : other + size]
    return bytes(spoilt)
