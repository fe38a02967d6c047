"""The host and disk tiers of the prefix tree: what is in which, what comes back, and what happens to wrong files."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from runahead import GenerationOptions, Model
from runahead.cache.slabs import KVShape
from runahead.prefill.stage_run import StageRun
from runahead.reuse import prefix_run
from runahead.reuse.prefix_node import PrefixNode
from runahead.reuse.prefix_tree import Change, PrefixTree, Stored
from runahead.reuse.tiers import files as tier_files
from runahead.reuse.tiers.entry import Tier
from runahead.reuse.tiers.layer_rows import CopiedMemory, LayerRows, LostRows
from tests.conftest import RankPools
from tests.examples import examples
from tests.families import build, prompt, throughout
from tests.ranks.tasks import tiny_model
from tests.reuse import prefix_tasks
from tests.reuse.test_prefix_tree import (
    EXAMPLE,
    KEYS,
    LIMIT,
    OPERATIONS,
    TEXTS,
    TOKEN_BYTES,
    WIDTHS,
    A,
    B,
    Checked,
    Ids,
)
from tests.reuse.test_prefixes import computed_and_cached, engine_of, require_same

SHAPES = [KVShape(num_kv_heads=1, key_dim=width, value_dim=0, dtype=torch.float64) for width in WIDTHS]
ORDER = [Tier.device, Tier.host, Tier.disk]
CPU = torch.device("cpu")
OPTIONS = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)


def opened(tree: PrefixTree, *keys: str) -> PrefixTree:
    for key in keys or (A,):
        tree.open(key, SHAPES, CPU)
    return tree


def rows_of(tree: PrefixTree, node: PrefixNode) -> LayerRows:
    """A node's keys and values, wherever they are."""
    rows = tree._store.read(node) if node.tier is Tier.disk else node.layers_TKX
    assert rows is not None
    list(rows)  # waits for all layers
    return rows


class Tiered(Checked):
    """A tree with tiers, beside what it should hold. Any leaf may go from it, since a tier may have no room for it."""

    most_off = 0.0

    def __init__(
        self, limit_bytes: float, host_bytes: float, disk_bytes: float, folder: Path, bits: int | None = None
    ) -> None:
        super().__init__(limit_bytes)
        self.more: dict[str, Any] = {"host_bytes": host_bytes, "disk_bytes": disk_bytes, "bits": bits}
        if disk_bytes:
            self.more["folder"] = folder
        self._restarted()

    def _restarted(self) -> None:
        self.tree = opened(PrefixTree(self.tree.limit_bytes, **self.more), A, B)
        self.mirror, self.used = PrefixTree(inf), {}
        self.tree.listen(self._hear)

    def _hear(self, change: Change) -> None:
        self.mirror.apply(change)
        if isinstance(change, Stored):
            self.used |= {(change.key, change.ids[:end]): self._now for end in range(1, len(change.ids) + 1)}
            return
        first = change.ids[: change.num_left + 1]
        gone = [(key, ids) for key, ids in self.used if key == change.key and ids[: len(first)] == first]
        assert gone and not any(self._is_held(*prefix) for prefix in gone)
        for prefix in gone:
            del self.used[prefix]

    def restart(self) -> None:
        """Another process has the folder."""
        while self.held:
            self.release(0)
        self.tree.save()
        before = self.used
        self._restarted()
        assert self.used.keys() <= before.keys()
        if self.more["disk_bytes"] == inf:
            assert self.used.keys() == before.keys(), "what was stored is found again"

    def prefetch(self, key: str, texts: list[Ids]) -> None:
        self.tree.prefetch([(ids, key) for ids in texts])

    def layers_of(self, node: PrefixNode) -> list[Tensor]:
        """A node's keys and values, wherever they are."""
        return list(rows_of(self.tree, node))

    def check(self) -> None:
        self.tree.wait_for_copies()
        used, files = self.tree.bytes_by_tier, dict.fromkeys(ORDER, 0)
        for node in self.tree.nodes():
            text = node.text
            for layer, width in zip(self.layers_of(node), WIDTHS, strict=True):
                assert layer.shape == (len(node.ids), 1, width)
                expected = self.numbers(node.key, text)[-len(node.ids) :, None, None]
                assert ((layer - expected).abs() <= self.most_off).all(), "keys and values of other tokens"
            for before, after in pairwise(node.path):
                assert ORDER.index(before.tier) <= ORDER.index(after.tier)
            assert node.holds == 0 or node.tier is Tier.device
            files[node.tier] += 1
        assert used.get("host", 0) <= self.more["host_bytes"] and used.get("disk", 0) <= self.more["disk_bytes"]
        for key, ids, hit in self.held:
            assert hit is not None and tuple(token for node in hit.nodes for token in node.ids) == ids
            assert all(node.key == key for node in hit.nodes)
        if not self.held:
            assert self.tree.num_bytes <= self.tree.limit_bytes


