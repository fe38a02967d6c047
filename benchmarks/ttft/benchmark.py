"""A benchmark from its options to its lines: what launch/bench.py does on every rank."""

from __future__ import annotations

from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line
from benchmarks.harness.random_prompts import random_ids
from benchmarks.network.interruptions import signals_deferred
from benchmarks.ttft import comparison
from benchmarks.ttft.bounds import (
    Compute,
    bounds_of,
    measure_compute,
    peak_flops,
    read_compute,
    searched,
    searched_chunks,
)
from benchmarks.ttft.measurement import Contenders, Measurement, check_agreement, prefill_options
from benchmarks.ttft.options import BenchRun
from benchmarks.ttft.record import Record, shared_fields
from benchmarks.ttft.tables import COLUMNS, bounds_rows, rows
from benchmarks.ttft.traffic import kv_bytes_per_token
from benchmarks.ttft.variants import VARIANTS, Split
from launch.inputs.options import PartitionName, RunOptions
from launch.inputs.partitions import partitioner, prepare_partition
from launch.program.ending import say
from launch.program.progress import Bar
from launch.program.text_table import text_table
from launch.program.written_files import ensure_outputs
from partitioner.cost.link import Link
from partitioner.cost.streaming import Streams
from partitioner.measure import ping
from partitioner.table.fingerprint import Fingerprint, link_text
from runahead.config import PrefillName, PrefillOptions
from runahead.context import ContextPartition, Partitioner
from runahead.model import loading
from runahead.model.loading.position_limit import max_positions
from runahead.model.shares import check_shares, load_model
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies


def bench(run: BenchRun, ranks: Ranks) -> None:
    """State the bounds, measure, print and write. Every rank makes the same call.

    Raises:
        ValueError, OSError: for a user's mistakes, or if variants disagree that must agree.
    """
    given = partitioner(run.partition, ranks)
    ranks.on_rank_0("the benchmark's options", lambda: _check(run, given, ranks.size))
    model = load_model(run.model, ranks, profile=run.profile)
    prefill = PrefillOptions(layers_in_flight=run.prefill.layers_in_flight)
    if _looks_up(run):
        prepare_partition(given, model, ranks, RunOptions(model=run.model, partition=run.partition, prefill=prefill))
    contenders = Contenders(run, model, ranks, given)
    fingerprint = Fingerprint.of_model(model, device=ranks.device, backend=ranks.backend, prefill=prefill)
    shared = ranks.on_rank_0("the machine", lambda: shared_fields(run, ranks, fingerprint, contenders.memory.of))
    record = Record(run, model, shared)
    rounds_left = ranks.on_rank_0("earlier lines", lambda: _rounds_left(record))
    if run.bench.pairs and not any(rounds_left.values()):
        say(f"nothing to do: {run.bench.results} has {run.bench.pairs} rounds of everything (bench.resume=true)")
        return

    compute = measure_compute(model, ranks, fingerprint, run.bench)
    peak = peak_flops(model, ranks)
    record.link = _link(run, ranks)
    record.bounds = ranks.on_rank_0(
        "the bounds",
        lambda: {length: bounds_of(model, compute, length, ranks.size, peak) for length in run.bench.lengths},
    )
    if ranks.rank == 0:
        _print_bounds(record, peak)
    if not run.bench.pairs:
        return
    for length in run.bench.lengths:
        for name in run.bench.variants:
            _set_split(record, ranks, contenders, compute, name, length)
    left = {length: rounds for length, rounds in rounds_left.items() if rounds}
    with Bar("measuring", shown=ranks.rank == 0) as bar:
        bar.total = sum(
            record.bounds[length].single_s * (run.bench.warmup + rounds) * len(run.bench.variants)
            for length, rounds in left.items()
        )
        for length, rounds in left.items():
            _measure(record, ranks, contenders, length, rounds, bar)


def _check(run: BenchRun, given: Partitioner, num_ranks: int) -> None:
    """Check whatever can be checked before the model is loaded. Rank 0 calls it."""
    ensure_outputs(run, {"bench.results": [run.bench.results], "bench.compute": [run.bench.compute]})
    if run.bench.pairs and not run.bench.dirty:
        machine.require_known_code(run.bench.results, remedy="bench.dirty=true or other bench.results")
    comparison.read(run.bench.results)
    if run.bench.compute is not None:
        read_compute(run.bench.compute)
    config = loading.load_decoder_config(run.model, progress=True)
    for name in run.bench.variants:
        options = prefill_options(name, run.prefill.layers_in_flight)
        if options is not None and options.name is PrefillName.tensor:
            check_shares(config, num_ranks)
    limit = max_positions(config)
    longest = max(run.bench.lengths)
    if limit is not None and longest >= limit:
        raise ValueError(
            f"bench.lengths goes up to {longest} tokens, but the model has {limit} positions, one of them for the "
            "first new token; leave the longest out"
        )
    if _looks_up(run):
        for length in run.bench.lengths:
            given(length, num_ranks).check(length, num_ranks)


