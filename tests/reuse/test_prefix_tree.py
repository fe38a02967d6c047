"""The prefix tree against a set of all stored prefixes, over random operations; and that wrong trees are found out."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from runahead.reuse.prefix_node import PrefixNode
from runahead.reuse.prefix_tree import Change, Dropped, PrefixHit, PrefixTree, Stored, salted
from runahead.reuse.radix_tree import RadixTree
from runahead.reuse.tiers import layer_rows
from runahead.reuse.tiers import store as tiered_store
from runahead.reuse.tiers.store import TieredStore
from tests.examples import examples

Ids = tuple[int, ...]
WIDTHS = (1, 2)
"""Values per token of each layer, float64."""
TOKEN_BYTES = 8 * sum(WIDTHS)


class Checked:
    """A tree, and beside it what it should hold: every stored prefix with the number of its last use.

    The keys and values of a token are a number that only this token after these tokens under this key has.
    """

    def __init__(self, limit_bytes: float) -> None:
        self.tree = PrefixTree(limit_bytes, on_change=self._hear)
        self.mirror = PrefixTree(inf)
        self.used: dict[tuple[str, Ids], int] = {}
        self.held: list[tuple[str, Ids, PrefixHit | None]] = []
        self._now = 0
        self._numbers: dict[tuple[str, Ids], int] = {}

    def _hear(self, change: Change) -> None:
        self.mirror.apply(change)
        ends = range(1, len(change.ids) + 1)
        prefixes = [(change.key, change.ids[:end]) for end in ends]
        if isinstance(change, Stored):
            assert any(prefix not in self.used for prefix in prefixes)
            self.used |= dict.fromkeys(prefixes, self._now)
            return
        gone = prefixes[change.num_left :]
        free = [(key, ids) for key, ids in self.used if not self._follows(key, ids) and not self._is_held(key, ids)]
        assert gone and gone[-1] in free, "only leaves that nobody holds go"
        assert self.used[gone[-1]] == min(self.used[leaf] for leaf in free), "the least recently used one goes"
        for prefix in gone:
            assert not self._is_held(*prefix)
            del self.used[prefix]

    def _follows(self, key: str, ids: Ids) -> bool:
        return any((key, (*ids, token)) in self.used for token in range(3))

    def _is_held(self, key: str, ids: Ids) -> bool:
        return any(key == other and held[: len(ids)] == ids for other, held, _ in self.held)

    def longest(self, key: str, ids: Ids) -> int:
        return max((end for end in range(len(ids) + 1) if (key, ids[:end]) in self.used), default=0)

    def _use(self, key: str, ids: Ids) -> None:
        self._now += 1
        for end in range(1, self.longest(key, ids) + 1):
            self.used[key, ids[:end]] = self._now

    def match(self, key: str, ids: Ids) -> PrefixHit:
        expected = self.longest(key, ids)
        assert self.tree.num_stored(ids, key) == self.mirror.num_stored(ids, key) == expected
        self._use(key, ids)
        hit = self.tree.match(ids, key)
        assert hit.num_tokens == expected
        self.held.append((key, ids[:expected], hit))
        return hit

    def insert(self, key: str, rows: list[Ids], room: int) -> None:
        """Compute rows in one batch, padded on the left, with room for new tokens; each reuses what is there."""
        hits = [self.match(key, ids[:-1]) for ids in rows]
        lengths = [len(ids) - hit.num_tokens for ids, hit in zip(rows, hits, strict=True)]
        assert all(length >= 1 for length in lengths), "the last token is always computed"
        layers = [torch.full((max(lengths) + room, len(rows), 1, width), torch.nan).double() for width in WIDTHS]
        for row, (ids, hit, length) in enumerate(zip(rows, hits, lengths, strict=True)):
            first = max(lengths) - length
            views = [layer[first : first + length, row] for layer in layers]
            for view in views:
                view[:] = self.numbers(key, ids)[hit.num_tokens :, None, None]
            self._use(key, ids)
            self.held.append((key, ids, None))
            new = self.tree.insert(ids, views, key, start=hit.num_tokens)
            self.held[-1] = key, ids[: new.num_tokens], new
            num_new = len(ids) - self.longest(key, ids)
            assert num_new == 0 or num_new * TOKEN_BYTES > self.tree.limit_bytes

    def release(self, index: int) -> None:
        if self.held:
            *_, hit = self.held.pop(index % len(self.held))
            assert hit is not None
            hit.release()
            hit.release()  # does nothing

    def numbers(self, key: str, ids: Ids) -> Tensor:
        found = [self._numbers.setdefault((key, ids[:end]), len(self._numbers)) for end in range(1, len(ids) + 1)]
        return torch.tensor(found, dtype=torch.float64)

    def check(self) -> None:
        """Check the invariants, which hold after every operation."""
        storages: dict[int, tuple[int, int]] = {}
        for node in self.tree.nodes():
            text = tuple(token for each in node.path for token in each.ids)
            expected = self.numbers(node.key, text)[-len(node.ids) :]
            for layer, width in zip(node.layers_TKX, WIDTHS, strict=True):
                assert layer.shape == (len(node.ids), 1, width)
                assert (layer == expected[:, None, None]).all(), "keys and values of other tokens"
                storage = layer.untyped_storage()
                size, live = storages.get(storage.data_ptr(), (storage.nbytes(), 0))
                storages[storage.data_ptr()] = size, live + layer.nbytes
        assert self.tree.num_bytes == sum(size for size, _ in storages.values())
        for key, ids, hit in self.held:
            assert hit is not None and tuple(token for node in hit.nodes for token in node.ids) == ids
            assert all(node.key == key for node in hit.nodes)
        if not self.held:
            assert self.tree.num_bytes <= self.tree.limit_bytes
            assert all(2 * live >= size for size, live in storages.values()), "an allocation is kept for less than half"


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
KEYS = st.sampled_from(["float32", "bfloat16", salted("float32", "salt")])
OPERATIONS = st.one_of(
    st.tuples(st.just("insert"), KEYS, st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 9)),
    st.tuples(st.just("match"), KEYS, TEXTS),
    st.tuples(st.just("release"), st.integers(0, 9)),
)
A, B = "float32", "bfloat16"
EXAMPLE: list[tuple[Any, ...]] = [
    ("insert", A, [(0, 1, 2, 0, 1), (0, 1, 2)], 0),
    ("insert", B, [(0, 1, 2, 0, 1)], 9),
    ("release", 0),
    ("release", 0),
    ("match", A, (0, 1, 2, 2)),
    *[("release", 0)] * 9,
    ("insert", A, [(1, 1, 1, 1), (2, 2), (0, 0, 0)], 0),
    ("match", A, (2, 2)),
    *[("release", 0)] * 5,
    ("match", A, (0, 1)),
    ("insert", A, [(1, 0, 1, 0, 1, 0)], 0),
    ("insert", B, [(2, 2, 2, 2, 2, 2)], 0),
    *[("release", 0)] * 9,
    ("match", B, (0, 1, 2)),
    ("insert", A, [(2, 2, 1, 1, 0, 0, 0)], 3),
]
LIMIT = 14 * TOKEN_BYTES


def operate(operations: list[tuple[Any, ...]], limit_bytes: float) -> Checked:
    checked = Checked(limit_bytes)
    for name, *given_ in operations:
        getattr(checked, name)(*given_)
        checked.check()
    while checked.held:
        checked.release(0)
        checked.check()
    return checked


@examples(60)
@given(st.lists(OPERATIONS, max_size=25), st.sampled_from([0, 6, 14, 40, inf]))
@example(EXAMPLE, LIMIT / TOKEN_BYTES)
def test_a_tree_holds_what_a_set_of_all_prefixes_says(operations: list[tuple[Any, ...]], limit_tokens: float) -> None:
    operate(operations, limit_tokens * TOKEN_BYTES)


def forgets_holds(patch: pytest.MonkeyPatch) -> None:
    split = RadixTree._split

    def wrong(self: RadixTree, node: PrefixNode, num_tokens: int) -> PrefixNode:
        before = split(self, node, num_tokens)
        before.holds = 0
        return before

    patch.setattr(RadixTree, "_split", wrong)


def drops_what_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredStore, "_may_leave", lambda store, node, tier: not node.children)


def drops_the_newest(patch: pytest.MonkeyPatch) -> None:
    def pop(heap: list[Any]) -> Any:
        return heap.pop(heap.index(max(heap)))

    patch.setattr(tiered_store, "heapq", SimpleNamespace(**(vars(heapq) | {"heappop": pop})))


def knows_no_keys(patch: pytest.MonkeyPatch) -> None:
    match = PrefixTree.match
    patch.setattr(PrefixTree, "match", lambda self, ids, key: match(self, ids, A))


def counts_views(patch: pytest.MonkeyPatch) -> None:
    class OfView:
        def __init__(self, view: Tensor) -> None:
            self._view = view

        def data_ptr(self) -> int:
            return self._view.data_ptr()

        def nbytes(self) -> int:
            return self._view.nbytes

    patch.setattr(layer_rows, "Tensor", SimpleNamespace(untyped_storage=OfView))


def copies_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredStore, "_move", lambda self, memory: None)


def splits_beside_the_place(patch: pytest.MonkeyPatch) -> None:
    same = PrefixNode.num_same
    patch.setattr(PrefixNode, "num_same", lambda *given_: max(1, same(*given_) - 1))


WRONG: list[Callable[[pytest.MonkeyPatch], None]] = [
    forgets_holds,
    drops_what_is_held,
    drops_the_newest,
    knows_no_keys,
    counts_views,
    copies_nothing,
    splits_beside_the_place,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_tree_is_found_out(wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    operate(EXAMPLE, LIMIT)
    wrong(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        operate(EXAMPLE, LIMIT)


def test_a_split_and_an_insertion_copy_nothing() -> None:
    slab = torch.randn(6, 2, 1, 4)
    tree = PrefixTree(inf)
    tree.insert([5, 6, 7, 8, 9, 9], [slab[:, 0]], "a").release()
    tree.insert([5, 6, 7, 1, 1, 1], [slab[:, 1]], "a").release()
    hits = [tree.match(ids, "a") for ids in ([5, 6, 7, 8], [5, 6, 7, 1])]
    assert hits[0].nodes[0] is hits[1].nodes[0]
    for hit in hits:
        for node in hit.nodes:
            for layer in node.layers_TKX:
                assert layer.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
    assert tree.num_bytes == slab.nbytes  # counted once


def test_what_is_held_may_exceed_the_limit_until_it_is_released() -> None:
    def layers(num_tokens: int) -> list[Tensor]:
        return [torch.zeros(num_tokens, 1, 4)]

    tree = PrefixTree(10 * 16)
    first = tree.insert([1] * 8, layers(8), "a")
    second = tree.insert([2] * 8, layers(8), "a")
    assert tree.num_bytes == 16 * 16
    second.release()
    assert (tree.num_stored([1] * 8, "a"), tree.num_stored([2] * 8, "a")) == (8, 0)
    first.release()
    assert tree.num_stored([1] * 8, "a") == 8
    assert tree.insert([3] * 11, layers(11), "a").num_tokens == 0  # too large; nothing goes for it
    assert tree.num_stored([1] * 8, "a") == 8


def test_tokens_after_some_that_are_not_stored_are_not_stored() -> None:
    tree = PrefixTree(inf)
    assert tree.insert([1, 2, 3, 4], [torch.zeros(2, 1, 4)], "a", start=2).num_tokens == 0
    assert tree.num_stored([1, 2, 3, 4], "a") == 0


def test_a_mirror_is_told_what_is_dropped() -> None:
    mirror = PrefixTree(inf)
    told = [Stored(key="a", ids=(1, 2, 3)), Stored(key="a", ids=(1, 2, 4)), Dropped(key="a", ids=(1, 2, 3), num_left=2)]
    for change in told:
        mirror.apply(change)
    found = partial(mirror.num_stored, key="a")
    assert [found(ids) for ids in ([1, 2, 3], [1, 2, 4], [1, 2])] == [2, 3, 2]
