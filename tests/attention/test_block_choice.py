"""Blocks that are chosen are those of a plain computation from all products; attention to them is that of a mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runahead.attention import op, partial
from runahead.attention.op import Run, Step, spans_of
from runahead.attention.partial import AttentionTerms
from runahead.attention.sparse.blocks import BLOCK, Chosen, ChosenHere, attend_to_chosen
from runahead.attention.sparse.choice import BlockSparse, ChoiceRule, cells, choose, masses
from runahead.cache.slabs import KVSlab
from tests.attention.xattention import chosen_by_all_products

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H head dim.

H = 16
TERMS = AttentionTerms(scaling=H**-0.5)
RULES = [
    ChoiceRule(threshold=0.5),
    ChoiceRule(threshold=0.9, stride=8),
    ChoiceRule(density=0.4),
    ChoiceRule(density=0.1, stride=128),
    ChoiceRule(threshold=1.0),
]


def tensors(num_tokens: int, *, batch: int = 1, heads: tuple[int, int] = (4, 2)) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, of which some keys are alike for many queries."""
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (
        torch.randn(batch, heads[each > 0], num_tokens, H, generator=generator, dtype=torch.float64)
        for each in range(3)
    )
    drift = torch.randn(batch, heads[1], -(-num_tokens // 32), H, generator=generator, dtype=torch.float64)
    k = k + 3 * drift.repeat_interleave(32, dim=2)[:, :, :num_tokens]
    return q + k.repeat_interleave(heads[0] // heads[1], dim=1).roll(200, dims=2), k, v


def chosen(q: Tensor, k: Tensor, rule: ChoiceRule, *, start: int = 0, pads: list[int]) -> Tensor:
    """The choice for the queries from `start` on."""
    of_q = cells(q[:, :, start:], rule.stride, start=start, pads=pads)
    of_k = cells(k, rule.stride, start=0, pads=pads)
    expected = masses(of_q, of_k, TERMS, stride=rule.stride, start=start, pads=pads)
    return choose(expected, rule, first=start // BLOCK, pads=pads)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_tokens", "pads"), [(900, [0]), (1024, [0, 300]), (777, [5, 0, 700]), (100, [0])])
def test_choice_is_that_of_all_products(rule: ChoiceRule, num_tokens: int, pads: list[int]) -> None:
    """In a cell of stride x stride tokens the mean of the products is the product of the means."""
    q, k, _ = tensors(num_tokens, batch=len(pads))
    found = chosen(q, k, rule, pads=pads)
    for row, pad in enumerate(pads):
        known = chosen_by_all_products(q[row, :, pad:], k[row, :, pad:], TERMS.scaling, rule, pad)
        assert torch.equal(found[row, :, pad // BLOCK :, pad // BLOCK :], known)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("start", [128, 384, 896])
def test_choice_of_a_chunk_is_that_of_the_whole_prompt(rule: ChoiceRule, start: int) -> None:
    q, k, _ = tensors(1000, batch=2)
    pads = [0, 200]
    whole, of_chunk = chosen(q, k, rule, pads=pads), chosen(q, k, rule, start=start, pads=pads)
    assert torch.equal(whole[:, :, start // BLOCK :], of_chunk)


def test_keys_after_a_block_change_nothing() -> None:
    q, k, _ = tensors(1000)
    rule = ChoiceRule(threshold=0.5)
    before = chosen(q, k, rule, pads=[0])
    k[:, :, 640:] += 10
    q[:, :, 640:] -= 10
    assert torch.equal(before[:, :, :5], chosen(q, k, rule, pads=[0])[:, :, :5])


@given(st.integers(1, 1100), st.floats(0.01, 1))
def test_density_is_a_share_of_the_blocks_that_are_seen(num_tokens: int, density: float) -> None:
    q, k, _ = tensors(num_tokens)
    found = chosen(q, k, ChoiceRule(density=density), pads=[0])
    for block, row in enumerate(found[0, 0].tolist()):
        own_and_first = {0, block}
        assert sum(row) == max(math.ceil(density * (block + 1) - 1e-9), len(own_and_first))
        assert row[0] and row[block] and not any(row[block + 1 :])


def attended(
    q: Tensor, k: Tensor, v: Tensor, rule: ChoiceRule, *, start: int = 0, pads: list[int], terms: AttentionTerms = TERMS
) -> tuple[Tensor, BlockSparse]:
    """Output of `BlockSparse` for the queries from `start` on, over a slab with all keys."""
    slab = KVSlab(slab_TBKX=torch.cat([k, v], dim=-1).permute(2, 0, 1, 3), key_dim=H, first=0)
    num_new = q.shape[2] - start
    spans = spans_of(range(q.shape[2]), start=start, num_new=num_new, pads=pads)
    sparse = BlockSparse(rule=rule, pads=pads)
    out, _ = sparse.of_layer(0)(q[:, :, start:], [Step([Run(slab, spans)])], terms)
    return out, sparse


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("start", "pads"), [(0, [0]), (384, [0]), (256, [0, 300]), (128, [5, 128, 700])])
def test_attention_is_that_of_a_mask(rule: ChoiceRule, start: int, pads: list[int], softcap: float | None) -> None:
    """A softmax over the keys of the chosen blocks that are not after a query."""
    num_tokens, terms = 800, AttentionTerms(scaling=TERMS.scaling, softcap=softcap)
    q, k, v = tensors(num_tokens, batch=len(pads))
    found, sparse = attended(q, k, v, rule, start=start, pads=pads, terms=terms)
    density = []
    for row, pad in enumerate(pads):
        known = chosen_by_all_products(q[row, :, pad:], k[row, :, pad:], TERMS.scaling, rule, pad, softcap)
        at = torch.arange(pad, num_tokens) // BLOCK - pad // BLOCK
        sees = (
            known[:, at[:, None], at].repeat_interleave(2, dim=0)
            & torch.ones(num_tokens - pad, num_tokens - pad).tril().bool()
        )
        scores = q[row, :, pad:] @ k[row, :, pad:].repeat_interleave(2, dim=0).mT * terms.scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        out = scores.masked_fill(~sees, -math.inf).softmax(dim=-1) @ v[row, :, pad:].repeat_interleave(2, dim=0)
        first = max(0, pad - start)
        assert (found[row, :, first:] - out[:, start + first - pad :]).abs().max() < 1e-12
        density.append(known)
    if rule.threshold == 1 and rule.density is None:
        assert sparse.counts[0].density == 1 and sparse.counts[0].covered == pytest.approx(1)
    if start == 0:
        seen = torch.ones(density[0].shape[1:]).tril().sum() * 2
        assert sparse.counts[0].density == pytest.approx(float(density[0].sum() / seen))


@pytest.mark.parametrize("wrong", ["no own block", "a later block", "own chunk alone"])
def test_wrong_variants_are_told(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    q, k, v = tensors(800)
    right, _ = attended(q, k, v, ChoiceRule(threshold=0.5), start=384, pads=[0])

    def other(masses_BKqk: Tensor, rule: ChoiceRule, *, first: int, pads: list[int]) -> Tensor:
        found = choose(masses_BKqk, rule, first=first, pads=pads).clone()
        if wrong == "no own block":
            found[..., first:].diagonal(dim1=-2, dim2=-1).fill_(False)
        elif wrong == "a later block":
            found[..., 1] |= masses_BKqk[..., -1] >= 0
        else:
            found[..., :first] = False
        return found

    monkeypatch.setattr("runahead.attention.sparse.choice.choose", other)
    found, _ = attended(q, k, v, ChoiceRule(threshold=0.5), start=384, pads=[0])
    assert (found - right).abs().max() > 1e-3


def by_mask(q: Tensor, k: Tensor, v: Tensor, here: ChosenHere) -> tuple[Tensor, Tensor]:
    allowed = here.allowed(q.device).unsqueeze(2)
    queries, keys = (torch.arange(each.start, each.stop) for each in (here.queries, here.keys))
    return partial.attend_at(q, k, v, TERMS, queries, keys, sees=lambda a, b: allowed[..., a, b])


def test_gathered_blocks_are_those_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several calls, too, where few blocks fit into one."""
    q, k, v = tensors(900, batch=2, heads=(6, 2))
    for start, end in ((0, 900), (384, 900), (384, 384)):
        queries, keys = range(384 if end == 384 else start, 900), range(end)
        seen = torch.arange(queries.start // BLOCK, 8)[:, None] >= torch.arange(-(-end // BLOCK))
        blocks = (torch.rand(2, 2, *seen.shape, generator=torch.Generator().manual_seed(start)) < 0.5) & seen
        here = Chosen(blocks_BKqk=blocks, first=queries.start // BLOCK).of(slice(None), queries, keys)
        given_ = q[:, :, queries.start :], k[:, :, :end], v[:, :, :end]
        known = by_mask(*given_, here)
        for most in (1 << 28, 1):
            monkeypatch.setattr("runahead.attention.sparse.blocks.GATHERED_BYTES", most)
            for found, expected in zip(attend_to_chosen(*given_, TERMS, here), known, strict=True):
                torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_layers_with_windows_and_single_queries_see_all_that_they_may() -> None:
    q, k, v = tensors(600)
    slab = KVSlab(slab_TBKX=torch.cat([k, v], dim=-1).permute(2, 0, 1, 3), key_dim=H, first=0)
    sparse = BlockSparse(rule=ChoiceRule(threshold=0.1), pads=[0])
    steps = [Step([Run(slab, spans_of(range(600), start=599, num_new=1, pads=[0]))])]
    out, _ = sparse.of_layer(0)(q[:, :, -1:], steps, TERMS)
    assert torch.equal(out, op.attend(q[:, :, -1:], steps, TERMS)[0]) and not sparse.counts
