"""Attention to chosen blocks by PyTorch's FlexAttention, compiled for a GPU, once its numbers are right there."""

# Legend: B batch, N query heads, K kv heads, C queries, S keys, q blocks of queries, k blocks of keys,
# H head dim (key), V head dim (value).

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from runahead.attention import flash
from runahead.attention.partial import errors, softmax_attention
from runahead.config import SPARSE_BLOCK
from runahead.failures import first_line

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = SPARSE_BLOCK
TOLERANCE = {torch.float32: 1e-4} | flash.TOLERANCE
"""Largest error of outputs and log-sum-exps by dtype, for inputs of spread 1. Triton has no other dtypes."""
MOST_KERNELS = 64
"""Most kernels that are compiled: one for each class of shapes, such as one row or several, one block or several."""

GATHERED = "chosen blocks are gathered, as "
"""Beginning of a warning, before the reason."""


class Sizes(NamedTuple):
    """The kind of calls that a compiled kernel is for."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


def takes(q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor) -> bool:
    """Whether FlexAttention computes attention of such tensors, which it is compiled and compared for at first."""
    sizes = Sizes(q_BNCH.device, q_BNCH.dtype, q_BNCH.shape[1], k_BKSH.shape[1], q_BNCH.shape[3], v_BKSV.shape[3])
    return is_right(sizes)


@functools.cache
def is_right(sizes: Sizes) -> bool:
    """Whether FlexAttention compiles for such tensors and equals a softmax in float64, which a warning tells if not."""
    if sizes.device.type != "cuda" or sizes.dtype not in TOLERANCE or not can_compile():
        return False
    try:
        if not (farthest := max(apart(sizes))) < 1:
            raise ValueError(f"it is {farthest:.3g} times what rounding allows from a softmax in float64")
    except Exception as error:  # of a compiler, a driver, an interface that has changed
        reason = first_line(error)
        warnings.warn(f"{GATHERED}FlexAttention cannot be used: {reason}", stacklevel=3)
        return False
    return True


def can_compile() -> bool:
    """Whether Triton, which compiles it, is installed and knows the GPU."""
    from torch.utils._triton import has_triton

    return has_triton()


@functools.cache
def compiled() -> Callable[..., Any]:
    """`flex_attention`, of which a kernel is compiled at the first call of each class of shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    # Without a whole graph it would compute all scores, and silently.
    return torch.compile(flex_attention, fullgraph=True)


