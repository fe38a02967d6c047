"""Compare prefill strategies with each other and with what compute allows: `python launch/bench.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ttft.options import BenchRun, Network, ineffective_settings
from benchmarks.ttft.variants import VARIANTS, Split
from launch.inputs.options import PartitionName, RunOptions
from launch.program.compose import Program
from launch.program.ending import say
from launch.program.run import run_program
from launch.program.text_table import text_table
from runahead.config import PrefillOptions

if TYPE_CHECKING:
    from benchmarks.harness.lines import Line
    from benchmarks.ttft.bounds import Bounds, Compute
    from benchmarks.ttft.measurement import Contenders, Run
    from benchmarks.ttft.record import Record
    from launch.program.progress import Bar
    from partitioner.cost.link import Link
    from runahead.context import Partitioner
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: torchrun --nproc-per-node=N launch/bench.py [name=value ...]
       python launch/bench.py bench.network=netns link.gbps=1 [name=value ...]     (as root; starts its own ranks)

States what compute allows, then runs variants in turn (A B C A B C ...) on the same prompts, prints a table per length
and appends a JSON line per variant and length to bench.results. python -m benchmarks.ttft.plot draws and tabulates.

  bench.variants=[single,kvr_s,zigzag,tsp]   of {", ".join(list(VARIANTS)[:7])},
                                             {", ".join(list(VARIANTS)[7:12])},
                                             {", ".join(list(VARIANTS)[12:])}
  bench.lengths=[1024,2048,4096]   bench.pairs=5 (rounds)   bench.warmup=1   bench.probe_repeats=3
  bench.results=benchmarks/results/bench.jsonl   bench.resume=false   bench.compute=<json>
  bench.network=given|netns        link.gbps=<rate or list>   link.compute_share=<share or list>
                                   link.noise=off
  partition=even|ratios|table ...  of kv_runahead; a table's splits are kvr_s, which is searched on the spot without one
  model=smollm2|hf|random   model.path=...   model.config=...   model.dtype=...   model.seed=0
  prefill.layers_in_flight=3   ranks.device=...   ranks.backend=...   ranks.threads=<n>   ranks.timeout_s=60

After an interruption bench.resume=true goes on with what is missing.
"""