TIERED_OPERATIONS = st.one_of(
    OPERATIONS, st.tuples(st.just("restart")), st.tuples(st.just("prefetch"), KEYS, st.lists(TEXTS, max_size=3))
)
TIERED_EXAMPLE = [
    *EXAMPLE[:8],
    ("prefetch", A, [(0, 1, 2, 2), (1, 1)]),
    *EXAMPLE[8:],
    *[("release", 0)] * 9,
    ("restart",),
    ("prefetch", A, [(1, 0, 1), (0, 0, 0)]),
    ("match", A, (1, 0, 1, 0, 1)),
    ("match", B, (2, 2, 2, 2, 2, 2)),
    *EXAMPLE,
]


def operate(operations: list[tuple[Any, ...]], tree: Tiered) -> None:
    for name, *given_ in operations:
        getattr(tree, name)(*given_)
        tree.check()
    while tree.held:
        tree.release(0)
        tree.check()


@examples(20)
@given(
    st.lists(TIERED_OPERATIONS, max_size=15),
    st.sampled_from([6, 14]),
    st.sampled_from([0, 9, 20]),
    st.sampled_from([0, 4e3, inf]),
)
@example(TIERED_EXAMPLE, LIMIT / TOKEN_BYTES, 12, inf)
@example(TIERED_EXAMPLE, LIMIT / TOKEN_BYTES, 0, inf)
@example(TIERED_EXAMPLE, LIMIT / TOKEN_BYTES, 20, 0)
def test_tiers_hold_what_a_set_of_all_prefixes_says(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[Any, ...]],
    limit_tokens: float,
    host_tokens: float,
    disk_bytes: float,
) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # files of the other key
        patch.setattr(os, "fsync", lambda handle: None)
        folder = tmp_path_factory.mktemp("prefixes")
        operate(operations, Tiered(limit_tokens * TOKEN_BYTES, host_tokens * TOKEN_BYTES, disk_bytes, folder))


def layers(num_tokens: int, value: float = 1.0) -> list[Tensor]:
    numbers = value + torch.arange(num_tokens, dtype=torch.float64)
    return [numbers[:, None, None].expand(num_tokens, 1, width).clone() for width in WIDTHS]


def tiers(tree: PrefixTree, *texts: list[int]) -> str:
    """Where the last stored token of each text is: device, host or disk; a dash if none is stored."""
    tree.wait_for_copies()
    found = [tree._texts.known(ids, A)[0] for ids in texts]
    return " ".join(nodes[-1].tier.value if nodes else "-" for nodes in found)


def texts(num: int, num_tokens: int = 10) -> list[list[int]]:
    return [[number] * num_tokens for number in range(num)]


def file_bytes(folder: Path) -> int:
    """Size of the file of ten tokens."""
    tree = opened(PrefixTree(inf, folder=folder))
    tree.insert([7] * 10, layers(10), A).release()
    tree.save()
    return tree.bytes_by_tier["disk"]


def test_what_was_used_longest_ago_goes_to_the_host_then_to_disk_then_out(tmp_path: Path) -> None:
    size = file_bytes(tmp_path / "one")
    tree = opened(PrefixTree(20 * TOKEN_BYTES, host_bytes=10 * TOKEN_BYTES, folder=tmp_path, disk_bytes=2 * size + 9))
    a, b, c, d, e, f = texts(6)
    for ids in (a, b):
        tree.insert(ids, layers(10), A).release()
    tree.match(a, A).release()
    for ids in (c, d):
        tree.insert(ids, layers(10), A).release()
    assert tiers(tree, a, b, c, d) == "host disk device device"
    tree.match(b, A).release()  # comes back, and c goes
    assert tiers(tree, a, b, c, d) == "disk device host device"
    for ids in (e, f):
        tree.insert(ids, layers(10), A).release()
    # Of the three that were written a was used longest ago, and b is also in host memory.
    assert tiers(tree, a, b, c, d, e, f) == "- host - disk device device"
    assert tree.found_tokens == {Tier.device: 10, Tier.disk: 10}
    assert tree.bytes_by_tier == {"device": 20 * TOKEN_BYTES, "host": 10 * TOKEN_BYTES, "disk": 2 * size}


