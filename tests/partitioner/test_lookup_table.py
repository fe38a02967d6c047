"""A lookup table gives valid splits for every length, merges by a stated rule, and tells damage in one sentence."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import warnings
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from partitioner.cost.link import Link, Links
from partitioner.cost.places import Places
from partitioner.searches.best_split import best_split
from partitioner.table.fingerprint import OPTIONS, Fingerprint, ModelShape
from partitioner.table.format import parse_table, table_json
from partitioner.table.lookup_table import SHORTEST_CHUNK, LookupTable, TableEntry, TableWarning
from runahead import Model
from runahead.config import Fuse, PrefillOptions, Transfer
from runahead.kernels.operators import KERNELS
from runahead.model.layers import cpu_linear
from tests.examples import examples
from tests.families import build, throughout
from tests.partitioner.clusters import llama, llama_cluster

SHAPE = ModelShape(
    type="llama", num_layers=30, model_dim=576, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152, mlp_dim=1536
)
FINGERPRINT = Fingerprint(
    model=SHAPE,
    dtype="float32",
    device="a processor",
    threads=1,
    backend="gloo",
    transfer="relay",
    link=Link.from_gbps(25, latency_s=1e-5),
    name="SmolLM2",
    versions={"python": "3.11.9", "torch": "2.13.0", "runahead": None},
    date="2026-01-31T12:00:00Z",
)
OBJECTIVES = ("measured", "replayed", "modelled")


def entry(boundaries: list[int], *, ttft_s: float = 1.0, objective: str = "measured", **others: Any) -> TableEntry:
    others = {"date": "2026-01-31T12:00:00Z"} | others
    return TableEntry(
        length=boundaries[-1],
        ranks=len(boundaries) - 1,
        boundaries=tuple(boundaries),
        ttft_s=ttft_s,
        objective=objective,
        **others,
    )


def from_shares(length: int, shares: list[float], **others: Any) -> TableEntry:
    """All shares times the length must be whole."""
    ends = [length * sum(shares[: i + 1]) for i in range(len(shares))]
    assert all(abs(end - round(end)) < 1e-6 for end in ends)
    return entry([0, *map(round, ends)], **others)


def table_of(*entries: TableEntry) -> LookupTable:
    return LookupTable(FINGERPRINT, list(entries))


@st.composite
def entries_of(draw: st.DrawFn, length: int, ranks: int) -> TableEntry:
    inner = draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1))
    return entry(
        [0, *sorted(inner), length],
        ttft_s=draw(st.floats(1e-3, 1e3)),
        objective=draw(st.sampled_from(OBJECTIVES)),
        date=draw(st.sampled_from(["", "2026-01-31T12:00:00Z", "2026-02-01T00:00:00Z"])),
        spread=draw(st.none() | st.floats(0, 1)),
    )


@st.composite
def tables(draw: st.DrawFn, min_entries: int = 1, longest: int = 5000) -> LookupTable:
    pairs = st.tuples(st.integers(1, longest), st.integers(1, 5))
    keys = draw(st.lists(pairs, min_size=min_entries, max_size=8, unique=True))
    return table_of(*[draw(entries_of(*key)) for key in keys])


def quiet_lookup(table: LookupTable, length: int, ranks: int) -> tuple[int, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        return table.lookup(length, ranks).boundaries


# Lookups.


@given(table=tables(), length=st.integers(1, 12_000))
def test_boundaries_sum_to_the_length_and_do_not_decrease(table: LookupTable, length: int) -> None:
    for ranks in table.ranks():
        boundaries = quiet_lookup(table, length, ranks)
        assert boundaries[0] == 0 and boundaries[-1] == length and len(boundaries) == ranks + 1
        assert all(a <= b for a, b in pairwise(boundaries))


@given(table=tables())
def test_an_entry_is_found_as_it_is(table: LookupTable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in table.entries:
            assert table.lookup(each.length, each.ranks).boundaries == each.boundaries


@given(data=st.data(), ranks=st.integers(2, 5), low=st.integers(200, 5000), gap=st.integers(2, 5000))
def test_ratios_are_interpolated_linearly(data: st.DataObject, ranks: int, low: int, gap: int) -> None:
    below, above = data.draw(entries_of(low, ranks)), data.draw(entries_of(low + gap, ranks))
    assume(below.partition.chain == above.partition.chain)
    length = data.draw(st.integers(low, low + gap))
    boundaries = table_of(below, above).lookup(length, ranks).boundaries
    share = (length - low) / gap
    for got, first, second in zip(boundaries, below.boundaries, above.boundaries, strict=True):
        ratio = (1 - share) * first / low + share * second / (low + gap)
        assert abs(got - ratio * length) <= 0.5 + 1e-6  # rounding to a whole token


def test_the_papers_10k_from_8k_and_12k() -> None:
    shorter, longer = [0.360, 0.260, 0.205, 0.175], [0.340, 0.250, 0.215, 0.195]
    table = table_of(from_shares(8000, shorter), from_shares(12_000, longer))
    partition = table.lookup(10_000, 4)
    assert [chunk / 10_000 for chunk in partition.chunk_lengths] == [0.350, 0.255, 0.210, 0.185]
    partition = table_of(from_shares(8192, [0.375, 0.25, 0.1875, 0.1875]), from_shares(12_288, [0.25] * 4)).lookup(
        10_240, 4
    )
    assert partition.chunk_lengths == [3200, 2560, 2240, 2240]


def test_of_ranks_that_are_alike_it_does_not_matter_which_are_idle() -> None:
    entries = from_shares(1000, [0.6, 0.0, 0.4]), from_shares(2000, [0.5, 0.5, 0.0])
    assert table_of(*entries).lookup(1400, 3).chunk_lengths == [784, 0, 616]
    assert table_of(*entries).lookup(1600, 3).chunk_lengths == [864, 736, 0]
    unlike = LookupTable(replace(FINGERPRINT, speeds=(1.0, 0.5, 1.0)), list(entries))
    assert unlike.lookup(1400, 3).chunk_lengths == [840, 0, 560]


def test_where_other_ranks_are_idle_the_nearer_entrys_ratios_are_taken() -> None:
    table = table_of(from_shares(1000, [0.6, 0.4, 0.0]), from_shares(2000, [0.5, 0.3, 0.2]))
    assert table.lookup(1400, 3).chunk_lengths == [840, 560, 0]
    assert table.lookup(1500, 3).chunk_lengths == [750, 450, 300]


@given(table=tables(), length=st.integers(1, 12_000))
def test_a_length_outside_the_table_warns_and_takes_the_nearest_ratios(table: LookupTable, length: int) -> None:
    for ranks in table.ranks():
        entries = table.entries_for(ranks)
        nearest = entries[0] if length < entries[0].length else entries[-1]
        if entries[0].length <= length <= entries[-1].length:
            continue
        with pytest.warns(TableWarning, match=f"split as one of {nearest.length} is") as caught:
            partition = table.lookup(length, ranks)
        assert len(caught) == 1 and "\n" not in str(caught[0].message)
        if length > nearest.length:
            for got, known in zip(partition.boundaries, nearest.boundaries, strict=True):
                assert abs(got - known * length / nearest.length) <= 0.5 + 1e-6


@given(shares=st.lists(st.integers(0, 100), min_size=1, max_size=6), length=st.integers(1, 3000))
def test_a_short_prompts_chunks_are_empty_or_long_enough(shares: list[int], length: int) -> None:
    assume(sum(shares) > 0)
    ends = [3001 * sum(shares[: i + 1]) // sum(shares) for i in range(len(shares))]
    known = entry([0, *ends])
    chunks = [b - a for a, b in pairwise(quiet_lookup(table_of(known), length, len(shares)))]
    shortest = min(SHORTEST_CHUNK, *(chunk for chunk in known.partition.chunk_lengths if chunk))
    assert sum(chunks) == length
    assert all(chunk == 0 or chunk >= min(shortest, length) for chunk in chunks)


def test_a_number_of_ranks_without_entries_is_an_error() -> None:
    table = table_of(entry([0, 100]), entry([0, 50, 100]))
    with pytest.raises(ValueError, match=r"no split for 3 ranks; start as many as it has entries for \(1, 2\)"):
        table.lookup(100, 3)
    with pytest.raises(ValueError, match="has no entries; fill it"):
        table_of().partition(100, 2)
    with pytest.raises(ValueError, match="no split for up to 2 ranks"):
        table_of(entry([0, 1, 2, 3])).partition(100, 2)
    with pytest.raises(ValueError, match="0 tokens"):
        table.lookup(0, 2)


# The number of ranks.


def test_the_best_number_of_ranks_has_the_earliest_first_token() -> None:
    """The paper's Appendix B: 2k tokens at 10 GB/s take 0.16 s on 2 GPUs and 0.19 s on 4."""
    table = table_of(
        entry([0, 2000], ttft_s=0.24),
        entry([0, 1000, 2000], ttft_s=0.16),
        entry([0, 500, 1000, 1500, 2000], ttft_s=0.19),
        entry([0, 8000], ttft_s=2.0),
        entry([0, 4000, 8000], ttft_s=1.0),
        entry([0, 2000, 4000, 6000, 8000], ttft_s=0.6),
    )
    assert table.best_ranks(2000) == 2
    assert table.best_ranks(8000) == 4
    assert table.best_ranks(8000, max_ranks=3) == 2
    assert table.best_ranks(8000, max_ranks=1) == 1
    lengths = range(2000, 8001, 100)
    counts = [table.best_ranks(length) for length in lengths]
    assert sorted(counts) == counts and set(counts) == {2, 4}


