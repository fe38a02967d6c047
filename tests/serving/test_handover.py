"""Prompts that are handed over to other engines: what is in the files, and what becomes of those that cannot be."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from launch.server.answer.listener import RequestListener
from launch.server.answer.row_text import RowText
from launch.server.keys import Keys
from launch.server.metrics import Metrics
from runahead.config import GenerationOptions
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.model.fingerprint import checkpoint_digest
from runahead.reuse import handover
from runahead.reuse.handover import Handover, HandoverFolder, Outcome, file_name
from runahead.reuse.tiers.file_format import FORMAT, LayerShape, checksum
from runahead.serving.items import Handed
from runahead.serving.limits import QueueLimits
from tests.conftest import RankPools
from tests.families import WINDOW, largest_difference, prompt, rounded, throughout
from tests.serving import handover_tasks
from tests.serving.fakes import TOKEN_BYTES, serving
from tests.serving.test_api import CLIENT, TEXT, post
from tests.waiting import until

PREFILL = "/v1/prefill"

PROMPTS = [prompt(40, seed=1), prompt(33, seed=2)]
"""Longer than the windows of the families."""


@cache
def of_transformers(family: str, ids: tuple[int, ...]) -> list[Tensor]:
    """Keys and values (T, K, H + V) of all tokens in each layer, by transformers alone."""
    module = rounded(family)
    cache = DynamicCache()  # without a config it keeps tokens out of a window, too
    with torch.inference_mode(), throughout(module.dtype):
        module(torch.tensor([ids]), past_key_values=cache)
    return [torch.cat([each.keys[0], each.values[0]], dim=-1).transpose(0, 1) for each in cache.layers]


def read(folder: Path, name: str) -> tuple[dict[str, str], list[Tensor]]:
    """Metadata and layers of a file, as a reader that knows the format alone finds them."""
    with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        about = file.metadata()
        layers = [file.get_tensor(f"layer.{number}") for number in range(len(file.keys()))]
    assert json.loads(about["crc32"]) == [checksum(layer) for layer in layers]
    return about, layers


def require_same(folder: Path, name: str, family: str, ids: list[int]) -> list[int]:
    """Check a file against transformers; returns the first token of each layer."""
    about, layers = read(folder, name)
    first = json.loads(about["first"])
    assert (about["format"], about["key"], about["tokens"]) == (FORMAT, name, str(len(ids)))
    expected = of_transformers(family, tuple(ids))
    assert len(layers) == len(expected)
    for layer, start, theirs in zip(layers, first, expected, strict=True):
        assert len(layer) == len(ids) - start
        assert largest_difference(layer, theirs[start:]) < 1e-9
        assert largest_difference(layer[:-1], theirs[start:][1:]) > 1e-3  # moved by a token they are others
    return first


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3"])
def test_a_file_has_the_keys_and_values_of_transformers(
    rank_pools: RankPools, family: str, size: int, tmp_path: Path
) -> None:
    folder = tmp_path / "handover"
    *others, handed = rank_pools.run(size, handover_tasks.hand_over, family, [PROMPTS, PROMPTS[:1]], str(folder))
    assert not any(others), "other ranks than the last one have not all keys and values"
    assert [each.error for each in handed] == ["", "", ""]
    assert [each.is_new for each in handed] == [True, True, False]
    names = {each.row: each.name for each in handed}
    for row, ids in enumerate(PROMPTS):
        require_same(folder, names[0, row], family, ids)
    assert names[1, 0] == names[0, 0]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_layers_of_windows_lack_only_what_no_later_token_sees(rank_pools: RankPools, tmp_path: Path) -> None:
    """And not 256 tokens before it, of which other engines keep whole blocks, though the last chunk is short."""
    ids, bounds = prompt(400, seed=5), (0, 200, 300, 400)
    handed = rank_pools.run(3, handover_tasks.hand_over, "gemma2", [[ids]], str(tmp_path / "a"), (), None, bounds)[-1]
    first = require_same(tmp_path / "a", handed[0].name, "gemma2", ids)
    assert any(first) and not all(first), "gemma2 has layers of both kinds"
    assert max(first) == len(ids) - WINDOW - 256


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_a_prompt_reuses_is_in_its_file(rank_pools: RankPools, family: str, size: int, tmp_path: Path) -> None:
    folder, before = tmp_path / "a", PROMPTS[0]
    longer = [before[:30] + prompt(12, seed=3), before[:30] + prompt(9, seed=4)]
    task = handover_tasks.hand_over
    handed = rank_pools.run(size, task, family, [[before], longer, [before]], str(folder), [0, 30, 39])[-1]
    assert [each.error for each in handed] == [""] * 4
    for each, ids in zip(sorted(handed, key=lambda each: each.row), [before, *longer, before], strict=True):
        require_same(folder, each.name, family, ids)


def test_a_prompt_that_is_computed_in_pieces_is_handed_over(rank_pools: RankPools, tmp_path: Path) -> None:
    [handed] = rank_pools.run(1, handover_tasks.hand_over, "llama", [PROMPTS], str(tmp_path / "a"), (), 7)
    for each, ids in zip(sorted(handed, key=lambda each: each.row), PROMPTS, strict=True):
        require_same(tmp_path / "a", each.name, "llama", ids)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_prompt_that_is_computed_in_blocks_of_rows_is_handed_over(
    rank_pools: RankPools, family: str, size: int, tmp_path: Path
) -> None:
    """Batches of two rows, of which one is padded, and of one row."""
    task, batches = handover_tasks.hand_over_in_blocks, [PROMPTS, [prompt(37, seed=3)]]
    found = rank_pools.run(size, task, family, batches, str(tmp_path / "a"), 7)
    assert all(used == [7, 7] for _, used in found)
    names = {each.row: each.name for each in found[-1][0]}
    for number, prompts in enumerate(batches):
        for row, ids in enumerate(prompts):
            require_same(tmp_path / "a", names[number, row], family, ids)


def test_a_prompt_is_handed_over_by_the_server_and_found_again(tmp_path: Path) -> None:
    ids = [5, 6, 7, 8]
    with serving(handover=str(tmp_path / "a")) as served:
        about = CLIENT.get(served.url + PREFILL).json()
        name = file_name(about["key"], about["salt"], ids)
        asked = [post(served, PREFILL, {"prompt": ids, "first_token": wanted}) for wanted in (False, True, False)]
        new, again, found = (each.json() for each in asked)
        for each in (new, again, found):
            assert each["object"] == "prefill" and each["num_tokens"] == len(ids)
            assert each["file"] == f"{name}.safetensors" and each["path"] == f"{about['folder']}/{each['file']}"
            assert each["num_bytes"] == Path(each["path"]).stat().st_size
        assert [each["is_new"] for each in (new, again, found)] == [True, False, False]
        assert [each["first_token"] for each in (new, again, found)] == [None, 8, None]
        assert [each["usage"]["completion_tokens"] for each in (new, again, found)] == [0, 1, 0]
        assert new["ready_s"] >= new["ttft_s"] > 0 and found["ttft_s"] is None
        assert len(served.engine.batches) == 2, "what is in the folder is not computed unless its token is asked for"
        _, layers = read(tmp_path / "a", name)
        assert [layer.flatten().tolist() for layer in layers] == [[5, 6, 7, 8], [6, 7, 8, 9]]
        metrics = CLIENT.get(served.url + "/metrics").text
        assert "runahead:handover_files_total 2" in metrics and "runahead:handover_found_total 1" in metrics


def test_a_damaged_file_is_no_answer(tmp_path: Path) -> None:
    with serving(handover=str(tmp_path / "a")) as served:
        path = Path(post(served, PREFILL, {"prompt": [5, 6]}).json()["path"])
        path.write_bytes(path.read_bytes()[:-1])
        assert served.handover.found(path.stem) is None
        assert post(served, PREFILL, {"prompt": [5, 6]}).json()["is_new"]
        assert served.handover.found(path.stem) is not None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [5], "stream": True}, "stream"),
        ({"prompt": [5], "n": 2}, "n"),
        ({"prompt": [5], "max_tokens": 2}, "max_tokens"),
        ({"prompt": [[5], [6]]}, "prompt"),
        ({"prompt": [5], "first_token": 1}, "first_token"),
        ({"prompt": [5] * 99}, "prompt"),  # as many bytes as all files may have, and they have a header, too
    ],
)
def test_what_cannot_be_handed_over_is_refused(tmp_path: Path, body: dict[str, object], field: str) -> None:
    with serving(handover=str(tmp_path / "a"), handover_bytes=99 * TOKEN_BYTES) as served:
        response = post(served, PREFILL, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert not served.engine.batches


def test_proxies_get_what_they_pass_on(tmp_path: Path) -> None:
    asks = {"prompt": [5, 6], "max_tokens": 1}
    with serving(handover=str(tmp_path / "a"), limits=QueueLimits(max_ttft_s=5.0)) as served:
        params = asks | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        answer = post(served, TEXT, params).json()
        told = answer["kv_transfer_params"]
        assert told["do_remote_prefill"] and (tmp_path / "a" / told["runahead_file"]).exists()
        assert post(served, TEXT, asks | {"cache_hit_threshold": 0, "prompt": [7, 8]}).status_code == 200
        assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2
        for field, value in (("cache_hit_threshold", 0.5), ("kv_transfer_params", {"do_remote_prefill": True})):
            refused = post(served, TEXT, asks | {field: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    with serving(handover=str(tmp_path / "a"), limits=QueueLimits(max_ttft_s=5.0)) as served:
        served.scheduler.estimate.alone.learn([1], 100.0)
        empty = post(served, TEXT, asks | {"cache_hit_threshold": 0, "prompt": [9]})
        assert empty.status_code == 200 and empty.json()["choices"][0]["finish_reason"] == "length"
        assert post(served, PREFILL, {"prompt": [9]}).status_code == 429
    with serving() as served:
        assert post(served, TEXT, asks | {"cache_hit_threshold": 0}).status_code == 400


def test_proxies_are_told_of_a_file_that_is_there_however_full_the_queue_is(tmp_path: Path) -> None:
    asks = {"prompt": [5, 6], "max_tokens": 1}
    params = asks | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    with serving(handover=str(tmp_path / "a")) as served:
        new = post(served, TEXT, params).json()
    with serving(handover=str(tmp_path / "a"), limits=QueueLimits(max_ttft_s=5.0)) as served:
        served.scheduler.estimate.alone.learn([1], 100.0)  # from now on the queue takes nobody
        found = post(served, TEXT, params).json()
        assert found["kv_transfer_params"] == new["kv_transfer_params"]
        looked = post(served, TEXT, asks | {"cache_hit_threshold": 0}).json()
        for answer in (found, looked):
            assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2} == answer["usage"]
        assert not served.engine.batches
        assert post(served, TEXT, params | {"prompt": [7]}).status_code == 503


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_apis_whose_answers_tell_of_no_file_do_not_hand_over(tmp_path: Path, path: str) -> None:
    body = {"input": "a"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "a"}]}
    body |= {"max_tokens": 1} if path == "/v1/messages" else {}
    with serving(handover=str(tmp_path / "a")) as served:
        assert post(served, path, body).status_code == 200
        refused = post(served, path, body | {"kv_transfer_params": {"do_remote_decode": True}})
        assert refused.status_code == 400 and "kv_transfer_params" in refused.text
        assert not names(tmp_path / "a")


async def told_of(*outcomes: Handed | str) -> Metrics:
    """Metrics of a request whose prompt is to be handed over, of which a listener hears these."""
    listener = RequestListener(
        [RowText(None, set(), GenerationOptions())], Metrics(), num_prompt_tokens=1, awaits_file=True
    )
    for each in outcomes:
        listener.on_failure(each) if isinstance(each, str) else listener.on_handed(each)
        await asyncio.sleep(0)
    return listener._metrics


def test_cancelled_requests_are_no_failures_of_the_folder_and_failed_ones_no_latencies() -> None:
    handed = Handed(row=(0, 0), name="0" * 64)
    for error, num_failures in (("cancelled", 0), (NOT_NUMBERS, 1)):
        metrics = asyncio.run(told_of(NOT_NUMBERS, replace(handed, error=error)))
        assert metrics.counters["handover_failures_total"] == num_failures
        assert "e2e_request_latency_seconds_count 0" in metrics.text({}, {})


def test_rows_have_room_until_their_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a file is written from the memory of its row."""
    gate, write = threading.Event(), handover.write_layers

    def when_let(*given: Any, **more: Any) -> None:
        gate.wait()
        write(*given, **more)

    monkeypatch.setattr(handover, "write_layers", when_let)
    limits = QueueLimits(max_tokens=10)
    with serving(handover=str(tmp_path / "a"), limits=limits) as served, ThreadPoolExecutor(1) as pool:
        try:
            first = pool.submit(post, served, PREFILL, {"prompt": [5] * 6})
            until(lambda: bool(served.engine.batches) and not served.scheduler._queue.batches)
            assert served.scheduler.share_in_use == 0.7
        finally:
            gate.set()
        assert first.result().status_code == 200
        until(lambda: served.scheduler.share_in_use == 0.0)


