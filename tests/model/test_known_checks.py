"""A model whose logits were compared before is not checked again; one that differs in anything is.

Reference: the same model, checked in a folder of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runahead.cache.attention import CausalAttention
from runahead.config import DType, Fuse, ModelName, ModelOptions
from runahead.kernels.operators import KERNELS
from runahead.model.checks import known_checks, logits_check
from runahead.model.checks.logits_check import LogitsCheck
from runahead.model.layers import cpu_linear
from runahead.model.model import Model
from tests import families

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.build("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each check that is done."""
    done: list[str] = []

    def counted(name: str) -> None:
        call = getattr(LogitsCheck, name)

        def noted(self: LogitsCheck, *args: Any) -> Any:
            done.append(name)
            return call(self, *args)

        monkeypatch.setattr(LogitsCheck, name, noted)

    for name in ("require", "require_states"):
        counted(name)
    return done


def load(folder: Path, **options: Any) -> Model:
    return Model.load(ModelOptions(name=ModelName.hf, path=str(folder), **options), CPU)


def logits(model: Model) -> torch.Tensor:
    """Of a text in three chunks."""
    ids_1S, cache = torch.tensor([families.prompt(12)]), model.empty_cache(12)
    found = []
    for start, end in ((0, 5), (5, 7), (7, 12)):
        attention = CausalAttention(cache, start=start, pads=[0])
        found.append(model.forward(ids_1S[:, start:end], attention, start=start, pads=[0]))
    return torch.stack(found)


def test_a_known_model_is_not_checked_again(cache: Path, folder: Path, checks: list[str]) -> None:
    first, second = load(folder), load(folder)
    assert (first.check, second.check) == ("done", "kept")
    assert checks == ["require"]
    assert torch.equal(logits(first), logits(second))
    assert len([*cache.iterdir()]) == 1


def edit(folder: Path, keeps_time: bool = False) -> None:
    """Change one value of the weights, which no sample need cover."""
    path = folder / "model.safetensors"
    before, weights = path.stat(), load_file(path)
    weights["model.layers.0.mlp.up_proj.weight"].view(-1)[1] += 0.5
    save_file(weights, path, metadata={"format": "pt"})
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_all(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = path.stat()
    save_file({name: 2 * values for name, values in load_file(path).items()}, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "a value of the weights": (edit, {}),
    "weights of the same size and time": (edit_all, {}),
    "config": (lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + "\n"), {}),
    "dtype": (lambda folder: None, {"dtype": DType.bfloat16}),
    "overrides": (lambda folder: None, {"overrides": {"rms_norm_eps": 1e-4}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_checked(change: str, cache: Path, folder: Path, checks: list[str]) -> None:
    load(folder)
    do, options = CHANGES[change]
    do(folder)
    assert load(folder, **options).check == "done"
    assert len(checks) == 2
    assert load(folder, **options).check == "kept"


def test_another_library_of_kernels_checks_again(
    cache: Path, folder: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, then one, then another that is of the same source.

    By names alone: none is loaded, so nothing is fused, which would call them.
    """
    for kernels, was_known in ((None, False), ("one", False), ("one", True), ("another", False), ("another", True)):
        monkeypatch.setattr(KERNELS, "in_use", kernels is not None)
        monkeypatch.setattr(
            "runahead.model.checks.checked_model.library_folder", lambda kernels=kernels: Path("kernels") / str(kernels)
        )
        assert (load(folder, fuse=Fuse.off).check == "kept") == was_known, kernels
    assert len(checks) == 3


def test_other_products_check_again(
    cache: Path, folder: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for takes, was_known in ((False, False), (True, False), (False, False), (False, True)):
        monkeypatch.setattr(cpu_linear, "takes_onednn", lambda takes=takes: takes)
        assert (load(folder).check == "kept") == was_known, takes


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (known_checks, "library_facts", {"torch": "another", "the code of runahead": "the same"}),
        (known_checks, "_device_facts", {"device": "another"}),
        (known_checks, "VERSION", 0),
    ],
)
def test_other_versions_and_devices_check_again(
    owner: Any,
    name: str,
    value: Any,
    cache: Path,
    folder: Path,
    checks: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(folder)
    monkeypatch.setattr(owner, name, (lambda *_: value) if callable(getattr(owner, name)) else value)
    assert load(folder).check == "done"
    assert load(folder).check == "kept"
    assert len(checks) == 2


DAMAGES: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "empty": lambda path, content: path.write_text(""),
    "cut": lambda path, content: path.write_text(path.read_text()[:-20]),
    "no text": lambda path, content: path.write_bytes(b"\xff\x00\xfe"),
    "a list": lambda path, content: path.write_text("[1]"),
    "nested": lambda path, content: path.write_text("[" * 100_000),
    "large": lambda path, content: path.write_text(path.read_text() + " " * known_checks.MOST_BYTES),
    "another fact": lambda path, content: path.write_text(
        json.dumps(content | {"facts": content["facts"] | {"torch": "1.0"}})
    ),
    "more": lambda path, content: path.write_text(json.dumps(content | {"outcome": {}})),
    "no facts": lambda path, content: path.write_text(json.dumps(content | {"facts": {}})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_no_outcome(damage: str, cache: Path, folder: Path, checks: list[str]) -> None:
    load(folder)
    [path] = cache.iterdir()
    DAMAGES[damage](path, json.loads(path.read_text()))
    assert load(folder).check == "done"
    assert load(folder).check == "kept"
    assert len(checks) == 2


def test_an_entry_that_cannot_be_kept_costs_a_check(cache: Path, folder: Path, checks: list[str]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("no folder")
    assert load(folder).check == "done"
    assert load(folder).check == "done"
    assert len(checks) == 2


def test_a_model_that_fails_is_not_known(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(logits_check, "differ", lambda *_: "off by 1")
        for _ in range(2):
            with pytest.raises(ValueError, match="is not computed right"):
                load(folder)
    assert not cache.exists()
    assert load(folder).check == "done"


def test_a_model_that_is_given_is_always_checked(cache: Path, checks: list[str]) -> None:
    for _ in range(2):
        assert Model(families.build("llama", dtype=torch.float32)).check == "done"
    assert len(checks) == 2 and not cache.exists()


@pytest.mark.parametrize("family", families.MARKING)
def test_a_model_with_nothing_to_compare_with_is_told_as_such(family: str, cache: Path, checks: list[str]) -> None:
    assert Model(families.build(family, dtype=torch.float32)).check == "none"
    assert checks == [] and not cache.exists()


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_layers_with_states_are_always_checked(family: str, cache: Path, tmp_path: Path, checks: list[str]) -> None:
    """What computes them is chosen by packages that are there, which may be others in the next run."""
    if family not in families.HYBRIDS:
        pytest.skip(f"transformers has no {family}")
    families.build(family, dtype=torch.float32).save_pretrained(tmp_path / "model")
    first = load(tmp_path / "model")
    num_checks = len(checks)
    second = load(tmp_path / "model")
    assert second.check == "done" and len(checks) == 2 * num_checks
    assert not cache.exists()
    assert first.gives_one_by_one == second.gives_one_by_one == (family == "jamba")
    assert torch.equal(logits(first), logits(second))
