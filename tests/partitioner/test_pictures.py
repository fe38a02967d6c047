"""Pictures can be drawn of any table and any search, and again from what is kept beside the table."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link, Links
from partitioner.cost.measured import MeasuredCost
from partitioner.pictures.searches import MOST_PANELS, _levels, boundary_png, grids_png
from partitioner.pictures.table import _without_communication, pictures, ratios_png, save_pictures, ttft_png
from partitioner.searches.best_split import best_split
from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import Cost, Evaluations, SearchResult, SearchTask
from partitioner.searches.grid import Grid
from partitioner.searches.record import SearchRecord, record_path
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.lookup_table import LookupTable
from runahead.config import Attention, PrefillOptions, Transfer
from runahead.context import ContextPartition, even
from runahead.picture_style import new_figure, rows_and_columns, seconds, set_title, tokens
from runahead.timeline import picture
from tests.examples import examples
from tests.partitioner.clusters import states_first
from tests.partitioner.test_lookup_table import FINGERPRINT, entry, table_of

COMPUTE = FittedCost.from_shape(
    num_layers=4,
    model_dim=512,
    kv_dim=256,
    mlp_dim=1024,
    vocab_size=1000,
    matmul_flops=1e11,
    attention_flops=5e10,
    step_s=1e-5,
)
MEASURED = MeasuredCost(
    first_s={64: 0.1, 128: 0.2},
    between_s={64: 0.2, 128: 0.4},
    own_s={64: 0.1, 128: 0.3},
    prefix_s={(64, 64): 0.1, (64, 128): 0.2, (128, 64): 0.2, (128, 128): 0.4},
    last_s={64: 0.3, 128: 0.4},
    num_places=4,
)
LINK = Link.from_gbps(10, latency_s=1e-5)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Matplotlib warns of what it cannot draw."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def cluster_of(ranks: int, **others: Any) -> Cluster:
    options: dict[str, Any] = {"compute": COMPUTE, "links": Links(ranks, LINK), "speed": [1.0] * ranks}
    return Cluster(kv_bytes_per_token=2048.0, **options | others)


def sparse(**options: Any) -> Cluster:
    """A cluster of a search with prefill.attention=xattention."""
    prefill = PrefillOptions(attention=Attention.xattention, **options)
    return Cluster.chain(COMPUTE, 2, LINK, kv_bytes_per_token=2048.0, state_bytes=0.0, prefill=prefill, backend="gloo")


def search_of(length: int, ranks: int) -> SearchResult:
    cluster = cluster_of(ranks)
    task = SearchTask(num_tokens=length, num_ranks=ranks, min_stride=64)
    return Grid().search(lambda split: simulate(split, cluster).ttft_s, task)


def searched() -> tuple[LookupTable, SearchRecord]:
    """A table over 1 to 3 ranks and two lengths, and its searches."""
    trails = {(length, ranks): search_of(length, ranks) for length in (1024, 2048) for ranks in (2, 3)}
    entries = [
        entry(list(search.partition.boundaries), ttft_s=search.cost_s, objective="replayed")
        for search in trails.values()
    ]
    alone = [
        entry([0, length], ttft_s=simulate(ContextPartition(boundaries=(0, length)), cluster_of(1)).ttft_s)
        for length in (1024, 2048)
    ]
    record = SearchRecord(trails=trails, clusters={ranks: cluster_of(ranks) for ranks in (1, 2, 3)})
    return table_of(*alone, *entries), record


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bound_of_layers_with_states_is_the_best_split_of_free_links(ranks: int) -> None:
    """Equal work is not, since ranks wait for states on any link."""
    cluster = states_first(ranks)
    bound = _without_communication(4096, replace(cluster, links=Links(ranks, LINK)))
    assert bound == pytest.approx(best_split(4096, ranks, cluster, min_stride=16).cost_s, rel=2e-3)  # other steps
    assert bound < 0.99 * simulate(equal_work(4096, ranks, cluster.compute), cluster).ttft_s


@pytest.mark.parametrize(("num_layers", "label"), [(4, "layer"), (2, "place (K,V or a state)")])
def test_a_simulated_timeline_says_that_it_numbers_places(
    num_layers: int, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with keys and values and a state in each layer has twice as many places as layers."""
    table, record = searched()
    model = replace(table.fingerprint.model, num_layers=num_layers)
    table = LookupTable(replace(table.fingerprint, model=model), table.entries)
    drawn: list[set[str]] = []

    def texts(figure: Any) -> bytes:
        drawn.append({each.get_text() for each in figure.findobj(Text)})
        return b""

    monkeypatch.setattr(picture, "png", texts)
    assert len([name for name, _ in pictures(table, record) if name.startswith("timeline")]) == len(drawn) == 2
    assert all({label, f"compute, coloured by {label}"} <= each for each in drawn)


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


