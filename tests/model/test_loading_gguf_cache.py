"""A GGUF file is converted once: later loads give the same model without reading it again."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from runahead.config import ModelOptions
from runahead.model.loading import hf, load, load_config, load_tokenizer
from runahead.model.loading.gguf import cache as gguf_cache
from tests.model.test_loading_gguf import write_gguf
from tests.model.test_loading_hf import ATTENTION, CPU, load_hf, refusal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def conversions(cache: Path) -> list[Path]:
    return [each for each in cache.iterdir() if each.is_dir()]


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("the file was unpacked")


@pytest.mark.parametrize("form", [GGMLQuantizationType.F32, GGMLQuantizationType.BF16, GGMLQuantizationType.F16])
def test_later_loads_give_the_same_model_without_unpacking(
    form: GGMLQuantizationType, path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(path, form=form)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_cache, "converted", unwritable)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            direct = load_hf(path)
    first = load_hf(path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_cache, "_convert", fail)
        again = load_hf(path)
    assert len(conversions(cache)) == 1
    for loaded in (first, again):
        assert loaded.dtype == direct.dtype
        expected, weights = direct.module.state_dict(), loaded.module.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(direct.module.generation_config, name)
            assert getattr(loaded.module.generation_config, name) == value
        assert loaded.path == str(path)
        for text in ("hello world", "hello world<eos>", "  two  spaces, 12345 digits"):
            assert loaded.tokenizer(text).input_ids == direct.tokenizer(text).input_ids
        assert loaded.tokenizer.chat_template == direct.tokenizer.chat_template
    # Mapped: every page of the weights is the file's.
    assert again.memory.weights_bytes == sum(weight.nbytes for weight in again.module.parameters())


def unwritable(*_: Any, **__: Any) -> Any:
    raise OSError("x cannot be kept in y")


def test_config_and_tokenizer_are_read_from_the_conversion(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(path)
    options = ModelOptions(name="hf", path=str(path))
    config, tokens = load_config(options), load_tokenizer(options)("hello world").input_ids
    load_hf(path)
    monkeypatch.setattr(hf.checkpoints, "read_gguf", fail)
    assert load_config(options).to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
    assert load_tokenizer(options)("hello world").input_ids == tokens


def test_each_dtype_has_a_conversion(path: Path, cache: Path) -> None:
    write_gguf(path)
    load_hf(path)
    loaded = load_hf(path, dtype="bfloat16")
    assert {weight.dtype for weight in loaded.module.parameters()} == {torch.bfloat16}
    assert sorted(each.name.rpartition("-")[2] for each in conversions(cache)) == ["bfloat16", "float32"]


def test_changed_file_is_converted_anew_and_its_old_conversion_removed(path: Path, cache: Path) -> None:
    write_gguf(path)
    before, [old] = load_hf(path).module.state_dict(), conversions(cache)
    data = bytearray(path.read_bytes())
    data[-8:] = bytes(8)  # part of the last tensor; the size stays
    about = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    after = load_hf(path).module.state_dict()
    assert sum(not torch.equal(before[name], after[name]) for name in before) == 1
    assert conversions(cache) != [old] and len(conversions(cache)) == 1


def test_other_files_keep_their_conversions(path: Path, tmp_path: Path, cache: Path) -> None:
    write_gguf(path)
    write_gguf(tmp_path / "other.gguf", tokenizer=False)
    load_hf(path)
    load_hf(tmp_path / "other.gguf")
    assert len(conversions(cache)) == 2


def test_tied_weights_are_stored_once(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(path, tied=True)
    loaded = load_hf(path)
    assert loaded.module.lm_head.weight is loaded.module.get_input_embeddings().weight
    [folder] = conversions(cache)
    stored = gguf_cache.WEIGHTS
    assert (folder / stored).stat().st_size < loaded.memory.weights_bytes + 2**14


def test_interrupted_conversion_leaves_nothing(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_cache.Spill, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_hf(path)
    assert conversions(cache) == []
    assert load_hf(path).module is not None


def test_damaged_conversion_is_told_with_the_remedy(path: Path, cache: Path) -> None:
    write_gguf(path)
    load_hf(path)
    [folder] = conversions(cache)
    (folder / "model.safetensors").write_bytes(b"damaged")
    message = refusal(lambda: load_hf(path))
    assert f"delete {folder}, and it is made again" in message


def test_unwritable_cache_is_a_warning(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = write_gguf(path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="set RUNAHEAD_CACHE to a folder with room; until then every process unpacks"):
        loaded = load_hf(path)
    assert torch.equal(loaded.module.model.norm.weight, saved.model.norm.weight)


def full_disk(*_: Any) -> Any:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def full_disk_in_rust(*_: Any, **__: Any) -> Any:
    raise Exception("No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("place", "fail", "reason"),
    [
        ("os.pwrite", full_disk, "Disk quota exceeded"),
        ("os.fsync", full_disk, "Disk quota exceeded"),
        ("transformers.TokenizersBackend._save_pretrained", full_disk_in_rust, "No space left on device"),
    ],
)
@pytest.mark.sampled(3)
def test_a_disk_that_fills_up_meanwhile_is_a_warning(
    place: str, fail: Any, reason: str, path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = write_gguf(path)
    remedy = "set RUNAHEAD_CACHE to a folder with room; until then every process unpacks"
    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.warns(UserWarning, match=rf"as safetensors cannot be kept in .*gguf .*{reason}.*{remedy}"):
            loaded = load_hf(path)
    weights = loaded.module.state_dict()
    assert all(torch.equal(weights[name], expected) for name, expected in saved.state_dict().items())
    assert conversions(cache) == []
    load_hf(path)
    assert len(conversions(cache)) == 1


def test_missing_room_is_told_with_the_bytes_needed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(path)
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr("runahead.model.loading.cache_folder.shutil.disk_usage", lambda _: usage)
    with pytest.warns(
        UserWarning, match=r"as safetensors needs 67 MB in .*gguf, but 1 MB are free; set RUNAHEAD_CACHE"
    ):
        load_hf(path)


def test_progress_is_shown_if_asked(
    path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(path)
    monkeypatch.setattr("runahead.model.loading.cache_folder.WATCH_SECONDS", 0.01)
    load(ModelOptions(name="hf", path=str(path)), device=CPU, attn_implementation=ATTENTION, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "Converting tiny.gguf" in err
