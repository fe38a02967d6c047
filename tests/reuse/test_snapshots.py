"""Hybrid models with a prefix tree: texts go on after the last snapshot of their states, as if all was computed."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies.snapkv import SnapKV
from runahead import GenerationOptions, PrefillOptions
from runahead.attention.states import StateLayer, States
from runahead.cache.slabs import KVShape
from runahead.config import CacheOptions, Speculate
from runahead.prefill import Prefilled, reusing
from runahead.prefill.base import PrefillJob
from runahead.prefill.kv_runahead import KVRunahead
from runahead.reuse import prefixes
from runahead.reuse.prefix_node import SNAPSHOT, PrefixNode
from runahead.reuse.prefix_tree import PrefixTree, Stored
from runahead.reuse.prefixes import RowPrefix
from runahead.reuse.state_rows import state_rows, states_of
from runahead.reuse.tiers.entry import Tier
from runahead.reuse.tiers.file_format import read_metadata
from runahead.thinning.rank_policies import RankPolicies
from tests.examples import examples
from tests.families import HYBRIDS, oracle_logits, oracle_tokens, prompt, throughout
from tests.ranks.tasks import tiny_model
from tests.reuse.finders import CPU, KEY, SHAPES, numbers, same
from tests.reuse.test_prefixes import OPTIONS, ROOMY, Texts, computed_and_cached, engine_of, require_same
from tests.reuse.test_tiered_store import DAMAGES, file_limit

FAST = ["qwen3_next", "lfm2", "falcon_h1", "mamba2", "jamba"]
"""The last but one has states alone, and the layers of the last take a given state for a single token alone."""
OTHERS = [family for family in HYBRIDS if family not in FAST]
FAMILIES = [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
WRONG = 1e-5


class KnownStates:
    """Where snapshots are: at the ends of prompts and answers, and in prompts after every so many tokens."""

    def __init__(self, snapshot_tokens: int) -> None:
        self._step, self._ends = snapshot_tokens, set[tuple[int, ...]]()

    def add(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        inside = range(self._step, len(ids), self._step) if self._step else ()
        self._ends |= {tuple(ids[:end]) for end in inside} | {tuple(ids), (*ids, *answer[:-1])}

    def reused(self, ids: Sequence[int]) -> int:
        return max((end for end in range(len(ids)) if tuple(ids[:end]) in self._ends), default=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("snapshot_tokens", [0, 16])
@pytest.mark.sampled(6)
def test_texts_go_on_after_their_last_snapshot(family: str, snapshot_tokens: int) -> None:
    """Only the rest is computed, in padded batches, too, whose rows end at other steps."""
    model, texts, known = tiny_model(family), Texts(seed=len(family)), KnownStates(snapshot_tokens)
    engine = engine_of(model, PrefixTree(ROOMY, snapshot_tokens=snapshot_tokens), PrefillOptions(chunk_tokens=25))
    plain, cached = engine_of(model), 0
    for num_rows in (1, 2, 3, 3):
        prompts = texts.prompts(num_rows)
        if len({len(ids) for ids in prompts}) > 1 and model.uneven_limit is not None:
            prompts = prompts[:1]
        num_new = range(5, 5 - len(prompts), -1)
        options = [GenerationOptions(max_new_tokens=num, ignore_eos=True, logprobs=5) for num in num_new]
        with throughout(model.dtype):
            ours, theirs = engine.generate(prompts, options), plain.generate(prompts, options)
        require_same(ours, theirs)
        reused = [known.reused(ids) for ids in prompts]
        lengths = [len(ids) - num for ids, num in zip(prompts, reused, strict=True)]
        assert computed_and_cached(ours) == (max(lengths), sum(reused))
        cached += sum(reused)
        for ids, each in zip(prompts, ours.generations, strict=True):
            known.add(ids, each.new_token_ids)
            texts.known.append(ids + each.new_token_ids[:-1])
    assert cached > 10 or not snapshot_tokens


@pytest.mark.parametrize(("rest", "other", "copies"), [(20, 5, 0), (5, 20, 1)], ids=["first", "padded"])
def test_the_state_before_a_prompt_is_copied_for_padded_rows_one_layer_at_a_time(
    rest: int, other: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that begins after a snapshot beside one without: the copy stayed as long as the rows were decoded."""
    model, document, made = tiny_model("qwen3_next"), prompt(30, seed=2), StateLayer.made
    engine, options = engine_of(model, PrefixTree(ROOMY)), replace(OPTIONS, max_new_tokens=3)
    prompts, alive = [document + prompt(rest, seed=3), prompt(other, seed=4)], WeakSet[StateLayer]()
    left, clones = list[int](), list[int]()

    def noted(self: StateLayer, change: Callable[[Tensor], Tensor]) -> StateLayer:
        layer = made(self, change)
        if change is Tensor.clone:
            alive.add(layer)
            gc.collect()
            clones.append(len(alive))
        return layer

    def look(*_: Any) -> None:
        gc.collect()
        left.append(len(alive))

    with throughout(model.dtype):
        engine.generate([document], replace(options, max_new_tokens=1))
        monkeypatch.setattr(StateLayer, "made", noted)
        ours = engine.generate(prompts, options, on_tokens=look)
        assert (clones, left) == ([1] * copies * len(model.state_shapes), [0, 0, 0])
        assert computed_and_cached(ours) == (max(rest, other), len(document))
        require_same(ours, engine_of(model).generate(prompts, options))


