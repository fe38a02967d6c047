"""Prefixes and segments in few bits on a GPU: packed and unpacked there, with the CPU's numbers."""

from __future__ import annotations

from math import inf

import pytest
import torch

from runahead.cache.quantised.records import KVRecords
from runahead.reuse.prefix_tree import PrefixTree
from tests.gpu.models import CUDA
from tests.reuse.test_quantised_tiers import IDS, KEY, SHAPES, found, numbers, push_down, same, stored


@pytest.mark.parametrize("bits", [4, 2])
def test_records_are_those_of_the_cpu(bits: int) -> None:
    """A multiplication and an addition may be one rounding on a GPU."""
    kept = KVRecords(SHAPES, bits)
    for layer, kv_TKX in enumerate(numbers()):
        ours, theirs = kept.pack(layer, kv_TKX.cuda()), kept.pack(layer, kv_TKX)
        assert torch.equal(ours.cpu(), theirs)
        torch.testing.assert_close(kept.unpack(layer, ours).cpu(), kept.unpack(layer, theirs), rtol=0, atol=1e-6)


def test_a_prefix_comes_back_to_the_gpu_with_the_same_bits_each_time() -> None:
    tree = PrefixTree(inf, host_bytes=inf, bits=4)
    tree.open(KEY, SHAPES, CUDA)
    tree.insert(IDS, [layer.cuda() for layer in numbers()], KEY).release()
    push_down(tree)
    first = [layer.cpu() for layer in found(tree)]
    for ours, theirs in zip(first, stored(numbers(), 4), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for length in (45, 3):
        push_down(tree)
        found(tree, IDS[:length])
        push_down(tree)
        assert same([layer.cpu() for layer in found(tree)], first)
