"""However keys and values are stored, padding, chunks, forks and how tokens are put into forwards do not matter.

tests/policies/test_matrix.py says so of every policy in the model's dtype. What each store does besides is in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.experiments.minicache import MiniCache
from policies.h2o import H2O
from policies.infinigen import InfiniGen
from policies.quest import Quest
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from runahead import Conversation, Engine, GenerationOptions, PrefillOptions
from runahead.config import CacheOptions, Device, RanksOptions
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies.test_host_pool import LateCopies, copies  # noqa: F401
from tests.policies.test_matrix import KEEPING, policy
from tests.policies.test_quantised_ragged import RAGGED, ragged
from tests.ranks.tasks import tiny_model

LENGTHS = (92, 65, 9)
RESIDUAL = 8
SOON = [*range(3, 18)]
"""Generated tokens until some of each row have left the window of exact ones."""
OTHERS = SOON[::-1]

CHOOSING: dict[str, dict[str, Any]] = {
    "exact_topk": {"fetch": 6, "sinks": 1, "recent": 1},
    "exact_topk, all": {"fetch": 1.0},
    "quest, late": {"page": 1, "fetch": 6, "sinks": 1, "recent": 1, "first_layer": 0, "late": 0.3},
    "infinigen": {"fetch": 10, "sinks": 2, "recent": 3, "ratio": 0.25, "first_layer": 1, "observed": 8},
    "infinigen, full pool": {
        "fetch": 10,
        "first_layer": 1,
        "observed": 8,
        "sinks": 2,
        "recent": 3,
        "pool": {"bytes": 90_000},
    },
}
POLICIES: dict[str, Callable[[], list[Policy]]] = {
    "none": list,
    "keys by token": lambda: [StreamingLLM(budget=4096)],
    "h2o": lambda: [H2O(budget=40)],
    "snapkv": lambda: [SnapKV(budget=40, window=4, kernel=1)],
    "minicache": lambda: [MiniCache(start_share=0.0, retain_share=0.3)],
    **{name: (lambda name=name: [ragged(name)]) for name in RAGGED},
    "exact_topk": lambda: [ExactTopK(min_tokens=0, **CHOOSING["exact_topk"])],
    "exact_topk, all": lambda: [ExactTopK(min_tokens=0, **CHOOSING["exact_topk, all"])],
    "quest, late": lambda: [Quest(min_tokens=0, **CHOOSING["quest, late"])],
    "infinigen": lambda: [InfiniGen(min_tokens=0, **CHOOSING["infinigen"])],
    "infinigen, full pool": lambda: [InfiniGen(min_tokens=0, **CHOOSING["infinigen, full pool"])],
}
EXACT = ["minicache", *RAGGED, *CHOOSING]
"""Those that store otherwise than slabs do without bits."""
IN_FEW_BITS = [name for name in POLICIES if name not in ("minicache", "infinigen, full pool")]
STORES = [*((name, None) for name in EXACT), *((name, 4) for name in IN_FEW_BITS), ("none", 2), ("adakv", 2)]
PLACED = [
    (*store, place) for store in STORES for place in ("device", "host") if place == "device" or store[0] in CHOOSING
]
"""With the memory that policies which choose read from: the device's, or the host's, from which copies arrive late."""
every_store = pytest.mark.parametrize(("name", "bits", "place"), PLACED)
each_row_for_itself = pytest.mark.parametrize(
    ("name", "bits", "place"), [store for store in PLACED if store[0] not in ("quest, late", "infinigen, full pool")]
)
"""Heads choose again, and a full pool drops a slot, for all rows together."""


@pytest.fixture(autouse=True)
def _in_its_place(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["place"] == "host":
        request.getfixturevalue("copies")


def policies_of(name: str, bits: int | None) -> RankPolicies:
    storage = CacheOptions(bits=bits, residual=RESIDUAL, residual_bits=None)
    return RankPolicies.everywhere(POLICIES[name](), storage=storage)


def begun(policies: RankPolicies, prompts: Sequence[list[int]], chunks: int = 1) -> Conversation:
    """A conversation of padded rows behind its prompt, which went in so many pieces."""
    talk, longest = Conversation(tiny_model("llama"), policies), max(map(len, prompts))
    pads = [longest - len(ids) for ids in prompts]
    parts = torch.tensor([[0] * pad + ids for pad, ids in zip(pads, prompts, strict=True)]).chunk(chunks, dim=1)
    with throughout(torch.float64):
        for number, part in enumerate(parts, start=1):
            talk.feed(part, pads=pads if number == 1 else None, cut_back=number == len(parts))
    return talk


def turns(talk: Conversation, answer: list[int]) -> list[Tensor]:
    """Logits (B, C, V) of the prompt's last token, of an answer, of another turn and its answer."""
    assert talk.logits_BV is not None
    with throughout(torch.float64):
        return [
            talk.logits_BV[:, None],
            talk.follow(torch.tensor([answer])),
            talk.feed(torch.tensor([[9, 8, 7]]), all_logits=True),
            talk.follow(torch.tensor([answer[:2]])),
        ]


def require_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], row: int | None = None) -> None:
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine if row is None else mine[[row]], expected, atol=1e-9, rtol=0)  # float64


PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@each_row_for_itself
@pytest.mark.sampled(4)
def test_rows_of_a_padded_batch_are_what_they_are_alone(name: str, bits: int | None, place: str) -> None:
    """Groups begin at a row's first token, and rows and heads have windows that tokens leave at different times.

    Seen to fail: tokens that leave all windows when they leave the longest one; a row whose heads keep equally many cut
    back as a layer of equal heads, which quantises the oldest tokens of a window for those that it drops.
    """
    policies = policies_of(name, bits)
    together = turns(begun(policies, PROMPTS), SOON)
    for row, ids in enumerate(PROMPTS):
        require_same(together, turns(begun(policies, [ids]), SOON), row)


