"""XAttention (arXiv 2503.16428): which blocks of keys a block of queries attends to, by their expected mass.

The paper adds up products of queries and keys along the antidiagonals of cells of stride x stride tokens, and takes the
softmax over cells for the attention that a block receives. The mean of all products in a cell, of which those on the
antidiagonal are a sample, is the product of the means of its queries and of its keys. So this takes the means: they
cover as much of the attention at the same density (docs/sparse_prefill.md), with stride times fewer operations, and a
rank of a chain needs 1 / stride of the others' keys to choose.

A block of queries sees the text's first block and its own in any case. What it sees depends on its own queries and on
keys up to them alone; the mass of a block is the mean over the query heads of a KV head, which attend to the same keys.
"""

# Legend: B batch, X heads of queries or keys, N query heads, K kv heads, G query heads of a KV head, C tokens,
# c cells of queries, s cells of keys, q blocks of queries, k blocks of keys, H head dim.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.attention import op
from runahead.attention.op import Codec, Lengths, Part, Run, Step, nothing
from runahead.attention.partial import AttentionTerms
from runahead.attention.sparse.blocks import BLOCK, Chosen
from runahead.config import PrefillOptions

SCORES = 1 << 22
"""Most products of cells that are computed at a time."""


@dataclass(frozen=True, kw_only=True)
class ChoiceRule:
    """How many blocks are chosen.

    Attributes:
        threshold: share of the expected mass that the fewest blocks have together; 1 chooses all.
        density: share of the blocks that a block of queries could see, in place of the threshold.
        stride: tokens of a cell, a divisor of the block.
    """

    threshold: float = 0.99
    density: float | None = None
    stride: int = 16


def cells(x_BXCH: Tensor, stride: int, *, start: int, pads: Sequence[int]) -> Tensor:
    """Means (B, X, c, H) of `stride` tokens each, of queries or keys, in at least float32; padding does not count.

    Args:
        start: index of the first token in the padded batch, a multiple of the stride.
        pads: left padding of each row.
    """
    assert start % stride == 0, (start, stride)
    wide, num_tokens, device = torch.promote_types(x_BXCH.dtype, torch.float32), x_BXCH.shape[2], x_BXCH.device
    padded = max(pads) > start
    if padded:
        is_pad_BC = torch.arange(start, start + num_tokens, device=device) < row_values(pads, device)[:, None]
        x_BXCH = x_BXCH.masked_fill(is_pad_BC[:, None, :, None], 0)
    whole = num_tokens // stride
    means = [x_BXCH[:, :, : whole * stride].unflatten(2, (whole, stride)).mean(dim=3, dtype=wide)] if whole else []
    if whole * stride < num_tokens:
        means.append(x_BXCH[:, :, whole * stride :].mean(dim=2, keepdim=True, dtype=wide))
    found = torch.cat(means, dim=2)
    if padded:
        begins_c = torch.arange(start, start + num_tokens, stride, device=device)
        ends_c = (begins_c + stride).clamp_max(start + num_tokens)
        counts_Bc = (ends_c - torch.maximum(begins_c, row_values(pads, device)[:, None])).clamp_min(1)
        found = found * ((ends_c - begins_c) / counts_Bc)[:, None, :, None]
    return found


