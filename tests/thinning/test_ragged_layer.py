"""A layer whose heads have lengths of their own: attention as under a mask, in the memory of the tokens left."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from policies.layer_view import Phase
from runahead.attention.partial import AttentionTerms
from runahead.attention.query_moments import QueryMoments
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.slabs import KVShape
from runahead.thinning.cutting import cut_back
from runahead.thinning.ragged import RaggedLayer

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored tokens, m kept ones, H key dim, V value dim.

TOLERANCE = 1e-9  # float64
PROMPT, KEY_DIM = 23, 8
SCALING = 0.3


class Dense:
    """All tokens of a text, and which of them each head sees."""

    def __init__(self, batch: int, heads: int, value_dim: int) -> None:
        self.k_BKnH = torch.empty(batch, heads, 0, KEY_DIM, dtype=torch.float64)
        self.v_BKnV = torch.empty(batch, heads, 0, value_dim, dtype=torch.float64)
        self.seen_BKn = torch.empty(batch, heads, 0, dtype=torch.bool)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        self.k_BKnH = torch.cat([self.k_BKnH, k_BKCH], dim=2)
        self.v_BKnV = torch.cat([self.v_BKnV, v_BKCV], dim=2)
        new = torch.ones(k_BKCH.shape[:3], dtype=torch.bool)
        self.seen_BKn = torch.cat([self.seen_BKn, new], dim=2)

    def attend(self, q_BNCH: Tensor, terms: AttentionTerms) -> tuple[Tensor, Tensor]:
        num_new, n, group = q_BNCH.shape[2], self.k_BKnH.shape[2], q_BNCH.shape[1] // self.k_BKnH.shape[1]
        k, v, seen = (x.repeat_interleave(group, dim=1) for x in (self.k_BKnH, self.v_BKnV, self.seen_BKn))
        scores = q_BNCH @ k.mT * terms.scaling
        if terms.softcap is not None:
            scores = terms.softcap * torch.tanh(scores / terms.softcap)
        causal = torch.arange(n) <= torch.arange(n - num_new, n)[:, None]
        scores = scores.masked_fill(~(causal & seen[:, :, None]), -math.inf)
        return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


class Both:
    """A ragged layer and a dense text with the same tokens."""

    def __init__(self, batch: int, heads: int, group: int, *, seed: int, value_dim: int = KEY_DIM) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.batch, self.heads, self.group, self.value_dim = batch, heads, group, value_dim
        self.pads = [row * 5 for row in range(batch)]
        self.dense = Dense(batch, heads, value_dim)
        shape = KVShape(num_kv_heads=heads, key_dim=KEY_DIM, value_dim=value_dim, dtype=torch.float64)
        self.layer = KeptLayer.empty(shape, batch=batch, room=0, device=torch.device("cpu"))
        self.num_tokens = 0
        self.append(PROMPT)
        for row, pad in enumerate(self.pads):
            self.dense.seen_BKn[row, :, :pad] = False

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def append(self, num_new: int) -> NewTokens:
        k_BKCH = self.random(self.batch, self.heads, num_new, KEY_DIM)
        v_BKCV = self.random(self.batch, self.heads, num_new, self.value_dim)
        tokens = NewTokens(self.num_tokens, self.pads, Phase.decode)
        self.layer.append(k_BKCH, v_BKCV, tokens)
        self.dense.append(k_BKCH, v_BKCV)
        self.num_tokens += num_new
        return tokens

    def cut(self, *, room: int) -> None:
        """Every head keeps some of its tokens, as many as it likes; the last one among them."""
        positions_BKn = self.layer.positions_BKn().expand(-1, self.heads, -1)
        keeps = torch.rand(positions_BKn.shape, generator=self.generator)
        share_BK1 = torch.rand(self.batch, self.heads, 1, generator=self.generator)
        kept_BKn = (keeps < share_BK1) & (positions_BKn >= 0)
        kept_BKn[..., -1] = True
        slots_BKn = torch.arange(kept_BKn.shape[-1]).masked_fill(~kept_BKn, -1).sort(dim=-1).values
        slots_BKm = slots_BKn[..., slots_BKn.shape[-1] - int(kept_BKn.sum(dim=-1).max()) :]
        for row, pad in enumerate(self.pads):
            for head in range(self.heads):
                stays = positions_BKn[row, head][kept_BKn[row, head]] + pad
                self.dense.seen_BKn[row, head] = torch.isin(torch.arange(self.num_tokens), stays)
        self.layer = cut_back(self.layer, slots_BKm, room=room)

    def check(self, tokens: NewTokens, num_new: int, terms: AttentionTerms) -> None:
        q_BNCH = self.random(self.batch, self.heads * self.group, num_new, KEY_DIM)
        ours = self.layer.seen(q_BNCH, tokens).attend(terms)
        for mine, expected in zip(ours, self.dense.attend(q_BNCH, terms), strict=True):
            torch.testing.assert_close(mine, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 2, 2), (3, 1, 4), (2, 4, 1)])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("terms", "value_dim"),
    [
        (AttentionTerms(scaling=SCALING), KEY_DIM),
        (AttentionTerms(scaling=SCALING), 5),
        (AttentionTerms(scaling=SCALING, softcap=1.5), KEY_DIM),
    ],
    ids=["plain", "narrow values", "softcap"],
)
def test_attention_is_that_of_a_dense_layer_under_a_mask(
    batch: int, heads: int, group: int, seed: int, terms: AttentionTerms, value_dim: int
) -> None:
    """For one new token and for several, with room and without, cut back once and again."""
    both = Both(batch, heads, group, seed=seed, value_dim=value_dim)
    for room in (0, 3):
        both.cut(room=room)
        for num_new in (1, 1, 4, 1, 1):
            both.check(both.append(num_new), num_new, terms)
    layer = both.layer
    assert isinstance(layer, RaggedLayer)
    assert list(layer.lengths) == both.dense.seen_BKn.sum(dim=-1).flatten().tolist()


@pytest.mark.parametrize("terms", [AttentionTerms(scaling=SCALING), AttentionTerms(scaling=SCALING, softcap=1.5)])
def test_a_query_whose_token_is_stored_elsewhere_sees_all_tokens(terms: AttentionTerms) -> None:
    """Heads without any, too. Seen to fail: a head without tokens taken for one that has a token."""
    both = Both(2, 2, 2, seed=1)
    both.cut(room=1)
    layer, tokens = both.layer, NewTokens(both.num_tokens, both.pads, Phase.decode)
    slots_BKm = torch.arange(layer.num_slots).masked_fill(layer.positions_BKn() < 0, -1)
    slots_BKm[1, 0], both.dense.seen_BKn[1, 0] = -1, False
    for _ in range(2):
        layer = RaggedLayer.from_slots(layer, slots_BKm, room=1)
        q_BNCH = both.random(2, 4, 1, KEY_DIM)
        out_BNCV, lse_BNC = layer.seen(q_BNCH, tokens).attend(terms)
        expected_BNCV, expected_BNC = both.dense.attend(q_BNCH, terms)
        torch.testing.assert_close(out_BNCV, expected_BNCV.nan_to_num(0.0), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(lse_BNC, expected_BNC, atol=TOLERANCE, rtol=0)
        slots_BKm = slots_BKm[..., :0]
        both.dense.seen_BKn[:] = False


@pytest.mark.parametrize("room", [0, 7])
def test_memory_is_that_of_the_tokens_that_are_left(room: int) -> None:
    both = Both(3, 2, 2, seed=0)
    whole = both.layer.num_bytes
    both.cut(room=room)
    layer = both.layer
    assert isinstance(layer, RaggedLayer) and len(set(layer.lengths)) > 2
    per_token, sequences = 2 * KEY_DIM * 8 + 4, 3 * 2
    of_places = 4 * (2 * sequences + 1) + 8 * sequences
    assert layer.num_bytes == (sum(layer.lengths) + sequences * room) * per_token + of_places
    assert sum(layer.lengths) < sequences * max(layer.lengths)  # padded to the longest head it would take more
    assert room or layer.num_bytes < whole
    layer.free(room=0)
    assert layer.num_bytes == sum(layer.lengths) * per_token + of_places


def test_positions_and_slots_are_padded_on_the_left() -> None:
    both = Both(2, 2, 1, seed=3)
    both.cut(room=2)
    both.append(1)
    positions_BKn = both.layer.positions_BKn()
    for row, pad in enumerate(both.pads):
        for head in range(2):
            expected = [int(at) - pad for at in both.dense.seen_BKn[row, head].nonzero()]
            padding = both.layer.num_slots - len(expected)
            assert positions_BKn[row, head].tolist() == [-1] * padding + expected
    k_BKnH, _ = both.layer.seen(both.random(2, 2, 1, KEY_DIM), NewTokens(0, both.pads)).read()
    last_BKH = both.dense.k_BKnH[:, :, -1]
    assert torch.equal(k_BKnH[:, :, -1], last_BKH)


@pytest.mark.parametrize("few", [None, FewBits(bits=4, residual=3, residual_bits=None, keys_by_token=True)])
def test_a_row_that_drops_nothing_keeps_what_it_has_counted_of_its_queries(few: FewBits | None) -> None:
    """A layer that is not cut back does as it does alone."""
    both = Both(2, 2, 1, seed=0)
    mean_BNH, scatter_BNHH = both.random(2, 2, KEY_DIM), both.random(2, 2, KEY_DIM, KEY_DIM)
    moments = QueryMoments(count_B=torch.tensor([7, 9]), mean_BNH=mean_BNH, scatter_BNHH=scatter_BNHH)
    layer = both.layer if few is None else both.layer.in_bits(few, room=1)
    layer.queries = {0: moments}
    slots_BKm = torch.arange(PROMPT).masked_fill(layer.positions_BKn() < 0, -1).repeat(1, 2, 1)
    slots_BKm[0, 0, :4] = -1
    [left] = cut_back(layer, slots_BKm, room=1).queries.values()
    assert left.count_B.tolist() == [0, 9]
    assert torch.equal(left.mean_BNH[1], mean_BNH[1]) and torch.equal(left.scatter_BNHH[1], scatter_BNHH[1])
    assert not left.mean_BNH[0].any() and not left.scatter_BNHH[0].any()
    slots_BKm[1, 1, 6] = -1
    assert not cut_back(layer, slots_BKm.sort(dim=-1).values, room=1).queries
