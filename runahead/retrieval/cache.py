"""The KV cache of a retrieving policy: all tokens are kept, and attention sees those that are retrieved."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from policies.base import Phase
from runahead.attention.base import LayerInput
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import LayerStore, SeenKV
from runahead.cache.kept import KeptCache
from runahead.cache.kv_cache import SeenSlab
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab
from runahead.report import RankReport
from runahead.retrieval.retrieval import Retrieval


class RetrievedCache(KeptCache):
    """KV cache of all tokens of a batch, in a pool in host memory if the device is a GPU.

    A generated token attends to what is retrieved for it; given tokens attend to everything.

    Args:
        retrieval: chooses and fetches; its pool are the layers of this cache.
    """

    def __init__(self, retrieval: Retrieval) -> None:
        self.layers, self.retrieval = retrieval.pool, retrieval

    @property
    def num_bytes(self) -> int:
        return super().num_bytes - self.retrieval.host_bytes + self.retrieval.num_bytes

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + self.retrieval.host_bytes)

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        if tokens.phase is Phase.decode:
            return RetrievedLayer(self, layer, q_BNCH, terms, tokens)
        self.layers[layer] = self.layers[layer].brought()
        return self.layers[layer]

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        self.retrieval.look_ahead(layer, given)

    def index(
        self, layer: int, seen: SeenKV, positions_BC: Tensor, terms: AttentionTerms, *, room: int, was_cut: bool
    ) -> None:
        self.retrieval.store_prompt(layer, seen.q_BNCH, positions_BC, terms.scaling, room=room, was_cut=was_cut)

    def close(self, layer: int, *, room: int) -> None:
        self.retrieval.settle(layer, room=room)

    def fork(self) -> KeptCache:
        overwrites = self.retrieval.max_slots is not None
        return RetrievedCache(self.retrieval.fork([layer.fork(copy=overwrites) for layer in self.layers]))

    def describe_prompt(self, report: RankReport) -> None:
        super().describe_prompt(report)
        report.kv_host_bytes = self.retrieval.host_bytes

    def describe_decoding(self, report: RankReport) -> None:
        super().describe_decoding(report)
        report.retrieval = self.retrieval.report()


class RetrievedLayer(LayerStore):
    """One layer as one generated token sees it: the tokens that are retrieved for it, and the token itself."""

    def __init__(
        self, cache: RetrievedCache, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens
    ) -> None:
        self._retrieval, self._layer, self._kept = cache.retrieval, layer, cache.layers[layer]
        self._q_BNH, self._scaling = q_BNCH[:, :, 0], terms.scaling
        self._fetched = self._retrieval.fetched(layer, self._q_BNH, tokens.start, tokens.row_pads)
        self._slab = None if self._fetched is None else self._fetched.slab(self._kept.shape.key_dim)
        self._num_new = 0

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        if self._slab is not None:
            self._retrieval.sample_hits(self._layer, self._q_BNH, k_BKCH, self._fetched, self._scaling)
            self._slab.write(self._slab.end - 1, k_BKCH, v_BKCV)
        positions_B1 = tokens.positions_BC(1, k_BKCH.device)
        self._retrieval.store_token(self._layer, k_BKCH, v_BKCV, positions_B1)
        self._num_new = 1

    def pass_over(self, tokens: NewTokens) -> None:
        if self._slab is not None:
            no_keys_BKCH = self._slab.read(0, 0)[0]
            self._retrieval.sample_hits(self._layer, self._q_BNH, no_keys_BKCH, self._fetched, self._scaling)
        self._retrieval.pass_over(self._layer)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSlab:
        slab, pads = self.slots()
        return SeenSlab.of(slab, q_BNCH, start=slab.end - 1, pads=pads)

    def slots(self) -> tuple[KVSlab, list[int]]:
        if self._slab is None or self._fetched is None:
            return self._kept.slab(), self._kept.pads
        num_slots = self._slab.end - 1 + self._num_new
        return replace(self._slab, slab_TBKX=self._slab.slab_TBKX[:num_slots]), self._fetched.pads

    @property
    def num_bytes(self) -> int:
        return 0 if self._fetched is None else self._fetched.num_bytes
