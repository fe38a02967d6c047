"""partition=table: the ranks agree on one table, and on whether it holds for this run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from launch.infer import INFER
from launch.inputs.options import PartitionOptions, RunOptions, ineffective_settings
from launch.inputs.partitions import TablePartition, check_table, kvr_name, partitioner
from partitioner.cost.streaming import Streams
from partitioner.search import SEARCH
from partitioner.table.fingerprint import Fingerprint
from policies.duo_attention import DuoAttention
from policies.duo_table import DuoTable
from runahead import ContextPartition, Engine, GenerationOptions, Ranks, even
from runahead.config import Attention, PrefillOptions, Speculative, Transfer
from runahead.model.model import Model
from runahead.ranks.ranks import SharedError
from runahead.report import report_json
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import prompt
from tests.partitioner.test_lookup_table import FINGERPRINT, entry, table_of
from tests.ranks.tasks import tiny_model
from tests.test_report import OF_A_RUN, batch, generation

TABLE = table_of(entry([0, 60, 100]), entry([0, 120, 200]))


def options(path: Path, *, force: bool = False) -> PartitionOptions:
    return PartitionOptions(name="table", table=str(path), force=force)  # type: ignore[arg-type]


def split_by_rank_0s_table(ranks: Ranks, path: Path) -> tuple[int, ...]:
    """Only rank 0 has the file."""
    mine = path if ranks.rank == 0 else path.with_name("not there.json")
    return partitioner(options(mine), ranks)(150, ranks.size).boundaries


def outcome_of_check(ranks: Ranks, path: Path, force: bool) -> str:
    partition = partitioner(options(path), ranks)
    run = RunOptions(partition=options(path, force=force), prefill=PrefillOptions(transfer=Transfer.relay))
    try:
        check_table(partition, tiny_model("llama", torch.float32), ranks, run)
    except (ValueError, SharedError) as error:
        return f"{type(error).__name__}: {error}"
    return "fits"


def test_every_rank_splits_by_rank_0s_file(rank_pools: RankPools, tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.json")
    assert rank_pools.run(2, split_by_rank_0s_table, tmp_path / "table.json") == [(0, 90, 150)] * 2


def test_a_table_for_another_model_ends_all_ranks_unless_it_is_forced(rank_pools: RankPools, tmp_path: Path) -> None:
    TABLE.save(tmp_path / "other.json")
    first, second = rank_pools.run(2, outcome_of_check, tmp_path / "other.json", False)
    assert first.startswith(f"ValueError: lookup table {tmp_path / 'other.json'} is for model num layers 30, not 3")
    assert first.endswith("or use this one with partition.force=true")
    assert second.startswith("SharedError")
    assert rank_pools.run(2, outcome_of_check, tmp_path / "other.json", True) == ["fits", "fits"]


def test_a_table_for_this_model_fits(rank_pools: RankPools, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    mine = Fingerprint.of_model(
        model, device=torch.device("cpu"), backend="gloo", prefill=PrefillOptions(transfer=Transfer.relay)
    )
    replace(TABLE, fingerprint=replace(mine, threads=1)).save(tmp_path / "mine.json")
    assert rank_pools.run(2, outcome_of_check, tmp_path / "mine.json", False) == ["fits", "fits"]


def outcome_of_options(ranks: Ranks, path: Path, words: list[str]) -> str:
    run = INFER.compose(["prompt.text=a", "partition=table", f"partition.table={path}", *words])
    try:
        check_table(partitioner(run.partition, ranks), tiny_model("llama", torch.float32), ranks, run)
    except (ValueError, SharedError) as error:
        return str(error)
    return "fits"


def test_a_table_where_heads_stream_fits_runs_in_which_as_many_do(rank_pools: RankPools, tmp_path: Path) -> None:
    """Counted by hand: of 6 KV heads 3 stream, or 2; runs name them in a folder, and a search need not."""
    path, gates = tmp_path / "mine.json", tmp_path / "gates"
    prefill = PrefillOptions(attention=Attention.streaming_heads)
    mine = Fingerprint.of_model(
        tiny_model("llama", torch.float32),
        device=torch.device("cpu"),
        backend="gloo",
        prefill=prefill,
        streams=Streams(share=0.5, tokens=24),
    )
    replace(TABLE, fingerprint=replace(mine, threads=1)).save(path)
    gates.mkdir()
    for name, text in DuoTable(gates=[torch.tensor([0.1, 0.9])] * 3).files().items():
        (gates / name).write_text(text)
    given = ["policy=duo_attention", f"policy.heads={gates}", "policy.sinks=4", "policy.recent=20"]
    for more, differs in (
        (["prefill.attention=streaming_heads"], None),
        (["prefill.attention=streaming_heads", "policy.retrieval_share=0.66"], "33% of KV heads see 24 tokens"),
        (["prefill.attention=streaming_heads", "policy.recent=21"], "50% of KV heads see 25 tokens"),
        ([], "nothing"),
    ):
        first, _ = rank_pools.run(2, outcome_of_options, path, [*given, *more])
        if differs is None:
            assert first == "fits"
        else:
            wanted = "prefill.attention=streaming_heads 50% of KV heads see 24 tokens, not "
            assert wanted + ("" if differs == "nothing" else "streaming_heads ") + differs in first


@pytest.mark.parametrize(
    ("retrieving", "streamed"), [(0.0, 6), (0.05, 5), (0.25, 4), (0.41, 4), (0.42, 3), (0.75, 2), (0.9, 1), (1.0, 0)]
)
def test_a_search_counts_as_many_heads_as_a_run_that_names_them(
    tmp_path: Path, retrieving: float, streamed: int
) -> None:
    """Of 6 KV heads, the share is rounded to a number, at least one: by hand."""
    model, given = tiny_model("llama", torch.float32), {"retrieval_share": retrieving, "sinks": 4, "recent": 20}
    wanted = Streams(share=streamed / 6, tokens=24)
    expected, named = (
        RankPolicies.everywhere([DuoAttention(**given, **heads)])
        for heads in ({}, {"heads": str(gates_of_layers(tmp_path))})
    )
    assert Streams.expected(expected, model=model) == wanted
    found = Streams.of(named, model)
    assert (found.tokens, str(found)) == (24, str(wanted)) and found.share == pytest.approx(wanted.share)
    # Of 90 heads, as SmolLM2 has, 22 are a quarter.
    ninety = Streams.expected(expected, model=model, num_attending=45)
    if retrieving == 0.25:
        assert ninety.share == 68 / 90


def gates_of_layers(folder: Path) -> Path:
    for name, text in DuoTable(gates=[torch.tensor([0.1, 0.9])] * 3).files().items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("share", [0, 1])
def test_heads_that_stream_are_counted_of_all_shares(tmp_path: Path, share: int) -> None:
    """Of two ranks that share a model, one has all heads that retrieve here."""
    model = tiny_model("llama", torch.float32)
    own = [replace(shape, num_kv_heads=1) for shape in model.kv_shapes]
    policies = RankPolicies.everywhere([DuoAttention(heads=str(gates_of_layers(tmp_path)), sinks=4, recent=20)])
    with (
        patch.object(model, "kv_shapes", own),
        patch.object(Model, "num_shards", 2),
        patch.object(Model, "shard_number", share),
    ):
        assert Streams.of(policies, model) == Streams(share=0.5, tokens=24)
        assert Streams.expected(policies, model=model) == Streams(share=0.5, tokens=24)


def test_a_speculative_prefill_takes_the_table_of_a_search_without(rank_pools: RankPools, tmp_path: Path) -> None:
    """It is asked for the split of the whole prompt, which the draft reads, and of the tokens that stay."""
    path, share = tmp_path / "mine.json", PrefillOptions(speculative=Speculative.layers, speculative_share=0.5)
    mine = Fingerprint.of_model(
        tiny_model("llama", torch.float32), device=torch.device("cpu"), backend="gloo", prefill=PrefillOptions()
    )
    few = [entry([0, 60, 128]), entry([0, 40, 64])]
    replace(table_of(*few), fingerprint=replace(mine, threads=1)).save(path)
    assert rank_pools.run(2, outcome_of_options, path, ["prefill.speculative=layers"]) == ["fits", "fits"]
    asked, boundaries = rank_pools.run(2, splits_of_speculative, path, share)[0]
    assert asked == [(128, (0, 60, 128)), (64, (0, 40, 64))] and boundaries == [0, 40, 64]


def splits_of_speculative(
    ranks: Ranks, path: Path, prefill: PrefillOptions
) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """Lengths that the table was asked for, and the split of the result."""
    table, asked = partitioner(options(path), ranks), list[tuple[int, tuple[int, ...]]]()

    def recorded(num_tokens: int, num_ranks: int) -> ContextPartition:
        split = table(num_tokens, num_ranks)
        asked.append((num_tokens, split.boundaries))
        return split

    engine = Engine(tiny_model("llama", torch.float32), ranks, prefill=prefill, partition=recorded)
    batch = engine.generate([prompt(128)], GenerationOptions(max_new_tokens=1))
    return asked, batch.boundaries


def test_warnings_are_told_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    refuse = Mock(side_effect=AssertionError("a server splits in a thread, where warnings are not for use"))
    monkeypatch.setattr("warnings.warn", refuse)
    partition = TablePartition(TABLE)
    for _ in range(2):
        assert partition(400, 2).boundaries == (0, 240, 400)
        partition.check_fits(replace(FINGERPRINT, dtype="bfloat16"), force=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("warning: lookup table ") for line in lines)


def test_the_papers_names_are_in_the_report() -> None:
    run = RunOptions(partition=PartitionOptions(name="table", table="x"))  # type: ignore[arg-type]
    partition = TablePartition(TABLE)
    assert kvr_name(run, partition, [0, 60, 100]) == "KVR-S"
    assert kvr_name(run, partition, [0, 90, 150]) == "KVR-P"
    in_even_chunks = RunOptions(partition=PartitionOptions(name="even"))  # type: ignore[arg-type]
    assert kvr_name(in_even_chunks, even, [0, 50, 100]) == "KVR-E"
    assert kvr_name(RunOptions(), even, [0, 50, 100]) is None
    assert kvr_name(RunOptions(prefill=PrefillOptions(name="single")), even, [0, 100, 100]) is None  # type: ignore[arg-type]
    ratios = RunOptions(partition=PartitionOptions(name="ratios", ratios=[0.6, 0.4]))  # type: ignore[arg-type]
    assert kvr_name(ratios, lambda *_: even(100, 2), [0, 50, 100]) is None
    text = report_json([batch(generation())], **OF_A_RUN | {"partition": "table"}, kvr_names=["KVR-P"])
    assert json.loads(text)["partition"] == {"name": "table", "kvr": "KVR-P", "boundaries": [0, 6, 10]}


def test_force_without_a_table_has_no_effect() -> None:
    run = RunOptions(partition=PartitionOptions(force=True))
    assert ineffective_settings(run) == ["partition.force has no effect without partition=table"]


def test_the_search_and_the_run_of_the_page_have_the_same_threads() -> None:
    page = Path(__file__).parents[2].joinpath("docs/partitions.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(
        r"python -m partitioner\.search (.*)\n *torchrun --nproc-per-node=(\d) launch/infer\.py (.*)\n", page
    )
    assert found is not None
    search, run = SEARCH.compose(found[1].split()), INFER.compose(found[3].split())
    assert search.ranks.threads is not None and search.ranks.threads == run.ranks.threads
    assert int(found[2]) in (search.search.ranks or []) and search.table == run.partition.table
