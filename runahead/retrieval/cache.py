"""The KV cache of a retrieving policy: all tokens are kept, and attention sees those that are retrieved."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from policies.base import LayerForm
from policies.layer_view import Phase
from policies.retriever import Rest
from runahead.attention.base import LayerInput
from runahead.attention.op import Part
from runahead.attention.partial import AttentionTerms, attend
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kept_cache import KeptCache
from runahead.cache.kv_cache import seen_in, seen_in_part
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab
from runahead.cache.slot_positions import at_slots
from runahead.report import RankReport
from runahead.retrieval.fetched import Fetched
from runahead.retrieval.retrieval import Retrieval


class RetrievedCache(KeptCache):
    """KV cache of all tokens of a batch, in a pool in host memory if the device is a GPU.

    A generated token attends to what is retrieved for it, and so do the tokens of a later turn that is short enough for
    the policy. A prompt attends to everything, but for chunks beyond the model's context if distances are clamped.

    Drafts are no part of the pool, and stand after its tokens in the same memory until they are verified, which may
    overwrite them. All of them are attended to, and none is chosen from; `Retrieval.grow` takes in what was verified.

    Args:
        retrieval: chooses and fetches; its pool are the layers of this cache.
        form: as of `KeptCache`.
        of_drafts: new tokens are drafts of a row without padding.
    """

    def __init__(self, retrieval: Retrieval, form: LayerForm | None = None, *, of_drafts: bool = False) -> None:
        self.layers, self.retrieval, self.form, self.of_drafts = retrieval.pool, retrieval, form, of_drafts

    @property
    def num_bytes(self) -> int:
        return super().num_bytes - self.retrieval.host_bytes + self.retrieval.num_bytes

    @property
    def shares_memory(self) -> bool:
        return self.retrieval.limit is None and self.device.type == "cpu"

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + self.retrieval.host_bytes)

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        super().open(layer, q_BNCH, terms, tokens)
        is_decoding = self.of_drafts or tokens.phase is Phase.decode
        if is_decoding or self.retrieval.serves_given(layer, q_BNCH.shape[2]):
            return RetrievedLayer(self, layer, q_BNCH, terms, tokens)
        if self.retrieval.clamped is not None:
            self.retrieval.clamped.seen_whole(layer)
        self.layers[layer] = self.layers[layer].to_device()
        return self.layers[layer]

    @property
    def indexes_all(self) -> bool:
        return self.retrieval.clamped is not None

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        if not self.of_drafts:
            with self.retrieval.working():
                self.retrieval.look_ahead(layer, given)

    def index(
        self,
        layer: int,
        seen: SeenKV,
        positions_BC: Tensor,
        terms: AttentionTerms,
        *,
        start: int,
        room: int,
        was_cut: bool,
    ) -> None:
        parts_B = self.stored_parts[layer] if self.stored_parts else ()
        q_BNCH, positions_BC = self.retrieval.with_earlier(layer, seen.q_BNCH, positions_BC, start)
        with self.retrieval.working():
            self.retrieval.store_prompt(
                layer, q_BNCH, positions_BC, terms, room=room, was_cut=was_cut, stored_parts_B=parts_B
            )

    def observe(self, layer: int, q_BNCH: Tensor, positions_BC: Tensor, chunk: range) -> None:
        self.retrieval.observe(layer, q_BNCH, positions_BC, chunk)

    def see_surprise(self, surprise_BC: Tensor, start: int) -> None:
        with self.retrieval.working():
            self.retrieval.see_surprise(surprise_BC, start)

    def end_turn(self, *, room: int) -> None:
        if self.form is not None:  # each becomes a pool before the next one is brought: the device holds codes of one
            for layer in range(len(self.layers)):
                if self.form.complete(self.layers, layer, room=room):
                    self.close(layer, room=room)
        super().end_turn(room=room)

    def await_device_by(self, wait: Callable[[], None]) -> None:
        self.retrieval.await_device = wait

    def close(self, layer: int, *, room: int) -> None:
        self.retrieval.offload(layer, room=room)

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        """Rows stay together, since what is retrieved for them is in one memory."""
        return KVStore.split(self, pads)

    def take_back(self, num_tokens: int) -> None:
        if not self.of_drafts:
            super().take_back(num_tokens)

    def _forked(self) -> KeptCache:
        overwrites = self.retrieval.limit is not None
        layers = [layer.fork(copy=overwrites) for layer in self.layers]
        return RetrievedCache(self.retrieval.fork(layers), self.form, of_drafts=self.of_drafts)

    def describe_prompt(self, report: RankReport) -> None:
        super().describe_prompt(report)
        report.kv_host_bytes = self.retrieval.host_bytes

    def describe_decoding(self, report: RankReport) -> None:
        super().describe_decoding(report)
        report.retrieval = self.retrieval.report()


class RetrievedLayer(LayerStore):
    """One layer as new tokens see it: the tokens that are retrieved for them, and they themselves."""

    sees_last_alone = False  # they are retrieved for all new tokens

    def __init__(
        self, cache: RetrievedCache, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens
    ) -> None:
        self._retrieval, self._layer, self._kept = cache.retrieval, layer, cache.layers[layer]
        self._q_BNCH, self._terms, self._is_draft = q_BNCH, terms, cache.of_drafts
        end = tokens.start + q_BNCH.shape[2]
        room = end - self._kept.end if cache.of_drafts else q_BNCH.shape[2]
        with self._retrieval.working():
            self._fetched = self._retrieval.fetched(layer, q_BNCH, tokens.start, tokens.row_pads, room=room)
        self._slab = None if self._fetched is None else self._fetched.slab(self._kept.shape.key_dim)
        self._own: tuple[Tensor, Tensor] | None = None

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        num_new = k_BKCH.shape[2]
        if self._is_draft:
            self._append_draft(k_BKCH, v_BKCV, tokens)
            return
        if not tokens.takes(num_new):
            self._pass_over(tokens)
            return
        self._own = k_BKCH, v_BKCV
        if self._slab is not None:
            self._sample_hits(k_BKCH)
            self._slab.write(self._slab.end - num_new, k_BKCH, v_BKCV)
        positions_BC = tokens.positions_BC(num_new, k_BKCH.device)
        self._retrieval.store_new(
            self._layer, k_BKCH, v_BKCV, positions_BC, tokens.pads(num_new), is_turn=tokens.phase is Phase.prefill
        )
        self._choose_late(tokens)

    def _append_draft(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        """Store drafts after those before them."""
        memory = self._kept.memory
        memory.write(tokens.start, k_BKCH, v_BKCV)
        self._own = memory.read(self._kept.end, tokens.start + k_BKCH.shape[2])
        if self._slab is not None:
            self._slab.write(self._slab.end - self._own[0].shape[2], *self._own)

    def _pass_over(self, tokens: NewTokens) -> None:
        """Note a new token that another rank stores."""
        if self._slab is not None:
            self._sample_hits(self._slab.read(0, 0)[0])
        self._retrieval.pass_over(self._layer)
        self._choose_late(tokens)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        if self._slab is None and self._is_draft:
            return seen_in(self._kept.memory, q_BNCH, start=tokens.start, pads=self._kept.pads)
        if self._slab is None and self._kept.rotary is None:
            return self._kept.seen(q_BNCH, tokens)
        seen = self._seen(q_BNCH, tokens)
        if self._slab is not None:
            seen.of_all = partial(self._of_all, q_BNCH)
        return seen

    def _of_all(self, q_BNCH: Tensor) -> SeenKV:
        """The new tokens' queries with all slots, for policies that cut a turn back."""
        kept = self._retrieval.pool[self._layer]
        slab, pads, rotary = kept.slab(), kept.pads, kept.rotary
        start = slab.end - q_BNCH.shape[2]
        if rotary is None or self._retrieval.clamped is None:
            return seen_in(slab, q_BNCH, start=start, pads=pads)
        first = [self._retrieval.clamped.first_slot(slab.end)] * len(pads)
        slab, q_BNCH = at_slots(rotary, slab, q_BNCH, new=start, pads=first)
        return seen_in(slab, q_BNCH, start=start, pads=pads)

    def _seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        slab, pads = self._slots()
        if self._fetched is not None and self._fetched.weigh is not None:
            return self._weighed(self._fetched, slab, q_BNCH, tokens)
        if tokens.part is not None:
            return self._with_rest(seen_in_part(slab, q_BNCH, tokens, pads))
        start = slab.end - q_BNCH.shape[2]
        if self._kept.rotary is not None:
            assert self._retrieval.clamped is not None
            bases = self._retrieval.clamped.bases(self._layer, self._kept, slab.end, pads)
            slab, q_BNCH = at_slots(self._kept.rotary, slab, q_BNCH, new=start, pads=bases)
        return self._with_rest(seen_in(slab, q_BNCH, start=start, pads=pads))

    def _weighed(self, fetched: Fetched, slab: KVSlab, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        """The new tokens as they see each other, and what was fetched by its weights."""
        assert fetched.slots_BKm is not None and self._kept.rotary is None
        own, pads = replace(slab, slab_TBKX=slab.slab_TBKX[fetched.slots_BKm.shape[2] :]), [0] * len(q_BNCH)
        if tokens.part is not None:
            seen = seen_in_part(own, q_BNCH, tokens, pads)
        else:
            seen = seen_in(own, q_BNCH, start=own.end - q_BNCH.shape[2], pads=pads)
        seen.rest = partial(fetched.weighed, slab, q_BNCH)
        return seen

    def _slots(self) -> tuple[KVSlab, list[int]]:
        """All tokens that a new token attends to, and by row the number of padding slots on their left."""
        if self._slab is None or self._fetched is None:
            return self._kept.slab(), self._kept.pads
        num_slots = self._slab.end - (self._q_BNCH.shape[2] if self._own is None else 0)
        return replace(self._slab, slab_TBKX=self._slab.slab_TBKX[:num_slots]), self._fetched.pads

    def _with_rest(self, seen: SeenKV) -> SeenKV:
        """`seen`, with the attention to other tokens if that is estimated."""
        if self._fetched is None or self._fetched.rest is None:
            return seen
        seen.rest = partial(estimate, self._fetched.rest, seen.q_BNCH, self._own)
        return seen

    @property
    def num_bytes(self) -> int:
        return 0 if self._fetched is None else self._fetched.num_bytes

    def _choose_late(self, tokens: NewTokens) -> None:
        if tokens.phase is Phase.decode:
            after = tokens.start + self._q_BNCH.shape[2]
            with self._retrieval.working():
                self._retrieval.choose_late(self._layer, self._q_BNCH, after, tokens.row_pads)

    def _sample_hits(self, k_BKCH: Tensor) -> None:
        if self._q_BNCH.shape[2] == 1:
            q_BNH, scaling = self._q_BNCH[:, :, 0], self._terms.scaling
            self._retrieval.sample_hits(self._layer, q_BNH, k_BKCH, self._fetched, scaling)


def estimate(
    rest: Rest, q_BNCH: Tensor, own: tuple[Tensor, Tensor] | None, terms: AttentionTerms, lse_BNC: Tensor
) -> Part:
    """The estimated attention of new tokens to what was not fetched.

    Args:
        own: keys and values of the new tokens, if they are stored here, and of drafts before them.
        lse_BNC: log-sum-exp over what was fetched, and over these.
    """
    # Queries of heads that choose together are side by side.
    rest_BNCV, rest_BNC = (x.unflatten(1, (-1, q_BNCH.shape[2])) for x in (rest.out_BNV, rest.lse_BN))
    if not rest.is_relative:
        return rest_BNCV, rest_BNC
    if own is not None:  # without the new tokens; a rounding below 0 is one that has all attention
        _, own_BNC = attend(q_BNCH, *own, terms, q_start=own[0].shape[2] - q_BNCH.shape[2], k_start=0)
        lse_BNC = lse_BNC + (own_BNC - lse_BNC).clamp_max(0).expm1().neg().log()
    return rest_BNCV, rest_BNC + lse_BNC
