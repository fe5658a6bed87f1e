"""A real Consul agent for tests: `consul agent -dev` on free loopback ports, in a folder of its own.

The binary comes from .kvmesh/consul (deploy/consul/get_consul.sh puts it there) or PATH; tests that use the
fixture skip with the reason where there is none. Import `consul_agent` into a conftest to use it.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import consul
import pytest
import requests

_ROOT = Path(__file__).resolve().parent.parent
_READY_TIMEOUT_S = 30.0


def find_consul() -> Path | None:
    """The Consul binary, or None."""
    local = _ROOT / ".kvmesh" / "consul" / "usr" / "bin" / "consul"
    if local.is_file():
        return local
    on_path = shutil.which("consul")
    return Path(on_path) if on_path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """TLS files of an agent (it and its clients show the same certificate), and its first token."""

    ca_file: Path
    cert_file: Path
    key_file: Path
    token: str

    @property
    def hcl(self) -> str:
        return f"""
            ca_file = "{self.ca_file}", cert_file = "{self.cert_file}", key_file = "{self.key_file}"
            verify_incoming_https = true
            acl {{ enabled = true, default_policy = "deny"
                   tokens {{ master = "{self.token}", agent = "{self.token}" }} }}
        """


class ConsulAgent:
    """One agent process. A -dev agent keeps all in memory: a restart is an empty registry on the same port.

    With `secured` it speaks TLS only, wants a certificate of `secured.ca_file`'s authority from its clients, and
    denies what no token allows."""

    def __init__(self, binary: Path, folder: Path, secured: Secured | None = None) -> None:
        self._binary = binary
        self._secured = secured
        self._log = folder / "consul.log"
        self._ports = dict(zip(("http", "server", "serf-lan"), _free_ports(3), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port of the HTTP API."""
        return f"127.0.0.1:{self._ports['http']}"

    @property
    def client(self) -> consul.Consul:
        """A fresh client."""
        port, secured = self._ports["http"], self._secured
        if secured is None:
            return consul.Consul(host="127.0.0.1", port=port)
        pair = (str(secured.cert_file), str(secured.key_file))
        return consul.Consul(
            host="127.0.0.1", port=port, scheme="https", verify=str(secured.ca_file), cert=pair, token=secured.token
        )

    def start(self) -> None:
        """Start and wait until it has a leader and answers."""
        secured = self._secured
        options = [
            f"-{'https' if secured and name == 'http' else name}-port={port}" for name, port in self._ports.items()
        ]
        if secured is not None:
            options += ["-http-port=-1", f"-hcl={secured.hcl}"]
        options += ["-serf-wan-port=-1", "-dns-port=-1", "-grpc-port=-1", "-node=test", "-bind=127.0.0.1"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._binary), "agent", "-dev", *options, "-hcl=disable_update_check = true"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise RuntimeError(f"Consul did not come up:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        client = self.client
        try:
            _, nodes = client.health.node("test")
            return bool(client.status.leader()) and bool(nodes)
        except (requests.RequestException, consul.ConsulException):
            return False
        finally:
            client.http.session.close()


def _free_ports(count: int) -> list[int]:
    """Distinct ports that are free now; all are held while choosing."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture
def consul_agent(tmp_path: Path) -> Iterator[ConsulAgent]:
    """A running agent of its own for each test."""
    binary = find_consul()
    if binary is None:
        pytest.skip("no Consul binary: run deploy/consul/get_consul.sh .kvmesh/consul, or put one on PATH")
    agent = ConsulAgent(binary, tmp_path)
    agent.start()
    yield agent
    agent.kill()
