"""Finds the context partition, and the number of ranks, with the earliest first token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.compose import Program, this_rank
from launch.ending import end_with, say
from partitioner.options import Method, Objective, SearchRun

if TYPE_CHECKING:
    from partitioner.compute_cost import ComputeCost, MeasuredCost
    from partitioner.evaluations import Cost, SearchResult, Step
    from partitioner.fingerprint import Fingerprint
    from partitioner.link import Link
    from partitioner.lookup_table import Entry, LookupTable
    from partitioner.simulation import Cluster
    from runahead.context import ContextPartition
    from runahead.model import Model
    from runahead.ranks import Ranks

HELP = """\
usage: python -m partitioner.search table=<json> [name=value ...]
       torchrun --nproc-per-node=N -m partitioner.search search.objective=measured table=<json> ...

Finds, for every prompt length and number of ranks, the split of the prompt with the earliest first token, and writes
a lookup table for launch/infer.py partition=table. Can be stopped and started again without losing what was measured.

  search.objective=...   measured: TTFT on the ranks that were started (torchrun)
                         replayed: compute measured on one device, K,V on simulated links
                         modelled: a fitted cost model, for lengths and ranks far beyond this machine
  search.lengths=[1024,2048,4096]   search.ranks=[2,4,8]   search.method=seeded|grid
  search.min_stride=32   search.reach=0.15   search.repeats=3   search.speeds=[1,0.5]
  search.probe_chunks=[...]   search.probe_prefixes=[...]   search.probe_layers=4   search.force=false
  link.gbps=25   link.latency_us=10   link.shared=false
  model=smollm2|hf|random   model.path=...   model.config=...   model.layers=<n>   model.dtype=...
  prefill.transfer=relay|direct   prefill.layers_in_flight=3   ranks.device=...   ranks.threads=<n>

--cfg job prints the composed options; --help prints this.
"""

SEARCH = Program(name="search", options=SearchRun, help=HELP)

SHORTEST_PROBE = 64


def main(args: Sequence[str] | None = None) -> int:
    """The whole program. Its exit status: 0 done, 1 failed, 2 the command line is wrong, 130 interrupted."""
    try:
        command = SEARCH.read(sys.argv[1:] if args is None else args)
    except ValueError as error:
        say(str(error))
        return 2
    if command.to_print is not None:
        if this_rank() == 0:
            print(command.to_print, end="")
        return 0
    assert command.run is not None
    ranks: Ranks | None = None
    try:
        from runahead.ranks import Ranks

        ranks = Ranks.start(command.run.ranks)
        table = search(command.run, ranks)
        if ranks.rank == 0:
            from partitioner.show import table_text

            print(table_text(table), end="")
        ranks.close()
    except BaseException as error:
        end_with(error, ranks)
    return 0


def search(run: SearchRun, ranks: Ranks) -> LookupTable:
    """The table that `run` asks for, also written to its file; every rank makes the same call.

    Raises: ValueError and OSError for a user's mistakes.
    """
    from partitioner.fingerprint import Fingerprint
    from partitioner.lookup_table import LookupTable
    from partitioner.pictures import save_pictures
    from runahead.model import Model

    counts = run.search.ranks or list(range(1, ranks.size + 1))
    num_layers = ranks.agree("the search's options", lambda: _prepare(run, counts, ranks.size))
    model = ranks.together(
        "the model",
        lambda: Model.load(run.model, ranks.device, progress=ranks.rank == 0, ranks_on_host=ranks.local_size),
    )
    link = _link(run, ranks)
    fingerprint = Fingerprint.of(
        model,
        num_layers=num_layers,
        device=ranks.device,
        backend=ranks.backend,
        transfer=run.prefill.transfer,
        link=link,
        link_measured=run.link.gbps is None,
    )
    table = ranks.agree("the table", lambda: _existing(run, fingerprint)) or LookupTable(fingerprint, [])
    compute = _compute(run, ranks, model, max(run.search.lengths), num_layers, fingerprint)
    searched = _Search(run, ranks, model, compute, link, fingerprint)
    trails: dict[tuple[int, int], SearchResult] = {}
    with searched.progress(len(run.search.lengths) * len(counts)):
        for length in run.search.lengths:
            for count in counts:
                result = searched.one(length, count, table)
                trails[length, count] = result
                table = table.merge(LookupTable(fingerprint, [searched.entry(length, count, result)]))
                if ranks.rank == 0:
                    assert run.table is not None
                    table.save(run.table)
    if ranks.rank == 0:
        assert run.table is not None
        simulated = {count: searched.cluster(count) for count in counts}
        clusters = {count: cluster for count, cluster in simulated.items() if cluster is not None}
        save_pictures(table, Path(run.table), trails=trails, clusters=clusters)
    return table


def _prepare(run: SearchRun, counts: list[int], num_ranks: int) -> int:
    """On rank 0, before the model is loaded: what can be wrong and is cheap to find out. Returns the model's layers."""
    from runahead import loading
    from runahead.model import max_positions
    from runahead.whole_file import ensure_writable

    assert run.table is not None
    ensure_writable(run.table, option="table")
    if run.search.objective is Objective.measured and max(counts) > num_ranks:
        raise ValueError(
            f"search.ranks={counts} needs {max(counts)} ranks to be measured but {num_ranks} were started; "
            f"use torchrun --nproc-per-node={max(counts)} or search.objective=replayed"
        )
    if run.link.gbps is None and num_ranks == 1 and max(counts) > 1:
        raise ValueError("link.gbps=<1e9 bits per second> is needed: with one rank there is no link to measure")
    if run.search.method is Method.grid and max(counts) > 5:
        raise ValueError(f"search.method=grid is limited to 5 ranks, not {max(counts)}; use search.method=seeded")
    limit = max_positions(loading.load_config(run.model, progress=True).get_text_config(decoder=True))
    if run.search.objective is Objective.measured and limit is not None and max(run.search.lengths) >= limit:
        raise ValueError(
            f"search.lengths goes up to {max(run.search.lengths)} tokens, but the model has {limit} positions, one of "
            "them for the first new token; leave the longest out or use search.objective=replayed"
        )
    whole = loading.load_config(replace(run.model, layers=None)).get_text_config(decoder=True)
    return int(whole.num_hidden_layers)


