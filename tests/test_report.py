"""A report is complete, valid JSON, and written whole or not at all."""

import json
import os
import random
import re
import stat
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.outputs.summary import dtype_hint, summary
from runahead import files
from runahead.config import CacheOptions, DType, GenerationOptions, PrefillOptions, Speculate
from runahead.files import ensure_writable, write_whole
from runahead.report import Generation, GenerationBatch, RankReport, RetrievalReport, TokenLogprobs, report_json

ROOT = Path(__file__).resolve().parents[1]


def rank_report(rank: int, chunk_tokens: int) -> RankReport:
    return RankReport(
        rank=rank,
        chunk_tokens=chunk_tokens,
        prefill_s=0.5,
        wait_s=0.1,
        kv_sent_bytes=2048 if rank == 0 else 0,
        kv_received_bytes=2048 if rank == 1 else 0,
        kv_peak_bytes=3 << 20,
    )


def generation(text: str = "yes", prompt_tokens: int = 10) -> Generation:
    return Generation(
        prompt_tokens=prompt_tokens,
        new_token_ids=[5, 6],
        text=text,
        finish_reason="length",
        first_token_logits_top5=[(5, 1.5), (7, 1.0), (1, float("-inf"))],
    )


def batch(*generations: Generation, warm: bool = False) -> GenerationBatch:
    return GenerationBatch(
        generations=list(generations),
        boundaries=[0, 6, 10],
        ttft_s=0.5,
        tpot_s=0.02,
        warm=warm,
        ranks=[rank_report(0, 6), rank_report(1, 4)],
    )


OF_A_RUN: dict[str, Any] = {
    "prefill": PrefillOptions(),
    "partition": "ratios",
    "policy": {"name": "full"},
    "cache": CacheOptions(),
    "generation": GenerationOptions(),
    "warmup": 0,
    "model": "smollm2",
    "dtype": "float32",
    "device": "cpu",
    "world_size": 2,
}


def report(*batches: GenerationBatch) -> dict:
    return json.loads(report_json(batches, **OF_A_RUN))


OF_A_PROMPT = {
    "cached_tokens",
    "prompt_tokens",
    "new_token_ids",
    "text",
    "finish_reason",
    "ttft_s",
    "tpot_s",
    "warm",
    "partition",
    "decode",
    "slower",
    "ranks",
    "first_token_logits_top5",
}
OF_THE_RUN = {
    "policy",
    "generation",
    "prefill",
    "world_size",
    "model",
    "dtype",
    "device",
    "versions",
    "warmup",
    "model_check",
    "prompts",
}


def test_a_run_can_be_repeated_by_the_options_of_answers_in_its_report() -> None:
    """By each option alone, in another value than its default."""
    given: dict[str, Any] = {"max_new_tokens": 7, "speculate": Speculate.lookup, "json_schema": "{}", "logprobs": 2}
    given |= {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 5}
    given |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {7: -2.0}}
    given |= {"stop": ["a"], "stop_token_ids": [3], "kept_tokens": ["<b>"], "grammar": "start: /a/"}
    given |= {"include_stop": True, "skip_special_tokens": False, "ignore_eos": True, "min_new_tokens": 2}
    given |= {"speculate_tokens": 3, "speculate_match": 4, "speculate_always": True}
    left = {each.name for each in fields(GenerationOptions)} - set(given)
    assert left == {"of_model", "free_part"}  # carried out before, and part of a schema or a grammar
    for name, value in given.items():
        options = GenerationOptions(**{name: value})
        told = json.loads(report_json([batch(generation())], **OF_A_RUN | {"generation": options}))["generation"]
        told |= {key: {int(token): bias for token, bias in told[key].items()} for key in told if key == "logit_bias"}
        assert GenerationOptions(**told) == options
    assert report(batch(generation()))["generation"] == {"max_new_tokens": 64, "do_sample": False}


def test_report_of_one_prompt_has_every_field_on_top():
    fields_of_one = report(batch(generation()))
    assert set(fields_of_one) == OF_A_PROMPT | OF_THE_RUN
    assert fields_of_one["text"] == "yes"
    assert fields_of_one["prefill"] == {"strategy": "kv_runahead", "transfer": "relay"}
    assert fields_of_one["partition"] == {"name": "ratios", "boundaries": [0, 6, 10]}
    assert set(fields_of_one["versions"]) == {"python", "torch", "transformers", "runahead"}
    assert [rank["chunk_tokens"] for rank in fields_of_one["ranks"]] == [6, 4]
    # Of policies that retrieve, of prompts that reuse K,V, of ranks that share a model, of
    # drafts, of models that were loaded, and of layers in blocks of rows.
    optional = {"row_tokens", "retrieval", "kv_host_bytes", "reuse", "stage", "share", "memory", "speculation"}
    optional |= {"attention"}  # of a sparse prefill
    assert set(fields_of_one["ranks"][0]) == {field.name for field in fields(RankReport)} - optional


@pytest.mark.parametrize("check", ["done", "kept", "none"])
def test_a_report_says_whether_the_model_was_checked(check: str) -> None:
    assert json.loads(report_json([batch(generation())], **OF_A_RUN, model_check=check))["model_check"] == check


