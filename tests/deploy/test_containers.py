"""Container files, compose, Helm chart, Kubernetes manifests, Consul files: what can be checked without running them.

Every settings file in them is read by the same code as at start. Where helm, kubernetes-validate (real schemas) or
consul are installed they judge too; deploy/docs/platform-admin.md says what was never run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh.cli.main import COMMANDS
from mesh.cli.plugins import installed_entry_points
from mesh.configfile import Group
from mesh.settings import CoreSettings, EdgeSettings, PlacementSettings, load_settings
from tests.consul_fixture import find_consul

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvmesh"
MANIFEST = DEPLOY / "kubernetes" / "kvmesh.yaml"
ROLES: dict[str, type[Group]] = {"placement": PlacementSettings, "core": CoreSettings, "edge": EdgeSettings}
HELM = ("helm", "template", "kvmesh", str(CHART), "--namespace", "kvmesh", "--kube-version", "1.31")


def manifests() -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(MANIFEST.read_text()) if document]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {m["metadata"]["name"]: m for m in manifests() if m["kind"] == kind}


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text()))


@pytest.mark.parametrize("role", ROLES)
def test_a_container_file_copies_what_there_is_and_runs_its_role(role: str) -> None:
    text = (DEPLOY / "containers" / f"{role}.Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    assert json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0])[0] == role
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001"]
    assert f'".[{role}]"' in text


def test_the_edge_carries_no_torch_and_placement_no_engine() -> None:
    extras = {e.name: e.extras for e in installed_entry_points(COMMANDS)}
    assert extras["edge"] == ["edge"]
    for role, engines in (("edge", ["torch"]), ("placement", ["torch", "llama"])):
        installs = re.findall(r"pip install.*", (DEPLOY / "containers" / f"{role}.Containerfile").read_text())
        assert installs
        assert not [line for line in installs for engine in engines if engine in line]


@pytest.mark.parametrize("role", ROLES)
def test_settings_of_compose(role: str) -> None:
    settings = load_settings(ROLES[role], DEPLOY / "compose" / f"{role}.yaml", {})
    assert str(settings.model_dump()["identity"]["folder"]) == "/etc/kvmesh/identity"


def test_compose_is_hardened_and_mounts_what_its_settings_name() -> None:
    services = compose()["services"]
    assert {service["command"][0] for service in services.values()} == set(ROLES)
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["mem_limit"]
        role = service["command"][0]
        assert (DEPLOY / "compose" / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()
        mounted = dict(reversed(volume.split(":")[:2]) for volume in service["volumes"])
        assert mounted[service["command"][2]] == f"./{role}.yaml"
        # The certificate's place is in make_identities.sh under this name.
        identity = mounted["/etc/kvmesh/identity"].removeprefix("./identities/")
        made = (DEPLOY / "compose" / "make_identities.sh").read_text()
        assert re.search(rf"^issue {role} {identity} .* {name}$", made, re.MULTILINE), name


def test_settings_in_kubernetes_are_settings(tmp_path: Path) -> None:
    seen = set()
    for name, config in of_kind("ConfigMap").items():
        for file, text in config["data"].items():
            role = file.removesuffix(".yaml")
            seen.add(role)
            path = tmp_path / f"{name}.yaml"
            path.write_text(text)
            settings = load_settings(ROLES[role], path, {}).model_dump()
            advertised = str(settings["listeners"]["advertise"])
            if not advertised.startswith("core-2.example.net"):
                service = of_kind("Service")[advertised.split(".")[0]]
                assert {port["port"] for port in service["spec"]["ports"]} >= {int(advertised.rpartition(":")[2])}
    assert seen == {"placement", "core"}


def test_pods_are_restricted() -> None:
    sets = of_kind("StatefulSet")
    assert set(sets) == {"kvmesh-placement", "kvmesh-core-1", "kvmesh-core-2"}
    for stateful in sets.values():
        pod = stateful["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert "env" not in container  # nothing reads the environment
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            volumes = {v["name"] for v in pod["volumes"]}
            claims = {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
            assert mounts == volumes | claims


def test_services_find_their_pods_and_ports() -> None:
    pods = [s["spec"]["template"] for s in of_kind("StatefulSet").values()]
    for name, service in of_kind("Service").items():
        selector = service["spec"]["selector"].items()
        found = [pod for pod in pods if selector <= pod["metadata"]["labels"].items()]
        assert len(found) == 1, name
        ports = {port["name"] for port in found[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_every_value_of_the_chart_is_told_and_checked() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(tree: dict[str, Any], rule: dict[str, Any], path: str) -> None:
        assert rule.get("additionalProperties") is False, path
        assert tree.keys() <= rule["properties"].keys(), path
        for key, value in tree.items():
            inner = rule["properties"][key]
            if isinstance(value, dict) and inner.get("additionalProperties") is False:
                check(value, inner, f"{path}.{key}")

    check(values, schema, "values")
    templates = "".join(template.read_text() for template in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.(\w+)", templates))
    assert used == values.keys()


def test_the_manifest_is_what_the_chart_renders() -> None:
    if shutil.which("helm") is None:
        pytest.skip("helm is not installed")
    lint = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    done = subprocess.run([*HELM, "-f", str(CHART / "ci" / "example.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(filter(None, yaml.safe_load_all(done.stdout))) == manifests()


@pytest.mark.parametrize(
    "bad", ["registry.kind=etcd", "registry.kind=consul", "placement.typo=1", "model.path=/abs", "core.gpus=-1"]
)
def test_bad_values_are_refused_by_the_schema(bad: str) -> None:
    if shutil.which("helm") is None:
        pytest.skip("helm is not installed")
    done = subprocess.run([*HELM, "--set", bad], capture_output=True, text=True)
    assert done.returncode != 0
    assert bad.split("=")[0].split(".")[0] in done.stderr


def test_manifests_against_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for version in ("1.28", "1.31"):
        for manifest in manifests():
            validate.validate(manifest, version, strict=True)


def test_consul_definitions_name_the_ports_of_placement() -> None:
    settings = PlacementSettings.model_validate({"identity": {"folder": "/i"}, "state_folder": "/s"})
    services = json.loads((DEPLOY / "consul" / "kvmesh-entry.json").read_text())["services"]
    ports = {service["name"]: service["port"] for service in services}
    assert ports == {"kvmesh-entry": settings.listeners.public.port, "kvmesh-entry-http": settings.listeners.http.port}


def test_the_acl_covers_what_the_registry_writes() -> None:
    from mesh.registry.consul_wire import service_name
    from mesh.settings import RegistrySettings

    text = (DEPLOY / "consul" / "kvmesh-acl.hcl").read_text()
    rules = dict(re.findall(r'^(\w+_prefix) "([^"]*)"', text, re.MULTILINE))
    prefix = RegistrySettings().prefix
    assert service_name(prefix).startswith(rules["service_prefix"])
    assert rules["key_prefix"] == f"{prefix}/"


@pytest.mark.consul
def test_consul_takes_the_definitions(tmp_path: Path) -> None:
    consul = find_consul()
    if consul is None:
        pytest.skip("no consul binary")
    shutil.copy(DEPLOY / "consul" / "kvmesh-entry.json", tmp_path)
    (tmp_path / "base.json").write_text(json.dumps({"data_dir": str(tmp_path / "data")}))
    done = subprocess.run([str(consul), "validate", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
