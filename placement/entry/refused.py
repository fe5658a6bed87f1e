"""Receipts of requests that were refused: who asked, for what, and which rule said no.

A flood of refusals must not fill the disk: beyond BURST at once and PER_S on average, a tenant's refusals are counted
and the next receipt tells how many there were (`unlisted_before`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mesh.errors import MeshError
from mesh.identity.receipt import record_to_wire
from mesh.telemetry.log import get_logger
from mesh.v1 import common_pb2 as common
from placement.detect.label import Raised
from placement.entry.rate_limit import Bucket
from placement.entry.receipt import RECEIPT_FORMAT, ReceiptKeeper, Signer, label_body

log = get_logger(__name__)
PER_S = 1.0
BURST = 100.0
_TOLD = ("rule", "field", "node", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that did not run. `raised` None: it was refused before its label was worked out."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    claimed_label: str
    policy_version: int
    started_unix_s: float
    error: MeshError
    raised: Raised | None = None


class RefusalReceipts:
    """One per entry. Keeping one never raises: the caller is refused in any case, and the log tells."""

    def __init__(self, signer: Signer, receipts: ReceiptKeeper, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._signer = signer
        self._receipts = receipts
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._unlisted: dict[str, int] = {}

    async def keep(self, refused: Refused) -> None:
        """Sign and keep its receipt, unless the tenant has too many."""
        tenant, now_s = refused.tenant, self._clock()
        bucket = self._buckets.setdefault(tenant, Bucket(now_s))
        bucket.refill(PER_S, BURST, now_s)
        if bucket.wait_s(1.0, PER_S, BURST) > 0.0:
            self._unlisted[tenant] = self._unlisted.get(tenant, 0) + 1
            return
        bucket.take(1.0)
        unlisted = self._unlisted.pop(tenant, 0)
        try:
            await self._receipts.append_receipt(self._receipt(refused, unlisted))
        except MeshError as exc:
            self._unlisted[tenant] = self._unlisted.get(tenant, 0) + unlisted + 1
            log.error("refusal_receipt_not_kept", reason=exc.reason, error=exc.message)

    def _receipt(self, refused: Refused, unlisted: int) -> common.Receipt:
        error = refused.error
        body = {
            "format": RECEIPT_FORMAT,
            "request_id": refused.request_id,
            "tenant": refused.tenant,
            "key_id": refused.key_id,
            "model": refused.model[:200],
            "label": label_body(refused.claimed_label[:64], refused.raised or Raised("")),
            "policy_version": refused.policy_version,
            "rule": error.details.get("rule", "")[:200],
            "entry": self._signer.place.uri,
            "refused_because": {k: v[:200] for k, v in error.details.items() if k in _TOLD},
            "unlisted_before": unlisted,
            "refused": {},
            "saw_prompt": {},
            "held_kv": {},
            "relays": [],
            "tokens_by_node": {},
            "migrations": [],
            "fallbacks": 0,
            "legs": [],
            "started_unix_s": refused.started_unix_s,
            "ended_unix_s": time.time(),
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
            "outcome": error.reason,
        }
        return common.Receipt(record=record_to_wire(self._signer.sign(body)))
