"""Files of the partitioner and the benchmarks: tables, records of searches, measured compute, lines."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.evaluation import summary
from benchmarks.harness import lines
from benchmarks.harness.text_table import markdown
from benchmarks.ttft import comparison, plot
from benchmarks.ttft.bounds import Compute, read_compute
from partitioner.auto.balance import Balance
from partitioner.auto.learned import LearnedSplit, read_learned, write_learned
from partitioner.calibration import read_measured
from partitioner.cost.link import Links
from partitioner.cost.measured import MeasuredCost
from partitioner.searches.points import Points
from partitioner.searches.record import SearchRecord, record_path
from partitioner.show import table_text
from partitioner.simulation.cluster import Cluster
from partitioner.table.format import parse_table, table_json
from partitioner.table.lookup_table import LookupTable, TableWarning
from tests.bench.made_lines import line as bench_line
from tests.fuzz.harness import Outcome, judged
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.fuzz.target import Target
from tests.partitioner.test_lookup_table import FINGERPRINT, entry

LENGTHS = (1, 17, 1000, 123_457)

TABLE = json.loads(
    table_json(
        FINGERPRINT,
        [
            entry([0, 512], ttft_s=2.0),
            entry([0, 300, 512], ttft_s=1.25, spread=0.01),
            entry([0, 1024], ttft_s=4.0, objective="replayed"),
            entry([0, 600, 1024], ttft_s=2.5),
            entry([0, 500, 1024, 1024], ttft_s=2.25, objective="modelled", date=""),
        ],
    )
)
PREFIX_S: list[list[Any]] = [[64, 64, 0.001], [64, 128, 0.002], [128, 64, 0.002], [128, 128, 0.003]]
MEASURED: dict[str, Any] = {
    "num_layers": 4,
    **{name: [[64, 0.001], [128, 0.002]] for name in ("first_s", "between_s", "own_s", "last_s")},
    "prefix_s": PREFIX_S,
}
LINK = {"latency_s": 1e-5, "bandwidth_Bps": 1e9, "shared": False}
RECORD = {
    "format": "runahead search record",
    "version": 1,
    "searches": [
        {"length": 512, "ranks": 2, "steps": [[0, 64, [0, 256, 512], 1.5, False], [1, 32, [0, 288, 512], 1.25, True]]}
    ],
    "clusters": [
        {
            "compute": {"kind": "measured", "json": json.dumps(MEASURED)},
            "speed": [1.0, 0.5],
            "link": LINK,
            "links": [[0, 1, LINK | {"bandwidth_Bps": None}]],
            "kv_bytes_per_token": 1024.0,
            "transfer": "relay",
            "layers_in_flight": 3,
            "pass_on_as_landed": True,
        }
    ],
}
PURPOSE = "a purpose"
KEPT: dict[str, Any] = {
    "format": "runahead learned split",
    "version": 1,
    "purpose": PURPOSE,
    "cost": {
        "num_layers": 4,
        "first_s": [1e-4, 1e-6],
        "between_s": [1e-4, 1e-5],
        "own_s": [0.0, 0.0, 1e-8],
        "prefix_s": [0.0, 0.0, 0.0, 2e-8],
        "last_s": [1e-4, 1e-6],
    },
    "link": LINK,
    "start": [0.0, 0.1],
    "prompts": [{"tokens": 512, "slowness": [-0.1, None], "surprise": [0.0, 0.2]}],
}
COMPUTE = {"cost": json.dumps(MEASURED), "kv_bytes": 4096, "purpose": PURPOSE}
POINT: dict[str, Any] = {"purpose": {"for": "a test"}, "boundaries": [0, 256, 512], "cost_s": 1.5}
BENCH_LINES = [bench_line("single", 1024, [1.0, 1.1]), bench_line("kvr_e", 1024, [0.6, 0.7])]
EVALUATION_LINE: dict[str, Any] = {
    "task": "passkey",
    "policy": "snapkv",
    "budget": 0.5,
    "case": {"length": 512, "depth": 0.5, "sample": 0},
    "score": 1.0,
    "metric": "found",
    "weight": 1.0,
    "num_tokens": 500,
    "kept_tokens": [250, 250],
    "kv_bytes": 1000,
    "full_kv_bytes": 2000,
    "ttft_s": 1.0,
    "tpot_s": 0.1,
    "details": {},
    "key": "abc",
    "comparison": "def",
    "model": "a model",
    "dtype": "float32",
    "device": "cpu",
}
EVALUATION_LINES = [EVALUATION_LINE, EVALUATION_LINE | {"policy": "full", "budget": None, "key": "abd"}]


def check_table(content: bytes, folder: Path) -> Outcome:
    path = folder / "table.json"
    path.write_bytes(content)
    return judged(lambda: LookupTable.load(path), use_table, names=[str(path)], folder=folder)


def use_table(table: LookupTable) -> None:
    """Look splits up: valid ones for every length and number of ranks that there are entries for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        for ranks in table.ranks():
            for length in (*LENGTHS, *(entry.length for entry in table.entries[:3])):
                table.lookup(length, ranks).check(length, ranks)
                table.partition(length, max(table.ranks())).check(length, max(table.ranks()))
    table_text(table)
    again, entries = parse_table(table_json(table.fingerprint, table.entries).encode())
    assert (again, entries) == (table.fingerprint, table.entries)


