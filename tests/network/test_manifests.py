"""The command of the manifest for Kubernetes, run as its controller would, on two hosts of a network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.network import ShapedNetwork
from benchmarks.network.shaped_network import INTERFACE
from tests.families import save_tiny_llama
from tests.tokenizers_for_tests import byte_level

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"
KEY = "a-key-of-this-test"
TEXT = "Once upon a time there was a king. " * 6

ASK = """
import json, sys, urllib.request
body = json.dumps({"prompt": sys.argv[2], "max_tokens": 12, "temperature": 0}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[3]}
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/completions", body, headers)).read().decode())
"""


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


def test_a_pod_is_asked_only_at_ports_where_it_listens_and_no_service_takes_the_name_of_the_set() -> None:
    leader, last = pods("leader_worker_set.yaml")
    [probe] = {container(spec)["readinessProbe"]["exec"]["command"][2] for spec in (leader, last)}
    for number, is_ready in (("0", False), ("1", True)):  # nobody listens here
        done = subprocess.run(["sh", "-c", probe], env=os.environ | {"LWS_WORKER_INDEX": number}, capture_output=True)
        assert (done.returncode == 0) == is_ready
    assert container(last, "vllm")["readinessProbe"] == {"tcpSocket": {"port": 8001}}
    objects = list(yaml.safe_load_all((KUBERNETES / "leader_worker_set.yaml").read_text()))
    names = {each["kind"]: each["metadata"]["name"] for each in objects}
    assert names["Service"] != names["LeaderWorkerSet"]


@pytest.mark.usefixtures("netns")
@pytest.mark.slow
def test_two_hosts_with_the_variables_of_the_controller_serve_what_one_rank_does(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", byte_level())
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    answers = []
    for num_hosts in (1, 2):
        with ShapedNetwork(gbps=1) as network:
            hosts = [
                subprocess.Popen(
                    [*network.inside(host), *container(spec)["command"]],
                    cwd=ROOT,
                    stdout=(tmp_path / f"{num_hosts}.{host}").open("w"),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={
                        **os.environ,
                        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                        "LWS_LEADER_ADDRESS": network.addresses[0],
                        "LWS_GROUP_SIZE": str(num_hosts),
                        "LWS_WORKER_INDEX": str(host),
                        "RUNAHEAD_SECRET": "of this test" * 4,
                        "RUNAHEAD_CACHE": str(tmp_path / "cache"),
                        "MODEL": model,
                        "RANKS_PER_HOST": "1",
                        "KEY_FILE": str(key_file),
                        "HANDOVER": "",
                        "GLOO_SOCKET_IFNAME": INTERFACE,  # a pod's own network is eth0
                    },
                )
                for host, spec in enumerate(pods("leader_worker_set.yaml")[:num_hosts])
            ]
            try:
                answers.append(asked(network, hosts, tmp_path))
                hosts[0].send_signal(signal.SIGTERM)
                for each in hosts:
                    each.wait(timeout=60)
            finally:
                for each in hosts:
                    if each.poll() is None:
                        os.killpg(each.pid, signal.SIGKILL)
                        each.wait()
    assert answers[0] == answers[1] and len(answers[0]) > 4


def asked(network: ShapedNetwork, hosts: list[subprocess.Popen[bytes]], folder: Path) -> str:
    """The answer to a prompt, once the server is there, asked for on the last host."""
    url, deadline = f"http://{network.addresses[0]}:8000", time.monotonic() + 100
    while True:
        command = [*network.inside(len(hosts) - 1), sys.executable, "-c", ASK, url, TEXT, KEY]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            text: str = json.loads(done.stdout)["choices"][0]["text"]
            return text
        told = "".join(path.read_text() for path in sorted(folder.glob("?.?")))
        assert "Connection refused" in done.stderr, told + done.stderr
        assert all(each.poll() is None for each in hosts) and time.monotonic() < deadline, told
        time.sleep(0.5)
