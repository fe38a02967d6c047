"""A layer in few bits whose heads have lengths of their own: each head is stored as it would be alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.layer_view import Phase
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised import groups
from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.groups import GROUP, ChannelGroups, TokenGroups
from runahead.cache.slabs import KVShape
from runahead.thinning.cutting import cut_back
from runahead.thinning.ragged import RaggedLayer
from tests.cache.predicted_bytes import ragged_bytes
from tests.thinning.test_ragged_layer import Dense

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored tokens, m kept ones, S sequences, X = H + V.

PROMPT, RESIDUAL, KEY_DIM = 150, 8, 8
KINDS = [(1, 2, 2), (2, 4, 1), (2, 1, 4)]
SCALING = 0.3
every_kind = pytest.mark.parametrize(("batch", "heads", "group"), KINDS)
by_token_or_channel = pytest.mark.parametrize("keys_by_token", [False, True])


class Text:
    """Tokens of padded rows, of which each head keeps some, in few bits."""

    def __init__(
        self,
        batch: int,
        heads: int,
        group: int,
        *,
        keys_by_token: bool = False,
        bits: int = 4,
        value_dim: int = KEY_DIM,
        residual_bits: int | None = None,
        keeps_all: bool = False,
        compensates: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(batch + heads)
        self.shape = KVShape(num_kv_heads=heads, key_dim=KEY_DIM, value_dim=value_dim, dtype=torch.float64)
        self.group, self.pads = group, [row * 37 for row in range(batch)]
        self.made = {"bits": bits, "residual": RESIDUAL, "residual_bits": residual_bits}
        self.made["keys_by_token"] = keys_by_token
        self.dense = KeptLayer.empty(self.shape, batch=batch, room=0, device=torch.device("cpu"))
        self.num_tokens = 0
        self.layer: KeptLayer = self.dense
        self.append(PROMPT)
        shares_BK1 = torch.linspace(0.1, 1.0, batch * heads).view(batch, heads, 1)
        self.exact = RaggedLayer.from_slots(self.dense, self.slots(1.0 if keeps_all else shares_BK1), room=3)
        if compensates:
            self.exact = RaggedLayer.from_slots(self.dense, self.slots(shares_BK1), room=3, compensates=True)
        self.few = FewBits(**self.made)
        self.layer = self.exact.in_bits(self.few, room=5)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def append(self, num_new: int) -> NewTokens:
        shape, batch = self.shape, len(self.pads)
        k = self.random(batch, shape.num_kv_heads, num_new, KEY_DIM)
        v = self.random(batch, shape.num_kv_heads, num_new, shape.value_dim)
        tokens = NewTokens(self.num_tokens, self.pads, Phase.decode)
        for layer in {id(each): each for each in (self.dense, self.layer)}.values():
            layer.append(k, v, tokens)
        self.num_tokens += num_new
        return tokens

    def slots(self, share: Tensor | float) -> Tensor:
        """Some slots of each head of the layer, the last one among them; none of them is padding."""
        positions_BKn = self.layer.positions_BKn().expand(-1, self.shape.num_kv_heads, -1)
        kept_BKn = (torch.rand(positions_BKn.shape, generator=self.generator) <= share) & (positions_BKn >= 0)
        kept_BKn[..., -1] = True
        slots_BKn = torch.arange(kept_BKn.shape[2]).masked_fill(~kept_BKn, -1).sort(dim=-1).values
        return slots_BKn[..., kept_BKn.shape[2] - int(kept_BKn.sum(dim=-1).max()) :]

    def check(self, tokens: NewTokens, num_new: int, terms: AttentionTerms) -> None:
        """Attention is that to the dequantised tokens."""
        batch, heads = len(self.pads), self.shape.num_kv_heads
        oracle = Dense(batch, heads, self.shape.value_dim)
        oracle.k_BKnH, oracle.v_BKnV = self.layer.kv_BKnX().split([KEY_DIM, self.shape.value_dim], dim=3)
        oracle.seen_BKn = self.layer.positions_BKn() >= 0
        q_BNCH = self.random(batch, heads * self.group, num_new, KEY_DIM)
        ours = self.layer.seen(q_BNCH, tokens).attend(terms)
        for mine, expected in zip(ours, oracle.attend(q_BNCH, terms), strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-9, rtol=0)  # float64


@every_kind
@by_token_or_channel
@pytest.mark.parametrize(
    ("terms", "value_dim"),
    [(AttentionTerms(scaling=SCALING), 5), (AttentionTerms(scaling=SCALING, softcap=1.5), KEY_DIM)],
    ids=["narrow values", "softcap"],
)
def test_attention_is_that_to_the_dequantised_tokens(
    batch: int,
    heads: int,
    group: int,
    keys_by_token: bool,
    terms: AttentionTerms,
    value_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One new token and several, while groups leave the windows, block by block and over heads without groups.

    Seen to fail: pages of a block counted from the first page of all; without the soft cap.
    """
    monkeypatch.setattr(groups, "BLOCK_TOKENS", GROUP)
    text = Text(batch, heads, group, keys_by_token=keys_by_token, value_dim=value_dim)
    assert isinstance(text.layer, RaggedLayer) and text.layer.coded is not None
    assert len(set(text.layer.coded.lengths)) > 1 or batch * heads == 2
    for num_new in (1, 5, *[1] * 30):
        tokens = text.append(num_new)
        if num_new > 1 or text.num_tokens % 8 == 0:
            text.check(tokens, num_new, terms)
    if keys_by_token:
        text.layer = cut_back(text.layer, text.slots(0.6), room=2)
        for num_new in (1, 4):
            text.check(text.append(num_new), num_new, terms)