def check_record(content: bytes, folder: Path) -> Outcome:
    table = folder / "table.json"
    record_path(table).write_bytes(content)

    def use(found: SearchRecord) -> None:
        found.save_beside(table)
        again = SearchRecord.beside(table)
        assert again.trails == found.trails
        for cluster in found.clusters.values():
            use_cost(cluster.compute)

    return judged(lambda: SearchRecord.beside(table), use, names=[str(record_path(table))], folder=folder)


def use_cost(cost: Any) -> None:
    for c in (1, 64, 100, 4096):
        seconds = [cost.first(c), cost.between(c), cost.own(c), cost.last(c), cost.prefix(c, 0), cost.prefix(c, 100)]
        assert all(each >= 0 for each in seconds), seconds
    assert cost.num_places >= 1


def check_measured(content: bytes, folder: Path) -> Outcome:
    path = folder / "table.json.compute.json"
    path.write_bytes(f"{PURPOSE}\n".encode() + content)

    def use(cost: MeasuredCost | None) -> None:
        if cost is not None:
            use_cost(cost)

    return judged(lambda: read_measured(path, PURPOSE), use, names=[str(path)], folder=folder)


def check_compute(content: bytes, folder: Path) -> Outcome:
    path = folder / "compute.json"
    path.write_bytes(content)

    def use(compute: Compute | None) -> None:
        assert compute is not None
        use_cost(compute.cost)
        compute.cluster(3)
        Compute.from_json(compute.to_json())

    return judged(lambda: read_compute(str(path)), use, names=[str(path)], folder=folder)


def check_points(content: bytes, folder: Path) -> Outcome:
    """Damaged points are left out, and measured again."""
    path = folder / "points.jsonl"
    path.write_bytes(content)
    points = Points(path, POINT["purpose"])

    def use(known: dict[tuple[int, ...], float]) -> None:
        for boundaries, cost_s in known.items():
            assert 0 < cost_s < float("inf"), cost_s
            assert len(boundaries) >= 2 and boundaries[0] == 0 and all(type(each) is int for each in boundaries)
            assert all(a <= b for a, b in pairwise(boundaries))
        points.add((0, 7), 2.5)
        assert Points(path, POINT["purpose"]).read() == {**known, (0, 7): 2.5}

    return judged(points.read, use, names=[str(path)], folder=folder)


