"""A store of three tiers, whoever finds its entries: a tree of token ids, or names."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import GenerationOptions, files
from runahead.cache.quantised.records import KVRecords
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.store import SegmentStore
from runahead.reuse.tiers import files as tier_files
from runahead.reuse.tiers.copies import TierCopies
from runahead.reuse.tiers.entry import Tier
from runahead.reuse.tiers.layer_rows import LostRows
from runahead.reuse.tiers.writing import TRIES
from tests.families import prompt, throughout
from tests.ranks.tasks import tiny_model
from tests.reuse import prefix_tasks
from tests.reuse.finders import (
    CPU,
    FINDERS,
    KEY,
    NUM_TOKENS,
    SHAPES,
    TOKEN_BYTES,
    Kept,
    Segments,
    numbers,
    same,
)
from tests.reuse.test_prefixes import engine_of, require_same

STORED = Path(__file__).parent / "stored_files"
OPTIONS = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)


@pytest.fixture(params=FINDERS)
def finder(request: pytest.FixtureRequest) -> type[Kept]:
    """Each kind of finder."""
    kind: type[Kept] = request.param
    return kind


def stored_by(kept: Kept) -> list[Path]:
    return sorted(kept.store.files._folder.folder.glob("*.safetensors"))  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", [None, 4])
def test_files_of_earlier_versions_are_read(tmp_path: Path, bits: int | None) -> None:
    """Files that abc6562 wrote: two texts that branch after 35 tokens, and a pinned segment with its clusters."""
    ending = "" if bits is None else "_in_4_bits"
    for kind in ("prefixes", "segments"):
        shutil.copytree(STORED / f"{kind}{ending}", tmp_path / kind)
        (tmp_path / kind).chmod(0o700)

    def as_kept(ids: list[int]) -> list[Tensor]:
        if bits is None:
            return numbers(ids)
        records = KVRecords(SHAPES, bits)
        return [records.unpack(layer, records.pack(layer, kv_TKX)) for layer, kv_TKX in enumerate(numbers(ids))]

    tree = PrefixTree(2**30, folder=tmp_path / "prefixes", bits=bits)
    tree.open(KEY, SHAPES, CPU)
    first, other = list(range(40)), [*range(35), 70, 71]
    for ids in (first, other):
        hit = tree.match(ids, KEY)
        assert hit.num_tokens == len(ids)
        found = [torch.cat(parts) for parts in zip(*(list(node.layers_TKX) for node in hit.nodes), strict=True)]
        if bits is None or ids is first:  # the other text's end was quantised by itself
            assert same(found, as_kept(ids))
        assert all((ours - exact).abs().max() < 1.5 for ours, exact in zip(found, numbers(ids), strict=True))
    kept = Segments(tmp_path / "segments", bits=bits)
    segment = kept.segment(0)
    for clusters_key in ("", "clusters") if bits is None else ("",):
        layers = kept.segments.find(segment, clusters_key)
        expected = as_kept(first) if not clusters_key else [layer[..., :1].int() for layer in numbers(first)]
        assert layers is not None and layers.tier is Tier.disk and same(layers.layers_TKX, expected)


def test_what_comes_back_from_disk_is_what_was_stored(tmp_path: Path, finder: type[Kept]) -> None:
    kept = finder(tmp_path)
    for number in (1, 2):
        kept.put(number)
    kept.save()
    later = finder(tmp_path)
    for number in (1, 2):
        assert later.tier(number) == "disk"
        found = later.find(number)
        assert found is not None and same(found, numbers(later.ids(number)))
    assert later.find(3) is None


@contextmanager
def stopped(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Calls of a function wait until an event is set, at the latest at the end."""
    call, go_on = getattr(owner, name), threading.Event()

    def waiting(*args: Any, **more: Any) -> Any:
        assert go_on.wait(30)
        return call(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, waiting)
        try:
            yield go_on
        finally:
            go_on.set()


@pytest.mark.parametrize("bits", [None, 4])
def test_nobody_waits_for_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finder: type[Kept], bits: int | None
) -> None:
    kept = finder(tmp_path, room=1, bits=bits)
    with stopped(tier_files, "write_layers", monkeypatch), stopped(TierCopies, "host_block", monkeypatch):
        for number in range(4):
            kept.put(number)
        assert not stored_by(kept)
    kept.save()
    assert len(stored_by(kept)) == 4
    for number in range(4):
        assert finder(tmp_path, bits=bits).find(number) is not None


