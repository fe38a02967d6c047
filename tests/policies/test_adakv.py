"""Ada-KV: the KV heads of a layer share one budget, and each takes the memory of the tokens that it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from policies import POLICIES
from policies.adakv import AdaKV, equal_shares
from policies.base import Policy
from policies.expected_attention import ExpectedAttention
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.layer_view import LayerView
from policies.pyramidkv import PyramidKV
from policies.scorer import Scorer
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.cache.kept import KeptLayer
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies.running import Run, model_with, prompts, require_answers
from tests.policies.test_matrix import policy
from tests.policies.test_scorers import view_of
from tests.policies.test_selection import signals_of, tensors

TOLERANCE = 1e-9  # float64
BUDGET, WINDOW = 12, 4
LENGTHS = (40, 31, 9)
SNAPKV = SnapKV(budget=BUDGET, window=WINDOW, kernel=3)
SCORERS = [
    SNAPKV,
    PyramidKV(budget=BUDGET, window=WINDOW, kernel=3, beta=2.0),
    ExpectedAttention(budget=BUDGET, sinks=2),
    KeyDiff(budget=BUDGET),
    H2O(budget=BUDGET, recent_share=0.25),
]
GENERATED = [5, 7, 11, 13]

every_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: type(scorer).__name__)


def kept_by(run: Run, layer: int, row: int) -> list[list[int]]:
    """Positions of the tokens that each KV head keeps."""
    stored = run.kept.layers[layer]
    heads = stored.shape.num_kv_heads
    positions_Kn = stored.positions_BKn()[row].expand(heads, -1)
    kept = [[at for at in of_head if at >= 0] for of_head in positions_Kn.tolist()]
    assert [len(of_head) for of_head in kept] == stored.tokens_BK[row], "no padding is stored"
    return kept


@pytest.mark.parametrize(("kv_heads", "alpha"), [(4, 1.0), (2, 1.0), (1, 0.2)])
@every_scorer
def test_with_the_whole_budget_shared_alike_or_one_head_it_is_the_scorer(
    scorer: Scorer, kv_heads: int, alpha: float
) -> None:
    """Bit by bit, since heads that keep equally many tokens stay in dense memory."""
    model = model_with(kv_heads)
    ada, plain = (Run(model, [policy], prompts(LENGTHS)) for policy in (AdaKV(scorer=scorer, alpha=alpha), scorer))
    assert torch.equal(ada.prefill(), plain.prefill())
    for ours, theirs in zip(ada.kept.layers, plain.kept.layers, strict=True):
        assert type(ours) is KeptLayer and ours.pads == theirs.pads
        assert torch.equal(ours.positions_BKn(), theirs.positions_BKn().expand_as(ours.positions_BKn()))
    for token in GENERATED if not scorer.while_decoding else GENERATED[:1]:
        assert torch.equal(ada.decode(token), plain.decode(token))


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5])
@every_scorer
def test_heads_together_keep_what_the_budget_allows(scorer: Scorer, alpha: float) -> None:
    """Each at least its share, sinks and window among it; short rows keep all."""
    run, lengths = Run(model_with(4), [AdaKV(scorer=scorer, alpha=alpha)], prompts(LENGTHS)), set[int]()
    run.prefill()
    for layer in range(3):
        budget = scorer.slots_of(BUDGET, layer, 3)
        for row, length in enumerate(LENGTHS):
            kept, own = kept_by(run, layer, row), min(budget, length)
            assert sum(map(len, kept)) == 4 * own
            certain = {*range(scorer.sinks), *range(max(0, length - scorer.recent_of(budget)), length)}
            certain &= set(range(length))
            for of_head in kept:
                assert set(of_head) >= certain
                assert len(of_head) >= len(certain) + int(alpha * (own - len(certain)))
                assert of_head == sorted(set(of_head))
            lengths |= {len(of_head) for of_head in kept}
        unequal = any(len(set(map(len, kept_by(run, layer, row)))) > 1 for row in range(3))
        assert isinstance(run.kept.layers[layer], RaggedLayer) == unequal
    assert len(lengths) > 3


def test_scorers_over_which_it_shares_nothing_out_are_known_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """They score all heads alike. Without `chooses_alike` of tova, or with that of h2o, this fails."""
    model, alike = model_with(4), set[str]()
    for name, kind in POLICIES.items():
        if not issubclass(kind, Scorer) or (scorer := policy(name)).keeps_ragged:
            continue
        scored, score = list[Tensor](), type(scorer).score

        def noted(self: Scorer, view: LayerView, score: Any = score, scored: list[Tensor] = scored) -> Tensor:
            scored.append(score(self, view))
            return scored[-1]

        monkeypatch.setattr(type(scorer), "score", noted)
        Run(model, [scorer], prompts(LENGTHS)).prefill()
        monkeypatch.undo()
        assert len(scored) == model.num_layers, name
        if all(torch.equal(score_BKn, score_BKn[:, :1].expand_as(score_BKn)) for score_BKn in scored):
            alike.add(name)
    assert alike == {name for name, kind in POLICIES.items() if issubclass(kind, Scorer) and kind.chooses_alike}


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9])
def test_more_of_the_scores_is_kept_than_with_equal_budgets(alpha: float) -> None:
    """The sum over all heads of their kept tokens' pooled scores."""
    gains = []
    for seed in range(8):
        q_BNCH, k_BKnH = tensors(30, 30, seed)
        view = view_of(k_BKnH * 3, signals=signals_of(q_BNCH, k_BKnH * 3, [0]))
        scores_BKn = SNAPKV.score(view)
        slots_BKm, equal_BKm = AdaKV(scorer=SNAPKV, alpha=alpha).keep(view), SNAPKV.keep(view)
        assert slots_BKm is not None and equal_BKm is not None
        chosen = scores_BKn.gather(2, slots_BKm.clamp_min(0)).masked_fill(slots_BKm < 0, 0.0).sum()
        assert (slots_BKm >= 0).sum() == equal_BKm.numel()
        gains.append(float(chosen - scores_BKn.gather(2, equal_BKm).sum()))
    assert min(gains) > -1e-6
    if alpha <= 0.5:  # of more, rounding leaves nothing with so few tokens
        assert max(gains) > 1e-3