@every_kind
@by_token_or_channel
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_each_head_is_stored_as_it_is_alone(batch: int, heads: int, group: int, keys_by_token: bool, bits: int) -> None:
    """Groups begin at its first token, and are those of its exact tokens, whether they left in a prompt or after it.

    Seen to fail: windows that begin where they did before their first tokens left.
    """
    text = Text(batch, heads, group, keys_by_token=keys_by_token, bits=bits)
    for _ in range(40):
        text.append(1)
    layer, ours_BKnX, positions_BKn = text.layer, text.layer.kv_BKnX(), text.layer.positions_BKn()
    assert isinstance(layer, RaggedLayer) and layer.coded is not None
    for row, pad in enumerate(text.pads):
        for head in range(heads):
            number = row * heads + head
            is_token_n = positions_BKn[row, head] >= 0
            at_n = positions_BKn[row, head][is_token_n].long() + pad
            assert at_n.tolist() == sorted(set(at_n.tolist())) and int(at_n[-1]) == text.num_tokens - 1
            k_nH, v_nV = text.dense.kv_BKnX()[row, head, at_n].split([KEY_DIM, KEY_DIM], dim=1)
            end = layer.coded.lengths[number]
            assert end == (len(at_n) - RESIDUAL) // GROUP * GROUP
            k_11nH, v_11nV = k_nH[None, None, :end], v_nV[None, None, :end]
            if keys_by_token:  # its first groups set the scales of its channels
                first = max(GROUP, (text.exact.lengths[number] - RESIDUAL) // GROUP * GROUP)
                scales = ChannelScales.from_keys(k_11nH[:, :, :first])
                keys = scales.read(scales.groups(k_11nH, bits), 0, end, k_nH.dtype)
            else:
                keys = ChannelGroups.quantise(k_11nH, bits).read(0, end, k_nH.dtype)
            values = TokenGroups.quantise(v_11nV, bits).read(0, end, v_nV.dtype)
            ours_nX = ours_BKnX[row, head, is_token_n]
            assert torch.equal(ours_nX[:end], torch.cat([keys, values], dim=3)[0, 0])
            assert torch.equal(ours_nX[end:], torch.cat([k_nH, v_nV], dim=1)[end:])


@every_kind
@pytest.mark.parametrize("num_new", [1, 3])
def test_with_all_tokens_kept_it_is_the_layer_of_equal_heads(batch: int, heads: int, group: int, num_new: int) -> None:
    """Token by token: the same numbers, and attention to them. Seen to fail: a window that is a token shorter."""
    text = Text(batch, heads, group, keeps_all=True)
    equal = text.dense.in_bits(text.few, room=0)
    text.dense, terms = equal, AttentionTerms(scaling=SCALING)  # both get the same tokens from here on
    for step in range(36):
        num = num_new if step % 8 == 0 else 1
        tokens, q_BNCH = text.append(num), text.random(batch, heads * group, num, KEY_DIM)
        for ours, theirs in zip(
            text.layer.seen(q_BNCH, tokens).attend(terms), equal.seen(q_BNCH, tokens).attend(terms), strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
        is_token = text.layer.positions_BKn() >= 0
        assert torch.equal(text.layer.kv_BKnX()[is_token], equal.kv_BKnX()[is_token])


def test_what_is_cut_back_keeps_its_codes() -> None:
    """No number changes, wherever it was stored. So it is with a layer of equal heads that becomes a ragged one.

    Seen to fail: slots counted from the left, where short heads have padding; padding taken for tokens.
    """
    for is_equal, has_padding in ((False, False), (True, False), (False, True), (True, True)):
        text = Text(2, 4, 1, keys_by_token=True)
        if is_equal:
            text.layer = text.dense.in_bits(text.few, room=0)
        for _ in range(20):
            text.append(1)
        slots_BKm = text.slots(torch.linspace(0.2, 0.9, 8).view(2, 4, 1))
        if has_padding:  # as where a policy keeps equally many slots of rows of different lengths
            slots_BKm = torch.arange(3, text.layer.num_slots).expand(2, 4, -1)
        taken_BKm = slots_BKm.clamp_min(0)
        kv_BKmX = text.layer.kv_BKnX().take_along_dim(taken_BKm[..., None], dim=2)
        positions_BKm = text.layer.positions_BKn().expand(-1, 4, -1).take_along_dim(taken_BKm, dim=2)
        layer = cut_back(text.layer, slots_BKm, room=1)
        assert isinstance(layer, RaggedLayer) and layer.coded is not None and layer.coded.num_tokens
        is_kept = (slots_BKm >= 0) & (positions_BKm >= 0)
        positions_BKm = positions_BKm.masked_fill(~is_kept, -1).int()[..., -layer.num_slots :]
        assert torch.equal(layer.positions_BKn(), positions_BKm)
        assert torch.equal(layer.kv_BKnX()[positions_BKm >= 0], kv_BKmX[is_kept])


def test_what_is_carried_stays_with_its_token() -> None:
    text = Text(2, 2, 1, keys_by_token=True)
    for at in range(3):
        positions_BKn = text.layer.positions_BKn()
        text.layer.carry(positions_BKn * 10, Policy)
        for _ in range(15 * at):
            text.append(1)
        text.layer = cut_back(text.layer, text.slots(0.7), room=2)
        carried_BKn, positions_BKn = text.layer.carried_BKn(Policy), text.layer.positions_BKn()
        assert carried_BKn is not None
        before_B11 = text.num_tokens - 15 * at - torch.tensor(text.pads)[:, None, None]
        known = (positions_BKn >= 0) & (positions_BKn < before_B11)
        assert torch.equal(carried_BKn[known], positions_BKn[known] * 10)


@by_token_or_channel
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("residual_bits", "compensates"), [(16, False), (None, True)])
def test_bytes_are_known_to_the_byte(
    keys_by_token: bool, bits: int, residual_bits: int | None, compensates: bool
) -> None:
    """Seen to fail: without the places of the pages."""
    text = Text(2, 4, 1, keys_by_token=keys_by_token, bits=bits, residual_bits=residual_bits, compensates=compensates)
    lengths = text.exact.lengths
    assert text.layer.num_bytes == ragged_bytes(text.shape, lengths, **text.made, room=5, compensates=compensates)
    text.layer.free(room=0)
    known = ragged_bytes(text.shape, lengths, **text.made, compensates=compensates)
    assert text.layer.num_bytes == known < text.exact.num_bytes


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_token_in_few_bits_is_not_taken_back(is_ragged: bool) -> None:
    """Its memory in the window is gone."""
    text = Text(1, 2, 1, keeps_all=True)
    layer = text.layer if is_ragged else text.dense.in_bits(text.few, room=1)
    layer.set_end(layer.end - 1)
    with pytest.raises(AssertionError):
        layer.set_end(0)
