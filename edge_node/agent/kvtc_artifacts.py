"""The kvtc artifacts that the mesh's core nodes code this box's model with, fetched as parts of that model.

Which ones those are, core nodes declare: a codec's name holds its artifact's digest. Each is fetched from a node that
declares it, in the background, resumed where it broke off, verified by its digest, and only taken if it was calibrated
on the very model that is served here. From then on the box declares the codecs that it makes possible. What was fetched
is found again at the next start, without a mesh. An artifact that lies beside the model is left as it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from mesh.errors import KvIncompatible, MeshError, NotFound, PayloadCorrupt
from mesh.identity.place import Tier
from mesh.kv.codec_profile import CodecProfile
from mesh.kv.geometry import KvGeometry
from mesh.kv.kvtc import shelf
from mesh.kv.kvtc.artifact import SUFFIX, Artifact, read_artifact
from mesh.kv.kvtc.codec import PREFIX, artifact_of
from mesh.kv.profiling import start_profiles
from mesh.node.port import Peer
from mesh.rpc.blobs.fetch import FetchLimits, fetch_blob, list_blobs
from mesh.telemetry.log import get_logger
from placement.entry.mesh_view import ModelFacts, NodeFacts

FOLDER = "kvtc"
MOST_KEPT = 2
_LIMITS = FetchLimits(max_bytes=64 << 20)
_LOOK_EVERY_S = 10.0
_PAUSE_CAP_S = 600.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An artifact, by the head of its digest as codecs name it, and a node that has it."""

    digest_head: str
    peer: Peer


def wanted(nodes: Iterable[NodeFacts], model: ModelFacts, known: Collection[str]) -> tuple[Wanted, ...]:
    """Artifacts that core nodes declare for `model` and that are not among the `known` heads of digests; those that
    most nodes have first."""
    found: dict[str, list[Peer]] = {}
    for node in nodes:
        if node.place.tier is not Tier.CORE or not node.address:
            continue
        same = [
            m for m in node.models if (m.layout_hash, m.weights_lineage) == (model.layout_hash, model.weights_lineage)
        ]
        for head in {head for m in same for c in m.codecs if (head := artifact_of(c.codec))}:
            found.setdefault(head, []).append(Peer(address=node.address, place=node.place))
    counts = Counter({head: len(peers) for head, peers in found.items()})
    order = sorted(counts, key=lambda head: (-counts[head], head))
    return tuple(Wanted(digest_head=head, peer=found[head][0]) for head in order if head not in known)


class ArtifactKeeper:
    """See the module's docstring. One owner; `folder` is its own. `on_codecs` is called on the event loop with the
    profiles that one more artifact brought."""

    def __init__(
        self,
        folder: Path,
        geometry: KvGeometry,
        weights_lineage: str,
        *,
        dial: Callable[[Peer], grpc.aio.Channel],
        on_codecs: Callable[[tuple[CodecProfile, ...]], None],
        limits: FetchLimits = _LIMITS,
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._weights_lineage = weights_lineage
        self._dial = dial
        self._on_codecs = on_codecs
        self._limits = limits
        self._kept: set[str] = set()  # heads of digests
        self._refused: set[str] = set()

    def load(self) -> tuple[CodecProfile, ...]:
        """Put what earlier starts fetched on the shelf; its profiles. Blocks for seconds."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        newest = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
        profiles: list[CodecProfile] = []
        for path in newest:
            artifact = self._take(path) if len(self._kept) < MOST_KEPT else None
            if artifact is None:  # damaged, of a model that was here before, or one too many
                path.unlink()
            else:
                profiles += start_profiles(artifact, self._geometry)
        return tuple(profiles)

    async def follow(self, nodes: Callable[[], Iterable[NodeFacts]], model: Callable[[], ModelFacts]) -> None:
        """Fetch what core nodes declare, for as long as this runs."""
        pause_s = _LOOK_EVERY_S
        while True:
            try:
                await self.look(tuple(nodes()), model())
                pause_s = _LOOK_EVERY_S
            except MeshError as error:
                log.warning("kvtc_artifact_not_fetched", reason=error.reason, error=error.message)
                pause_s = min(2 * pause_s, _PAUSE_CAP_S)
            await asyncio.sleep(pause_s)

    async def look(self, nodes: tuple[NodeFacts, ...], model: ModelFacts) -> None:
        """Fetch what is wanted now, as far as there is room for it. Raises MeshError if a fetch fails for now; what is
        no artifact of this model is refused for good."""
        known = {artifact_of(c.codec) for c in model.codecs} | self._kept | self._refused
        for want in wanted(nodes, model, known):
            if len(self._kept) >= MOST_KEPT:
                log.warning("kvtc_artifact_left_out", codec=PREFIX + want.digest_head)
                self._refused.add(want.digest_head)
                continue
            await self._fetch(want)

    async def _fetch(self, want: Wanted) -> None:
        def dial() -> grpc.aio.Channel:
            return self._dial(want.peer)

        for blob in await list_blobs(dial):
            if blob.kind == "kvtc" and blob.digest.startswith(want.digest_head):
                break
        else:
            raise NotFound(f"{want.peer.place.node_id} declares kvtc artifact {want.digest_head} and does not give it")
        if blob.size_bytes > self._limits.max_bytes:
            log.error("kvtc_artifact_refused", file=blob.name, size_bytes=blob.size_bytes)
            self._refused.add(want.digest_head)
            return
        target = self._folder / f"{blob.digest}{SUFFIX}"
        await fetch_blob(dial, blob.digest, target, limits=self._limits)
        artifact = await asyncio.to_thread(self._take, target)
        if artifact is None:
            self._refused.add(want.digest_head)
            target.unlink()
            return
        profiles = await asyncio.to_thread(start_profiles, artifact, self._geometry)
        log.info("kvtc_artifact_fetched", codec=PREFIX + want.digest_head, peer=want.peer.place.node_id)
        self._on_codecs(profiles)

    def _take(self, path: Path) -> Artifact | None:
        """On the shelf; None if it is damaged or of another model."""
        try:
            artifact = read_artifact(path)
            if artifact.digest != path.name.removesuffix(SUFFIX):
                raise PayloadCorrupt("its bytes have another digest than its name says")
            shelf.check_made_for(artifact, self._geometry, self._weights_lineage)
        except (PayloadCorrupt, KvIncompatible) as error:
            log.error("kvtc_artifact_refused", file=path.name, reason=error.reason, error=error.message)
            return None
        shelf.put(artifact)
        self._kept.add(artifact.digest[: shelf.DIGEST_CHARS])
        return artifact