@pytest.mark.parametrize("gap", [0, 3])
def test_no_part_is_in_a_faster_tier_than_those_before_it_whoever_has_the_tokens_between(
    tmp_path: Path, gap: int
) -> None:
    """The first 10 tokens have no room in host memory, the last 3 have; other stages store `gap` tokens between."""
    ids, end = list(range(13 + gap)), 10 + gap
    tree = opened(PrefixTree(inf, host_bytes=5 * TOKEN_BYTES, folder=tmp_path))
    tree.insert(ids, layers(13), A, own=[*range(10), *range(end, end + 3)]).release()
    for length in (10, end):
        tree.match(ids[:length], A).release()  # splits it
    tree.limit_bytes = 0
    tree.make_room()
    assert tiers(tree, ids[:10], ids) == "disk disk" and tree.num_stored(ids, A) == len(ids)


@pytest.mark.parametrize("tier", [Tier.host, Tier.disk])
def test_a_prefix_is_loaded_bitwise(tmp_path: Path, tier: Tier) -> None:
    kept = [torch.randn(8, 1, width, dtype=torch.float64) for width in WIDTHS]
    ids = list(range(8))
    tree = opened(PrefixTree(10 * TOKEN_BYTES, host_bytes=20 * TOKEN_BYTES, folder=tmp_path))
    tree.insert(ids, kept, A).release()
    for number in range(1 if tier is Tier.host else 4):
        tree.insert([50 + number] * 9, layers(9), A).release()
    for length in (5, 8):  # the first splits what is there
        assert tree._texts.known(ids, A)[0][-1].tier is tier
        hit = tree.match(ids[:length], A)
        assert hit.num_tokens == length
        start = 0
        for node in hit.nodes:
            end = start + len(node.ids)
            for layer, whole in zip(node.layers_TKX, kept, strict=True):
                assert torch.equal(layer, whole[start:end]) and layer.data_ptr() != whole[start:].data_ptr()
            start = end
        hit.release()


def test_what_is_needed_soon_stays_and_comes_up_from_disk(tmp_path: Path) -> None:
    tree = opened(PrefixTree(10 * TOKEN_BYTES, host_bytes=20 * TOKEN_BYTES, folder=tmp_path))
    a, b, c, d, e, f = texts(6)
    for ids in (a, b, c, d):
        tree.insert(ids, layers(10), A).release()
    assert tiers(tree, a, b, c, d) == "disk host host device"
    tree.prefetch([([*b, 7, 7], A), (a, A)])
    assert tiers(tree, a, b, c, d) == "host host disk device"
    tree.insert(e, layers(10), A).release()
    assert tiers(tree, a, b, d, e) == "host host disk device"  # though d was used last
    tree.prefetch([])
    tree.insert(f, layers(10), A).release()
    assert tiers(tree, a, b, e, f) == "disk host host device"


def test_needed_texts_that_have_no_room_together_are_kept_in_the_order_of_their_turns() -> None:
    tree = opened(PrefixTree(10 * TOKEN_BYTES, host_bytes=10 * TOKEN_BYTES))
    a, b, c, _, _, _ = texts(6)
    for ids in (a, b):
        tree.insert(ids, layers(10), A).release()
    tree.prefetch([(a, A), (b, A)])
    tree.insert(c, layers(10), A).release()
    assert tiers(tree, a, b, c) == "host - device"


def test_what_is_split_off_a_needed_text_is_as_any_other_once_nobody_needs_it() -> None:
    tree = opened(PrefixTree(20 * TOKEN_BYTES))
    a, b, c, _, _, _ = texts(6)
    tree.insert(a, layers(10), A).release()
    tree.prefetch([(a, A)])
    tree.match(a[:4], A).release()
    tree.prefetch([])
    for ids in (b, c):
        tree.insert(ids, layers(10), A).release()
    assert tiers(tree, b, c) == "device device"


def test_a_layer_is_there_before_later_ones_are() -> None:
    copy, there = CopiedMemory(SHAPES, 4), list[int]()
    block = torch.zeros(copy.num_bytes, dtype=torch.uint8)
    rows = LayerRows(copy, 1, 3)
    reader = threading.Thread(target=lambda: [there.append(len(layer)) for layer in rows])
    reader.start()
    for number, part in enumerate(copy.parts(block)):
        time.sleep(0.02)
        assert len(there) == number
        copy.put(part)
        deadline = time.monotonic() + 30
        while len(there) == number and time.monotonic() < deadline:
            time.sleep(0.001)
    reader.join()
    assert there == [2, 2]
    copy = CopiedMemory(SHAPES, 4)
    copy.fail(MemoryError("none"))
    with pytest.raises(LostRows, match="none"):
        copy.layer(0)


