"""Keeping a node's certificate fresh while it runs: asks for a new one at two thirds of the old one's life.

When is a pure function of the certificate's life; a failed attempt is repeated at a pace that fits what is left, with
jitter, so that the sites of a mesh that was down do not come all at once. Nothing here ends the node: with a
certificate that ran out it goes on for its own site's clients, and goes on asking.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from mesh.errors import MeshError
from mesh.identity.ca import CLOCK_SKEW, NodeCredentials
from mesh.identity.certificates import load_certificate
from mesh.identity.keyring import Keyring
from mesh.process import background_loop
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
RENEW_AT_RATIO = 2.0 / 3.0  # of the life
_JITTER_RATIO = 0.05  # of the life, earlier
_RETRY_RATIO = 0.02  # of the life between attempts
_LEAST_RETRY_S, _MOST_RETRY_S = 0.2, 3600.0

Renew = Callable[[], Awaitable[bytes]]
"""Asks for a new certificate, PEM."""


def renewal_wait_s(begin_unix_s: float, end_unix_s: float, now_unix_s: float, jitter: float) -> float:
    """Seconds until a certificate is to be renewed. `jitter` 0 to 1. Never negative."""
    life_s = end_unix_s - begin_unix_s
    due_s = begin_unix_s + life_s * (RENEW_AT_RATIO - _JITTER_RATIO * jitter)
    return max(0.0, due_s - now_unix_s)


def retry_wait_s(begin_unix_s: float, end_unix_s: float, jitter: float) -> float:
    """Seconds until the next attempt after one that failed. `jitter` 0 to 1."""
    pace_s = min(_MOST_RETRY_S, max(_LEAST_RETRY_S, (end_unix_s - begin_unix_s) * _RETRY_RATIO))
    return pace_s * (0.5 + 0.5 * jitter)


class CertificateRenewal:
    """Owned by the node's process; `start` and `close` it."""

    def __init__(self, keyring: Keyring, renew: Renew, *, rng: random.Random | None = None) -> None:
        self._keyring = keyring
        self._renew = renew
        self._rng = rng or random.Random()
        self._task: asyncio.Task[None] | None = None
        self._told = ""  # the last reason that was logged
        self.renewed = 0

    def start(self) -> None:
        """Begin."""
        self._task = background_loop(self._run, "certificate renewal")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            begin_s, end_s = life_of(self._keyring.now)
            await asyncio.sleep(renewal_wait_s(begin_s, end_s, datetime.now(UTC).timestamp(), self._rng.random()))
            try:
                cert_pem = await self._renew()
                newer = await asyncio.to_thread(self._keyring.keep, cert_pem)
            except MeshError as error:
                if error.reason != self._told:
                    self._told = error.reason
                    log.warning("certificate_not_renewed", reason=error.reason, error=error.message)
                await asyncio.sleep(retry_wait_s(begin_s, end_s, self._rng.random()))
                continue
            self._keyring.use(newer)
            self._told = ""
            self.renewed += 1
            log.info("certificate_renewed", not_after=newer.not_after.isoformat())


def life_of(credentials: NodeCredentials) -> tuple[float, float]:
    """From when to when a node's certificate is meant to be used, seconds since the epoch: CLOCK_SKEW after its
    beginning, which is that much in the past for the sake of clocks that are behind."""
    certificate = load_certificate(credentials.cert_pem, "the node certificate")
    return (certificate.not_valid_before_utc + CLOCK_SKEW).timestamp(), certificate.not_valid_after_utc.timestamp()
