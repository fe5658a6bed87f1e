"""What fits, and what is said when it does not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from core_node.engine.fitting import Demand, fit, mib
from mesh.errors import Overloaded
from mesh.kv.hashing import BLOCK_TOKENS

MIB = 1 << 20
DEMAND = Demand(
    model_id="m",
    device="cpu",
    dtype="bf16",
    weights_bytes={"bf16": 200 * MIB, "f32": 400 * MIB, "int8": 110 * MIB},
    kv_bytes_per_token=MIB // 64,  # a block takes 0.25 MiB
    context_tokens=1024,
)


def refused(demand: Demand, free_bytes: int) -> str:
    with pytest.raises(Overloaded) as caught:
        fit(demand, free_bytes)
    return caught.value.message


def test_the_default_pool_holds_four_contexts() -> None:
    got = fit(DEMAND, 1000 * MIB)
    assert (got.n_blocks, got.pool_tokens, got.pool_bytes) == (256, 4096, 64 * MIB)
    assert got.why == "4 contexts of 1,024 tokens fit"


def test_the_default_pool_takes_half_of_what_is_left() -> None:
    got = fit(DEMAND, 240 * MIB)
    assert got.pool_bytes == 20 * MIB
    assert got.why == "half of the 40 MiB that the weights leave"


def test_a_pool_that_was_asked_for() -> None:
    assert fit(replace(DEMAND, pool_tokens=100), 1000 * MIB).n_blocks == 6
    assert fit(replace(DEMAND, pool_bytes=MIB), 1000 * MIB).n_blocks == 4


def test_a_pool_that_is_too_big_names_one_that_fits() -> None:
    demand = replace(DEMAND, pool_tokens=1_000_000)
    message = refused(demand, 230 * MIB)
    assert "weights 200 MiB in bf16 + KV pool 15,625 MiB" in message
    assert "against 230 MiB free" in message
    advised = int(re.findall(r"kv_pool_tokens=(\d+) fits", message)[0])
    assert advised % BLOCK_TOKENS == 0
    assert fit(replace(DEMAND, pool_tokens=advised), 230 * MIB).pool_tokens == advised


def test_weights_that_are_too_big_name_a_dtype_that_fits() -> None:
    assert "dtype int8 (110 MiB) with kv_pool_tokens=1152 fits" in refused(DEMAND, 130 * MIB)
    assert "dtype bf16 (200 MiB) with kv_pool_tokens=" in refused(replace(DEMAND, dtype="f32"), 250 * MIB)


def test_advice_that_was_given_holds() -> None:
    for free_mib in range(115, 330, 7):
        demand = replace(DEMAND, dtype="f32", pool_tokens=400)
        message = refused(demand, free_mib * MIB)
        found = re.search(r"dtype (\w+) .* with kv_pool_tokens=(\d+) fits", message)
        assert found is not None, message
        assert fit(replace(DEMAND, dtype=found[1], pool_tokens=int(found[2])), free_mib * MIB).n_blocks > 0


def test_where_nothing_fits_the_least_is_named() -> None:
    message = refused(DEMAND, 50 * MIB)
    assert "no setting fits: in int8 with kv_pool_tokens=256 it takes 114 MiB" in message
    assert fit(replace(DEMAND, dtype="int8", pool_tokens=256), 115 * MIB).n_blocks == 16


def test_int8_is_not_advised_where_it_would_not_help() -> None:
    demand = replace(DEMAND, weights_bytes={"bf16": 200 * MIB, "f32": 400 * MIB})
    assert "no setting fits: in bf16" in refused(demand, 130 * MIB)


def test_sizes_for_people() -> None:
    assert [mib(n) for n in (MIB // 2, 12 * MIB, 3000 * MIB)] == ["0.5 MiB", "12 MiB", "3,000 MiB"]