BENCH = Program(module="launch.bench", options=BenchRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    arguments = list(sys.argv[1:] if args is None else args)
    return run_program(
        BENCH,
        arguments,
        bench,
        warnings=ineffective_settings,
        without_ranks=lambda run: _on_shaped_network(run, arguments),
    )


def _on_shaped_network(run: BenchRun, args: Sequence[str]) -> bool:
    """Start the ranks in network namespaces if bench.network=netns; returns whether it did."""
    if run.bench.network is not Network.netns:
        return False
    from benchmarks.ttft.shaped_runs import run_on_shaped_network

    run_on_shaped_network(run, Path(__file__).resolve(), args)
    return True


def bench(run: BenchRun, ranks: Ranks) -> None:
    """State the bounds, measure, print and write. Every rank makes the same call.

    Raises:
        ValueError, OSError: for a user's mistakes, or if variants disagree that must agree.
    """
    from benchmarks.ttft.bounds import bounds_of, measure_compute, peak_flops
    from benchmarks.ttft.measurement import Contenders, load_model
    from benchmarks.ttft.record import Record
    from launch.inputs.partitions import check_table, partitioner
    from launch.program.progress import Bar
    from partitioner.table.fingerprint import Fingerprint

    given = partitioner(run.partition, ranks)
    ranks.on_rank_0("the benchmark's options", lambda: _prepare(run, given, ranks.size))
    model = ranks.on_all_ranks("the model", lambda: load_model(run, ranks))
    prefill = PrefillOptions(layers_in_flight=run.prefill.layers_in_flight)
    check_table(given, model, ranks, RunOptions(model=run.model, partition=run.partition, prefill=prefill))
    contenders = Contenders(run, model, ranks, given)
    fingerprint = Fingerprint.of(model, device=ranks.device, backend=ranks.backend, prefill=prefill)
    record = ranks.on_rank_0("the machine", lambda: Record.of(run, ranks, fingerprint, contenders.memory_is_of))
    rounds_left = ranks.on_rank_0("earlier lines", lambda: _rounds_left(run, record))
    if run.bench.pairs and not any(rounds_left.values()):
        say(f"nothing to do: {run.bench.results} has {run.bench.pairs} rounds of everything (bench.resume=true)")
        return

    with Bar("measuring compute", shown=ranks.rank == 0) as bar:
        compute = measure_compute(
            model,
            ranks,
            fingerprint,
            longest=max(run.bench.lengths),
            repeats=run.bench.probe_repeats,
            path=run.bench.compute,
            bar=bar.step_of,
        )
    peak = peak_flops(model, ranks)
    link = _link(run, ranks)
    bounds = ranks.on_rank_0(
        "the bounds",
        lambda: {length: bounds_of(model, compute, length, ranks.size, peak) for length in run.bench.lengths},
    )
    record.link = link
    if ranks.rank == 0:
        _print_bounds(record, bounds)
    if not run.bench.pairs:
        return
    for length in run.bench.lengths:
        for name in run.bench.variants:
            _set_split(run, ranks, contenders, name, length, compute, link, bounds[length])
    with Bar("measuring", shown=ranks.rank == 0) as bar:
        bar.total = sum(
            bounds[length].single_s * (run.bench.warmup + left) * len(run.bench.variants)
            for length, left in rounds_left.items()
            if left
        )
        for length, left in rounds_left.items():
            if left:
                _measure(run, ranks, model, contenders, record, length, left, bounds[length], bar)


def _prepare(run: BenchRun, given: Partitioner, num_ranks: int) -> None:
    """Check whatever can be checked before the model is loaded. Rank 0 calls it."""
    from benchmarks.ttft import comparison
    from benchmarks.ttft.bounds import read_compute
    from benchmarks.ttft.measurement import prefill_options
    from runahead.files import ensure_writable
    from runahead.model import loading
    from runahead.model.model import max_positions
    from runahead.prefill import PREFILLS

    ensure_writable(run.bench.results, option="bench.results")
    comparison.read(run.bench.results)
    if run.bench.compute is not None:
        ensure_writable(run.bench.compute, option="bench.compute")
        read_compute(run.bench.compute)
    config = loading.load_config(run.model, progress=True).get_text_config(decoder=True)
    for name in run.bench.variants:
        options = prefill_options(name, run.prefill.layers_in_flight)
        if options is not None:
            PREFILLS[options.name].check_config(config, num_ranks)
    limit = max_positions(config)
    longest = max(run.bench.lengths)
    if limit is not None and longest >= limit:
        raise ValueError(
            f"bench.lengths goes up to {longest} tokens, but the model has {limit} positions, one of them for the "
            "first new token; leave the longest out"
        )
    looks_up = {Split.given, Split.searched} if run.partition.name is PartitionName.table else {Split.given}
    if any(VARIANTS[name].split in looks_up for name in run.bench.variants):
        for length in run.bench.lengths:
            given(length, num_ranks).check(length, num_ranks)


def _link(run: BenchRun, ranks: Ranks) -> Link | None:
    """The link between ranks: of the shaped rate if there is one, else as measured; None for a single rank."""
    from partitioner.cost.link import Link
    from partitioner.measure import ping

    if not run.link.gbps:
        return ping(ranks)
    small = ping(ranks, num_bytes=1 << 10)  # for the latency, however slow the link
    return None if small is None else Link.from_gbps(run.link.gbps[0], latency_s=small.latency_s)


def _set_split(
    run: BenchRun,
    ranks: Ranks,
    contenders: Contenders,
    name: str,
    length: int,
    compute: Compute,
    link: Link | None,
    bounds: Bounds,
) -> None:
    from benchmarks.ttft.bounds import searched
    from benchmarks.ttft.measurement import prefill_options

    split, options = VARIANTS[name].split, prefill_options(name, run.prefill.layers_in_flight)
    if split is Split.free:
        contenders.set_split(name, bounds.free)
    elif split is Split.searched and run.partition.name is not PartitionName.table and options is not None:
        cluster = compute.cluster(
            ranks.size,
            link,
            transfer=options.transfer,
            layers_in_flight=options.layers_in_flight,
            backend=ranks.backend,
        )
        contenders.set_split(name, ranks.on_rank_0("a split", lambda: searched(length, cluster)))


def _measure(
    run: BenchRun,
    ranks: Ranks,
    model: Model,
    contenders: Contenders,
    record: Record,
    length: int,
    rounds: int,
    bounds: Bounds,
    bar: Bar,
) -> None:
    """Run all rounds of one length. An interruption keeps the finished rounds."""
    from benchmarks.network.interruptions import signals_deferred
    from benchmarks.ttft.measurement import check_agreement, prompt

    ids = prompt(length, model.vocab_size, run.model.seed)
    names = run.bench.variants
    finished: list[dict[str, Run]] = []

    def one_round(number: str) -> dict[str, Run]:
        found = {}
        for name in names:
            bar.say(f"{length} tokens, {number}: {name}")
            found[name] = contenders.run(name, ids)
            bar.advance(bounds.single_s)
        check_agreement({name: each.first_token for name, each in found.items()}, length)
        return found

    for number in range(run.bench.warmup):
        one_round(f"warm-up {number + 1} of {run.bench.warmup}")
    try:
        for number in range(rounds):
            finished.append(one_round(f"round {number + 1} of {rounds}"))
    except BaseException as error:
        if ranks.rank == 0 and finished and not isinstance(error, ValueError):
            with signals_deferred():  # torchrun sends a signal more than once
                _keep(run, model, record, length, finished, bounds)
            bar.clear()
            say(f"kept {len(finished)} of {rounds} rounds of {length} tokens; go on with bench.resume=true")
        raise
    written = ranks.on_rank_0("the lines", lambda: _keep(run, model, record, length, finished, bounds))
    if ranks.rank == 0:
        bar.clear()
        print(_table_of(written, length), flush=True)


def _keep(
    run: BenchRun, model: Model, record: Record, length: int, rounds: list[dict[str, Run]], bounds: Bounds
) -> list[Line]:
    from benchmarks.harness import lines

    written = [record.line(name, length, [each[name] for each in rounds], bounds, model) for name in run.bench.variants]
    lines.append(run.bench.results, written)
    return written


def _rounds_left(run: BenchRun, record: Record) -> dict[int, int]:
    """Rounds left to run, by length. All variants of a length run together, since ratios are taken within a round."""
    from benchmarks.harness import lines
    from benchmarks.ttft import comparison

    if not run.bench.resume:
        return dict.fromkeys(run.bench.lengths, run.bench.pairs)
    known = comparison.read(run.bench.results)
    left = {}
    for length in run.bench.lengths:
        done = min(lines.rounds_done(known, record.key(name, length)) for name in run.bench.variants)
        left[length] = max(0, run.bench.pairs - done)
    return left


def _print_bounds(record: Record, bounds: dict[int, Bounds]) -> None:
    from benchmarks.ttft.record import Record
    from benchmarks.ttft.tables import bounds_rows
    from partitioner.table.fingerprint import link_text

    stated = [{"length": length, **Record.of_bounds(each)} for length, each in bounds.items()]
    peak = next(iter(bounds.values())).peak_flops
    link = "" if record.link is None else f"; link {link_text(record.link)}"
    print(f"Bounds from measured compute; matrix products {peak / 1e9:,.1f} GFLOP/s on all ranks{link}")
    print(text_table(bounds_rows(stated)), flush=True)


def _table_of(written: list[Line], length: int) -> str:
    from benchmarks.ttft.comparison import comparisons
    from benchmarks.ttft.tables import COLUMNS, rows

    [comparison] = comparisons(written)
    [(network, _)] = comparison.points
    table = text_table([COLUMNS, *rows(comparison.points[network, length], [line["variant"] for line in written])])
    return f"{length} tokens, {network}\n{table}"


if __name__ == "__main__":
    sys.exit(main())
