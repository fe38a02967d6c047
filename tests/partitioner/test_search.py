"""The search program: finds splits for a model, keeps what it measured, and tells every mistake in one line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from partitioner.cost.places import Places
from partitioner.cost.streaming import StreamingCost, Streams
from partitioner.measure import LiveCost, ping, probe_compute
from partitioner.options import SearchRun
from partitioner.search import SEARCH, main, search
from partitioner.searches.points import Points
from partitioner.searches.record import SearchRecord
from partitioner.table.lookup_table import LookupTable
from policies.duo_table import DuoTable
from runahead import ContextPartition, Model, PrefillOptions, Ranks, even
from tests.conftest import RankPools
from tests.exit_status import exit_status
from tests.families import build, save_tiny_config
from tests.ranks.tasks import tiny_model


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return save_tiny_config(tmp_path / "model")


def options(config: Path, table: Path, *more: str) -> list[str]:
    return [
        "model=random",
        f"model.config={config}",
        f"table={table}",
        "search.lengths=[128,256]",
        "search.ranks=[1,2,3]",
        "search.repeats=1",
        "ranks.threads=1",
        "ranks.device=cpu",
        *more,
    ]


QUICK = ("link.gbps=10", "search.lengths=[128]", "search.ranks=[1,2]")
"""Options of tests that are not about what is found."""


def ended(args: list[str]) -> int:
    return exit_status(main, args)


@pytest.mark.parametrize("objective", ["replayed", "modelled"])
def test_search_writes_a_table_with_every_length_and_number_of_ranks(
    config: Path, tmp_path: Path, objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    # A tiny model's points are noise, which interpolation cannot follow: no lengths are added.
    assert main(options(config, path, f"search.objective={objective}", "link.gbps=10", "search.max_loss=null")) == 0
    table = LookupTable.load(path)
    assert [(entry.length, entry.ranks) for entry in table.entries] == [
        (length, ranks) for length in (128, 256) for ranks in (1, 2, 3)
    ]
    assert {entry.objective for entry in table.entries} == {objective}
    assert "128" in capsys.readouterr().out
    assert {file.suffix for file in tmp_path.iterdir() if file.is_file()} >= {".json", ".png"}


def test_layers_of_the_config_are_planned_for_though_fewer_are_run(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    more = ("model.layers=2", "link.gbps=10", "search.lengths=[128]", "search.ranks=[1]")
    assert main(options(config, path, *more)) == 0
    assert LookupTable.load(path).fingerprint.model.num_layers == 4


def test_second_search_measures_no_compute_again(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    assert main(options(config, path, *QUICK)) == 0
    monkeypatch.setattr("partitioner.measure.probe_compute", None)  # calling it would fail
    assert main(options(config, path, *QUICK)) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["link.gbps=-1"], "link.gbps=-1.0 must be above 0"),
        ([], "link.gbps=<1e9 bits per second> is needed"),
        (["search.objective=measured"], "needs 3 ranks to be measured but 1 were started"),
        (["link.gbps=1", "search.ranks=[8]", "search.method=grid"], "limited to 5 ranks"),
        (["link.gbps=1", "search.max_loss=0"], "search.max_loss=0.0 must be a share of TTFT above 0"),
        (["link.gbps=1", "prefill=single"], "prefill=single has no partition"),
        (["link.gbps=1", "search.lengths=[]"], "search.lengths=[] must be a list"),
        (["link.gbps=1", "serach.lengths=[1]"], "did you mean search.lengths?"),
        (["link.gbps=1", "table=missing/t.json"], "there is no folder"),
    ],
)
def test_a_mistake_is_one_line(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert ended(options(config, tmp_path / "table.json", *more)) in (1, 2)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0], errors
    assert not (tmp_path / "table.json").exists()


def test_table_of_another_model_is_not_added_to(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    assert main(options(config, path, *QUICK)) == 0
    before = path.read_text()
    settings = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps(settings | {"hidden_size": 64}))
    capsys.readouterr()
    assert ended(options(config, path, *QUICK)) == 2
    assert "model dim" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["prefill.layers_in_flight=4"], "is for layers_in_flight 3, not 4; search splits for this model"),
        (
            ["search.speeds=[1,1,0.5]"],
            "is for ranks all alike, not ranks of speeds 1, 1, 0.5; search splits for this",
        ),
    ],
)
def test_table_of_another_plan_is_not_added_to(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    path = tmp_path / "table.json"
    assert main(options(config, path, "link.gbps=10", "search.lengths=[128]")) == 0
    before = path.read_text()
    capsys.readouterr()
    assert ended(options(config, path, "link.gbps=10", "search.lengths=[128]", *more)) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == before


STREAMS = ("prefill.attention=streaming_heads", "policy=duo_attention", "policy.sinks=4", "policy.recent=20")


def gates_of(config: Path, folder: Path) -> Path:
    """A table of gates for the model of a config, as the authors of DuoAttention publish them."""
    sizes = json.loads((config / "config.json").read_text())
    gates = torch.rand(sizes["num_hidden_layers"], sizes["num_key_value_heads"], generator=torch.Generator())
    folder.mkdir()
    for name, text in DuoTable(gates=list(gates)).files().items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("names_heads", [False, True])
def test_a_table_where_heads_stream_is_of_as_many(config: Path, tmp_path: Path, names_heads: bool) -> None:
    """Whether the heads were named or only their share, and with another number of them or of tokens another one."""
    heads = [f"policy.heads={gates_of(config, tmp_path / 'gates')}"] if names_heads else []
    args = ["link.gbps=10", "search.objective=modelled", "search.lengths=[128]", "search.ranks=[2]", *STREAMS, *heads]
    for more, words in (
        ([], "50% of KV heads see 24 tokens"),
        (["policy.retrieval_share=0.75"], "25% of KV heads see 24 tokens"),
    ):
        path = tmp_path / f"{len(more)}.json"
        assert main(options(config, path, *args, *more)) == 0
        assert LookupTable.load(path).fingerprint.attention == f"streaming_heads {words}"
        [cluster] = SearchRecord.beside(path).clusters.values()
        assert cluster.streams == Streams(share=float(words.partition("%")[0]) / 100, tokens=24)
        assert isinstance(cluster.compute, StreamingCost) and cluster.compute.streams == cluster.streams
    with pytest.raises(ValueError, match="is for prefill.attention=streaming_heads 50% of KV heads see 24 tokens, not"):
        LookupTable.load(tmp_path / "0.json").check_fits(LookupTable.load(path).fingerprint)


def searched(ranks: Ranks, args: list[str]) -> str:
    return search(SEARCH.compose(args), ranks).fingerprint.attention


def test_a_policy_of_a_users_file_says_on_several_ranks_how_many_heads_stream(
    config: Path, tmp_path: Path, rank_pools: RankPools
) -> None:
    """Ranks that have not loaded the file cannot read what rank 0 made of it."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n\nfrom policies.duo_attention import DuoAttention\n\n\n"
        "@dataclass(kw_only=True)\nclass Mine(DuoAttention):\n    pass\n"
    )
    given = ["policy=file", f"policy.path={path}", "policy.options={sinks:4,recent:20}", STREAMS[0], "link.gbps=10"]
    args = options(config, tmp_path / "table.json", "search.objective=modelled", "search.lengths=[128]", *given)
    told = "streaming_heads 50% of KV heads see 24 tokens"
    assert rank_pools.run(2, searched, [*args, "search.ranks=[2]"]) == [told] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([STREAMS[0]], "takes the heads that stream from a cache policy that runs alone"),
        ([STREAMS[0], "policy=snapkv"], "takes the heads that stream from a cache policy that runs alone"),
        (
            STREAMS[:2],
            "policy=duo_attention without policy.heads does not say how many tokens stay; give policy.sinks=",
        ),
        ([*STREAMS, "policy.retreival_share=0.5"], "has no option retreival_share"),
        ([*STREAMS, "search.objective=measured", "search.ranks=[1]", "link.gbps=null"], "needs to know which heads"),
    ],
)
def test_a_policy_that_does_not_say_which_heads_stream_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Sequence[str], message: str
) -> None:
    assert ended(options(config, tmp_path / "table.json", *QUICK, *more)) in (1, 2)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0], errors


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["policy=snapkv"], ["policy=snapkv has no effect here without prefill.attention=streaming_heads"]),
        (STREAMS, []),
        (["prefill.attention=xattention", "prefill.exact_layers=[1]", "prefill.density=0.5"], []),
        (
            ["prefill.exact_layers=[1]", "prefill.threshold=0.9"],
            [
                "prefill.threshold has no effect without prefill.attention=xattention",
                "prefill.exact_layers has no effect without prefill.attention=xattention",
            ],
        ),
    ],
)
def test_what_has_no_effect_is_told(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Sequence[str], said: list[str]
) -> None:
    assert ended(options(config, tmp_path / "table.json", *more)) in (1, 2)
    *told, error = capsys.readouterr().err.splitlines()
    assert told == [f"warning: {each}" for each in said] and "link.gbps=<1e9 bits per second> is needed" in error