def check_bench_lines(content: bytes, folder: Path) -> Outcome:
    path = folder / "bench.jsonl"
    path.write_bytes(content)

    def use(found: list[lines.Line]) -> None:
        assert lines.rounds_done(found, "single 1024") >= 0
        with suppress(ValueError):  # no lines
            plot.document(plot.chosen(str(path), None, None))
        before = lines.read(path)  # variants that exist no more among them, which are not compared
        lines.append(path, [BENCH_LINES[0]])
        assert len(lines.read(path)) == len(before) + 1 > len(found)

    with patch.object(lines, "say"):  # which tells of a last line that was cut off, and does not count
        return judged(lambda: comparison.read(str(path)), use, names=[str(path)], folder=folder)


def check_evaluation_lines(content: bytes, folder: Path) -> Outcome:
    path = folder / "evaluation.jsonl"
    path.write_bytes(content)

    def use(found: list[lines.Line]) -> None:
        rows = summary.rows(summary.latest(found))
        for task in {row.task for row in rows}:
            markdown(summary.table([row for row in rows if row.task == task]))

    with patch.object(lines, "say"):
        return judged(lambda: summary.read(path), use, names=[str(path)], folder=folder)


def check_kept(content: bytes, folder: Path) -> Outcome:
    path = folder / "kept.json"
    path.write_bytes(content)

    def use(found: LearnedSplit | None) -> None:
        assert found is not None
        cluster = Cluster(compute=found.cost, speed=[1.0, 1.0], links=Links(2, found.link), kv_bytes_per_token=1024.0)
        balance = Balance(cluster, found.slowness)
        for length in LENGTHS:
            if found.cost.num_places <= 100:
                partition = balance.split(length).check(length, 2)
                balance.learn(partition, balance.expected_s(partition), [1.0, 2.0], [0.0, 0.5])
        write_learned(path, PURPOSE, LearnedSplit.from_balance(found.cost, balance))
        assert read_learned(path, PURPOSE, 2) is not None

    return judged(lambda: read_learned(path, PURPOSE, 2), use, names=[str(path)], folder=folder)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_lines(values: list[Any]) -> bytes:
    return b"".join(as_json(value) + b"\n" for value in values)


TARGETS = (
    Target(
        name="lookup tables",
        reads="partitioner/table/lookup_table.py LookupTable.load",
        inputs=changed_json([TABLE]) | changed_bytes([json.dumps(TABLE, indent=1).encode()]),
        check=check_table,
        share=15,
    ),
    Target(
        name="records of searches",
        reads="partitioner/searches/record.py SearchRecord.beside",
        inputs=changed_json([RECORD]) | changed_bytes([as_json(RECORD)]),
        check=check_record,
        share=6,
    ),
    Target(
        name="measured compute of a search",
        reads="partitioner/calibration.py read_measured",
        inputs=changed_json([MEASURED]) | changed_bytes([as_json(MEASURED)]),
        check=check_measured,
        share=5,
    ),
    Target(
        name="measured compute of a benchmark",
        reads="benchmarks/ttft/bounds.py read_compute",
        inputs=changed_json([COMPUTE]) | changed_bytes([as_json(COMPUTE)]),
        check=check_compute,
        share=4,
    ),
    Target(
        name="learned splits",
        reads="partitioner/auto/learned.py read_learned",
        inputs=changed_json([KEPT]) | changed_bytes([as_json(KEPT)]),
        check=check_kept,
        share=5,
    ),
    Target(
        name="points of a search",
        reads="partitioner/searches/points.py Points.read",
        inputs=changed_bytes([as_lines([POINT, POINT | {"cost_s": 2}])]) | changed_json([POINT]),
        check=check_points,
        share=4,
    ),
    Target(
        name="lines of benchmarks",
        reads="benchmarks/ttft/plot.py read",
        inputs=changed_bytes([as_lines(BENCH_LINES)]) | changed_json([BENCH_LINES[0]]),
        check=check_bench_lines,
        share=6,
    ),
    Target(
        name="lines of evaluations",
        reads="benchmarks/evaluation/summary.py read",
        inputs=changed_bytes([as_lines(EVALUATION_LINES)]) | changed_json(EVALUATION_LINES),
        check=check_evaluation_lines,
        share=6,
    ),
)
