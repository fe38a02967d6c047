"""Checks of every rank's environment before any job is started: versions, variables, interfaces and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.doctor.facts import Facts
from benchmarks.doctor.findings import Finding, Verdict
from runahead.ranks.accelerator import CONNECTIONS, MOST_CONNECTIONS
from runahead.ranks.agreement import disagreement
from runahead.ranks.meeting.signed_store import SECRET

GROUP = "environment"
USED_MIB = 2048
"""Memory of a GPU in use before the ranks start, from which on another process is suspected."""

MOST_BUSY_SHARE = 0.15
"""Share of a host's processors that other processes may use."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The job as the checks of the environment need it.

    Attributes:
        facts: of every rank.
        local_ranks: number of ranks on the host of each rank.
        uses_gpus: whether the ranks compute on GPUs.
    """

    facts: Sequence[Facts]
    local_ranks: Sequence[int]
    uses_gpus: bool

    @property
    def has_several_hosts(self) -> bool:
        return len({each.place for each in self.facts}) > 1


def check_environment(examined: Examined) -> list[Finding]:
    """All findings about the environment; a single good one per kind where nothing is wrong."""
    checks = (check_variables, check_names, check_ports, check_load, check_gpus)
    return [*check_versions(examined.facts), *(finding for check in checks for finding in check(examined))]


def check_versions(facts: Sequence[Facts]) -> list[Finding]:
    """Are libraries and code the same on all ranks?"""
    first = facts[0].versions
    told = disagreement([each.versions for each in facts])
    shown = f"torch {first['torch']}, transformers {first['transformers']}"
    if told is None:
        words = f"the same on {len(facts)} ranks" if len(facts) > 1 else ""
        return [Finding(group=GROUP, name="versions", verdict=Verdict.good, measured=shown, words=words)]
    words = (
        f"{told}. Such ranks refuse to work together; install the same on every host, and start all from one checkout"
    )
    return [Finding(group=GROUP, name="versions", verdict=Verdict.failed, measured=shown, words=words)]


Trap = Callable[[Examined, int, str], tuple[Verdict, str] | None]
"""Judges a variable's value on a rank: the verdict and words, or None where it does no harm."""


def check_variables(examined: Examined) -> list[Finding]:
    """Environment variables that are known to slow ranks down or to stop them; ranks with the same are told once."""
    told: dict[tuple[str, str, Verdict, str], list[int]] = {}
    for rank, facts in enumerate(examined.facts):
        for name, trap in TRAPS.items():
            value = facts.environment.get(name)
            found = None if value is None else trap(examined, rank, value)
            if value is not None and found is not None:
                told.setdefault((name, value, *found), []).append(rank)
    findings = []
    for (name, value, verdict, words), on in told.items():
        where = "all ranks" if len(on) == len(examined.facts) else f"rank {', '.join(map(str, on))}"
        measured = f"{name}={value} on {where}"
        findings.append(Finding(group=GROUP, name=name, verdict=verdict, measured=measured, words=words))
    if findings:
        return findings
    words = "no variable is set that is known to slow ranks down"
    return [Finding(group=GROUP, name="variables", verdict=Verdict.good, words=words)]


def _launch_order(examined: Examined, rank: int, value: str) -> tuple[Verdict, str] | None:
    if value in ("", "0"):
        return None
    words = "NCCL then orders the kernels of different links, so that transfers wait for each other for ever; unset it"
    return (Verdict.failed if examined.uses_gpus else Verdict.short), words


def _connections(examined: Examined, rank: int, value: str) -> tuple[Verdict, str] | None:
    if value.isdecimal() and int(value) >= MOST_CONNECTIONS:
        return None
    words = (
        "compute shares hardware queues with streams that wait for other ranks, and waits with them; unset it or set "
        f"{MOST_CONNECTIONS} (training frameworks set 1)"
    )
    return Verdict.short, words


def _threads(examined: Examined, rank: int, value: str) -> tuple[Verdict, str] | None:
    cores, local = examined.facts[rank].cores, examined.local_ranks[rank]
    number = int(value) if value.isdecimal() else 1
    if number * local <= max(cores, local):
        return None
    words = (
        f"{local} rank{'s' * (local > 1)} of {number} threads on {cores} core{'s' * (cores > 1)}. The ranks choose "
        "their own number of threads for PyTorch, but other libraries start as many as this says, and displace each "
        f"other; unset it, or set {max(1, cores // local)}"
    )
    return Verdict.short, words


def _interface(examined: Examined, rank: int, value: str, *, prefixes: bool = False) -> tuple[Verdict, str] | None:
    """Gloo takes exact names; NCCL takes prefixes, "=" before exact names and "^" before those to leave out."""
    if value.startswith("^") and prefixes:
        return None
    exact = not prefixes or value.startswith("=")
    interfaces = examined.facts[rank].interfaces
    there = ", ".join(each.name for each in interfaces if each.is_up) or "none"
    for name in value.lstrip("=").split(","):
        fitting = [each for each in interfaces if each.name == name or (not exact and each.name.startswith(name))]
        if not fitting:
            return Verdict.failed, f"there is no interface {name} on this host, so ranks cannot connect; it has {there}"
        if not any(each.is_up for each in fitting):
            return Verdict.failed, f"the interface {name} is down, so ranks cannot connect; those that are up: {there}"
    if examined.has_several_hosts and value.lstrip("=") == "lo":
        return Verdict.failed, f"loopback does not reach the other hosts; name the interface between them, of {there}"
    return None


