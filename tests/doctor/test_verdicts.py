"""Verdicts and words of the doctor's checks, from made measurements."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from benchmarks.doctor import tasks
from benchmarks.doctor.checks import (
    check_chosen_blocks,
    check_decoding,
    check_devices,
    check_exactness,
    check_fault,
    check_links,
    needed_rate,
)
from benchmarks.doctor.crew import Ended, Job, JobOutcome, overrides
from benchmarks.doctor.doctor import Examination, estimate_s
from benchmarks.doctor.environment import (
    Examined,
    check_environment,
    check_gpus,
    check_load,
    check_names,
    check_ports,
    check_variables,
    check_versions,
)
from benchmarks.doctor.facts import Facts, Interface, gpus_of, infiniband_gbps, topology_of
from benchmarks.doctor.findings import Finding, Verdict, worst
from benchmarks.doctor.options import AUTO, DoctorRun
from benchmarks.doctor.page import as_text
from benchmarks.doctor.picture import picture
from benchmarks.doctor.speed import Race, check_race, check_tokens
from benchmarks.ttft.comparison import Spread
from launch.doctor import DOCTOR, main
from partitioner.cost.known_gpus import KNOWN, NAMES, known_gpu
from runahead import Ranks
from runahead.attention.partial import cpu_flash
from runahead.attention.sparse import flex
from runahead.config import Device, ModelOptions, RanksOptions
from runahead.kernels import operators
from tests.families import throughout
from tests.ranks.tasks import tiny_model

ETH = Interface(name="eth0", is_up=True, mbps=10_000)
HERE = Facts(
    host="a",
    place="a",
    versions={"torch": "2.13", "transformers": "5.1"},
    cores=8,
    busy_cores=0.1,
    hardware={"cpu": "some processor", "cores": 8, "ram_gib": 64, "gpus": []},
    resolves_to="10.0.0.1",
    num_gpus=0,
    gpus=[],
    topology={},
    interfaces=[Interface(name="lo", is_up=True, mbps=0), ETH, Interface(name="ib0", is_up=False, mbps=0)],
    infiniband_gbps=0.0,
    environment={},
)
THERE = replace(HERE, host="b", place="b")


def examined(*facts: Facts, uses_gpus: bool = False) -> Examined:
    local = [sum(other.place == each.place for other in facts) for each in facts]
    return Examined(facts=facts, local_ranks=local, uses_gpus=uses_gpus)


def with_variable(name: str, value: str, facts: Facts = HERE) -> Facts:
    return replace(facts, environment={name: value})


def probe(**more: Any) -> dict[str, Any]:
    """A probe of two ranks: a prompt of 1,000 tokens and 1 MB of keys and values computes for a second."""
    run = {"tokens": [5, 6, 7], "top5": [(5, 10.0), (6, 9.0)], "ttft_s": 2.0, "tpot_s": 0.1}
    return {
        "links": {"0-1": {"latency_s": 5e-5, "bandwidth_Bps": 1e9}},
        "memory_Bps": [1e10, 1e10],
        "memory_alone_Bps": 1e10,
        "matmul_flops": [1e12, 1e12],
        "runs": {"single": run, "kv_runahead": run},
        "length": 1000,
        "decoded_bytes": 8e8,
        "kv_bytes_per_token": 1000,
        "dtype": "float32",
        "model": "random llama",
        "layers": 10,
        "backend": "gloo",
        "device": "cpu",
        "threads": 1,
        "shares": [2],
        "chosen_blocks": [{"by": "kernel", "why": ""}] * 2,
    } | more


# The environment.


def test_a_sound_environment_is_good() -> None:
    assert {each.verdict for each in check_environment(examined(HERE, HERE))} == {Verdict.good}


def test_another_version_names_the_rank_and_both_versions() -> None:
    [found] = check_versions([HERE, replace(HERE, versions=HERE.versions | {"torch": "2.9"})])
    assert found.verdict is Verdict.failed
    assert found.words.startswith("rank 1 and rank 0 differ in torch (2.13 on rank 0, 2.9 on rank 1)")


@pytest.mark.parametrize(
    ("name", "value", "verdict", "says"),
    [
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", Verdict.failed, "wait for each other for ever; unset it"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", Verdict.short, "unset it or set 32"),
        ("OMP_NUM_THREADS", "64", Verdict.short, "2 ranks of 64 threads on 8 cores"),
        ("GLOO_SOCKET_IFNAME", "eth7", Verdict.failed, "there is no interface eth7 on this host"),
        ("GLOO_SOCKET_IFNAME", "eth", Verdict.failed, "it has lo, eth0"),
        ("GLOO_SOCKET_IFNAME", "ib0", Verdict.failed, "the interface ib0 is down"),
        ("NCCL_SOCKET_IFNAME", "=eth", Verdict.failed, "there is no interface eth "),
        ("NCCL_P2P_DISABLE", "1", Verdict.short, "through host memory rather than NVLink"),
        ("CUDA_LAUNCH_BLOCKING", "1", Verdict.short, "nothing overlaps; unset it"),
    ],
)
def test_a_trap_is_told_with_its_remedy(name: str, value: str, verdict: Verdict, says: str) -> None:
    [found] = check_variables(examined(with_variable(name, value), with_variable(name, value), uses_gpus=True))
    assert (found.verdict, found.measured) == (verdict, f"{name}={value} on all ranks")
    assert says in found.words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        ("OMP_NUM_THREADS", "4"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
        ("NCCL_IB_DISABLE", "1"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("NCCL_DEBUG", "INFO"),
    ],
)
def test_a_harmless_value_is_no_trap(name: str, value: str) -> None:
    [found] = check_variables(examined(with_variable(name, value), with_variable(name, value), uses_gpus=True))
    assert found.verdict is Verdict.good


def test_a_trap_of_one_rank_names_it_and_on_cpus_nccl_only_warns() -> None:
    [found] = check_variables(examined(HERE, with_variable("NCCL_LAUNCH_ORDER_IMPLICIT", "1")))
    assert found.verdict is Verdict.short
    assert found.measured == "NCCL_LAUNCH_ORDER_IMPLICIT=1 on rank 1"


def test_loopback_is_a_trap_between_hosts_only() -> None:
    names = [with_variable("GLOO_SOCKET_IFNAME", "lo", facts) for facts in (HERE, THERE)]
    assert check_variables(examined(*names))[0].verdict is Verdict.failed
    assert check_variables(examined(names[0], names[0]))[0].verdict is Verdict.good


def test_a_host_name_that_is_loopback_is_told_between_hosts() -> None:
    local = replace(THERE, resolves_to="127.0.1.1")
    [found] = check_names(examined(HERE, local))
    assert found.verdict is Verdict.failed and found.measured == "b is 127.0.1.1 on rank 1"
    assert check_names(examined(local, local)) == []
    assert check_names(examined(HERE, with_variable("GLOO_SOCKET_IFNAME", "eth0", local))) == []


def test_ranks_of_several_hosts_without_a_secret_are_told() -> None:
    safe, there = replace(HERE, has_secret=True), replace(THERE, has_secret=True)
    assert check_ports(examined(HERE, HERE)) == check_ports(examined(safe, there)) == []
    [found] = check_ports(examined(safe, THERE))
    assert (found.verdict, found.measured) == (
        Verdict.short,
        "no secret on rank 1",
    ) and "RUNAHEAD_SECRET" in found.words


def test_a_busy_host_is_told_once() -> None:
    busy = replace(HERE, busy_cores=3.0)
    [found] = check_load(examined(busy, busy))
    assert (found.verdict, found.measured) == (Verdict.short, "3.0 of 8 cores busy")


def test_a_gpu_in_use_and_too_few_gpus_are_told() -> None:
    gpu = {"name": "H100", "total_mib": 81920, "used_mib": 40960}
    facts = replace(HERE, num_gpus=2, gpus=[gpu, gpu | {"used_mib": 10}])
    [used] = check_gpus(examined(facts, facts, uses_gpus=True))
    assert (used.name, used.measured) == ("GPU 0", "40.0 of 80 GiB in use on a")
    assert check_gpus(examined(facts, facts, facts, uses_gpus=True))[0].verdict is Verdict.failed
    assert check_gpus(examined(facts, facts)) == []


# What a host says of itself.


def test_the_matrix_of_nvidia_smi_is_read() -> None:
    text = """
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tPHB\tNODE\t0-47\t0
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1
NIC0\tPIX\tNODE\tSYS\t X
"""
    found = topology_of(text)
    assert (found["0-1"], found["1-0"], found["0-2"], found["2-1"]) == ("NV18", "NV18", "SYS", "PHB")
    assert topology_of("") == {}


def test_gpus_of_nvidia_smi_are_read() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, 5\nNVIDIA H100 80GB HBM3, [N/A], 5\n"
    assert gpus_of(text) == [{"name": "NVIDIA H100 80GB HBM3", "total_mib": 81559, "used_mib": 5}]


def test_the_rate_of_infiniband_is_that_of_the_fastest_active_port(tmp_path: Path) -> None:
    for name, rate, state in (("a", "200 Gb/sec (4X HDR)", "4: ACTIVE"), ("b", "400 Gb/sec (4X NDR)", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate)
        (port / "state").write_text(state)
    assert infiniband_gbps(tmp_path) == 200
    assert infiniband_gbps(tmp_path / "none") == 0


def test_facts_survive_json() -> None:
    here = Facts.here()
    assert Facts.from_json(json.loads(json.dumps(here.as_json()))) == here


# Links.


def test_a_fast_link_is_good() -> None:
    [found] = check_links(probe(), [HERE, HERE])
    assert (found.verdict, found.measured) == (Verdict.good, "8 Gbit/s, 50 us")
    assert "loopback" in found.words


def test_a_link_below_what_a_prompt_needs_is_slow() -> None:
    assert needed_rate(probe(), 2) == 2e6
    slow = probe(links={"0-1": {"latency_s": 0.0, "bandwidth_Bps": 5e5}})
    [found] = check_links(slow, [HERE, HERE])
    assert found.verdict is Verdict.short
    assert found.words.startswith("a slow link: sending the keys and values of a prompt takes 2.0 times as long")


def test_a_link_below_its_cards_rate_is_slow() -> None:
    [found] = check_links(probe(links={"0-1": {"latency_s": 0.0, "bandwidth_Bps": 1.25e8}}), [HERE, THERE])
    assert (found.verdict, found.bound) == (Verdict.short, "10 Gbit/s")
    assert found.words.startswith("a slow link: it has 10% of the rate of eth0: something shapes or shares it")


def test_a_pair_that_is_slower_than_the_others_is_named() -> None:
    rates = {"0-1": 1e9, "0-2": 1e9, "1-2": 4e8}
    links = {pair: {"latency_s": 0.0, "bandwidth_Bps": rate} for pair, rate in rates.items()}
    found = check_links(probe(links=links), [HERE] * 3)
    assert [each.verdict for each in found] == [Verdict.good, Verdict.good, Verdict.short]
    assert found[2].name == "ranks 1-2" and "check this cable, port or slot" in found[2].words


@pytest.mark.parametrize(("rate", "verdict"), [(1e11, Verdict.good), (1e10, Verdict.short)])
def test_nvlink_that_is_not_used_is_named(rate: float, verdict: Verdict) -> None:
    facts = replace(HERE, topology={"0-1": "NV18", "1-0": "NV18"})
    about = probe(backend="nccl", links={"0-1": {"latency_s": 0.0, "bandwidth_Bps": rate}})
    [found] = check_links(about, [facts, facts])
    assert found.verdict is verdict and "NVLink (NV18)" in found.words
    assert ("--gpu-bind=none" in found.words) == (verdict is Verdict.short)


def test_tcp_in_place_of_infiniband_is_named() -> None:
    facts = [replace(each, infiniband_gbps=200.0) for each in (HERE, THERE)]
    [found] = check_links(probe(backend="nccl"), facts)
    assert found.verdict is Verdict.short and "NET/IB" in found.words


# Devices, exactness, decoding.


def test_a_slow_rank_and_a_slow_kind_are_told() -> None:
    memory, matmul = check_devices(probe(memory_Bps=[1e10, 1e10, 5e9]))
    assert memory.verdict is Verdict.short and memory.words.startswith("rank 2 has 50% of the others' median")
    assert matmul.verdict is Verdict.good
    about = probe(device="NVIDIA H100 80GB HBM3", dtype="bfloat16", memory_Bps=[3e12], matmul_flops=[3e14])
    memory, matmul = check_devices(about)
    assert memory.verdict is Verdict.good and memory.bound == "3,350 GB/s"
    assert matmul.verdict is Verdict.short and "30% of the stated figure" in matmul.words


def test_known_gpus_are_found_by_their_names() -> None:
    names = ["NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"]
    assert [known_gpu(name).memory_Bps / 1e9 for name in names] == [2000, 3350, 2039, 1555]  # type: ignore[union-attr]
    assert known_gpu("cpu") is None and known_gpu("NVIDIA L40") is None


@pytest.mark.parametrize(
    ("name", "gib", "memory_GBps", "tflops"),
    [
        ("NVIDIA L40S", 48, 864, 362),
        ("NVIDIA L4", 24, 300, 121),
        ("NVIDIA A10", 24, 600, 125),
        ("a100 80gb", 80, 2039, 312),
    ],
)
def test_figures_are_those_of_the_whole_name(name: str, gib: int, memory_GBps: float, tflops: float) -> None:
    known = known_gpu(name)
    assert known is not None
    found = known.memory_bytes / 2**30, known.memory_Bps / 1e9, known.matmul_flops / 1e12
    assert found == (gib, memory_GBps, tflops)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA A100X",
        "NVIDIA A10G",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_a_gpu_with_a_similar_name_is_not_known(name: str) -> None:
    assert known_gpu(name) is None


def test_every_name_that_is_offered_is_known() -> None:
    assert [known_gpu(name) for name in NAMES] == list(KNOWN.values())


def test_rounding_is_exact_and_other_logits_are_not() -> None:
    [same] = check_exactness(probe(), 2)
    assert (same.verdict, same.measured) == (Verdict.good, "3 of 3 tokens equal")
    runs = probe()["runs"]
    runs["kv_runahead"] = runs["kv_runahead"] | {"tokens": [5, 9, 7], "top5": [(5, 10.2), (6, 9.0)]}
    [wrong] = check_exactness(probe(runs=runs), 2)
    assert (wrong.verdict, wrong.measured) == (Verdict.failed, "1 of 3 tokens equal")
    [rounded] = check_exactness(probe(runs=runs, dtype="bfloat16"), 2)
    assert rounded.verdict is Verdict.good and "rounding decides" in rounded.words


@pytest.mark.parametrize(
    ("by", "why", "device", "verdict", "says"),
    [
        (("kernel", "kernel"), "", "cpu", Verdict.good, "read as they lie"),
        (("flex", "flex"), "", "NVIDIA L40S", Verdict.good, "equals a softmax in float64"),
        (("kernel", "gathering"), "", "cpu", Verdict.noted, "python -m launch.kernels builds a kernel"),
        (("gathering", "flex"), "FlexAttention cannot be used: it is 3 times", "NVIDIA L40S", Verdict.noted, "3 times"),
        (("gathering", "gathering"), "", "NVIDIA L40S", Verdict.noted, "needs Triton"),
        (("gathering", "gathering"), "our kernel takes no float16", "cpu", Verdict.noted, "; our kernel takes no"),
    ],
)
def test_what_reads_chosen_blocks_is_told_of_the_slowest_rank(
    by: tuple[str, str], why: str, device: str, verdict: Verdict, says: str
) -> None:
    blocks = [{"by": each, "why": why if each == "gathering" else ""} for each in by]
    [found] = check_chosen_blocks(probe(chosen_blocks=blocks, device=device))
    assert found.verdict is verdict and says in found.words
    assert check_chosen_blocks(probe(chosen_blocks=[None, None])) == []


@pytest.mark.parametrize(
    ("has_kernel", "takes", "by"), [(True, False, "kernel"), (False, True, "flex"), (False, False, "gathering")]
)
def test_the_probe_asks_what_attention_would_take(
    monkeypatch: pytest.MonkeyPatch, has_kernel: bool, takes: bool, by: str
) -> None:
    """With tensors of the model's sizes, and in the order in which attention to chosen blocks asks."""
    model, asked = tiny_model("llama", torch.float32), list[list[tuple[int, ...]]]()

    def told(*tensors: torch.Tensor) -> bool:
        asked.append([tuple(x.shape) for x in tensors])
        if not takes:
            warnings.warn("FlexAttention cannot be used: no compiler", stacklevel=1)
        return takes

    monkeypatch.setattr(flex, "takes", told)
    monkeypatch.setattr(tasks, "fused_kernel", lambda *_: operators.attend if has_kernel else cpu_flash)
    found = tasks.chosen_blocks(model)
    assert found is not None and found["by"] == by
    shape, heads = model.kv_shapes[0], model.config.num_attention_heads
    sizes = [(1, heads, 256, shape.key_dim), *[(1, shape.num_kv_heads, 256, shape.key_dim)] * 2]
    assert asked == ([] if has_kernel else [sizes])
    assert ("no compiler" in found["why"]) is (by == "gathering")


