"""Models whose layers read the keys and values of earlier ones: the last of Gemma 3n and Gemma 4, others in CLA."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.adakv import AdaKV
from policies.base import Policy
from policies.criticalkv import CriticalKV
from policies.exact_topk import ExactTopK
from policies.h2o import H2O
from policies.keyformer import Keyformer
from policies.kvzip import KVzip
from policies.pyramidinfer import PyramidInfer
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.zigzagkv import ZigZagKV
from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks, RanksOptions
from runahead.attention.base import Recording
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.config import CacheOptions, Carrier, Device, Positions, PrefillName, Transfer
from runahead.model.layers.shared_kv import find_sources
from runahead.model.shares import check_shares
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.replay import score_prompt
from tests.conftest import RankPools
from tests.families import SHARING, build, largest_difference, oracle_logits, oracle_tokens, prompt, throughout
from tests.policies.running import Run
from tests.ranks import policy_tasks, shared_kv_tasks, tasks
from tests.ranks.tasks import tiny_model

pytestmark = pytest.mark.skipif(len(SHARING) < 2, reason="Gemma 3n and Gemma 4 need transformers 5.23")
PROMPT_TOKENS, BUDGET, WINDOW = 70, 16, 4
TOLERANCE = 1e-9  # float64, as in test_exactness
FLOAT32_TOLERANCE = 1e-4
CHAINS = [(0, 70), (0, 41, 70), (0, 30, 31, 70), (0, 0, 69, 70)]
GENERATED = [5, 7, 11, 13]

every_family = pytest.mark.parametrize("family", SHARING)
and_cla = pytest.mark.parametrize("family", [*SHARING, "cla"])
one_family = pytest.mark.parametrize("family", ["gemma4_text", pytest.param("gemma3n_text", marks=pytest.mark.slow)])
"""One of two families, for what is the same code for both."""
or_cla = pytest.mark.parametrize("family", ["gemma4_text", "cla", pytest.param("gemma3n_text", marks=pytest.mark.slow)])


@every_family
def test_layers_that_share_are_found(family: str) -> None:
    model = tiny_model(family)
    types = model.config.layer_types
    expected = {reader: max(at for at in range(3) if types[at] == types[reader]) for reader in (3, 4, 5)}
    assert model.reads_kv_of == expected
    assert model.num_layers == len(model.kv_shapes) == len(model.rules) == 3
    assert {shape.readers for shape in model.kv_shapes} == {(), (3, 5), (4,)}


@and_cla
@pytest.mark.parametrize("bounds", CHAINS)
@pytest.mark.sampled(2)
def test_first_logits_and_tokens_are_transformers_own(
    rank_pools: RankPools, family: str, bounds: tuple[int, ...]
) -> None:
    ids, size = prompt(PROMPT_TOKENS), len(bounds) - 1
    expected = oracle_logits(family, tuple(ids))
    ways = (
        [(Transfer.relay, Carrier.copy), (Transfer.direct, Carrier.backend)]
        if size > 1
        else [(Transfer.relay, Carrier.copy)]
    )
    for transfer, carrier in ways:
        options = PrefillOptions(transfer=transfer, carrier=carrier, layers_in_flight=2)
        outcomes = rank_pools.run(size, tasks.prefill, family, [ids], bounds, options)
        [logits] = [outcome.logits for outcome in outcomes if outcome.logits is not None]
        assert largest_difference(logits[0], expected) < TOLERANCE, (transfer, carrier)
    options = GenerationOptions(max_new_tokens=8, ignore_eos=True)
    for batch, _ in rank_pools.run(size, tasks.generate, family, [ids], options, bounds):
        assert batch.generations[0].new_token_ids == oracle_tokens(family, tuple(ids), 8)


@and_cla
def test_float32_and_a_padded_batch(rank_pools: RankPools, family: str) -> None:
    ids = prompt(PROMPT_TOKENS)
    outcomes = rank_pools.run(2, tasks.prefill, family, [ids], (0, 41, 70), PrefillOptions(), 1, torch.float32)
    assert (
        largest_difference(outcomes[-1].logits[0], oracle_logits(family, tuple(ids), torch.float32)) < FLOAT32_TOLERANCE
    )
    prompts = [ids, prompt(33, seed=1), prompt(4, seed=2)]
    options = GenerationOptions(max_new_tokens=6, ignore_eos=True)
    for batch, _ in rank_pools.run(2, tasks.generate, family, prompts, options, (0, 45, 70)):
        for row, generation in zip(prompts, batch.generations, strict=True):
            assert generation.new_token_ids == oracle_tokens(family, tuple(row), 6)


@every_family
def test_a_rank_computes_no_more_than_anybody_needs(rank_pools: RankPools, family: str) -> None:
    """Layers that read: the last token on the last rank, and nothing on the others. Bytes are of those that store."""
    ids, bounds = prompt(PROMPT_TOKENS), (0, 30, 70)
    first, last = rank_pools.run(2, shared_kv_tasks.computed, family, ids, bounds)
    assert first.tokens_by_layer == [30, 30, 30] and last.tokens_by_layer == [40, 40, 40, 1, 1, 1, 1]  # the third twice
    model = tiny_model(family)
    whole, window = (
        sum(shape.bytes_per_token() for shape, rule in zip(model.kv_shapes, model.rules, strict=True) if sees(rule))
        for sees in (lambda rule: rule is None, lambda rule: rule is not None)
    )
    assert first.sent_bytes == 30 * whole + 15 * window  # a window of 16 reaches 15 tokens back
    assert last.kept_bytes == 70 * whole + 55 * window


def policies() -> list[Policy]:
    return [
        StreamingLLM(budget=BUDGET, sinks=2),
        SnapKV(budget=BUDGET, window=WINDOW, kernel=3),
        H2O(budget=BUDGET, evict_every=4),
        Keyformer(budget=BUDGET),
        TOVA(budget=BUDGET, evict_every=4),
        AdaKV(scorer=SnapKV(budget=BUDGET, window=WINDOW, kernel=3)),
        ZigZagKV(budget=BUDGET, window=WINDOW, kernel=3),
        KVzip(budget=BUDGET, sinks=2),
    ]


every_policy = pytest.mark.parametrize("policy", policies(), ids=lambda policy: type(policy).__name__)


def prompts() -> list[list[int]]:
    return [prompt(40), prompt(23, seed=1), prompt(7, seed=2)]


@or_cla
@every_policy
@pytest.mark.sampled(2)
def test_policies_drop_tokens_once_all_layers_have_read_them(policy: Policy, family: str) -> None:
    """The logits after a prompt are then those of the full cache; the layers with windows keep their tokens."""
    model = tiny_model(family)
    run, full = Run(model, [policy], prompts()), Run(model, [], prompts())
    expected = full.prefill()
    assert torch.equal(run.prefill(), expected)
    whole = [rule is None for rule in model.rules]
    if not isinstance(policy, (ZigZagKV, KVzip)) or sum(whole) == 1:  # which divide the budget among layers
        assert [layer.tokens_per_head for layer in run.kept.layers] == [BUDGET if each else 40 for each in whole]
    in_chunks = Run(model, [policy], prompts())
    torch.testing.assert_close(in_chunks.prefill([17, 13, 10]), expected, atol=TOLERANCE, rtol=0)
    if not isinstance(policy, (H2O, Keyformer)):  # which count the queries of readers once per chunk
        assert torch.equal(in_chunks.kept.layers[1].positions_BKn(), run.kept.layers[1].positions_BKn())
    decoded = [run.decode(token) for token in GENERATED]
    for row, ids in enumerate(prompts()):
        alone = Run(model, [policy], [ids])
        alone.prefill()
        for ours, token in zip(decoded, GENERATED, strict=True):
            torch.testing.assert_close(ours[row], alone.decode(token)[0], atol=TOLERANCE, rtol=0)


@one_family
def test_a_prompt_is_repeated_only_through_the_layers_that_store(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the layers that read others compute for nothing."""
    policy = KVzip(budget=BUDGET, sinks=2)
    run = Run(tiny_model(family), [], prompts()[:1])
    run.prefill()
    monkeypatch.setattr(CausalAttention, "attend_shared", lambda *_, **__: pytest.fail("a reading layer has run"))
    with throughout(run.model.dtype):
        scores = score_prompt(run.model, policy, run.kept, run.ids_BS, run.pads)
    assert [scores_BKn is None for scores_BKn in scores] == [True, False, True]
    assert scores[1] is not None and scores[1].isfinite().all()