def test_a_prompt_of_another_key_has_another_file(tmp_path: Path) -> None:
    names = []
    with serving(handover=str(tmp_path / "a"), keys=Keys(["first:" + "a" * 16, "second:" + "b" * 16])) as served:
        for key in ("a" * 16, "b" * 16):
            headers = {"authorization": f"Bearer {key}"}
            names.append(post(served, PREFILL, {"prompt": [5, 6]}, headers=headers).json()["file"])
            about = CLIENT.get(served.url + PREFILL, headers=headers).json()
            assert names[-1].startswith(file_name(about["key"], about["salt"], [5, 6]))
    assert len(set(names)) == 2


def test_files_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    folder, ended = HandoverFolder(str(tmp_path / "a"), 20_000, "model"), list[Outcome]()
    for number in range(4):
        hand_over(folder, f"{number:064x}", torch.full((1000, 1, 1), float(number)), ended)
        if number == 2:
            assert folder.found(f"{1:064x}") is not None
    until(lambda: len(ended) == 4)
    assert [each.error for each in ended] == [""] * 4
    assert {path.stem for path in (tmp_path / "a").glob("*.safetensors")} == {f"{number:064x}" for number in (1, 3)}


def begun(folder: HandoverFolder, number: int, ended: list[Outcome], num_tokens: int = 1000) -> Handover:
    """A prompt of 8 bytes a token that is computed, and may yet turn out not to be."""
    given = folder.begin(f"{number:064x}", num_tokens, torch.device("cpu"), ended.append)
    layer = torch.full((num_tokens, 1, 1), float(number))
    given.begin([LayerShape(shape=tuple(layer.shape), dtype=layer.dtype)] * 2)
    for _ in range(2):
        given.put([layer])
    return given


