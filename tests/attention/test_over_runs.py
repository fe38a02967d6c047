"""The contract of attention: however a text is split into runs, and whatever codec each has, it is one dense softmax.

Runs in few bits are compared with dense attention to the values that they hold. What nobody may read is not a number.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, T tokens of a run, S all tokens that a row and head stores,
# H key dim, V value dim, X = H + V.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from runahead.attention.masks import MaskRule
from runahead.attention.partial import AttentionTerms
from tests.attention.over_runs import Codec, TextRun, attend_to_runs

TOLERANCE = 1e-9
"""Tolerances in float64. Outputs are averages of normal values; log-sum-exps reach 1,000 under a bias."""

KEY_DIM = 8
CODECS = [None, *(Codec(bits, by_token) for bits in (8, 4, 2) for by_token in (False, True))]
RULES = {
    "causal": None,
    "window of 3": MaskRule(sliding_window_causal_mask_function(3)),
    "window of 40": MaskRule(sliding_window_causal_mask_function(40)),
    "chunks of 64": MaskRule(chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int))),
}
KINDS = {"plain": (None, False)} | {name: (rule, True) for name, rule in RULES.items()}
"""Masks, and whether scores may have soft caps and biases: without these, kernels compute what they can."""


@dataclass(frozen=True)
class Text:
    """The stored tokens of a batch, and the queries of its newest ones.

    Attributes:
        positions: of each row's new tokens, the last ones of the padded C.
    """

    q_BNCH: Tensor
    runs: list[TextRun]
    positions: list[Tensor]
    heads: int
    value_dim: int


@dataclass
class Writer:
    """Makes the runs of a text. Positions go on from run to run, with gaps or without."""

    generator: torch.Generator
    value_dim: int
    has_gaps: bool

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def positions(self, start: int, lengths: Sequence[int]) -> list[Tensor]:
        """Positions of pieces that follow each other."""
        num = sum(lengths)
        steps = torch.randint(1, 4, (num,), generator=self.generator) if self.has_gaps else torch.ones(num, dtype=int)
        return list((start - 1 + steps.cumsum(0)).split(list(lengths)))

    def runs(
        self,
        rows: tuple[int, ...],
        positions_T: Tensor,
        codec: Codec | None,
        *,
        heads: int,
        first: int,
        is_uneven: bool = False,
        num_own: int = 0,
    ) -> list[TextRun]:
        """Tokens at some of these positions in each head.

        Args:
            first: earliest position that anybody sees. Exact numbers of earlier tokens are NaN.
            is_uneven: heads drop what they like, but for their own tokens.
        """
        groups = [range(head, head + 1) for head in range(heads)] if is_uneven else [range(heads)]
        found = []
        for group in groups:
            at_T = positions_T
            if is_uneven:
                stays = torch.rand(len(at_T), generator=self.generator) < torch.rand(1, generator=self.generator)
                stays[len(at_T) - num_own :] = True
                at_T = at_T[stays]
            unit = 1 if codec is None else codec.unit
            at_T = at_T[: len(at_T) // unit * unit]
            room_TKX = torch.full((len(at_T) + 5, len(group), KEY_DIM + self.value_dim), math.nan, dtype=torch.float64)
            kv_TKX = room_TKX[2 : 2 + len(at_T)]
            kv_TKX.copy_(self.normal(*kv_TKX.shape))
            if codec is None:
                kv_TKX[at_T < first] = math.nan
            found.append(TextRun(rows, group, kv_TKX, KEY_DIM, at_T, codec, num_own))
        return found


LENGTHS = st.one_of(st.sampled_from([0, 1, 32]), st.integers(2, 130), st.integers(500, 700))
PIECES = st.lists(st.tuples(st.sampled_from(CODECS), LENGTHS, st.booleans()), max_size=3)
"""Codec and number of tokens of consecutive runs, and whether heads keep what they like of them."""


@st.composite
def texts(draw: DrawFn, num_new: int, rule: MaskRule | None) -> Text:
    """Texts of one to three rows. Runs may be empty, have one token, or be read by all rows."""
    batch, heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    value_dim, is_own_here = draw(st.sampled_from([KEY_DIM, 5])), draw(st.sampled_from([True, True, False]))
    writer = Writer(torch.Generator().manual_seed(draw(st.integers(0, 99))), value_dim, has_gaps=draw(st.booleans()))
    of_all = draw(PIECES)
    shared_at = writer.positions(0, [length for _, length, _ in of_all])
    end = max((int(at_T[-1]) + 1 for at_T in shared_at if len(at_T)), default=0)
    runs, positions, firsts = list[TextRun](), list[Tensor](), list[int]()
    for row in range(batch):
        num_own = num_new if row == 0 else draw(st.sampled_from([0, 1, num_new // 2, num_new]))
        pieces, num_exact, is_uneven = draw(PIECES), draw(LENGTHS), draw(st.booleans())
        *at, last_T, new_C = writer.positions(end, [*(length for _, length, _ in pieces), num_exact, num_own])
        firsts += [rule.first_key(int(new_C[0])) if rule is not None else 0] if num_own else []
        first = firsts[-1] if num_own else 0
        for at_T, (codec, _, uneven) in zip(at, pieces, strict=True):
            runs += writer.runs((row,), at_T, codec, heads=heads, first=first, is_uneven=uneven)
        stored_T, stored = (torch.cat([last_T, new_C]), num_own) if is_own_here else (last_T, 0)
        runs += writer.runs((row,), stored_T, None, heads=heads, first=first, is_uneven=is_uneven, num_own=stored)
        positions.append(new_C)
    for at_T, (codec, _, uneven) in zip(shared_at, of_all, strict=True):
        everyone = tuple(range(batch))
        runs += writer.runs(everyone, at_T, codec, heads=heads, first=min(firsts), is_uneven=uneven)
    q_BNCH = 3 * writer.normal(batch, heads * group, num_new, KEY_DIM)
    for row, new_C in enumerate(positions):
        q_BNCH[row, :, : num_new - len(new_C)] = math.nan
    return Text(q_BNCH, draw(st.permutations(runs)), positions, heads, value_dim)


@st.composite
def terms(draw: DrawFn, rule: MaskRule | None, num_heads: int, *, changes_scores: bool) -> AttentionTerms:
    """Terms that families add to attention."""
    slopes_N1 = torch.linspace(0.5, 0.02, num_heads, dtype=torch.float64)[:, None]
    sinks_N = torch.linspace(-3, 2, num_heads, dtype=torch.float64)
    return AttentionTerms(
        scaling=0.35,
        rule=rule,
        softcap=2.0 if changes_scores and draw(st.booleans()) else None,
        key_bias=(lambda keys_S: slopes_N1 * keys_S) if changes_scores and draw(st.booleans()) else None,
        sinks_N=sinks_N if draw(st.booleans()) else None,
    )


def dense(text: Text, terms: AttentionTerms) -> tuple[Tensor, Tensor]:
    """One softmax for each row and head, written out: output with sinks, log-sum-exp without; 0 and -inf on padding."""
    batch, num_heads, num_new, _ = text.q_BNCH.shape
    out = torch.zeros(batch, num_heads, num_new, text.value_dim, dtype=torch.float64)
    lse = torch.full((batch, num_heads, num_new), -math.inf, dtype=torch.float64)
    for row, new_C in enumerate(text.positions):
        for n in range(num_heads):
            head = n // (num_heads // text.heads)
            read = [run for run in text.runs if row in run.rows and head in run.heads]
            kept = [(run, *run.read(0, len(run.positions_T))) for run in read]
            keys_S = torch.cat([run.positions_T for run in read])
            k_SH = torch.cat([k[0, head - run.heads.start] for run, k, _ in kept])
            v_SV = torch.cat([v[0, head - run.heads.start] for run, _, v in kept])
            allowed_CS = keys_S <= new_C[:, None] if terms.rule is None else terms.rule.allowed(new_C, keys_S)
            seen_S = allowed_CS.any(dim=0)
            keys_S, k_SH, v_SV, allowed_CS = keys_S[seen_S], k_SH[seen_S], v_SV[seen_S], allowed_CS[:, seen_S]
            scores_CS = text.q_BNCH[row, n, num_new - len(new_C) :] @ k_SH.T * terms.scaling
            if terms.softcap is not None:
                scores_CS = terms.softcap * torch.tanh(scores_CS / terms.softcap)
            if terms.key_bias is not None:
                scores_CS = scores_CS + terms.key_bias(keys_S)[n]
            scores_CS = scores_CS.masked_fill(~allowed_CS, -math.inf)
            of_row = slice(num_new - len(new_C), num_new)
            lse[row, n, of_row] = scores_CS.logsumexp(dim=1)
            sink = torch.tensor(-math.inf) if terms.sinks_N is None else terms.sinks_N[n]
            total_C = torch.logaddexp(lse[row, n, of_row], sink.double())
            weights_CS = torch.exp(scores_CS - total_C[:, None]).nan_to_num(0.0)  # nan: there is no key
            out[row, n, of_row] = weights_CS @ v_SV
    return out, lse


@pytest.mark.parametrize("num_new", [1, 5, 300])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_runs_are_one_dense_softmax(kind: str, num_new: int, data: st.DataObject) -> None:
    """Some rows have no tokens, some queries see no key, and some tokens are stored elsewhere."""
    rule, changes_scores = KINDS[kind]
    text = data.draw(texts(num_new, rule))
    given_terms = data.draw(terms(rule, text.q_BNCH.shape[1], changes_scores=changes_scores))
    found = attend_to_runs(
        text.q_BNCH, text.runs, given_terms, text.positions, heads=text.heads, value_dim=text.value_dim
    )
    for ours, expected in zip(found, dense(text, given_terms), strict=True):
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)  # a NaN is no number that is close