def attend(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, scaling: float, blocks_BKqk: Tensor, queries: range, keys: range
) -> tuple[Tensor, Tensor]:
    """Causal attention to the keys of chosen blocks.

    Args:
        blocks_BKqk: whether a block of queries sees one of keys.
        queries, keys: indices of the queries and of the keys; blocks begin at multiples of their size.

    Returns:
        as `partial.attend`.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    before_q, before_k = queries.start % BLOCK, keys.start % BLOCK  # padding of a row ends inside a block
    if before_q:
        q_BNCH = pad(q_BNCH, (0, 0, before_q, 0))
    if before_k:
        k_BKSH, v_BKSV = (pad(x, (0, 0, before_k, 0)) for x in (k_BKSH, v_BKSV))
    mask = block_mask(blocks_BKqk, queries, keys, num_heads=q_BNCH.shape[1])
    # Triton's kernel has the scaling as a constant.
    with torch._dynamo.config.patch(specialize_float=True, recompile_limit=MOST_KERNELS):
        out_BNCV, aux = compiled()(
            q_BNCH,
            k_BKSH,
            v_BKSV,
            block_mask=mask,
            scale=scaling,
            enable_gqa=q_BNCH.shape[1] != k_BKSH.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options={"BACKEND": "TRITON"},  # that for few queries wants one choice for all heads
        )
    return out_BNCV[:, :, before_q:], aux.lse[:, :, before_q:]


def block_mask(blocks_BKqk: Tensor, queries: range, keys: range, *, num_heads: int) -> BlockMask:
    """FlexAttention's mask of chosen blocks, which are listed: no pair of a query and a key is looked at for it.

    Pairs are masked in a block of queries' own block of keys, and in the first one if it begins with padding. Queries
    and keys are numbered from the first one's block on.
    """
    from torch.nn.attention.flex_attention import BlockMask

    (num_q, num_k), device, num_kv_heads = blocks_BKqk.shape[2:], blocks_BKqk.device, blocks_BKqk.shape[1]
    before_q, before_k = queries.start % BLOCK, keys.start % BLOCK
    apart = queries.start // BLOCK - keys.start // BLOCK
    k_blocks = torch.arange(num_k, device=device)
    masked_qk = k_blocks == torch.arange(apart, apart + num_q, device=device)[:, None]
    if before_k:
        masked_qk = masked_qk | (k_blocks == 0)
    group = num_heads // num_kv_heads
    masked, full = (_listed(some_BKqk, group) for some_BKqk in (blocks_BKqk & masked_qk, blocks_BKqk & ~masked_qk))
    blocks_BNqk = blocks_BKqk.repeat_interleave(group, dim=1)
    # On the device, as numbers of Python would be constants of a kernel.
    first_key, later = (torch.full((), x, dtype=torch.int32, device=device) for x in (before_k, apart * BLOCK))

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_chosen = blocks_BNqk[row, head, query // BLOCK, key // BLOCK]
        return is_chosen & (key >= first_key) & (key <= query + later)

    lengths = before_q + len(queries), before_k + len(keys)
    return BlockMask.from_kv_blocks(
        *masked, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths, compute_q_blocks=False
    )


def _listed(blocks_BKqk: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """How many blocks are chosen, and the numbers of all, chosen ones first, of each query head."""
    order_BKqk = blocks_BKqk.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    counts_BKq = blocks_BKqk.sum(dim=-1, dtype=torch.int32)
    return counts_BKq.repeat_interleave(group, dim=1), order_BKqk.to(torch.int32).repeat_interleave(group, dim=1)


def apart(sizes: Sizes) -> Iterator[float]:
    """Errors of FlexAttention on a GPU, each by what rounding allows; infinite for a NaN.

    Of a chunk's own keys, of those before it, and of both where a row's padding ends inside a block; of one row and of
    two.
    """
    device, dtype, num_heads, num_kv_heads, key_dim, value_dim = sizes
    generator, scaling = torch.Generator().manual_seed(0), key_dim**-0.5

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    places = (range(300), range(300)), (range(384, 700), range(384)), (range(200, 700), range(200, 700))
    for batch in (1, 2):
        for queries, keys in places:
            q, k, v = (
                random(batch, heads, len(places), dim)
                for heads, places, dim in (
                    (num_heads, queries, key_dim),
                    (num_kv_heads, keys, key_dim),
                    (num_kv_heads, keys, value_dim),
                )
            )
            blocks = [torch.arange(at.start // BLOCK, -(-at.stop // BLOCK)) for at in (queries, keys)]
            own_qk = blocks[0][:, None] == blocks[1]
            chosen = torch.rand(batch, num_kv_heads, *own_qk.shape, generator=generator) < 0.5
            chosen = (chosen | own_qk) & (blocks[0][:, None] >= blocks[1])
            found = attend(q, k, v, scaling, chosen.to(device), queries, keys)
            queries_C1, keys_S = torch.arange(queries.start, queries.stop)[:, None], torch.arange(keys.start, keys.stop)
            at = queries_C1 // BLOCK - queries.start // BLOCK, keys_S // BLOCK - keys.start // BLOCK
            hidden = ~chosen[:, :, *at] | (keys_S > queries_C1)
            known = softmax_attention(q, k, v, scaling, hidden.repeat_interleave(num_heads // num_kv_heads, dim=1))
            yield from (error / TOLERANCE[dtype] for error in errors(found, known))