def test_logits_that_json_cannot_hold_become_null():
    assert report(batch(generation()))["first_token_logits_top5"] == [[5, 1.5], [7, 1.0], [1, None]]


def test_log_probabilities_are_there_if_they_were_asked_for():
    scored = generation()
    scored.logprobs = [TokenLogprobs(logprob=-0.5, top=[(5, -0.5), (7, -1.0)]), TokenLogprobs(logprob=-2.0, top=[])]
    expected = [{"logprob": -0.5, "top": [[5, -0.5], [7, -1.0]]}, {"logprob": -2.0, "top": []}]
    assert report(batch(scored))["logprobs"] == expected


def test_text_that_looks_like_a_list_stays_as_it_is():
    text = '[\n   1,\n   2\n ] "[ 3 ]"'
    assert report(batch(generation(text)))["text"] == text


def test_report_of_several_prompts_lists_them_in_order():
    several = report(batch(generation("a"), generation("b")), batch(generation("c"), warm=True))
    assert set(several) == OF_THE_RUN
    assert [(entry["text"], entry["batch"], entry["warm"]) for entry in several["prompts"]] == [
        ("a", 0, False),
        ("b", 0, False),
        ("c", 1, True),
    ]
    assert all(set(entry) == OF_A_PROMPT | {"batch"} for entry in several["prompts"])


def test_summary_tells_the_figures_of_one_prompt():
    text = summary([batch(generation(prompt_tokens=4096))])
    for figure in ("4,096", "6 + 4 tokens", "0.500 s (cold)", "20.0 ms", "2.0 KiB", "3.0 MiB, 3.0 MiB"):
        assert figure in text
    assert len(text.splitlines()) <= 10


def test_what_is_kept_is_a_share_of_the_whole_prompt():
    """10 of 40 tokens were computed, and 30 are those of segments."""
    cut = batch(generation(prompt_tokens=40))
    cut.ranks[-1].kept_tokens = [40, 20]
    assert "75.0% of the prompt's tokens" in summary([cut])


def test_what_is_kept_is_told_of_the_longest_of_several_prompts():
    short, long = batch(generation(prompt_tokens=10)), batch(generation(prompt_tokens=40))
    long.boundaries, short.ranks[-1].kept_tokens, long.ranks[-1].kept_tokens = [0, 20, 40], [10, 10], [8, 12]
    short.ranks[-1].kv_kept_bytes, long.ranks[-1].kv_kept_bytes = 1024, 2048
    told = re.search(r"KV kept +(.*)", summary([short, long]))
    assert told is not None and told[1] == "2.0 KiB, 25.0% of the prompt's tokens, mean over layers (longest prompt)"


@pytest.mark.parametrize(
    ("fetched", "tpot_s", "told"),
    [
        ([0.1, 0.3], 0.02, "20.0% of the tokens fetched per step and layer"),
        ([None, None], 0.02, "every step read all tokens"),
        ([None, None], None, "no step read any"),
    ],
)
def test_a_retriever_tells_what_steps_read_and_what_its_bytes_are(fetched, tpot_s, told):
    """Bytes of a stage are those of all ranks that share its model."""
    read = batch(generation())
    read.tpot_s = tpot_s
    for share, rank in enumerate(read.ranks):
        rank.stage, rank.share, rank.kept_tokens, rank.kv_kept_bytes, rank.kv_host_bytes = 0, share, [10, 10], 512, 1024
        rank.retrieval = RetrievalReport(
            fetched_share=fetched, hit_mass=[None, None], evicted=[0, 0], host_bytes=8, chosen_again=[None, None]
        )
    text = summary([read])
    assert "1.0 KiB of indices and layers that do not retrieve, 100.0% of the prompt's tokens" in text
    assert re.search(rf"KV in host memory +2\.0 KiB; {told}\n", text)


def test_what_steps_read_is_told_of_the_longest_prompt():
    """The longest prompt has one new token, and so no step, while a shorter one has."""
    long, short = batch(generation(prompt_tokens=40)), batch(generation(prompt_tokens=10))
    long.boundaries, long.tpot_s, short.tpot_s = [0, 20, 40], None, 0.02
    long.ranks[-1].retrieval = RetrievalReport(
        fetched_share=[None], hit_mass=[None], evicted=[0], host_bytes=8, chosen_again=[None]
    )
    assert re.search(r"KV in host memory .*; no step read any \(longest prompt\)\n", summary([short, long]))


def test_the_share_of_heads_that_chose_again_is_told():
    """A mean over ranks, whose KV heads may differ, and over layers with late choices."""
    late = batch(generation())
    for rank, chosen_again in zip(late.ranks, ([None, 0.5], [0.25, 0.25]), strict=True):
        rank.retrieval = RetrievalReport(
            fetched_share=[0.1, 0.1], hit_mass=[None, None], evicted=[0, 0], host_bytes=8, chosen_again=chosen_again
        )
    assert re.search(r"late choices +37\.5% made again", summary([late]))
    assert [rank["retrieval"]["chosen_again"] for rank in report(late)["ranks"]] == [[None, 0.5], [0.25, 0.25]]
    late.ranks[0].retrieval.chosen_again = late.ranks[1].retrieval.chosen_again = [None, None]
    assert "late choices" not in summary([late])