TABLES = {
    "one entry": [entry([0, 600, 1000])],
    "one rank": [entry([0, 1000]), entry([0, 2000])],
    "one length": [entry([0, 1000]), entry([0, 600, 1000], ttft_s=0.6)],
    "an idle rank": [entry([0, 600, 600, 1000]), entry([0, 1000, 1500, 2000])],
    "all but one idle": [entry([0, 0, 1000])],
    "no common length": [entry([0, 1000]), entry([0, 900, 1500])],
    "tokens": [entry([0, 1]), entry([0, 1, 2])],
    "many lengths": [entry([0, length // 2, length], ttft_s=length / 1e3) for length in range(100, 4000, 150)],
    "many ranks": [entry([100 * rank for rank in range(ranks + 1)]) for ranks in range(1, 17)],
    "eight ranks": [entry([rank * length // 8 for rank in range(9)]) for length in (1000, 2000, 4000)],
    "far apart": [entry([0, 6, 10], ttft_s=1e-6), entry([0, 600_000, 1_000_000], ttft_s=1e5)],
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.sampled(3)
def test_any_table_has_pictures(name: str) -> None:
    table = LookupTable(replace(FINGERPRINT, link=None, name=""), TABLES[name])
    for png in (ratios_png(table, "what it holds for"), ttft_png(table, "what it holds for")):
        width, height = size_of(png)
        assert 300 <= width <= 5000 and 300 <= height <= 5000


def test_pictures_show_what_is_in_the_table() -> None:
    one, other = table_of(entry([0, 600, 1000])), table_of(entry([0, 610, 1000]))
    assert ratios_png(one) == ratios_png(table_of(entry([0, 600, 1000])))
    assert ratios_png(one) != ratios_png(other)


def test_bounds_are_drawn() -> None:
    table = table_of(*(entry([0, length], ttft_s=2.0) for length in (1000, 2000)), entry([0, 500, 1000], ttft_s=1.2))
    plain = ttft_png(table)
    assert ttft_png(table, free={(1000, 2): 1.1}) != plain
    assert ttft_png(table, ideal={2: 2.0}) != plain


@pytest.mark.parametrize("draw", [lambda s: boundary_png({s.partition.num_tokens: s}), grids_png])
@given(data=st.data())
@examples(8)
def test_any_search_has_a_picture(draw: Callable[[SearchResult], bytes], data: st.DataObject) -> None:
    ranks = 3 if draw is grids_png else 2
    length = data.draw(st.integers(1, 5000))
    evaluations = evaluations_of(lambda split: data.draw(st.floats(1e-3, 10.0)), length, ranks)
    for level in range(data.draw(st.integers(1, 12))):
        evaluations.level, evaluations.stride = level, data.draw(st.integers(0, 500))
        inner = data.draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1))
        evaluations((0, *sorted(inner), length))
    size_of(draw(evaluations.result()))


def test_a_long_subject_has_the_lines_that_it_needs() -> None:
    figure = new_figure(5.5, 4)
    axes = figure.add_subplot()
    set_title(
        figure, "A title", "SmolLM2-135M-Instruct, float32; a processor, 1 thread a rank; gloo, relay; 25 Gbit/s, 10 µs"
    )
    figure.draw_without_rendering()
    [note] = [each for each in axes.texts if "Gbit/s" in each.get_text()]
    box, title = note.get_window_extent(), figure.get_suptitle()
    assert title == "A title\n\n" and box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert axes.bbox.y1 < box.y0 and box.y1 < figure.bbox.y1


@pytest.mark.parametrize("best", [3, 250, 500, 750, 997])
def test_the_words_of_the_best_split_are_in_its_panel(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("partitioner.pictures.searches.png", drawn.append)
    evaluations = evaluations_of(lambda split: 1 + abs(split.boundaries[1] - best) / 2000, 1000, 2)
    for boundary in range(0, 1001, 50):
        evaluations((0, boundary, 1000))
    evaluations((0, best, 1000))
    boundary_png({1000: evaluations.result()})
    [figure] = drawn
    figure.draw_without_rendering()
    [axes] = figure.axes
    [words] = [each for each in axes.texts if "faster than even" in each.get_text() or best == 500]
    box = words.get_window_extent()
    assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
    assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1


def test_levels_of_the_grid_keep_all_steps_in_few_panels() -> None:
    search = search_of(8192, 3)
    panels = _levels(search.trail)
    assert [{step.stride for step in panel} for panel in panels[:3]] == [{512}, {256}, {128}]
    assert [step for panel in panels for step in panel] == search.trail
    many = [replace(step, level=number) for number, step in enumerate(search.trail)]
    assert len(_levels(many)) == MOST_PANELS
    assert [step for panel in _levels(many) for step in panel] == many


@pytest.mark.parametrize("number", range(1, 20))
def test_panels_have_places_and_few_are_left_over(number: int) -> None:
    rows, columns = rows_and_columns(number, 4)
    assert columns <= 4 and 0 <= rows * columns - number < rows


def test_numbers_are_short() -> None:
    assert [tokens(number) for number in (1000, 1024, 65_536, 1_048_576)] == ["1,000", "1k", "64k", "1,024k"]
    values = (1.5e-6, 0.0005, 0.08, 1.0, 2.345, 171.2, 5000.0)
    assert [seconds(value) for value in values] == [
        "1.5 µs",
        "500 µs",
        "80 ms",
        "1 s",
        "2.35 s",
        "171 s",
        "5,000 s",
    ]
    assert [seconds(value, aligned=True) for value in (0.08, 0.171, 2.0)] == ["80.0 ms", "171 ms", "2.00 s"]


# Files.


def test_pictures_are_named_after_the_table_and_drawn_again_from_what_is_beside_it(tmp_path: Path) -> None:
    table, record = searched()
    path = tmp_path / "tiny.json"
    record.save_beside(path)
    written = save_pictures(table, record, path)
    names = ["ratios", "ttft", "boundary", "grids", "timeline-2", "timeline-3"]
    assert [file.name for file in written] == [f"tiny.{name}.png" for name in names]
    assert sorted(tmp_path.iterdir()) == sorted([*written, record_path(path)])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = save_pictures(table, SearchRecord.beside(path), path, folder=elsewhere)
    assert [file.parent for file in again] == [elsewhere] * len(written)
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in written]


def test_what_earlier_runs_searched_is_kept(tmp_path: Path) -> None:
    _, record = searched()
    path = tmp_path / "tiny.json"
    (first, one), (second, two), *_ = record.trails.items()
    SearchRecord.beside(path).with_run({first: one}, {2: record.clusters[2]}).save_beside(path)
    SearchRecord.beside(path).with_run({second: two}, {}).save_beside(path)
    assert SearchRecord.beside(path) == SearchRecord(trails={first: one, second: two}, clusters={2: ANY_CLUSTER})


class AnyCluster:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster)


ANY_CLUSTER: Any = AnyCluster()


def test_an_empty_table_has_no_pictures(tmp_path: Path) -> None:
    assert list(pictures(table_of(), SearchRecord())) == []
    assert save_pictures(table_of(), SearchRecord(), tmp_path / "x.json") == [] and list(tmp_path.iterdir()) == []


CLUSTERS = {
    "plain": cluster_of(2),
    "measured": cluster_of(2, compute=MEASURED),
    "uneven": cluster_of(3, speed=[1.0, 0.5, 2.0], links=Links(3, LINK, {(0, 2): Link.from_gbps(1, shared=True)})),
    "free": cluster_of(2, links=None),
    "infinite": cluster_of(2, links=Links(2, Link(latency_s=0.0, bandwidth_Bps=math.inf))),
    "direct": cluster_of(2, transfer=Transfer.direct, layers_in_flight=5, pass_on_as_landed=False),
    "sparse": sparse(threshold=0.9),
    "sparse by density": sparse(density=0.25, stride=8),
    "sparse but for some layers": sparse(threshold=0.9, exact_layers=[1, 3]),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_that_was_kept_simulates_the_same(name: str, tmp_path: Path) -> None:
    cluster = CLUSTERS[name]
    SearchRecord(clusters={cluster.num_ranks: cluster}).save_beside(tmp_path / "x.json")
    [kept] = SearchRecord.beside(tmp_path / "x.json").clusters.values()
    length = 500
    ends = [length * rank // cluster.num_ranks for rank in range(cluster.num_ranks + 1)]
    split = ContextPartition(boundaries=tuple(ends))
    assert simulate(split, kept, record=True) == simulate(split, cluster, record=True)
    assert (kept.compute, kept.block) == (cluster.compute, cluster.block)


def evaluations_of(cost: Cost, num_tokens: int, num_ranks: int) -> Evaluations:
    return Evaluations(cost, SearchTask(num_tokens=num_tokens, num_ranks=num_ranks, min_stride=1))


def small_record(folder: Path) -> bytes:
    evaluations = evaluations_of(lambda split: 1.0 + split.boundaries[1], 100, 2)
    for boundary in (30, 20, 40):
        evaluations((0, boundary, 100))
    record = SearchRecord(trails={(100, 2): evaluations.result()}, clusters={2: cluster_of(2)})
    record.save_beside(folder / "x.json")
    return record_path(folder / "x.json").read_bytes()


def test_the_split_that_was_fitted_to_its_neighbours_stays_the_result(tmp_path: Path) -> None:
    path, best = tmp_path / "x.json", search_of(4096, 2)
    fitted = best.ending(even(4096, 2), 1.001 * best.cost_s)
    assert fitted.partition != best.partition
    SearchRecord(trails={(4096, 2): fitted}).save_beside(path)
    assert SearchRecord.beside(path).trails == {(4096, 2): fitted}
    # The first records did not say which split was found.
    plain = json.loads(record_path(path).read_text())
    del plain["searches"][0]["found"]
    record_path(path).write_text(json.dumps(plain))
    assert SearchRecord.beside(path).trails[4096, 2].partition == best.partition


@given(
    at=st.integers(0, 2000),
    removed=st.integers(0, 30),
    put=st.sampled_from([b"", b"-", b"1e999", b"null", b"{}", b"[]", b'"x"', b"NaN", b"\xff", b"99999999999"]),
)
@examples(300)
def test_a_damaged_record_is_told_in_one_sentence(
    at: int, removed: int, put: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "records"
    folder.mkdir(exist_ok=True)
    data = small_record(folder)
    at %= len(data)
    record_path(folder / "x.json").write_bytes(data[:at] + put + data[at + removed :])
    try:
        record = SearchRecord.beside(folder / "x.json")
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and "x.json.search.json is damaged; delete it" in str(error)
        return
    for (length, ranks), search in record.trails.items():
        assert search.partition.check(length, ranks)
        assert all(a <= b for step in search.trail for a, b in pairwise(step.boundaries))


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    plain = json.loads(small_record(tmp_path)) | {"version": 2}
    record_path(tmp_path / "x.json").write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ValueError, match="is damaged; delete it"):
        SearchRecord.beside(tmp_path / "x.json")
