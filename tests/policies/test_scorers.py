"""KeyDiff, TOVA and Expected Attention choose as their papers say, after a prompt and while decoding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from policies.expected_attention import ExpectedAttention
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.layer_view import LayerView, Phase
from policies.scorer import Scorer
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.policies.running import Run
from tests.policies.test_selection import probabilities, signals_of, tensors
from tests.ranks.tasks import tiny_model

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, n stored tokens, H head dim.

TOLERANCE = 1e-9  # float64


def view_of(
    k_BKnH: Tensor, *, signals: Any = None, pads: Sequence[int] = (0,), phase: Phase = Phase.prefill
) -> LayerView:
    """Tokens of a prompt, or the last of them a generated one."""
    n = k_BKnH.shape[2]
    return LayerView(
        layer=0,
        num_layers=1,
        phase=phase,
        num_new=n,
        chunk_tokens=n,
        new_positions_BC=torch.arange(n) - torch.tensor(pads)[:, None],
        prompt_tokens=n,
        pads=list(pads),
        positions_BKn=(torch.arange(n) - torch.tensor(pads)[:, None])[:, None],
        k_BKnH=k_BKnH,
        v_BKnV=k_BKnH.flip(-1) * 2,
        carried_BKn=None,
        signals=signals,
    )


def kept(policy: Scorer, view: LayerView) -> list[list[list[int]]]:
    slots_BKm = policy.keep(view)
    assert slots_BKm is not None
    found: list[list[list[int]]] = slots_BKm.tolist()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_has_no_gap(dtype: torch.dtype) -> None:
    """Positions above 256 are not exact in bfloat16."""
    view = view_of(torch.zeros(1, 1, 3001, 4, dtype=dtype))
    assert kept(StreamingLLM(budget=1100, sinks=3), view) == [[[0, 1, 2, *range(3001 - 1097, 3001)]]]


class TestKeyDiff:
    def test_of_orthogonal_keys_the_duplicated_ones_go_first(self) -> None:
        """The earlier of equal ones stays, and the recent window whatever it has."""
        keys_nH = torch.eye(8)[[0, 1, 0, 2, 0, 3, 4]]
        view = view_of(keys_nH[None, None])
        assert kept(KeyDiff(budget=5), view) == [[[0, 1, 3, 5, 6]]]
        assert kept(KeyDiff(budget=4), view) == [[[1, 3, 5, 6]]]
        assert kept(KeyDiff(budget=5, recent=3), view) == [[[1, 3, 4, 5, 6]]]

    def test_the_length_of_a_key_changes_nothing(self) -> None:
        _, k_BKnH = tensors(20, 1, batch=2)
        lengths = torch.rand(2, 2, 20, 1, generator=torch.Generator().manual_seed(1)) * 9 + 0.1
        ours, theirs = (KeyDiff(budget=5).score(view_of(k, pads=[0, 4])) for k in (k_BKnH * lengths, k_BKnH))
        torch.testing.assert_close(ours, theirs)

    def test_a_score_is_minus_the_cosine_to_the_mean_key_of_the_row(self) -> None:
        """Padding, which may hold anything, has no part in the mean."""
        _, k_BKnH = tensors(20, 1, batch=2)
        k_BKnH[1, :, :6] = 1e4
        scores_BKn = KeyDiff(budget=5).score(view_of(k_BKnH, pads=[0, 6]))
        for row, pad in enumerate([0, 6]):
            keys_KnH = k_BKnH[row, :, pad:]
            mean_K1H = (keys_KnH / keys_KnH.norm(dim=-1, keepdim=True)).mean(dim=1, keepdim=True)
            expected_Kn = -torch.nn.functional.cosine_similarity(keys_KnH, mean_K1H, dim=-1)
            torch.testing.assert_close(scores_BKn[row, :, pad:], expected_Kn)

    def test_no_attention_is_computed(self) -> None:
        """The view has no signals at all."""
        _, k_BKnH = tensors(20, 1)
        assert len(kept(KeyDiff(budget=5), view_of(k_BKnH, signals=None))[0][0]) == 5


class TestTOVA:
    @pytest.mark.parametrize("pad", [0, 5])
    def test_the_token_that_the_last_query_attends_to_least_is_dropped(self, pad: int) -> None:
        """Whichever it is: the mean over all heads decides for all KV heads."""
        for seed in range(8):
            q_BNCH, k_BKnH = tensors(14, 1, seed)
            view = view_of(k_BKnH, signals=signals_of(q_BNCH, k_BKnH, [pad]), pads=[pad], phase=Phase.decode)
            attention_n = probabilities(q_BNCH, k_BKnH, [pad])[0, :, -1, pad:].mean(dim=0)
            [[slots]] = kept(TOVA(budget=13 - pad), view)
            assert set(range(pad, 14)) - set(slots) == {pad + int(attention_n.argmin())}

    def test_while_decoding_one_token_is_dropped_for_each_new_one(self) -> None:
        run = Run(tiny_model("llama"), [TOVA(budget=16)], [prompt(40), prompt(23, seed=1)])
        run.prefill()
        before = [layer.positions_BKn().tolist() for layer in run.kept.layers]
        lost_last = 0
        for step in range(12):
            run.decode(5 + step)
            assert set(run.kept.slots_by_layer) == {16}
            for layer, held in zip(run.kept.layers, before, strict=True):
                for row, positions in enumerate(layer.positions_BKn().tolist()):
                    new = (40, 23)[row] + step
                    assert set(positions[0]) < {*held[row][0], new}
                    lost_last += new not in positions[0]
            before = [layer.positions_BKn().tolist() for layer in run.kept.layers]
        assert lost_last < 12 * 6  # a new token is dropped only where it is the one with the least attention


class OneQuery:
    """Signals that foretell one query, without any spread."""

    def __init__(self, q_BNH: Tensor, covariance_BNHH: Tensor | None = None) -> None:
        self.q_BNH, self.covariance_BNHH = q_BNH, covariance_BNHH
        self.asked: list[int] = []

    def next_queries(self, num_positions: int) -> tuple[Tensor, Tensor]:
        self.asked.append(num_positions)
        none = self.q_BNH.new_zeros(*self.q_BNH.shape, self.q_BNH.shape[-1])
        return self.q_BNH, none if self.covariance_BNHH is None else self.covariance_BNHH


class TestExpectedAttention:
    def test_without_covariance_it_is_the_attention_of_the_mean_query(self) -> None:
        """Over all tokens but the sinks, averaged over the group, times the value's length."""
        q_BNCH, k_BKnH = tensors(14, 1, batch=2)
        pads, sinks = [0, 3], 2
        signals = OneQuery(q_BNCH[:, :, 0])
        view = view_of(k_BKnH, signals=signals, pads=pads)
        scores_BKn = ExpectedAttention(budget=5, sinks=sinks, future_tokens=7, epsilon=0).score(view)
        assert signals.asked == [7]
        for row, pad in enumerate(pads):
            first = pad + sinks
            for head in range(2):
                keys_nH, values_nH = k_BKnH[row, head, first:], view.v_BKnV[row, head, first:]
                of_group = [torch.softmax(keys_nH @ q_BNCH[row, 2 * head + g, 0], dim=0) for g in range(2)]
                expected_n = (of_group[0] + of_group[1]) / 2 * values_nH.norm(dim=-1)
                torch.testing.assert_close(scores_BKn[row, head, first:], expected_n)

    def test_scores_are_expectations_over_normal_queries(self) -> None:
        """Against the mean of exp(q k) over many drawn queries, of which each head has a distribution of its own."""
        generator = torch.Generator().manual_seed(0)
        mean_1NH = torch.randn(1, 2, 4, generator=generator) / 2
        factor_1NHH = torch.randn(1, 2, 4, 4, generator=generator) / 4
        k_BKnH = torch.randn(1, 1, 6, 4, generator=generator)
        signals = OneQuery(mean_1NH, factor_1NHH @ factor_1NHH.mT)
        view = view_of(k_BKnH, signals=signals)
        ours_n = ExpectedAttention(budget=3, sinks=0, epsilon=0).score(view)[0, 0] / view.v_BKnV[0, 0].norm(dim=-1)
        drawn_DNH = torch.randn(200_000, 2, 1, 4, generator=generator) @ factor_1NHH.mT
        exponentials_Nn = ((drawn_DNH[:, :, 0] + mean_1NH) @ k_BKnH[0, 0].T).exp().mean(dim=0)
        expected_n = (exponentials_Nn / exponentials_Nn.sum(dim=-1, keepdim=True)).mean(dim=0)
        torch.testing.assert_close(ours_n, expected_n, atol=0, rtol=0.03)  # of 200,000 draws
        plain_n = ExpectedAttention(budget=3, sinks=0, epsilon=0).score(view_of(k_BKnH, signals=OneQuery(mean_1NH)))[
            0, 0
        ]
        assert ((plain_n / view.v_BKnV[0, 0].norm(dim=-1)) / expected_n - 1).abs().max() > 0.1

    def test_epsilon_tells_tokens_apart_by_their_values(self) -> None:
        assert ExpectedAttention().epsilon == 0.01
        q_BNCH, k_BKnH = tensors(14, 1)
        view = view_of(k_BKnH, signals=OneQuery(q_BNCH[:, :, 0]))
        without, with_epsilon = (ExpectedAttention(budget=5, sinks=0, epsilon=each).score(view) for each in (0.0, 0.5))
        torch.testing.assert_close(with_epsilon - without, view.v_BKnV.norm(dim=-1) / 2)

    @pytest.mark.parametrize("chunks", [None, [17, 1, 22]], ids=["whole", "chunks"])
    @pytest.mark.parametrize("kv_heads", [4, 2, 1])
    def test_rows_keep_what_their_own_queries_foretell(self, kv_heads: int, chunks: list[int] | None) -> None:
        """Each row of a padded batch, from transformers' own projections of it alone."""
        rows = [prompt(40), prompt(31, seed=1), prompt(19, seed=2)]
        policy = ExpectedAttention(budget=12, sinks=3, future_tokens=9)
        module = build("llama", num_key_value_heads=kv_heads)
        with throughout(torch.float64):
            model = Model(module)
            run = Run(model, [policy], rows)
            run.prefill(chunks)
            for row, ids in enumerate(rows):
                alone = Run(model, [], [ids])
                with unrotated_queries(model) as queries, mock.patch.object(model, "last_layer", None):
                    alone.prefill()
                for layer, stored in enumerate(run.kept.layers):
                    slab = alone.kept.layers[layer].slab()
                    k_KnH, v_KnH = (x[0] for x in slab.read(0, len(ids)))
                    scores_Kn = foretold(queries[layer][0], k_KnH, v_KnH, skipped=3, sinks=3, start=len(ids), ahead=9)
                    positions_Km = stored.positions_BKn()[row].expand(kv_heads, -1)
                    assert positions_Km.tolist() == kept_by(scores_Kn, 12, sinks=3), (row, layer)

    @pytest.mark.parametrize("reencoded", [False, True])
    def test_while_decoding_the_queries_since_the_last_cut_count(
        self, reencoded: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every four tokens, by the queries of these; their mean and covariance are then forgotten."""
        policy = ExpectedAttention(budget=12, sinks=3, evict_every=4, future_tokens=9)
        views: list[tuple[LayerView, Tensor]] = []
        keep = policy.keep

        def noting(view: LayerView) -> Tensor | None:
            slots_BKm = keep(view)
            if slots_BKm is not None:
                views.append((view, slots_BKm))
            return slots_BKm

        monkeypatch.setattr(policy, "keep", noting)
        model = tiny_model("llama")
        with throughout(torch.float64):
            run = Run(model, [policy], [prompt(40)], reencoded=reencoded)
            run.prefill()
            assert not any(layer.queries for layer in run.kept.layers)
            for _ in range(2):
                views.clear()
                with unrotated_queries(model) as queries:
                    for token in (5, 7, 11):
                        run.decode(token)
                        assert not views
                    [moments] = run.kept.layers[1].queries.values()
                    assert moments.count_B.tolist() == [3]
                    torch.testing.assert_close(moments.mean_BNH, queries[1].mean(dim=2), atol=TOLERANCE, rtol=0)
                    run.decode(13)
                assert len(views) == 3 and set(run.kept.slots_by_layer) == {12}
                start = 16 if reencoded else run.seen
                for view, slots_BKm in views:
                    assert queries[view.layer].shape[2] == 4
                    scores_Kn = foretold(
                        queries[view.layer][0],
                        view.k_BKnH[0],
                        view.v_BKnV[0],
                        skipped=0,
                        sinks=3,
                        start=start,
                        ahead=9,
                    )
                    assert slots_BKm[0].tolist() == kept_by(scores_Kn, 12, sinks=3), view.layer
                assert not any(layer.queries for layer in run.kept.layers)

    def test_only_a_policy_that_asks_pays(self) -> None:
        """In bytes that are counted, while all tokens are still there."""
        sizes = {}
        for policy in (H2O(budget=100), KeyDiff(budget=100), ExpectedAttention(budget=100)):
            run = Run(tiny_model("llama"), [policy], [prompt(40), prompt(9, seed=1)])
            run.prefill()
            sizes[type(policy)] = run.kept.num_bytes
            asks = isinstance(policy, ExpectedAttention)
            assert all(bool(layer.queries) == asks for layer in run.kept.layers)
        of_queries = 3 * 2 * 8 * (1 + 4 * 8 + 4 * 8 * 8)  # layers, rows, bytes, 4 heads of 8 dims
        assert sizes[ExpectedAttention] == sizes[KeyDiff] + of_queries

    @pytest.mark.parametrize(
        ("family", "says"),
        [("gpt2", "adds positions"), ("phi3_longrope", "depend on the length"), ("llama_dynamic_ntk", "on the length")],
    )
    def test_models_whose_rotations_are_not_known_are_refused(self, family: str, says: str) -> None:
        with throughout(torch.float64), pytest.raises(ValueError, match=says) as raised:
            RankPolicies(last=[ExpectedAttention()]).check(tiny_model(family))
        assert "expected_attention" in str(raised.value) and "use another policy" in str(raised.value)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
    def test_layers_with_windows_are_no_obstacle(self, family: str) -> None:
        with throughout(torch.float64):
            RankPolicies(last=[ExpectedAttention()]).check(tiny_model(family))

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"future_tokens": 0}, "policy.future_tokens=0 must be at least 1"),
            ({"epsilon": -0.1}, "policy.epsilon=-0.1 must be"),
            ({"epsilon": math.nan}, "policy.epsilon=nan must be"),
            ({"budget": 3}, "no room"),
        ],
    )
    def test_bad_options_are_named(self, options: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            ExpectedAttention(**options)


@contextmanager
def unrotated_queries(model: Model) -> Iterator[list[Tensor]]:
    """Queries (B, N, C, H) of each layer as the projections give them, of all forwards inside, one after another."""
    layers = model.module.model.layers
    found = [torch.empty(1, 4, 0, 8, dtype=torch.float64) for _ in layers]

    def note(layer: int, q_BCX: Tensor) -> None:
        found[layer] = torch.cat([found[layer], q_BCX.unflatten(2, (4, -1)).transpose(1, 2)], dim=2)

    hooks = [
        each.self_attn.q_proj.register_forward_hook(lambda _, __, out, layer=layer: note(layer, out))
        for layer, each in enumerate(layers)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def foretold(
    q_NCH: Tensor, k_KnH: Tensor, v_KnH: Tensor, *, skipped: int, sinks: int, start: int, ahead: int
) -> Tensor:
    """Scores (K, n) by the paper, in plain loops; those of the sinks are infinite.

    Args:
        q_NCH: queries before RoPE, of which the first `skipped` do not count.
        start: first of the `ahead` next positions.
    """
    head_dim = q_NCH.shape[-1]
    inv_freq_F = (1.0 / 10000.0 ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)).double()
    turn_HH = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    for position in range(start, start + ahead):
        cos, sin = torch.diag((position * inv_freq_F).cos()), torch.diag((position * inv_freq_F).sin())
        turn_HH += torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)]) / ahead
    group = len(q_NCH) // len(k_KnH)
    scores_Kn = torch.zeros(k_KnH.shape[:2], dtype=torch.float64)
    for head, q_CH in enumerate(q_NCH[:, skipped:]):
        keys_nH = k_KnH[head // group, sinks:]
        mean_H = turn_HH @ q_CH.mean(dim=0)
        covariance_HH = turn_HH @ torch.cov(q_CH.T, correction=0) @ turn_HH.T
        exponents = [k @ mean_H / math.sqrt(head_dim) + k @ covariance_HH @ k / (2 * head_dim) for k in keys_nH]
        scores_Kn[head // group, sinks:] += torch.stack(exponents).softmax(dim=0) / group
    scores_Kn = (scores_Kn + 0.01) * v_KnH.norm(dim=-1)  # the default epsilon
    scores_Kn[:, :sinks] = math.inf
    return scores_Kn


def kept_by(scores_Kn: Tensor, budget: int, *, sinks: int) -> list[list[int]]:
    slots_Km: list[list[int]] = scores_Kn.topk(budget).indices.sort().values.tolist()
    assert all(set(range(sinks)) <= set(slots) for slots in slots_Km)
    return slots_Km
