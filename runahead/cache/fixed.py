"""The KV cache of decoding in tensors of fixed shape: how many tokens are stored is a number on the device.

So a decoding step is the same operations on the same tensors every time, and a GPU can replay it as one graph.

Rows of a batch without padding lie in the slab as one sequence with the heads of all rows side by side. Rows with
padding are moved, without it, into sequences of their own. Either way one call attends to all of them.
"""

# Legend: B batch, N query heads, K kv heads, S sequences, U heads of a sequence, T tokens, X = H + V (key and value).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.attention.op import Lengths
from runahead.attention.partial import takes_sequences
from runahead.cache.base import KVStore
from runahead.cache.kv_cache import KVCache, SlabLayer, SlabRow
from runahead.cache.new_tokens import NewTokens, num_tokens_of
from runahead.cache.shard import ShardCache
from runahead.cache.slabs import Index, KVSlab
from runahead.report import RankReport


@dataclass(kw_only=True, eq=False)
class DeviceIndex(Index):
    """Index of one new token per sequence, on the device; the same for all layers.

    Attributes:
        next_S: slot in which each sequence's next token is stored (int64).
        lengths: what that token sees.
    """

    next_S: Tensor
    lengths: Lengths

    def slot(self, tokens: NewTokens) -> Tensor:
        return self.next_S

    def spans(self, tokens: NewTokens, num_new: int) -> Lengths:
        return self.lengths


@dataclass(kw_only=True)
class _Steps:
    """Slots of all new tokens of a shard, of which other stages store some, on the device.

    Attributes:
        next_JS: where each new token is stored, as `DeviceIndex.next_S`; the last slot of a sequence if another stage
            stores it.
        seen_JS: tokens that it sees here, as `Lengths.seen_S`.
        step_1: number of the next new token.
    """

    next_JS: Tensor
    seen_JS: Tensor
    step_1: Tensor