def test_room_is_made_before_a_file_is_written(tmp_path: Path) -> None:
    """Files that have no name yet have as many bytes as others."""
    folder, ended = HandoverFolder(str(tmp_path / "a"), 20_000, "model"), list[Outcome]()
    for number in range(2):
        begun(folder, number, ended).end()
        until(lambda number=number: len(ended) > number)
    third = begun(folder, 2, ended)
    until(lambda: names(tmp_path / "a") == {1})
    third.end()
    until(lambda: len(ended) == 3)
    assert names(tmp_path / "a") == {1, 2} and [each.error for each in ended] == [""] * 3


def test_files_under_way_wait_for_each_other_where_there_is_no_room_for_all(tmp_path: Path) -> None:
    folder, ended = HandoverFolder(str(tmp_path / "a"), 20_000, "model"), list[Outcome]()
    given = [begun(folder, number, ended) for number in range(4)]
    until(lambda: len(folder._coming) == 2)
    for each in given:
        each.end("cancelled" if each is given[3] else "")
    until(lambda: len(ended) == 4)
    assert sorted(each.error for each in ended) == ["", "", "", "cancelled"]
    assert len(names(tmp_path / "a")) == 2 and not folder._coming


def test_what_is_larger_than_all_files_may_be_is_told_and_nothing_makes_room(tmp_path: Path) -> None:
    folder, ended = HandoverFolder(str(tmp_path / "a"), 8_100, "model"), list[Outcome]()
    begun(folder, 0, ended).end()
    until(lambda: len(ended) == 1)
    assert "has 8,3" in ended[0].error and "serve.handover_bytes=8100" in ended[0].error  # the header has some, too
    assert not names(tmp_path / "a")