@or_cla
@every_policy
def test_with_room_for_all_it_is_the_full_cache_bit_by_bit(policy: Policy, family: str) -> None:
    scorer = getattr(policy, "scorer", policy)
    scorer.budget, budget = 1000, scorer.budget  # type: ignore[attr-defined]
    model = tiny_model(family)
    run, full = Run(model, [policy], prompts()), Run(model, [], prompts())
    assert torch.equal(run.prefill(), full.prefill())
    for token in GENERATED:
        assert torch.equal(run.decode(token), full.decode(token))
    scorer.budget = budget  # type: ignore[attr-defined]


class Noting(CausalAttention):
    """Causal attention that notes the queries and keys of the layer without a window, and of what reads it."""

    def __init__(self, model: Model, num_tokens: int) -> None:
        super().__init__(model.empty_cache(num_tokens), start=0, pads=[0])
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        if layer == 1:
            self.queries.append(q_BNCH * terms.scaling)
            self.keys.append(k_BKCH)
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)

    def attend_shared(self, layer: int, source: int, q_BNCH: Tensor, *kv_and_terms: Any, skipped: int = 0) -> Tensor:
        if source == 1:
            self.queries.append(q_BNCH * kv_and_terms[-1].scaling)
        return super().attend_shared(layer, source, q_BNCH, *kv_and_terms, skipped=skipped)


