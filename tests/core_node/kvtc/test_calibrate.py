"""Calibration from texts to artifact on a tiny random model, and the probe that it measures with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from core_node.kvtc.calibrate import Calibration, Plan, _split, calibrate
from core_node.kvtc.commands import register
from core_node.kvtc.probe import ModelProbe
from core_node.kvtc.quality_probe import HeldOut, loss_of
from core_node.kvtc.texts import Text, built_in, from_files, windows
from mesh.errors import InvalidRequest
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.artifact import parse_artifact, read_artifact
from mesh.kv.kvtc.transform import features_of
from mesh.kv.slab import KvSlab
from mesh.model.description import ModelDescription, describe
from mesh.model.tokenizer import load_tokenizer
from tests.core_node.engine.checkpoints import TinyConfig, random_weights, write_gguf
from tests.core_node.engine.conftest import reference_of

CONFIG = TinyConfig(head_dim=32)
PLAN = Plan(
    rank_k=64,
    rank_v=160,
    window_tokens=352,
    fit_windows=6,
    held_out_windows=3,
    continuation_tokens=32,
    targets=(8, 16),
)

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("kvtc") / "tiny.F32.gguf"
    return describe(write_gguf(path, random_weights(CONFIG), CONFIG))


@pytest.fixture(scope="module")
def texts() -> tuple[Text, ...]:
    return tuple(Text(kind=t.kind, text=t.text[:20_000], share=t.share) for t in built_in())


@pytest.fixture(scope="module")
def made(model: ModelDescription, texts: tuple[Text, ...]) -> Calibration:
    return calibrate(model, texts, PLAN)


def test_the_probe_continues_as_a_plain_forward_pass_would(model: ModelDescription) -> None:
    probe = ModelProbe(model, torch.float32, 64)
    ids = np.random.default_rng(0).integers(0, 256, 60)
    probe.load(probe.prefill(ids).tokens(0, 40))
    got = probe.continuation(ids, 40)
    want = torch.log_softmax(reference_of(random_weights(CONFIG), CONFIG).logits(ids.tolist())[40:-1], dim=-1)
    assert torch.allclose(got, want, atol=2e-3)


def test_sensitivity_is_the_gradient_of_the_continuation(model: ModelDescription) -> None:
    """Along itself, a small change of KV changes the drawn targets' log-likelihood by the gradient's square."""
    probe = ModelProbe(model, torch.float32, 64)
    ids = np.random.default_rng(1).integers(0, 256, 60)
    slab = probe.prefill(ids).tokens(0, 40)
    probe.load(slab)
    generator = torch.Generator().manual_seed(3)
    gradient = probe.sensitivity(ids, 40, generator)
    drawn = torch.Generator().manual_seed(3)
    plain = probe.continuation(ids, 40)
    last = torch.log_softmax(torch.zeros(1, plain.shape[1]), dim=-1)
    targets = torch.multinomial(torch.cat([plain, last]).exp(), 1, generator=drawn)[:-1]
    # Only V of the last layer's tokens is moved, so that rotation plays no part and one pass tells all.
    step = 1e-2 / float(np.abs(gradient[1]).max())
    v = slab.v + step * gradient[1].reshape(40, CONFIG.n_layers, CONFIG.n_kv_heads, CONFIG.head_dim).transpose(
        1, 0, 2, 3
    )
    probe.load(KvSlab(start=0, dtype=KvDtype.F32, k=slab.k, v=np.ascontiguousarray(v, dtype=np.float32)))
    moved = probe.continuation(ids, 40)
    rise = float((moved.gather(1, targets) - plain.gather(1, targets)).sum())
    assert rise == pytest.approx(step * float(np.square(gradient[1]).sum()), rel=0.35)


def test_gives_settings_that_were_measured(made: Calibration, model: ModelDescription) -> None:
    assert [s.name for s in made.artifact.settings] == ["8x", "16x"]
    for s in made.artifact.settings:
        assert {q.text for q in s.quality} <= {"prose", "code", "languages"}
        assert s.quality
        assert all(q.coded_ratio > 1 for q in s.quality)
    fine, coarse = made.artifact.settings
    assert fine.bound < coarse.bound
    assert made.artifact.geometry == model.geometry
    assert parse_artifact(made.data).digest == made.artifact.digest


def test_is_the_same_for_the_same_input(made: Calibration, model: ModelDescription, texts: tuple[Text, ...]) -> None:
    assert calibrate(model, texts, PLAN).artifact.digest == made.artifact.digest


def test_its_codecs_are_found_by_name_and_more_bits_lose_less(made: Calibration, model: ModelDescription) -> None:
    shelf.put(made.artifact)
    try:
        codecs = [codec_named(f"kvtc:{made.artifact.digest[:16]}:{s.name}") for s in made.artifact.settings]
        found = shelf.for_model(model.geometry, model.weights_lineage)
        assert found is not None
        assert found.digest == made.artifact.digest
    finally:
        shelf.remove(made.artifact)
    probe = ModelProbe(model, torch.float32, 352)
    ids = np.asarray(load_tokenizer(model.path).encode(built_in()[0].text[30_000:34_000])[:352], dtype=np.int64)
    window = HeldOut(kind="x", ids=ids, slab=probe.prefill(ids))
    fine, coarse, exact = loss_of(probe, window, [*codecs, codec_named("f16")], 320)
    assert 0 < fine.divergence < coarse.divergence
    assert 3 < fine.coded_ratio < coarse.coded_ratio
    assert exact.divergence < 1e-4


def test_the_basis_is_orthonormal_where_it_was_weighted(made: Calibration) -> None:
    basis = made.artifact.basis
    for s in range(2):
        assert np.abs(basis[s].T @ basis[s] - np.eye(basis[s].shape[1])).max() < 0.05


def test_features_do_not_depend_on_the_position(model: ModelDescription) -> None:
    """K of the first layer is a function of the token alone, once RoPE is undone."""
    probe = ModelProbe(model, torch.float32, 64)
    slab = probe.prefill(np.full(20, 65, dtype=np.int64))
    first_layer = features_of(slab, model.geometry)[0, :, : CONFIG.n_kv_heads * CONFIG.head_dim]
    assert np.abs(first_layer - first_layer[:1]).max() < 1e-4


def test_texts_too_short_for_a_window_are_refused(model: ModelDescription) -> None:
    with pytest.raises(InvalidRequest, match="short"):
        calibrate(model, [Text(kind="short", text="hello", share=1.0)], PLAN)


def test_files_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest):
        from_files([path])
    with pytest.raises(InvalidRequest):
        from_files([tmp_path / "none.txt"])


@pytest.mark.parametrize("change", [{"window_tokens": 200}, {"rank_v": 60}, {"targets": ()}, {"fit_windows": 0}])
def test_plans_that_cannot_work_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Plan(**change)  # type: ignore[arg-type]


def test_windows_follow_shares_and_are_spread(model: ModelDescription) -> None:
    tokenizer = load_tokenizer(model.path)
    texts = [Text(kind="a", text="x y " * 5000, share=3.0), Text(kind="b", text="p q " * 5000, share=1.0)]
    found = windows(texts, tokenizer, n_windows=8, window_tokens=100)
    assert sum(kind == "a" for kind, _ in found) == 6
    assert all(len(ids) == 100 for _, ids in found)


def test_the_command_writes_an_artifact_and_shows_it(model: ModelDescription, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text(built_in()[1].text[:120_000], encoding="utf-8")
    out = tmp_path / "made.kvtc"
    runner, app = CliRunner(), typer.Typer()
    register(app)
    app.callback()(lambda: None)
    words = ["kvtc", "calibrate", str(model.path), "--text", str(text), "--only-text", "--out", str(out)]
    done = runner.invoke(app, [*words, "--windows", "4", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert read_artifact(out).settings
    shown = runner.invoke(app, ["kvtc", "show", str(out)])
    assert shown.exit_code == 0
    assert "24x" in shown.output


def test_every_kind_of_text_is_held_out_too(model: ModelDescription, texts: tuple[Text, ...]) -> None:
    """What a setting loses is judged by its worst kind: a kind that is only learned of would never be judged."""
    plan = replace(PLAN, fit_windows=12, held_out_windows=3)
    fit, held_out = _split((*texts, Text(kind="much", text=texts[0].text, share=0.5)), model, plan)
    assert {kind for kind, _ in held_out} == {kind for kind, _ in fit}
    assert len(held_out) < len(fit)
