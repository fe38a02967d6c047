"""Streaming heads: in some KV heads a query sees a text's first tokens and the last ones up to its own, in others all.

Which heads stream, and how many tokens they see, is what a cache policy says of them (DuoAttention, arXiv 2410.10819,
whose prefill this is). It depends on positions alone, so a prompt has the same attention on any number of ranks, and of
these heads a rank needs no more of earlier ranks than the first tokens and its first query's window.

While decoding a policy drops tokens after each step, and a query sees `recent` of them beside its own. So it is here.

A query of the first `sinks + window` tokens sees all that there are. Of later ones the first tokens are before every
window: two runs that have no token in common, and whose parts merge. Layers with windows of their own, and those that
others read, are exact.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, V value dim.

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from policies.base import StreamedHeads
from runahead.attention import op
from runahead.attention.masks import MaskRule
from runahead.attention.op import Codec, KVReader, Lengths, Part, Run, Span, Step, nothing
from runahead.attention.partial import AttentionTerms, KeyBias, merge
from runahead.attention.sparse.heads import Heads


@dataclass(kw_only=True)
class Streaming:
    """Attention of a prompt's tokens where some KV heads stream.

    Attributes:
        exact, streamed: KV heads of each layer that see all tokens, and those that stream.
        sinks: first tokens of a row that every query of these sees.
        window: last tokens that it sees, its own among them.
        pads: left padding of each row.
        counts: keys that were seen and that were before the queries, of all KV heads, by layers that stream.
    """

    exact: Sequence[Heads]
    streamed: Sequence[Heads]
    sinks: int
    window: int
    pads: Sequence[int]
    rule: MaskRule = field(init=False)
    counts: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.rule = _Window(self.window)

    @classmethod
    def of(cls, heads: StreamedHeads, *, exact: Collection[int], pads: Sequence[int]) -> Self:
        """The heads that a policy names for a prompt, but for these layers, in which all heads see all tokens."""
        by_layer = [[streams and n not in exact for streams in each] for n, each in enumerate(heads.by_layer)]

        def chosen(wanted: bool) -> list[Heads]:
            return [
                Heads(numbers=tuple(k for k, streams in enumerate(each) if streams is wanted), of=len(each))
                for each in by_layer
            ]

        return cls(exact=chosen(False), streamed=chosen(True), sinks=heads.sinks, window=heads.recent + 1, pads=pads)

    @property
    def sinks_end(self) -> int:
        """Index in the padded batch of the first token that is none of the first ones in any row."""
        return max(self.pads) + self.sinks

    def first_needed(self, start: int) -> int:
        """First token after the first ones that a chunk from `start` on needs of heads that stream."""
        return max(start - self.window + 1, min(self.sinks_end, start))

    def by_layer(self) -> dict[str, list[float | None]]:
        """Share of the keys before them that queries saw, by layer; None in exact ones. What they missed is unknown."""
        layers = range(max(self.counts, default=-1) + 1)
        density = [self.counts[n][0] / self.counts[n][1] if n in self.counts else None for n in layers]
        return {"density": density, "covered": [None for _ in layers]}

    def of_layer(self, layer: int) -> Callable[..., Part]:
        """A function that computes attention in a layer in place of `op.attend`."""
        exact, streamed = self.exact[layer], self.streamed[layer]
        if not streamed:
            return op.attend

        def attend(
            q_BNCH: Tensor,
            steps: Sequence[Step],
            terms: AttentionTerms,
            *,
            await_prefix: Callable[[], None] = nothing,
            num_sequences: int | None = None,
        ) -> Part:
            assert num_sequences is None and terms.rule is None, "heads of a prompt are in one memory"
            if q_BNCH.shape[2] > 1:
                self._count(layer, steps)
            found = list[Part]()

            def of_streamed() -> None:
                of_heads = _within(streamed, q_BNCH, steps, terms)
                found.append(self._attend(*of_heads, await_prefix))

            if not exact:
                of_streamed()
                return found[0]
            # While keys of other ranks arrive for heads that see all of them, those of streaming heads are attended to.
            waits = nothing if await_prefix is nothing else of_streamed
            found_exact = op.attend(*_within(exact, q_BNCH, steps, terms), await_prefix=waits)
            if not found:
                of_streamed()
            return _joined(q_BNCH, [(exact, found_exact), (streamed, found[0])])

        return attend

    def _attend(
        self, q_BNCH: Tensor, steps: Sequence[Step], terms: AttentionTerms, await_prefix: Callable[[], None]
    ) -> Part:
        """Attention of the queries of streaming heads."""
        [step] = steps
        [run] = step.runs
        assert not isinstance(run.spans, Lengths), "tokens of a prompt are in spans"
        whole, windows, sinks = list[Span](), list[Span](), list[Span]()
        for span in run.spans:
            for found, each in zip((whole, windows, sinks), self._split(span), strict=True):
                found += [] if each is None else [each]
        parts = list[Part]()
        if windows:
            in_windows = [step._replace(runs=[run._replace(spans=windows)])]
            parts.append(op.attend(q_BNCH, in_windows, replace(terms, rule=self.rule), await_prefix=await_prefix))
        else:
            await_prefix()
        plain = [run._replace(spans=spans) for spans in (whole, sinks) if spans]
        if plain or not parts:  # of queries that are all padding there are no spans at all
            parts.append(op.attend(q_BNCH, [step._replace(runs=plain or [run])], terms))
        if len(parts) == 1:
            return parts[0]
        return merge(*parts[0], *parts[1], in_place=parts[0][0].dtype == parts[0][1].dtype)

    def _split(self, span: Span) -> tuple[Span | None, Span | None, Span | None]:
        """Queries that see all tokens before them, later ones with their windows, and these with the first tokens."""
        assert span.has_new and span.at_T is None and span.positions_Q is None and span.slots == span.at, span
        num = len(span.queries)
        early = min(max(0, self.sinks + self.window - span.positions[0]), num)
        slots = range(span.slots.start, span.slots.stop - (num - early))
        whole = replace(span, queries=span.queries[:early], positions=span.positions[:early], slots=slots, at=slots)
        late = replace(span, queries=span.queries[early:], positions=span.positions[early:])
        first = range(span.pad, span.pad + self.sinks)
        sinks = replace(late, slots=first, at=first, has_new=False)
        return whole if early else None, late if early < num else None, sinks if early < num and first else None

    def _count(self, layer: int, steps: Sequence[Step]) -> None:
        """Take in what the queries see, but for a token that is computed alone."""
        seen, could = self.counts.get(layer, (0, 0))
        exact, streamed, most = len(self.exact[layer]), len(self.streamed[layer]), self.sinks + self.window
        for span in (span for step in steps for run in step.runs for span in run.spans):  # type: ignore[union-attr]
            num_rows = len(self.pads) if isinstance(span.rows, slice) and span.rows == slice(None) else 1
            # Positions follow each other: two series, of queries that see all before them and of those that do not.
            num, first = len(span.positions), span.positions[0] + 1
            early = min(max(0, most - first), num)
            all_keys, few = _series(first, num), _series(first, early) + (num - early) * most
            seen += num_rows * (exact * all_keys + streamed * few)
            could += num_rows * (exact + streamed) * all_keys
        if could:
            self.counts[layer] = seen, could


def _series(first: int, num: int) -> int:
    """Sum of so many numbers, each one more than the one before."""
    return num * (2 * first + num - 1) // 2


class _Window(MaskRule):
    """The rule by which a query sees so many last keys, which needs no evaluation."""

    def __init__(self, num_keys: int) -> None:
        super().__init__(sliding_window_causal_mask_function(num_keys))
        self._num_keys = num_keys

    def first_key(self, query: int) -> int:
        return max(0, query - self._num_keys + 1)

    def first_keys(self, start: int, end: int) -> Tensor:
        if (start, end) not in self._first_keys:
            self._first_keys[start, end] = torch.arange(start, end).sub_(self._num_keys - 1).clamp_min_(0)
        found = self._first_keys[start, end]
        assert found is not None
        return found

    def window(self, start: int, end: int) -> int | None:
        return self._num_keys if start + 1 >= self._num_keys else None

    def is_causal(self, start: int, end: int, first: int = 0) -> bool:
        return self.first_key(end - 1) <= first


@dataclass(frozen=True)
class _Reader:
    """Stored keys and values of some heads."""

    keys: KVReader
    heads: Heads

    @property
    def value_dim(self) -> int:
        return self.keys.value_dim

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        k_BKSH, v_BKSV = self.keys.read(start, end)
        return self.heads.select(k_BKSH, 1), self.heads.select(v_BKSV, 1)

    @property
    def sequences(self) -> tuple[Tensor, Tensor]:
        raise AssertionError("tokens of a prompt are in spans")


def _within(
    heads: Heads, q_BNCH: Tensor, steps: Sequence[Step], terms: AttentionTerms
) -> tuple[Tensor, list[Step], AttentionTerms]:
    """Queries, steps and terms of some KV heads."""

    def run_of(run: Run) -> Run:
        assert not isinstance(run.keys, Codec) and run.bias is None, "keys of a prompt are as they were computed"
        return run._replace(keys=_Reader(run.keys, heads))

    if (bias := terms.key_bias) is not None:
        terms = replace(terms, key_bias=partial(_bias_of, bias, heads))
    found = [step._replace(runs=[run_of(run) for run in step.runs]) for step in steps]
    return heads.select_queries(q_BNCH), found, terms


def _bias_of(bias: KeyBias, heads: Heads, positions: Tensor) -> Tensor:
    """The bias of the query heads of some KV heads, by slices: an index would go to the device in each call."""
    of_all = bias(positions)
    return heads.select(of_all.unflatten(-2, (heads.of, -1)), of_all.dim() - 2).flatten(-3, -2)


def _joined(q_BNCH: Tensor, parts: Sequence[tuple[Heads, Part]]) -> Part:
    """The part of all heads from those of some each."""
    dtype = torch.promote_types(*(out.dtype for _, (out, _) in parts))
    value_dim, lse_dtype = parts[0][1][0].shape[-1], parts[0][1][1].dtype
    out_BNCV = q_BNCH.new_empty(*q_BNCH.shape[:3], value_dim, dtype=dtype)
    lse_BNC = q_BNCH.new_empty(q_BNCH.shape[:3], dtype=lse_dtype)
    for heads, part in parts:
        for whole, some in zip((out_BNCV, lse_BNC), part, strict=True):
            by_head = whole.unflatten(1, (heads.of, -1)), some.unflatten(1, (len(heads), -1))
            for place, value in heads.pairs(*by_head, dim=1):
                place.copy_(value)
    return out_BNCV, lse_BNC