@every_store
@pytest.mark.sampled(4)
def test_chunks_of_a_prompt_do_not_matter(name: str, bits: int | None, place: str) -> None:
    policies = policies_of(name, bits)
    whole, pieces = (begun(policies, PROMPTS[:2], chunks) for chunks in (1, 2))
    assert whole.kept_tokens == pieces.kept_tokens
    require_same(turns(pieces, SOON), turns(whole, SOON))


@every_store
@pytest.mark.parametrize(
    "prompts", [pytest.param(PROMPTS[:1], marks=pytest.mark.slow), PROMPTS], ids=["alone", "padded"]
)
def test_forks_do_not_know_of_each_other(name: str, bits: int | None, place: str, prompts: list[list[int]]) -> None:
    """Both go on behind a first answer, in memory that both read, quantise it from one window and accumulate.

    Seen to fail: what policies accumulate in memory of both; a fork that writes to the room of the other one.
    """
    policies = policies_of(name, bits)

    def answered() -> Conversation:
        talk = begun(policies, prompts)
        with throughout(torch.float64):
            talk.follow(torch.tensor([SOON[:5]]))
        return talk

    def first(talk: Conversation, tokens: list[int]) -> Tensor:
        with throughout(torch.float64):
            return talk.follow(torch.tensor([tokens[:1]]))

    talk = answered()
    both = [(talk, SOON), (talk.fork(), OTHERS)]
    begun_B1V = [first(*each) for each in both]  # one after the other, in what room there was behind the first answer
    for (each, tokens), logits in zip(both, begun_B1V, strict=True):
        alone = answered()
        require_same([logits, *turns(each, tokens)], [first(alone, tokens), *turns(alone, tokens)])


@every_store
@pytest.mark.sampled(4)
def test_tokens_that_follow_in_one_forward_do_what_they_do_one_by_one(name: str, bits: int | None, place: str) -> None:
    found = []
    for at_once in (True, False):
        talk = begun(policies_of(name, bits), PROMPTS)
        with throughout(torch.float64):
            logits_BCV = talk.follow(torch.tensor([SOON] * len(PROMPTS)), at_once=at_once)
        found.append([logits_BCV, *turns(talk, OTHERS)])
    require_same(*found)


ROOMY: dict[str, list[Policy]] = {
    "none": [],
    "adakv": [ragged("adakv", 1000)],
    "kvzip": [ragged("kvzip", 1000)],
    "quest": [Quest(page=4, fetch=12, first_layer=0, min_tokens=0, sinks=2, recent=3)],
}


@pytest.mark.parametrize("place", ["device"])
@pytest.mark.parametrize("name", ROOMY)
def test_an_engine_stores_chunks_and_whole_prompts_alike(name: str, place: str) -> None:
    """Policies that drop nothing store what `cache.bits` stores alone, and the prompt is exact to itself."""

    def generated(steps: list[Policy], bits: int | None = 4, chunk_tokens: int | None = None) -> Any:
        engine = Engine(
            tiny_model("llama"),
            Ranks.start(RanksOptions(device=Device.cpu)),
            policies=RankPolicies.everywhere(steps, storage=CacheOptions(bits=bits, residual=RESIDUAL)),
            prefill=PrefillOptions(chunk_tokens=chunk_tokens),
        )
        with throughout(torch.float64):
            return engine.generate(PROMPTS, GenerationOptions(max_new_tokens=14, ignore_eos=True))

    whole, chunked, few = generated(ROOMY[name]), generated(ROOMY[name], chunk_tokens=33), generated([])
    exact = generated(ROOMY[name], bits=None)
    for ours, theirs in zip(whole.generations, exact.generations, strict=True):
        assert ours.first_token_logits_top5 == theirs.first_token_logits_top5
    for other in (chunked, *([few] if name != "quest" else [])):
        assert [each.new_token_ids for each in whole.generations] == [each.new_token_ids for each in other.generations]
        assert whole.ranks[0].kv_kept_bytes == other.ranks[0].kv_kept_bytes
        assert whole.ranks[0].kv_host_bytes == other.ranks[0].kv_host_bytes


@pytest.mark.parametrize("place", ["device"])
@pytest.mark.parametrize("name", [name for name in KEEPING if not policy(name).merges_layers])
@pytest.mark.sampled(3)
def test_policies_choose_before_anything_is_quantised(name: str, place: str) -> None:
    """The same tokens stay after the prompt as without bits, and the answer goes on to another turn.

    Seen to fail: quantised tokens at the left of the slots, where short heads have padding.
    """
    chosen = ragged(name) if name in RAGGED else policy(name, 40)
    storages = [CacheOptions(bits=bits, residual=RESIDUAL) for bits in (None, 4)]
    exact, few = (begun(RankPolicies.everywhere([chosen], storage=each), PROMPTS[:2]) for each in storages)
    assert exact.logits_BV is not None and few.logits_BV is not None
    assert torch.equal(exact.logits_BV, few.logits_BV)
    assert exact.cache is not None and few.cache is not None and few.kv_bytes < exact.kv_bytes
    for ours, theirs in zip(few.cache.layers, exact.cache.layers, strict=True):
        assert torch.equal(ours.positions_BKn(), theirs.positions_BKn())
    for answer in (SOON[:18], SOON[:2]):
        assert all(logits.isfinite().all() for logits in turns(few, answer))
        turns(exact, answer)
        assert few.kept_tokens == exact.kept_tokens or name in RAGGED
