"""`ShardedConversation`: a conversation whose text is stored by several ranks, each of which has a part of it.

The first turn goes through the chain, and each rank keeps its chunk. All ranks compute the tokens of later turns alike,
as those of an answer: each attends to the tokens that it stores, and what all found is merged exactly.
"""

# Legend: B batch, C new tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.cache.attention import CausalAttention
from runahead.cache.kept import KeptLayer
from runahead.cache.kept_cache import KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.part import TextPart
from runahead.cache.shard import least_filled
from runahead.cache.slabs import Slabs
from runahead.config import DecodeName, DecodeOptions, GenerationOptions, PrefillOptions
from runahead.context import Partitioner, even
from runahead.conversation.conversation import Conversation
from runahead.decoding.forward import Forward
from runahead.decoding.rows import Choose, Decoded
from runahead.decoding.together import choose_together, gathering_between
from runahead.engine import Engine
from runahead.kv_transfer.gathering import Gathering, Gatherings
from runahead.model.model import Model
from runahead.ranks.agreement import secret
from runahead.ranks.ranks import Ranks

PIECE_TOKENS = 256
"""Most tokens of a later turn that are computed at a time, for which the exchange between ranks has room."""


class Owners:
    """Stage that stores each new token, and how many each stores. All ranks count alike.

    Args:
        stored: number of tokens that each stage stores.
        own: this rank's stage.
    """

    def __init__(self, stored: dict[int, int], own: int) -> None:
        self.stored, self._own = stored, own
        self._latest = -1, -1

    def pieces(self, num_new: int) -> Iterator[tuple[int, int]]:
        """New tokens as runs (stage that stores the run, its length), after which stages store as alike as can be."""
        owners = least_filled(self.stored, num_new)
        for stage in self.stored:
            left = owners.count(stage)
            while left:
                yield stage, min(left, PIECE_TOKENS)
                left -= min(left, PIECE_TOKENS)

    def give(self, stage: int, start: int, num_new: int) -> None:
        """Let a stage store the tokens from index `start` on, which are computed next."""
        self.stored[stage] += num_new
        self._latest = start, stage

    def owns(self, start: int) -> bool:
        """Whether this rank stores the tokens that are being computed, the first of which has this index.

        A stage is chosen here for one that was given to none: a single token.
        """
        if self._latest[0] != start:
            [(stage, num_new)] = self.pieces(1)
            self.give(stage, start, num_new)
        return self._latest[1] == self._own

    def fork(self) -> Owners:
        return Owners(dict(self.stored), self._own)


