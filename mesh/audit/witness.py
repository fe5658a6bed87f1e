"""Two nodes keep the heads of each other's audit logs, and placement a copy of each site's. The asker is the placement
service, over the uplink."""

from __future__ import annotations

import asyncio

from mesh.audit.chain import Head, head_of_body
from mesh.audit.log import AuditLog
from mesh.errors import PayloadCorrupt
from mesh.identity.receipt import record_from_wire, record_to_wire
from mesh.identity.signing import verify_record
from mesh.v1 import common_pb2 as common
from mesh.v1 import uplink_pb2

MAX_ANSWER_BYTES = 4 << 20


class WitnessDesk:
    """One per log. `ca_pem`: the mesh's authority, which heads of others must lead to."""

    def __init__(self, log: AuditLog, ca_pem: bytes) -> None:
        self._log = log
        self._ca_pem = ca_pem

    def ask(self, kept: Head | None, theirs: Head | None) -> uplink_pb2.WitnessRequest:
        """`kept`: the newest head that we keep of the other node; `theirs`: that it keeps of us."""
        request = uplink_pb2.WitnessRequest()
        if kept is not None:
            request.kept_chain, request.kept_seq = kept.chain, kept.seq
        if self._log.news_since(theirs):
            request.head.CopyFrom(record_to_wire(self._log.sign_head()))
        return request

    async def answer(self, request: uplink_pb2.WitnessRequest, *, of: str = "") -> uplink_pb2.WitnessResponse:
        """Keep the asker's head if it sent one, and tell our own if it has news for it. `of`: who asks, if its
        certificate said so. Raises what `keep` does."""
        if request.HasField("head"):
            await self.keep(request.head, of=of)
        kept = Head(chain=request.kept_chain, seq=request.kept_seq, digest="") if request.kept_chain else None
        response = uplink_pb2.WitnessResponse()
        if self._log.news_since(kept):
            response.head.CopyFrom(record_to_wire(self._log.sign_head()))
        return response

    async def keep(self, wire: common.SignedRecord, *, of: str = "") -> Head:
        """Write a head into our log; `of`: whose it must be, as a URI. Raises PayloadCorrupt or Unauthenticated if it
        is not what its signer may say, and what AuditLog.append raises."""
        record = record_from_wire(wire)
        body, place = verify_record(record, self._ca_pem)
        node, head, _ = head_of_body(body)
        if node != place.uri or (of and node != of):
            raise PayloadCorrupt(f"a head of {node[:200]}, sent by {place.uri}")
        await self._log.append_witness(record)
        return head

    async def entries(self, fetch: uplink_pb2.AuditFetch) -> uplink_pb2.AuditEntries:
        """Entries for a copy of our log. The asker keeps what is before the first one that it wants, so that may be
        let go. To one that does not know this log only its name is told. Raises PayloadCorrupt for what was let go."""
        head = self._log.head
        answer = uplink_pb2.AuditEntries(chain=head.chain, head_seq=head.seq)
        if fetch.chain == head.chain:
            if fetch.from_seq:
                await asyncio.to_thread(self._log.merged, fetch.from_seq - 1)
            most = min(fetch.max_bytes, MAX_ANSWER_BYTES)
            answer.lines.extend(await asyncio.to_thread(self._log.read, fetch.from_seq, most))
        return answer
