"""CriticalKV: half of the budget by another policy's scores, half by these times the length of projected values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from launch.inputs.policies import policies_of
from policies.adakv import AdaKV
from policies.chunkkv import ChunkKV
from policies.criticalkv import CriticalKV
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.lagkv import LagKV
from policies.pyramidinfer import PyramidInfer
from policies.r_kv import RKV
from policies.scorer import Scorer
from policies.snapkv import SnapKV
from policies.tova import TOVA
from runahead.model.layers import output_projection
from runahead.model.layers.output_projection import projected_lengths
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.policies.running import Run
from tests.policies.test_reference import attention_NSS
from tests.policies.test_scorers import kept, view_of
from tests.policies.test_selection import signals_of, tensors
from tests.ranks.tasks import tiny_model

# Legend: B batch, N query heads, K kv heads, n stored tokens, V value dim, D model dim.

BUDGET, WINDOW = 16, 4
LENGTHS = (40, 23, 9)  # of the prompts in test_reference


def view_with(scores_BKn: Tensor, lengths_BKn: Tensor, pads: tuple[int, ...] = (0,)) -> Any:
    """A view in which the last query gives each token this, and its value has this length."""

    class Given:
        def votes(self, num_queries: int, newest: float = 1.0) -> Tensor:
            return scores_BKn.clone()

        def projected_lengths(self, order: int = 1) -> Tensor:
            return lengths_BKn

    return view_of(torch.zeros(*scores_BKn.shape, 8), signals=Given(), pads=pads)


def test_half_of_the_budget_goes_to_the_values_that_move_the_output() -> None:
    scores_n = torch.tensor([0.30, 0.20, 0.10, 0.09, 0.08, 0.07, 0.06, 0.05, 0.05])
    lengths_n = torch.tensor([1.0, 1.0, 0.1, 1.0, 1.0, 2.0, 9.0, 1.0, 1.0])
    view = view_with(scores_n[None, None], lengths_n[None, None])
    assert kept(CriticalKV(scorer=SnapKV(budget=5, window=1, kernel=1)), view) == [[[0, 1, 5, 6, 8]]]
    assert kept(CriticalKV(scorer=SnapKV(budget=5, window=1, kernel=1), first_share=0.75), view) == [[[0, 1, 2, 6, 8]]]


@pytest.mark.parametrize("scorer", [SnapKV(budget=12, window=4), ChunkKV(budget=12, window=4), TOVA(budget=12)])
def test_values_of_equal_length_change_nothing(scorer: Scorer) -> None:
    """And with all of the budget for the scorer, no values do."""
    q_BNCH, k_BKnH = tensors(30, 30, batch=2)
    pads = [0, 6]
    for lengths_BNn, share in ((torch.ones(2, 4, 30), 0.5), (torch.rand(2, 4, 30) * 9, 1.0)):
        signals = signals_of(q_BNCH, k_BKnH, pads)
        signals._project = lambda order, lengths_BNn=lengths_BNn: lengths_BNn  # type: ignore[misc]
        view = view_of(k_BKnH, signals=signals, pads=pads)
        expected_BKm = torch.tensor(kept(scorer, view)).expand(-1, 2, -1).tolist()
        assert kept(CriticalKV(scorer=scorer, first_share=share), view) == expected_BKm
    signals._project = lambda order: lengths_BNn
    assert kept(CriticalKV(scorer=scorer), view) != expected_BKm


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_lengths_are_norms_of_what_a_head_adds_to_the_output(
    block: int, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the identity as projection, those of the values."""
    monkeypatch.setattr(output_projection, "BLOCK_VALUES", block)
    v_BKnV = tensors(11, 1, batch=2)[1].double()
    ours_BNn = projected_lengths(v_BKnV, torch.eye(32, dtype=torch.float64), 4, order)
    expected_BKn = v_BKnV.abs().pow(order).sum(dim=-1).pow(1 / order)
    torch.testing.assert_close(ours_BNn, expected_BKn.repeat_interleave(2, dim=1))
    weight_DX = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours_BNn = projected_lengths(v_BKnV, weight_DX, 4, order)
    for head in range(4):
        alone_BnX = torch.zeros(2, 11, 32, dtype=torch.float64)
        alone_BnX[..., head * 8 : head * 8 + 8] = v_BKnV[:, head // 2]
        expected_Bn = (alone_BnX @ weight_DX.T).abs().pow(order).sum(dim=-1).pow(1 / order)
        torch.testing.assert_close(ours_BNn[:, head], expected_Bn)


@pytest.mark.parametrize(
    ("family", "name", "transposed"),
    [
        ("llama", "model.layers.{}.self_attn.o_proj", False),
        ("gpt2", "transformer.h.{}.attn.c_proj", True),
        ("gpt_bigcode", "transformer.h.{}.attn.c_proj", False),
        ("deepseek_v3", "model.layers.{}.self_attn.o_proj", False),
        ("gpt_oss", "model.layers.{}.self_attn.o_proj", False),
        ("falcon", "transformer.h.{}.self_attention.dense", False),
        ("gptj", "transformer.h.{}.attn.out_proj", False),
    ],
)
def test_output_projections_are_found(family: str, name: str, transposed: bool) -> None:
    with throughout(torch.float64):
        model = tiny_model(family)
        for layer, weight_DX in enumerate(model.output_projections):
            expected = model.module.get_submodule(name.format(layer)).weight
            assert torch.equal(weight_DX, expected.mT if transposed else expected)
            assert weight_DX.untyped_storage().data_ptr() == expected.untyped_storage().data_ptr()


def test_a_model_without_them_is_refused() -> None:
    with throughout(torch.float64):
        module = build("llama")
        model = Model(module)
        attention = module.model.layers[1].self_attn
        attention.o_proj = torch.nn.Sequential(Doubled(), attention.o_proj)
        with pytest.raises(ValueError, match="no linear map in layer 1, but policy criticalkv weighs") as raised:
            RankPolicies(last=[CriticalKV()]).check(model)
    assert "use another policy" in str(raised.value) and "\n" not in str(raised.value)


class Doubled(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
def test_each_head_of_each_row_keeps_the_tokens_of_the_paper(family: str) -> None:
    """From transformers' attention matrices, and the model's own values and weights."""
    model, rows = tiny_model(family), [prompt(length, row) for row, length in enumerate(LENGTHS)]
    run = Run(model, [CriticalKV(scorer=SnapKV(budget=BUDGET, window=WINDOW, kernel=1))], rows)
    run.prefill()
    for row, ids in enumerate(rows):
        alone = Run(model, [], [ids])
        alone.prefill()
        before = len(ids) - WINDOW
        for layer, stored in enumerate(run.kept.layers):
            _, v_BKnV = alone.kept.layers[layer].slab().read(0, len(ids))
            attention_NSS_ = attention_NSS(family, row)[layer]
            num_heads, num_kv_heads = len(attention_NSS_), v_BKnV.shape[1]
            weights_NDV = model.output_projections[layer].unflatten(1, (num_heads, -1)).transpose(0, 1)
            positions_Km = stored.positions_BKn()[row].expand(num_kv_heads, -1)
            for kv_head in range(num_kv_heads):
                group = range(kv_head * num_heads // num_kv_heads, (kv_head + 1) * num_heads // num_kv_heads)
                votes_n = torch.stack([attention_NSS_[h, before:, :before].mean(dim=0) for h in group]).mean(dim=0)
                moved = [(v_BKnV[0, kv_head, :before] @ weights_NDV[h].T).abs().sum(dim=-1) for h in group]
                best = votes_n.argsort(descending=True)[: (BUDGET - WINDOW) // 2].tolist()
                weighed_n = (votes_n + 1e-4) * torch.stack(moved).mean(dim=0)
                rest = [at for at in weighed_n.argsort(descending=True).tolist() if at not in best]
                expected = [*sorted([*best, *rest][: BUDGET - WINDOW]), *range(before, len(ids))]
                assert [at for at in positions_Km[kv_head].tolist() if at >= 0] == expected, (layer, row, kv_head)


def test_a_policy_that_accumulates_scores_is_cut_back_while_decoding() -> None:
    run = Run(tiny_model("llama"), [CriticalKV(scorer=H2O(budget=12, evict_every=4))], [prompt(40)])
    run.prefill()
    slots = []
    for token in range(3, 12):
        run.decode(token)
        slots.append(run.kept.slots_by_layer[0])
    assert slots == [13, 14, 15, 12, 13, 14, 15, 12, 13]


def test_options() -> None:
    [policy] = policies_of(
        {"name": "criticalkv", "scorer": {"name": "chunkkv", "budget": 99}, "epsilon": 0.1}, "policy"
    )
    assert policy == CriticalKV(scorer=ChunkKV(budget=99), epsilon=0.1)
    assert policies_of("criticalkv", "policy") == [CriticalKV(scorer=SnapKV())]
    for scorer in ("full", "pyramidinfer"):
        with pytest.raises(ValueError, match=f"policy.scorer={scorer} does not score tokens"):
            policies_of({"name": "criticalkv", "scorer": scorer}, "policy")
    for wrapper, scorer in ((CriticalKV, AdaKV()), (AdaKV, CriticalKV()), (AdaKV, PyramidInfer())):
        with pytest.raises(ValueError, match=f"policy.scorer={scorer.label} does not score tokens"):
            wrapper(scorer=scorer)
    for scorer in (KeyDiff(), LagKV(), RKV()):
        with pytest.raises(ValueError, match=f"policy.scorer={scorer.label} does not score by shares"):
            CriticalKV(scorer=scorer)
    with pytest.raises(ValueError, match="policy.first_share=2"):
        CriticalKV(first_share=2)
    with pytest.raises(ValueError, match="policy.epsilon=-1"):
        CriticalKV(epsilon=-1)
