"""Interface of all KV caches: append new tokens, see the stored ones by their queries, free what is not needed.

A `KVStore` has one `LayerStore` per layer. Prefill and decoding use all of them alike, whether they consist of slabs,
of layers that a policy cuts back, of host memory or of reused segments: `append`, then `seen` and its `output`.
"""

# Legend: P ranks that store parts of a text, B batch, N query heads, K kv heads, C new tokens, n stored tokens, m kept
# ones, H head dim, V value dim.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor

from runahead.attention.base import LayerInput
from runahead.attention.marked import attend_marked
from runahead.attention.op import Part, Step, attend, finish, nothing
from runahead.attention.partial import AttentionTerms, merge, merge_parts
from runahead.attention.states import States
from runahead.cache.index import SlabIndex
from runahead.cache.new_tokens import NewTokens
from runahead.cache.part import TextPart
from runahead.cache.slabs import Slabs
from runahead.report import RankReport


class Gather(Protocol):
    """All-gather between the ranks that store parts of a text."""

    def __call__(self, own: Tensor, /) -> Tensor:
        """The tensors (P, ...) of all of them in their order, on every rank."""

    def await_device(self) -> None:
        """Wait until all that was gathered is there."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A layer that has read the keys and values of another one, by queries of the last of the new tokens.

    Attributes:
        seen: what these queries saw.
    """

    layer: int
    seen: SeenKV
    terms: AttentionTerms


@dataclass(kw_only=True)
class SeenKV:
    """One layer's keys and values together with the queries of the newest tokens, which attend to them.

    Attributes:
        q_BNCH: the queries; if positions are re-encoded, rotated to the slots of their tokens.
        steps: where the tokens lie that they see.
        apart: returns steps that take their place where positions count (windows, biases), if they give the order of
            tokens alone.
        whole: all slots in one memory, those of the newest tokens last, where there is one.
        positions: positions (B, K, n) or (B, 1, n) of the tokens in these slots; called where some keys are marked.
        num_sequences: KV heads that have runs of their own, as rows of one head; None: a run is of all heads.
        rest: attention of the queries to what stands for tokens that are not here, by the terms and by the
            log-sum-exp (B, N, C) over the tokens that are.
        of_all: the same queries with all slots of the layer, where they see some of them that were chosen.
        attend_to: in place of `op.attend`.
        readers: the layers that have read this one since.
        not_attended: terms of queries whose output nobody needs; all keys are here.
    """

    q_BNCH: Tensor
    steps: Sequence[Step] = ()
    apart: Callable[[], Sequence[Step]] | None = None
    whole: Callable[[], tuple[Tensor, Tensor]] | None = None
    positions: Callable[[], Tensor] | None = None
    num_sequences: int | None = None
    rest: Callable[[AttentionTerms, Tensor], Part] | None = None
    of_all: Callable[[], SeenKV] | None = None
    attend_to: Callable[..., Part] = attend
    readers: list[Reader] = field(default_factory=list, init=False, repr=False)
    not_attended: AttentionTerms | None = field(default=None, init=False, repr=False)
    _lse_BNC: Tensor | None = field(default=None, init=False, repr=False)
    _lse_PBNC: Tensor | None = field(default=None, init=False, repr=False)

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> Part:
        """Attention of the newest tokens to all tokens up to their own, without the family's sinks.

        Args:
            await_prefix: returns once the tokens of earlier ranks are stored; they are not read before.
        """
        if terms.marked_window is not None:  # a key may be marked by the first token after the prefix
            await_prefix()
            assert self.positions is not None, "tokens that are marked are in one memory"
            part = attend_marked(self.q_BNCH, *self.read(), terms, self.positions())
        else:
            num, steps = self.num_sequences, self.steps
            if self.apart is not None and not terms.by_order:
                steps = self.apart()
            part = self.attend_to(self.q_BNCH, steps, terms, await_prefix=await_prefix, num_sequences=num)
        return part if self.rest is None else merge(*part, *self.rest(terms, part[1]))

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys (B, K, n, H) and values (B, K, n, V), those of the newest tokens last, as cache policies need."""
        assert self.whole is not None, "policies look at tokens in one memory"
        return self.whole()

    def output(
        self,
        terms: AttentionTerms,
        await_prefix: Callable[[], None] = nothing,
        *,
        gather: Gather | None = None,
        keeps_lse: bool = False,
    ) -> Tensor:
        """Output (B, N, C, V) of `attend`, with the family's attention sinks, in the queries' dtype.

        Args:
            gather: if other ranks store tokens that the queries see, too; what all ranks found is merged.
            keeps_lse: whether `lse` may be asked for after the next gather, which writes over what this one returned.
        """
        out, lse = self.attend(terms, await_prefix)
        if gather is None:
            self._lse_BNC = lse
        else:
            found = gather(torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], dim=-1))
            self._lse_PBNC = found[..., -1]
            out = merge_parts(found[..., :-1], self._lse_PBNC)
            if keeps_lse or terms.sinks_N is not None:
                lse = self._lse_BNC = self.lse()
        return finish((out, lse), terms, self.q_BNCH.dtype)

    def lse(self) -> Tensor:
        """Log-sum-exp (B, N, C) of the scores of all tokens that the queries see, once `output` was called.

        Where ranks gather, it is asked for before they do so the next time, unless `output` keeps it.
        """
        if self.not_attended is not None and self._lse_BNC is None:
            self._lse_BNC = self.attend(self.not_attended)[1]
        if self._lse_BNC is not None:
            return self._lse_BNC
        assert self._lse_PBNC is not None, "output() comes first"
        return torch.logsumexp(self._lse_PBNC, dim=0)


class LayerStore(ABC):
    """Keys and values of one layer, for all rows of a batch.

    Attributes:
        sees_last_alone: `seen` may be called for the last of the new tokens alone, too.
    """

    sees_last_alone: bool = True

    @abstractmethod
    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        """Store keys and values of new tokens after all others, unless another rank stores them."""

    @abstractmethod
    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        """The stored keys and values as seen by `q_BNCH`, the queries of the tokens that were appended last."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes allocated."""

    def free(self, *, room: int) -> None:  # noqa: B027 (slabs are allocated once)
        """Free all memory but that of the stored tokens and of `room` more."""


