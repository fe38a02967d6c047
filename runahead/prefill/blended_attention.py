"""Attention of one rank's chunk where layers compute some of the tokens that reused segments have stored."""

# Legend: B batch, N query heads, K kv heads, C chunk, c tokens of it that a layer computes, S keys, H head dim,
# V value dim.

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from runahead.attention.op import finish
from runahead.attention.partial import AttentionTerms, attend_at, merge
from runahead.prefill.chain_attention import ChainAttention
from runahead.prefill.chain_run import ChainRun
from runahead.reuse.blend import Blend
from runahead.reuse.cache import reusing
from runahead.reuse.reused_kv import ReusedKV


class BlendedAttention(ChainAttention):
    """Attention of one rank's chunk to all tokens, of which deeper layers compute fewer (`runahead.reuse.blend`).

    A layer's slab has all tokens, also those that it does not compute, at their places. So a token attends to every
    token at a lower position, whichever of them are computed, and later ranks and decoding read the slab as any other.

    Args:
        run: this rank's part of the prefill.
        reused: what the prompts reuse.
    """

    def __init__(self, run: ChainRun, reused: ReusedKV, chunk: range) -> None:
        job = run.job
        self._chunk, self._reused = chunk, reused.without_blended()
        super().__init__(run, reusing(run.cache.slabs, self._reused), start=chunk.start, pads=job.batch.pads)
        self.blend = Blend(
            reused,
            chunk,
            job.batch.pads,
            self.tokens,
            num_layers=job.model.num_layers,
            device=job.ranks.device,
            mean_over_shares=job.model.mean_over_shards,
        )

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.run.open(layer)
        slab, chunk = self.run.cache.layer(layer), self._chunk
        chunk_CBKX = slab.tokens(chunk.start, chunk.stop)
        self.blend.write(layer, chunk_CBKX, k_BKCH, v_BKCV)
        self.run.send(layer)
        if self.tokens.left_Bc is None:
            seen = self.cache.layers[layer].seen(q_BNCH, self.tokens)
            out_BNCV = seen.output(terms, partial(self.run.await_prefix, layer))
        else:
            out_BNCV = self._of_left(layer, q_BNCH, self.tokens.left_Bc, terms)
        self.blend.narrow(layer, chunk_CBKX, slab.key_dim)
        self.run.close(layer)
        return out_BNCV

    def _of_left(self, layer: int, q_BNcH: Tensor, left_Bc: Tensor, terms: AttentionTerms) -> Tensor:
        """Output (B, N, c, V) of the tokens that are left, which may have any gaps between them."""
        positions_BC = self._reused.positions_BC(torch.arange(self._chunk.start, self._chunk.stop))
        queries_Bc = positions_BC.to(left_Bc.device).gather(1, left_Bc)
        outs = []
        for row in range(len(q_BNcH)):
            out_lse = None
            for k_1KSH, v_1KSV, keys_S in self._keys(layer, row):
                part = attend_at(q_BNcH[row : row + 1], k_1KSH, v_1KSV, terms, queries_Bc[row], keys_S)
                out_lse = part if out_lse is None else merge(*out_lse, *part)
            assert out_lse is not None
            outs.append(finish(out_lse, terms, q_BNcH.dtype))
        return torch.cat(outs)

    def _keys(self, layer: int, row: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and their positions that a row's tokens may see; those of earlier ranks last."""
        slab, pad, start = self.run.cache.layer(layer), self.pads[row], self._chunk.start
        device = self.run.cache.slabs.device
        spans = [(max(start, pad), self._chunk.stop), (min(start, pad), start)]
        for first, end in spans:
            if end == start:
                for part in self._reused.parts:
                    if row in part.rows:
                        kv_1KTX = part.layers_TKX[layer].transpose(0, 1)[None]
                        yield kv_1KTX[..., : slab.key_dim], kv_1KTX[..., slab.key_dim :], part.positions_T.to(device)
                self.run.await_prefix(layer)
            if first < end:
                k_BKSH, v_BKSV = slab.read(first, end)
                keys_S = self._reused.positions_BC(torch.arange(first, end))[row].to(device)
                yield k_BKSH[row : row + 1], v_BKSV[row : row + 1], keys_S
