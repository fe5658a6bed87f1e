"""Settings files and flags: what is read, and that every kind of bad input stops start-up with a clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from mesh.address import HostPort
from mesh.errors import InvalidRequest
from mesh.settings import (
    CoreSettings,
    EdgeSettings,
    Group,
    PlacementSettings,
    RegistryKind,
    leaves,
    load_settings,
    to_yaml,
)

PLACEMENT = "identity: {folder: id}\nstate_folder: state\n"
EDGE = PLACEMENT + "placement: {address: '127.0.0.1:7001'}\nmodel: {id: m, path: m.gguf}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "node.yaml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str, cls: type[Group] = EdgeSettings, **flags: str) -> str:
    with pytest.raises(InvalidRequest) as info:
        load_settings(cls, write(folder, text), {k.replace("__", "."): v for k, v in flags.items()})
    assert "\n" not in info.value.message
    return info.value.message


def test_file_gives_values_and_defaults(tmp_path: Path) -> None:
    settings = load_settings(EdgeSettings, write(tmp_path, EDGE + "engine: {n_threads: 1}\n"), {})
    assert settings.engine.n_threads == 1
    assert settings.placement.address == HostPort("127.0.0.1", 7001)
    assert settings.registry.kind is RegistryKind.EMBEDDED


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = PLACEMENT + "models: [{id: m, path: sub/m.gguf}, {id: n, path: /abs/n.gguf}]\n"
    settings = load_settings(PlacementSettings, write(tmp_path, text), {})
    assert settings.state_folder == tmp_path / "state"
    assert settings.identity.folder == tmp_path / "id"
    assert [m.path for m in settings.models] == [tmp_path / "sub/m.gguf", Path("/abs/n.gguf")]


def test_flags_win_over_the_file_and_keep_its_neighbours(tmp_path: Path) -> None:
    config = write(tmp_path, EDGE + "listeners: {http: '127.0.0.1:9000'}\n")
    settings = load_settings(EdgeSettings, config, {"listeners.public": "[::1]:7", "drain_s": "1.5"})
    assert settings.listeners.public == HostPort("::1", 7)
    assert settings.listeners.http == HostPort("127.0.0.1", 9000)
    assert settings.drain_s == 1.5


def test_flags_alone_are_enough() -> None:
    settings = load_settings(
        PlacementSettings,
        None,
        {"identity.folder": "i", "state_folder": "s", "models": "[{id: m, path: p}]", "listeners.advertise": "none"},
    )
    assert settings.models[0].id == "m"
    assert settings.listeners.advertise is None


def test_a_partly_given_group_keeps_its_other_defaults() -> None:
    flags = {"identity.folder": "i", "state_folder": "s", "listeners.public": "127.0.0.1:1"}
    assert load_settings(PlacementSettings, None, flags).listeners.node == HostPort("127.0.0.1", 7001)


def test_written_yaml_reads_back(tmp_path: Path) -> None:
    first = load_settings(
        PlacementSettings, write(tmp_path, PLACEMENT + "bootstrap: {tenant: dev, keys_file: k}\n"), {}
    )
    again = load_settings(PlacementSettings, write(tmp_path, to_yaml(first)), {})
    assert again == first


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = load_settings(EdgeSettings, write(tmp_path, EDGE), {})
    with pytest.raises(ValidationError):
        settings.drain_s = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("cls", [PlacementSettings, CoreSettings, EdgeSettings])
def test_every_leaf_has_help_and_a_unique_key(cls: type[Group]) -> None:
    found = list(leaves(cls))
    assert len({leaf.key for leaf in found}) == len(found)
    assert [leaf.key for leaf in found if not leaf.help] == []


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("drain: 3\n", "unknown key drain (did you mean drain_s?)"),
        ("engine: {n_thread: 1}\n", "unknown key engine.n_thread (did you mean engine.n_threads?)"),
        ("xyzzy: 1\n", "unknown key xyzzy"),
        ("engine: {n_threads: -1}\n", "engine.n_threads:"),
        ("engine: {n_threads: yes}\n", "engine.n_threads: must be a number"),
        ("engine: {n_threads: 1.5}\n", "engine.n_threads:"),
        ("engine: [1]\n", "engine:"),
        ("engine: {max_running: 0}\n", "engine.max_running:"),
        ("drain_s: .nan\n", "drain_s:"),
        ("drain_s: .inf\n", "drain_s:"),
        ("drain_s: 0\n", "drain_s:"),
        ("drain_s: soon\n", "drain_s:"),
        ("listeners: {public: '7000'}\n", "listeners.public: an address is host:port"),
        ("listeners: {public: '127.0.0.1:70000'}\n", "from 0 to 65535"),
        ("listeners: {public: 7000}\n", "listeners.public: an address is written host:port"),
        ("listeners: {public: '::1:7000'}\n", "[address]:port"),
        ("listeners: {health: '0.0.0.0:1'}\n", "listeners.health: must be on loopback"),
        ("registry: {kind: etcd}\n", "registry.kind:"),
        ("log: {level: loud}\n", "log.level:"),
        ("uplink: {lease_s: 1, heartbeat_s: 1}\n", "must hold two heartbeats"),
    ],
)
def test_bad_values_name_their_key(tmp_path: Path, extra: str, says: str) -> None:
    assert says in refused(tmp_path, EDGE + extra)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, "state_folder: s\ndrain_s: -1\nfoo: 1\n")
    for part in ("identity is required", "placement is required", "model is required", "drain_s:", "unknown key foo"):
        assert part in message


def test_unknown_key_in_a_list_of_groups(tmp_path: Path) -> None:
    message = refused(tmp_path, PLACEMENT + "models: [{id: m, path: p, pth: q}]\n", PlacementSettings)
    assert "unknown key models.0.pth (did you mean models.0.path?)" in message


def test_unknown_and_bad_flags(tmp_path: Path) -> None:
    assert "unknown key engine.n_treads" in refused(tmp_path, EDGE, engine__n_treads="1")
    assert "models: not a YAML list" in refused(tmp_path, PLACEMENT, PlacementSettings, models="[{")
    assert "drain_s" in refused(tmp_path, EDGE, drain_s="none")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML"),
        ("- 1\n", "must hold a mapping"),
        ("just words\n", "must hold a mapping"),
        ("1: 2\n", "must hold a mapping"),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text)


def test_missing_binary_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_settings(EdgeSettings, tmp_path / "absent.yaml", {})
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_settings(EdgeSettings, tmp_path, {})
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="not valid YAML"):
        load_settings(EdgeSettings, binary, {})
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(InvalidRequest, match="larger than"):
        load_settings(EdgeSettings, huge, {})


@pytest.mark.parametrize("text", ["localhost:1", "127.1.2.3:1", "[::1]:1"])
def test_loopback_addresses(text: str) -> None:
    address = HostPort.parse(text)
    assert address.is_loopback
    assert HostPort.parse(str(address)) == address


@pytest.mark.parametrize("text", ["10.0.0.1:1", "[::]:1", "localhost.example:1"])
def test_other_addresses_are_not_loopback(text: str) -> None:
    assert not HostPort.parse(text).is_loopback


@pytest.mark.parametrize("text", ["", ":1", "host", "host:", "host:x", "host:-1", "a b:1", "host:١"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InvalidRequest):
        HostPort.parse(text)