class KVStore(ABC):
    """KV cache of a batch: keys and values of all layers.

    Attributes:
        layers: one per layer of the model.
        slabs: the memory of the tokens that are stored here, if each has its slot in it.
        slab_index: where they lie in these slabs.
        peak_bytes: most bytes allocated at any call of `note_peak`.
        shared_TKX: keys and values of each layer that this cache and others have in common; no part of `num_bytes`.
        gather: between ranks of which each stores a part of the text and runs the same forwards; None: all is here.
        part: which tokens are stored here, if these are layers that grow.
        states: of the same text, in layers that hold one; None if none does. A forward updates them in place.
    """

    layers: Sequence[LayerStore]
    slabs: Slabs | None = None
    slab_index: SlabIndex | None = None
    peak_bytes: int = 0
    shared_TKX: Sequence[Tensor] = ()
    gather: Gather | None = None
    part: TextPart | None = None
    states: States | None = None

    def over_ranks(self, gather: Gather) -> Self:
        """This cache, of whose text other ranks store the rest: its queries see all of it from now on."""
        self.gather = gather
        self.await_device_by(gather.await_device)
        return self

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rotates(self) -> bool:
        """Whether keys are stored unrotated."""
        return False

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor | None:  # noqa: N802
        """Positions (B, C) of the tokens with these indices in the padded batch; None if they are index - pad.

        Args:
            start: the first index, known to the host.
        """
        return None

    @property
    def repeats_steps(self) -> bool:
        """Whether a decoding step is the same operations on the same tensors every time; see `advance`."""
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device, including those of indices into the cache."""
        return sum(layer.num_bytes for layer in self.layers) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states."""
        return 0 if self.states is None else self.states.num_bytes

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        """The store of one layer for new tokens with these queries: they are appended to it and attend to it."""
        return self.layers[layer]

    def readers(self, layer: int) -> Sequence[int]:
        """Later layers that read what this one stores, where policies have to wait for them."""
        return ()

    def look_ahead(self, layer: int, given: LayerInput) -> None:  # noqa: B027 (most stores do nothing then)
        """Prepare `layer`; called with the input of the layer before it, which has not run yet."""

    def close(self, layer: int, *, room: int) -> None:  # noqa: B027 (as above)
        """Called after the attention of several new tokens to a layer; `room` tokens are expected to follow."""

    def set_lengths(self, stored: Sequence[int]) -> None:  # noqa: B027 (as above)
        """Called before each decoding step with the number of tokens of each row, if steps repeat."""

    def advance(self) -> None:  # noqa: B027 (as above)
        """Called after each decoding step, if steps repeat: all layers have appended its token."""

    def agreed(self, fine_1: Tensor) -> Tensor:
        """Whether `fine_1` (1,) is 1 on all ranks that store parts of the text; each of them calls this."""
        return fine_1 if self.gather is None else self.gather(fine_1).amin(dim=0)

    def await_device(self) -> None:
        """Called before the host asks the device for a value after an exchange of the ranks that store parts."""
        if self.gather is not None:
            self.gather.await_device()

    def await_device_by(self, wait: Callable[[], None]) -> None:  # noqa: B027 (as above)
        """Told what waits for the exchanges of ranks that store parts, if this is one part: see `await_device`."""

    def for_decoding(self) -> KVStore:
        """The same tokens in the form that single new tokens attend to fastest."""
        return self

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        """Each row of the batch as a cache of its own, without its padding. They share this cache's memory."""
        assert len(pads) == 1, f"{type(self).__name__} holds {len(pads)} rows, which stay together"
        return [self]

    @abstractmethod
    def fork(self) -> KVStore:
        """An independent copy of the cache of one row, or of rows that stay together."""

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        """Keys and values of a row's first tokens in each layer, (T, K, H + V), as views; None if not all are here.

        Of a shard these are those that are stored here, in the order of its `Shard.indices`.

        Args:
            pad: left padding of the row.
            num_tokens: T. Later tokens of the row are stored after them, so what is returned never changes.
        """
        return None

    @abstractmethod
    def take_back(self, num_tokens: int) -> None:
        """Forget keys and values of the last tokens, so that others are stored in their place.

        States stay as they are, since they forget no tokens.
        """

    @property
    def changes_as_it_grows(self) -> bool:
        """Whether a new token changes how earlier ones are stored, so that those after it see others."""
        return False

    @contextmanager
    def remembering(self) -> Iterator[Callable[[int], None]]:
        """Context manager of a forward of several tokens after each of which policies may decide.

        Yields:
            what takes back the last of these tokens, given their number, with all that was decided after them.
        """
        yield self.take_back

    def note_peak(self) -> None:
        """Update `peak_bytes` with the bytes that are allocated now."""
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def describe_prompt(self, report: RankReport) -> None:
        """Fill in the bytes and tokens that are stored after the prompt."""
        report.kv_kept_bytes = self.num_bytes

    def describe_decoding(self, report: RankReport) -> None:
        """Fill in the peak of stored bytes and the statistics of decoding."""
        report.kv_peak_bytes = max(report.kv_peak_bytes, self.num_bytes)
