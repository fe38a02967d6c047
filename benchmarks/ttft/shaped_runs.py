"""Benchmark on two hosts with a shaped link between them: one run of the program per rate."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.network import Noise, ShapedNetwork, run_in
from benchmarks.network.shaped_network import check_machine, check_rate
from benchmarks.ttft.bounds import Compute, practical
from benchmarks.ttft.options import BenchRun
from partitioner.cost.link import BITS_PER_BYTE
from runahead.model import loading

HOSTS = 2
QUICK_GBPS = 10.0
"""Rate of the link while compute is measured, which sends almost nothing."""
REPLACED = ("bench.network", "bench.compute", "link.gbps", "link.compute_share", "link.noise")


def run_on_shaped_network(run: BenchRun, program: Path, args: Sequence[str]) -> None:
    """Run `program` with `args` in two network namespaces, one rank and one core in each, once per rate.

    Raises:
        ValueError: this user or machine cannot make such a network, or it cannot keep a rate.
        SystemExit: with the status of the ranks, if they failed.
    """
    if "RANK" in os.environ:
        raise ValueError("bench.network=netns starts its own ranks; run the program without torchrun")
    check_machine()
    for gbps in run.link.gbps:
        check_rate(gbps)
    loading.load_config(run.model, progress=True)  # download first: the namespaces have no internet
    own = [arg for arg in args if arg.partition("=")[0].lstrip("+") not in REPLACED]
    with tempfile.TemporaryDirectory() as folder:
        compute = Path(run.bench.compute or Path(folder) / "compute.json")
        inside = [str(program), *own, "bench.network=inside", f"bench.compute={compute}"]
        rates: list[tuple[float, list[str]]] = [(gbps, []) for gbps in run.link.gbps]
        if run.link.compute_share:
            _start([*inside, "bench.pairs=0", "bench.resume=false"], QUICK_GBPS, seed=None)
            rates = _rates(run, Compute.from_json(compute.read_text(encoding="utf-8")))
        for gbps, more in rates:
            link = [f"link.gbps={gbps}", f"link.noise={str(run.link.noise).lower()}"]
            _start([*inside, *link, *more], gbps, seed=run.model.seed if run.link.noise else None)


def _rates(run: BenchRun, compute: Compute) -> list[tuple[float, list[str]]]:
    """Rates at which sending the KV cache of a whole prompt once takes the given shares of TTFT(p).

    Returns:
        rates in Gbit/s, each with the options of its run, which is for one length and share.
    """
    rates = []
    for length in run.bench.lengths:
        bits = length * compute.kv_bytes_per_token * BITS_PER_BYTE
        free_s = practical(compute, length, HOSTS).cost_s
        for share in run.link.compute_share:
            gbps = check_rate(float(f"{bits / (share * free_s) / 1e9:.3g}"))
            rates.append((gbps, [f"link.compute_share={share}", f"bench.lengths=[{length}]"]))
    return rates


def _start(command: Sequence[str], gbps: float, *, seed: int | None) -> None:
    with ShapedNetwork(HOSTS, gbps=gbps) as network, nullcontext() if seed is None else Noise(network, seed=seed):
        status = run_in(network, command, env={"HF_HUB_OFFLINE": "1"})
    if status:
        raise SystemExit(status)
