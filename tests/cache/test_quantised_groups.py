"""Keys and values in 8, 4 or 2 bits: codes, scales and zero points, and products with codes as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runahead.cache.quantised import groups
from runahead.cache.quantised.groups import GROUP, ChannelGroups, TokenGroups, dtype_of_16_bits, narrowed
from tests.cache.predicted_bytes import group_bytes

DIMS = [7, 8, 33, 64, 80]
every_kind = pytest.mark.parametrize("kind", [ChannelGroups, TokenGroups])
every_bits = pytest.mark.parametrize("bits", [8, 4, 2])


def numbers(dim: int, num_tokens: int = 3 * GROUP, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, num_tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim)).to(
        dtype
    )


@every_kind
@every_bits
@pytest.mark.parametrize("dim", DIMS)
def test_numbers_that_are_codes_come_back_as_they_were(kind: type, bits: int, dim: int) -> None:
    """Every channel keeps its own codes, whichever bits of a byte they are in."""
    most = 2**bits - 1
    codes = (numbers(dim).abs() * 1e6).long() % (most + 1)
    codes[:, :, ::GROUP], codes[:, :, 1::GROUP] = 0, most  # each group has both ends of its range
    codes[..., ::GROUP], codes[..., 1::GROUP] = 0, most
    if dim % GROUP == 1:  # a group of one channel
        codes[..., -1] = most
    assert torch.equal(kind.quantise(codes.double(), bits).read(0, codes.shape[2], torch.float64), codes.double())


@every_kind
@every_bits
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_number_is_off_by_more_than_half_a_step(kind: type, bits: int, dtype: torch.dtype) -> None:
    x = numbers(64, dtype=dtype)
    found = kind.quantise(x, bits).read(0, x.shape[2], torch.float32).double()
    dims = (2, (3, GROUP)) if kind is ChannelGroups else (3, (2, GROUP))
    grouped = x.double().unflatten(2 if kind is ChannelGroups else 3, (-1, GROUP))
    span = grouped.amax(dims[0] + 1) - grouped.amin(dims[0] + 1)
    step = span.repeat_interleave(GROUP, dim=dims[0]) / (2**bits - 1)
    coarse = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11  # of the scale, which has 16 bits, and of the zero point
    room = 1e-9 + coarse * (2**bits * step + x.double().abs().amax())
    assert ((found - x.double()).abs() <= step / 2 + room).all()


@every_bits
def test_codes_are_those_of_fake_quantisation(bits: int) -> None:
    """PyTorch's own kernel for steps of one size: of a group's numbers above its zero point, as they are stored."""
    x_BKTD = numbers(64, dtype=torch.float32)
    by_channel, by_token = ChannelGroups.quantise(x_BKTD, bits), TokenGroups.quantise(x_BKTD, bits)
    of_channels = x_BKTD.unflatten(2, (-1, GROUP)).transpose(3, 4), by_channel.scale, by_channel.zero
    for grouped, scale, zero in (of_channels, (x_BKTD.unflatten(3, (-1, GROUP)), by_token.scale, by_token.zero)):
        above, steps = (grouped - zero.float()[..., None]).reshape(-1, GROUP), scale.float().flatten()
        none = torch.zeros(len(steps), dtype=torch.int32)
        rounded = torch.fake_quantize_per_channel_affine(above, steps, none, 0, 0, 2**bits - 1)
        expected = rounded.view_as(grouped) + zero.float()[..., None]
        is_by_channel = grouped is of_channels[0]
        found = (by_channel if is_by_channel else by_token).read(0, x_BKTD.shape[2], torch.float32)
        expected = expected.transpose(3, 4).flatten(2, 3) if is_by_channel else expected.flatten(3)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # one rounding more: scale * code, then + zero


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_more_bits_are_closer(kind: type, dtype: torch.dtype) -> None:
    """By the number of steps: 15 in place of 3, 255 in place of 15. bfloat16 scales are off by 1 / 256 themselves."""
    x = numbers(64, dtype=dtype)
    off = {bits: (kind.quantise(x, bits).read(0, x.shape[2], torch.float64) - x.double()).norm() for bits in (8, 4, 2)}
    assert off[4] < off[2] / 4
    assert off[8] < off[4] / (14 if dtype == torch.float64 else 4)


@every_kind
@every_bits
@pytest.mark.parametrize("value", [0.0, 0.1, -3e4, 5000.7, 1e-9])
def test_a_group_of_equal_numbers_is_finite_and_itself(kind: type, bits: int, value: float) -> None:
    found = kind.quantise(torch.full((1, 1, GROUP, 40), value, dtype=torch.float64), bits).read(0, GROUP, torch.float64)
    torch.testing.assert_close(found, torch.full_like(found, value), atol=1e-8, rtol=2**-11)  # float16's own error


@every_kind
def test_numbers_beyond_float16_stay_finite(kind: type) -> None:
    found = kind.quantise(numbers(8, dtype=torch.float32) * 1e6, 4).read(0, 3 * GROUP, torch.float32)
    assert found.isfinite().all()


@every_kind
def test_the_least_number_of_bfloat16_keys_is_exact(kind: type) -> None:
    x = numbers(GROUP, GROUP, torch.bfloat16) + 100
    found = kind.quantise(x, 2).read(0, GROUP, torch.bfloat16)
    dim = 2 if kind is ChannelGroups else 3
    assert torch.equal(found.amin(dim), x.amin(dim))


@every_bits
@pytest.mark.parametrize("dim", DIMS)
def test_products_with_codes_are_those_with_the_numbers(bits: int, dim: int) -> None:
    x, size = numbers(dim), 3 * GROUP
    keys, values = ChannelGroups.quantise(x, bits), TokenGroups.quantise(x, bits)
    q, weights = numbers(dim, 5), numbers(size, 5).abs()
    k, v = keys.read(0, size, torch.float64), values.read(0, size, torch.float64)
    torch.testing.assert_close(keys.dot(q, GROUP, size), q @ k[:, :, GROUP:].transpose(2, 3))
    torch.testing.assert_close(values.weighted(weights[..., 10:90], 10, 90), weights[..., 10:90] @ v[:, :, 10:90])


@pytest.mark.parametrize("dim", [64, 80])
def test_keys_with_outlier_channels_are_closer_by_channel_than_by_token(dim: int) -> None:
    """Keys as KIVI found them: the same few channels of all tokens are far from the others."""
    keys = numbers(dim)
    keys[..., 3::17] += 25 * torch.randn(len(range(3, dim, 17)), generator=torch.Generator().manual_seed(0))
    by_channel, by_token = (
        (kind.quantise(keys, 2).read(0, keys.shape[2], torch.float64) - keys).norm()
        for kind in (ChannelGroups, TokenGroups)
    )
    assert by_channel < by_token / 3


@every_kind
@every_bits
@pytest.mark.parametrize("dim", DIMS)
def test_bytes_are_known_ahead(kind: type, bits: int, dim: int) -> None:
    stored = kind.quantise(numbers(dim), bits)
    assert stored.num_bytes == 2 * 3 * group_bytes(kind, 3 * GROUP, dim, bits)
    if dim == 64:  # 64 codes, and 2 groups per token, or 64 per 32 tokens, of 4 bytes each
        assert group_bytes(kind, GROUP, 64, bits) == GROUP * (64 * bits // 8 + 8)


@every_kind
def test_blocks_do_not_matter(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(64)
    whole = kind.quantise(x, 4)
    monkeypatch.setattr(groups, "BLOCK_TOKENS", GROUP)
    assert torch.equal(kind.quantise(x, 4).read(GROUP, 96, x.dtype), whole.read(GROUP, 96, x.dtype))


def test_tokens_are_taken_by_head() -> None:
    x = numbers(40)
    stored = TokenGroups.quantise(x, 4)
    slots = torch.randint(0, 96, (2, 3, 11), generator=torch.Generator().manual_seed(0))
    taken = stored.take(slots)
    assert torch.equal(taken.read(0, 11, x.dtype), stored.read(0, 96, x.dtype).take_along_dim(slots[..., None], dim=2))
    assert taken.num_bytes == 2 * 3 * group_bytes(TokenGroups, 11, 40, 4)


def test_numbers_beyond_the_range_of_16_bits_become_its_largest() -> None:
    """Infinity would make every number of a query that sees it NaN."""
    x = torch.tensor([1e6, -1e6, 65504.0, 0.1, 0.0], dtype=torch.float32)
    assert torch.equal(narrowed(x, torch.float16), torch.tensor([65504.0, -65504.0, 65504.0, 0.1, 0.0]).half())
    assert narrowed(x, torch.float32) is x
    stored = {dtype: dtype_of_16_bits(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    assert stored == {torch.float32: torch.float16, torch.float16: torch.float16, torch.bfloat16: torch.bfloat16}
