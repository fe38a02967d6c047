"""Calibration of a search: the compute of one device and the link between ranks, measured or given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from partitioner.cost.compute import ComputeCost
from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.places import Places
from partitioner.cost.streaming import Streams
from partitioner.measure import ping, probe_compute
from partitioner.options import Objective, SearchRun
from partitioner.simulation.cluster import Cluster
from partitioner.table.fingerprint import Fingerprint
from runahead.failures import first_line
from runahead.files import read_user_file, write_whole
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks

SHORTEST_PROBE = 64
"""Shortest chunk and prefix whose compute is measured by default, in tokens."""


def calibrated_clusters(
    run: SearchRun,
    ranks: Ranks,
    model: Model,
    counts: Iterable[int],
    *,
    link: Link | None,
    places: Places,
    fingerprint: Fingerprint,
    streams: Streams | None = None,
) -> dict[int, Cluster]:
    """Clusters of the leading ranks, by number of ranks, with the compute of this device. Every rank calls this.

    Args:
        counts: numbers of ranks.
        link: between ranks; None on a single rank without link.gbps.
        places: of the model to plan for.
        fingerprint: what measurements are valid for, which earlier runs kept.
        streams: KV heads that stream.
    """
    compute = _compute(run, ranks, model, places, fingerprint)
    return {
        count: Cluster.chain(
            compute,
            count,
            link,
            kv_bytes_per_token=model.layer_sent_bytes(run.prefill.wire_bits),
            state_bytes=places.bytes_of_state,
            prefill=run.prefill,
            backend=ranks.backend,
            speed=run.search.speeds,
            streams=streams,
        )
        for count in counts
    }


def link_between(run: SearchRun, ranks: Ranks) -> Link | None:
    """The link that is given, else measured between two ranks; None for a single rank."""
    if run.link.gbps is not None:
        return Link.from_gbps(run.link.gbps, latency_s=run.link.latency_us * 1e-6, shared=run.link.shared)
    return ping(ranks)


def read_measured(path: Path, purpose: str, states: Sequence[int] | None = None) -> MeasuredCost | None:
    """Read the compute that an earlier run measured; None if there is none for this purpose.

    Args:
        states: places of the model that hold one, of which the purpose has the number and the bytes alone; any by
            default.

    Raises:
        ValueError: the file is damaged; one line that names it.
    """
    if not path.exists():
        return None
    try:
        saved_purpose, _, text = read_user_file(path).decode("utf-8").partition("\n")
        found = MeasuredCost.from_json(text) if saved_purpose == purpose else None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"measured compute {path} is damaged ({first_line(error)}); delete it to measure again"
        ) from error
    return None if found is None or (states is not None and found.states != tuple(states)) else found


def _compute(run: SearchRun, ranks: Ranks, model: Model, places: Places, fingerprint: Fingerprint) -> ComputeCost:
    """The compute of one device, measured now by all ranks at once, or by an earlier run and kept beside the table."""
    lengths = _doubling(SHORTEST_PROBE, max(*run.search.lengths, 2 * SHORTEST_PROBE))  # a line needs two points
    chunks, prefixes = run.search.probe_chunks or lengths, run.search.probe_prefixes or lengths
    path = Path(f"{run.table}.compute.json")
    purpose = f"{fingerprint.key()} {chunks} {prefixes} {run.search.repeats}"
    measured = ranks.on_rank_0(
        "the compute cost", lambda: None if run.search.force else read_measured(path, purpose, places.states)
    )
    if measured is None:
        points = len(chunks) * (1 + len(prefixes))
        with tqdm(total=points, desc="measuring compute", disable=ranks.rank != 0, leave=False, mininterval=0.5) as bar:

            def tick(text: str) -> None:
                bar.set_postfix_str(text, refresh=False)
                bar.update()
                ranks.progress()

            measured = ranks.on_all_ranks(
                "the compute cost",
                lambda: probe_compute(
                    model,
                    chunks=chunks,
                    prefixes=prefixes,
                    repeats=run.search.repeats,
                    places=places,
                    probe_layers=run.search.probe_layers,
                    on_progress=tick,
                ),
            )
        measured = ranks.broadcast(measured, 0, "the compute cost")
        if ranks.rank == 0:
            write_whole(path, f"{purpose}\n{measured.to_json()}\n")
    return FittedCost.fit(measured) if run.search.objective is Objective.modelled else measured


def _doubling(first: int, last: int) -> list[int]:
    """`first`, doubled until `last`, and `last`."""
    lengths = [first]
    while lengths[-1] < last:
        lengths.append(min(2 * lengths[-1], last))
    return lengths
