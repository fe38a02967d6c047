"""One step of causal attention over a KV cache: store the new tokens, attend to them, attend to what came before."""

# Legend: B batch, N query heads, K kv heads, C new tokens, S tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from runahead.attention.partial import AttentionTerms, add_sinks, attend, merge
from runahead.cache.slabs import KVCache, KVSlab


@dataclass(frozen=True, kw_only=True)
class _RowGroup:
    """Rows with the same padding, in the positions of these rows: queries [q_start, q_end), keys from `first` on."""

    rows: slice
    pad: int
    first: int
    q_start: int
    q_end: int

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_start


class CausalAttention:
    """Attention of the tokens [start, start + C) of a left-padded batch, for one forward of the model.

    The model's attention layers call `attend` once each, in order. Prefill in one piece, in chunks, on several ranks
    and decoding differ only in where the K,V of earlier tokens come from.

    Args:
        cache: receives the new K,V; holds the earlier ones.
        start: index of the first new token in the padded batch.
        pads: left padding of every row; positions of row r are index - pads[r].
    """

    rotates = False
    """Queries and keys come as they are at position 0, and this attention gives them their positions."""

    def __init__(self, cache: KVCache, *, start: int, pads: list[int]) -> None:
        self.cache, self.start, self.pads = cache, start, pads

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        """Positions of the tokens with these indices in the padded batch; None: they are contiguous in each row."""
        return None

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        """Output (B, N, C, V) of one layer."""
        slab = self.cache.layer(layer)
        slab.write(self.start, k_BKCH, v_BKCV)
        return self.attend_to_slab(slab, q_BNCH, terms)

    def attend_to_slab(
        self,
        slab: KVSlab,
        q_BNCH: Tensor,
        terms: AttentionTerms,
        await_prefix: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """As `attend`, once the new K,V are stored. Earlier K,V are read only after `await_prefix` returned.

        Several queries attend to their own chunk first, which needs no prefix, and to the prefix in a second call;
        one query takes one call. That depends on the shape alone, never on what has arrived, so that runs repeat
        bit by bit.
        """
        groups = self._row_groups(q_BNCH.shape[2], terms)

        def partial(group: _RowGroup, start: int, end: int) -> tuple[Tensor, Tensor]:
            q = q_BNCH[group.rows, :, -group.num_queries :]
            k, v = slab.read(start + group.pad, end + group.pad)
            return attend(q, k[group.rows], v[group.rows], terms, q_start=group.q_start, k_start=start)

        own = [partial(group, group.q_start, group.q_end) if group.num_queries > 1 else None for group in groups]
        await_prefix()
        padded_out = None
        for group, part in zip(groups, own, strict=True):
            if part is None:
                out, lse = partial(group, group.first, group.q_end)
            elif group.first < group.q_start:
                out, lse = merge(*part, *partial(group, group.first, group.q_start))
            else:
                out, lse = part
            if terms.sinks_N is not None:
                out = add_sinks(out, lse, terms.sinks_N)
            if len(groups) == 1 and out.shape[:3] == q_BNCH.shape[:3]:
                return out
            if padded_out is None:
                padded_out = out.new_zeros(*q_BNCH.shape[:3], out.shape[-1])
            padded_out[group.rows, :, -group.num_queries :] = out
        if padded_out is None:  # this chunk is padding in every row
            padded_out = q_BNCH.new_zeros(*q_BNCH.shape[:3], slab.slab_TBKX.shape[-1] - slab.key_dim)
        return padded_out

    def _row_groups(self, num_queries: int, terms: AttentionTerms) -> list[_RowGroup]:
        """All rows at once without padding, else one by one over their own tokens: no mask, no work on padding."""
        whole = not any(self.pads)
        groups = []
        for row, pad in [(slice(None), 0)] if whole else [(slice(r, r + 1), p) for r, p in enumerate(self.pads)]:
            q_start, q_end = max(0, self.start - pad), self.start + num_queries - pad
            if q_start < q_end:
                first = 0 if terms.rule is None else terms.rule.first_key(q_start)
                groups.append(_RowGroup(rows=row, pad=pad, first=first, q_start=q_start, q_end=q_end))
        return groups
