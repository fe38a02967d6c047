"""The KV cache of decoding in tensors of fixed shape: how many tokens are stored is a number on the device.

So a decoding step is the same operations on the same tensors every time, and a GPU can replay it as one graph.

Rows of a batch without padding lie in the slab as one sequence with the heads of all rows side by side. Rows with
padding are moved, without it, into sequences of their own. Either way one call attends to all of them.
"""

# Legend: B batch, N query heads, K kv heads, S sequences, U heads of a sequence, T tokens, X = H + V (key and value).

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.attention.causal import nothing
from runahead.attention.partial import AttentionTerms, attend_sequences, takes_sequences
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kv_cache import KVCache, SlabRow
from runahead.cache.new_tokens import NewTokens, num_tokens_of
from runahead.cache.shard import ShardCache
from runahead.cache.slabs import KVSlab
from runahead.report import RankReport


@dataclass(kw_only=True)
class Lengths:
    """Where the tokens of each sequence are, on the device; the same for all layers.

    Attributes:
        starts: index of each sequence's first token, and the end of the last (S + 1, int32).
        next_S: index where the next token is stored (int64).
        seen_S: tokens that the next token sees, with itself (int32).
        room: most tokens of a sequence.
        may_be_empty: a sequence may have no token that the next one sees.
    """

    starts: Tensor
    next_S: Tensor
    seen_S: Tensor
    room: int
    may_be_empty: bool = False


@dataclass(kw_only=True)
class SeenSequences(SeenKV):
    """Sequences together with the query of each one's newest token."""

    kv_TUX: Tensor
    key_dim: int
    lengths: Lengths

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        q, lengths = self.q_BNCH, self.lengths
        out, lse = attend_sequences(
            q.reshape(len(lengths.seen_S), -1, q.shape[-1]),
            self.kv_TUX[..., : self.key_dim],
            self.kv_TUX[..., self.key_dim :],
            starts=lengths.starts,
            used_S=lengths.seen_S,
            longest=lengths.room,
            scaling=terms.scaling,
            may_be_empty=lengths.may_be_empty,
        )
        return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


@dataclass(kw_only=True)
class FixedLayer(LayerStore):
    """One layer: the tokens of all sequences, one sequence after another."""

    kv_TUX: Tensor
    key_dim: int
    lengths: Lengths

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        new_SUX = torch.cat([k_BKCH, v_BKCV], dim=-1).reshape(len(self.lengths.next_S), *self.kv_TUX.shape[1:])
        self.kv_TUX.index_copy_(0, self.lengths.next_S, new_SUX)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSequences:
        return SeenSequences(q_BNCH=q_BNCH, kv_TUX=self.kv_TUX, key_dim=self.key_dim, lengths=self.lengths)

    @property
    def num_bytes(self) -> int:
        return self.kv_TUX.nbytes


@dataclass(kw_only=True)
class _Steps:
    """Slots of all new tokens of a shard, of which other stages store some, on the device.

    Attributes:
        next_JS: where each new token is stored, as `Lengths.next_S`; the last slot of a sequence if another stage
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

    layers: list[FixedLayer]

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
            next_S=sent(next_S.clone(), device),
            seen_S=sent(seen_S.int(), device),
            room=room,
            may_be_empty=shard is not None,
        )
        self._position_S = sent(num_tokens - torch.tensor(pads if by_row else [0]), device)
        self.layers = []
        for layer in cache.take_layers():
            slab = layer.slab
            kv_TUX = slab.slab_TBKX.flatten(1, 2) if len(stored) == 1 else _by_row(slab, stored, chunk, room)
            self.layers.append(FixedLayer(kv_TUX=kv_TUX, key_dim=slab.key_dim, lengths=self.lengths))

    @staticmethod
    def takes(cache: KVStore) -> bool:
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

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        return self._position_S.expand(self._batch)[:, None]

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        if self.lengths.may_be_empty:  # a shard
            return None
        if len(self.lengths.next_S) == 1:  # all rows side by side
            return [layer.kv_TUX[:num_tokens].chunk(self._batch, dim=1)[row] for layer in self.layers]
        first = row * self.lengths.room
        return [layer.kv_TUX[first : first + num_tokens] for layer in self.layers]

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        num_tokens = self.lengths.room
        rows = [self.row_kv(row, pad, num_tokens) for row, pad in enumerate(pads)]
        return [SlabRow.of([layer.key_dim for layer in self.layers], row) for row in rows if row is not None]

    def set_lengths(self, stored: Sequence[int]) -> None:
        """Let each sequence have so many tokens. Those after them are forgotten."""
        stored_S = row_values(stored, self.lengths.next_S.device)
        self.lengths.next_S.copy_(self.lengths.starts[:-1] + stored_S)
        self.lengths.seen_S.copy_(stored_S + 1)
        self._position_S.copy_(stored_S)

    def describe_decoding(self, report: RankReport) -> None:
        super().describe_decoding(report)
        if len(self.lengths.next_S) > 1:  # a layer is there twice while its rows are moved
            report.kv_peak_bytes = max(
                report.kv_peak_bytes, self.num_bytes + max(layer.num_bytes for layer in self.layers)
            )

    def advance(self) -> None:
        self._position_S += 1
        if self._steps is None:
            self.lengths.next_S += 1
            self.lengths.seen_S += 1
            return
        steps = self._steps
        steps.step_1.add_(1).clamp_(max=len(steps.next_JS) - 1)  # after the last one there is none
        self.lengths.next_S.copy_(steps.next_JS.index_select(0, steps.step_1)[0])
        self.lengths.seen_S.copy_(steps.seen_JS.index_select(0, steps.step_1)[0])


def _by_row(slab: KVSlab, stored: Sequence[int], chunk: range, room: int) -> Tensor:
    """The rows of a slab one after another (B * room, K, X), each from its first token on.

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
    return rows_BTKX.flatten(0, 1)