@pytest.mark.parametrize("config_tells", [True, False])
def test_layers_with_windows_are_no_exact_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config_tells: bool
) -> None:
    """Refused before weights are made if the config tells the windows, else by masks before compute is measured."""
    build("gemma2").config.save_pretrained(tmp_path)
    if config_tells:
        monkeypatch.setattr("runahead.model.shares.load_model", None)  # calling it would fail
    else:
        for module in ("layer_types", "facts.of_model"):
            monkeypatch.setattr(f"runahead.features.{module}.attending_to_all", lambda config: [0, 1, 2])
    monkeypatch.setattr("partitioner.measure.probe_compute", None)
    given = options(tmp_path, tmp_path / "table.json", *QUICK, "prefill.attention=xattention")
    assert ended([*given, "prefill.exact_layers=[0,1]"]) in (1, 2)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("prefill.exact_layers=[0, 1] names 0, and the layers of model ") and "are 1;" in error


def test_layers_that_are_not_run_may_be_exact(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four are planned for, of which two are run."""
    path = tmp_path / "table.json"
    more = ["model.layers=2", "search.ranks=[1]", "prefill.attention=xattention", "prefill.exact_layers=[3]"]
    assert main(options(config, path, *QUICK, *more)) == 0
    assert "chooses keys in no layer" not in capsys.readouterr().err
    assert ended(options(config, path, *QUICK, *more[:-1], "prefill.exact_layers=[4]")) != 0
    capsys.readouterr()
    every = options(config, tmp_path / "exact.json", *QUICK, *more[:-1], "prefill.exact_layers=[0,1,2,3]")
    assert main(every) == 0
    assert "slower: prefill.attention=xattention chooses keys in no layer" in capsys.readouterr().err


def test_every_option_has_a_default_in_conf() -> None:
    assert SEARCH.compose(["table=t.json"]) == SearchRun(table="t.json")


def test_a_model_of_one_layer_is_probed_too() -> None:
    """A hybrid may have one attention layer: there is nothing between two of them."""
    model = Model(build("llama", num_hidden_layers=1, dtype=torch.float32), name="llama")
    cost = probe_compute(model, chunks=[8, 64], prefixes=[16, 64], repeats=1)
    assert cost.num_places == 1 and all(cost.last_s[chunk] > 0 for chunk in (8, 64))


def test_points_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    points = Points(path, {"model": "a"})
    cost = points.remembering(lambda partition: partition.boundaries[1] / 10)
    assert cost(ContextPartition(boundaries=(0, 5, 10))) == 0.5
    Points(path, {"model": "b"}).add((0, 7, 10), 9.0)
    with path.open("a") as file:
        file.write('{"purpose": {"model": "a"}, "bounda')
    assert Points(path, {"model": "a"}).read() == {(0, 5, 10): 0.5}


def probe(ranks: Ranks) -> tuple[dict[int, float], dict[tuple[int, int], float], float]:
    """Runs on a rank: compute, and the link."""
    places = Places.of_model(tiny_model("gemma2"), 9)
    cost = probe_compute(tiny_model("gemma2"), chunks=[8, 64], prefixes=[16, 64], repeats=1, places=places)
    link = ping(ranks, num_bytes=1 << 16, rounds=2)
    assert cost.num_places == 9
    return cost.own_s, cost.prefix_s, 0.0 if link is None else link.bandwidth_Bps


def live(ranks: Ranks) -> tuple[float, float, float]:
    """Runs on a rank: two partitions' costs and the best."""
    cost = LiveCost(tiny_model("llama"), ranks, PrefillOptions(), 48, repeats=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cost(even(48, ranks.size)), cost(ContextPartition(boundaries=(0, 40, 48))), cost.best_s


def test_compute_and_link_are_measured_on_live_ranks(rank_pools: RankPools) -> None:
    for own_s, prefix_s, bandwidth in rank_pools.run(2, probe):
        assert set(own_s) == {8, 64}
        assert set(prefix_s) == {(8, 16), (8, 64), (64, 16), (64, 64)}
        assert all(seconds > 0 for seconds in (*own_s.values(), *prefix_s.values()))
        assert bandwidth > 0


def test_live_cost_is_the_same_on_all_ranks(rank_pools: RankPools) -> None:
    first, second = rank_pools.run(2, live)
    assert first == second
    assert first[2] == min(first[:2])