def _link(run: SearchRun, ranks: Ranks) -> Link | None:
    """As given, else as measured between two ranks."""
    from partitioner.link import Link
    from partitioner.measure import ping

    if run.link.gbps is not None:
        return Link.from_gbps(run.link.gbps, latency_s=run.link.latency_us * 1e-6, shared=run.link.shared)
    return ping(ranks)


def _existing(run: SearchRun, fingerprint: Fingerprint) -> LookupTable | None:
    """The table that is there already, to be added to."""
    from partitioner.lookup_table import LookupTable

    assert run.table is not None
    if not Path(run.table).exists():
        return None
    table = LookupTable.load(run.table)
    table.check_fits(fingerprint, force=False)
    return table


def _compute(
    run: SearchRun, ranks: Ranks, model: Model, longest: int, num_layers: int, fingerprint: Fingerprint
) -> ComputeCost:
    """One device's compute: measured here, or by an earlier run, kept beside the table. All ranks measure at once."""
    from partitioner.compute_cost import FittedCost, MeasuredCost
    from partitioner.measure import probe_compute
    from runahead.whole_file import write_whole

    lengths = _doubling(SHORTEST_PROBE, max(longest, 2 * SHORTEST_PROBE))  # two points make a line
    chunks, prefixes = run.search.probe_chunks or lengths, run.search.probe_prefixes or lengths
    path = Path(f"{run.table}.compute.json")
    purpose = f"{fingerprint.key()} {chunks} {prefixes} {run.search.repeats}"

    def earlier() -> MeasuredCost | None:
        if run.search.force or not path.exists():
            return None
        saved_purpose, _, text = path.read_text(encoding="utf-8").partition("\n")
        return MeasuredCost.from_json(text) if saved_purpose == purpose else None

    measured = ranks.agree("the compute cost", earlier)
    if measured is None:
        points = len(chunks) * (1 + len(prefixes))
        with _bar(ranks, points, "measuring compute") as bar:

            def tick(text: str) -> None:
                bar.set_postfix_str(text, refresh=False)
                bar.update()
                ranks.progress()

            measured = ranks.together(
                "the compute cost",
                lambda: probe_compute(
                    model,
                    chunks=chunks,
                    prefixes=prefixes,
                    repeats=run.search.repeats,
                    num_layers=num_layers,
                    probe_layers=run.search.probe_layers,
                    on_progress=tick,
                ),
            )
        measured = ranks.broadcast(measured, 0, "the compute cost")
        if ranks.rank == 0:
            write_whole(path, f"{purpose}\n{measured.to_json()}\n")
    return FittedCost.fit(measured) if run.search.objective is Objective.modelled else measured


