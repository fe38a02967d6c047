"""Policies that retrieve from keys and values in 8, 4 or 2 bits, in memory of the host and where the CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.layer_view import Phase
from policies.offload import Offload
from runahead import Conversation, Engine, GenerationOptions
from runahead.cache.host.layer import HostLayer
from runahead.cache.kept import KeptLayer
from runahead.cache.kv_cache import seen_in
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.groups import GROUP
from runahead.cache.quantised.pool import PooledCodes, pooled, to_host, word_shape
from runahead.cache.quantised.rows import QuantisedRows
from runahead.cache.slabs import KVShape, SlotsToCopy
from runahead.config import CacheOptions, Device, RanksOptions
from runahead.ranks.ranks import Ranks
from runahead.retrieval.cache import RetrievedCache
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.cache.predicted_bytes import pooled_bytes
from tests.families import prompt, throughout
from tests.policies.test_host_pool import LateCopies, copies  # noqa: F401
from tests.policies.test_retrieval import ALL, NAMES, SOME, policy, with_forwards_of
from tests.ranks.tasks import tiny_model
from tests.reuse.test_prefixes import computed_and_cached, require_same

RESIDUAL = 8
GATHER = KeptLayer.gather
LENGTHS = (77, 60, 12)
SOON = list(range(3, 17))
"""Tokens until some of the second row have left the window while they are decoded."""


def policies_of(*policies: Policy, bits: int | None = 4) -> RankPolicies:
    storage = CacheOptions(bits=bits, residual=RESIDUAL, residual_bits=None)
    return RankPolicies.everywhere(policies, storage=storage)


class Talk:
    """A conversation of padded rows, in float64 throughout."""

    def __init__(
        self, policies: RankPolicies, lengths: tuple[int, ...] = (77,), family: str = "llama", chunks: int = 1
    ) -> None:
        model, longest = tiny_model(family), max(lengths)
        self.conversation = Conversation(model, policies)
        pads = [longest - length for length in lengths]
        rows = [[0] * pad + prompt(length, seed) for seed, (pad, length) in enumerate(zip(pads, lengths, strict=True))]
        parts = torch.tensor(rows).chunk(chunks, dim=1)
        with throughout(torch.float64):
            for number, part in enumerate(parts, start=1):
                pads_of = pads if number == 1 else None
                self.first_BV = self.conversation.feed(part, pads=pads_of, cut_back=number == len(parts))

    def follow(self, tokens: list[int]) -> Tensor:
        with throughout(torch.float64):
            return self.conversation.follow(torch.tensor([tokens]))

    def feed(self, tokens: list[int]) -> Tensor:
        with throughout(torch.float64):
            return self.conversation.feed(torch.tensor([tokens]), all_logits=True)

    @property
    def cache(self) -> RetrievedCache:
        assert isinstance(self.conversation.cache, RetrievedCache)
        return self.conversation.cache

    def turns(self) -> list[Tensor]:
        """Logits of answers and of further turns; with that of one token the first row has a group more."""
        return [
            self.follow([*SOON, *SOON[:12]]),
            self.feed([4]),
            self.follow([5, 6]),
            self.feed([9, 8, 7]),
            self.follow([3]),
        ]


def codes_of(layer: KeptLayer) -> PooledCodes:
    assert isinstance(layer.codes, PooledCodes)
    return layer.codes


def dequantised(self: KeptLayer, wanted: SlotsToCopy) -> Callable[[], Tensor] | None:
    """Slots as they are fetched if all were in the model's dtype."""
    if self.codes is None:
        return GATHER(self, wanted)
    whole = KeptLayer(
        shape=self.shape,
        slab_TBKX=self.slab().slab_TBKX.contiguous(),
        placed_TBK=self.positions_TBK,
        pads=self.pads,
        num_slots=self.num_slots,
    )
    return whole.gather(wanted)