class FixedCache(KVStore):
    """A prompt's KV cache for decoding, one token per row and step. Call `advance` after each step.

    Args:
        cache: the prompt's, or a stage's shard of it; its slabs are taken over.
        pads: left padding per row.
        num_tokens: of the padded prompt.
        apart: each row is a sequence of its own, also without padding, so that rows can advance by different numbers of
            tokens.

    Raises:
        ValueError: there is no memory in which to move padded rows.
    """

    layers: list[SlabLayer]

    def __init__(
        self, cache: KVCache | ShardCache, *, pads: Sequence[int], num_tokens: int, apart: bool = False
    ) -> None:
        slabs, shard = (cache.own, cache.shard) if isinstance(cache, ShardCache) else (cache, None)
        device, self._batch = slabs.device, len(pads)
        chunk = range(num_tokens) if shard is None else shard.chunk
        room = min(len(layer.slab.slab_TBKX) for layer in slabs.layers)
        by_row = any(pads) or (apart and len(pads) > 1)
        stored = [num_tokens_of(pad, chunk) for pad in pads] if by_row else [len(chunk)]
        starts, stored_S = torch.arange(len(stored) + 1) * room, torch.tensor(stored)
        next_S, seen_S = starts[:-1] + stored_S, stored_S + 1
        self._steps: _Steps | None = None
        if shard is not None and shard.is_own:
            is_own_J1, before_J1 = torch.tensor(shard.is_own)[:, None], torch.tensor(shard.own_before[:-1])[:, None]
            next_JS = torch.where(is_own_J1, next_S + before_J1, starts[1:] - 1)
            seen_JS = stored_S + before_J1 + is_own_J1.long()
            next_S, seen_S = next_JS[0], seen_JS[0]
            self._steps = _Steps(
                next_JS=sent(next_JS, device),
                seen_JS=sent(seen_JS.int(), device),
                step_1=torch.zeros(1, dtype=torch.long, device=device),
            )
        self.lengths = Lengths(
            starts=sent(starts.int(), device),
            seen_S=sent(seen_S.int(), device),
            room=room,
            may_be_empty=shard is not None,
        )
        self._index = DeviceIndex(next_S=sent(next_S.clone(), device), lengths=self.lengths)
        self._position_S = sent(num_tokens - torch.tensor(pads if by_row else [0]), device)
        self.layers = []
        for layer in cache.take_layers():
            slab = layer.slab
            if len(stored) > 1:
                slab = _by_row(slab, stored, chunk, room)
            self.layers.append(SlabLayer(slab=slab, number=layer.number, index=self._index))

    @staticmethod
    def takes(cache: KVStore) -> TypeGuard[KVCache | ShardCache]:
        """Whether a cache can be taken over: slabs of all tokens or a shard, on a device with a fitting kernel."""
        slabs = cache.own if isinstance(cache, ShardCache) else cache
        return (
            type(slabs) is KVCache
            and not slabs.rotates
            and slabs.num_slabs == slabs.num_layers
            and (slabs is not cache or all(first == 0 for first, _ in slabs.spans))
            and all(
                takes_sequences(slabs.device, shape.dtype, shape.key_dim, shape.value_dim) for shape in slabs.shapes
            )
        )

    @property
    def repeats_steps(self) -> bool:
        return True

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor:  # noqa: N802
        return self._position_S.expand(self._batch)[:, None]

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        if self.lengths.may_be_empty:  # a shard
            return None
        if len(self._index.next_S) == 1:  # all rows side by side
            return [layer.slab.slab_TBKX[:num_tokens, row] for layer in self.layers]
        first = row * self.lengths.room
        return [layer.slab.slab_TBKX[first : first + num_tokens, 0] for layer in self.layers]

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        num_tokens = self.lengths.room
        rows = [self.row_kv(row, pad, num_tokens) for row, pad in enumerate(pads)]
        return [SlabRow.of([layer.slab.key_dim for layer in self.layers], row) for row in rows if row is not None]

    def set_lengths(self, stored: Sequence[int]) -> None:
        """Let each sequence have so many tokens. Those after them are forgotten."""
        stored_S = row_values(stored, self._index.next_S.device)
        self._index.next_S.copy_(self.lengths.starts[:-1] + stored_S)
        self.lengths.seen_S.copy_(stored_S + 1)
        self._position_S.copy_(stored_S)

    def describe_decoding(self, report: RankReport) -> None:
        super().describe_decoding(report)
        if len(self._index.next_S) > 1:  # a layer is there twice while its rows are moved
            report.kv_peak_bytes = max(
                report.kv_peak_bytes, self.num_bytes + max(layer.num_bytes for layer in self.layers)
            )

    def advance(self) -> None:
        self._position_S += 1
        if self._steps is None:
            self._index.next_S.add_(1)
            self.lengths.seen_S.add_(1)
            return
        steps = self._steps
        steps.step_1.add_(1).clamp_(max=len(steps.next_JS) - 1)  # after the last one there is none
        self._index.next_S.copy_(steps.next_JS.index_select(0, steps.step_1)[0])
        self.lengths.seen_S.copy_(steps.seen_JS.index_select(0, steps.step_1)[0])


def _by_row(slab: KVSlab, stored: Sequence[int], chunk: range, room: int) -> KVSlab:
    """The rows of a slab one after another, (B * room, 1, K, X), each from its first token on.

    Args:
        stored: number of tokens of each row, the last ones of the chunk.
    """
    try:
        rows_BTKX = slab.slab_TBKX.new_empty(len(stored), room, *slab.slab_TBKX.shape[2:])
    except RuntimeError as error:  # torch.OutOfMemoryError on GPUs, a plain RuntimeError on CPUs
        raise ValueError(
            f"{slab.slab_TBKX.nbytes:,} bytes to move rows of different lengths for decoding do not fit on "
            f"{slab.slab_TBKX.device}; use a smaller prompt.batch, or prompts of equal length"
        ) from error
    for row, num in enumerate(stored):
        rows_BTKX[row, :num] = slab.slab_TBKX[len(chunk) - num : len(chunk), row]
    return KVSlab(slab_TBKX=rows_BTKX.flatten(0, 1)[:, None], key_dim=slab.key_dim, first=0)
