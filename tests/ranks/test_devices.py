"""The device that a rank takes: one of the GPUs that it sees, and never one that another rank has."""

import socket
from types import SimpleNamespace

import pytest
import torch

from runahead.config import Device
from runahead.ranks.devices import check_own_gpus, choose_device, gpu_name
from runahead.ranks.ranks import Ranks


@pytest.fixture
def gpus(monkeypatch):
    """Makes PyTorch see GPUs, by their UUIDs; the list that it returns tells which were chosen."""

    def see(*uuids: str) -> list[torch.device]:
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index])
        )
        return chosen

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return see


@pytest.mark.parametrize("local_rank", range(4))
def test_ranks_that_see_all_gpus_take_one_each(gpus, local_rank):
    chosen = gpus("a", "b", "c", "d")
    assert choose_device(Device.auto, local_rank, 4) == torch.device("cuda", local_rank)
    assert chosen == [torch.device("cuda", local_rank)]


@pytest.mark.parametrize("local_rank", range(4))
def test_a_rank_that_sees_one_gpu_takes_it(gpus, local_rank):
    chosen = gpus("a")
    assert choose_device(Device.cuda, local_rank, 4) == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0)]


def test_ranks_may_share_a_gpu_where_they_are_told_to(gpus, monkeypatch):
    gpus("a")
    ranks = Ranks(0, 1, device=torch.device("cpu"), backend="gloo", timeout_s=20)
    monkeypatch.setattr("runahead.ranks.ranks.gpu_name", lambda device: "host GPU-a")
    monkeypatch.setattr(ranks, "gather", lambda name, what: [name, name])
    with pytest.raises(ValueError, match="ranks 0, 1 see the same GPU"):
        ranks.join()
    assert ranks.join(may_share_gpus=True).num_stages == 1


def test_ranks_that_see_their_own_gpu_differ_in_name(gpus):
    names = []
    for uuid in "abcd":
        gpus(uuid)
        names.append(gpu_name(choose_device(Device.auto, 0, 4)))
    assert len(set(names)) == 4
    check_own_gpus(names)


def test_ranks_that_share_a_gpu_are_named(gpus):
    gpus("a")
    name = gpu_name(choose_device(Device.auto, 1, 2))
    with pytest.raises(ValueError, match=r"ranks 1, 2 see the same GPU.*--gpu-bind=none.*ranks\.device=cpu"):
        check_own_gpus([None, name, name])


def test_gpus_of_two_hosts_differ_even_if_their_uuids_do_not(gpus, monkeypatch):
    gpus("0000")
    names = []
    for host in ("n1", "n2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names.append(gpu_name(torch.device("cuda", 0)))
    check_own_gpus(names)


def test_instances_of_one_gpu_differ(gpus, monkeypatch):
    gpus("a")
    names = []
    for instance in ("MIG-1", "MIG-2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", instance)
        names.append(gpu_name(torch.device("cuda", 0)))
    check_own_gpus(names)


def test_several_gpus_but_too_few_are_refused(gpus):
    gpus("a", "b")
    with pytest.raises(ValueError, match="4 ranks on this host but 2 GPUs; use --nproc-per-node 2"):
        choose_device(Device.auto, 0, 4)


def test_cpus_are_shared(gpus):
    gpus()
    assert choose_device(Device.auto, 3, 4) == torch.device("cpu")
    assert gpu_name(torch.device("cpu")) is None
    check_own_gpus([None, None])


def test_cuda_without_a_gpu_is_refused(gpus):
    gpus()
    with pytest.raises(ValueError, match="sees no CUDA device"):
        choose_device(Device.cuda, 0, 1)