@every_family
def test_the_queries_of_layers_that_read_vote_too(family: str) -> None:
    """The layer that stores has the queries of its window, and the last token's of each layer that reads it."""
    model, ids = tiny_model(family), prompt(40)
    noting = Noting(model, 40)
    with throughout(torch.float64):
        model.forward(torch.tensor([ids]), noting, start=0, pads=[0])
    [k_1KnH], votes = noting.keys, []
    assert [q.shape[2] for q in noting.queries] == [40, 1, 1][: 1 + len(model.kv_shapes[1].readers)]
    for q_1NCH in noting.queries:
        q_NwH = q_1NCH[0, :, -WINDOW:]
        k_NnH = k_1KnH[0].repeat_interleave(len(q_NwH) // k_1KnH.shape[1], dim=0)
        scores_Nwn = q_NwH @ k_NnH.mT
        later = torch.arange(40) > torch.arange(40 - q_NwH.shape[1], 40)[:, None]
        shares = scores_Nwn.masked_fill(later, -torch.inf).softmax(dim=-1).mean(dim=1)
        votes.append(shares.unflatten(0, (k_1KnH.shape[1], -1)))
    votes_Kn = torch.cat(votes, dim=1).mean(dim=1)
    best = votes_Kn[:, : 40 - WINDOW].topk(BUDGET - WINDOW).indices.sort(dim=-1).values
    run = Run(model, [SnapKV(budget=BUDGET, window=WINDOW, kernel=1)], [ids])
    run.prefill()
    assert torch.equal(run.kept.layers[1].positions_BKn()[0, :, :-WINDOW].long(), best)
    own = votes[0].mean(dim=1)[:, : 40 - WINDOW].topk(BUDGET - WINDOW).indices.sort(dim=-1).values
    assert not torch.equal(own, best)  # else this test would not tell


@or_cla
@pytest.mark.parametrize(
    "chosen",
    [
        RankPolicies.everywhere([SnapKV(budget=BUDGET, window=WINDOW)]),
        RankPolicies.everywhere([TOVA(budget=BUDGET, evict_every=4)]),
        RankPolicies.everywhere([ZigZagKV(budget=BUDGET, window=WINDOW)]),
        RankPolicies(storage=CacheOptions(bits=4, residual=8)),
    ],
    ids=["snapkv", "tova", "zigzagkv", "4 bits"],
)
def test_the_last_of_several_ranks_does_what_one_rank_does(
    rank_pools: RankPools, family: str, chosen: RankPolicies
) -> None:
    given = [prompt(60), prompt(44, seed=3)]
    [alone] = rank_pools.run(1, policy_tasks.generate, family, given, (0, 60), chosen, 12)
    for bounds in ((0, 35, 60), (0, 1, 50, 60)):
        together = rank_pools.run(len(bounds) - 1, policy_tasks.generate, family, given, bounds, chosen, 12)[-1]
        for ours, theirs in zip(together.generations, alone.generations, strict=True):
            assert ours.new_token_ids == theirs.new_token_ids
            assert dict(ours.first_token_logits_top5) == pytest.approx(
                dict(theirs.first_token_logits_top5), abs=TOLERANCE
            )
        assert together.ranks[-1].kept_tokens[1] == alone.ranks[0].kept_tokens[1]  # the others have windows


@and_cla
def test_stages_decode_together(rank_pools: RankPools, family: str) -> None:
    """Each has tokens of its own of what later layers read. With room for all, policies change nothing."""
    given, options = [prompt(60), prompt(44, seed=3)], GenerationOptions(max_new_tokens=6, ignore_eos=True)
    expected = [oracle_tokens(family, tuple(ids), 6) for ids in given]
    roomy = RankPolicies.everywhere([SnapKV(budget=1000, window=WINDOW)])
    for bounds in ((0, 35, 60), (0, 1, 50, 60)):
        for policies in (None, roomy):
            found = rank_pools.run(
                len(bounds) - 1, shared_kv_tasks.decode_together, family, given, options, bounds, policies
            )
            assert found == [(expected, "sharded")] * (len(bounds) - 1)


@or_cla
def test_stored_prefixes_are_read_by_later_layers(family: str) -> None:
    model, ids = tiny_model(family), prompt(40)
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    engine = Engine(model, ranks, tree=PrefixTree(1 << 20))
    options = GenerationOptions(max_new_tokens=4, ignore_eos=True)
    with throughout(torch.float64):
        engine.generate([ids], options)
        longer = [*ids[:35], *prompt(9, seed=4)]
        batch = engine.generate([longer], options)
    assert batch.ranks[0].chunk_tokens == 9
    assert batch.generations[0].new_token_ids == oracle_tokens(family, tuple(longer), 4)


def test_what_cannot_be_is_refused() -> None:
    model = tiny_model("gemma4_text")
    for policies, says in (
        (RankPolicies(last=[PyramidInfer()]), "use a policy that only evicts"),
        (RankPolicies(last=[ExactTopK()]), "use a policy that only evicts"),
        (RankPolicies(last=[CriticalKV()]), "use another policy, such as snapkv"),
        (RankPolicies(last=[SnapKV()], positions=Positions.reencoded), "use policy.positions=original"),
    ):
        with throughout(torch.float64), pytest.raises(ValueError, match=says) as raised:
            policies.check(model)
        assert "\n" not in str(raised.value) and re.search("other(s| layers)", str(raised.value))
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    for name in (PrefillName.tsp, PrefillName.zigzag):
        with pytest.raises(ValueError, match=f"which prefill={name.name} does not support; use prefill=kv_runahead"):
            Engine(model, ranks, prefill=PrefillOptions(name=name))
    with pytest.raises(ValueError, match="leave ranks.tensor out"):
        check_shares(model.config, 2)
    calls = Recording(start=0, pads=[0]).calls
    q, k, other = (torch.zeros(1, 1, 1, 4) for _ in range(3))
    calls += [(layer, q, key, key, AttentionTerms(scaling=1.0)) for layer, key in enumerate((k, k, other))]
    with pytest.raises(ValueError, match="store keys and values after layers that read"):
        find_sources(calls)


def test_without_sharing_gemma_4_is_a_family_like_others() -> None:
    """Keys and values of one projection, as in the larger models."""
    options = {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_hidden_layers": 4}
    module = build(SHARING["gemma4_text"], **options, layer_types=["sliding_attention", "full_attention"] * 2)
    ids = torch.tensor([prompt(40)])
    with throughout(torch.float64), torch.inference_mode():
        expected = module(input_ids=ids, use_cache=False).logits[0, -1]
        model = Model(module)
        assert not model.reads_kv_of and model.num_layers == 4
        attention = CausalAttention(model.empty_cache(40), start=0, pads=[0])
        assert largest_difference(model.forward(ids, attention, start=0, pads=[0])[0], expected) < TOLERANCE