def names(folder: Path) -> set[int]:
    """Numbers of the prompts whose files are there."""
    return {int(path.stem, 16) for path in folder.glob("*.safetensors")}


def test_one_wait_for_a_slow_folder_is_for_all_prompts_of_an_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, waits = HandoverFolder(str(tmp_path / "a"), 1 << 20, "model"), list[float]()
    folder.note_late(handover.BACKLOG_BYTES + 1)
    monkeypatch.setattr(folder._changed, "wait_for", lambda is_so, wait_s: waits.append(wait_s) or is_so())
    ended = list[Outcome]()
    for until_s in (time.monotonic() + 1000.0, 0.0):
        folder.begin("0" * 64, 3, torch.device("cpu"), ended.append, until_s=until_s)
    assert 900.0 < waits[0] <= 1000.0 and waits[1] == 0.0
    assert len(ended) == 2 and all("too slowly" in each.error for each in ended)


@pytest.mark.parametrize("error", ["cancelled", NOT_NUMBERS])
def test_a_prompt_that_is_not_computed_to_its_end_leaves_nothing(tmp_path: Path, error: str) -> None:
    folder, ended = HandoverFolder(str(tmp_path / "a"), 1 << 20, "model"), list[Outcome]()
    hand_over(folder, "0" * 64, torch.ones(3, 1, 1), ended, error)
    until(lambda: bool(ended))
    assert ended == [Outcome(error=error)]
    assert not [path for path in (tmp_path / "a").iterdir() if path.name != ".lock"]


