"""Gumbel noise by places: distributed as it should be, and the same wherever a query and a key are."""

from __future__ import annotations

import math

import pytest
import torch

from policies.gumbel import gumbel

# Legend: B batch, N query heads, q queries, n keys.


def test_it_is_gumbel_noise() -> None:
    """Mean, variance and upper tail are those of 480,000 numbers; positions follow each other, as they do in a text."""
    noise_BNqn = gumbel(0, 3, 0, 3, torch.arange(400)[None], torch.arange(400)[None, None])
    assert noise_BNqn.shape == (1, 3, 400, 400) and noise_BNqn.dtype == torch.float32
    assert noise_BNqn.isfinite().all() and noise_BNqn.max() < 17
    assert noise_BNqn.mean().item() == pytest.approx(0.5772, abs=0.01)  # five standard errors
    assert noise_BNqn.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert (noise_BNqn > 4).float().mean().item() == pytest.approx(1 - math.exp(-math.exp(-4)), rel=0.1)


def test_places_do_not_have_each_others_noise() -> None:
    """Neighbouring queries, keys, heads, layers and seeds have noise of their own."""
    places = torch.arange(200)[None], torch.arange(200)[None, None]
    noise_NX = gumbel(0, 0, 0, 3, *places)[0].flatten(1)
    others = [gumbel(0, 1, 0, 1, *places), gumbel(1, 0, 0, 1, *places), gumbel(0, 0, 0, 1, places[0] + 1, places[1])]
    others += [gumbel(0, 0, 0, 1, places[0], places[1] + 1), gumbel(0, 0, 0, 1, places[0] + 7, places[1] + 7)]
    others += [gumbel(0, 0, 0, 1, *places).mT]
    all_SX = torch.cat([noise_NX, *(each.flatten()[None] for each in others)])
    correlations_SS = torch.corrcoef(all_SX) - torch.eye(len(all_SX))
    assert correlations_SS.abs().max() < 0.025  # five standard errors of 40,000 numbers


def test_it_depends_on_positions_alone() -> None:
    """The row, padding before it, other keys and queries, and the rank's share do not matter."""
    whole = gumbel(7, 2, 0, 4, torch.arange(20)[None], torch.arange(20)[None, None])
    padded = torch.arange(25) - torch.tensor([[5], [0]])
    batch = gumbel(7, 2, 0, 4, padded[:, 10:], padded[:, None])
    assert torch.equal(batch[0, :, :, 5:], whole[0, :, 5:])
    assert torch.equal(batch[1, :, :10, :20], whole[0, :, 10:])
    kept = torch.tensor([[0, 3, 4, 11], [1, 3, 9, 17]])  # of each KV head
    some = gumbel(7, 2, 0, 4, torch.tensor([[19]]), kept[None])
    for head in range(4):
        assert torch.equal(some[0, head, 0], whole[0, head, 19, kept[head // 2]])
    share = gumbel(7, 2, 2, 2, torch.arange(20)[None], torch.arange(20)[None, None])
    assert torch.equal(share[0], whole[0, 2:])
