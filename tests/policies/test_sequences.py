"""Policies one after another of which some leave heads of different lengths: each step decides on what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from policies.adakv import AdaKV
from policies.base import Policy
from policies.chunkkv import ChunkKV
from policies.criticalkv import CriticalKV
from policies.expected_attention import ExpectedAttention
from policies.fastgen import FastGen
from policies.h2o import H2O
from policies.k_centers import KCenters
from policies.keydiff import KeyDiff
from policies.keyformer import Keyformer
from policies.kvzip import KVzip
from policies.lagkv import LagKV
from policies.layer_view import LayerView, Phase
from policies.pyramidinfer import PyramidInfer
from policies.quest import Quest
from policies.r_kv import RKV
from policies.scissorhands import Scissorhands
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.window import Window
from runahead import Conversation
from runahead.attention.partial import AttentionTerms
from runahead.attention.probabilities import QuerySignals
from runahead.cache.kept import KeptLayer
from runahead.config import CacheOptions
from runahead.model.layers.output_projection import projected_lengths
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies.made_up_kvzap import MadeUpKVzap
from tests.policies.running import Duo, Razor, Run, model_with, prompts
from tests.policies.test_adakv import LENGTHS, kept_by
from tests.policies.test_quantised import Talk, policies_of
from tests.ranks.tasks import tiny_model

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, n stored tokens, H head dim.

TOLERANCE = 1e-9  # float64
ADAKV = AdaKV(scorer=SnapKV(budget=16, window=4, kernel=3), alpha=0.0)
RAGGED = [
    ADAKV,
    FastGen(window=4, sinks=2, frequent=8, local=10, recovered=0.15),
    Duo(sinks=3, recent=8),
    MadeUpKVzap(recent=3, threshold=0.0, evict_every=4),
]
EVEN: list[Policy] = [
    Window(budget=11),
    StreamingLLM(budget=11, sinks=3),
    H2O(budget=11),
    SnapKV(budget=11, window=4, kernel=3),
    KeyDiff(budget=11, sinks=1),
    LagKV(budget=11, sinks=2, lag=3),
    ChunkKV(budget=11, window=3, chunk=3),
    RKV(budget=11, window=4, kernel=3),
    KCenters(budget=8, sinks=2),
    Scissorhands(budget=11, recent=3, window=6),
    Keyformer(budget=11, tau_tokens=3),
    ExpectedAttention(budget=11, sinks=2, future_tokens=16),
    CriticalKV(scorer=SnapKV(budget=11, sinks=3, window=4, kernel=1), first_share=0.8),
    TOVA(budget=11),
    PyramidInfer(budget=11, mean_keep=1.0, min_tokens=1, sinks=2),
]

every_ragged = pytest.mark.parametrize("ragged", RAGGED, ids=lambda policy: type(policy).__name__)
every_even = pytest.mark.parametrize("even", EVEN, ids=lambda policy: type(policy).__name__)


class TestAView:
    """Twenty slots of two rows of four KV heads with eight query heads; the longest head of a row has no padding."""

    PADS = ((0, 4, 7, 13), (5, 1, 19, 12))
    NUM_SLOTS, NUM_NEW, DIM = 20, 6, 8

    def view(self, rows: slice, heads: slice, pad: int | None = None) -> LayerView:
        """All heads of some rows; or, where `pad` is that of a head, this head alone without padding."""
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        q_BNCH, k_BKnH, v_BKnV = (draw(2, *shape, self.DIM) for shape in ((8, self.NUM_NEW), (4, 20), (4, 20)))
        mean_BNH, root_BNHH, weight_DX = draw(2, 8, self.DIM), draw(2, 8, self.DIM, self.DIM), draw(16, 8 * self.DIM)
        v_BKnV = v_BKnV * (2 * draw(2, 4, 20, 1)).exp()  # of very different length
        before_BKn, first = draw(2, 4, 20).abs(), 0 if pad is None else pad
        # Positions of tokens that are left, so with gaps.
        pads_BK1 = torch.tensor(self.PADS)[..., None]
        slots_n = torch.arange(self.NUM_SLOTS)
        positions_BKn = (3 * slots_n + 2).masked_fill(slots_n < pads_BK1, -1)
        before_BKn = before_BKn.masked_fill(positions_BKn < 0, 0)
        of_query = slice(2 * heads.start, 2 * heads.stop)
        q_BNCH, mean_BNH, root_BNHH = (x[rows, of_query] for x in (q_BNCH, mean_BNH, root_BNHH))
        k_BKnH, v_BKnV, positions_BKn, before_BKn = (
            x[rows, heads, first:] for x in (k_BKnH, v_BKnV, positions_BKn, before_BKn)
        )
        new = min(self.NUM_NEW, self.NUM_SLOTS - first)
        q_BNCH, queries_BC = q_BNCH[:, :, -new:], (3 * slots_n + 2)[-new:].expand(len(q_BNCH), -1)
        weight_DX = weight_DX.unflatten(1, (8, self.DIM))[:, of_query].flatten(1)
        signals = QuerySignals(
            q_BNCH,
            k_BKnH,
            AttentionTerms(scaling=0.3),
            queries_BC=queries_BC,
            keys_BKn=positions_BKn,
            ahead=lambda _: (mean_BNH, root_BNHH @ root_BNHH.mT),
            project=lambda order: projected_lengths(v_BKnV, weight_DX, q_BNCH.shape[1], order),
            first_head=of_query.start,
        )
        pads = [list(of_row) for of_row in self.PADS[rows]]
        return LayerView(
            layer=0,
            num_layers=1,
            phase=Phase.prefill,
            num_new=new,
            chunk_tokens=new,
            new_positions_BC=queries_BC,
            prompt_tokens=70,
            pads=[min(of_row) for of_row in pads] if pad is None else [0],
            head_pads=pads if pad is None else None,
            alike=False,
            positions_BKn=positions_BKn,
            k_BKnH=k_BKnH,
            v_BKnV=v_BKnV,
            carried_BKn=before_BKn,
            signals=signals,
        )

    @every_even
    def test_a_policy_keeps_in_each_head_what_it_keeps_of_that_head_alone(self, even: Policy) -> None:
        """Seen to fail: sinks of a row where a head has padding; chunks, runs and centres from there on; votes of all
        heads about a slot that has another token in each."""

        def kept(view: LayerView) -> list[list[list[int]]]:
            carried_BKn = even.carry(view)
            slots_BKm = even.keep(view if carried_BKn is None else replace(view, carried_BKn=carried_BKn))
            if slots_BKm is None:
                return view.positions_BKn.tolist()
            slots_BKm = slots_BKm.expand(-1, view.num_kv_heads, -1)
            return view.positions_BKn.take_along_dim(slots_BKm, dim=2).tolist()

        # The longest row of a head that begins within the new tokens would be another one alone.
        together = kept(self.view(slice(0, 2), slice(0, 4)))
        for row, pads in enumerate(self.PADS):
            for head, pad in enumerate(pads):
                alone = kept(self.view(slice(row, row + 1), slice(head, head + 1), pad))
                found = [at for at in together[row][head] if at >= 0]
                if isinstance(even, SnapKV | RKV | Scissorhands | Keyformer | H2O) and pad > 14:
                    assert len(found) == self.NUM_SLOTS - pad  # its first new tokens are none of its queries
                else:
                    assert found == alone[0][0], (row, head)


@pytest.mark.parametrize(
    ("second", "alike"),
    [(Window(budget=16), True), (TOVA(budget=16), True), (H2O(budget=16), False), (ADAKV, False)],
    ids=lambda value: type(value).__name__ if isinstance(value, Policy) else "",
)
def test_heads_vote_together_while_they_have_the_same_tokens(second: Policy, alike: bool) -> None:
    """Else those of each KV head alone. Seen to fail: votes of all heads, when each had cut back by its own."""
    run = Run(model_with(4), [PyramidInfer(mean_keep=1.0), second], prompts(LENGTHS)[:1])
    run.prefill()
    for token in range(5, 30):
        run.decode(token)
    for layer in run.kept.fork().layers:
        carried_BKn = layer.carried_BKn((PyramidInfer, 0))
        assert layer.alike == alike and carried_BKn is not None
        assert all(torch.equal(of_head, carried_BKn[0, 0]) for of_head in carried_BKn[0]) == alike


@every_ragged
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["alone", "padded"])
def test_a_first_step_that_does_nothing_leaves_heads_as_they_are_without_it(
    ragged: Policy, lengths: Sequence[int]
) -> None:
    idle = PyramidInfer(mean_keep=1.0, min_tokens=8)
    found = []
    for steps in ([ragged], [idle, ragged]):
        run = Run(model_with(4), steps, prompts(LENGTHS)[: len(lengths)])
        logits = [run.prefill([25, 15])]
        assert any(isinstance(layer, RaggedLayer) for layer in run.kept.layers)
        logits += [run.decode(token) for token in range(5, 12)]
        logits += [run.next_prompt(prompt(9, seed=5)), *(run.decode(token) for token in range(12, 19))]
        kept = [kept_by(run, layer, row) for layer in range(3) for row in range(len(lengths))]
        found.append((logits, kept))
    (alone, kept_alone), (after, kept_after) = found
    assert kept_after == kept_alone and all(map(torch.equal, alone, after))


@every_ragged
def test_a_step_keeps_the_newest_of_what_is_left_in_each_head(ragged: Policy) -> None:
    """And goes on to do so while decoding, and after another turn."""
    first, both = (Run(model_with(4), steps, prompts(LENGTHS)) for steps in ([ragged], [ragged, Window(budget=10)]))
    first.prefill()
    both.prefill()
    lengths = set()
    for layer in range(3):
        for row in range(len(LENGTHS)):
            kept = kept_by(both, layer, row)
            assert kept == [head[-10:] for head in kept_by(first, layer, row)]
            lengths |= set(map(len, kept))
    assert len(lengths) > 1, "some heads had fewer"
    for token in range(5, 45):
        both.decode(token)
    assert max(layer.num_slots for layer in both.kept.layers) <= 25  # cut back every 16 tokens
    both.next_prompt(prompt(9, seed=5))
    for layer in range(3):
        assert all(head[-1] == 88 and len(head) <= 10 for head in kept_by(both, layer, 0))


def test_sinks_are_those_of_each_head() -> None:
    """A head that has lost the first tokens keeps the first ones that it has."""
    steps = [ADAKV, StreamingLLM(budget=8, sinks=3)]
    first, both = Run(model_with(4), steps[:1], prompts(LENGTHS)), Run(model_with(4), steps, prompts(LENGTHS))
    first.prefill()
    both.prefill()
    for layer in range(3):
        for row in range(len(LENGTHS)):
            expected = [head if len(head) <= 8 else head[:3] + head[-5:] for head in kept_by(first, layer, row)]
            assert kept_by(both, layer, row) == expected
    assert not all(head[0] == 0 for head in kept_by(both, 0, 0))


FASTGEN = FastGen(window=4, sinks=2, frequent=4, local=5, recovered=0.3)
SEQUENCES: list[list[Policy]] = [
    [ADAKV, StreamingLLM(budget=12, sinks=3)],
    [H2O(budget=24), ADAKV],
    [ADAKV, TOVA(budget=12, evict_every=5)],
    [ADAKV, LagKV(budget=12, sinks=2, lag=3, evict_every=6)],
    [ADAKV, Duo(sinks=1, recent=6, evict_every=4)],
    [Window(budget=20), FASTGEN],
    [ADAKV, FASTGEN],
    [PyramidInfer(mean_keep=0.6, min_tokens=8, budget=18), ADAKV],
]
every_sequence = pytest.mark.parametrize(
    "steps", SEQUENCES, ids=lambda steps: "-".join(type(step).__name__ for step in steps)
)


@every_sequence
def test_rows_of_a_padded_batch_are_what_they_are_alone(steps: list[Policy]) -> None:
    """While decoding a layer is cut back when its longest row has too many tokens, so not after many."""
    if isinstance(steps[0], PyramidInfer):
        pytest.skip("its chunk is that of the longest row")
    model = model_with(4)
    together = Run(model, steps, prompts(LENGTHS))
    answers = [together.prefill(), *(together.decode(token) for token in range(5, 8))]
    answers += [together.next_prompt(prompt(9, seed=5)), together.decode(7)]
    for row in range(len(LENGTHS)):
        alone = Run(model, steps, prompts(LENGTHS)[row : row + 1])
        expected = [alone.prefill(), *(alone.decode(token) for token in range(5, 8))]
        expected += [alone.next_prompt(prompt(9, seed=5)), alone.decode(7)]
        for layer in range(3):
            assert kept_by(together, layer, row) == kept_by(alone, layer, 0)
        for ours, theirs in zip(answers, expected, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=TOLERANCE, rtol=0)


@every_sequence
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.sampled(3)
def test_a_conversation_goes_on_and_forks(steps: list[Policy], bits: int | None) -> None:
    with throughout(torch.float64):
        storage = CacheOptions(bits=bits, residual=4)
        policies = RankPolicies.everywhere(steps, storage=storage)
        talk = Conversation(model_with(4), policies)
        talk.feed(torch.tensor([prompt(80)]))
        fork = talk.fork()
        answer = torch.tensor([list(range(5, 45))])
        first = talk.follow(answer)
        assert torch.equal(fork.follow(answer), first) and fork.kept_tokens == talk.kept_tokens
        peeked = talk.peek(torch.tensor([prompt(5, seed=3)]))
        torch.testing.assert_close(talk.feed(torch.tensor([prompt(5, seed=3)])), peeked[:, -1], atol=TOLERANCE, rtol=0)
        assert max(talk.kept_tokens) < 60


class OtherH2O(H2O):
    """Another class, whose state nobody takes for that of the first."""


class OtherExpectedAttention(ExpectedAttention):
    """As above."""


class OtherAdaKV(AdaKV):
    """As above."""


TWICE: list[tuple[Policy, type[Policy], dict[str, Any]]] = [
    (H2O(budget=24, evict_every=3), OtherH2O, {"budget": 14, "evict_every": 2}),
    (
        ExpectedAttention(budget=24, sinks=2, future_tokens=16, evict_every=3),
        OtherExpectedAttention,
        {"budget": 14, "sinks": 5, "future_tokens": 4, "evict_every": 2},
    ),
    (
        AdaKV(scorer=H2O(budget=24), alpha=0.0),
        OtherAdaKV,
        {"scorer": ExpectedAttention(budget=14, sinks=4), "alpha": 0.5},
    ),
]


@pytest.mark.parametrize(("first", "other", "options"), TWICE, ids=[type(first).__name__ for first, *_ in TWICE])
def test_a_policy_twice_is_two_policies(first: Policy, other: type[Policy], options: dict[str, Any]) -> None:
    """Each accumulates its own, as two classes do. Seen to fail: one sum for both, counted twice; queries
    of the first tokens, which one of them leaves out."""
    found = []
    for second in (type(first), other):
        run = Run(model_with(4), [first, second(**options)], prompts(LENGTHS))
        logits = [run.prefill([25, 15]), *(run.decode(token) for token in range(5, 14))]
        logits += [run.next_prompt(prompt(9, seed=5)), run.decode(7)]
        found.append((logits, [kept_by(run, layer, row) for layer in range(3) for row in range(len(LENGTHS))]))
    (logits, kept), (expected, expected_kept) = found
    assert kept == expected_kept and all(map(torch.equal, logits, expected))


OTHERS = [policy for policy in EVEN if not isinstance(policy, PyramidInfer)]
MODELS = {num_kv_heads: model_with(num_kv_heads) for num_kv_heads in (1, 2, 4)}


@pytest.mark.hypothesis
@given(
    num_kv_heads=st.sampled_from(sorted(MODELS)),
    narrows=st.sampled_from([None, 0.6, 1.0]),
    steps=st.lists(st.sampled_from(RAGGED) | st.sampled_from(OTHERS), min_size=2, max_size=3),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    decoded=st.integers(0, 12),
)
def test_any_steps_leave_tokens_of_their_rows_in_order(
    num_kv_heads: int, narrows: float | None, steps: list[Policy], lengths: list[int], decoded: int
) -> None:
    """And rows of a batch are what they are alone after a prompt. Seen to fail: kinds of tokens in the slots of others;
    heads of different lengths in dense memory."""
    first = [] if narrows is None else [PyramidInfer(mean_keep=narrows, min_tokens=4, budget=20)]
    ids = [prompt(length, seed=row) for row, length in enumerate(lengths)]
    run = Run(MODELS[num_kv_heads], [*first, *steps], ids)
    run.prefill()
    in_order(run)
    for row in range(len(ids)) if not first else ():  # PyramidInfer's chunk is that of the longest row
        alone = Run(MODELS[num_kv_heads], steps, ids[row : row + 1])
        alone.prefill()
        assert all(kept_by(run, layer, row) == kept_by(alone, layer, 0) for layer in range(3))
    for token in range(decoded):
        run.decode(5 + token)
    in_order(run)
    run.next_prompt(prompt(6, seed=5))
    in_order(run)


def in_order(run: Run) -> None:
    for layer in range(3):
        for row, length in enumerate(run.seen - pad for pad in run.pads):
            for kept in kept_by(run, layer, row):
                assert kept == sorted(set(kept)) and all(at < length for at in kept)


def test_kinds_are_those_of_the_tokens_that_are_left() -> None:
    """New tokens that a step before has dropped in some heads, in chunks of which the last one is short."""
    model = model_with(4)
    ids = prompt(40)
    run = Run(model, [SnapKV(budget=14, window=2, kernel=3), replace(FASTGEN, recovered=1.0)], [ids])
    kinds_V = vars(model)["token_kinds"] = torch.arange(model.vocab_size) % 3
    run.chunk(30, evicts=False)
    run.chunk(10)
    for layer in run.kept.layers:
        kinds_BKn = layer.carried_BKn((FastGen, 0))
        assert kinds_BKn is not None
        expected_BKn = kinds_V[torch.tensor(ids)][layer.positions_BKn().long()]
        assert torch.equal(kinds_BKn.long(), expected_BKn)


def test_queries_whose_tokens_were_all_dropped_give_nothing_to_others() -> None:
    """So what a row's tokens have received is what it is alone, however long the other rows' heads are."""
    steps = [ADAKV, H2O(budget=14)]
    together = Run(model_with(4), steps, prompts(LENGTHS))
    together.prefill()
    for row in range(len(LENGTHS)):
        alone = Run(model_with(4), steps, prompts(LENGTHS)[row : row + 1])
        alone.prefill()
        for ours, theirs in zip(together.kept.layers, alone.kept.layers, strict=True):
            ours_BKn, theirs_BKn = ours.carried_BKn((H2O, 0)), theirs.carried_BKn((H2O, 0))
            assert ours_BKn is not None and theirs_BKn is not None
            sums_K, expected_K = ours_BKn[row].sum(dim=-1), theirs_BKn[0].sum(dim=-1)
            torch.testing.assert_close(sums_K, expected_K, atol=1e-4, rtol=0)


def test_a_query_counts_in_the_heads_where_it_sees_a_token() -> None:
    q_BNCH, k_BKnH = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 3, 8)
    keys_BKn = torch.tensor([[[-1, 4, 9], [0, 7, 8]]])
    signals = QuerySignals(
        q_BNCH, k_BKnH, AttentionTerms(scaling=1.0), queries_BC=torch.arange(-1, 9)[None], keys_BKn=keys_BKn
    )
    counted_N = torch.tensor([5.0, 5.0, 9.0, 9.0])  # positions from 4 and from 0 to 8
    torch.testing.assert_close(signals.received().sum(dim=-1)[0], counted_N)
    torch.testing.assert_close(signals.votes(7).sum(dim=-1)[0], torch.ones(4))
    assert signals.received()[0, 0, 0] == signals.received()[0, 0, 2] == 0  # padding, and what comes later
    assert bool((signals.highest()[0, 2:, 0] == 1).all())  # the first query sees itself alone


NONE = MadeUpKVzap(threshold=1e9, sinks=0, recent=0, evict_every=4)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("second", [H2O(budget=8), FASTGEN, RKV(budget=8)], ids=lambda policy: type(policy).__name__)
def test_a_step_may_leave_a_later_one_nothing(second: Policy, bits: int | None) -> None:
    """Seen to fail: probabilities of no keys."""
    talk = Talk("llama", policies_of(NONE, second, bits=bits), (40,))
    assert max(talk.conversation.kept_tokens) == 0
    assert talk.follow(*range(3, 10)).isfinite().all()
    assert talk.feed(3, 4, 5).isfinite().all() and max(talk.conversation.kept_tokens) == 0


@pytest.mark.parametrize(
    "steps",
    [
        [AdaKV(scorer=SnapKV(budget=52, window=6, kernel=3), alpha=0.1), H2O(budget=44, sinks=2, evict_every=1)],
        [CriticalKV(scorer=SnapKV(budget=60)), AdaKV(scorer=SnapKV(budget=44, window=6), alpha=0.1)],
    ],
    ids=lambda steps: "-".join(type(step).__name__ for step in steps),
)
def test_rows_in_few_bits_are_what_they_are_alone(steps: list[Policy]) -> None:
    """In all turns. Seen to fail: heads that a later step leaves equally long, quantised as if none could differ."""
    lengths = (77, 60, 9)

    def answers(talk: Conversation) -> list[Tensor]:
        found = []
        for asked, followed in ((range(9, 12), range(3, 20)), (range(20, 60), (5, 6, 7))):
            found.append(talk.follow(torch.tensor([followed] * len(talk.rows))))
            found.append(talk.feed(torch.tensor([asked] * len(talk.rows)), all_logits=True))
        return found

    together = Talk("llama", policies_of(*steps), lengths)
    ours = answers(together.conversation)
    for row, length in enumerate(lengths):
        alone = Conversation(together.model, policies_of(*steps))
        alone.feed(torch.tensor([prompt(length, row)]))
        for each, expected in zip(ours, answers(alone), strict=True):
            torch.testing.assert_close(each[row], expected[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "steps",
    [
        [H2O(budget=44), AdaKV(scorer=SnapKV(budget=30, window=6))],
        [AdaKV(scorer=SnapKV(budget=40, window=6), alpha=0.1)],
    ],
    ids=lambda steps: "-".join(type(step).__name__ for step in steps),
)
def test_padding_of_all_rows_in_few_bits_changes_nothing(steps: list[Policy]) -> None:
    """Seen to fail: slots are counted with the padding, which a layer of unequal heads does not store."""
    policies, pads, model = policies_of(*steps), [3, 5], tiny_model("llama")
    given_BC, later_BC = (
        torch.tensor([prompt(length, seed) for seed in seeds]) for length, seeds in ((20, (0, 1)), (26, (2, 3)))
    )

    def answers(talk: Conversation, later_BC: Tensor) -> Tensor:
        """Logits of a second turn and of generated tokens after it."""
        answered_BCV = talk.feed(later_BC, all_logits=True)
        return torch.cat([answered_BCV, talk.follow(torch.tensor([[5, 6, 7]] * len(later_BC)))], dim=1)

    together = Conversation(model, policies)
    together.feed(given_BC, pads=pads)
    ours_BCV = answers(together, later_BC)
    for row, pad in enumerate(pads):
        alone = Conversation(model, policies)
        alone.feed(given_BC[row : row + 1, pad:])
        expected_CV = answers(alone, later_BC[row : row + 1])[0]
        torch.testing.assert_close(ours_BCV[row], expected_CV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_with_a_budget_shared_alike_a_sequence_is_that_of_the_scorer(num_kv_heads: int) -> None:
    """Heads of equal length stay in dense memory, and a step after them does what it did before, bit by bit."""
    scorer = SnapKV(budget=16, window=4, kernel=3)
    found: list[list[Tensor]] = []
    for first in (AdaKV(scorer=scorer, alpha=1.0), scorer):
        run = Run(model_with(num_kv_heads), [first, LagKV(budget=12, sinks=2, lag=3)], prompts(LENGTHS))
        found.append([run.prefill(), run.next_prompt(prompt(9, seed=5)), run.decode(7)])
        assert all(type(layer) is KeptLayer for layer in run.kept.layers)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([ADAKV, Quest()], "adakv leaves heads of different lengths, and an index of policy quest holds equally many"),
        ([KVzip(budget=16), Window(budget=8)], "kvzip decides on the whole prompt, .* it must be the only one"),
        (
            [Window(budget=8), PyramidInfer()],
            "pyramidinfer narrows .* after window has dropped some; .* the first step",
        ),
        ([Window(budget=8), Razor()], "Razor stands in for the tokens that it drops, .* use policy.compensate=false"),
    ],
)
def test_what_cannot_be_combined_is_refused(steps: list[Policy], says: str) -> None:
    with throughout(torch.float64), pytest.raises(ValueError, match=says) as raised:
        RankPolicies(last=steps).check(tiny_model("llama"))
    assert "\n" not in str(raised.value)


def test_what_compensates_for_nothing_may_be_a_step() -> None:
    with throughout(torch.float64):
        RankPolicies(last=[Window(budget=8), Razor(compensate=False)]).check(tiny_model("llama"))
