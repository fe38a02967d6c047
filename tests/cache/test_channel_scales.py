"""Keys in groups of a token's channels, some of which are far larger than the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.groups import ChannelGroups, TokenGroups
from tests.cache.predicted_bytes import channel_scale_bytes

# Legend: B batch, K kv heads, T tokens, D key dim.

SIZES = torch.ones(64).index_fill(0, torch.tensor([3, 40]), 100.0)
MIDDLES = torch.zeros(64).index_fill(0, torch.tensor([7, 40]), 300.0)


def keys(*, num_tokens: int = 512, dtype: torch.dtype = torch.float32, sizes: Tensor = SIZES) -> Tensor:
    """Keys (2, 3, T, 64), of which some channels vary more than the others, and some are far from 0."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(2, 3, num_tokens, 64, generator=generator) * sizes + MIDDLES).to(dtype)


def read(scales: ChannelScales, k_BKTD: Tensor, bits: int = 4) -> Tensor:
    return scales.read(scales.groups(k_BKTD, bits), 0, k_BKTD.shape[2], k_BKTD.dtype)


def error_by_channel(read_BKTD: Tensor, k_BKTD: Tensor) -> Tensor:
    """Relative to the size of each channel around its middle (D)."""
    return (read_BKTD - k_BKTD).float().square().mean((0, 1, 2)).sqrt() / SIZES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_first", [32, 512])
def test_large_channels_do_not_set_the_step_of_the_others(dtype: torch.dtype, num_first: int) -> None:
    """Channels of their own group least of all. Seen to fail: without the middle; without the scale."""
    k_BKTD = keys(dtype=dtype)
    scaled, alone = read(ChannelScales.from_keys(k_BKTD[:, :, :num_first]), k_BKTD), TokenGroups.quantise(k_BKTD, 4)
    errors, before = error_by_channel(scaled, k_BKTD), error_by_channel(alone.read(0, 512, dtype), k_BKTD)
    small = SIZES == 1
    if dtype == torch.bfloat16:
        small &= MIDDLES == 0  # a number of 300 is itself 1 apart from the next in bfloat16
    assert before[small].max() > 4 and errors[small].max() < 0.6
    assert errors.max() < before.max() / 4
    by_channel = error_by_channel(ChannelGroups.quantise(k_BKTD, 4).read(0, 512, dtype), k_BKTD)
    assert errors[small].mean() < 8 * by_channel[small].mean() < before[small].mean()


def test_rows_and_heads_have_scales_of_their_own() -> None:
    k_BKTD = keys()
    scales, by_head = ChannelScales.from_keys(k_BKTD), ChannelScales.from_keys(k_BKTD).by_head()
    ours = read(scales, k_BKTD)
    for row in range(2):
        assert torch.equal(read(scales.row(row), k_BKTD[row : row + 1]), ours[row : row + 1])
        for head in range(3):
            alone_11TD = k_BKTD[row, head][None, None]
            assert torch.equal(read(ChannelScales.from_keys(alone_11TD), alone_11TD)[0, 0], ours[row, head])
            assert torch.equal(read(by_head.row(3 * row + head), alone_11TD)[0, 0], ours[row, head])
    joined = ChannelScales.joined([scales.row(0), scales.row(1)])
    assert torch.equal(joined.scale_BK1D, scales.scale_BK1D) and torch.equal(joined.middle_BK1D, scales.middle_BK1D)
    assert scales.num_bytes == joined.num_bytes == 6 * channel_scale_bytes(64)


@pytest.mark.parametrize("bits", [4, 2])
def test_later_tokens_may_have_a_larger_range(bits: int) -> None:
    """No code is cut off: a number is off by half a step of its group, times its channel's scale, at most."""
    scales, later = ChannelScales.from_keys(keys(num_tokens=32)), 7 * keys()
    groups = scales.groups(later, bits)
    steps_BKTD = groups.scale.float().repeat_interleave(32, dim=3) * scales.scale_BK1D.float()
    off_BKTD = (scales.read(groups, 0, 512, torch.float32) - later).abs()
    assert (off_BKTD <= 0.51 * steps_BKTD + 1e-2 * later.abs().clamp_min(1)).all()  # zero points are in 16 bits


def test_a_channel_without_a_range_is_as_it_is() -> None:
    """One that is constant, one of no tokens, and one beyond the range of 16 bits."""
    still = torch.full((1, 1, 40, 32), 5.0)
    assert torch.equal(read(ChannelScales.from_keys(still), still), still)
    none = ChannelScales.from_keys(still[:, :, :0])
    plain = TokenGroups.quantise(keys(), 4).read(0, 512, torch.float32)
    empty = ChannelScales.from_keys(keys()[:, :, :0])
    assert torch.equal(read(empty, keys()), plain) and none.num_bytes == channel_scale_bytes(32)
    large = keys(sizes=SIZES * 1e6)
    assert read(ChannelScales.from_keys(large), large).isfinite().all()