def test_a_full_disk_is_told_and_leaves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ended = HandoverFolder(str(tmp_path / "a"), 1 << 20, "model"), list[Outcome]()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(handover, "write_layers", full)
    hand_over(folder, "0" * 64, torch.ones(3, 1, 1), ended)
    until(lambda: bool(ended))
    assert "No space left on device" in ended[0].error and folder.place.path in ended[0].error


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="serve.handover=.* other users may read or write in it"):
        HandoverFolder(str(tmp_path), 1, "model")


def hand_over(
    folder: HandoverFolder, name: str, layer: Tensor, ended: list[Outcome], error: str = "", num_layers: int = 2
) -> None:
    """Hand the same layer over several times, and wait for the outcome."""
    before = len(ended)
    given = folder.begin(name, len(layer), torch.device("cpu"), ended.append)
    given.begin([LayerShape(shape=tuple(layer.shape), dtype=layer.dtype)] * num_layers)
    for _ in range(num_layers):
        given.put([layer])
    given.end(error)
    until(lambda: len(ended) > before)


def test_the_digest_of_a_checkpoint_does_not_depend_on_its_files(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(100.0), "a": torch.ones(2, 3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "both")
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / name)
    plain = hashlib.sha256()
    for name, dtype in (("a", "BF16"), ("b", "F32")):
        data = tensors[name].view(torch.uint8).numpy().tobytes()
        plain.update(f"{name} {dtype} {json.dumps(list(tensors[name].shape))}\n".encode())
        for at in (0, len(data) // 2, max(0, len(data) - 64)):
            plain.update(data[at : at + 64])
    assert checkpoint_digest([tmp_path / "both"]) == plain.hexdigest()
    assert checkpoint_digest([tmp_path / "b", tmp_path / "a"]) == plain.hexdigest()
    tensors["b"][99] = 0
    save_file(tensors, tmp_path / "both")
    assert checkpoint_digest([tmp_path / "both"]) != plain.hexdigest()
