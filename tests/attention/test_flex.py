"""FlexAttention's mask of chosen blocks lists these alone, and attention by it is a softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from runahead.attention.sparse import flex
from runahead.attention.sparse.blocks import BLOCK
from tests.attention.flex_kernel import attend_by_list

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H head dim, q blocks of queries, k blocks of keys.

PLACES = [
    (range(300), range(300)),
    (range(384, 700), range(384)),
    (range(384, 700), range(700)),
    (range(200, 700), range(200, 700)),
    (range(640, 1000), range(130, 640)),
    (range(70), range(70)),
    (range(1000, 1024), range(896)),
]
"""Queries and keys: own ones, earlier ones, both; with padding that ends inside a block; fewer than a block."""

HEADS, H, SCALING = (4, 2), 16, 0.3

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def given(queries: range, keys: range, *, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Queries, keys, values and chosen blocks, of which some queries have none."""
    generator = torch.Generator().manual_seed(len(keys))
    q, k, v = (
        torch.randn(batch, heads, len(places), H, generator=generator, dtype=torch.float64).to(dtype)
        for heads, places in ((HEADS[0], queries), (HEADS[1], keys), (HEADS[1], keys))
    )
    numbers = [torch.arange(at.start // BLOCK, -(-at.stop // BLOCK)) for at in (queries, keys)]
    blocks = torch.rand(batch, HEADS[1], len(numbers[0]), len(numbers[1]), generator=generator) < 0.5
    return q, k, v, blocks & (numbers[0][:, None] >= numbers[1])


def softmax(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, queries: range, keys: range) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, pair by pair."""
    at_q, at_k = (torch.arange(each.start, each.stop) for each in (queries, keys))
    of_q, of_k = (at // BLOCK - at[0] // BLOCK for at in (at_q, at_k))
    sees = blocks[:, :, of_q[:, None], of_k] & (at_k <= at_q[:, None])
    sees, k, v = (x.repeat_interleave(HEADS[0] // HEADS[1], dim=1) for x in (sees, k.double(), v.double()))
    scores = (q.double() @ k.mT * SCALING).masked_fill(~sees, -math.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)


def farthest(found: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor]) -> float:
    """Largest difference; that of two infinite numbers is none."""
    return max(
        torch.where(ours == right, 0.0, ours.double() - right).abs().max().item()
        for ours, right in zip(found, known, strict=True)
    )


@pytest.mark.parametrize(("queries", "keys"), PLACES)
@pytest.mark.parametrize("by", ["mask", "list"])
def test_attention_is_a_softmax(monkeypatch: pytest.MonkeyPatch, queries: range, keys: range, by: str) -> None:
    """By the mask of pairs, as `flex_attention` computes uncompiled, and by the list of blocks, as its kernel does."""
    monkeypatch.setattr(flex, "compiled", lambda: flex_attention if by == "mask" else attend_by_list)
    q, k, v, blocks = given(queries, keys)
    found = flex.attend(q, k, v, SCALING, blocks, queries, keys)
    assert farthest(found, softmax(q, k, v, blocks, queries, keys)) < 1e-12


@pytest.mark.parametrize(("queries", "keys"), PLACES)
def test_list_is_of_chosen_blocks_alone(queries: range, keys: range) -> None:
    """So what is not chosen costs nothing; pairs are masked in at most two blocks of keys."""
    *_, blocks = given(queries, keys)
    mask = flex.block_mask(blocks, queries, keys, num_heads=HEADS[0])
    listed = torch.zeros(2, HEADS[0], *blocks.shape[2:], dtype=torch.int32)
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert counts is not None and indices is not None and counts.dtype == indices.dtype == torch.int32
        takes = torch.arange(indices.shape[-1]) < counts[..., None]
        listed.scatter_add_(-1, indices.long(), takes.int())
    assert torch.equal(listed, blocks.repeat_interleave(2, dim=1).int())
    assert int(mask.kv_num_blocks.max()) <= 1 + (keys.start % BLOCK > 0)
    assert mask.seq_lengths == (len(queries) + queries.start % BLOCK, len(keys) + keys.start % BLOCK)


@pytest.mark.parametrize("wrong", ["a block less", "own block is full", "heads in turn", "padding is seen"])
def test_wrong_masks_are_told(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """The list counts where a kernel reads it, not the mask of pairs alone."""
    right = flex.block_mask

    def other(*args: Any, **how: Any) -> BlockMask:
        mask = right(*args, **how)
        assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
        if wrong == "a block less":
            mask.full_kv_num_blocks -= 1
        elif wrong == "own block is full":
            mask.full_kv_num_blocks, mask.kv_num_blocks = mask.kv_num_blocks, mask.full_kv_num_blocks
            mask.full_kv_indices, mask.kv_indices = mask.kv_indices, mask.full_kv_indices
        elif wrong == "heads in turn":
            mask.full_kv_indices = mask.full_kv_indices[:, [0, 2, 1, 3]].contiguous()
        else:
            mask.mask_mod = lambda row, head, query, key: key <= query
        return mask

    monkeypatch.setattr(flex, "block_mask", other)
    monkeypatch.setattr(flex, "compiled", lambda: attend_by_list)
    queries, keys = PLACES[3]
    q, k, v, blocks = given(queries, keys)
    found = flex.attend(q, k, v, SCALING, blocks, queries, keys)
    assert not farthest(found, softmax(q, k, v, blocks, queries, keys)) < 1e-3


def test_a_kernel_serves_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaling is a constant, as Triton's kernel needs it, and nothing of the mask but sizes is a number."""
    graphs = list[fx.GraphModule]()

    def noted(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, fullgraph=True, backend=noted)
    monkeypatch.setattr(flex, "compiled", lambda: compiled)
    for end in (300, 400, 900, 1100, 1300):
        queries, keys = range(128, end), range(end)
        q, k, v, blocks = given(queries, keys)
        found = flex.attend(q, k, v, SCALING, blocks, queries, keys)
        assert farthest(found, softmax(q, k, v, blocks, queries, keys)) < 1e-12
    assert len(graphs) <= 3, "one for the first length, and one or two for all others"
    for graph in graphs:
        (call,) = [node for node in graph.graph.nodes if "flex_attention" in str(node.target) and len(node.args) > 5]
        assert call.args[5] == SCALING
        captured = [node.meta["example_value"] for node in call.args[8]]
        tensors = [each for each in captured if isinstance(each, Tensor)]
        sizes = {str(size) for each in tensors for size in each.shape}
        assert len(tensors) == 3 and all(str(each) in sizes for each in captured if not isinstance(each, Tensor))


@pytest.mark.slow
def test_compiled_for_a_cpu_it_is_a_softmax() -> None:
    """Inductor's kernel for CPUs reads the list, too; it has no log-sum-exp, and is built for these lengths alone."""
    queries, keys = PLACES[4]
    q, k, v, blocks = given(queries, keys, dtype=torch.float32)
    k, v = (torch.nn.functional.pad(x, (0, 0, keys.start % BLOCK, 0)) for x in (k, v))
    mask = flex.block_mask(blocks, queries, keys, num_heads=HEADS[0])
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    with torch.inference_mode():
        out = compiled(q, k, v, block_mask=mask, scale=SCALING, enable_gqa=True)
    known, lse = softmax(q, k[:, :, keys.start % BLOCK :], v[:, :, keys.start % BLOCK :], blocks, queries, keys)
    assert ((out - known).abs() < 1e-5)[lse.isfinite()].all()
