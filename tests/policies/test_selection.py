"""Policies keep what their papers say: against attention matrices that are written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from policies.base import Policy
from policies.h2o import H2O
from policies.layer_view import LayerView, Phase
from policies.pyramidkv import PyramidKV
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.window import Window
from runahead.attention import probabilities as signals
from runahead.attention.partial import AttentionTerms
from runahead.attention.probabilities import QuerySignals
from tests.families import prompt
from tests.policies.running import Run
from tests.ranks.tasks import tiny_model

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored tokens, H head dim.

HEADS, KV_HEADS = 4, 2


def tensors(n: int, num_new: int, seed: int = 0, batch: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q_BNCH = torch.randn(batch, HEADS, num_new, 8, generator=generator)
    return q_BNCH, torch.randn(batch, KV_HEADS, n, 8, generator=generator)


def probabilities(q_BNCH: Tensor, k_BKnH: Tensor, pads: list[int], softcap: float | None = None) -> Tensor:
    """(B, N, C, n), written out."""
    num_new, n = q_BNCH.shape[2], k_BKnH.shape[2]
    scores = 0.3 * q_BNCH @ k_BKnH.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    causal = torch.arange(n)[None] <= torch.arange(n - num_new, n)[:, None]
    scores = scores.masked_fill(~causal, -math.inf)
    for row, pad in enumerate(pads):
        scores[row, :, :, :pad] = -math.inf
    return torch.softmax(scores, dim=-1).nan_to_num(0.0)


def signals_of(q_BNCH: Tensor, k_BKnH: Tensor, pads: list[int], softcap: float | None = None) -> QuerySignals:
    num_new, n = q_BNCH.shape[2], k_BKnH.shape[2]
    positions_Bn = torch.arange(n) - torch.tensor(pads)[:, None]
    terms = AttentionTerms(scaling=0.3, softcap=softcap)
    return QuerySignals(
        q_BNCH, k_BKnH, terms, queries_BC=positions_Bn[:, n - num_new :], keys_BKn=positions_Bn[:, None]
    )


@given(
    n=st.integers(1, 30),
    new=st.integers(1, 30),
    pad=st.integers(0, 29),
    votes=st.integers(1, 40),
    block=st.sampled_from([1, 700, 1 << 20]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_signals_are_sums_of_attention_probabilities(
    n: int, new: int, pad: int, votes: int, block: int, softcap: float | None
) -> None:
    new, pads = min(new, n), [0, min(pad, n - 1)]
    q_BNCH, k_BKnH = tensors(n, new, batch=2)
    expected = probabilities(q_BNCH, k_BKnH, pads, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(signals.BLOCK_SCORES, "cpu", block)
        ours = signals_of(q_BNCH, k_BKnH, pads, softcap)
        torch.testing.assert_close(ours.received(), expected.sum(dim=2), atol=1e-5, rtol=1e-5)
        last = expected[:, :, -min(votes, new) :]
        voters = (last.sum(dim=-1)[:, 0] > 0).sum(dim=-1).clamp_min(1)  # queries on padding have no say
        mean = last.sum(dim=2) / voters[:, None, None]
        torch.testing.assert_close(ours.votes(votes), mean, atol=1e-5, rtol=1e-5)
        seen = last > 0
        neglected = (last < 1 / seen.sum(dim=-1, keepdim=True)) & seen
        assert torch.equal(ours.neglects(votes), neglected.sum(dim=2).float())


def keep(policy: Policy, n: int, num_new: int | None = None, seed: int = 0, layer: int = 0, layers: int = 1) -> Tensor:
    """Slots (K, m) that a policy keeps behind a prompt."""
    q_BNCH, k_BKnH = tensors(n, num_new or n, seed)
    view = LayerView(
        layer=layer,
        num_layers=layers,
        phase=Phase.prefill,
        num_new=num_new or n,
        chunk_tokens=num_new or n,
        new_positions_BC=torch.arange(n - (num_new or n), n)[None],
        prompt_tokens=n,
        pads=[0],
        positions_BKn=torch.arange(n)[None, None],
        k_BKnH=k_BKnH,
        v_BKnV=k_BKnH,
        carried_BKn=None,
        signals=signals_of(q_BNCH, k_BKnH, [0]),
    )
    carried = policy.carry(view)
    if carried is not None:
        view = LayerView(**{**vars(view), "carried_BKn": carried})
    slots = policy.keep(view)
    return torch.arange(n).expand(KV_HEADS, -1) if slots is None else slots[0]


def test_a_window_keeps_the_last_tokens() -> None:
    assert keep(Window(budget=5), 12).tolist() == [[7, 8, 9, 10, 11]]


def test_streaming_llm_keeps_the_first_and_the_last_tokens() -> None:
    assert keep(StreamingLLM(budget=7, sinks=3), 12).tolist() == [[0, 1, 2, 8, 9, 10, 11]]


def test_h2o_keeps_the_tokens_that_received_most() -> None:
    n, budget = 20, 8
    received = probabilities(*tensors(n, n), [0])[0].sum(dim=1).unflatten(0, (KV_HEADS, -1)).mean(dim=1)
    heavy = received[:, : n - 4].topk(4).indices.sort().values
    kept = keep(H2O(budget=budget), n)
    for head in range(KV_HEADS):
        assert kept[head].tolist() == [*heavy[head].tolist(), *range(16, 20)]


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_snapkv_keeps_what_the_window_votes_for(pooling: str) -> None:
    n, window, kernel = 20, 4, 3
    votes = probabilities(*tensors(n, n), [0])[0, :, -window:, : n - window].mean(dim=1)
    votes = votes.unflatten(0, (KV_HEADS, -1)).mean(dim=1)
    pooled = torch.nn.functional.pad(votes, (1, 1), value=-math.inf if pooling == "max" else 0.0).unfold(1, kernel, 1)
    scores = pooled.amax(dim=-1) if pooling == "max" else pooled.mean(dim=-1)
    kept = keep(SnapKV(budget=9, window=window, kernel=kernel, pooling=pooling), n)  # type: ignore[arg-type]
    for head in range(KV_HEADS):
        best_first = scores[head].sort(descending=True, stable=True).indices  # pooling makes equal scores
        expected = best_first[: 9 - window].sort().values.tolist()
        assert kept[head].tolist() == [*expected, *range(16, 20)]


def test_pyramidkv_has_the_budget_as_its_mean() -> None:
    layers = 9
    policy = PyramidKV(budget=100, window=8, beta=20.0)
    slots = [keep(policy, 400, layer=layer, layers=layers).shape[1] for layer in range(layers)]
    assert slots == sorted(slots, reverse=True)
    assert sum(slots) / layers == pytest.approx(100, abs=0.5)  # rounded in each layer
    assert slots[-1] == 8 + round(92 / 20)


@pytest.mark.parametrize("share", [0.3, 0.8, 0.95])
def test_pyramidkv_has_a_share_as_its_mean_though_no_layer_has_more_than_the_prompt(share: float) -> None:
    layers, n = 9, 400
    policy = PyramidKV(budget=share, window=8, beta=20.0)
    lengths = [keep(policy, n, layer=layer, layers=layers).shape[1] for layer in range(layers)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] <= n
    assert sum(lengths) / layers == pytest.approx(share * n, abs=1)  # rounded in each layer


def test_a_share_is_a_share_of_the_prompt() -> None:
    assert keep(Window(budget=0.25), 12).shape == (1, 3)


def test_steps_follow_each_other() -> None:
    """The second policy sees what the first one kept, and its queries still see by position."""
    model, ids = tiny_model("llama"), prompt(40)
    run = Run(model, [SnapKV(budget=20, window=4, kernel=3), StreamingLLM(budget=9, sinks=2)], [ids])
    run.prefill()
    first = Run(model, [SnapKV(budget=20, window=4, kernel=3)], [ids])
    first.prefill()
    for layer, before in zip(run.kept.layers, first.kept.layers, strict=True):
        kept, candidates = layer.positions_BKn()[0].tolist(), before.positions_BKn()[0].tolist()
        for ours, theirs in zip(kept, candidates, strict=True):
            assert ours == [*theirs[:2], *theirs[-7:]]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Window(budget=0), "policy.budget=0"),
        (lambda: Window(budget=1.5), "policy.budget=1.5"),
        (lambda: Window(budget=True), "policy.budget=True"),
        (lambda: StreamingLLM(budget=4, sinks=-1), "policy.sinks=-1"),
        (lambda: StreamingLLM(budget=3), "no room"),
        (lambda: SnapKV(budget=100, kernel=4), "policy.kernel=4"),
        (lambda: SnapKV(budget=10), "no room for policy.window=32; use at least 32"),
        (lambda: SnapKV(budget=40, sinks=10), "no room for policy.sinks=10 and policy.window=32; use at least 42"),
        (lambda: SnapKV(budget=100, window=0), "policy.window=0"),
        (lambda: H2O(budget=10, recent_share=2.0), "policy.recent_share=2.0"),
        (lambda: PyramidKV(budget=100, beta=0.5), "policy.beta=0.5"),
    ],
)
def test_bad_options_are_named(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
