"""Record of the searches of a table: their steps and the simulated clusters, from which pictures are drawn.

It is stored beside the table, so that `partitioner.show` can draw pictures without searching again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from partitioner.cost.compute import ComputeCost
from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link, Links
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.sparse import SparseCost, cost_of
from partitioner.cost.streaming import StreamingCost, Streams
from partitioner.searches.evaluations import Evaluation, SearchResult
from partitioner.simulation.cluster import Cluster
from runahead.config import Attention, PrefillOptions, Transfer
from runahead.context import ContextPartition
from runahead.files import read_user_file, write_whole

FORMAT = "runahead search record"
VERSION = 1

COMPUTE: dict[str, type[MeasuredCost] | type[FittedCost]] = {"measured": MeasuredCost, "fitted": FittedCost}


@dataclass(kw_only=True)
class SearchRecord:
    """Searches by (length, ranks), and clusters by ranks."""

    trails: dict[tuple[int, int], SearchResult] = field(default_factory=dict)
    clusters: dict[int, Cluster] = field(default_factory=dict)

    @classmethod
    def beside(cls, table: Path) -> SearchRecord:
        """Read the record beside a table; an empty one if there is none.

        Raises:
            ValueError: it is damaged; one line that names the file.
        """
        path = record_path(table)
        if not path.exists():
            return cls()
        try:
            return _record(json.loads(read_user_file(path).decode("utf-8")))
        except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"search record {path} is damaged; delete it, and the next search writes it anew"
            ) from error

    def with_run(self, trails: Mapping[tuple[int, int], SearchResult], clusters: Mapping[int, Cluster]) -> SearchRecord:
        """The record with the searches and clusters of one more run, in place of earlier ones."""
        return SearchRecord(trails=self.trails | dict(trails), clusters=self.clusters | dict(clusters))

    def save_beside(self, table: Path) -> None:
        """Write the record beside a table, atomically.

        Raises:
            OSError: it cannot be written.
        """
        searches = [
            {
                "length": length,
                "ranks": ranks,
                "found": search.partition.boundaries,
                "steps": [[s.level, s.stride, s.boundaries, s.cost_s, s.is_best] for s in search.trail],
            }
            for (length, ranks), search in sorted(self.trails.items())
        ]
        clusters = [_plain_cluster(cluster) for _, cluster in sorted(self.clusters.items())]
        plain = {"format": FORMAT, "version": VERSION, "searches": searches, "clusters": clusters}
        write_whole(record_path(table), json.dumps(plain, allow_nan=False) + "\n")


def record_path(table: Path) -> Path:
    """Path of the record that belongs to a table's file."""
    return Path(f"{table}.search.json")


def _record(plain: Any) -> SearchRecord:
    if (plain["format"], plain["version"]) != (FORMAT, VERSION):
        raise ValueError("another format")
    clusters = map(_cluster, plain["clusters"])
    return SearchRecord(
        trails={(int(each["length"]), int(each["ranks"])): _search(each) for each in plain["searches"]},
        clusters={cluster.num_ranks: cluster for cluster in clusters},
    )


def _search(plain: Any) -> SearchResult:
    trail = []
    for level, stride, boundaries, cost_s, is_best in plain["steps"]:
        partition = ContextPartition(boundaries=tuple(map(int, boundaries)))
        partition.check(int(plain["length"]), int(plain["ranks"]))
        if not (isfinite(cost_s) and cost_s > 0 and stride >= 0):
            raise ValueError("a step without a cost")
        at, cost_s, is_best = partition.boundaries, float(cost_s), bool(is_best)
        trail.append(Evaluation(level=int(level), stride=int(stride), boundaries=at, cost_s=cost_s, is_best=is_best))
    found = min(trail, key=lambda step: step.cost_s)
    if "found" in plain:  # not in the first records; a split that was fitted to its neighbours is not the best one
        [*_, found] = (step for step in trail if step.boundaries == tuple(plain["found"]))
    return SearchResult(partition=ContextPartition(boundaries=found.boundaries), cost_s=found.cost_s, trail=trail)


def _plain_cluster(cluster: Cluster) -> dict[str, Any]:
    links = cluster.links
    return vars(cluster) | {
        "compute": _plain_compute(cluster.compute),
        "link": None if links is None else links.default.as_json(),
        "links": [] if links is None else [[*pair, link.as_json()] for pair, link in links.overrides.items()],
        "transfer": cluster.transfer.name,
        "streams": None if cluster.streams is None else asdict(cluster.streams),
    }


def _cluster(plain: Any) -> Cluster:
    links = None
    if plain["link"] is not None:
        overrides = {(int(sender), int(receiver)): Link.from_json(link) for sender, receiver, link in plain["links"]}
        links = Links(len(plain["speed"]), Link.from_json(plain["link"]), overrides)
    streams, compute = None, _compute(plain["compute"])
    if plain.get("streams") is not None:
        streams = Streams(share=float(plain["streams"]["share"]), tokens=int(plain["streams"]["tokens"]))
        compute = StreamingCost(dense=compute, streams=streams)
    return Cluster(
        compute=compute,
        speed=[float(speed) for speed in plain["speed"]],
        links=links,
        kv_bytes_per_token=float(plain["kv_bytes_per_token"]),
        transfer=Transfer[plain["transfer"]],
        layers_in_flight=int(plain["layers_in_flight"]),
        pass_on_as_landed=bool(plain["pass_on_as_landed"]),
        state_bytes=float(plain.get("state_bytes", 0.0)),
        block=int(plain.get("block", 1)),
        streams=streams,
    )


def _compute(plain: Any) -> ComputeCost:
    dense = COMPUTE[plain["kind"]].from_json(plain["json"])
    if "sparsity" not in plain:
        return dense
    return cost_of(dense, PrefillOptions(attention=Attention.xattention, **plain["sparsity"]))


def _plain_compute(compute: ComputeCost) -> dict[str, Any]:
    if isinstance(compute, SparseCost):
        return _plain_compute(compute.dense) | {"sparsity": asdict(compute.sparsity)}
    if isinstance(compute, StreamingCost):  # whose streams are the cluster's
        return _plain_compute(compute.dense)
    for kind, known in COMPUTE.items():
        if isinstance(compute, known):
            return {"kind": kind, "json": compute.to_json()}
    raise TypeError(f"a {type(compute).__name__} cannot be kept in a file")