def _set(words: str, *, between_hosts: bool = False) -> Trap:
    """A trap for a variable that does harm whenever it is set to something but 0."""

    def trap(examined: Examined, rank: int, value: str) -> tuple[Verdict, str] | None:
        matters = examined.uses_gpus and (examined.has_several_hosts or not between_hosts)
        return (Verdict.short, words) if matters and value not in ("", "0") else None

    return trap


TRAPS: dict[str, Trap] = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": _launch_order,
    CONNECTIONS: _connections,
    "OMP_NUM_THREADS": _threads,
    "MKL_NUM_THREADS": _threads,
    "OPENBLAS_NUM_THREADS": _threads,
    "GLOO_SOCKET_IFNAME": _interface,
    "NCCL_SOCKET_IFNAME": partial(_interface, prefixes=True),
    "NCCL_P2P_DISABLE": _set(
        "GPUs of a host then exchange K,V through host memory rather than NVLink or PCIe; unset it"
    ),
    "NCCL_IB_DISABLE": _set("hosts then exchange K,V over TCP rather than InfiniBand; unset it", between_hosts=True),
    "CUDA_LAUNCH_BLOCKING": _set("every kernel then waits for its end, and nothing overlaps; unset it"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _set("every tensor then allocates device memory anew; unset it"),
}


def check_names(examined: Examined) -> list[Finding]:
    """Does every host's name resolve to an address that the other hosts reach? Gloo connects to it."""
    findings = []
    for rank, facts in enumerate(examined.facts):
        is_loopback = facts.resolves_to.startswith("127.") or not facts.resolves_to
        if examined.has_several_hosts and is_loopback and "GLOO_SOCKET_IFNAME" not in facts.environment:
            shown = f"{facts.host} is {facts.resolves_to or 'unknown'} on rank {rank}"
            words = (
                "other hosts cannot connect to that address; set GLOO_SOCKET_IFNAME to the interface between the hosts"
            )
            finding = Finding(group=GROUP, name="host name", verdict=Verdict.failed, measured=shown, words=words)
            findings.append(finding)
    return findings


def check_ports(examined: Examined) -> list[Finding]:
    """Do ranks of several hosts, whose ports other hosts reach, know each other's messages?"""
    without = [rank for rank, facts in enumerate(examined.facts) if not facts.has_secret]
    if not examined.has_several_hosts or not without:
        return []
    words = (
        "whoever reaches the launcher's port or the ranks' can end such a job, and hand it work or keys and values of "
        f"their own; set {SECRET} on all hosts, and keep these ports on a network of the ranks alone"
    )
    measured = f"no secret on rank {', '.join(map(str, without))}"
    return [Finding(group=GROUP, name="open ports", verdict=Verdict.short, measured=measured, words=words)]


def check_load(examined: Examined) -> list[Finding]:
    """Do other processes use the processors, so that all measurements are too slow?"""
    findings = []
    for facts in {each.host: each for each in examined.facts}.values():
        cores = facts.hardware["cores"]
        is_busy = facts.busy_cores > MOST_BUSY_SHARE * cores
        finding = Finding(
            group=GROUP,
            name=f"load of {facts.host}",
            verdict=Verdict.short if is_busy else Verdict.good,
            measured=f"{facts.busy_cores:.1f} of {cores} cores busy",
            bound=f"{MOST_BUSY_SHARE * cores:.1f}",
            words="other processes ran before any rank was started, so speeds are lower than they could be; end them"
            if is_busy
            else "",
        )
        findings.append(finding)
    return findings


def check_gpus(examined: Examined) -> list[Finding]:
    """Are the GPUs free, and does every rank of a host have one?"""
    if not examined.uses_gpus:
        return []
    findings = []
    for place in dict.fromkeys(each.place for each in examined.facts):
        ranks = [rank for rank, each in enumerate(examined.facts) if each.place == place]
        facts = examined.facts[ranks[0]]
        if 1 < facts.num_gpus < len(ranks):
            measured, words = f"{len(ranks)} ranks, {facts.num_gpus} GPUs on {facts.host}", "start one rank per GPU"
            findings.append(Finding(group=GROUP, name="GPUs", verdict=Verdict.failed, measured=measured, words=words))
        for index, gpu in enumerate(facts.gpus):
            if gpu["used_mib"] > USED_MIB:
                measured = f"{gpu['used_mib'] / 1024:.1f} of {gpu['total_mib'] / 1024:.0f} GiB in use on {facts.host}"
                words = "another process has this GPU, which makes it slower and prompts shorter; end it (nvidia-smi)"
                name = f"GPU {index}"
                findings.append(Finding(group=GROUP, name=name, verdict=Verdict.short, measured=measured, words=words))
    return findings
