"""Verdicts on what jobs measured: links, memory, exactness, faults and decoding."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.doctor.crew import JobOutcome
from benchmarks.doctor.facts import Facts
from benchmarks.doctor.findings import Finding, Verdict
from partitioner.cost.known_gpus import NVLINK_BPS, known_gpu

LEAST_SHARE = 0.5
"""Share of a nominal rate, or of the median of all links, below which a link is short."""

LEAST_NVLINK_SHARE = 0.1
"""The same for NVLink, whose transfers take few multiprocessors and so never its full rate."""

MOST_TRANSFER_SHARE = 0.5
"""Share of the compute time that sending a prompt's keys and values may take."""

LEAST_MEMORY_SHARE, LEAST_MATMUL_SHARE, LEAST_DECODE_SHARE = 0.7, 0.5, 0.5
"""Shares of a GPU's stated figures, and of the decoding limit, below which a device is short."""

MOST_DECODE_SHARE = 1.15
"""Share of the decoding limit above which the limit itself is doubted: caches may hold a little."""

LEAST_EQUAL_SHARE = 0.8
"""Share of the median device's speed below which a device is short."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest difference of two exact methods' logits, as a share of the largest logit."""

ENDING_S = 10.0
"""Seconds after the timeout in which all ranks have to be gone."""


def gbps(bytes_per_s: float) -> str:
    """A rate for readers, in 1e9 bits per second."""
    return f"{bytes_per_s * 8 / 1e9:,.3g} Gbit/s"


def check_links(probe: Mapping[str, Any], facts: Sequence[Facts]) -> list[Finding]:
    """Every measured pair against the nominal rate of what joins it, the other pairs, and what prompts need."""
    links: Mapping[str, Mapping[str, float]] = probe["links"]
    if not links:
        return []
    medians: dict[bool, float] = {}
    for inside in (True, False):
        rates = [link["bandwidth_Bps"] for pair, link in links.items() if _is_inside(pair, facts) is inside]
        medians[inside] = statistics.median(rates) if rates else 0.0
    needed_Bps = needed_rate(probe, len(facts))
    findings = []
    for pair, link in links.items():
        rate = link["bandwidth_Bps"]
        kind, nominal_Bps, least, remedy = _joined_by(pair, probe, facts)
        reasons = []
        if nominal_Bps and rate < least * nominal_Bps:
            reasons.append(f"it has {rate / nominal_Bps:.0%} of the rate of {kind}: {remedy}")
        if rate < LEAST_SHARE * medians[_is_inside(pair, facts)]:
            reasons.append("other pairs are more than twice as fast: check this cable, port or slot")
        if rate < needed_Bps:
            times = needed_Bps * MOST_TRANSFER_SHARE / rate
            reasons.append(
                f"sending the keys and values of a prompt takes {times:.1f} times as long as computing it on all "
                "ranks, so ranks wait for the link: use a faster one (NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose "
                "between several), prefill.wire_bits=8, fewer ranks or a split that was searched for it (python -m "
                "partitioner.search)"
            )
        words = "; ".join(reasons) if reasons else f"{kind}; enough for transfers to hide behind compute"
        bound = gbps(nominal_Bps) if nominal_Bps else f"at least {gbps(needed_Bps)}"
        finding = Finding(
            group="links",
            name=f"ranks {pair}",
            verdict=Verdict.short if reasons else Verdict.good,
            measured=f"{gbps(rate)}, {link['latency_s'] * 1e6:,.0f} us",
            bound=bound,
            words=("a slow link: " if reasons else "") + words,
        )
        findings.append(finding)
    return findings


def needed_rate(probe: Mapping[str, Any], num_ranks: int) -> float:
    """Bytes per second at which a prompt's keys and values take `MOST_TRANSFER_SHARE` of its compute on all ranks."""
    compute_s = probe["runs"]["single"]["ttft_s"] / num_ranks
    return float(probe["length"] * probe["kv_bytes_per_token"] / (MOST_TRANSFER_SHARE * compute_s))


def _is_inside(pair: str, facts: Sequence[Facts]) -> bool:
    a, b = map(int, pair.split("-"))
    return facts[a].place == facts[b].place


