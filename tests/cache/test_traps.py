"""Properties easily lost when keys and values are stored in another way: forwards inside forwards, flushes, errors."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H key dim, V value dim, X = H + V, T tokens.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from policies.adakv import AdaKV
from policies.base import Policy
from policies.experiments.minicache import MiniCache
from policies.h2o import H2O
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.pyramidinfer import PyramidInfer
from policies.quest import Quest
from policies.snapkv import SnapKV
from runahead import Conversation, Engine, GenerationOptions
from runahead.attention.base import LayerAttention
from runahead.attention.partial import AttentionTerms
from runahead.config import CacheOptions, Device, RanksOptions, Speculate
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.attention.over_runs import Codec, TextRun
from tests.attention.test_over_runs import Text, dense
from tests.families import largest_difference, prompt, throughout
from tests.ranks.tasks import tiny_model

TOLERANCE = 1e-9  # float64
RESIDUAL = 8
LAYERS = range(3)

Stored = tuple[list[Policy], CacheOptions]
SNAPKV = SnapKV(budget=12, window=4, kernel=3)
KINDS: dict[str, Stored] = {
    "all": ([], CacheOptions()),
    "4 bits": ([], CacheOptions(bits=4, residual=RESIDUAL)),
    "snapkv": ([SNAPKV], CacheOptions()),
    "h2o": ([H2O(budget=12)], CacheOptions()),
    "h2o in 4 bits": ([H2O(budget=12)], CacheOptions(bits=4, residual=4)),
    "unequal heads": ([AdaKV(scorer=SnapKV(budget=12, window=4, kernel=3))], CacheOptions()),
    "unequal heads in 4 bits": ([AdaKV(scorer=SnapKV(budget=20, window=4))], CacheOptions(bits=4, residual=4)),
    "merged layers": ([MiniCache(start_share=0.0)], CacheOptions()),
    "quest": ([Quest(min_tokens=0, fetch=16, sinks=2, recent=3)], CacheOptions()),
    "infinigen": (
        [InfiniGen(min_tokens=0, fetch=16, sinks=2, recent=3, ahead=True, first_ahead=1, first_layer=1)],
        CacheOptions(),
    ),
    "offload in 4 bits": ([Offload()], CacheOptions(bits=4, residual=RESIDUAL)),
    "narrowed": ([PyramidInfer(min_tokens=4, mean_keep=0.5)], CacheOptions()),
}


def talk(kind: str, *given: int, family: str = "llama") -> Conversation:
    """A conversation that was given so many tokens in turns of these lengths."""
    policies, storage = KINDS[kind]
    talking = Conversation(tiny_model(family), RankPolicies.everywhere(policies, storage=storage))
    for seed, length in enumerate(given):
        talking.feed(torch.tensor([prompt(length, seed)]))
    return talking


def layers_of(model: Model) -> nn.ModuleList:
    return model.module.get_decoder().layers  # type: ignore[no-any-return, union-attr]


@contextmanager
def once_at(layer: nn.Module, do: Callable[[], object]) -> Iterator[None]:
    """Context manager in which the first forward that comes to the attention of a layer does something else there."""
    left = [do]

    def hook(*_: Any) -> None:
        if left:
            left.pop()()

    handle = layer.self_attn.register_forward_pre_hook(hook)  # type: ignore[union-attr]
    try:
        yield
    finally:
        handle.remove()
    assert not left, "no forward came there"


FOLLOWING = torch.tensor([[11, 12, 13]])


@pytest.mark.parametrize("at", LAYERS)
@pytest.mark.parametrize("decodes_inside", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_a_forward_inside_a_layer_of_another_changes_neither(kind: str, decodes_inside: bool, at: int) -> None:
    """A token of one text inside the prefill of another, as a server does it, and a prefill inside a token."""
    model, more = tiny_model("llama"), torch.tensor([prompt(37, seed=5)])
    with throughout(model.dtype):
        expected = talk(kind, 48).follow(FOLLOWING), talk(kind, 20).feed(more)
        decoded, prefilled, found = talk(kind, 48), talk(kind, 20), dict[str, Tensor]()

        def decode() -> None:
            found["decoded"] = decoded.follow(FOLLOWING)

        def prefill() -> None:
            found["prefilled"] = prefilled.feed(more)

        outer, inner = (prefill, decode) if decodes_inside else (decode, prefill)
        with once_at(layers_of(model)[at], inner):
            outer()
        after = decoded.follow(FOLLOWING), prefilled.follow(FOLLOWING)
        alone = talk(kind, 48), talk(kind, 20)
        alone[0].follow(FOLLOWING), alone[1].feed(more)
        expected_after = [each.follow(FOLLOWING) for each in alone]
    assert largest_difference(found["decoded"], expected[0]) < TOLERANCE
    assert largest_difference(found["prefilled"], expected[1]) < TOLERANCE
    for ours, theirs in zip(after, expected_after, strict=True):
        assert largest_difference(ours, theirs) < TOLERANCE


class InFewBits(LayerAttention):
    """Dense attention to all tokens of one row, of which the first ones are what few bits hold of them."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(start=0, pads=[0])
        self.num_coded, self._codec, self._kv = 0, codec, dict[int, Tensor]()

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        new_TKX = torch.cat([k_BKCH, v_BKCV], dim=3)[0].transpose(0, 1)
        kv_TKX = self._kv[layer] = torch.cat([self._kv[layer], new_TKX]) if layer in self._kv else new_TKX
        total, num_new, heads = len(kv_TKX), q_BNCH.shape[2], kv_TKX.shape[1]
        spans = [(0, self.num_coded, self._codec), (self.num_coded, total, None)]
        runs = [
            TextRun((0,), range(heads), kv_TKX[first:end], k_BKCH.shape[3], torch.arange(first, end), codec)
            for first, end, codec in spans
        ]
        text = Text(q_BNCH, runs, [torch.arange(total - num_new, total)], heads, v_BKCV.shape[3])
        return dense(text, terms)[0]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.sampled(2)