@pytest.mark.parametrize("name", ["amx_bf16", "avx512_bf16", "avx512_f"])
def test_summary_says_where_bfloat16_would_be_faster(name, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", name: True})
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    hint = dtype_hint(DType.auto, torch.float32, cpu)
    assert (hint is not None) == (name != "avx512_f")
    told = r"dtype +float32 \(auto\); model.dtype=bfloat16 is faster on this processor"
    assert (re.search(told, summary([batch(generation())], dtype=hint)) is not None) == (name != "avx512_f")
    assert dtype_hint(DType.float32, torch.float32, cpu) is None
    assert dtype_hint(DType.auto, torch.bfloat16, cpu) is None
    assert dtype_hint(DType.auto, torch.float32, gpu) is None


def test_summary_of_ranks_that_share_a_model():
    shared = batch(generation())
    shared.ranks = [rank_report(rank, 6 if rank < 2 else 4) for rank in range(4)]
    for rank in shared.ranks:
        rank.stage, rank.share = divmod(rank.rank, 2)
    text = summary([shared])
    assert "4, 2 x 2 that share a model" in text and "6 + 4 tokens, 2 ranks each" in text
    assert [entry["share"] for entry in report(shared)["ranks"]] == [0, 1, 0, 1]


def test_summary_of_several_calls_tells_cold_from_warm():
    text = summary([batch(generation()), batch(generation(), warm=True), batch(generation(), warm=True)])
    assert "0.500 s (cold), 0.500 s (warm, median of 2)" in text
    assert "3 in 3 calls" in text


def test_writing_replaces_a_file_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, "new ü")
    assert path.read_text(encoding="utf-8") == "new ü"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_new_file_has_the_usual_permissions(tmp_path):
    write_whole(tmp_path / "a", b"1")
    (tmp_path / "b").write_bytes(b"1")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize("every_file_has_a_name", [False, True])
def test_a_failing_write_keeps_the_old_content_and_leaves_nothing(tmp_path, monkeypatch, every_file_has_a_name):
    if every_file_has_a_name:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "run.json"
    path.write_text("old")

    def disk_is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]


WRITES_ALL_THE_TIME = """
import itertools, sys
from runahead.config import PrefillOptions
from runahead.files import write_whole
for number in itertools.count():
    write_whole(f"{sys.argv[1]}/{number}", "x" * 1_000_000)
    if number == 0:
        print("first", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")
def test_a_writer_that_is_killed_leaves_whole_files_and_no_others(tmp_path):
    draw = random.Random(1)
    for start in range(10):
        folder = tmp_path / f"{start}"
        folder.mkdir()
        command = [sys.executable, "-c", WRITES_ALL_THE_TIME, str(folder)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"first\n"
            time.sleep(draw.uniform(0, 0.02))
            writer.kill()
        files = sorted(folder.iterdir(), key=lambda path: int(path.name))  # a .part has no number
        assert [path.stat().st_size for path in files] == [1_000_000] * len(files)


def test_where_every_file_has_a_name_one_beside_it_is_filled(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "run.json"
    for text in ("old", "new"):
        write_whole(path, text)
        assert path.read_text() == text
    assert os.listdir(tmp_path) == ["run.json"]


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"


def test_a_device_is_written_to_and_not_replaced():
    ensure_writable("/dev/null")
    write_whole("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_ensuring_leaves_nothing_and_keeps_what_is_there(tmp_path):
    ensure_writable(tmp_path / "new.json")
    assert os.listdir(tmp_path) == []
    (tmp_path / "old.json").write_text("old")
    ensure_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["old.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is a folder"),
        ("missing/run.json", "there is no folder"),
        ("file/run.json", "there is no folder"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_told_before_work(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message) as error:
        ensure_writable(f"{tmp_path}/{name}" if name else str(tmp_path), option="timeline")
    assert str(error.value).startswith("timeline=")
    assert "\n" not in str(error.value)


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="report= is empty"):
        ensure_writable("")


def test_a_folder_that_takes_no_files_is_refused(tmp_path):
    # Not by permission bits, which root passes: /proc takes no files from anybody.
    with pytest.raises(ValueError, match="cannot be written"):
        ensure_writable("/proc/run.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root passes permission bits")
def test_a_read_only_file_is_refused(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    path.chmod(0o444)
    with pytest.raises(ValueError, match="read-only"):
        ensure_writable(path)


def test_the_precision_of_stored_numbers_is_reported_if_it_is_not_the_models() -> None:
    text = report_json([batch(generation())], **OF_A_RUN | {"cache": CacheOptions(bits=4)})
    assert json.loads(text)["cache"] == {
        "bits": 4,
        "residual": 128,
        "residual_bits": 16,
        "tier_bits": None,
    }
    assert "cache" not in report(batch(generation()))
