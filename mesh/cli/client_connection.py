"""Which mesh a client command talks to: flags, or the file that a local `kvmesh up` leaves in the current folder."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from mesh.address import HostPort
from mesh.client_sync import SyncMeshClient
from mesh.errors import InvalidRequest

STATE_FILE: Final = Path(".kvmesh") / "up.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the caller gave."""

    address: str | None = None
    api_key: str | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    site: str | None = None
    state: Path = STATE_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A mesh entry and a key for it. `tls_ca` None: plain text on loopback. `receipt_ca`: CA to check receipts by."""

    address: str
    api_key: str = field(repr=False)
    tls_ca: Path | None
    receipt_ca: Path | None

    def open(self) -> SyncMeshClient:
        """Connect. Raises InvalidRequest."""
        return SyncMeshClient(self.address, self.api_key, ca_file=self.tls_ca)


def resolve(flags: Flags, *, admin: bool) -> Connection:
    """Flags first, the state file for what they leave open. `admin`: the state file's admin key is meant.

    Raises InvalidRequest saying what is missing."""
    state = _read_state(flags.state)
    address = flags.address or _state_address(state, flags.site)
    if flags.address and flags.site:
        raise InvalidRequest("give --address or --site, one of them", field="site")
    key = flags.api_key or _read_key(flags.api_key_file) or (state or {}).get("admin_key" if admin else "api_key")
    if not address or not key:
        missing = "an address" if not address else "an API key"
        raise InvalidRequest(
            f"{missing} is missing: give --address and --api-key-file, or run `kvmesh up` in this folder "
            f"(there is no {flags.state})" if state is None else f"{missing} is missing in {flags.state}",
            field="address" if not address else "api_key",
        )  # fmt: skip
    known_ca = Path(str(state["ca_file"])) if state is not None and state.get("ca_file") else None
    tls_ca = flags.ca_file or (None if HostPort.parse(address).is_loopback else known_ca)
    return Connection(address=address, api_key=str(key), tls_ca=tls_ca, receipt_ca=flags.ca_file or known_ca)


def connected(*, admin: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first parameter is a Connection: the connection flags are added to its own."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(function).parameters.values())[1:]]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            flags = Flags(**{name: values.pop(name) for name in _FLAG_OPTIONS})
            function(resolve(flags, admin=admin), **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        flags = [
            inspect.Parameter(name, keyword, default=default, annotation=annotation)
            for name, (annotation, default) in _FLAG_OPTIONS.items()
        ]
        parameters = [*(p.replace(kind=keyword) for p in own), *flags]
        # Typer reads a command's options from its signature.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return wrap


_PANEL: Final = "Connection"
_FLAG_OPTIONS: Final[Mapping[str, tuple[Any, Any]]] = {
    "address": (
        Annotated[str | None, typer.Option(metavar="HOST:PORT", help="gRPC address.", rich_help_panel=_PANEL)],
        None,
    ),
    "site": (
        Annotated[
            str | None, typer.Option(metavar="SITE", help="Edge site of the local mesh.", rich_help_panel=_PANEL)
        ],
        None,
    ),
    "api_key": (
        Annotated[
            str | None,
            typer.Option(help="API key (a file is safer: other users see arguments).", rich_help_panel=_PANEL),
        ],
        None,
    ),
    "api_key_file": (
        Annotated[
            Path | None, typer.Option(metavar="FILE", help="File that holds the API key.", rich_help_panel=_PANEL)
        ],
        None,
    ),
    "ca_file": (
        Annotated[Path | None, typer.Option(metavar="FILE", help="CA of the mesh (TLS).", rich_help_panel=_PANEL)],
        None,
    ),
    "state": (
        Annotated[Path, typer.Option(metavar="FILE", help="What `kvmesh up` wrote.", rich_help_panel=_PANEL)],
        STATE_FILE,
    ),
}


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise InvalidRequest(f"cannot read {path}: {exc}", field="state") from exc
    if not isinstance(state, dict):
        raise InvalidRequest(f"{path} is not what `kvmesh up` writes", field="state")
    return state


def _state_address(state: Mapping[str, Any] | None, site: str | None) -> str | None:
    if state is None:
        return None
    if site is None:
        return str(state["grpc"]) if "grpc" in state else None
    edges = state.get("edges", {})
    if site not in edges:
        raise InvalidRequest(f"no site {site!r} in the local mesh; it has: {', '.join(sorted(edges))}", field="site")
    return str(edges[site]["grpc"])


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"cannot read the API key file {path}: {exc}", field="api_key_file") from exc
