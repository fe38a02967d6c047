"""What was kept for a model with one adapter is not used with another, also where no weight differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evaluation.plan import model_options
from launch.infer import INFER
from partitioner.table.fingerprint import Fingerprint
from partitioner.table.format import parse_table, table_json
from runahead import Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.config import Device, RanksOptions
from runahead.model.lora import adapter
from runahead.model.model import Model
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.store import model_key
from tests.families import prompt
from tests.model.lora.made import adapt, base, edit_tensors, need_peft, options
from tests.model.test_loading_hf import CPU


@pytest.fixture(autouse=True)
def _peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_peft()
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A model, and adapters that add nothing: their files alone differ."""
    base(tmp_path / "model")
    made = [adapt(tmp_path / "model", tmp_path / f"adapter{seed}", seed=seed) for seed in range(2)]
    for each in made:
        edit_tensors(each, lambda tensors: [tensors[name].zero_() for name in tensors if "lora_B" in name])
    return [tmp_path / "model", *made]


def table_of(model: Model) -> Fingerprint:
    return Fingerprint.of_model(model, device=CPU, backend="gloo", prefill=PrefillOptions())


def test_fingerprints_have_the_adapters_files(folders: list[Path], tmp_path: Path) -> None:
    model, one, other = folders
    plain, first, second, both = (Model.load(options(model, *each), CPU) for each in ([], [one], [other], [one, other]))
    models = [plain, first, second, both]
    weights = [torch.cat([each.flatten() for each in loaded.module.parameters()]) for loaded in models]
    assert all(torch.equal(each, weights[0]) for each in weights)
    for key in (lambda model: model.fingerprint, model_key, lambda model: table_of(model).key()):
        assert len({key(each) for each in models}) == 4
    assert [each.check for each in models] == ["done"] * 4
    one.rename(tmp_path / "moved")
    again = Model.load(options(model, tmp_path / "moved"), CPU)
    assert again.fingerprint == first.fingerprint and table_of(again).differences(table_of(first)) == []
    (difference,) = table_of(plain).differences(table_of(first))
    assert difference == f"model.adapter of digest nothing, not {first.adapters}"
    for fingerprint in (table_of(plain), table_of(first)):  # each has its own date
        assert parse_table(table_json(fingerprint, []).encode())[0] == fingerprint
    assert "adapters" not in table_json(table_of(plain), [])


def test_a_check_that_was_passed_is_known_by_the_adapter(folders: list[Path]) -> None:
    model, one, other = folders
    assert [Model.load(options(model, each), CPU).check for each in (one, one, other)] == ["done", "kept", "done"]


def test_keys_of_evaluations_have_the_adapters_files(folders: list[Path]) -> None:
    def key(*adapters: Path) -> str:
        run = options(folders[0], *adapters)
        return model_options(run, [each.digest for each in adapter.find(run, progress=False)])

    assert len({key(), key(folders[1]), key(folders[2])}) == 3
    assert "adapter" not in key()


def test_prefixes_of_one_adapter_are_not_found_with_another(folders: list[Path], tmp_path: Path) -> None:
    """By the tree's files, which a later run finds. Reference: a run with the same adapter does find them."""
    model, one, other = folders
    ids, ranks = prompt(40), Ranks.start(RanksOptions(device=Device.cpu))

    def cached(*adapters: Path) -> int:
        tree = PrefixTree(1 << 30, folder=tmp_path / "prefixes")
        engine = Engine(Model.load(options(model, *adapters), CPU), ranks, tree=tree)
        [report] = engine.generate([ids], GenerationOptions(max_new_tokens=1)).ranks
        assert engine.prefixes is not None and report.reuse is not None
        tree.save()
        return report.reuse.cached_tokens

    assert cached(one) == 0 < cached(one)
    assert (cached(other), cached()) == (0, 0)


@pytest.mark.parametrize(("given", "found"), [("a", ["a"]), ("[a,org/b]", ["a", "org/b"]), ("[]", [])])
def test_one_adapter_or_a_list_is_an_option(given: str, found: list[str]) -> None:
    run: Any = INFER.compose(["model=hf", "model.path=x", f"model.adapter={given}", "prompt.text=a"])
    assert run.model.adapter == found
    assert ("adapter" in repr(run.model)) == bool(found)


def test_the_hash_is_of_both_files(folders: list[Path]) -> None:
    path = folders[1] / "adapter_config.json"
    before = adapter.find(options(folders[0], folders[1]), progress=False)[0].digest
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 8}))
    assert adapter.find(options(folders[0], folders[1]), progress=False)[0].digest != before