def test_a_layer_is_read_before_later_ones_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finder: type[Kept]
) -> None:
    kept, compared, number = finder(tmp_path), threading.Event(), 0
    kept.put(1)
    kept.save()
    checksum = tier_files.checksum

    def waiting(layer: Tensor) -> int:
        nonlocal number
        number += 1
        assert number == 1 or compared.wait(30)
        return checksum(layer)

    later = finder(tmp_path)
    monkeypatch.setattr(tier_files, "checksum", waiting)
    found = later.find(1)
    assert found is not None and torch.equal(found[0], numbers(later.ids(1))[0])
    compared.set()
    assert same(found, numbers(later.ids(1))) and number == len(SHAPES)


def test_what_is_held_stays_until_it_is_released(tmp_path: Path, finder: type[Kept]) -> None:
    """More than there is room for, if need be."""
    kept = finder(tmp_path, room=1)
    fastest = next(iter(kept.store.memory))
    for number in (1, 2):
        kept.put(number)
    kept.save()
    assert [kept.tier(number) for number in (1, 2)] == ["disk", fastest.value]
    found = [kept.find(number) for number in (1, 2)]
    kept.put(3)
    assert [kept.tier(number) for number in (1, 2)] == [fastest.value] * 2
    assert all(each is not None for each in found) and kept.store.memory[fastest].num_bytes > NUM_TOKENS * TOKEN_BYTES
    del found
    kept.release()
    kept.put(4)
    kept.wait_for_copies()
    assert kept.store.memory[fastest].num_bytes == NUM_TOKENS * TOKEN_BYTES and kept.tier(4) == fastest.value


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def change_key(path: Path) -> None:
    """The file says that it is of another text."""
    data = bytearray(path.read_bytes())
    at = data.index(path.name[:64].encode())
    data[at : at + 4] = b"0000" if data[at : at + 4] != b"0000" else b"1111"
    path.write_bytes(data)


