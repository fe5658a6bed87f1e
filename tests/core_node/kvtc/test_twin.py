"""The torch twin writes the format that numpy reads, and reads what numpy writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core_node.kvtc.twin import TorchMaps
from mesh.kv.codecs import codec_named
from mesh.kv.geometry import KvDtype
from mesh.kv.kvtc.codec import KvtcCodec
from mesh.kv.kvtc.transform import NumpyMaps, features_of
from tests.mesh.kv.kvtc.synthetic import GEOMETRY, artifact, features, slab

CPU = torch.device("cpu")


def codecs(dtype: torch.dtype) -> tuple[KvtcCodec, KvtcCodec]:
    a = artifact()
    exact = codec_named("q8_0")
    return (
        KvtcCodec(a, a.settings[0], exact),
        KvtcCodec(a, a.settings[0], exact, TorchMaps(a, CPU, dtype)),
    )


def test_products_are_the_same() -> None:
    torch.set_num_threads(1)
    a = artifact()
    plain, twin = NumpyMaps(a), TorchMaps(a, CPU)
    x = features(20)
    weighted = plain.weigh(x)
    assert np.allclose(twin.weigh(x), weighted, atol=1e-3)
    c = plain.project(weighted, (40, 30))
    assert np.allclose(twin.project(weighted, (40, 30)), c, atol=1e-3)
    for twins, plains in ((twin.expand, plain.expand), (twin.reconstruct, plain.reconstruct)):
        assert np.allclose(twins(c, (40, 30)), plains(c, (40, 30)), atol=1e-3)
    assert np.allclose(twin.unweigh(twin.weigh(x)), x, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("usual", [True, False])
def test_each_reads_what_the_other_writes(dtype: torch.dtype, usual: bool) -> None:
    plain, twin = codecs(dtype)
    assert plain.name == twin.name
    s = slab(40, start=0, usual=usual)
    for writer, reader in ((plain, twin), (twin, plain)):
        data = writer.encode(s)
        read = {"start": 0, "n_tokens": 40, "geometry": GEOMETRY, "dtype": KvDtype.F32}
        ours, theirs = reader.decode(data, **read), writer.decode(data, **read)  # type: ignore[arg-type]
        assert np.abs(features_of(ours, GEOMETRY) - features_of(theirs, GEOMETRY)).max() < 0.05
