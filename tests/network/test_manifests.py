"""The manifests for Kubernetes are whole: containers mount what their pods have, and all ranks start alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"


def pods(name: str) -> list[dict[str, Any]]:
    """Specs of the pods of a manifest."""
    with (KUBERNETES / name).open() as file:
        objects = list(yaml.safe_load_all(file))
    specs = []
    for each in objects:
        if each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            specs += [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]
        elif each["kind"] == "Pod":
            specs.append(each["spec"])
    return specs


def container(spec: dict[str, Any], name: str = "runahead") -> dict[str, Any]:
    [found] = [each for each in spec["containers"] if each["name"] == name]
    return found


@pytest.mark.parametrize("name", [path.name for path in sorted(KUBERNETES.glob("*.yaml"))])
def test_containers_mount_what_their_pods_have(name: str) -> None:
    assert pods(name)
    for spec in pods(name):
        volumes = {volume["name"] for volume in spec["volumes"]}
        for each in spec["containers"]:
            assert {mount["name"] for mount in each.get("volumeMounts", [])} <= volumes
        assert container(spec)["command"][:2] == ["sh", "-c"]


def test_all_ranks_are_started_by_one_command_with_the_variables_of_the_controller() -> None:
    leader, worker = (container(spec) for spec in pods("leader_worker_set.yaml"))
    assert leader == worker
    for option in ("nnodes=$LWS_GROUP_SIZE", "node-rank=$LWS_WORKER_INDEX", "master-addr=$LWS_LEADER_ADDRESS"):
        assert f" --{option} " in leader["command"][2]
