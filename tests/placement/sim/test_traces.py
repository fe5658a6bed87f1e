"""Traces: their forms, what is wrong with them, and what is made of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from mesh.errors import InvalidRequest
from placement.sim.capacity import best_capacity
from placement.sim.mesh import MESHES, Links, make_mesh, mesh_spec
from placement.sim.traces import (
    Synthetic,
    mean_rate,
    read_trace,
    repeated,
    scaled,
    synthetic,
    with_arrivals,
)

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
MOONCAKE, AZURE = DATA / "mooncake_conversation.jsonl", DATA / "azure_2023_conv.csv"


def test_mooncake_lines(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [0, 5, 6]}\n'
        '{"timestamp": 1500, "input_length": 10, "output_length": 0, "hash_ids": [9]}\n'
    )
    first, second = read_trace(file)
    assert (first.blocks, first.session, first.prompt_tokens) == ((0, 5), 5, 1100)
    assert (second.arrival_s, second.blocks, second.output_tokens, second.index) == (1.5, (), 1, 1)


def test_azure_lines(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109"
    )
    first, second = read_trace(file)
    assert (first.prompt_tokens, first.output_tokens, first.arrival_s) == (374, 44, 0.0)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.txt", "", "is a .jsonl or .csv file"),
        ("t.jsonl", "", "has no requests"),
        ("t.jsonl", "{}\n", "line 1"),
        ("t.jsonl", '{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "line 1"),
        ("t.jsonl", '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', "line 1"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1e99, "output_length": 1, "hash_ids": []}', "line 1"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2"),
        ("t.csv", "a,b\n1,2\n", "line 2"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        read_trace(tmp_path / name)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_trace(Path("/nowhere/t.jsonl"))


def test_scaling_keeps_the_pattern_and_sets_the_rate() -> None:
    made = synthetic(Synthetic(n_requests=300))
    fast = scaled(made, 50.0)
    assert mean_rate(fast) == pytest.approx(50.0)
    ratio = fast[-1].arrival_s / made[-1].arrival_s
    assert [r.arrival_s for r in fast] == pytest.approx([r.arrival_s * ratio for r in made])
    with pytest.raises(InvalidRequest):
        scaled(made, 0.0)
    with pytest.raises(InvalidRequest):
        mean_rate(made[:1])


def test_repeating_makes_new_sessions_and_blocks() -> None:
    made = synthetic(Synthetic(n_requests=50))
    long = repeated(made, 120)
    assert len(long) == 120
    assert [r.index for r in long] == list(range(120))
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(long))
    assert not {r.session for r in long[:50]} & {r.session for r in long[50:100]}
    assert not {b for r in long[:50] for b in r.blocks} & {b for r in long[50:100] for b in r.blocks}


def test_arrivals_of_another_trace() -> None:
    made, times = synthetic(Synthetic(n_requests=30)), synthetic(Synthetic(n_requests=20, seed=9))
    mixed = with_arrivals(made, times)
    assert [r.prompt_tokens for r in mixed] == [r.prompt_tokens for r in made]
    assert [r.arrival_s for r in mixed[:20]] == [r.arrival_s for r in times]


def test_synthetic_turns_share_their_prefix() -> None:
    made = synthetic(Synthetic(n_requests=400, turns=4.0))
    assert made == synthetic(Synthetic(n_requests=400, turns=4.0))
    by_session: dict[int, list[tuple[int, ...]]] = {}
    for r in made:
        by_session.setdefault(r.session, []).append(r.blocks)
    several = [blocks for blocks in by_session.values() if len(blocks) > 1]
    assert several
    assert all(later[: len(first)] == first for first, later in (blocks[:2] for blocks in several))
    with pytest.raises(InvalidRequest):
        synthetic(Synthetic(n_requests=0))


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake conversation trace is not here")
def test_the_conversation_trace_has_its_published_figures() -> None:
    found = read_trace(MOONCAKE)
    assert len(found) == 12_031
    assert sum(r.prompt_tokens for r in found) / len(found) == pytest.approx(12_035, abs=1)
    seen: set[int] = set()
    hits = 0
    for r in found:
        hits += next((i for i, b in enumerate(r.blocks) if b not in seen), len(r.blocks))
        seen.update(r.blocks)
    assert hits * 512 / sum(r.prompt_tokens for r in found) == pytest.approx(0.366, abs=0.02)


@pytest.mark.skipif(not AZURE.exists(), reason="the Azure 2023 conversation trace is not here")
def test_the_azure_trace_has_its_published_figures() -> None:
    found = read_trace(AZURE)
    assert len(found) == 19_366
    assert sum(r.prompt_tokens for r in found) / len(found) == pytest.approx(1_155, abs=1)


@pytest.mark.parametrize("name", [n for n in MESHES if n != "world"])
def test_meshes_and_their_links(name: str) -> None:
    made = make_mesh(mesh_spec(name))
    links = made.links
    home, away = links.hubs[0], links.sites[-1]
    assert links.between(home, away) == links.between(away, home)
    assert links.between(home, home)[0] < 0.001
    if len(links.sites) > len(links.hubs) + 1:
        a, b = links.sites[-1], links.sites[-2]
        least = min(links.between(a, hub)[0] + links.between(hub, b)[0] for hub in links.hubs)
        assert links.between(a, b)[0] == pytest.approx(least)
    with pytest.raises(InvalidRequest):
        links.between(home, "nowhere")
    assert {made.entry_of(session) for session in range(2000)} == set(made.entries)


def test_matrices_must_fit() -> None:
    made = make_mesh(mesh_spec("regional")).links
    with pytest.raises(InvalidRequest):
        Links(sites=made.sites, hubs=made.hubs, rtt_s=made.rtt_s[:2], goodput_bytes_per_s=made.goodput_bytes_per_s)
    with pytest.raises(InvalidRequest):
        Links(sites=made.sites, hubs=made.hubs, rtt_s=-made.rtt_s, goodput_bytes_per_s=made.goodput_bytes_per_s)
    with pytest.raises(InvalidRequest, match="no mesh"):
        mesh_spec("moon")


def test_capacity_is_that_of_the_best_router_to_two_percent() -> None:
    limits = {"a": 7.0, "b": 20.0, "c": 12.0}
    tried: list[tuple[str, float]] = []

    def goodput(router: str, rate: float) -> float:
        tried.append((router, rate))
        return 1.0 if rate <= limits[router] else 0.5

    found = best_capacity(goodput, ("a", "b", "c"), start_per_s=30.0)
    assert found.router == "b"
    assert 20.0 / 1.03 <= found.rate_per_s <= 20.0
    assert sum(router == "c" for router, _ in tried) == 1