def as_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on attention reads the dequantised slots as those of any other cache, on the device that computes."""
    monkeypatch.setattr("runahead.retrieval.retrieval.copies_for", lambda device: None)
    monkeypatch.setattr(KeptLayer, "gather", dequantised)
    monkeypatch.setattr(
        KeptLayer,
        "seen",
        lambda layer, q, tokens: seen_in(layer.slab(), q, start=layer.end - q.shape[2], pads=layer.pads),
    )


@pytest.fixture(params=["device", "host"])
def place(request: pytest.FixtureRequest) -> str:
    """Memory that has the codes: a CPU's own, or the host's, from which copies arrive late."""
    if request.param == "host":
        request.getfixturevalue("copies")
    return str(request.param)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(77,), LENGTHS], ids=["alone", "padded"])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.sampled(16)
def test_attention_is_that_to_the_dequantised_tokens(
    name: str, lengths: tuple[int, ...], bits: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chosen slots, through a turn and the tokens that leave the window."""
    policies = policies_of(policy(name, SOME[name]), bits=bits)
    talk = Talk(policies, lengths)
    found = talk.turns()
    in_pool = [layer for layer in talk.cache.layers if isinstance(layer.codes, PooledCodes)]
    assert len(in_pool) == sum(talk.cache.retrieval.in_pool) > 0
    assert {layer.on_host for layer in in_pool} == {place == "host"}
    assert codes_of(in_pool[0]).parts[0].num_tokens == 3 * GROUP
    as_dequantised(monkeypatch)
    for ours, theirs in zip(found, Talk(policies, lengths).turns(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)  # float64


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "deepseek_v3", "gemma2"])
@pytest.mark.sampled(16)
def test_where_all_is_chosen_it_is_the_quantised_cache(
    name: str, family: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV heads for two queries and for one, values of other width than keys, and windows."""
    options = ALL[name] | ({"outliers": 0, "rank": None} if name == "shadowkv" else {})  # which has exact ones besides
    with_forwards_of(name, tiny_model(family), monkeypatch)
    ours = Talk(policies_of(policy(name, options)), family=family)
    theirs = Talk(policies_of(), family=family)
    assert torch.equal(ours.first_BV, theirs.first_BV)
    for found, expected in zip(ours.turns(), theirs.turns(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_tokens_leave_the_window_in_the_same_step_as_without_a_fetch(copies: list[LateCopies]) -> None:  # noqa: F811
    """A layer that is fetched before the new token is stored lets a group go before that, too."""
    ours, theirs = Talk(policies_of(Offload()), (92,)), Talk(policies_of(), (92,))
    torch.testing.assert_close(ours.follow(SOON), theirs.follow(SOON), atol=1e-9, rtol=0)
    assert copies[0].fetched


@pytest.mark.parametrize("name", ["quest", "shadowkv"])
def test_no_token_is_quantised_between_its_fetching_and_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where chosen slots are on the device (`shadowkv`)."""
    talk, gather, before = Talk(policies_of(policy(name, SOME[name]))), KeptLayer.gather, list[int]()

    def gathers(layer: KeptLayer, wanted: SlotsToCopy) -> Any:
        if layer.codes is not None:
            codes = codes_of(layer)
            before.append(max(layer.num_slots + 1 - part.end - codes.few.residual for part in codes.parts))
        return gather(layer, wanted)

    monkeypatch.setattr(KeptLayer, "gather", gathers)
    talk.follow([*SOON, *SOON])
    assert GROUP // 2 < max(before) < GROUP


def test_short_texts_are_read_on_the_device(copies: list[LateCopies], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """After all copies to the host, where new tokens may have left the window a moment ago."""
    expected = Talk(policies_of()).follow([*SOON, *SOON])
    talk, attend, written = Talk(policies_of(ExactTopK(min_tokens=1000))), QuantisedRows.attend, list[int]()

    def attends(codes: QuantisedRows, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        written.append(copies[0].written)
        return attend(codes, *args, **options)

    monkeypatch.setattr(QuantisedRows, "attend", attends)
    torch.testing.assert_close(talk.follow([*SOON, *SOON]), expected, atol=1e-9, rtol=0)
    assert set(written) == {0}


def test_words_that_a_brought_layer_gets_reach_the_host() -> None:
    """Also those of a row in slots that the host has for a longer one."""
    generator, pads, cpu = torch.Generator().manual_seed(1), [0, 17], torch.device("cpu")
    shape = KVShape(num_kv_heads=2, key_dim=8, value_dim=8, dtype=torch.float64)
    exact = KeptLayer.empty(shape, batch=2, room=0, device=cpu)
    given, new = (torch.randn(2, 2, 2, num, 8, generator=generator, dtype=torch.float64) for num in (103, 1))
    exact.append(*given, NewTokens(0, pads))
    layer = exact.in_bits(FewBits(bits=4, residual=8, residual_bits=None, keys_by_token=False), room=8)
    late = LateCopies(cpu)
    brought = to_host(pooled(layer.fork(copy=True), room=0), late, room=64, spare=64).to_device()
    for each in (layer, brought):
        each.append(*new, NewTokens(103, pads, Phase.decode))
        assert each.codes is not None and [part.end for part in each.codes.parts] == [96, 81]
    again = to_host(brought, late, room=0, spare=0)
    assert torch.equal(again.slab().slab_TBKX, layer.slab().slab_TBKX)


@pytest.mark.parametrize("options", [{"turn_tokens": 9}, {"late": 0.3}, {"late": 1.0}], ids=str)
@pytest.mark.sampled(2)
def test_turns_and_late_choices_fetch_what_is_dequantised(
    options: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = policies_of(policy("quest", SOME["quest"] | options))
    found = Talk(policies, LENGTHS).turns()
    as_dequantised(monkeypatch)
    for ours, theirs in zip(found, Talk(policies, LENGTHS).turns(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("gpt_bigcode", 2), ("deepseek_v3", 2), ("llama", 8)])
def test_bytes_are_known_to_the_byte(family: str, bits: int, place: str) -> None:
    talk = Talk(policies_of(ExactTopK(fetch=10, min_tokens=0, sinks=2, recent=3), bits=bits), (76, 76), family)
    shapes = talk.conversation.model.kv_shapes
    pool, others = pooled_bytes(shapes, 76, bits=bits, residual=RESIDUAL, residual_bits=None, batch=2)
    spare = 76 // 8 if place == "host" else 0  # of memory that no later turn has to lock anew
    more = sum((spare + 4) // GROUP * GROUP * word_shape(shape, bits).bytes_per_token(2) for shape in shapes)
    assert talk.cache.retrieval.host_bytes == pool + more
    assert talk.cache.num_bytes == others


def test_what_travels_is_words_of_the_chosen_tokens(copies: list[LateCopies]) -> None:  # noqa: F811
    talk = Talk(policies_of(ExactTopK(fetch=12, min_tokens=0, sinks=1, recent=1)), LENGTHS)
    before = len(copies[0].fetched)
    talk.follow([5])
    fetched = [words for mark in copies[0].fetched[before:] for words, _ in mark]
    shapes = talk.conversation.model.kv_shapes
    assert [words.nbytes for words in fetched] == [12 * word_shape(each, 4).bytes_per_token(3) for each in shapes]
    dims = [(64, 64), (128, 128), (192, 128)]
    for key_dim, value_dim in dims:
        shape = KVShape(num_kv_heads=8, key_dim=key_dim, value_dim=value_dim, dtype=torch.bfloat16)
        assert shape.bytes_per_token() / word_shape(shape, 4).bytes_per_token() > 3.5
        assert shape.bytes_per_token() / word_shape(shape, 2).bytes_per_token() > 6


def test_another_turn_copies_no_words_again(copies: list[LateCopies]) -> None:  # noqa: F811
    """Slots in host memory stay where they are, as long as there is room."""
    talk = Talk(policies_of(ExactTopK(fetch=10, min_tokens=0, sinks=2, recent=3)))
    words = [codes_of(layer).words for layer in talk.cache.layers]
    assert all(isinstance(each, HostLayer) for each in words)
    before = [each.slab_TBKX.data_ptr() for each in words]
    talk.feed([9, 8])
    after = [codes_of(layer).words.slab_TBKX.data_ptr() for layer in talk.cache.layers]
    assert before == after


def test_a_prefix_from_the_tree_gives_the_pool_of_the_whole_prompt() -> None:
    ids, tree = prompt(77), PrefixTree(10**9)
    options = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)
    policies = policies_of(ExactTopK(fetch=10, min_tokens=0, sinks=2, recent=3))
    found = []
    with throughout(torch.float64):
        for each in (tree, None):
            ranks = Ranks.start(RanksOptions(device=Device.cpu))
            engine = Engine(tiny_model("llama"), ranks, tree=each, policies=policies)
            engine.generate([ids[:50]], options)
            found.append(engine.generate([ids], options))
    require_same(*found)
    assert computed_and_cached(found[0]) == (27, 50)
    assert found[0].ranks[0].kv_host_bytes == found[1].ranks[0].kv_host_bytes