def _joined_by(pair: str, probe: Mapping[str, Any], facts: Sequence[Facts]) -> tuple[str, float, float, str]:
    """The connection of two ranks, its nominal bytes per second (0 if unknown), the least share of it, and a remedy."""
    a, b = map(int, pair.split("-"))
    if _is_inside(pair, facts):
        if probe["backend"] != "nccl":
            return "loopback", 0.0, 0.0, ""
        first = next(rank for rank, each in enumerate(facts) if each.place == facts[a].place)
        kind = facts[a].topology.get(f"{a - first}-{b - first}", "")
        if kind.startswith("NV"):
            remedy = (
                "NCCL does not use it; let every rank see all GPUs of its host (--gpus-per-node, --gpu-bind=none), "
                "unset NCCL_P2P_DISABLE, and look at NCCL_DEBUG=INFO"
            )
            return f"NVLink ({kind})", int(kind[2:]) * NVLINK_BPS, LEAST_NVLINK_SHARE, remedy
        return f"PCIe ({kind or 'unknown'}), no NVLink", 0.0, 0.0, ""
    if probe["backend"] == "nccl" and min(facts[a].infiniband_gbps, facts[b].infiniband_gbps) > 0:
        rate = min(facts[a].infiniband_gbps, facts[b].infiniband_gbps)
        remedy = "NCCL may use TCP instead; look for NET/IB in NCCL_DEBUG=INFO, and check NCCL_IB_HCA"
        return f"InfiniBand of {rate:.0f} Gbit/s", rate * 1e9 / 8, LEAST_SHARE, remedy
    interface, mbps = _network(facts[a]), min(_network(facts[a])[1], _network(facts[b])[1])
    remedy = "something shapes or shares it, or the route leads elsewhere; check it with iperf3, and the route"
    return f"{interface[0] or 'the network'}", mbps * 1e6 / 8, LEAST_SHARE, remedy


def _network(facts: Facts) -> tuple[str, int]:
    """The interface that carries messages to other hosts, and its nominal rate in 1e6 bits per second."""
    chosen = facts.environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    up = [each for each in facts.interfaces if each.is_up and each.name != "lo"]
    fitting = [each for each in up if each.name == chosen] or (up if len(up) == 1 else [])
    return (fitting[0].name, fitting[0].mbps) if fitting else ("", 0)


def check_devices(probe: Mapping[str, Any]) -> list[Finding]:
    """Memory bandwidth and matrix products of every rank, against known figures and against each other."""
    known = known_gpu(probe["device"])
    memory = None if known is None else known.memory_Bps
    matmul = None if known is None or probe["dtype"] == "float32" else known.matmul_flops
    rows = [
        ("memory", probe["memory_Bps"], memory, LEAST_MEMORY_SHARE, 1e9, "GB/s"),
        ("matrix products", probe["matmul_flops"], matmul, LEAST_MATMUL_SHARE, 1e12, "TFLOP/s"),
    ]
    findings = []
    for name, rates, figure, share, unit, symbol in rows:
        median = statistics.median(rates)
        slow = [rank for rank, rate in enumerate(rates) if rate < LEAST_EQUAL_SHARE * median]
        reasons = []
        if figure is not None and median < share * figure:
            reasons.append(
                f"ranks reach {median / figure:.0%} of the stated figure: another process, a power or temperature "
                "limit (nvidia-smi -q -d PERFORMANCE), or a part of a GPU"
            )
        if slow:
            worst = min(rates[rank] for rank in slow)
            reasons.append(
                f"rank {', '.join(map(str, slow))} has {worst / median:.0%} of the others' median, and a chain is as "
                "fast as its slowest rank: end other processes there, or leave the device out"
            )
        shown = f"{min(rates) / unit:,.3g} to {max(rates) / unit:,.3g} {symbol}"
        words = "; ".join(reasons) if reasons else "all ranks at once, all alike" if len(rates) > 1 else ""
        finding = Finding(
            group="devices",
            name=name,
            verdict=Verdict.short if reasons else Verdict.good,
            measured=shown,
            bound="" if figure is None else f"{figure / unit:,.4g} {symbol}",
            words=words,
        )
        findings.append(finding)
    return findings


READERS = {
    "kernel": ("our kernel for CPUs", "chosen blocks of keys are read as they lie"),
    "flex": ("FlexAttention", "it compiles here and equals a softmax in float64; chosen blocks are read as they lie"),
    "gathering": ("gathering", "chosen blocks of keys are copied before they are read, so less is gained by a density"),
}
"""Readers of the blocks that a sparse prefill has chosen, each with its meaning for the user."""


def check_chosen_blocks(probe: Mapping[str, Any]) -> list[Finding]:
    """A check of the reader that a sparse prefill (prefill.attention=xattention) has here: the slowest of all ranks."""
    found = [each for each in probe["chosen_blocks"] if each is not None]
    if not found:
        return []
    slowest = max(found, key=lambda each: list(READERS).index(each["by"]))
    measured, words = READERS[slowest["by"]]
    if slowest["by"] == "gathering":
        remedies = {
            True: "python -m launch.kernels builds a kernel that does not",
            False: "FlexAttention, which does not, needs Triton and float32, bfloat16 or float16",
        }
        words += f"; {slowest['why'] or remedies[probe['device'] == 'cpu']}"
    verdict = Verdict.noted if slowest["by"] == "gathering" else Verdict.good
    return [Finding(group="devices", name="sparse prefill", verdict=verdict, measured=measured, words=words)]