def answers(tree: PrefixTree, family: str = "qwen3_next") -> Callable[[list[int]], tuple[list[int], tuple[int, int]]]:
    """Answers prompts one after another -> the answer, and how many tokens were computed and reused."""
    model = tiny_model(family)
    engine = engine_of(model, tree)

    def answer(ids: list[int]) -> tuple[list[int], tuple[int, int]]:
        with throughout(model.dtype):
            batch = engine.generate([ids], GenerationOptions(max_new_tokens=5, ignore_eos=True))
        [row] = batch.generations
        top = row.first_token_logits_top5
        logits_V = oracle_logits(family, tuple(ids))
        assert all(abs(logit - float(logits_V[token])) < 1e-9 for token, logit in top)
        return row.new_token_ids, computed_and_cached(batch)

    return answer


def test_a_second_question_computes_what_follows_the_last_snapshot() -> None:
    """The case of issue 43, of 400 tokens for 4,000: the next turn, and a text that branches off in the middle."""
    tens, step, size = 4, 64, 400
    answer, document = answers(PrefixTree(ROOMY, snapshot_tokens=step)), prompt(size, seed=2)
    said, counts = answer(document)
    assert (said, counts) == (oracle_tokens("qwen3_next", tuple(document), 5), (size, 0))
    following = document + said + prompt(6, seed=9)
    said, counts = answer(following)
    assert (said, counts) == (oracle_tokens("qwen3_next", tuple(following), 5), (7, size + 4))
    branch = document[: 75 * tens] + prompt(30, seed=4)
    said, counts = answer(branch)
    assert (said, counts) == (oracle_tokens("qwen3_next", tuple(branch), 5), (11 * tens + 30, 64 * tens))
    assert answer(document)[1] == (4 * tens, 96 * tens), "no snapshot is right before its last token"


@pytest.mark.parametrize(("num_rows", "num_kept"), [(1, 5), (2, 5), (1, 0)])
def test_until_prompts_are_stored_their_states_take_no_more_than_the_tree_may(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, num_kept: int
) -> None:
    """The last ones of all rows together are kept: by hand, of 40 tokens and of 37 after 3 of padding."""
    model, kept = tiny_model("qwen3_next"), list[set[tuple[int, int]]]()
    state_bytes = sum(shape.num_bytes for shape in model.state_shapes)
    engine = engine_of(model, PrefixTree((num_kept + 0.5) * state_bytes, snapshot_tokens=4))
    run = KVRunahead.run

    def noted(self: KVRunahead, job: PrefillJob) -> Prefilled:
        prefilled = run(self, job)
        kept.append(set(prefilled.states))
        return prefilled

    monkeypatch.setattr(KVRunahead, "run", noted)
    prompts = [prompt(40, seed=1), prompt(37, seed=2)][:num_rows]
    with throughout(model.dtype):
        require_same(engine.generate(prompts, OPTIONS), engine_of(model).generate(prompts, OPTIONS))
    ends = {(at, 0) for at in range(4, 40, 4)} | {(3 + at, 1) for at in range(4, 37, 4) if num_rows > 1}
    assert kept[0] == set(sorted(ends)[len(ends) - num_kept :])