def test_without_a_least_share_the_best_scores_of_all_heads_stay() -> None:
    q_BNCH, k_BKnH = tensors(30, 30, seed=1)
    view = view_of(k_BKnH * 3, signals=signals_of(q_BNCH, k_BKnH * 3, [0]))
    slots_BKm = AdaKV(scorer=SNAPKV, alpha=0.0).keep(view)
    assert slots_BKm is not None
    scores_Kn = SNAPKV.score(view)[0, :, : 30 - WINDOW]
    best_first = scores_Kn.flatten().sort(descending=True, stable=True).indices[: 2 * (BUDGET - WINDOW)].tolist()
    for head in range(2):
        mine = {at % (30 - WINDOW) for at in best_first if at // (30 - WINDOW) == head} | set(range(30 - WINDOW, 30))
        assert {slot for slot in slots_BKm[0, head].tolist() if slot >= 0} == mine


@pytest.mark.parametrize(
    ("room", "total", "shares"),
    [([9, 9, 9], 12, [4, 4, 4]), ([2, 9, 9], 12, [2, 5, 5]), ([9, 1, 9], 12, [5, 1, 6]), ([3, 2], 9, [3, 2])],
)
def test_shares_are_equal_as_far_as_there_is_room(room: list[int], total: int, shares: list[int]) -> None:
    assert equal_shares(room, total) == shares


def test_memory_is_that_of_the_tokens_that_heads_keep() -> None:
    """Also while decoding, where every head takes in the new token. No other memory is held on to."""
    model = model_with(4)
    run = Run(model, [AdaKV(scorer=SNAPKV)], prompts(LENGTHS))
    run.prefill()
    per_token = 2 * 8 * 8 + 4  # a key, a value and a position
    places = 4 * (2 * 3 * 4 + 1) + 8 * 3 * 4
    tokens = 4 * sum(min(BUDGET, length) for length in LENGTHS)
    assert run.kept.num_bytes == 3 * (tokens * per_token + places) == 3 * places + held_bytes(run)
    for token in GENERATED:
        run.decode(token)
    run.kept.free(room=0)
    grown = 3 * (tokens + 3 * 4 * len(GENERATED)) * per_token
    assert run.kept.num_bytes == grown + 3 * places == held_bytes(run) + 3 * places


def held_bytes(run: Run) -> int:
    """Bytes of the memory behind keys, values and positions, whatever part of it is in use."""
    tensors = [each for layer in run.kept.layers for each in (layer.slab_TBKX, layer.positions_TBK)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@every_scorer
def test_another_turn_shares_out_the_budget_anew(scorer: Scorer) -> None:
    """Heads share what is left and the turn, which sees all of that."""
    run, more = Run(model_with(4), [AdaKV(scorer=scorer)], prompts(LENGTHS)[:2]), prompt(9, seed=5)
    run.prefill()
    before = [[set(map(int, head)) for head in kept_by(run, layer, 0)] for layer in range(3)]
    run.next_prompt(more)
    for layer in range(3):
        kept = kept_by(run, layer, 0)
        assert sum(map(len, kept)) == 4 * scorer.slots_of(BUDGET, layer, 3)
        for head in range(4):
            assert set(kept[head]) <= before[layer][head] | set(range(40, 49))
            assert set(kept[head]) >= set(range(49 - scorer.recent, 49))


def test_a_budget_that_grew_drops_nothing_that_fits() -> None:
    """20 tokens on average, then 24 of 26: some heads have more than that, and all together have less."""
    run = Run(
        model_with(4), [AdaKV(scorer=SnapKV(budget=0.5, window=WINDOW, kernel=3), alpha=0.0)], prompts(LENGTHS)[:1]
    )
    run.prefill()
    before = [kept_by(run, layer, 0) for layer in range(3)]
    assert any(max(map(len, of_layer)) > 22 for of_layer in before)
    run.steps = [AdaKV(scorer=SnapKV(budget=0.6, window=WINDOW, kernel=3), alpha=0.0)]
    run.next_prompt(prompt(4, seed=6))
    for layer in range(3):
        assert kept_by(run, layer, 0) == [[*head, *range(40, 44)] for head in before[layer]]


def test_votes_stay_with_their_tokens_and_go_on() -> None:
    run = Run(model_with(4), [AdaKV(scorer=H2O(budget=BUDGET))], prompts(LENGTHS))
    whole = Run(model_with(4), [H2O(budget=1000)], prompts(LENGTHS))
    run.prefill()
    whole.prefill()
    for layer, of_all in zip(run.kept.layers, whole.kept.layers, strict=True):
        votes_BKn, all_BKn = layer.carried_BKn((AdaKV, 0)), of_all.carried_BKn((H2O, 0))
        positions_BKn = layer.positions_BKn().long()
        assert votes_BKn is not None and all_BKn is not None
        slots_BKn = (positions_BKn + torch.tensor(run.pads)[:, None, None]).clamp_min(0)
        expected_BKn = all_BKn.gather(2, slots_BKn).masked_fill(positions_BKn < 0, 0)
        torch.testing.assert_close(votes_BKn, expected_BKn)
    before = [(layer.carried_BKn((AdaKV, 0)), layer.num_slots) for layer in run.kept.layers]
    run.steps = [AdaKV(scorer=H2O(budget=1000))]
    run.next_prompt(prompt(9, seed=5))
    for layer, (votes_BKn, num_slots) in zip(run.kept.layers, before, strict=True):
        later_BKn, is_token_BKn = layer.carried_BKn((AdaKV, 0)), layer.positions_BKn() >= 0
        assert votes_BKn is not None and later_BKn is not None and later_BKn.shape[2] == num_slots + 9
        assert (later_BKn[..., :num_slots] > votes_BKn)[is_token_BKn[..., :num_slots]].all()
        assert (later_BKn[..., num_slots:] > 0).all()


def test_heads_that_come_to_keep_equally_many_are_dense_again() -> None:
    run, plain = Run(model_with(4), [AdaKV(scorer=SNAPKV)], prompts(LENGTHS)), prompt(9, seed=5)
    run.prefill()
    assert isinstance(run.kept.layers[0], RaggedLayer)
    run.steps = [AdaKV(scorer=SNAPKV, alpha=1.0)]
    run.next_prompt(plain)
    positions = [kept_by(run, 0, row) for row in range(3)]
    assert type(run.kept.layers[0]) is KeptLayer
    assert [{len(head) for head in row} for row in positions] == [{BUDGET}] * 3
    answers = [run.decode(token) for token in GENERATED]
    for row in range(3):
        alone = Run(model_with(4), [AdaKV(scorer=SNAPKV)], prompts(LENGTHS)[row : row + 1])
        alone.prefill()
        alone.steps = [AdaKV(scorer=SNAPKV, alpha=1.0)]
        alone.next_prompt(plain)
        assert kept_by(alone, 0, 0) == positions[row]
        for ours, token in zip(answers, GENERATED, strict=True):
            torch.testing.assert_close(ours[row], alone.decode(token)[0], atol=TOLERANCE, rtol=0)


def test_the_engine_decodes_what_the_policy_left(ranks: Ranks) -> None:
    batch = require_answers(ranks, model_with(4), AdaKV(scorer=SNAPKV), LENGTHS, 6)
    assert batch.ranks[0].kept_tokens == [BUDGET] * 3
    room, per_token, places = 5, 2 * 8 * 8 + 4, 4 * (2 * 3 * 4 + 1) + 8 * 3 * 4
    tokens = 4 * sum(min(BUDGET, length) + room for length in LENGTHS)
    assert batch.ranks[0].kv_kept_bytes == 3 * (tokens * per_token + places)


def test_a_number_of_tokens_is_applied_after_every_chunk_of_a_prompt(ranks: Ranks) -> None:
    """Scores are the scorer's own; a chunk sees the tokens that heads kept of the chunks before it."""

    def answer(policy: Policy) -> tuple[list[int], int]:
        with throughout(torch.float64):
            engine = Engine(
                model_with(4), ranks, prefill=PrefillOptions(chunk_tokens=7), policies=RankPolicies.everywhere([policy])
            )
            batch = engine.generate(prompts(LENGTHS), GenerationOptions(max_new_tokens=6, ignore_eos=True))
        ids = [token for generation in batch.generations for token in generation.new_token_ids]
        return ids, batch.ranks[0].kv_peak_bytes

    assert answer(AdaKV(scorer=SNAPKV, alpha=1.0)) == answer(SNAPKV)
    by_number, by_share = (
        answer(AdaKV(scorer=SnapKV(budget=budget, window=WINDOW, kernel=3)))[1] for budget in (BUDGET, BUDGET / 40)
    )
    assert by_number < 0.7 * by_share  # which sees the whole prompt first


@pytest.mark.parametrize("chunk", [8, 1])
def test_a_row_that_begins_in_a_later_chunk_is_what_it_is_alone(chunk: int) -> None:
    """Its padding comes after heads of other rows have come to store different numbers of tokens."""
    model, policy = model_with(4), AdaKV(scorer=SNAPKV)
    together = Run(model, [policy], prompts(LENGTHS))
    logits_BV = [together.chunk(chunk) for _ in range(0, 40, chunk)][-1]
    for row, pad in enumerate(together.pads):
        alone = Run(model, [policy], prompts(LENGTHS)[row : row + 1])
        for start in range(0, 40, chunk):
            if start + chunk > pad:
                logits_1V = alone.chunk(min(chunk, start + chunk - pad))
        torch.testing.assert_close(logits_BV[row], logits_1V[0], atol=TOLERANCE, rtol=0)
        for layer in range(3):
            assert kept_by(together, layer, row) == kept_by(alone, layer, 0)