class ShardedConversation(Conversation):
    """A text so far, of which each rank stores a part. Every rank creates one and makes the same calls.

    Args:
        ranks: the ranks, as for `Engine`.
        partition: split of the first turn.
        prefill: options of the chain that computes the first turn.
        length: as for `Conversation`.

    Attributes:
        cache: the tokens that this rank stores, and so `kv_bytes` are bytes of this rank, and `kept_tokens` its tokens.

    Raises:
        ValueError: the model is not shared out as the ranks are arranged, or the prefill collects keys and values.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        *,
        partition: Partitioner = even,
        prefill: PrefillOptions | None = None,
        length: int | None = None,
    ) -> None:
        decode = DecodeOptions(name=DecodeName.sharded)
        self._engine = Engine(model, ranks, prefill=prefill, partition=partition, decode=decode)
        super().__init__(model, length=length)
        self.ranks = ranks
        self._setup = replace(self._setup, decode=decode, num_stages=ranks.num_stages)
        self._owners, self._gatherings = self._nothing_stored(), Gatherings(ranks)

    def feed(
        self, ids_BC: Tensor, *, pads: list[int] | None = None, all_logits: bool = False, cut_back: bool = True
    ) -> Tensor:
        """As `Conversation.feed`; the same logits on every rank."""
        self._require_same("the turn", (ids_BC.tolist(), pads, all_logits), "every rank must feed the same tokens")
        return super().feed(ids_BC, pads=pads, all_logits=all_logits, cut_back=cut_back)

    def follow(self, ids_BC: Tensor, *, at_once: bool = False) -> Tensor:
        """As `Conversation.follow`; the same logits on every rank."""
        self._require_same("the tokens", ids_BC.tolist(), "every rank must give the same tokens")
        with self.ranks.announcing_failure():
            return super().follow(ids_BC, at_once=at_once)

    def generate(self, options: GenerationOptions | None = None) -> Decoded:
        """As `Conversation.generate`; the same answer on every rank."""
        self._require_same("the options", options, "every rank must ask for the same answer")
        with self.ranks.announcing_failure():
            return super().generate(options)

    def _require_same(self, name: str, value: object, remedy: str) -> None:
        if self.ranks.size > 1:
            self.ranks.require_same({name: secret(value)}, remedy)

    def fork(self) -> ShardedConversation:
        other = super().fork()
        assert isinstance(other, ShardedConversation)
        other._owners = self._owners.fork()
        part = None if self.cache is None else self.cache.part
        if part is not None:
            assert other.cache is not None
            other.cache.part = TextPart(part.indices, pads=self.pads, owns=other._owners.owns)
        return other

    def _nothing_stored(self) -> Owners:
        return Owners(dict.fromkeys(range(self.ranks.num_stages), 0), self.ranks.stage)

    def _begun_anew(self, rows: Sequence[Sequence[int]]) -> Tensor:
        self._owners = self._nothing_stored()
        return super()._begun_anew(rows)

    def _one_token_forward(self) -> Forward:
        self._sharded(1)
        return super()._one_token_forward()

    @property
    def _moves_rows(self) -> bool:
        return False  # the last tokens of a row are on any of the ranks

    @property
    def follows_at_once(self) -> bool:
        return False  # each token has a rank that stores it

    def _choose(self) -> Choose:
        return choose_together(self._gathering(1))

    def _forward(self, ids_BC: Tensor, *, all_logits: bool, cut_back: bool) -> Tensor:
        assert self.cache is not None
        given = ids_BC.shape[1]
        end = self.num_tokens + given
        self.long_rows = self._long_at(end)
        with self.ranks.announcing_failure():
            # The chain has logits of the last token on one rank alone, so that token is computed by all.
            if self.num_tokens == 0 and given > 1 and not all_logits and self._takes_chain(given - 1):
                self._prefill(ids_BC[:, :-1])
                ids_BC = ids_BC[:, -1:]
            if self.cache.part is None:
                self.cache.part = TextPart([], pads=self.pads, owns=self._owners.owns)
            logits = self._pieces(ids_BC, all_logits=all_logits, length=max(end, self.length))
        if given > 1:  # single tokens use the remaining room
            self.cache.free(room=0)
        return torch.cat(logits, dim=1) if all_logits else logits[-1]

    def _takes_chain(self, num_tokens: int) -> bool:
        """Whether a chain may compute so many first tokens, which it pads and rotates as a text of their own."""
        if min(self.pads) > 0 or not self.model.rotates_by_length:
            return min(self.pads) == 0
        longest_short = self.model.length_threshold
        if longest_short is None:
            return False
        return {row for row, pad in enumerate(self.pads) if num_tokens - pad > longest_short} == self.long_rows

    def _prefill(self, ids_BC: Tensor) -> None:
        """Compute the first tokens in a chain, after which each stage stores its chunk."""
        prompts = [ids[pad:] for ids, pad in zip(ids_BC.tolist(), self.pads, strict=True)]
        plan = self._engine.plan(prompts)
        stored = self._engine.prefill(plan).cache
        if stored is not None:
            assert stored.slabs is not None, type(stored)
            chunk = plan.partition.chunk(self.ranks.stage)
            self.cache = _kept_of(stored.slabs, chunk, self.pads)
            self.cache.part = TextPart(chunk, pads=self.pads, owns=self._owners.owns)
        for stage in plan.partition.chain:
            chunk = plan.partition.chunk(stage)
            self._owners.give(stage, chunk.start, len(chunk))
        self.num_tokens = ids_BC.shape[1]

    def _pieces(self, ids_BC: Tensor, *, all_logits: bool, length: int) -> list[Tensor]:
        """Logits after each piece of some tokens, or of all of its tokens, computed by all ranks."""
        logits, first = list[Tensor](), self.num_tokens
        for stage, num_new in list(self._owners.pieces(ids_BC.shape[1])):
            start = self.num_tokens
            self._owners.give(stage, start, num_new)
            over = self._sharded(num_new)
            attention = CausalAttention(over, start=start, pads=self.pads, on_layer=self.ranks.progress)
            logits.append(
                self.model.forward(
                    ids_BC[:, start - first : start - first + num_new],
                    attention,
                    start=start,
                    pads=self.pads,
                    length=length,
                    all_logits=all_logits,
                )
            )
            self._gathering(num_new).await_device()
            self.num_tokens += num_new
        return logits

    def _sharded(self, num_new: int) -> KeptCache:
        assert self.cache is not None
        return self.cache.over_ranks(self._gathering(num_new))

    def _gathering(self, num_new: int) -> Gathering:
        most = len(self.pads) * (PIECE_TOKENS if num_new > 1 else 1)
        stages: Sequence[int] = range(self.ranks.num_stages)
        made = gathering_between(stages, self._gatherings, self.ranks, self.model, most)
        assert made is not None, "every rank is in it"
        return made


def _kept_of(slabs: Slabs, chunk: range, pads: Sequence[int]) -> KeptCache:
    """The chunk of a shard in layers that can grow, without a copy. The shard's slabs are taken over."""
    device, chunk_pads = slabs.device, NewTokens(chunk.start, list(pads)).pads(len(chunk))
    index_T1 = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    positions_TBK = (index_T1 - row_values(pads, device))[:, :, None].int()
    return KeptCache(
        [
            KeptLayer(
                shape=shape,
                slab_TBKX=slab.slab_TBKX[: len(chunk)],
                placed_TBK=positions_TBK,
                pads=list(chunk_pads),
                num_slots=len(chunk),
            )
            for shape, slab in zip(slabs.shapes, slabs.take(), strict=True)
        ]
    )