def test_groups_leave_the_window_before_a_token_attends_and_after_a_turn(family: str, bits: int, at_once: bool) -> None:
    """The first group while decoding, one inside a turn that follows at once, and others behind a turn of 40 tokens."""
    model, codec = tiny_model(family), Codec(bits, by_token=False)
    storage = CacheOptions(bits=bits, residual=RESIDUAL, residual_bits=None)
    ids, oracle, found = prompt(140), InFewBits(codec), list[Tensor]()
    talking, expected = Conversation(model, RankPolicies.everywhere([], storage=storage)), list[Tensor]()

    def forward(first: int, end: int) -> Tensor:
        oracle.start = first
        return model.forward(
            torch.tensor([ids[first:end]]), oracle, start=first, pads=[0], length=end, all_logits=True
        )[0]

    with throughout(model.dtype):
        end = 0
        for num, is_given in ((20, True), (30, False), (40, True), (34, False)):
            first, end, turn = end, end + num, torch.tensor([ids[end : end + num]])
            if is_given:
                found.append(talking.feed(turn, all_logits=True)[0])
                expected.append(forward(first, end))
                oracle.num_coded = max(0, (end - RESIDUAL) // 32 * 32)
                continue
            found.append(talking.follow(turn, at_once=at_once)[0])
            for at in range(first, end):  # a token is counted among the newest before it attends
                oracle.num_coded = max(0, (at + 1 - RESIDUAL) // 32 * 32)
                expected.append(forward(at, at + 1))
    assert oracle.num_coded == 96
    assert largest_difference(torch.cat(found), torch.cat(expected)) < TOLERANCE


def test_a_draft_across_a_flush_gives_the_tokens_of_plain_decoding() -> None:
    model = tiny_model("llama")
    policies = RankPolicies.everywhere([], storage=CacheOptions(bits=4, residual=RESIDUAL))
    engine, found = Engine(model, Ranks.start(RanksOptions(device=Device.cpu)), policies=policies), []
    with throughout(model.dtype):
        for speculate in (Speculate.none, Speculate.lookup):
            options = GenerationOptions(
                max_new_tokens=50, ignore_eos=True, speculate=speculate, speculate_always=speculate is Speculate.lookup
            )
            found.append(engine.generate([prompt(20) * 2], options).generations[0].new_token_ids)
    assert found[0] == found[1]


class Torn(Exception):
    """An error inside a forward."""


def tear() -> None:
    raise Torn


TURNS: dict[str, Callable[[Conversation], object]] = {
    "feed": lambda talking: talking.feed(torch.tensor([[3, 4, 5]])),
    "follow": lambda talking: talking.follow(FOLLOWING),
    "generate": lambda talking: talking.generate(GenerationOptions(max_new_tokens=3, ignore_eos=True)),
}


@pytest.mark.parametrize("at", LAYERS)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_a_conversation_whose_forward_raised_says_so_and_its_forks_go_on(kind: str, turn: str, at: int) -> None:
    """Its layers store different tokens then. Seen to fail: it went on with other tokens than it was given."""
    model = tiny_model("llama")
    with throughout(model.dtype):
        expected = talk(kind, 48).follow(FOLLOWING)
        talking = talk(kind, 48)
        fork = talking.fork()
        with once_at(layers_of(model)[at], tear), pytest.raises(Torn):
            TURNS[turn](talking)
        for again in TURNS.values():
            with pytest.raises(ValueError, match="failed half-way"):
                again(talking)
        assert largest_difference(fork.follow(FOLLOWING), expected) < TOLERANCE


@pytest.mark.parametrize("at", LAYERS)
@pytest.mark.parametrize("kind", [None, "4 bits", "snapkv"])
def test_an_engine_whose_forward_raised_goes_on(kind: str | None, at: int) -> None:
    """None has a tree of prefixes, which stores nothing of it."""
    model, ids = tiny_model("llama"), prompt(48)
    policies, storage = ([], CacheOptions()) if kind is None else KINDS[kind]
    tree = PrefixTree(1 << 30) if kind is None else None
    of_ranks = RankPolicies.everywhere(policies, storage=storage)
    engine = Engine(model, Ranks.start(RanksOptions(device=Device.cpu)), policies=of_ranks, tree=tree)
    options = GenerationOptions(max_new_tokens=5, ignore_eos=True)

    def generate() -> list[int]:
        return engine.generate([ids], options).generations[0].new_token_ids

    with throughout(model.dtype):
        with once_at(layers_of(model)[at], tear), pytest.raises(Torn):
            generate()
        assert tree is None or list(tree.nodes()) == []
        expected = generate()
        with once_at(layers_of(model)[at], tear), pytest.raises(Torn):
            generate()
        assert tree is None or ([*tree.nodes()] and all(node.holds == 0 for node in tree.nodes()))
        assert generate() == expected