@pytest.mark.parametrize(
    ("dtype", "in_use", "says"),
    [(torch.float16, True, "not float16 and heads of 8"), (torch.float16, False, ""), (torch.float32, True, "of 8")],
)
def test_a_built_kernel_that_takes_no_such_numbers_is_not_told_to_be_built(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, in_use: bool, says: str
) -> None:
    monkeypatch.setattr(operators.KERNELS, "in_use", in_use)
    found = tasks.chosen_blocks(tiny_model("llama", dtype))
    assert found is not None and found["by"] == "gathering"
    assert says in found["why"] and bool(found["why"]) is in_use


def test_a_compiler_that_fails_takes_nothing_of_the_other_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measurements before it are written, and the page is made of them."""

    def fail(model: Any) -> NoReturn:
        raise RuntimeError("CUDA error: misaligned address")

    path, model = tmp_path / "probe.json", tiny_model("llama", torch.float32)
    monkeypatch.setattr(tasks, "chosen_blocks", fail)
    monkeypatch.setattr(tasks, "memory_Bps", lambda device: 1e10)
    monkeypatch.setattr(tasks, "matmul_rate", lambda model: 1e9)
    monkeypatch.setattr(tasks.Model, "load", lambda *_, **__: model)
    task = tasks.JobTask(kind="probe", model={}, ranks={}, length=8, out=str(path))
    with (
        throughout(torch.float32),
        Ranks.start(RanksOptions(device=Device.cpu, threads=1)) as ranks,
        pytest.raises(RuntimeError, match="misaligned"),
    ):
        tasks.probe(task, ranks)
    assert len(json.loads(path.read_text())["runs"]["single"]["tokens"]) == tasks.NEW_TOKENS
    crew: Any = SimpleNamespace(size=1, facts=[HERE], local_ranks=lambda rank: [0])
    bar: Any = None
    examination = Examination(DOCTOR.compose([]), crew, False, tmp_path, bar, deadline_s=0.0)
    ended = Ended(rank=0, status=1, at_s=0.0, output="", errors="[rank 0/1] CUDA error: misaligned address\n")
    monkeypatch.setattr(
        examination, "_run", lambda job: JobOutcome(job=job, ranks=[ended], seconds=1.0, was_killed=False)
    )
    examination._probe()
    assert examination.probe is not None and {each.group for each in examination.findings} == {"devices", "decoding"}
    [failed] = [each for each in examination.findings if each.verdict is Verdict.failed]
    assert failed.name == "sparse prefill" and "misaligned address, while it was asked what reads" in failed.words
    path.unlink()
    examination = Examination(DOCTOR.compose([]), crew, False, tmp_path, bar, deadline_s=0.0)
    monkeypatch.setattr(
        examination, "_run", lambda job: JobOutcome(job=job, ranks=[ended], seconds=1.0, was_killed=False)
    )
    examination._probe()
    assert examination.probe is None and examination.findings[0].name == "probe"


def test_decoding_is_held_against_memory() -> None:
    [good] = check_decoding(probe())
    assert (good.verdict, good.measured, good.bound) == (Verdict.good, "100 ms per token", "80 ms")
    [short] = check_decoding(probe(memory_alone_Bps=1e11))
    assert short.verdict is Verdict.short and "ranks.threads" in short.words
    [doubtful] = check_decoding(probe(memory_alone_Bps=6e9))
    assert doubtful.verdict is Verdict.short and "something else used the memory" in doubtful.words
    [gpu] = check_decoding(probe(memory_alone_Bps=1e11, device="NVIDIA H100 80GB HBM3"))
    assert "10,000 us a layer" in gpu.words and "(0.239 ms by the stated figure)" in gpu.bound


# Faults.


def drilled(after_s: float, *, output: str = '{"fault_s": 100.0}\n', killed: bool = False) -> JobOutcome:
    job = Job(name="", module="", args=[], num_ranks=2, limit_s=60, last_words_s=20)
    errors = "noise\n[rank 0/2] rank 1 has been silent for 5 s; see drill.rank0.fault.json\n"
    ranks = [
        Ended(rank=0, status=1, at_s=100 + after_s, output="", errors=errors),
        Ended(rank=1, status=-9, at_s=100.0, output=output, errors=""),
    ]
    return JobOutcome(job=job, ranks=ranks, seconds=10, was_killed=killed)


def test_ranks_that_end_in_time_are_good() -> None:
    found = check_fault("stopped", drilled(6), 5, 1)
    assert (found.verdict, found.measured) == (Verdict.good, "the others ended after 6.0 s")
    assert found.words == "1 fault report on this host; [rank 0/2] rank 1 has been silent for 5 s"


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (drilled(40), "would have waited for ever"),
        (drilled(6, killed=True), "would have waited for ever"),
        (
            drilled(6, output=""),
            "did not come to its fault: rank 1 was ended by SIGKILL; [rank 0/2] rank 1 has been silent",
        ),
        (replace(drilled(6), ranks=[replace(r, status=0) for r in drilled(6).ranks]), "without saying why"),
    ],
)
def test_ranks_that_do_not_end_well_have_failed(outcome: JobOutcome, says: str) -> None:
    found = check_fault("killed", outcome, 5, 0)
    assert found.verdict is Verdict.failed and says in found.words


# Speed.


def race(ranks: int = 2, **seconds: float) -> Race:
    ttft_s = {"single": 2.0, "kvr_s": 1.05, "zigzag": 1.1, "compute_only": 1.0} | seconds
    spreads = {name: Spread(median=s, low=s, high=s, number=1) for name, s in ttft_s.items()}
    return Race(ranks=ranks, length=1000, ttft_s=spreads, star_s=0.99, sent_bytes=500_000, tokens={})


def test_a_run_near_its_bound_is_good() -> None:
    [found] = check_race(race(), probe())
    assert found.verdict is Verdict.good
    assert found.words == "1.90 times as fast as one rank, 1.05 times as fast as zigzag"
    assert found.bound == "1 s TTFT(p), 0.99 s TTFT*(p)"


@pytest.mark.parametrize(
    ("seconds", "about", "says"),
    [
        ({"kvr_s": 1.6}, {}, "ranks wait for each other"),
        ({"kvr_s": 1.6}, {"links": {"0-1": {"bandwidth_Bps": 5e5}}}, "take 1 s on the slowest link"),
        ({"kvr_s": 0.007, "compute_only": 0.004}, {"device": "H100"}, "cannot start kernels fast enough"),
        ({"kvr_s": 1.7, "compute_only": 1.6}, {}, "computing at once is 1.62 times as slow"),
        ({"kvr_s": 1.15}, {}, "zigzag is faster here: prefill=zigzag is exact too"),
        ({"single": 1.0}, {}, "one rank is faster: use one for prompts of this length"),
    ],
)
def test_what_falls_short_has_its_cause(seconds: dict[str, float], about: dict[str, Any], says: str) -> None:
    [found] = check_race(race(**seconds), probe(**about))
    assert found.verdict is Verdict.short and says in found.words


def test_rounds_that_differ_are_told() -> None:
    apart = Spread(median=1.05, low=0.8, high=1.3, number=2)
    noisy = replace(race(), ttft_s=race().ttft_s | {"kvr_s": apart})
    [found] = check_race(noisy, probe())
    assert found.verdict is Verdict.short
    assert "rounds of KV-Runahead differ by 62%: something else used these processors" in found.words


def test_one_rank_alone_is_noted_and_differing_tokens_too() -> None:
    assert check_race(race(ranks=1), probe())[0].verdict is Verdict.noted
    assert check_tokens(replace(race(), tokens={"single": 3, "kvr_s": 3, "compute_only": None})) == []
    [found] = check_tokens(replace(race(), tokens={"single": 3, "tensor": 4}))
    assert (found.verdict, found.measured) == (Verdict.noted, "one rank: 3, TP: 4")


def test_more_and_longer_prompts_are_estimated_to_take_longer() -> None:
    one = estimate_s(probe(), [1000], 2, 5, 2)
    assert one < estimate_s(probe(), [1000, 4000], 2, 5, 2)
    assert one < estimate_s(probe(), [1000], 2, 5, 4)


# The page.


def page(findings: list[Finding], **more: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-01T00:00:00Z",
        "commit": "abc",
        "seconds": 12.0,
        "ranks": 2,
        "hosts": {"a": HERE.hardware},
        "verdict": worst(findings).name,
        "findings": [finding.as_json() for finding in findings],
        "probe": probe(),
        "races": [race().as_json()],
    } | more


def test_the_page_begins_with_what_falls_short() -> None:
    good = Finding(group="links", name="ranks 0-1", verdict=Verdict.good, measured="8 Gbit/s", words="loopback")
    short = Finding(group="decoding", name="after 9 tokens", verdict=Verdict.short, words="the processor computes")
    text = as_text(page([good, short]))
    assert text.startswith("2 ranks on a: 8 cores of some processor; random llama in float32 over gloo\n")
    head, rest = text.split("\nlinks\n")
    assert "  - decoding, after 9 tokens: the processor computes\n" in head
    assert "  ok  ranks 0-1  8 Gbit/s\n  - ranks 0-1: loopback\n" in rest
    assert "nothing falls short" in as_text(page([good]))
    failed = replace(short, verdict=Verdict.failed, measured="x=1")
    assert "has to be mended first:\n  - decoding, after 9 tokens (x=1): the" in as_text(page([failed]))


@pytest.mark.parametrize("more", [{}, {"probe": None, "races": []}])
def test_the_picture_is_drawn_whatever_was_measured(more: dict[str, Any]) -> None:
    short = Finding(group="links", name="ranks 0-1", verdict=Verdict.short)
    assert picture(json.loads(json.dumps(page([short], **more)))).startswith(b"\x89PNG")


# Options.


def test_the_defaults_of_the_file_are_those_of_the_dataclasses() -> None:
    assert DOCTOR.compose([]) == DoctorRun()
    assert DoctorRun().model.config == AUTO


def test_options_of_jobs_are_those_of_the_doctor() -> None:
    run = DOCTOR.compose(["model.config=a b.json", "ranks.threads=2"])
    texts = overrides("model", run.model) + overrides("ranks", run.ranks)
    again = DOCTOR.compose(texts)
    assert (again.model, again.ranks) == (run.model, run.ranks)
    assert isinstance(run.model, ModelOptions) and isinstance(run.ranks, RanksOptions)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("doctor.lengths=[8]", "doctor.lengths=[8] must be a list of whole numbers of at least 32"),
        ("doctor.minutes=0", "doctor.minutes=0.0 must be a number of minutes above 0"),
        ("doctor.ranks=0", "doctor.ranks=0 must be at least 1"),
        ("doctor.rounds=0", "doctor.rounds=0 must be at least 1"),
        ("doctor.fast=1", "unknown option doctor.fast"),
    ],
)
def test_a_wrong_option_is_one_sentence(option: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(says)