def check_exactness(probe: Mapping[str, Any], num_ranks: int) -> list[Finding]:
    """One prompt over all ranks against one rank: the tokens, and the logits of the first."""
    runs = probe["runs"]
    if "kv_runahead" not in runs:
        return []
    name = f"{probe['length']:,} tokens on {num_ranks} ranks"
    ours, alone = runs["kv_runahead"], runs["single"]
    largest = max(abs(logit) for _, logit in alone["top5"])
    known = dict(map(tuple, ours["top5"]))
    apart = [abs(logit - known[token]) / largest for token, logit in alone["top5"] if token in known]
    difference = max(apart, default=float("inf"))
    same = next((n for n, (a, b) in enumerate(zip(ours["tokens"], alone["tokens"], strict=True)) if a != b), None)
    shown = f"{len(alone['tokens']) if same is None else same} of {len(alone['tokens'])} tokens equal"
    tolerance = TOLERANCE[probe["dtype"]]
    bound = f"logits within {tolerance:g} of the largest"
    if difference <= tolerance:
        words = f"logits differ by {difference:.1g} of the largest, which is rounding in {probe['dtype']}"
        if same is not None:
            words += "; with random weights the best tokens are so close that rounding decides"
        return [Finding(group="exactness", name=name, verdict=Verdict.good, measured=shown, bound=bound, words=words)]
    words = (
        f"logits differ by {difference:.2g} of the largest, so the result over several ranks is wrong: memory "
        "or a link changes data, or a library is at fault; run with ranks.backend=gloo and with ranks.device=cpu to "
        "find which"
    )
    return [Finding(group="exactness", name=name, verdict=Verdict.failed, measured=shown, bound=bound, words=words)]


def check_fault(what: str, outcome: JobOutcome, timeout_s: float, num_reports: int) -> Finding:
    """Did all other ranks end by themselves, and in time, after the last rank was killed or stopped?

    Args:
        what: "killed" or "stopped".
        num_reports: fault reports that the ranks of this host wrote.
    """
    name = f"rank {outcome.job.num_ranks - 1} {what}"
    limit_s = ENDING_S + timeout_s
    about = {"group": "faults", "name": name, "bound": f"within {limit_s:.0f} s"}
    began_s = fault_s(outcome)
    if began_s is None:
        words = f"the drill did not come to its fault: {outcome.why()}"
        return Finding(verdict=Verdict.failed, words=words, **about)
    others = [rank for rank in outcome.ranks if rank.rank != outcome.job.num_ranks - 1]
    seconds = max(rank.at_s for rank in others) - began_s
    measured = f"the others ended after {seconds:.1f} s"
    if outcome.was_killed or seconds > limit_s:
        words = (
            "a rank did not notice it and would have waited for ever; a call of a library does not return. See the "
            "fault reports and docs/reliability.md, and limit jobs from outside"
        )
        return Finding(verdict=Verdict.failed, measured=measured, words=words, **about)
    said = [line for rank in others for line in rank.errors.splitlines() if line.startswith("[rank ")]
    if not all(rank.status for rank in others) or not said:
        words = "the others ended without saying why; look at their messages"
        return Finding(verdict=Verdict.failed, measured=measured, words=words, **about)
    words = f"{num_reports} fault report{'s' * (num_reports != 1)} on this host; {said[0].partition('; see')[0]}"
    return Finding(verdict=Verdict.good, measured=measured, words=words, **about)


def fault_s(outcome: JobOutcome) -> float | None:
    """Moment of the fault, in seconds since the epoch; None if it did not happen."""
    for line in outcome.ranks[-1].output.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            return float(json.loads(line)["fault_s"])
    return None


def check_decoding(probe: Mapping[str, Any]) -> list[Finding]:
    """Time per new token against the time in which memory delivers the weights and the KV cache."""
    run = probe["runs"].get("kv_runahead", probe["runs"]["single"])
    limit_s = probe["decoded_bytes"] / probe["memory_alone_Bps"]
    bound = f"{limit_s * 1e3:,.3g} ms"
    known = known_gpu(probe["device"])
    if known is not None:
        bound += f" ({probe['decoded_bytes'] / known.memory_Bps * 1e3:,.3g} ms by the stated figure)"
    share = limit_s / run["tpot_s"]
    words = f"{share:.0%} of the measured memory bandwidth"
    if share > MOST_DECODE_SHARE:
        words += ", so something else used the memory while that was measured; end it, and examine again"
    if share < LEAST_DECODE_SHARE:
        each_us = run["tpot_s"] / probe["layers"] * 1e6
        cause = (
            f"at {each_us:,.0f} us a layer the time may go into starting kernels from Python rather than into reading "
            "weights; look for a warning that no CUDA graph was captured, and take a dtype of 16 bits (docs/gpu.md)"
            if probe["device"] != "cpu"
            else "the processor computes rather than waits for memory, or its cores are shared; use more threads "
            "(ranks.threads) and end other processes"
        )
        words += f": {cause}"
    finding = Finding(
        group="decoding",
        name=f"after {probe['length']:,} tokens",
        verdict=Verdict.good if LEAST_DECODE_SHARE <= share <= MOST_DECODE_SHARE else Verdict.short,
        measured=f"{run['tpot_s'] * 1e3:,.3g} ms per token",
        bound=bound,
        words=words,
    )
    return [finding]
