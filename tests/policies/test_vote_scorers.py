"""Policies that choose by what queries say of the stored tokens choose as their papers say."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from policies import r_kv
from policies.chunkkv import ChunkKV
from policies.gumbel import gumbel
from policies.h2o import H2O
from policies.keyformer import Keyformer
from policies.layer_view import LayerView
from policies.r_kv import RKV
from policies.scissorhands import Scissorhands
from policies.scorer import Scorer
from policies.snapkv import SnapKV
from runahead.attention import probabilities as signals
from runahead.attention.partial import AttentionTerms
from runahead.attention.probabilities import QuerySignals
from tests.families import prompt
from tests.policies.running import Run
from tests.policies.test_scorers import kept, view_of
from tests.policies.test_selection import probabilities, signals_of, tensors
from tests.ranks.tasks import tiny_model

# Legend: B batch, N query heads, K kv heads, n stored tokens, H head dim.


class TestChunkKV:
    def test_chunks_stay_or_go_as_a_whole(self) -> None:
        """In every head and row, counted from the row's own first token; the one that the budget cuts has its start."""
        pads, window, chunk, budget = [0, 3, 7], 4, 5, 21
        q_BNCH, k_BKnH = tensors(44, 44, batch=3)
        view = view_of(k_BKnH, signals=signals_of(q_BNCH, k_BKnH, pads), pads=pads)
        chosen = set()
        for pad, slots_Km in zip(pads, kept(ChunkKV(budget=budget, window=window, chunk=chunk), view), strict=True):
            for slots in slots_Km:
                own = [slot - pad for slot in slots]
                before = 44 - pad - window
                assert own[-window:] == [*range(before, before + window)]
                by_chunk: dict[int, list[int]] = {}
                for at in own[:-window]:
                    by_chunk.setdefault(at // chunk, []).append(at)
                sizes = {first: min(chunk, before - first * chunk) for first in by_chunk}
                cut = [first for first, tokens in by_chunk.items() if len(tokens) < sizes[first]]
                assert len(cut) <= 1
                for first, tokens in by_chunk.items():
                    assert tokens == [*range(first * chunk, first * chunk + len(tokens))]
                chosen.add(tuple(by_chunk))
        assert len(chosen) > 3  # rows and heads choose for themselves

    def test_a_chunk_with_one_good_token_loses_to_one_with_many(self) -> None:
        votes_n = torch.tensor([0.3, 0.0, 0.0, 0.2, 0.2, 0.2, 0.05, 0.05, 0.0, 0.0])

        class Votes:
            def votes(self, num_queries: int) -> Tensor:
                return votes_n.expand(1, 4, -1).clone()

        view = view_of(tensors(10, 1)[1], signals=Votes())
        assert kept(ChunkKV(budget=4, window=1, chunk=3), view) == [[[3, 4, 5, 9]] * 2]
        assert kept(SnapKV(budget=4, window=1, kernel=1), view) == [[[0, 3, 4, 9]] * 2]

    def test_chunks_of_one_token_are_snapkv_without_pooling(self) -> None:
        q_BNCH, k_BKnH = tensors(30, 30)
        view = view_of(k_BKnH, signals=signals_of(q_BNCH, k_BKnH, [0]))
        ours, theirs = ChunkKV(budget=12, window=4, chunk=1), SnapKV(budget=12, window=4, kernel=1)
        assert kept(ours, view) == kept(theirs, view)

    def test_bad_options_are_named(self) -> None:
        with pytest.raises(ValueError, match="policy.chunk=0 must be at least 1"):
            ChunkKV(chunk=0)


class TestRKV:
    def test_of_keys_that_are_alike_the_latest_stays(self) -> None:
        """By redundancy alone, in which keys unlike all others are equal: of these the earlier stays."""
        policy = RKV(budget=7, window=1, kernel=1, importance=0.0)
        for keys, budget, expected in (
            ([0, 1, 0, 2, 3, 4], 5, [1, 2, 3, 4, 5]),
            ([0, 1, 0, 2, 3, 0, 4, 5], 6, [1, 3, 4, 5, 6, 7]),
            ([0, 1, 0, 2, 3, 0, 4, 5], 5, [1, 3, 4, 5, 7]),
        ):
            view = replace(view_of(torch.eye(8)[keys][None, None]), carried_BKn=torch.ones(1, 1, len(keys)))
            assert kept(replace(policy, budget=budget), view) == [[expected]]

    @pytest.mark.parametrize("block", [1, 100, 1 << 20])
    def test_redundancy_is_the_mean_cosine_without_the_latest_key_that_is_alike(
        self, block: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Expected from each row's own tokens, in plain loops."""
        monkeypatch.setattr(r_kv, "BLOCK_COSINES", block)
        pads, similar = [0, 4], 0.3
        k_BKnH = tensors(18, 1, batch=2)[1].double()
        k_BKnH[1, :, :4] = 100.0
        ours_BKn = RKV(similar=similar).redundancy(view_of(k_BKnH, pads=pads))
        for row, pad in enumerate(pads):
            for head in range(2):
                keys_nH = torch.nn.functional.normalize(k_BKnH[row, head, pad:], dim=-1)
                cosines_nn = keys_nH @ keys_nH.T
                for at, cosines_n in enumerate(cosines_nn):
                    latest = max(other for other, c in enumerate(cosines_n.tolist()) if other == at or c > similar)
                    cosines_n[latest] = cosines_n[at] = 0
                torch.testing.assert_close(ours_BKn[row, head, pad:], cosines_nn.mean(dim=0).softmax(dim=0))
        assert not ours_BKn[1, :, :4].any()

    @pytest.mark.parametrize("chunks", [None, [17, 1, 22]], ids=["whole", "chunks"])
    def test_without_redundancy_a_prompt_keeps_what_snapkv_keeps(self, chunks: list[int] | None) -> None:
        rows = [prompt(40), prompt(31, seed=1), prompt(9, seed=2)]
        runs = []
        for policy in (RKV(budget=14, window=4, kernel=3, importance=1.0), SnapKV(budget=14, window=4, kernel=3)):
            runs.append(Run(tiny_model("llama"), [policy], rows))
            runs[-1].prefill(chunks)
        for ours, theirs in zip(runs[0].kept.layers, runs[1].kept.layers, strict=True):
            assert torch.equal(ours.positions_BKn(), theirs.positions_BKn())

    def test_without_redundancy_a_window_of_an_answer_keeps_what_snapkv_keeps(self) -> None:
        """Prompt and answer as one prompt. With the last query's votes alone, or redundancy, it keeps others."""
        rows, answer = [prompt(14), prompt(14, seed=1)], prompt(8, seed=2)
        options: dict[str, Any] = {"budget": 16, "window": 4, "kernel": 3}
        ours = Run(tiny_model("llama"), [RKV(**options, evict_every=6, importance=1.0)], rows)
        ours.prefill()
        for token in answer:
            assert set(ours.kept.slots_by_layer) == {ours.seen}  # the last one is the first that is too many
            ours.decode(token)
        theirs = Run(tiny_model("llama"), [SnapKV(**options)], [row + answer for row in rows])
        theirs.prefill()
        for mine, snapkvs in zip(ours.kept.layers, theirs.kept.layers, strict=True):
            assert mine.num_slots == 16 and torch.equal(mine.positions_BKn(), snapkvs.positions_BKn())

    def test_without_redundancy_rows_of_different_lengths_keep_what_snapkv_keeps_of_each_alone(self) -> None:
        """Each row is cut back at a step of its own, by the queries of the window before it."""
        rows, answer, num_kept, limit = [prompt(14), prompt(9, seed=1)], prompt(13, seed=2), 16, 16 + 6 - 1
        options: dict[str, Any] = {"budget": num_kept, "window": 4, "kernel": 3}
        ours = Run(tiny_model("llama"), [RKV(**options, evict_every=6, importance=1.0)], rows)
        ours.prefill()
        cut = [limit + 1 - len(row) for row in rows]  # tokens of the answer after which each row is cut back
        for number, token in enumerate(answer, start=1):
            ours.decode(token)
            if number not in cut:
                continue
            row = cut.index(number)
            alone = Run(tiny_model("llama"), [SnapKV(**options)], [rows[row] + answer[:number]])
            alone.prefill()
            for mine, snapkvs in zip(ours.kept.layers, alone.kept.layers, strict=True):
                mine_Kn, its_Kn = mine.positions_BKn()[row], snapkvs.positions_BKn()[0]
                assert mine_Kn[mine_Kn >= 0].tolist() == its_Kn.flatten().tolist()

    def test_bad_options_are_named(self) -> None:
        with pytest.raises(ValueError, match="policy.importance=1.5 must be a weight"):
            RKV(importance=1.5)
        with pytest.raises(ValueError, match="policy.similar=2 must be a cosine"):
            RKV(similar=2)


class TestScissorhands:
    def test_tokens_are_dropped_many_at_once_and_the_last_ones_survive(self) -> None:
        """Between budget - m and budget tokens, as a sawtooth."""
        budget, recent, dropped = 20, 5, 8
        run = Run(tiny_model("llama"), [Scissorhands(budget=budget, recent=recent, drop_share=0.4)], [prompt(40)])
        run.prefill()
        slots = [run.kept.slots_by_layer]
        for token in range(3, 33):
            run.decode(token)
            slots.append(run.kept.slots_by_layer)
            for layer in run.kept.layers:
                for positions in layer.positions_BKn()[0].tolist():
                    assert positions[-recent:] == [*range(run.seen - recent, run.seen)]
        cycle = [*range(budget - dropped, budget + 1)]
        assert [each[0] for each in slots] == [budget, *(cycle * 4)[:30]]
        assert all(len(set(each)) == 1 for each in slots)

    def test_a_token_that_most_queries_neglect_goes_first(self) -> None:
        """Not the one with the least attention in all, which a single query may have given."""
        neglects_n = torch.tensor([3.0, 9.0, 1.0, 0.0, 5.0, 2.0])
        view = replace(view_of(tensors(6, 1)[1]), carried_BKn=neglects_n.expand(1, 2, -1))
        assert kept(Scissorhands(budget=4, recent=1), view) == [[[0, 2, 3, 5]] * 2]
        assert kept(Scissorhands(budget=4, recent=2), view) == [[[2, 3, 4, 5]] * 2]

    def test_neglect_is_counted_by_query_head_before_heads_are_averaged(self) -> None:
        """A head that never looks at a token is not outvoted by one that does."""
        q_BNCH, k_BKnH = tensors(20, 20)
        view = view_of(k_BKnH, signals=signals_of(q_BNCH, k_BKnH, [0]))
        carried_BKn = Scissorhands(window=6).carry(view)
        assert carried_BKn is not None
        attention_NCn = probabilities(q_BNCH, k_BKnH, [0])[0, :, -6:]
        seen_Cn = torch.arange(20) <= torch.arange(14, 20)[:, None]
        neglects_Nn = ((attention_NCn * (torch.arange(14, 20)[:, None] + 1) < 1) & seen_Cn).sum(dim=1).float()
        assert torch.equal(carried_BKn[0], neglects_Nn.unflatten(0, (2, 2)).mean(dim=1))
        of_mean_KCn = attention_NCn.unflatten(0, (2, 2)).mean(dim=1)
        assert ((of_mean_KCn * (torch.arange(14, 20)[:, None] + 1) < 1) & seen_Cn).sum(dim=1).ne(carried_BKn[0]).any()

    def test_a_budget_without_room_for_the_last_tokens_is_named(self) -> None:
        with pytest.raises(ValueError, match="policy.recent=10 after policy.drop_share=0.5; use at least 19"):
            Scissorhands(budget=16)
        with pytest.raises(ValueError, match="policy.drop_share=1.0 must be"):
            Scissorhands(drop_share=1.0)


class TestKeyformer:
    ROWS = (40, 31, 9)

    def run(self, policy: Scorer, num_new: int = 14) -> Run:
        run = Run(tiny_model("llama"), [policy], [prompt(length, row) for row, length in enumerate(self.ROWS)])
        run.prefill()
        for token in range(3, 3 + num_new):
            run.decode(token)
        return run

    def test_without_noise_and_at_temperature_1_it_is_h2o(self) -> None:
        """Bit by bit, in what is kept and in the scores, after a prompt and while decoding."""
        plain = Keyformer(budget=14, noise=False, last_tau=1.0)
        ours, theirs = self.run(plain), self.run(H2O(budget=14, recent_share=0.3, evict_every=8))
        for a, b in zip(ours.kept.layers, theirs.kept.layers, strict=True):
            assert torch.equal(a.positions_BKn(), b.positions_BKn())
            [a_TBK], [b_TBK] = a.carried.values(), b.carried.values()
            assert torch.equal(a_TBK[: a.num_slots], b_TBK[: b.num_slots])

    def test_the_same_seed_keeps_the_same_tokens_and_another_one_others(self) -> None:
        kept_by = [
            [layer.positions_BKn().tolist() for layer in self.run(Keyformer(budget=14, seed=seed)).kept.layers]
            for seed in (0, 0, 1)
        ]
        assert kept_by[0] == kept_by[1] != kept_by[2]

    @pytest.mark.parametrize("block", [1, 700, 1 << 20])
    @pytest.mark.parametrize("seed", [None, 5])
    def test_scores_are_sums_of_softmax_with_noise_over_temperature(
        self, seed: int | None, block: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Logits, noise and temperature are written out; the noise is that of the positions."""
        monkeypatch.setitem(signals.BLOCK_SCORES, "cpu", block)
        pads, n, tau = [0, 5], 18, 1.6
        q_BNCH, k_BKnH = tensors(n, n, batch=2)
        ours_BNn = signals_of(q_BNCH, k_BKnH, pads).received(temperature=tau, seed=seed)
        for row, pad in enumerate(pads):
            own = torch.arange(n - pad)
            noise_NCn = gumbel(5, 0, 0, 4, own[None], own[None, None])[0] if seed is not None else 0.0
            logits_NCn = 0.3 * q_BNCH[row, :, pad:] @ k_BKnH[row, :, pad:].repeat_interleave(2, dim=0).mT
            hidden_Cn = own > own[:, None]
            shares_NCn = ((logits_NCn + noise_NCn) / tau).masked_fill(hidden_Cn, -torch.inf).softmax(dim=-1)
            torch.testing.assert_close(ours_BNn[row, :, pad:], shares_NCn.sum(dim=1), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("part", [False, True], ids=["attention sinks", "a part of the text"])
    def test_a_query_gives_the_stored_tokens_together_what_it_gives_them_without_noise(self, part: bool) -> None:
        """Where other tokens or a sink have the rest of its attention."""
        q_BNCH, k_BKnH = tensors(18, 6)
        positions_1n = torch.arange(18)[None]
        terms = AttentionTerms(scaling=0.3, sinks_N=None if part else torch.tensor([1.0, 2.0, 3.0, -1.0]))
        found = QuerySignals(
            q_BNCH,
            k_BKnH,
            terms,
            queries_BC=positions_1n[:, 12:],
            keys_BKn=positions_1n[:, None],
            lse_BNC=torch.full((1, 4, 6), 4.0) if part else None,
        )
        ours_1N, plain_1N = (x.sum(dim=-1) for x in (found.received(temperature=2.0, seed=3), found.received()))
        torch.testing.assert_close(ours_1N, plain_1N)
        assert (plain_1N < 5.9).all()

    def test_the_temperature_rises_with_the_number_of_generated_tokens(self) -> None:
        """From the prompt on, to its end after `tau_tokens` of them."""
        asked = []

        class Temperatures:
            def received(self, *, temperature: float, seed: int | None) -> Tensor:
                asked.append(temperature)
                return torch.zeros(1, 4, 6)

        view = view_of(tensors(6, 1)[1], signals=Temperatures())
        policy = Keyformer(budget=5, tau_tokens=4)
        for generated in (0, 1, 2, 4, 9):
            policy.carry(replace(view, num_generated=generated))
        assert asked == [1.0, 1.25, 1.5, 2.0, 2.0]

    def test_the_runtime_counts_generated_tokens(self) -> None:
        """Again from each prompt on, whatever the padding."""
        counted = []

        class Counting(Keyformer):
            def carry(self, view: LayerView) -> Tensor | None:
                counted.append(view.num_generated)
                return super().carry(view)

        run = self.run(Counting(budget=14), num_new=3)
        run.next_prompt(prompt(5, seed=7))
        run.decode(2)
        assert counted[::3] == [0, 1, 2, 3, 0, 1]

    @pytest.mark.parametrize(
        ("options", "says"),
        [({"tau": 0.0}, "policy.tau=0.0"), ({"last_tau": torch.inf}, "policy.last_tau=inf"), ({"seed": -1}, "seed=-1")],
    )
    def test_bad_options_are_named(self, options: dict[str, float], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            Keyformer(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "signal", "counted"),
    [
        (RKV(budget=14, window=4, kernel=3, evict_every=6), "votes", 4),
        (RKV(budget=14, window=6, kernel=3, evict_every=6), "votes", 6),
        (RKV(budget=14, window=9, kernel=3, evict_every=6), "votes", 6),
        (Scissorhands(budget=20, recent=3, drop_share=0.25, window=4), "neglects", 4),
        (Scissorhands(budget=20, recent=3, drop_share=0.25, window=400), "neglects", 6),
    ],
    ids=["window", "as long", "longer", "neglects", "neglects, longer"],
)
def test_while_decoding_the_last_queries_before_a_cut_count(policy: Scorer, signal: str, counted: int) -> None:
    """It counts as many as the window has, or all since the last cut if it has more."""
    policy, newest = copy(policy), dict[int, list[Tensor]]()
    compared = []
    carry, keep = policy.carry, policy.keep

    def noting(view: LayerView) -> Tensor | None:
        newest.setdefault(view.layer, []).append(view.by_kv_head(getattr(view.signals, signal)(1)))
        return carry(view)

    def checked(view: LayerView) -> Tensor | None:
        slots_BKm = keep(view)
        if slots_BKm is not None:
            n, counting = view.num_slots, newest[view.layer][-counted:]
            expected_BKn = sum(torch.nn.functional.pad(each, (0, n - each.shape[-1])) for each in counting)
            torch.testing.assert_close(view.carried_BKn, expected_BKn)
            compared.append(n - slots_BKm.shape[-1])
        return slots_BKm

    run = Run(tiny_model("llama"), [policy], [prompt(40), prompt(23, seed=1)])
    run.prefill()
    if signal == "neglects":  # after a prompt the whole budget is used, so the first new token is one too many
        run.decode(2)
    policy.carry, policy.keep = noting, checked  # type: ignore[method-assign]
    for token in range(3, 15):
        run.decode(token)
    assert compared == [6] * 6  # two cuts of three layers