def drops_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowPrefix, "states", None)


def keeps_states_of_another_position(patch: pytest.MonkeyPatch) -> None:
    keep = PrefixTree.keep_states
    patch.setattr(PrefixTree, "keep_states", lambda self, ids, *more: keep(self, ids[:-1], *more))


def goes_on_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixTree, "num_stored", lambda self, ids, key: self._texts.known(ids, key)[1])


def gives_states_of_the_row_beside(patch: pytest.MonkeyPatch) -> None:
    states_of = reusing.states_of
    patch.setattr(reusing, "states_of", lambda rows, *more: states_of(rows[::-1], *more))


def begins_padded_rows_with_the_others(patch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> States:
        states = states_of(*given)
        states.begun = ()
        return states

    states_of = reusing.states_of
    patch.setattr(reusing, "states_of", wrong)


def keeps_states_once_all_rows_have_ended(patch: pytest.MonkeyPatch) -> None:
    class Later(Sequence[Tensor]):
        def __init__(self, states: States) -> None:
            self._states = states

        def __len__(self) -> int:
            return len(self._states.layers)

        def __getitem__(self, layer: Any) -> Any:
            return state_rows(self._states)[layer]

    patch.setattr(prefixes, "state_rows", Later)


def splits_states_off_with_the_beginning(patch: pytest.MonkeyPatch) -> None:
    split = PrefixNode.split

    def wrong(self: PrefixNode, num_tokens: int) -> PrefixNode:
        before = split(self, num_tokens)
        if (snapshot := self.children.pop(SNAPSHOT, None)) is not None:
            before.children[SNAPSHOT], snapshot.parent = snapshot, before
        return before

    patch.setattr(PrefixNode, "split", wrong)


WRONGS = [
    drops_states,
    keeps_states_of_another_position,
    goes_on_anywhere,
    gives_states_of_the_row_beside,
    begins_padded_rows_with_the_others,
    keeps_states_once_all_rows_have_ended,
    splits_states_off_with_the_beginning,
]


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", pytest.param("jamba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrong", [None, *WRONGS], ids=lambda each: "right" if each is None else each.__name__)
def test_wrong_states_show(
    wrong: Callable[[pytest.MonkeyPatch], None] | None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    if wrong is not None:
        wrong(monkeypatch)
    engine, plain = engine_of(model, PrefixTree(ROOMY)), engine_of(model)
    prompts = [prompt(40, seed=1), prompt(40, seed=2)]
    options = [GenerationOptions(max_new_tokens=num, ignore_eos=True, logprobs=5) for num in (2, 6)]

    def difference(asked: list[list[int]]) -> float:
        ours, theirs = engine.generate(asked, options), plain.generate(asked, options)
        pairs = zip(ours.generations, theirs.generations, strict=True)
        tops = [(dict(our.first_token_logits_top5), dict(their.first_token_logits_top5)) for our, their in pairs]
        same_tokens = all(our.keys() == their.keys() for our, their in tops)
        return max(abs(our[token] - their[token]) for our, their in tops for token in our) if same_tokens else inf

    with throughout(model.dtype):
        first = engine.generate(prompts, options)
        texts = [ids + each.new_token_ids for ids, each in zip(prompts, first.generations, strict=True)]
        try:
            found = [
                difference([texts[0] + prompt(3, seed=5), texts[1] + prompt(9, seed=6)]),
                difference([prompts[0][:30] + prompt(9, seed=7), prompts[1] + prompt(4, seed=8)]),
                difference([prompts[0][:30] + prompt(9, seed=8), prompts[1] + prompt(4, seed=8)]),
            ]
        except AssertionError as error:
            found = [inf] if "is lost" in str(error) else []
    assert (max(found) < 1e-9) if wrong is None else (max(found) > WRONG), found


class NewMemory(TorchDispatchMode):
    """Notes the memory that operations have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self._known = list[int](), set[int]()
        self._held = list[Tensor]()  # so that no memory is taken twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and (where := each.untyped_storage().data_ptr()) not in given | self._known:
                self.sizes.append(each.untyped_storage().nbytes())
                self._known.add(where)
                self._held.append(each)
        return made


@pytest.mark.parametrize("family", FAST)
def test_states_of_a_batch_are_copied_once(family: str) -> None:
    """Two rows, and one that has no token yet: their states have the bytes of the rows, and memory of their own."""
    model = tiny_model(family)
    sizes = [shape.num_bytes for shape in model.state_shapes]
    rows = [[torch.full((1, 1, size), 7 * row, dtype=torch.uint8) for size in sizes] for row in (1, 2)]
    with NewMemory() as taken:
        states = states_of([rows[0], None, rows[1]], model.state_shapes, model.empty_states(), CPU)  # type: ignore[arg-type]
    assert sum(size for size in taken.sizes if size > 1) == states.num_bytes == 3 * sum(sizes)
    for row, value in enumerate((7, 0, 14)):
        assert all(bool((part == value).all()) for part in state_rows(states.row(row)))


def test_policies_on_the_attention_layers_go_on_after_a_snapshot() -> None:
    """With a budget of everything: all logits are those of no policy."""
    model = tiny_model("qwen3_next")
    policies = RankPolicies.everywhere([SnapKV(budget=200, window=4)])
    engine = engine_of(model, PrefixTree(ROOMY, snapshot_tokens=16), policies=policies)
    for ids in (prompt(70), [*prompt(70), *prompt(9, seed=3)], [*prompt(40), *prompt(9, seed=5)]):
        with throughout(model.dtype):
            ours, theirs = engine.generate([ids], OPTIONS), engine_of(model).generate([ids], OPTIONS)
        require_same(ours, theirs)
    assert computed_and_cached(ours) == (17, 32)


def test_in_few_bits_a_text_goes_on_after_a_snapshot() -> None:
    """The answers are those without a tree: keys and values in the tree are those of the model's dtype."""
    model, policies = tiny_model("qwen3_next"), RankPolicies(storage=CacheOptions(bits=4, residual=8))
    engine = engine_of(model, PrefixTree(ROOMY, snapshot_tokens=16), policies=policies)
    for ids in (prompt(70), [*prompt(70), *prompt(9, seed=3)], [*prompt(40), *prompt(9, seed=5)]):
        with throughout(model.dtype):
            ours, theirs = (each.generate([ids], OPTIONS) for each in (engine, engine_of(model, policies=policies)))
        require_same(ours, theirs)
    assert computed_and_cached(ours) == (17, 32)


@pytest.mark.parametrize("family", FAST)
def test_a_turn_after_drafts_goes_on_after_their_states(family: str) -> None:
    """Rejected drafts are in no snapshot: what repeats is drafted, and soon wrong."""
    model, again = tiny_model(family), prompt(6, seed=8)
    options = GenerationOptions(
        max_new_tokens=9, ignore_eos=True, logprobs=5, speculate=Speculate.lookup, speculate_always=True
    )
    engine, plain = engine_of(model, PrefixTree(ROOMY)), engine_of(model)
    prompts, cached = [[*prompt(20, seed=number), *again, 5, *again] for number in range(2)], list[int]()
    with throughout(model.dtype):
        for _ in range(3):
            ours = engine.generate(prompts, options)
            require_same(ours, plain.generate(prompts, replace(options, speculate=Speculate.none)))
            cached.append(computed_and_cached(ours)[1])
            prompts = [[*ids, *each.new_token_ids, *again] for ids, each in zip(prompts, ours.generations, strict=True)]
    assert cached[0] == 0 < cached[1] < cached[2]


# The tree by itself: states are two layers of bytes, which say which text they are of.

WIDTHS = (3, 5)
STATES = [KVShape(num_kv_heads=1, key_dim=width, value_dim=0, dtype=torch.uint8) for width in WIDTHS]
STATE_BYTES = sum(WIDTHS)


def states(ids: Sequence[int]) -> list[Tensor]:
    block = torch.empty(STATE_BYTES, dtype=torch.uint8)
    parts = [part.view(1, 1, -1) for part in block.split(WIDTHS)]
    for layer, part in enumerate(parts):
        part.fill_((hash(tuple(ids)) + layer) % 251)
    return parts


def opened(
    limit_bytes: float = inf, folder: Path | None = None, *, shapes: Sequence[KVShape] = SHAPES, **more: Any
) -> PrefixTree:
    tree = PrefixTree(limit_bytes, folder=folder, **more)
    tree.open(KEY, shapes, CPU, states=STATES)
    return tree


def put(tree: PrefixTree, ids: Sequence[int], *ends: int) -> None:
    """Store a text with the states after so many of its tokens."""
    hit = tree.insert(ids, [] if tree.has_states_alone(KEY) else numbers(ids), KEY)
    for end in ends or (len(ids),):
        tree.keep_states(ids[:end], KEY, states(ids[:end]))
    hit.release()


def found(tree: PrefixTree, ids: Sequence[int]) -> int:
    """Tokens that a text reuses, whose keys, values and states are those of this text."""
    hit = tree.match(ids, KEY)
    if hit.num_tokens:
        assert hit.snapshot is not None and same(list(hit.snapshot.layers_TKX), states(ids[: hit.num_tokens]))
        layers = [torch.cat(parts) for parts in zip(*(list(node.layers_TKX) for node in hit.nodes), strict=True)]
        assert same(layers, [] if tree.has_states_alone(KEY) else numbers(ids[: hit.num_tokens]))
    hit.release()
    return hit.num_tokens


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@examples(60)
@given(
    st.lists(st.tuples(TEXTS, st.lists(st.integers(1, 9), max_size=3), TEXTS), max_size=12),
    st.sampled_from([inf, 900, 40, 0]),
    st.sampled_from([0, 600, 20]),
    st.sampled_from([SHAPES, []]),
)
def test_a_match_ends_at_the_last_snapshot_that_is_kept(
    operations: list[tuple[tuple[int, ...], list[int], tuple[int, ...]]],
    limit_bytes: float,
    host_bytes: float,
    shapes: list[KVShape],
) -> None:
    """Against a set of all texts with states; where room is limited, against what the tree tells a mirror.

    Of states alone both have no other tokens than those before a snapshot.
    """
    tree, mirror = opened(limit_bytes, host_bytes=host_bytes, shapes=shapes), PrefixTree(inf)
    known = set[tuple[int, ...]]()
    tree.listen(mirror.apply)
    for ids, ends, asked in operations:
        put(tree, ids, len(ids), *(end for end in ends if end < len(ids)))
        known |= {ids, *(ids[:end] for end in ends if end < len(ids))}
        expected = max((end for end in range(1, len(asked) + 1) if asked[:end] in known), default=0)
        assert tree.num_stored(asked, KEY) == mirror.num_stored(asked, KEY) <= expected
        num_found = found(tree, asked)
        assert num_found <= expected and (limit_bytes < inf or num_found == expected)
        assert tree.num_bytes <= limit_bytes and tree.bytes_by_tier.get("host", 0) <= host_bytes
        assert all(node.holds == 0 for node in tree.nodes())
        assert mirror.num_stored(asked, KEY) == tree.num_stored(asked, KEY)
        if not shapes:
            assert all(node.is_snapshot or node.children for each in (tree, mirror) for node in each.nodes())
    heard = list[Any]()
    tree.listen(heard.append)
    assert all(isinstance(each, Stored) and each.states is not None for each in heard)


def test_states_count_against_the_limit_and_the_least_recently_used_go_alone() -> None:
    """Their keys and values stay for the text that goes on after them."""
    ids = list(range(40))
    text_bytes = sum(layer.nbytes for layer in numbers(ids))
    tree = opened(text_bytes + 2 * STATE_BYTES)
    put(tree, ids, 10, 40)
    assert tree.num_bytes == text_bytes + 2 * STATE_BYTES
    assert found(tree, ids[:20]) == 10 and found(tree, ids) == 40
    tree.keep_states(ids[:30], KEY, states(ids[:30]))
    assert (found(tree, ids[:20]), found(tree, ids[:35]), found(tree, ids)) == (0, 30, 40)
    assert tree.num_bytes == text_bytes + 2 * STATE_BYTES


def test_what_no_snapshot_follows_goes_before_what_is_used() -> None:
    ids, other = list(range(40)), [*range(20), *range(50, 70)]
    tree = opened(sum(layer.nbytes for layer in numbers(ids + ids)) + 2 * STATE_BYTES)
    put(tree, ids, 20)
    put(tree, other, 20)
    assert found(tree, ids) == 20
    put(tree, list(range(80, 110)), 30)
    assert found(tree, ids) == 20 and found(tree, list(range(80, 110))) == 30
    assert tree._texts.known(ids, KEY)[1] < 40 or tree._texts.known(other, KEY)[1] < 40


@pytest.mark.parametrize("shapes", [SHAPES, []], ids=["beside keys and values", "alone"])
def test_states_come_back_from_disk_in_a_file_that_says_so(tmp_path: Path, shapes: list[KVShape]) -> None:
    ids, branch = list(range(40)), [*range(25), 60, 61, 62]
    first = opened(folder=tmp_path, shapes=shapes)
    put(first, ids, 20, 40)
    put(first, branch)
    first.save()
    paths = list(tmp_path.glob("*.prefix.safetensors"))
    about = [json.loads((read_metadata(path) or {})["prefix"]) for path in paths]
    assert sum(each.get("states", False) for each in about) == 3
    later = opened(folder=tmp_path, shapes=shapes)
    assert {node.tier for node in later.nodes() if node.is_snapshot or shapes} == {Tier.disk}
    assert [found(later, text) for text in (ids, ids[:39], branch, branch[:27])] == [40, 20, 28, 20]
    if not shapes:
        assert len(paths) == 3
        return
    plain = PrefixTree(inf, folder=tmp_path)
    plain.open(KEY, SHAPES, CPU)
    assert plain.num_stored(ids, KEY) == 40, "keys and values are those of a text without states"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_states_are_not_used(tmp_path: Path, damage: str) -> None:
    """An earlier snapshot of the same text is."""
    model = tiny_model("qwen3_next")
    ids = prompt(50, seed=6)
    with throughout(model.dtype), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first = engine_of(model, PrefixTree(ROOMY, folder=tmp_path, snapshot_tokens=20))
        first.generate([ids], OPTIONS)
        assert first.prefixes is not None
        first.prefixes.tree.save()
        for path in tmp_path.glob("*.prefix.safetensors"):
            about = json.loads((read_metadata(path) or {})["prefix"])
            if about.get("states") and about["start"] == 40:
                DAMAGES[damage](path)
        second = engine_of(model, PrefixTree(ROOMY, folder=tmp_path))
        ours = second.generate([ids], OPTIONS)
        require_same(ours, engine_of(model).generate([ids], OPTIONS))
    assert computed_and_cached(ours) == (30, 20)
    assert any("is damaged, and was removed" in str(each.message) for each in told)
    assert all(node.holds == 0 for node in second.prefixes.tree.nodes())  # type: ignore[union-attr]


def test_a_full_disk_loses_no_states_that_are_in_memory(tmp_path: Path) -> None:
    ids = list(range(40))
    tree = opened(folder=tmp_path)
    put(tree, ids)
    with file_limit(500):
        with pytest.warns(UserWarning, match="that cannot be kept on disk are"):
            tree.save()
        assert found(tree, ids) == 40