def masses(
    q_BNcH: Tensor, k_BKsH: Tensor, terms: AttentionTerms, *, stride: int, start: int, pads: Sequence[int]
) -> Tensor:
    """Expected share (B, K, q, k) of a block of queries' attention that a block of keys receives; 0 after its own.

    Args:
        q_BNcH: cells of the queries.
        k_BKsH: cells of all keys up to the queries' last, from index 0 on.
        start: index of the first query, a multiple of the block.
        pads: left padding of each row.
    """
    assert start % BLOCK == 0 and BLOCK % stride == 0, (start, stride)
    (batch, num_heads, num_cells, _), num_kv_heads, device = q_BNcH.shape, k_BKsH.shape[1], q_BNcH.device
    per_block, first = BLOCK // stride, start // stride
    num_blocks, num_key_blocks = -(-num_cells // per_block), -(-k_BKsH.shape[2] // per_block)
    q_BKGcH = (q_BNcH * terms.scaling).unflatten(1, (num_kv_heads, -1))
    keys_s = torch.arange(k_BKsH.shape[2], device=device)
    is_pad_Bs = (keys_s + 1) * stride <= row_values(pads, device)[:, None] if max(pads) >= stride else None
    found_BKqk = q_BNcH.new_zeros(batch, num_kv_heads, num_blocks, num_key_blocks)
    at_once = max(1, SCORES // (batch * num_heads * per_block * k_BKsH.shape[2]))
    for block in range(0, num_blocks, at_once):
        some = slice(block * per_block, min((block + at_once) * per_block, num_cells))
        last = min(first + some.stop, k_BKsH.shape[2])
        scores_BKGcs = q_BKGcH[:, :, :, some] @ k_BKsH[:, :, None, :last].mT
        if terms.softcap is not None:
            scores_BKGcs = terms.softcap * torch.tanh(scores_BKGcs / terms.softcap)
        own_c = torch.arange(first + some.start, first + some.stop, device=device)
        hidden = keys_s[:last] > own_c[:, None]
        if is_pad_Bs is not None:
            hidden = hidden | is_pad_Bs[:, None, None, None, :last]
        shares = scores_BKGcs.masked_fill_(hidden, -math.inf).softmax(dim=-1)
        if is_pad_Bs is not None:
            shares = shares.nan_to_num_(0.0)  # of queries that are padding
        shares_BKcs = shares.mean(dim=2)
        rows, columns = -shares_BKcs.shape[2] % per_block, -last % per_block
        shares_BKcs = torch.nn.functional.pad(shares_BKcs, (0, columns, 0, rows))
        by_block = shares_BKcs.unflatten(3, (-1, per_block)).sum(4).unflatten(2, (-1, per_block)).sum(3)
        found_BKqk[:, :, block : block + at_once, : by_block.shape[3]] = by_block
    return found_BKqk / found_BKqk.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(found_BKqk.dtype).tiny)


def choose(masses_BKqk: Tensor, rule: ChoiceRule, *, first: int, pads: Sequence[int]) -> Tensor:
    """Blocks that are chosen (B, K, q, k): the first one and its own, then those with the largest masses.

    Args:
        first: number of the first block of queries.
        pads: left padding of each row.
    """
    device, (num_queries, num_keys) = masses_BKqk.device, masses_BKqk.shape[2:]
    own_q1 = torch.arange(first, first + num_queries, device=device)[:, None]
    keys_k = torch.arange(num_keys, device=device)
    seen_qk = keys_k <= own_q1
    first_B11 = row_values(pads, device)[:, None, None] // BLOCK
    always_BKqk = (((keys_k == own_q1) | (keys_k == first_B11)) & seen_qk)[:, None]
    if rule.density is None and rule.threshold >= 1:
        return seen_qk.expand(masses_BKqk.shape)
    ranked = torch.where(always_BKqk, masses_BKqk + 2, masses_BKqk).masked_fill(~seen_qk, -1)
    order_BKqk = ranked.sort(dim=-1, descending=True, stable=True).indices
    if rule.density is None:
        sorted_BKqk = masses_BKqk.gather(-1, order_BKqk)
        takes = sorted_BKqk.cumsum(dim=-1) - sorted_BKqk < rule.threshold
    else:
        most_Bq1 = (rule.density * (own_q1 + 1 - first_B11)).ceil()
        takes = (keys_k < most_Bq1)[:, None].expand(masses_BKqk.shape)
    chosen_BKqk = torch.zeros_like(masses_BKqk, dtype=torch.bool).scatter(-1, order_BKqk, takes)
    return (chosen_BKqk | always_BKqk) & seen_qk


@dataclass(kw_only=True)
class BlockCounts:
    """Counts of what was chosen in a layer, for blocks of queries that are not padding.

    Attributes:
        totals_4: number of blocks that were chosen, and that could be seen, mass of those that were chosen, and number
            of blocks of queries of a KV head; on the device, which the host does not wait for.
    """

    totals_4: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    def add(self, chosen_BKqk: Tensor, masses_BKqk: Tensor, *, first: int, pads: Sequence[int]) -> None:
        """Take in what was chosen among masses; other arguments are as of `choose`."""
        is_real_BKq = masses_BKqk.sum(dim=-1) > 0
        own_q = torch.arange(first, first + masses_BKqk.shape[2], device=masses_BKqk.device)
        first_B11 = row_values(pads, masses_BKqk.device)[:, None, None] // BLOCK
        is_seen_Bk = torch.arange(masses_BKqk.shape[3], device=masses_BKqk.device) >= first_B11[:, 0]
        chosen_BKq = (chosen_BKqk & is_seen_Bk[:, None, None]).sum(dim=-1)
        seen_Bq = own_q + 1 - first_B11[:, 0]
        mass_BKq = (masses_BKqk * chosen_BKqk).sum(dim=-1)
        each = chosen_BKq, seen_Bq[:, None].expand(chosen_BKq.shape), mass_BKq, torch.ones_like(mass_BKq)
        self.totals_4 = self.totals_4.to(mass_BKq.device) + torch.stack(
            [(x * is_real_BKq).sum().double() for x in each]
        )

    @property
    def density(self) -> float:
        """Chosen blocks over those that could be seen."""
        return float(self.totals_4[0] / self.totals_4[1])

    @property
    def covered(self) -> float:
        """Mean expected share of the attention that the chosen blocks receive."""
        return float(self.totals_4[2] / self.totals_4[3])


@dataclass(kw_only=True)
class BlockSparse:
    """Attention of a prompt's blocks of queries to the blocks of keys that are chosen, in layers without windows.

    A token whose attention is computed alone, as in the last layer, attends to all.

    Attributes:
        exact: numbers of layers that attend to all keys, as without it.
        counts: of each layer that chose, by its number.
        attended: exact layers that attended.
    """

    rule: ChoiceRule
    pads: Sequence[int]
    exact: Collection[int] = ()
    counts: dict[int, BlockCounts] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, options: PrefillOptions, pads: Sequence[int], exact: Collection[int]) -> BlockSparse:
        """The choice that a prefill's options ask for."""
        rule = ChoiceRule(threshold=options.threshold, density=options.density, stride=options.stride)
        return cls(rule=rule, pads=pads, exact=exact)

    def by_layer(self) -> dict[str, list[float | None]]:
        """Density and expected coverage of each layer, 1 of exact ones; None of one that chose nothing."""
        layers = range(max(*self.counts, *self.attended, -1, -1) + 1)
        whole: dict[int, float | None] = dict.fromkeys(self.attended, 1.0)
        return {
            name: [getattr(self.counts[layer], name) if layer in self.counts else whole.get(layer) for layer in layers]
            for name in ("density", "covered")
        }

    def of_layer(self, layer: int) -> Callable[..., Part]:
        """A function that computes attention in a layer in place of `op.attend`."""
        if layer in self.exact:
            self.attended.add(layer)
            return op.attend

        def attend(
            q_BNCH: Tensor,
            steps: Sequence[Step],
            terms: AttentionTerms,
            *,
            await_prefix: Callable[[], None] = nothing,
            num_sequences: int | None = None,
        ) -> Part:
            if terms.rule is not None or q_BNCH.shape[2] == 1:
                return op.attend(q_BNCH, steps, terms, await_prefix=await_prefix, num_sequences=num_sequences)
            assert num_sequences is None, "heads of a prompt are in one memory"
            await_prefix()  # whose keys the choice is made among
            if not any(run.spans for step in steps for run in step.runs):  # all queries are padding
                return op.attend(q_BNCH, steps, terms)
            chosen = self._chosen(layer, q_BNCH, steps, terms)
            return op.attend(q_BNCH, [_within(step, chosen) for step in steps], terms)

        return attend

    def _chosen(self, layer: int, q_BNCH: Tensor, steps: Sequence[Step], terms: AttentionTerms) -> Chosen:
        stride, pads = self.rule.stride, self.pads
        runs = sorted((run for step in steps for run in step.runs if _slots(run)), key=lambda run: _slots(run).start)
        start = _slots(runs[-1]).stop - q_BNCH.shape[2]
        of_keys = []
        for run in runs:
            slots = _slots(run)
            assert not isinstance(run.keys, Codec), "keys of a prompt are as they were computed"
            of_keys.append(cells(run.keys.read(slots.start, slots.stop)[0], stride, start=slots.start, pads=pads))
        k_BKsH = of_keys[0] if len(of_keys) == 1 else torch.cat(of_keys, dim=2)
        q_BNcH = cells(q_BNCH, stride, start=start, pads=pads)
        expected = masses(q_BNcH, k_BKsH, terms, stride=stride, start=start, pads=pads)
        blocks_BKqk = choose(expected, self.rule, first=start // BLOCK, pads=pads)
        self.counts.setdefault(layer, BlockCounts()).add(blocks_BKqk, expected, first=start // BLOCK, pads=pads)
        return Chosen(blocks_BKqk=blocks_BKqk, first=start // BLOCK)


def _slots(run: Run) -> range:
    """Indices of a run's tokens in the padded batch, which are the numbers of their slots."""
    assert not isinstance(run.spans, Lengths), "tokens of a prompt are in spans"
    slots = run.spans[0].slots if run.spans else range(0)  # the queries are padding in all rows
    assert all(span.slots == slots == span.at and span.at_T is None for span in run.spans), "a prompt has no gaps"
    return slots


def _within(step: Step, chosen: Chosen) -> Step:
    """The step with what each of its spans sees of the chosen blocks."""

    def run_within(run: Run) -> Run:
        assert not isinstance(run.spans, Lengths)
        return run._replace(spans=[replace(span, chosen=chosen) for span in run.spans])

    return step._replace(runs=[run_within(run) for run in step.runs])
