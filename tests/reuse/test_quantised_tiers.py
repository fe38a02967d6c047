"""Prefixes in 8, 4 or 2 bits in host memory and on disk: each number is quantised once, and bytes are as predicted."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from runahead.cache.quantised import groups, records
from runahead.cache.quantised.groups import GROUP, ChannelGroups, TokenGroups
from runahead.cache.quantised.records import KVRecords, whole_groups
from runahead.cache.slabs import KVShape
from runahead.reuse.prefix_node import PrefixNode
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.tiers.entry import Tier
from tests.cache.predicted_bytes import group_bytes
from tests.examples import examples
from tests.families import prompt, throughout
from tests.ranks.tasks import tiny_model
from tests.reuse.test_prefix_tiers import OPTIONS, TIERED_EXAMPLE, TIERED_OPERATIONS, Tiered, operate, rows_of
from tests.reuse.test_prefix_tree import LIMIT, TOKEN_BYTES, A, B
from tests.reuse.test_prefixes import computed_and_cached, engine_of, require_same

SHAPES = [
    KVShape(num_kv_heads=2, key_dim=40, value_dim=24, dtype=torch.float32),
    KVShape(num_kv_heads=1, key_dim=7, value_dim=64, dtype=torch.float32),
]
CPU, KEY, NUM_TOKENS = torch.device("cpu"), "a", 70
IDS = list(range(NUM_TOKENS))


def numbers(num_tokens: int = NUM_TOKENS, shapes: list[KVShape] = SHAPES) -> list[Tensor]:
    """Keys and values of each layer."""
    draw = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, each.num_kv_heads, each.key_dim + each.value_dim, generator=draw).to(each.dtype)
        for each in shapes
    ]


def stored(layers_TKX: list[Tensor], bits: int, shapes: list[KVShape] = SHAPES) -> list[Tensor]:
    """Keys and values that were quantised once."""
    kept = KVRecords(shapes, bits)
    return [kept.unpack(layer, kept.pack(layer, kv_TKX)) for layer, kv_TKX in enumerate(layers_TKX)]


def opened(tree: PrefixTree) -> PrefixTree:
    tree.open(KEY, SHAPES, CPU)
    return tree


def push_down(tree: PrefixTree) -> None:
    """Let all that is on the device go to the next tier that has room."""
    limit, tree.limit_bytes = tree.limit_bytes, 0
    tree.make_room()
    tree.wait_for_copies()
    tree.limit_bytes = limit


def found(tree: PrefixTree, ids: list[int] = IDS, key: str = KEY) -> list[Tensor]:
    """Keys and values of a text, from wherever they are."""
    hit = tree.match(ids, key)
    assert hit.num_tokens == len(ids)
    layers = [torch.cat(each) for each in zip(*(list(node.layers_TKX) for node in hit.nodes), strict=True)]
    hit.release()
    return layers


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


# Records.


@pytest.mark.parametrize(("bits", "dim"), [(8, 64), (4, 64), (2, 40), (4, 7), (8, 7)])
def test_records_are_groups_of_32_tokens_of_keys_and_32_channels_of_values(bits: int, dim: int) -> None:
    """Keys after the last whole group of tokens are in groups of channels. Wrong: all keys are."""
    shape = KVShape(num_kv_heads=3, key_dim=dim, value_dim=64, dtype=torch.float32)
    [kv_TKX] = numbers(shapes=[shape])
    [kept_TKX] = stored([kv_TKX], bits, [shape])
    kv_1KTX, whole = kv_TKX.transpose(0, 1)[None], NUM_TOKENS // GROUP * GROUP
    keys = ChannelGroups.quantise(kv_1KTX[:, :, :whole, :dim], bits).read(0, whole, torch.float32)
    rest = TokenGroups.quantise(kv_1KTX[:, :, whole:, :dim], bits).read(0, NUM_TOKENS - whole, torch.float32)
    values = TokenGroups.quantise(kv_1KTX[..., dim:], bits).read(0, NUM_TOKENS, torch.float32)
    expected_1KTX = torch.cat([torch.cat([keys, rest], dim=2), values], dim=3)
    assert torch.equal(kept_TKX, expected_1KTX[0].transpose(0, 1))
    if dim % GROUP == 0:
        kinds = (ChannelGroups, dim), (TokenGroups, 64)
        [record] = KVRecords([shape], bits).shapes
        assert GROUP * record.bytes_per_token() == 3 * sum(group_bytes(kind, GROUP, each, bits) for kind, each in kinds)


@pytest.mark.parametrize(("start", "stop"), [(0, 70), (0, 1), (5, 40), (31, 33), (65, 66), (69, 70), (40, 70)])
def test_a_part_of_records_is_read_with_the_rest_of_its_groups(start: int, stop: int) -> None:
    """Wrong: `whole_groups` that gives the part itself, or that ends beyond the last row."""
    first, end = whole_groups(start, stop, NUM_TOKENS)
    kept = KVRecords(SHAPES, 4)
    for layer, kv_TKX in enumerate(numbers()):
        packed = kept.pack(layer, kv_TKX)
        part = kept.unpack(layer, packed[first:end])[start - first : stop - first]
        assert torch.equal(part, kept.unpack(layer, packed)[start:stop])


# The tree.


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_number_is_quantised_once_however_often_it_moves_and_wherever_its_text_is_split(
    tmp_path: Path, bits: int
) -> None:
    """Wrong: no records beside what came back, which is quantised in other groups once its text was split."""
    exact = numbers()
    tree = opened(PrefixTree(inf, host_bytes=inf, folder=tmp_path, bits=bits))
    tree.insert(IDS, exact, KEY).release()
    assert same(found(tree), exact)
    push_down(tree)
    first = found(tree)
    assert same(first, stored(exact, bits)) and not same(first, exact)
    for length in (45, 33, 3):
        push_down(tree)
        assert same(found(tree, IDS[:length]), [layer[:length] for layer in first])  # splits it
        push_down(tree)
        assert same(found(tree), first)
    tree._store.memory[Tier.host].limit_bytes = 0
    push_down(tree)
    assert {node.tier for node in tree.nodes()} == {Tier.disk}
    assert same(found(tree), first)
    later = opened(PrefixTree(inf, host_bytes=inf, folder=tmp_path, bits=bits))
    found(later, IDS[:50])
    push_down(later)
    assert {node.tier for node in later.nodes()} == {Tier.host, Tier.disk}
    assert same(found(later), first)


def test_what_is_left_of_a_text_moves_with_its_records() -> None:
    """Memory of which less than half is left is copied. Wrong: `cloned` without the records."""
    exact = numbers()
    tree = opened(PrefixTree(inf, host_bytes=inf, bits=4))
    tree.insert(IDS, exact, KEY).release()
    push_down(tree)
    first = [layer[:20] for layer in found(tree)]
    found(tree, IDS[:20])
    rest = tree._texts.known(IDS, KEY)[0][-1]
    tree._lose(rest)
    tree.make_room()
    copies = tree._kind(KEY).copies
    assert tree.num_bytes == 20 * copies.token_bytes + GROUP * copies.stored_token_bytes
    push_down(tree)
    assert same(found(tree, IDS[:20]), first)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_bytes_of_a_tier_are_those_of_records_and_limits_hold_to_the_byte(tmp_path: Path, bits: int) -> None:
    """Wrong: room for a node is asked for in the model's dtype."""
    token_bytes = sum(shape.bytes_per_token() for shape in KVRecords(SHAPES, bits).shapes)
    of_head = (40 * bits // 8 + 8) + (24 * bits // 8 + 4)
    of_other = {8: (7 + 4) + (64 + 8), 4: (4 + 4) + (32 + 8), 2: (2 + 4) + (16 + 8)}[bits]
    assert token_bytes == 2 * of_head + of_other
    for room, tier in ((NUM_TOKENS * token_bytes, Tier.host), (NUM_TOKENS * token_bytes - 1, Tier.disk)):
        tree = opened(PrefixTree(inf, host_bytes=room, folder=tmp_path / str(room), bits=bits))
        tree.insert(IDS, numbers(), KEY).release()
        push_down(tree)
        assert [node.tier for node in tree.nodes()] == [tier]
        assert tree.bytes_by_tier["host"] == (NUM_TOKENS * token_bytes if tier is Tier.host else 0)
    [path] = (tmp_path / str(room)).glob("*.safetensors")
    assert sum(tensor.nbytes for tensor in load_file(path).values()) == NUM_TOKENS * token_bytes
    assert tree.bytes_by_tier["disk"] == path.stat().st_size
    for room, tier in ((64 * token_bytes, Tier.host), (64 * token_bytes - 1, Tier.disk)):
        tree._store.memory[Tier.host].limit_bytes = room
        found(tree, IDS[:45])
        push_down(tree)
        assert tree._texts.known(IDS[:45], KEY)[0][-1].tier is tier  # whole groups: 64 tokens


def test_files_of_other_bits_are_not_found_and_told_once(tmp_path: Path) -> None:
    """Wrong: a file's key without its bits."""
    for bits in (8, 4, 2, None):
        tree = opened(PrefixTree(inf, folder=tmp_path / str(bits), bits=bits))
        tree.insert(IDS, numbers(), KEY).release()
        tree.save()
        expected = stored(numbers(), bits) if bits else numbers()
        for other in (4, 2, None):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                later = opened(PrefixTree(inf, folder=tmp_path / str(bits), bits=other))
                later.wait_for_copies()
            if other == bits:
                assert not told and same(found(later), expected)
            else:
                assert later.num_stored(IDS, KEY) == 0 and len(told) == 1
                assert "RoPE setting or cache.tier_bits are not used; files: 1" in str(told[0].message)
        assert len(list((tmp_path / str(bits)).glob("*.safetensors"))) == 1


class InFewBits(Tiered):
    """In groups of two tokens, which are their largest and smallest number, but for the rounding of scales."""

    most_off = 0.3

    def layers_of(self, node: PrefixNode) -> list[Tensor]:
        rows = rows_of(self.tree, node)
        if not rows.memory.is_packed:
            return list(rows)
        kept, first = self.tree._kind(node.key).copies._records, rows.start - rows.whole.start
        assert kept is not None
        layers = [kept.unpack(*each) for each in enumerate(rows.whole)]
        return [layer[first : first + len(node.ids)] for layer in layers]


def operate_in_few_bits(
    folder: Path, operations: list[tuple[Any, ...]], limit_tokens: float, host_tokens: float, disk_bytes: float
) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # files of the other key
        patch.setattr(os, "fsync", lambda handle: None)
        for module in (groups, records):
            patch.setattr(module, "GROUP", 2)
        operate(operations, InFewBits(limit_tokens * TOKEN_BYTES, host_tokens * 10, disk_bytes, folder, bits=4))


@pytest.mark.parametrize("host_tokens", [5, 0])
def test_tiers_in_few_bits_hold_what_a_set_of_all_prefixes_says(tmp_path: Path, host_tokens: int) -> None:
    """Wrong: `whole` that is the part itself; a file's rows before its run (`around`) that are forgotten."""
    operate_in_few_bits(tmp_path, TIERED_EXAMPLE, LIMIT / TOKEN_BYTES, host_tokens, inf)


TEXTS = [(2, 0, 2, 0, 0, 2, 2, 1), (2, 1, 1), (2, 2, 2)]
FOUND = {
    "a text of which host memory takes the end alone": ([("insert", B, TEXTS, 5)] * 2, 14, 5, inf),
    "files that are written while the tree is saved": (
        [("insert", A, [(2,), (2, 1, 2, 1, 1, 2, 1, 0, 0), (2, 1)], 1), ("restart",)],
        14,
        0,
        inf,
    ),
}
"""Failures that random operations found, with the limits of the tiers."""


@pytest.mark.parametrize("name", FOUND)
def test_what_random_operations_found_stays_mended(tmp_path: Path, name: str) -> None:
    operate_in_few_bits(tmp_path, *FOUND[name])


@pytest.mark.slow
@examples(20)
@given(
    st.lists(TIERED_OPERATIONS, max_size=15),
    st.sampled_from([6, 14]),
    st.sampled_from([0, 5, 12]),
    st.sampled_from([0, 2000, inf]),
)
def test_tiers_in_few_bits_under_random_operations(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[Any, ...]],
    limit_tokens: float,
    host_tokens: float,
    disk_bytes: float,
) -> None:
    operate_in_few_bits(tmp_path_factory.mktemp("prefixes"), operations, limit_tokens, host_tokens, disk_bytes)


# With a model.


@pytest.mark.parametrize("lower", [push_down, PrefixTree.save])
def test_a_prompt_after_a_prefix_in_few_bits_attends_to_the_numbers_of_its_records(
    tmp_path: Path, lower: Callable[[PrefixTree], None]
) -> None:
    model, ids = tiny_model("llama"), prompt(NUM_TOKENS)
    with throughout(torch.float64):
        exact, few = PrefixTree(inf), PrefixTree(inf, host_bytes=inf, folder=tmp_path, bits=4)
        for tree in (exact, few):
            engine = engine_of(model, tree)
            engine.generate([ids], OPTIONS)
        assert engine.prefixes is not None
        key = engine.prefixes.key
        lower(few)
        if lower is PrefixTree.save:
            few = PrefixTree(inf, folder=tmp_path, bits=4)
        as_stored = PrefixTree(inf)
        as_stored.insert(ids, stored(found(exact, ids, key), 4, list(model.kv_shapes)), key).release()
        ours, theirs = (engine_of(model, tree).generate([[*ids, 5]], OPTIONS) for tree in (few, as_stored))
    require_same(ours, theirs)
    assert computed_and_cached(ours) == (1, NUM_TOKENS)