def _looks_up(run: BenchRun) -> bool:
    """Whether a variant is split as the option partition=... says."""
    kinds = {Split.given, Split.searched} if run.partition.name is PartitionName.table else {Split.given}
    return any(VARIANTS[name].split in kinds for name in run.bench.variants)


def _rounds_left(record: Record) -> dict[int, int]:
    """Rounds left to run, by length. All variants of a length run together, since ratios are taken within a round."""
    options = record.run.bench
    known = comparison.read(options.results) if options.resume else []
    left = {}
    for length in options.lengths:
        done = min(lines.rounds_done(known, record.key(name, length)) for name in options.variants)
        left[length] = max(0, options.pairs - done)
    return left


def _link(run: BenchRun, ranks: Ranks) -> Link | None:
    """The link between ranks: of the shaped rate if there is one, else as measured; None for a single rank."""
    if not run.link.gbps:
        return ping(ranks)
    small = ping(ranks, num_bytes=1 << 10)  # for the latency, however slow the link
    return None if small is None else Link.from_gbps(run.link.gbps[0], latency_s=small.latency_s)


def _print_bounds(record: Record, peak: float) -> None:
    stated = [{"length": length, **each.as_json()} for length, each in record.bounds.items()]
    link = "" if record.link is None else f"; link {link_text(record.link)}"
    print(f"Bounds from measured compute; matrix products {peak / 1e9:,.1f} GFLOP/s on all ranks{link}")
    print(text_table(bounds_rows(stated)), flush=True)


def _set_split(record: Record, ranks: Ranks, contenders: Contenders, compute: Compute, name: str, length: int) -> None:
    """Set the partition of a variant that does not choose it by itself."""
    run, split = record.run, VARIANTS[name].split
    options = prefill_options(name, run.prefill.layers_in_flight)
    if split is Split.free:
        contenders.splits[name, length] = ContextPartition(boundaries=tuple(record.bounds[length].free_boundaries))
        return
    if split is not Split.searched or options is None:
        return
    is_pipeline, model = options.name is PrefillName.pipeline, record.model
    if is_pipeline or run.partition.name is not PartitionName.table:
        sent_bytes = kv_bytes_per_token(model.kv_shapes, options.wire_bits)
        policies = RankPolicies(last=VARIANTS[name].policies)
        cluster = compute.cluster(
            ranks.size,
            record.link,
            options,
            ranks.backend,
            sent_bytes_per_token=sent_bytes,
            streams=Streams.of(policies, model, length) if options.streams else None,
        )
        hidden_bytes = int(model.config.hidden_size) * model.dtype.itemsize
        contenders.splits[name, length] = ranks.on_rank_0(
            "a split",
            lambda: searched_chunks(length, cluster, hidden_bytes) if is_pipeline else searched(length, cluster),
        )


def _measure(record: Record, ranks: Ranks, contenders: Contenders, length: int, rounds: int, bar: Bar) -> None:
    """Run all rounds of one length. An interruption keeps the finished rounds."""
    run = record.run
    ids = random_ids(length, record.model.vocab_size, run.model.seed)
    finished: list[dict[str, Measurement]] = []

    def one_round(number: str) -> dict[str, Measurement]:
        found = {}
        for name in run.bench.variants:
            bar.say(f"{length} tokens, {number}: {name}")
            found[name] = contenders.run(name, ids)
            bar.advance(record.bounds[length].single_s)
        if run.bench.strict:
            check_agreement({name: each.first_token for name, each in found.items()}, length)
        return found

    def keep() -> list[Line]:
        written = [record.line(name, length, [each[name] for each in finished]) for name in run.bench.variants]
        lines.append(run.bench.results, written)
        return written

    for number in range(run.bench.warmup):
        one_round(f"warm-up {number + 1} of {run.bench.warmup}")
    try:
        for number in range(rounds):
            finished.append(one_round(f"round {number + 1} of {rounds}"))
    except BaseException as error:
        if ranks.rank == 0 and finished and not isinstance(error, ValueError):
            with signals_deferred():  # torchrun sends a signal more than once
                keep()
            bar.clear()
            say(f"kept {len(finished)} of {rounds} rounds of {length} tokens; go on with bench.resume=true")
        raise
    written = ranks.on_rank_0("the lines", keep)
    if ranks.rank == 0:
        bar.clear()
        [compared] = comparison.comparisons(written)
        [((network, _), points)] = compared.points.items()
        print(f"{length} tokens, {network}\n{text_table([COLUMNS, *rows(points, run.bench.variants)])}", flush=True)
