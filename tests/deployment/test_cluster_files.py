"""docker-compose.cluster.yml and deploy/kubernetes agree with Envoy's configuration and with the server."""

import ipaddress
from pathlib import Path

import pytest
import yaml

from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
# Variables of others: Envoy's filter, and the client of the object store.
FOREIGN = {"ATTNCACHE_AFFINITY"}


def load(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def manifests():
    """All manifests by kind and name."""
    found = [
        document
        for file in ("server.yaml", "entrance.yaml")
        for document in yaml.safe_load_all((KUBERNETES / file).read_text(encoding="utf-8"))
    ]
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def pod(name):
    return manifests()["Deployment", name]["spec"]["template"]["spec"]


def variables(name):
    (container,) = pod(name)["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def envoy():
    return load("docker/envoy.yaml")["static_resources"]


def refuse_unknown(names):
    fields = {name.removeprefix("ATTNCACHE_").lower() for name in names if name.startswith("ATTNCACHE_")}
    assert fields <= set(Settings.model_fields)


def test_manifests_are_valid():
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in manifests().values():
        validator.validate(manifest, "1.34", strict=True)


def test_configuration_of_envoy_is_one_for_compose_and_kubernetes():
    assert {
        str((KUBERNETES / name).resolve())
        for name in load("deploy/kubernetes/kustomization.yaml")["resources"]
    } == {str(path) for path in (ROOT / "docker", KUBERNETES / "server.yaml", KUBERNETES / "entrance.yaml")}
    (generated,) = load("docker/kustomization.yaml")["configMapGenerator"]
    volumes = {volume["name"]: volume for volume in pod("attncache-entrance")["volumes"]}
    assert volumes["config"]["configMap"]["name"] == generated["name"]
    compose = load("docker-compose.cluster.yml")["services"]["entrance"]
    mounted = dict(volume.split(":")[:2] for volume in compose["volumes"])
    assert mounted == {f"./docker/{name}": f"/etc/envoy/{name}" for name in generated["files"]}
    assert all((ROOT / source).is_file() for source in mounted)
    (container,) = pod("attncache-entrance")["containers"]
    assert (compose["image"], compose["command"][1]) == (container["image"], container["args"][1])
    assert 'os.getenv("ATTNCACHE_AFFINITY")' in (ROOT / "docker/affinity.lua").read_text(encoding="utf-8")


def test_envoy_finds_the_servers_by_the_name_of_their_service():
    (name,) = {
        (address["address"], address["port_value"])
        for cluster in envoy()["clusters"][:2]
        for endpoint in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        for address in [endpoint["endpoint"]["address"]["socket_address"]]
    }
    service = manifests()["Service", "attncache"]["spec"]
    assert service["clusterIP"] == "None"
    assert name == ("attncache", service["ports"][0]["port"])
    services = load("docker-compose.cluster.yml")["services"]
    assert {"attncache", "entrance", "valkey", "objects", "prometheus", "grafana"} == set(services)
    jobs = load("docker/prometheus.cluster.yml")["scrape_configs"]
    assert jobs[0]["dns_sd_configs"][0]["names"] == ["attncache"]
    port = str(envoy()["listeners"][1]["address"]["socket_address"]["port_value"])
    assert jobs[1]["static_configs"][0]["targets"] == [f"entrance:{port}"]
    assert int(port) in {
        port["containerPort"] for port in pod("attncache-entrance")["containers"][0]["ports"]
    }


def test_servers_have_time_to_leave_and_trust_envoy_alone():
    named = variables("attncache")
    refuse_unknown(set(named) - FOREIGN)
    needed = float(named["ATTNCACHE_DRAIN_DELAY_SECONDS"]) + Settings().drain_seconds
    assert pod("attncache")["terminationGracePeriodSeconds"] > needed
    compose = load("docker-compose.cluster.yml")
    server, entrance = compose["services"]["attncache"], compose["services"]["entrance"]
    refuse_unknown(server["environment"])
    assert float(server["stop_grace_period"].removesuffix("s")) > needed
    (address,) = [network["ipv4_address"] for network in entrance["networks"].values()]
    assert server["environment"]["ATTNCACHE_TRUSTED_PROXIES"] == address
    (front,) = compose["networks"]["front"]["ipam"]["config"]
    assert ipaddress.ip_address(address) in ipaddress.ip_network(front["subnet"])
    # No other container may get the address that the servers trust.
    assert ipaddress.ip_address(address) not in ipaddress.ip_network(front["ip_range"])
    clients, monitoring = manifests()["NetworkPolicy", "attncache"]["spec"]["ingress"]
    assert clients["from"] == [{"podSelector": {"matchLabels": {"app": "attncache-entrance"}}}]
    assert [port["port"] for port in clients["ports"]] == [8080]
    # Operators' routes are on a port that Envoy does not reach.
    (port,) = [port["port"] for port in monitoring["ports"]]
    assert {named["ATTNCACHE_ADMIN_PORT"], str(server["environment"]["ATTNCACHE_ADMIN_PORT"])} == {str(port)}
    assert load("docker/prometheus.cluster.yml")["scrape_configs"][0]["dns_sd_configs"][0]["port"] == port