class _Search:
    """Searches one length and number of ranks after the other."""

    def __init__(
        self,
        run: SearchRun,
        ranks: Ranks,
        model: Model,
        compute: ComputeCost,
        link: Link | None,
        fingerprint: Fingerprint,
    ) -> None:
        self._run, self._ranks, self._model = run, ranks, model
        self._compute, self._link, self._fingerprint = compute, link, fingerprint
        self._spread: dict[tuple[int, ...], float] = {}

    def progress(self, total: int) -> Any:
        self._bar = _bar(self._ranks, total, "searching")
        return self._bar

    def one(self, length: int, count: int, table: LookupTable) -> SearchResult:
        """The best partition of a prompt over `count` ranks."""
        from partitioner.grid_search import grid_search
        from partitioner.points import Points
        from partitioner.seeded_search import seeded_search

        purpose = {"fingerprint": self._fingerprint.key(), "objective": self._run.search.objective.name}
        assert self._run.table is not None
        live = self._run.search.objective is Objective.measured
        keep = live and self._ranks.rank == 0
        points = Points(Path(f"{self._run.table}.points.jsonl") if keep else None, purpose)
        known = self._ranks.agree("earlier points", lambda: {} if self._run.search.force else points.read())
        points.known = {key: value for key, value in known.items() if len(key) == count + 1 and key[-1] == length}
        cost = points.remembering(self._cost(length, count))
        self._best_s, self._evaluations = float("inf"), 0

        def tick(step: Step) -> None:
            self._best_s, self._evaluations = min(self._best_s, step.cost_s), self._evaluations + 1
            self._bar.set_postfix_str(
                f"{length} tokens, {count} ranks: best {self._best_s:.4g} s after {self._evaluations} evaluations, "
                f"stride {step.stride}",
                refresh=False,
            )

        stride = min(self._run.search.min_stride, max(1, length // (8 * count)))
        if self._run.search.method is Method.grid:
            result = grid_search(cost, length, count, min_stride=stride, on_evaluation=tick)
        else:
            result = seeded_search(
                cost,
                length,
                count,
                min_stride=stride,
                seed=self._seed(length, count, table, cost),
                # Live runs are dear, and near equal work; on slow simulated links the best split may be far from it.
                reach=max(stride, int(self._run.search.reach * length)) if live else None,
                leave_out=not live,
                on_evaluation=tick,
            )
        self._bar.update()
        return result

    def entry(self, length: int, count: int, result: SearchResult) -> Entry:
        """The table's line for a result."""
        from partitioner.lookup_table import Entry

        return Entry(
            length=length,
            ranks=count,
            boundaries=result.partition.boundaries,
            ttft_s=result.cost_s,
            objective=self._run.search.objective.name,
            spread=self._spread.get(result.partition.boundaries),
        )

    def cluster(self, count: int) -> Cluster | None:
        """What a simulation of `count` ranks runs on; None where no link is known."""
        from partitioner.link import Links
        from partitioner.simulation import Cluster

        if self._link is None and count > 1:
            return None
        speeds = self._run.search.speeds or [1.0] * count
        links = None if self._link is None else Links(count, self._link)
        return Cluster(
            compute=self._compute,
            speed=speeds[:count],
            links=links,
            kv_bytes_per_token=self._model.kv_shapes[0].bytes_per_token(),
            transfer=self._run.prefill.transfer,
            layers_in_flight=self._run.prefill.layers_in_flight,
            pass_on_as_landed=self._ranks.backend == "gloo",
        )

    def _cost(self, length: int, count: int) -> Cost:
        from partitioner.measure import LiveCost
        from partitioner.simulation import simulate
        from runahead.context import ContextPartition

        if self._run.search.objective is Objective.measured:
            live = LiveCost(self._model, self._ranks, self._run.prefill, length, repeats=self._run.search.repeats)
            self._spread = live.spread
            idle = (length,) * (self._ranks.size - count)
            return lambda partition: live(ContextPartition(boundaries=partition.boundaries + idle))
        cluster = self.cluster(count)
        assert cluster is not None
        return lambda partition: simulate(partition, cluster).ttft_s

    def _seed(self, length: int, count: int, table: LookupTable, cost: Cost) -> ContextPartition:
        """Where a search starts: equal work, or the ratios of the nearest known length where those cost less."""
        from partitioner.equal_work import equal_work
        from runahead.context import from_ratios

        speeds = (self._run.search.speeds or [1.0] * count)[:count]
        seeds = [equal_work(length, count, self._compute, speeds)]
        known = table.entries_for(count)
        if known and self._run.search.objective is not Objective.measured:  # where a look costs nothing
            nearest = min(known, key=lambda entry: abs(entry.length - length))
            seeds.append(from_ratios(nearest.ratios)(length, count))
        return min(seeds, key=cost) if len(seeds) > 1 else seeds[0]


def _doubling(first: int, last: int) -> list[int]:
    lengths = [first]
    while lengths[-1] < last:
        lengths.append(min(2 * lengths[-1], last))
    return lengths


def _bar(ranks: Ranks, total: int, text: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=text, disable=ranks.rank != 0, leave=False, mininterval=0.5)


if __name__ == "__main__":
    sys.exit(main())
