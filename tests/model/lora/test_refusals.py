"""Adapters that cannot be merged are refused in a sentence, before weights are read."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from launch.infer import INFER
from runahead.config import ModelOptions
from runahead.model.loading import hf, load
from runahead.model.lora.adapter import WEIGHTS
from tests.model.lora.made import adapt, base, edit_settings, edit_tensors, need_peft
from tests.model.test_loading_hf import ATTENTION, CPU, load_hf, refusal


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_peft()
    folder = tmp_path_factory.mktemp("made")
    base(folder / "model")
    adapt(folder / "model", folder / "adapter")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and an adapter that a test may change. No weights of the model are read."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are read")

    for name in ("build", "build_share"):
        monkeypatch.setattr(hf, name, read)
    return tmp_path


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def change(do: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(folder, do)


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"

REFUSED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no folder": (shutil.rmtree, ["does not exist", "name an adapter's folder or a hub id"]),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), ["has no adapter_config.json"]),
    "config that is no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), ["cannot be read as JSON"]),
    "no weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        ["has no adapter_model.saf"],
    ),
    "truncated": (truncate, ["is not a complete safetensors file"]),
    "pointer": (
        lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        ["pointer of git-lfs"],
    ),
    "prompt tuning": (
        lambda f: edit_settings(f, peft_type="PROMPT_TUNING"),
        ["'PROMPT_TUNING'", "only LORA is merged"],
    ),
    "no kind": (lambda folder: edit_settings(folder, peft_type=None), ["of the kind None"]),
    "biases": (lambda folder: edit_settings(folder, bias="all"), ["biases of its own (bias='all')"]),
    "biases of B": (lambda folder: edit_settings(folder, lora_bias=True), ["biases of its own (lora_bias=true)"]),
    "repeated layers": (lambda folder: edit_settings(folder, layer_replication=[[0, 2], [1, 3]]), ["repeats layers"]),
    "changed base": (
        lambda folder: edit_settings(folder, init_lora_weights="pissa_niter_4"),
        ["it has changed itself"],
    ),
    "an option of later": (lambda folder: edit_settings(folder, use_later=True), ["use_later", "update peft"]),
    "unknown module": (
        lambda folder: edit_settings(folder, target_modules=["none"]),
        ["none", "not found in the base"],
    ),
    "missing tensor": (change(lambda tensors: tensors.pop(Q)), ["lacks 1 of the tensors", Q]),
    "missing saved module": (lambda f: edit_settings(f, modules_to_save=["lm_head"]), ["it lacks", "lm_head.weight"]),
    "one tensor too many": (
        change(lambda tensors: tensors.update({Q.replace("q_proj", "k_proj"): tensors[Q].clone()})),
        ["no place for 1 of its tensors", "layers.1.self_attn.k_proj.lora_A.weight"],
    ),
    "of more layers": (
        change(lambda tensors: tensors.update({Q.replace(".1.", ".9."): tensors[Q].clone()})),
        ["no place for 1 of its tensors", "layers.9.self_attn.q_proj"],
    ),
    "wrong shape": (
        change(lambda tensors: tensors.update({Q: torch.zeros(4, 31)})),
        [f"size mismatch for {Q}", "[4, 31]"],
    ),
    "another rank": (lambda folder: edit_settings(folder, r=8), ["size mismatch"]),
    "a base of other sizes": (
        lambda f: (
            base(f.parent / "other", hidden_size=64),
            edit_settings(f, base_model_name_or_path=str(f.parent / "other")),
        ),
        ["which has hidden_size 64", "this model has 32"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused(case: str, folder: Path) -> None:
    spoil, words = REFUSED[case]
    spoil(folder / "adapter")
    message = refusal(lambda: load_hf(folder / "model", adapter=str(folder / "adapter")))
    assert f"model.adapter={folder / 'adapter'}" in message
    assert all(word in message for word in words), message


def test_without_peft_the_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    message = refusal(lambda: load_hf(folder / "model", adapter=str(folder / "adapter")))
    assert "needs the package peft" in message and "pip install 'runahead[adapters]'" in message


def test_an_adapter_in_the_place_of_a_model_is_told(folder: Path) -> None:
    message = refusal(lambda: load_hf(folder / "adapter"))
    assert "holds an adapter (LORA for" in message and "this folder with model.adapter" in message


def test_two_adapters_that_replace_a_weight_are_refused(folder: Path) -> None:
    given = [str(adapt(folder / "model", folder / name, modules_to_save=["lm_head"])) for name in ("one", "other")]
    message = refusal(lambda: load_hf(folder / "model", adapter=given))
    assert "replaces lm_head.weight, which an adapter before it changes" in message


def test_numbers_that_are_not_finite_are_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "adapter", tmp_path / "a")
    edit_tensors(tmp_path / "a", lambda tensors: tensors[Q].fill_(float("inf")))
    message = refusal(lambda: load_hf(made / "model", adapter=str(tmp_path / "a")))
    assert "model.layers.1.self_attn.q_proj.weight that are not finite" in message


def test_stored_digits_that_would_be_rounded_twice_are_refused(tmp_path: Path) -> None:
    """Experts that are stored one by one, in more digits than the model has."""
    need_peft()
    base(tmp_path / "model", "mixtral")
    adapt(tmp_path / "model", tmp_path / "a", target_parameters=["experts.down_proj"])
    message = refusal(lambda: load_hf(tmp_path / "model", adapter=str(tmp_path / "a"), dtype="bfloat16"))
    assert "made of several stored tensors and would be rounded twice; use model.dtype=float32" in message


@pytest.mark.parametrize(("name", "is_told"), [("org/base", True), ("org/Model", False), (None, False)])
def test_the_name_of_another_base_is_told(name: str | None, is_told: bool, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "adapter", tmp_path / "a")
    edit_settings(tmp_path / "a", base_model_name_or_path=name)
    run = ModelOptions(name="hf", path=str(made / "model"), adapter=[str(tmp_path / "a")])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(run, device=CPU, attn_implementation=ATTENTION, progress=True)
    assert any("says that it was made for org/base" in str(each.message) for each in told) == is_told


def test_random_weights_have_no_adapters() -> None:
    assert "for the weights of a checkpoint" in refusal(
        lambda: INFER.compose(["model=random", "model.config=x", "model.adapter=a", "prompt.text=a"])
    )


def test_pickled_adapters_are_not_read(folder: Path) -> None:
    save_file({}, folder / "adapter" / "other.safetensors")
    (folder / "adapter" / WEIGHTS).unlink()
    assert "can run any code" in refusal(lambda: load_hf(folder / "model", adapter=str(folder / "adapter")))
