"""The simulated reproduction of the paper: its lines, the relations in them, and pictures drawn from them."""

import json

import pytest

from benchmarks.studies.paper_relations.__main__ import STUDY
from benchmarks.studies.paper_relations.tables import best_ranks

PICTURES = ["bounds", "published", "ranks", "transfer", "winners"]
# Sums of the same seconds in another order.
ROUNDING = 1 + 1e-9


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(lines, folder) of a quick run."""
    folder = tmp_path_factory.mktemp("relations")
    STUDY.main(["--quick", "--lines", str(folder / "lines.jsonl"), "--out", str(folder)])
    return [json.loads(line) for line in (folder / "lines.jsonl").open()], folder


def of(lines, **values):
    found = [line for line in lines if all(line[name] == value for name, value in values.items())]
    assert found, values
    return found


def test_every_configuration_has_one_line(made):
    lines, _ = made
    keys = [tuple(line[name] for name in ("study", "model", "ranks", "GBps", "tokens")) for line in lines]
    assert len(set(keys)) == len(keys)
    assert {line["ranks"] for line in lines} == {2, 4}
    assert len(of(lines, study="published")) == 2 * 4 * 2
    assert len(of(lines, study="today")) == 2 * 2 * 2 * 2


def test_a_searched_split_is_never_slower_than_an_even_one_and_never_faster_than_free_communication(made):
    for line in made[0]:
        if line["study"] != "noise":
            ttft_s = line["ttft_s"]
            assert ttft_s["TTFT(p)"] <= ttft_s["KVR-S"] * ROUNDING
            assert ttft_s["KVR-S"] <= ttft_s["KVR-E"] * ROUNDING
            assert ttft_s["KVR-S"] <= ttft_s["one rank"] * ROUNDING


def test_searched_chains_beat_tsp_as_published_and_by_more_on_slow_links(made):
    gains = {
        GBps: [line["ttft_s"]["TSP"] / line["ttft_s"]["KVR-S"] for line in of(made[0], study="published", GBps=GBps)]
        for GBps in (300, 10)
    }
    assert all(1 < fast < slow for fast, slow in zip(gains[300], gains[10], strict=True))


def test_one_rank_is_best_for_a_short_prompt_on_a_slow_link_and_all_are_on_a_fast_one(made):
    lines, _ = made
    for line in of(lines, study="more bandwidths", GBps=0.1, tokens=1024):
        assert best_ranks(lines, line) == (1, 1)
    for line in of(lines, study="today", GBps=300, tokens=8192):
        assert best_ranks(lines, line) == (4, 4)


def test_the_chain_leads_least_where_links_are_fast(made):
    # Zigzag balances compute as well, so nothing but traffic and calls is left to gain.
    def lead(line):
        return min(line["ttft_s"]["zigzag all-gather"], line["ttft_s"]["zigzag ring"]) / line["ttft_s"]["KVR-S"]

    for slow, fast in zip(*(of(made[0], study="today", GBps=GBps) for GBps in (1, 300)), strict=True):
        assert 0.95 < lead(fast) < lead(slow)


def test_a_wire_per_pair_is_no_slower_than_a_port_per_rank(made):
    for line in of(made[0], study="today"):
        for name in ("TSP dense", "TSP causal", "zigzag all-gather", "zigzag ring"):
            assert line["ttft_s"][name + ", wire per pair"] <= line["ttft_s"][name] * ROUNDING


def test_pictures_and_tables_come_from_the_lines(made, tmp_path, capsys):
    lines, folder = made
    assert sorted(path.stem for path in folder.glob("*.png")) == [f"paper_relations_{name}" for name in PICTURES]
    changed = json.loads(json.dumps(lines))
    for line in of(changed, study="published", ranks=4, tokens=12288, GBps=300):
        line["ttft_s"]["TSP"] = 7.77 * line["ttft_s"]["KVR-S"]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    STUDY.main(["--draw-only", "--lines", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path)])
    assert "| 1.42 | 7.77 |" in capsys.readouterr().out
    names = [f"paper_relations_{name}.png" for name in PICTURES]
    differ = [name for name in names if (tmp_path / name).read_bytes() != (folder / name).read_bytes()]
    assert differ == ["paper_relations_published.png"]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--draw-only", "--lines", "absent.jsonl"], "absent.jsonl has no lines yet; leave out --draw-only"),
        (["--quick", "--out", "absent"], "--out absent is not a folder; create it first"),
        (["--quick", "--lines", "absent/lines.jsonl"], "there is no folder"),
    ],
)
def test_bad_input_is_refused_before_any_work(arguments, remedy, capsys):
    with pytest.raises(SystemExit, match=remedy):
        STUDY.main(arguments)
    assert capsys.readouterr() == ("", "")