def test_entries_around_the_length_decide_the_number_of_ranks() -> None:
    table = table_of(
        entry([0, 500, 1000], ttft_s=0.5),
        entry([0, 2000, 4000], ttft_s=2.0),
        entry([0, 2000, 4000, 6000, 8000], ttft_s=0.1),
    )
    assert table.best_ranks(2000) == 2
    assert table.best_ranks(8000) == 4
    assert table.best_ranks(7000) == 4


def test_twice_as_many_ranks_have_to_bring_the_first_token_a_twentieth_earlier() -> None:
    for gain, best in ((0.04, 2), (0.06, 4)):
        table = table_of(entry([0, 50, 100], ttft_s=1.0), entry([0, 20, 50, 80, 100], ttft_s=1 - gain))
        assert table.best_ranks(100) == best
    # Three quarters of a doubling and more: a third rank has less to bring.
    assert table_of(entry([0, 50, 100], ttft_s=1.0), entry([0, 30, 60, 100], ttft_s=0.96)).best_ranks(100) == 3


@pytest.mark.slow
def test_a_table_takes_fewer_ranks_for_short_prompts_and_slow_links() -> None:
    """The paper's Appendix B, out of tables of Llama 7B: one rank or two on slow links, all of them on fast ones."""
    best: dict[float, list[int]] = {}
    for GBps in (0.1, 1, 10, 300):
        # Steps of 200 us: an eager forward of a short chunk is bound by launching its kernels.
        links = Links(8, Link.from_GBps(GBps, latency_s=50e-6))
        cluster = llama_cluster(8, None, compute=llama(step_s=200e-6), links=links)
        found = []
        for length, ranks in product((1024, 2048, 4096, 16384), (1, 2, 4, 8)):
            split = best_split(length, ranks, cluster, min_stride=length // 64)
            found.append(entry(list(split.partition.boundaries), ttft_s=split.cost_s, objective="modelled"))
        best[GBps] = [each.ranks for each in table_of(*found).best_entries()]
    for along_lengths in best.values():
        assert along_lengths == sorted(along_lengths), best
    for slower, faster in pairwise(best.values()):
        assert all(a <= b for a, b in zip(slower, faster, strict=True)), best
    assert best[0.1][0] == best[1][0] == 1 and best[300] == [8, 8, 8, 8], best
    assert {2, 4} & set(best[1] + best[10]), best


def test_fewer_ranks_are_taken_if_more_bring_next_to_nothing() -> None:
    table = table_of(
        entry([0, 100], ttft_s=1.0), entry([0, 50, 100], ttft_s=0.6), entry([0, 40, 40, 100], ttft_s=0.599)
    )
    assert table.best_ranks(100) == 2
    assert [best.ranks for best in table.best_entries()] == [2]
    assert table_of(entry([0, 100]), entry([0, 50, 100])).best_ranks(100) == 1


@given(table=tables(), length=st.integers(1, 6000), started=st.integers(1, 7))
def test_ranks_beyond_the_best_number_are_idle(table: LookupTable, length: int, started: int) -> None:
    assume(min(table.ranks()) <= started)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        partition = table.partition(length, started).check(length, started)
    best = table.best_ranks(length, started)
    assert partition.boundaries[: best + 1] == quiet_lookup(table, length, best)
    assert not any(partition.chunk_lengths[best:])


def test_more_ranks_than_the_table_knows_warn() -> None:
    table = table_of(entry([0, 100]), entry([0, 50, 100], ttft_s=0.5))
    with pytest.warns(TableWarning, match="splits for up to 2 ranks; 2 of 4 stay idle"):
        partition = table.partition(100, 4)
    assert partition.chunk_lengths == [50, 50, 0, 0]


def test_a_table_of_stages_speaks_of_stages() -> None:
    made = replace(FINGERPRINT, tensor=2)
    table = LookupTable(made, [entry([0, 50, 100]), entry([0, 30, 60, 100])])
    with pytest.warns(TableWarning, match="splits for up to 3 stages of 2 ranks; 1 of 4 stay idle"):
        table.partition(100, 4)
    with pytest.raises(ValueError, match=r"no split for 4 stages of 2 ranks; start as many as .* \(2, 3\)"):
        table.lookup(100, 4)
    with pytest.raises(ValueError, match="no split for up to 1 stage of 2 ranks"):
        table.best_ranks(100, 1)
    with pytest.warns(TableWarning, match="100 to 100 tokens on 2 stages of 2 ranks; a prompt of 90"):
        table.lookup(90, 2)


def test_partitions_have_the_papers_names() -> None:
    table = table_of(entry([0, 100, 200]), entry([0, 200, 400]), entry([0, 300], ttft_s=9.0))
    assert table.kvr_name(200, 2) == "KVR-S"
    assert table.kvr_name(300, 2) == "KVR-P"
    assert table.kvr_name(500, 2) == "KVR-P"
    assert table.kvr_name(300, 1) == "KVR-S"


# Merging.


@given(first=tables(), second=tables(), third=tables())
@examples(50)
def test_merging_keeps_everything_and_knows_no_order(
    first: LookupTable, second: LookupTable, third: LookupTable
) -> None:
    merged = first.merge(second)
    assert merged.entries == second.merge(first).entries
    assert merged.merge(third).entries == first.merge(second.merge(third)).entries
    assert first.merge(first).entries == first.entries
    keys = {(each.length, each.ranks) for table in (first, second) for each in table.entries}
    assert {(each.length, each.ranks) for each in merged.entries} == keys
    assert all(each in first.entries or each in second.entries for each in merged.entries)


@pytest.mark.parametrize(("kept", "dropped"), [(0.0, None), (0.01, 0.02)])
def test_of_entries_that_are_alike_the_one_with_less_spread_is_kept(kept: float, dropped: float | None) -> None:
    tables = [table_of(entry([0, 60, 100], spread=spread)) for spread in (kept, dropped)]
    assert tables[0].merge(tables[1]).entries == tables[1].merge(tables[0]).entries == tables[0].entries


@pytest.mark.parametrize(("better", "worse"), [*pairwise(OBJECTIVES), ("measured", "modelled")])
def test_merging_prefers_measured_to_replayed_to_modelled(better: str, worse: str) -> None:
    kept = entry([0, 60, 100], ttft_s=2.0, objective=better, date="")
    dropped = entry([0, 50, 100], ttft_s=1.0, objective=worse, date="2030-01-01T00:00:00Z")
    assert table_of(dropped).merge(table_of(kept)).entries == [kept]


def test_of_entries_alike_the_newer_is_kept_then_the_earlier_first_token() -> None:
    older, newer = entry([0, 60, 100], ttft_s=1.0), entry([0, 50, 100], ttft_s=2.0, date="2026-02-01T00:00:00Z")
    assert table_of(newer).merge(table_of(older)).entries == [newer]
    slower, faster = entry([0, 60, 100], ttft_s=2.0), entry([0, 50, 100], ttft_s=1.0)
    assert table_of(faster).merge(table_of(slower)).entries == [faster]


def test_a_merged_tables_fingerprint_has_the_newer_date_and_the_known_link() -> None:
    unlinked = replace(FINGERPRINT, link=None, date="2026-06-01T00:00:00Z", versions={"torch": "3"})
    merged = table_of().merge(LookupTable(unlinked, [])).fingerprint
    assert merged == replace(FINGERPRINT, date=unlinked.date, versions=unlinked.versions)
    assert LookupTable(unlinked, []).merge(table_of()).fingerprint == merged


def test_tables_for_different_models_are_not_merged() -> None:
    other = replace(FINGERPRINT, dtype="bfloat16")
    with pytest.raises(ValueError, match="is for dtype bfloat16, not float32; .* cannot be merged"):
        table_of().merge(LookupTable(other, []))


# The fingerprint.

OTHERS = {
    "dtype": "bfloat16",
    "device": "another processor",
    "threads": 2,
    "backend": "nccl",
    "transfer": "direct",
    "link": Link.from_gbps(100),
    "layers_in_flight": 4,
    "speeds": (1.0, 0.5),
    "tensor": 2,
    "model": replace(SHAPE, num_layers=32),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_table_for_something_else_is_an_error_and_a_warning_when_forced(name: str) -> None:
    other = replace(FINGERPRINT, **{name: OTHERS[name]})
    with pytest.raises(ValueError) as raised:
        table_of().check_fits(other)
    message = str(raised.value)
    assert name in message and "partitioner.search" in message and "\n" not in message
    options = re.findall(r"partitioner\.search (.*)table=<another file>$", message)
    assert options == [f"{OPTIONS[name]}={OTHERS[name]} " if name in OPTIONS else ""]
    with pytest.warns(TableWarning, match="used nevertheless"):
        table_of().check_fits(other, force=True)


def test_all_differences_are_told_at_once() -> None:
    other = replace(FINGERPRINT, dtype="bfloat16", model=replace(SHAPE, num_kv_heads=9, mlp_dim=None))
    found = FINGERPRINT.differences(other)
    assert found == ["model num kv heads 3, not 9", "model mlp dim 1536, not None", "dtype float32, not bfloat16"]


def test_dates_versions_and_names_are_not_compared() -> None:
    other = replace(FINGERPRINT, date="", versions={}, name="a fine-tune")
    assert FINGERPRINT.differences(other) == []
    assert FINGERPRINT.key() == other.key() and "\n" not in other.key()


def test_an_unknown_link_fits_and_a_measured_one_may_be_twice_as_fast() -> None:
    assert FINGERPRINT.differences(replace(FINGERPRINT, link=None)) == []
    pinged = replace(FINGERPRINT, link=Link.from_gbps(45, latency_s=1e-4), link_measured=True)
    assert FINGERPRINT.differences(pinged) == []
    assert FINGERPRINT.differences(replace(pinged, link=Link.from_gbps(55))) != []
    assert FINGERPRINT.differences(replace(pinged, link=Link.from_gbps(25, shared=True))) != []


def test_unknown_speeds_fit_and_joining_keeps_the_known_ones() -> None:
    unknown, unlike = replace(FINGERPRINT, speeds=None), replace(FINGERPRINT, speeds=(1.0, 0.5))
    assert unlike.differences(unknown) == unknown.differences(unlike) == []
    assert unknown.joined(unlike).speeds == unlike.joined(unknown).speeds == (1.0, 0.5)
    assert unlike.differences(FINGERPRINT) == ["ranks of speeds 1, 0.5, not ranks all alike"]


def test_a_table_without_the_later_fields_has_their_defaults() -> None:
    for name in ("layers_in_flight", "speeds"):
        fingerprint, _ = parse_table(damaged(f"fingerprint/{name}", ...))
        assert fingerprint == FINGERPRINT
    shipped = LookupTable.load(Path(__file__).parents[2] / "tables" / "smollm2-cpu-2.json")
    assert (shipped.fingerprint.layers_in_flight, shipped.fingerprint.speeds) == (3, ())


def test_stages_of_several_ranks_are_in_the_file_and_single_ranks_leave_it_as_it_was() -> None:
    assert "tensor" not in table_json(FINGERPRINT, []) and "tensor" not in FINGERPRINT.key()
    made = replace(FINGERPRINT, tensor=4)
    assert parse_table(table_json(made, []).encode()) == (made, [])
    assert made.key() != FINGERPRINT.key()
    assert made.differences(FINGERPRINT) == ["ranks.tensor=4, not 1"]


@pytest.mark.parametrize("speeds", [None, (), (1.0, 0.5)])
def test_speeds_survive_the_file(speeds: tuple[float, ...] | None) -> None:
    made = replace(FINGERPRINT, speeds=speeds, layers_in_flight=5)
    assert parse_table(table_json(made, []).encode()) == (made, [])


def test_given_links_must_be_the_same() -> None:
    given_link = replace(FINGERPRINT, link_measured=False)
    other = replace(given_link, link=Link.from_gbps(26, latency_s=1e-5))
    assert given_link.differences(other) == ["a link of 25 Gbit/s, 10 µs, not 26 Gbit/s, 10 µs"]


def test_the_fingerprint_of_a_model() -> None:
    with throughout(torch.float32):
        model = Model(build("llama", dtype=torch.float32), name="tiny")
    made = Fingerprint.of_model(
        model,
        device=torch.device("cpu"),
        backend="gloo",
        prefill=PrefillOptions(transfer=Transfer.direct),
        places=Places.of_model(model, 40),
    )
    config = model.config
    assert made.model == ModelShape(
        type="llama",
        num_layers=40,
        model_dim=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        mlp_dim=config.intermediate_size,
    )
    assert (made.dtype, made.backend, made.transfer, made.name) == ("float32", "gloo", "direct", "tiny")
    assert made.threads == torch.get_num_threads() and made.device.isprintable() and made.device
    assert parse_table(table_json(made, []).encode()) == (made, [])


def test_kernels_fused_modules_and_products_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All compute faster: neither times nor splits of one hold for others. Without them all is as it was before."""
    models = [Model(build("llama", dtype=torch.float32), fuse=fuse) for fuse in (Fuse.off, Fuse.on)]

    def fingerprints() -> list[Fingerprint]:
        return [
            Fingerprint.of_model(each, device=torch.device("cpu"), backend="gloo", prefill=PrefillOptions())
            for each in models
        ]

    monkeypatch.setattr(cpu_linear, "takes_onednn", lambda: False)
    found = []
    for in_use in (False, True):
        monkeypatch.setattr(KERNELS, "in_use", in_use)
        found += fingerprints()
    plain, fused, ours, both = found
    monkeypatch.setattr(cpu_linear, "takes_onednn", lambda: True)
    found.append(by_onednn := fingerprints()[1])
    assert len({each.key() for each in found}) == 5
    assert plain.key().endswith("|gloo|relay|3")
    assert not {"kernels", "fuse", "products"} & json.loads(table_json(plain, []))["fingerprint"].keys()
    assert plain.differences(fused) == ["model.fuse=off, not on"]
    assert plain.search_options(fused) == ["model.fuse=on"]
    assert fused.search_options(plain) == ["model.fuse=off"]
    assert plain.differences(both) == ["attention by kernels of torch, not runahead", "model.fuse=off, not on"]
    assert by_onednn.differences(both) == ["products by onednn, not torch"]
    for each in found:
        assert parse_table(table_json(each, []).encode()) == (each, [])
    with pytest.raises(ValueError, match=r"attention by kernels of runahead, not torch"):
        LookupTable(ours, []).check_fits(plain)


def test_what_older_files_call_auto_is_fused() -> None:
    fused = replace(FINGERPRINT, fuse="on")
    before = table_json(fused, []).replace('"fuse": "on"', '"fuse": "auto"')
    assert before != table_json(fused, [])
    assert parse_table(before.encode()) == (fused, [])


def test_the_remedy_names_what_the_table_was_not_searched_with() -> None:
    plain, int8 = replace(FINGERPRINT, products="onednn"), replace(FINGERPRINT, products="int8")
    adapted = replace(FINGERPRINT, adapters="abc")
    assert FINGERPRINT.search_options(plain) == [], "the same search finds what computes products here"
    assert plain.search_options(int8) == int8.search_options(int8) == ["model.weights=int8"]
    assert plain.search_options(adapted) == ["model.adapter=<as here>"]
    assert adapted.search_options(plain) == int8.search_options(plain) == []


# The file.


@given(table=tables(min_entries=0))
@examples(25)
def test_a_saved_table_is_loaded_as_it_was(table: LookupTable, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tables") / "table.json"
    table.save(path)
    loaded = LookupTable.load(path)
    assert (loaded.fingerprint, loaded.entries) == (table.fingerprint, table.entries)
    assert loaded.source == f"lookup table {path}"


def test_an_infinitely_fast_link_survives_the_file() -> None:
    free = replace(FINGERPRINT, link=Link(latency_s=0.0, bandwidth_Bps=math.inf))
    assert parse_table(table_json(free, []).encode()) == (free, [])


def test_saving_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    table_of(entry([0, 100])).save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            table_of(entry([0, 50, 100])).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_entry_is_a_line_of_the_file() -> None:
    text = table_json(FINGERPRINT, [entry([0, 60, 100]), entry([0, 120, 200])])
    lines = [line.strip().rstrip(",") for line in text.splitlines() if '"length"' in line]
    assert [json.loads(line)["boundaries"] for line in lines] == [[0, 60, 100], [0, 120, 200]]


def test_two_entries_for_one_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="two entries for 100 tokens on 2 ranks"):
        table_of(entry([0, 50, 100]), entry([0, 60, 100]))


VALID: dict[str, Any] = json.loads(table_json(FINGERPRINT, [entry([0, 60, 100]), entry([0, 120, 200], spread=0.01)]))


def damaged(path: str, value: Any) -> bytes:
    """The valid table with one value replaced, or taken out (...); a path is like "entries/0/length"."""
    table = copy.deepcopy(VALID)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    place = table
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(table).encode()


DAMAGE = {
    "nothing": (b"", "is not JSON"),
    "no JSON": (b"length,ranks\n1024,2\n", "is not JSON"),
    "cut off": (json.dumps(VALID).encode()[:-40], "is not JSON"),
    "no UTF-8": (b'{"a": "\xff"}', "is not JSON: byte 7"),
    "another JSON": (b"[1, 2]", "is not a lookup table"),
    "another format": (damaged("format", "other"), "is not a lookup table"),
    "too deep": (b"[" * 100_000, "nested too deep"),
    "twice": (b'{"a": 1, "a": 2}', "the field 'a' twice"),
    "a later version": (damaged("version", 2), "has version 2, but this program reads version 1"),
    "a version that is true": (damaged("version", True), "has version True"),
    "no fingerprint": (damaged("fingerprint", ...), "the table has no fingerprint"),
    "no entries": (damaged("entries", ...), "the table has no entries"),
    "an unknown field": (damaged("extra", 1), "the table has the unknown field 'extra'"),
    "no list": (damaged("entries", {}), "entries {} must be a list"),
    "no object": (damaged("entries/0", 7), "entry 1 7 must be an object with the fields boundaries"),
    "a missing field": (damaged("entries/1/ttft_s", ...), r"entry 2 \(200 tokens, 2 ranks\) has no ttft_s"),
    "a text for a number": (damaged("entries/0/length", "100"), "entry 1: length '100' must be a whole number"),
    "true for a number": (damaged("entries/0/ranks", True), "ranks True must be a whole number"),
    "half a token": (damaged("entries/0/length", 100.0), "length 100.0 must be a whole number"),
    "NaN": (damaged("entries/0/ttft_s", math.nan), "holds NaN, which is not a number"),
    "infinity": (damaged("entries/0/ttft_s", math.inf), "holds Infinity, which is not a number"),
    "too large": (json.dumps(VALID).replace('"ttft_s": 1.0', '"ttft_s": 1e999').encode(), "ttft_s inf must be"),
    "a huge whole number": (damaged("entries/0/ttft_s", 10**400), r"ttft_s 10+\.\.\. must be a number"),
    "endless digits": (json.dumps(VALID).replace("60", "6" * 9999).encode(), "is not JSON|limit"),
    "negative": (damaged("entries/0/ttft_s", -1), "ttft_s -1.0 must be a number of seconds above 0"),
    "a negative spread": (damaged("entries/1/spread", -0.1), "spread -0.1 must be at least 0, or null"),
    "a wrong sum": (damaged("entries/0/boundaries/2", 99), r"\[0, 60, 99\] must start at 0 and end at the length, 100"),
    "a wrong start": (damaged("entries/0/boundaries/0", 1), "must start at 0"),
    "unsorted boundaries": (damaged("entries/0/boundaries/1", 101), r"\[0, 101, 100\] must not decrease"),
    "too few boundaries": (damaged("entries/0/boundaries", [0, 100]), "must be 3 numbers for 2 ranks"),
    "no boundaries": (damaged("entries/0/boundaries", []), "must be 3 numbers for 2 ranks"),
    "boundaries of text": (damaged("entries/0/boundaries/1", None), "boundaries None must be a whole number"),
    "an unknown objective": (damaged("entries/0/objective", "guessed"), "'guessed' is not one of modelled, replayed"),
    "a date in words": (damaged("entries/0/date", "yesterday"), "date 'yesterday' must look like"),
    "unsorted entries": (damaged("entries", VALID["entries"][::-1]), "must ascend by length"),
    "repeated entries": (damaged("entries", VALID["entries"][:1] * 2), "must ascend by length"),
    "no layers": (damaged("fingerprint/model/num_layers", 0), "num_layers 0 must be at least 1"),
    "a speed of 0": (damaged("fingerprint/speeds", [1, 0]), r"speeds \[1.0, 0.0\] must be above 0"),
    "a speed in words": (damaged("fingerprint/speeds", "fast"), "speeds 'fast' must be a list of numbers"),
    "one layer in flight": (damaged("fingerprint/layers_in_flight", 1), "layers_in_flight 1 must be at least 2"),
    "no model": (damaged("fingerprint/model", None), "fingerprint.model None must be an object"),
    "a missing model field": (damaged("fingerprint/model/head_dim", ...), "fingerprint.model has no head_dim"),
    "a line break": (damaged("fingerprint/device", "a\nb"), r"device 'a\\nb' must be printable text"),
    "half a character": (damaged("fingerprint/name", "\ud800"), r"'\\ud800' must be printable text"),
    "a negative bandwidth": (damaged("fingerprint/link/bandwidth_Bps", -1.0), "fingerprint.link: .* must be above 0"),
    "a negative latency": (damaged("fingerprint/link/latency_s", -1.0), "fingerprint.link: .* at least 0"),
    "versions in a list": (damaged("fingerprint/versions", []), r"versions \[\] must be an object of texts"),
    "a version in numbers": (damaged("fingerprint/versions/torch", 2.13), "2.13 must be printable text or null"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_in_one_sentence_that_names_the_file(damage: str, tmp_path: Path) -> None:
    data, said = DAMAGE[damage]
    path = tmp_path / "table.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=said) as raised:
        LookupTable.load(path)
    assert str(raised.value).startswith(f"lookup table {path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["missing.json", ".", "no/such/folder.json", "nul\0.json"])
def test_a_file_that_cannot_be_read_is_told_in_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: .*; python -m partitioner.search writes tables"):
        LookupTable.load(os.fspath(tmp_path / name))


def reads_or_refuses(data: bytes) -> None:
    """Nothing but a ValueError of one line; and what is read can be used and written again."""
    try:
        fingerprint, entries = parse_table(data)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1, error
        return
    assert parse_table(table_json(fingerprint, entries).encode()) == (fingerprint, entries)
    table = LookupTable(fingerprint, entries)
    for each, length in product(entries, (1, 150, 5000)):
        quiet_lookup(table, length, each.ranks)


PLACES = [
    *VALID,
    *(f"fingerprint/{name}" for name in VALID["fingerprint"]),
    *(f"fingerprint/{part}/{name}" for part in ("model", "link", "versions") for name in VALID["fingerprint"][part]),
    *(f"entries/{number}" for number in range(2)),
    *(f"entries/{number}/{name}" for number in range(2) for name in asdict(entry([0, 1]))),
    *(f"entries/0/boundaries/{number}" for number in range(3)),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(path=st.sampled_from(PLACES), value=VALUES | st.just(...))
@examples(400)
def test_any_value_in_any_place_is_read_or_refused(path: str, value: Any) -> None:
    reads_or_refuses(damaged(path, value))


@given(
    at=st.integers(0, len(json.dumps(VALID)) - 1),
    removed=st.integers(0, 20),
    put=st.binary(max_size=4) | st.sampled_from([b"-", b"9", b"e5", b",", b"}", b"[", b'"', b"NaN", b"null"]),
)
@example(at=0, removed=0, put=b"\xef\xbb\xbf")
@examples(400)
def test_any_change_of_bytes_is_read_or_refused(at: int, removed: int, put: bytes) -> None:
    data = json.dumps(VALID).encode()
    reads_or_refuses(data[:at] + put + data[at + removed :])


@given(data=st.binary(max_size=40))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError) as raised:
        parse_table(data)
    assert len(str(raised.value).splitlines()) == 1