def without_checksums(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"crc32"', b'"crc23"'))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a byte": change_byte,
    "its key": change_key,
    "no checksums": without_checksums,
    "empty": lambda path: os.truncate(path, 0),
    "noise": lambda path: path.write_bytes(os.urandom(2000)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("when", ["before a start", "while it is in use"])
def test_a_damaged_file_is_refused_and_told_once(tmp_path: Path, damage: str, when: str, finder: type[Kept]) -> None:
    kept = finder(tmp_path)
    kept.put(1)
    kept.save()
    [path] = stored_by(kept)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if when == "before a start":
            DAMAGES[damage](path)
            kept = finder(tmp_path)
        else:
            kept = finder(tmp_path)
            assert kept.tier(1) == "disk"
            DAMAGES[damage](path)
        for number in range(2):
            found = kept.find(1)
            if damage == "a byte" and number == 0:
                assert found is not None
                with pytest.raises(LostRows, match="the file is damaged"):
                    list(found)
            else:  # known before anything is read
                assert found is None
            del found
            kept.release()
            kept.wait_for_copies()
    [warning] = told
    assert f"{path} is damaged, and was removed" in str(warning.message)
    assert not path.exists()
    kept.put(1)
    kept.save()
    later = finder(tmp_path)
    found = later.find(1)
    assert found is not None and same(found, numbers(later.ids(1)))


def test_a_file_that_disappears_is_a_miss(tmp_path: Path, finder: type[Kept]) -> None:
    kept = finder(tmp_path, room=1)
    for number in (1, 2):
        kept.put(number)
    kept.save()
    assert kept.tier(1) == "disk"
    for path in stored_by(kept):
        path.unlink()
    assert kept.find(1) is None and kept.tier(1) == "-"
    kept.put(1)
    kept.save()
    assert finder(tmp_path).find(1) is not None


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_keeps_nothing_and_is_told_once(tmp_path: Path, finder: type[Kept]) -> None:
    kept = finder(tmp_path, room=1)
    with pytest.warns(UserWarning, match="that cannot be kept on disk are") as told, file_limit(500):
        for number in range(4):
            kept.put(number)
            kept.wait_for_copies()
    assert len(told) == 1
    assert kept.tier(0) == "-" and kept.tier(3) != "-" and stored_by(kept) == []
    for number in (0, 1):  # there is room again
        kept.put(number)
        kept.wait_for_copies()
    assert kept.tier(0) == "disk"


@contextmanager
def small_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, room: list[int]) -> Iterator[list[str]]:
    """A disk that has room for as many files as the list says. Yields the names of files for which it had none."""
    write, refused = tier_files.write_layers, list[str]()

    def on_disk(path: Path, *given: Any, **more: Any) -> None:
        if len(list(folder.glob("*.safetensors"))) >= room[0]:
            refused.append(path.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(tier_files, "write_layers", on_disk)
        yield refused


def test_on_a_full_disk_what_was_not_used_for_longest_makes_room_and_that_is_told_once(
    tmp_path: Path, finder: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, room = finder(tmp_path, room=1), [9]
    told_of = r"^No space left on device \(.*\): what was not used for longest makes room there$"
    with small_disk(monkeypatch, tmp_path, room), pytest.warns(UserWarning, match=told_of) as told:
        for number in range(4):
            kept.put(number)
            kept.save()
            kept.wait_for_copies()
        room[0] = 4
        assert kept.find(0) is not None  # the file that was written first
        kept.release()
        for number in (4, 5):
            kept.put(number)
            kept.save()
            kept.wait_for_copies()
        assert [kept.tier(number) for number in (1, 2)] == ["-", "-"]
        for number in (0, 3, 4, 5):
            found = kept.find(number)
            assert found is not None and same(found, numbers(kept.ids(number)))
            kept.release()
    assert len(told) == 1 and len(stored_by(kept)) == 4


def test_a_disk_that_something_else_fills_costs_a_few_files_and_is_told(
    tmp_path: Path, finder: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, room = finder(tmp_path, room=1), [9]
    with small_disk(monkeypatch, tmp_path, room) as refused, pytest.warns(UserWarning) as told:
        for number in range(6):
            kept.put(number)
            kept.save()
            kept.wait_for_copies()
        room[0] = 0
        kept.put(6)
        kept.save()
        kept.wait_for_copies()
        assert len(stored_by(kept)) == 6 - TRIES and len(refused) == 1 + TRIES
        assert [kept.tier(number) for number in (0, 1, 2)] == ["-"] * 3
        refused.clear()
        for number in (7, 8):  # no more of them go in vain
            kept.put(number)
            kept.save()
            kept.wait_for_copies()
        assert len(stored_by(kept)) == 6 - TRIES and refused
        assert kept.store.files is not None
        assert kept.store.files.num_bytes == sum(each.stat().st_size for each in tmp_path.glob("*.safetensors"))
        for room[0] in (9, 3):  # once a file was written, they make room again
            kept.put(9 + room[0])
            kept.save()
            kept.wait_for_copies()
        assert kept.tier(9 + 3) != "-" and len(stored_by(kept)) <= 3
    sentences = [str(each.message) for each in told]
    assert len(sentences) == 2 and "makes room there" in sentences[0] and "cannot be kept on disk" in sentences[1]


def test_a_folder_that_cannot_be_written_is_refused_and_others_files_stay(tmp_path: Path, finder: type[Kept]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"{finder.option}=.*file is not a writable folder"):
        finder(tmp_path / "file")
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    kept = finder(tmp_path, room=1, disk_bytes=9000)
    for number in range(4):
        kept.put(number)
    kept.wait_for_copies()
    assert (tmp_path / "model.safetensors").exists() and len(stored_by(kept)) == 2


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702, 0o701])
def test_a_folder_of_texts_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "prefixes"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ValueError, match=rf"^folder={folder} holds .* \(mode {mode:o}\); use chmod 700, or name"):
        PrefixTree(2**30, folder=folder)
    folder.chmod(0o700)
    PrefixTree(2**30, folder=folder)


def test_a_private_folder_of_another_user_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have made one in /dev/shm before."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="is of another user .* name another folder"):
        PrefixTree(2**30, folder=tmp_path)


@pytest.mark.parametrize("has_names", [False, True], ids=["without a name at first", "named"])
def test_files_of_texts_are_for_this_user_alone(
    tmp_path: Path, has_names: bool, finder: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_names:  # as where the file system knows no files without names
        monkeypatch.setattr(files, "_write_unnamed", lambda *_: False)
    kept = finder(tmp_path / "kept")
    kept.put(1)
    kept.save()
    [stored] = stored_by(kept)
    umask = os.umask(0)
    os.umask(umask)
    is_private = finder is not Segments  # modules of the server's own schemas are nobody's text
    assert stored.stat().st_mode & 0o777 == (0o600 if is_private else 0o666 & ~umask)
    assert stored.parent.stat().st_mode & 0o777 == (0o700 if is_private else 0o777 & ~umask)


def test_two_stores_share_a_folder(tmp_path: Path, finder: type[Kept]) -> None:
    """Each removes what neither has used for longest, and the other one notices by a miss."""
    first = finder(tmp_path, room=1, disk_bytes=14_000)
    for number in (1, 2, 3):  # two files have room
        first.put(number)
    first.save()
    second = finder(tmp_path, room=1, disk_bytes=14_000)
    assert first.find(2) is not None and second.find(2) is not None
    for each in (first, second):
        each.release()
        each.wait_for_copies()
    second.put(4)
    second.save()
    assert second.store.bytes_by_tier["disk"] <= 14_000
    for each in (first, second):
        found = each.find(2)
        assert found is not None and same(found, numbers(each.ids(2)))
        assert each.find(1) is None


WRITER = """
import os, sys, time
from runahead import files
if sys.argv[2] == "named":
    files._write_unnamed = lambda *_: False
def fsync(handle):
    print("writing", flush=True)
    time.sleep(60)
os.fsync = fsync
files.write_whole(sys.argv[1], b"half" * 1000)
"""


@pytest.mark.parametrize("way", ["named", "unnamed"])
def test_a_killed_writer_leaves_nothing_after_the_next_start(tmp_path: Path, way: str, finder: type[Kept]) -> None:
    kept = finder(tmp_path / "other")
    kept.put(1)
    kept.save()
    [path] = stored_by(kept)
    command = [sys.executable, "-c", WRITER, str(tmp_path / path.name), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=files.__file__.rpartition("/runahead/")[0]) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        left = [each for each in tmp_path.iterdir() if each.is_file()]
        assert finder(tmp_path).find(1) is None
        assert [each for each in tmp_path.iterdir() if each.is_file()] == left, "what is being written stays"
        writer.kill()
    assert len(left) == (way == "named")
    assert finder(tmp_path).find(1) is None
    assert [each for each in tmp_path.iterdir() if each.is_file()] == []


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", ["prefixes", "segments"])
def test_a_layer_that_is_found_damaged_in_the_middle_of_a_forward_is_computed_anew(
    tmp_path: Path, layer: int, kind: str
) -> None:
    """It is stored again, and every logit is that of the whole prompt."""
    model, ids = tiny_model("llama"), prompt(60, seed=1)
    segment = Segment(name="a", ids=tuple(ids[:40]), positions=tuple(range(40)))
    asked: Any = [*ids, 5]
    if kind == "segments":
        use = SegmentUse(segment=segment, parts=(range(40),))
        asked = ReusingPrompt(uses=(use,), new_ids=tuple(ids[40:]), new_positions=tuple(range(40, 60)))

    def engine() -> Any:
        if kind == "prefixes":
            return engine_of(model, PrefixTree(2**30, folder=tmp_path))
        made = engine_of(model)
        made.prefills.store = SegmentStore(model, tmp_path)
        return made

    assert model.fingerprint  # others use the model, too, and `throughout` changes what it computes
    with throughout(model.dtype), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected = engine_of(model).generate([asked], OPTIONS)
        first = engine()
        first.generate([asked[:60] if kind == "prefixes" else asked], OPTIONS)
        if kind == "prefixes":
            first.prefixes.tree.save()
        prefix_tasks.damage(tmp_path, layer)
        second = engine()
        for _ in range(2):
            require_same(second.generate([asked], OPTIONS), expected)
        if kind == "prefixes":
            second.prefixes.tree.save()
        require_same(engine().generate([asked], OPTIONS), expected)
    [warning] = told
    assert "is damaged, and was removed" in str(warning.message)
    assert list(tmp_path.glob("*.safetensors"))