def change_text(path: Path) -> None:
    metadata = tier_files.read_metadata(path)
    assert metadata is not None
    run = prefix_run.PrefixRun.from_metadata(metadata, path.name.removesuffix(prefix_run.SUFFIX))
    assert run is not None
    other = prefix_run.PrefixRun(key=run.key, ids=(*run.ids[:-1], 99), start=run.start)
    path.write_bytes(path.read_bytes().replace(run.metadata["prefix"].encode(), other.metadata["prefix"].encode()))
    change = (
        '"' + run.metadata["prefix"].replace('"', '\\"') + '"',
        '"' + other.metadata["prefix"].replace('"', '\\"') + '"',
    )
    path.write_bytes(path.read_bytes().replace(change[0].encode(), change[1].encode()))


def test_a_file_whose_text_was_changed_is_refused(tmp_path: Path) -> None:
    """Its name says so, though its checksums are right."""
    tree, mirror = opened(PrefixTree(inf, folder=tmp_path)), PrefixTree(inf)
    a, b = [1, 2, 3, 4, 5], [1, 2, 3, 7, 7]
    for ids in (a, b):
        tree.insert(ids, layers(5), A).release()
    tree.save()
    paths = sorted(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    assert len(paths) == 3  # what both share, and the rests
    change_text(paths[-1])
    with pytest.warns(UserWarning, match="is damaged, and was removed") as told:
        tree = opened(PrefixTree(inf, folder=tmp_path))
        tree.listen(mirror.apply)
    assert len(told) == 1 and not paths[-1].exists()
    assert mirror.num_stored(a, A) == mirror.num_stored(b, A) == tree.match(a, A).num_tokens == 0


def test_files_of_another_key_are_left_alone_and_told_once(tmp_path: Path) -> None:
    ids = [1] * 5
    tree = opened(PrefixTree(inf, folder=tmp_path))
    tree.insert(ids, layers(5), A).release()
    tree.save()
    with pytest.warns(
        UserWarning, match="of another model, dtype, RoPE setting or cache.tier_bits are not used; files: 1"
    ) as told:
        other = opened(PrefixTree(inf, folder=tmp_path), B)
        assert other.match(ids, B).num_tokens == 0
        other.wait_for_copies()
    assert len(told) == 1
    assert opened(PrefixTree(inf, folder=tmp_path)).num_stored(ids, A) == 5


def test_two_processes_share_a_folder(rank_pools: RankPools, tmp_path: Path) -> None:
    found = rank_pools.run(2, prefix_tasks.use, tmp_path, 40)
    assert all(each["disk"] > 0 for each in found)
    names = {path.name for path in tmp_path.iterdir()}
    assert all(name == ".lock" or name.endswith(prefix_run.SUFFIX) for name in names)
    tree = PrefixTree(inf, folder=tmp_path, disk_bytes=20_000)
    tree.open(prefix_tasks.KEY, prefix_tasks.SHAPES, CPU)
    assert 0 < tree.bytes_by_tier["disk"] <= 20_000
    nodes = list(tree.nodes())
    assert nodes
    for node in nodes:
        for layer, expected in zip(rows_of(tree, node), prefix_tasks.numbers(list(node.text)), strict=True):
            assert torch.equal(layer, expected[-len(node.ids) :])


# With models.


def test_texts_that_went_to_the_host_and_to_disk_and_were_found_by_a_later_process_change_no_number(
    tmp_path: Path,
) -> None:
    model, a, b = tiny_model("llama"), prompt(60, seed=1), prompt(50, seed=2)
    assert model.fingerprint  # others use the model, too, and `throughout` changes what it computes
    token_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    rounds: list[tuple[list[list[int]], dict[Tier, int]]] = [
        ([a], {}),
        ([b], {}),
        ([[*a, 5, 6], [*a[:20], 9]], {Tier.host: 60, Tier.device: 20}),
        ([[*b, 7], [*b[:9], 8, 8]], {Tier.disk: 50, Tier.device: 9}),
        ([[*b, 7, 7]], {Tier.device: 51}),
    ]
    with throughout(model.dtype):
        plain = engine_of(model)
        for number, (prompts, found) in enumerate(rounds):
            if number in (0, 3):
                tree = PrefixTree(90 * token_bytes, host_bytes=90 * token_bytes, folder=tmp_path)
                engine = engine_of(model, tree)
            tree.found_tokens.clear()
            ours, theirs = engine.generate(prompts, OPTIONS), plain.generate(prompts, OPTIONS)
            require_same(ours, theirs)
            assert tree.found_tokens == found and computed_and_cached(ours)[1] == sum(found.values())
            if number == 2:
                tree.save()
    assert all(node.holds == 0 for node in tree.nodes())


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_is_found_damaged_in_the_middle_of_a_forward_is_computed_anew(tmp_path: Path, layer: int) -> None:
    model, a, mirror = tiny_model("llama"), prompt(60, seed=1), PrefixTree(inf)
    b = a[:30] + prompt(8, seed=2)
    assert model.fingerprint  # as above
    with throughout(model.dtype), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain, tree = engine_of(model), PrefixTree(inf, folder=tmp_path)
        engine_of(model, tree).generate([a, b], OPTIONS)
        tree.save()
        prefix_tasks.damage(tmp_path, layer)
        tree = PrefixTree(inf, folder=tmp_path)
        engine = engine_of(model, tree)
        tree.listen(mirror.apply)
        for prompts, cached in [
            ([[*a, 5], prompt(20, seed=3), [*b, 6]], 0),
            ([[*a, 7], [*b[:34], 8]], 60 + 34),
        ]:
            ours, theirs = engine.generate(prompts, OPTIONS), plain.generate(prompts, OPTIONS)
            require_same(ours, theirs)
            assert computed_and_cached(ours)[1] == cached
            for ids in prompts:
                assert mirror.num_stored(ids, next(tree.nodes()).key) == tree.num_stored(ids, next(tree.nodes()).key)
    [warning] = told
    assert "is damaged, and was removed" in str(warning.message)
    assert all(node.holds == 0 for node in tree.nodes())


def test_a_forward_begins_before_later_layers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's checksum is compared when the first one has been computed."""
    model, ids, compared = tiny_model("llama"), prompt(40, seed=1), threading.Event()
    assert model.fingerprint
    checksum, number = tier_files.checksum, 0

    def waiting(layer: Tensor) -> int:
        nonlocal number
        number += 1
        assert number == 1 or compared.wait(30)
        return checksum(layer)

    with throughout(model.dtype):
        tree = PrefixTree(inf, folder=tmp_path)
        first = engine_of(model, tree).generate([ids], OPTIONS)
        tree.save()
        engine = engine_of(model, PrefixTree(inf, folder=tmp_path))
        monkeypatch.setattr(tier_files, "checksum", waiting)
        monkeypatch.setattr(StageRun, "_after_layer", _then(StageRun._after_layer, compared.set))
        second = engine.generate([ids], OPTIONS)
    require_same(second, first)
    assert computed_and_cached(second) == (1, 39) and number == model.num_layers


def _then(call: Callable[..., None], follow: Callable[[], None]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        call(*args)
        follow()

    return both


def test_at_a_start_the_system_reads_ahead_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, read = opened(PrefixTree(inf, folder=tmp_path)), list[str]()
    a, b, c = texts(3)
    for ids in (a, b, c):
        tree.insert(ids, layers(10), A).release()
    tree.match(a, A).release()
    tree.save()
    monkeypatch.setattr(tier_files.TierFiles, "_read_ahead", lambda files, name: read.append(name))
    opened(PrefixTree(15 * TOKEN_BYTES, host_bytes=9 * TOKEN_BYTES, folder=tmp_path)).wait_for_copies()
    assert read == [prefix_run.PrefixRun(key=A, ids=tuple(ids), start=0).name for ids in (a, c)]


def test_files_of_other_weights_another_rope_and_another_dtype_are_not_found(tmp_path: Path) -> None:
    ids = prompt(30)
    slower, changed = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e4}), build("llama")
    with torch.no_grad():
        next(changed.parameters()).add_(1e-3)
    with throughout(torch.float64):
        models = [tiny_model("llama"), Model(slower, name="slower"), Model(changed, name="changed")]
    models.append(tiny_model("llama", torch.float32))
    assert len({model.fingerprint for model in models}) == 3  # of the weights alone, outside of `throughout`
    for number, model in enumerate(models):
        with throughout(model.dtype), warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            tree = PrefixTree(inf, folder=tmp_path)
            engine = engine_of(model, tree)
            assert computed_and_cached(engine.generate([ids], OPTIONS)) == (30, 0)
            tree.save()
        assert len(list(tmp_path.glob("*.safetensors"))) == number + 1
