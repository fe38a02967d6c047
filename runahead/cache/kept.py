"""Layer of the KV cache under cache policies: it keeps the tokens that policies choose, and has room for new ones.

As in the full KV cache, memory is token-major, (T, B, K, H + V). A slot holds one token, which may differ between rows
and between KV heads. Slots are in the order of their tokens' positions and padding is on the left, so causal attention
needs no mask. Keeping some slots copies them and frees the rest.
"""

# Legend: T slots with room, n stored slots, m kept ones, B batch, N query heads, K kv heads, C new tokens,
# X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.attention.dropped import DroppedTokens
from runahead.attention.op import Run, Span, Step, spans_of
from runahead.attention.partial import KeyBias, biased
from runahead.attention.query_moments import QueryMoments
from runahead.cache.base import LayerStore, SeenKV
from runahead.cache.kv_cache import seen_in, seen_in_part
from runahead.cache.new_tokens import NewTokens
from runahead.cache.part import GappedRows
from runahead.cache.quantised.few_bits import ExactWindow, FewBits
from runahead.cache.quantised.groups import GROUP, narrowed
from runahead.cache.quantised.rows import Codes
from runahead.cache.slabs import KVShape, KVSlab, SlotsToCopy, taken
from runahead.rotary import Rotary

NEW_ROOM = 32
"""New tokens for which a layer has room after a prompt and after each cut; it grows if more tokens stay."""


@dataclass(kw_only=True)
class KeptLayer(LayerStore):
    """One layer, of which a policy may keep some slots and drop the others.

    Older tokens may be in few bits: `slab_TBKX` then is a window of the newest ones.

    Attributes:
        slab_TBKX: the slots from `start` on, of which those before `num_slots` are in use.
        placed_TBK: memory of `positions_TBK`, where positions of the newest slots may be lacking.
        pads: slots on the left of each row that are padding.
        alike: whether a slot has the same token in all KV heads of the model, those of other ranks included.
        first: number of the first slot; above 0 in a layer with a window, whose early tokens were never stored.
        carried: values (T, B, K) that policies accumulate per slot, by `Policy.state_key`. Forks may share the
            mapping, so a policy is added to a new one.
        queries: moments of the queries since slots were last dropped, by the first position that counts, if policies
            ask for them; shared by forks.
        rotary: set if positions are re-encoded: keys are stored unrotated, and rotated to their slots when they are
            attended to. Otherwise keys are stored rotated to their tokens' positions.
        host: the layer in host memory that this one was brought from, whose first slots are still the same; None if
            slots were dropped or written over since.
        few: precision of older tokens, and of the window; None: all are as they were computed.
        codes: the older tokens, if they are in few bits and all heads of a row store equally many.
        start: slots on the left that are stored elsewhere.
        dropped: what stands for tokens that were dropped, if anything does.
        gapped: positions of the tokens, if there are gaps between those of a prompt; then no slot is dropped.
    """

    shape: KVShape
    slab_TBKX: Tensor
    placed_TBK: Tensor
    pads: list[int]
    alike: bool = True
    num_slots: int = 0
    first: int = 0
    carried: Mapping[Hashable, Tensor] = field(default_factory=dict)
    queries: Mapping[int, QueryMoments] = field(default_factory=dict)
    rotary: Rotary | None = None
    host: KeptLayer | None = None
    few: FewBits | None = None
    codes: Codes | None = None
    start: int = 0
    dropped: DroppedTokens | None = None
    gapped: GappedRows | None = None
    _unplaced: list[Tensor] = field(default_factory=list, init=False, repr=False)  # positions (B, C), in order
    _memory: KVSlab | None = field(default=None, init=False, repr=False)

    @classmethod
    def empty(cls, shape: KVShape, *, batch: int, room: int, device: torch.device) -> KeptLayer:
        """An empty layer with room for `room` tokens."""
        slab = torch.empty(
            room, batch, shape.num_kv_heads, shape.key_dim + shape.value_dim, dtype=shape.dtype, device=device
        )
        positions = torch.empty(room, batch, 1, dtype=torch.int32, device=device)
        return cls(shape=shape, slab_TBKX=slab, placed_TBK=positions, pads=[0] * batch)

    @property
    def on_host(self) -> bool:
        """Whether keys and values are in host memory while another device computes."""
        return self.codes is not None and self.codes.on_host

    def in_bits(self, few: FewBits, *, room: int) -> KeptLayer:
        """The layer with its older tokens in few bits, and room for `room` new ones. Its memory is only read."""
        assert self.first == 0, self.first
        self._place()
        codes = Codes.empty(self.shape, few, self.slab().read(0, 0), self.pads)
        other = replace(self, host=None, few=few, codes=codes)
        other.flush()
        other.copy_out(room=room)
        return other

    def flush(self, *, coming: int = 0) -> None:
        """Quantise the whole groups of tokens that have left the window of the newest ones, if the layer does so.

        Args:
            coming: number of tokens that are about to be stored, which are counted among the newest ones.
        """
        if self.codes is not None:
            self.codes.grow(self.memory, self.num_slots + coming)

    @property
    def pool_bytes(self) -> int:
        """Bytes allocated of what a retrieving policy fetches from: keys and values."""
        return self.slab_TBKX.nbytes if self.codes is None else self.codes.pool_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: keys and values, positions, what policies accumulate, and what stands for dropped tokens."""
        carried = sum(each_TBK.nbytes for each_TBK in self.carried.values())
        others = sum(each.num_bytes for each in (*self.queries.values(), self.codes, self.dropped) if each is not None)
        return self.slab_TBKX.nbytes + self.placed_TBK.nbytes + carried + others

    def fields_of(self, kind: type[KeptLayer], *but: str) -> dict[str, Any]:
        """Values of the fields of a kind of layer, for another one with the same slots, but for some fields."""
        self._place()
        return {each.name: getattr(self, each.name) for each in fields(kind) if each.init and each.name not in but}

    @property
    def positions_TBK(self) -> Tensor:  # noqa: N802
        """Position of each slot's token in its row, below 0 on padding; (T, B, 1) while all heads hold the same."""
        self._place()
        return self.placed_TBK

    def _place(self) -> None:
        """Store the positions of the newest slots, which few steps ask for."""
        if self._unplaced:
            with torch.inference_mode():  # as the forward, which is over
                positions_BC = self._unplaced[0] if len(self._unplaced) == 1 else torch.cat(self._unplaced, dim=1)
                self._unplaced.clear()
                self._place_newest(positions_BC)

    def _place_newest(self, positions_BC: Tensor) -> None:
        self.placed_TBK[self.num_slots - positions_BC.shape[1] : self.num_slots] = positions_BC.T[:, :, None]

    @property
    def memory(self) -> KVSlab:
        """The slots with the room after them, in place."""
        if self._memory is None or self._memory.slab_TBKX is not self.slab_TBKX:
            self._memory = self.memory_of(self.slab_TBKX)
        return self._memory

    def _hold(self, slab_TBKX: Tensor) -> None:
        """Have the slots in other memory from now on; views keep none of the old one."""
        self.slab_TBKX, self._memory = slab_TBKX, None

    def memory_of(self, slab_TBKX: Tensor) -> KVSlab:
        """The slots in this memory, with the numbers that they have in the layer."""
        key_dim, first, dtype = self.shape.key_dim, self.first + self.start, self.shape.dtype
        if self.few is None or slab_TBKX.dtype == dtype:
            return KVSlab(slab_TBKX=slab_TBKX, key_dim=key_dim, first=first)
        return ExactWindow(slab_TBKX=slab_TBKX, key_dim=key_dim, first=first, dtype=dtype)

    def slab(self) -> KVSlab:
        """The slots in use: in place, or dequantised in new memory, with 0 in padding."""
        if self.codes is not None:
            return self.codes.to_device().read(self.memory, self.num_slots)
        return KVSlab(slab_TBKX=self.slab_TBKX[: self.num_slots], key_dim=self.shape.key_dim, first=self.first)

    def kv_BKnX(self) -> Tensor:  # noqa: N802
        """Keys and values of all slots, in the memory that holds them, or dequantised."""
        return self.slab().slab_TBKX.permute(1, 2, 0, 3)

    @property
    def tokens_per_head(self) -> int:
        """Mean number of slots of a KV head."""
        return self.num_slots

    @property
    def tokens_BK(self) -> list[list[int]]:  # noqa: N802
        """Number of tokens of each row and KV head."""
        return [[self.num_slots - pad] * self.shape.num_kv_heads for pad in self.pads]

    @property
    def head_pads(self) -> list[list[int]] | None:
        """Padding slots on the left of each row and KV head, where heads store different numbers of tokens."""
        return None

    @property
    def end(self) -> int:
        """Number of the next slot."""
        return self.first + self.num_slots

    def positions_BKn(self) -> Tensor:  # noqa: N802
        return self.positions_TBK[: self.num_slots].permute(1, 2, 0)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        num_new = k_BKCH.shape[2]
        if tokens.takes(num_new):
            self.store(k_BKCH, v_BKCV, tokens.positions_BC(num_new, k_BKCH.device), tokens.pads(num_new))

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        if tokens.part is not None and self.codes is None:
            return seen_in_part(self.slab(), q_BNCH, tokens, self.pads, bias=self.biased_by(q_BNCH.shape[1]))
        # Counted in slots, which are in causal order whichever tokens they hold.
        first, end, num_new, pads = self.first, self.end, q_BNCH.shape[2], self.pads
        start, positions = end - num_new, self.positions_BKn
        if self.rotary is not None:  # which rotates the whole of what it is given
            slab, rotary = self.slab(), self.rotary
            return seen_in(slab, q_BNCH, start=start, pads=pads, rotary=rotary, positions=positions)

        if self.codes is not None:
            bias = self.biased_by(q_BNCH.shape[1])
            exact, runs = self.codes.to_device().runs(num_new, tokens, end, bias)
            steps = [Step([Run(self.memory, exact, bias)])] + ([Step(runs)] if runs else [])
            apart = None
            if tokens.part is not None or self.gapped is not None:
                apart = partial(self._steps_by_position, q_BNCH, tokens)
            return SeenKV(q_BNCH=q_BNCH, steps=steps, apart=apart, whole=self.read, positions=positions)

        def spans() -> Sequence[Span]:
            return spans_of(range(first, end), start=start, num_new=num_new, pads=pads)

        seen_spans = tokens.once((KeptLayer, first, end, num_new, *pads), spans)
        steps = [Step([Run(self.memory, seen_spans, self.biased_by(q_BNCH.shape[1]))])]
        return seen_in(self.memory, q_BNCH, start=start, pads=pads, steps=steps, positions=positions)

    def _steps_by_position(self, q_BNCH: Tensor, tokens: NewTokens) -> Sequence[Step]:
        """Steps over the dequantised slots, whose tokens lie anywhere in the text."""
        gapped, end, (_, num_heads, num_new, _) = self.gapped, self.end, q_BNCH.shape
        if gapped is None:
            return seen_in_part(self.slab(), q_BNCH, tokens, self.pads, bias=self.biased_by(num_heads)).steps
        spans = tokens.once((gapped, end, num_new), lambda: gapped.spans(end, num_new, q_BNCH.device))
        return [Step([Run(self.slab(), spans)])]

    def biased_by(self, num_heads: int) -> Callable[[KeyBias, slice | Tensor, slice], Tensor]:
        """The bias of the tokens in these slots at their positions, as of `Run`, for so many query heads."""

        def bias(key_bias: KeyBias, rows: slice | Tensor, slots: slice) -> Tensor:
            positions_RKS = self.positions_BKn()[rows, :, slots.start - self.first : slots.stop - self.first]
            return biased(key_bias, positions_RKS, num_heads)

        return bias

    def store(self, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int]) -> None:
        """Store new tokens after the others; allocates more memory if there is no room.

        Args:
            positions_BC: positions of the new tokens in their rows.
            new_pads: number of padding tokens among them, by row.
        """
        num_new, end = k_BKCH.shape[2], self.num_slots + k_BKCH.shape[2]
        self._reserve(num_new)
        self._write(k_BKCH, v_BKCV)
        self.num_slots = end
        self.pads = [pad + new for pad, new in zip(self.pads, new_pads, strict=True)]
        self._unplaced.append(positions_BC)
        for each_TBK in self.carried.values():
            each_TBK[end - num_new : end] = 0
        if num_new == 1:  # several attend to each other first
            self.flush()

    def _reserve(self, num_new: int) -> None:
        """Make room for new tokens: growing token by token stays cheap."""
        if self.num_slots + num_new > self.start + self.slab_TBKX.shape[0]:
            self.copy_out(room=num_new - 1 + GROUP if self.few is not None else num_new + self.num_slots // 8)

    def _write(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        """Write keys and values to the slots after those in use."""
        self.memory.write(self.end, *self._as_stored(k_BKCH, v_BKCV))

    def _as_stored(self, k_BKCH: Tensor, v_BKCV: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values in the dtype of the newest tokens."""
        if self.few is None:
            return k_BKCH, v_BKCV
        return narrowed(k_BKCH, self.slab_TBKX.dtype), narrowed(v_BKCV, self.slab_TBKX.dtype)

    def set_end(self, end: int) -> None:
        """Let the slot with this number be the next one. Slots before it hold tokens, whose positions are stored."""
        self._place()
        self.num_slots = end - self.first
        assert self.num_slots >= self._first_exact, (self.num_slots, self._first_exact)
        if self.host is not None and self.num_slots < self.host.num_slots:
            self.host = None

    def carry(self, values_BKn: Tensor, policy: Hashable) -> None:
        """Store a policy's value of each slot; it stays with the slot's token when slots are dropped."""
        if policy not in self.carried:
            shape = len(self.placed_TBK), *self.slab_TBKX.shape[1:3]
            zeros_TBK = torch.zeros(shape, dtype=values_BKn.dtype, device=self.slab_TBKX.device)
            self.carried = {**self.carried, policy: zeros_TBK}
        self.carried[policy][: self.num_slots] = values_BKn.permute(2, 0, 1)

    def carried_BKn(self, policy: Hashable) -> Tensor | None:  # noqa: N802
        """Values that a policy has stored by `carry`, 0 for newer slots; None if it has not."""
        carried_TBK = self.carried.get(policy)
        return None if carried_TBK is None else carried_TBK[: self.num_slots].permute(1, 2, 0)

    def rows_of(self, slots_BKm: Tensor) -> Tensor:
        """Rows (B, K, m) of the memory, seen as a (T * B * K, X) matrix, that hold these slots."""
        batch, heads, device = len(self.pads), self.shape.num_kv_heads, slots_BKm.device
        rows_B11, heads_K1 = (
            torch.arange(batch, device=device)[:, None, None],
            torch.arange(heads, device=device)[:, None],
        )
        return (slots_BKm * batch + rows_B11) * heads + heads_K1

    def all_but(self, slots_BKm: Tensor) -> DroppedTokens:
        """Sums that stand for the tokens that are in none of these slots, and for those that were dropped before."""
        return DroppedTokens.from_slots(self.kv_BKnX(), self.positions_BKn() >= 0, slots_BKm, self.dropped)

    def keep(self, slots_BKm: Tensor, *, room: int, tokens_B: Sequence[int] | None = None) -> KeptLayer:
        """Keep the tokens in these slots, (B, K, m) or (B, 1, m), free all others, and make room for `room` more.

        Args:
            tokens_B: number of tokens that each row keeps, if the host knows it; else it may have to wait for slots.

        Returns:
            the layer as it is stored then.
        """
        assert self.first == 0, self.first
        num_kept = slots_BKm.shape[2]
        slots_mBK = slots_BKm.permute(2, 0, 1)
        if tokens_B is not None:
            kept_pads = [num_kept - tokens for tokens in tokens_B]
        elif len(set(self.pads)) == 1:  # known without asking the device, since rows of one length keep equally many
            kept_pads = [max(0, num_kept - (self.num_slots - pad)) for pad in self.pads]
        else:  # the host waits for the slots
            pads_B1 = row_values(self.pads, slots_mBK.device)[:, None]
            kept_pads = (slots_mBK < pads_B1).sum(dim=0)[:, 0].tolist()
        if slots_mBK.device.type == "cpu":
            require_pads(slots_mBK, self.pads, kept_pads)
        is_new_mBK = slots_mBK < 0  # padding of a row that keeps fewer tokens than others: any slot's numbers
        slots_mBK = slots_mBK.clamp_min(0)
        self._keep_kv(slots_mBK, kept_pads, room)
        positions_TBK = self.positions_TBK
        if positions_TBK.shape[2] == 1 and slots_mBK.shape[2] > 1:
            positions_TBK = positions_TBK.expand(-1, -1, self.shape.num_kv_heads)
        self.placed_TBK = taken(positions_TBK, slots_mBK, room)
        self.placed_TBK[:num_kept].masked_fill_(is_new_mBK, -1)
        self.carried = {policy: taken(each_TBK, slots_mBK, room) for policy, each_TBK in self.carried.items()}
        self.queries = self.queries_left([[num_kept - pad] * self.shape.num_kv_heads for pad in kept_pads])
        self.num_slots, self.pads = num_kept, kept_pads
        return self

    def queries_left(self, tokens_BK: Sequence[Sequence[int]]) -> Mapping[int, QueryMoments]:
        """`queries` without those of rows that drop tokens, since they count from then on.

        Args:
            tokens_BK: number of tokens that each row and KV head keeps.
        """
        goes = [sum(kept_K) < sum(stored_K) for kept_K, stored_K in zip(tokens_BK, self.tokens_BK, strict=True)]
        if not self.queries or all(goes):
            return {}
        goes_B = row_values(goes, self.slab_TBKX.device)
        return {first: each.without(goes_B) for first, each in self.queries.items()}

    def _keep_kv(self, slots_mBK: Tensor, kept_pads: list[int], room: int) -> None:
        """Move keys and values of these slots to memory of their own. `kept_pads` is the padding among them by row."""
        if self.codes is None:
            self._hold(taken(self.slab_TBKX, slots_mBK, room))
        else:
            self.codes, slab_TBKX = self.codes.kept(
                slots_mBK, kept_pads, window=self.memory, num_slots=self.num_slots, room=room
            )
            self.start = self.codes.first_exact
            self._hold(slab_TBKX)
        self.host = None

    def free(self, *, room: int) -> None:
        if self.slab_TBKX.shape[0] != self.num_slots - self._first_exact + room:
            self.copy_out(room=room)

    @property
    def _first_exact(self) -> int:
        """The first slot that is not stored elsewhere."""
        return self.start if self.codes is None else self.codes.first_exact

    def to_device(self) -> KeptLayer:
        """The same slots in device memory."""
        return self.over(self.codes.to_device()) if self.codes is not None and self.on_host else self

    def over(self, codes: Codes) -> KeptLayer:
        """The same layer with its codes in other memory."""
        self._place()
        return replace(self, codes=codes)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys (B, K, n, H) and values (B, K, n, V) of all slots, as views of `kv_BKnX`."""
        kv_BKnX, key_dim = self.kv_BKnX(), self.shape.key_dim
        return kv_BKnX[..., :key_dim], kv_BKnX[..., key_dim:]

    def expect(self, num_new: int) -> None:
        """Called before slots are gathered for so many new tokens, which are stored after that."""
        if num_new == 1 and self.codes is not None and self.codes.is_pool:
            self.flush(coming=1)  # its storing would else quantise others between their fetching and its attention

    def gather(self, wanted: SlotsToCopy) -> Callable[[], Tensor] | None:
        """Copy some slots to the device.

        Returns:
            function that returns the slots (m + room, *heads, X); None if attention can read all slots in place. On a
            CPU the function makes the copy, since a layer's weights would else evict it from the processor's cache.
        """
        if self.codes is not None:
            return self.codes.gather(wanted, window=self.memory, num_slots=self.num_slots)
        if wanted.rows_X is None:
            return None
        return partial(self._gathered, wanted, wanted.rows_X)

    def _gathered(self, wanted: SlotsToCopy, rows_X: Tensor) -> Tensor:
        source_TBKX = self.mapped_TBKX()
        return wanted.copied(*_as_rows(source_TBKX, rows_X), source_TBKX.shape[1:3], self.shape.key_dim)

    def fetched_bytes(self, num_slots: int, *, room: int) -> int:
        """Bytes on the device of what `gather` copies."""
        more = 0 if self.codes is None else self.codes.fetched_bytes(num_slots)
        return (num_slots + room) * self.shape.bytes_per_token(len(self.pads)) + more

    def mapped_TBKX(self) -> Tensor:  # noqa: N802
        """The slots as a tensor of the device that computes."""
        return self.slab_TBKX

    def put(self, first: int, rows: slice, new_SBKX: Tensor) -> None:
        """Write the slots of some rows from `first` on, which are in use from then on; memory grows if it must.

        Positions and padding are the caller's.
        """
        end = first + len(new_SBKX)
        if end > self.slab_TBKX.shape[0]:
            self.copy_out(room=end - self.num_slots + self.num_slots // 8)
        self._put((slice(first, end), rows), new_SBKX)
        self.num_slots = max(self.num_slots, end)

    def fork(self, *, copy: bool) -> KeptLayer:
        """The same slots for a forked cache.

        Args:
            copy: allocate memory of its own; otherwise both share the present slots and new ones go to new memory.
        """
        self._place()
        other = replace(self, host=None, codes=None if self.codes is None else self.codes.fork(copy=copy))
        if copy:
            other.copy_out(room=0)
            return other
        n = self.num_slots
        other.slab_TBKX, other.placed_TBK = self.slab_TBKX[: n - self.start], self.placed_TBK[:n]
        # Copies of what policies carry: values of present slots change, unlike keys and values.
        other.carried = {policy: each_TBK[:n].clone() for policy, each_TBK in self.carried.items()}
        return other

    def remembered(self) -> KeptLayer:
        """The layer as it is now, in the same memory, to go back to once later tokens are taken back.

        They may be stored and slots dropped until then; it is used in place of this layer, not beside it.
        """
        codes = None if self.codes is None else self.codes.fork(copy=False)
        carried = {policy: each_TBK.clone() for policy, each_TBK in self.carried.items()}
        other = replace(self, codes=codes, carried=carried)
        other._unplaced = list(self._unplaced)
        return other

    def row(self, row: int) -> KeptLayer:
        """One row's slots, without its padding, as a layer of its own in the same memory."""
        pad, rows = self.pads[row], slice(row, row + 1)
        skipped, memory = max(0, pad - self.first), self.memory.row(row, pad)
        first = self.first + skipped - pad
        return replace(
            self,
            slab_TBKX=memory.slab_TBKX,
            placed_TBK=self.positions_TBK[skipped:, rows],
            pads=[0],
            num_slots=self.num_slots - skipped,
            first=first,
            start=memory.first - first,
            codes=None if self.codes is None else self.codes.row(row),
            carried={policy: each_TBK[skipped:, rows] for policy, each_TBK in self.carried.items()},
            queries={first: each.row(row) for first, each in self.queries.items()},
            host=None,
            gapped=None if self.gapped is None else self.gapped.rows[row],
        )

    def copy_out(self, *, room: int) -> None:
        """Move to newly allocated memory, with room for `room` more tokens."""
        start, dtype = self._first_exact, None if self.few is None else self.few.window_dtype(self.shape.dtype)
        self._hold(_with_room(self.slab_TBKX[start - self.start : self.num_slots - self.start], room, dtype))
        self.start = start
        self._resize_positions(room)

    def _resize_positions(self, room: int) -> None:
        """Move positions and carried values to new memory, with room for `room` more tokens."""
        self.placed_TBK = _with_room(self.positions_TBK[: self.num_slots], room)
        self.carried = {
            policy: _with_room(each_TBK[: self.num_slots], room) for policy, each_TBK in self.carried.items()
        }

    def overwrite(self, slots_BK: Tensor, k_BK1H: Tensor, v_BK1V: Tensor, positions_B1: Tensor) -> None:
        """Store a new token in place of an old one, or of the last padding of its row, in every row and KV head.

        From then on slots are no longer in the order of positions.

        Args:
            slots_BK: slot to overwrite in each row and KV head.
        """
        batch, heads = slots_BK.shape
        if self.positions_TBK.shape[2] < heads:
            self.placed_TBK = self.placed_TBK.expand(-1, -1, heads).contiguous()
        rows_B1 = torch.arange(batch, device=slots_BK.device)[:, None]
        heads_K = torch.arange(heads, device=slots_BK.device)
        self._put((slots_BK, rows_B1, heads_K), torch.cat([k_BK1H, v_BK1V], dim=-1)[:, :, 0])
        self.placed_TBK[slots_BK, rows_B1, heads_K] = positions_B1.int()
        self.alike = False
        for each_TBK in self.carried.values():
            each_TBK[slots_BK, rows_B1, heads_K] = 0
        self.pads = [max(0, pad - 1) for pad in self.pads]

    def _put(self, place: tuple[slice | Tensor, ...], new: Tensor) -> None:
        self.slab_TBKX[place], self.host = new, None


def require_pads(slots_mBK: Tensor, pads: Sequence[int], kept_pads: list[int]) -> None:
    """Check that of each row's padding in its first slots so many slots are kept, in all KV heads."""
    kept_BK = (slots_mBK < torch.tensor(pads)[:, None]).sum(dim=0)
    assert (kept_BK == torch.tensor(kept_pads)[:, None]).all(), (kept_BK, kept_pads)


def _with_room(old: Tensor, room: int, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor, in another dtype if it is given, with `room` uninitialised rows after it."""
    new = old.new_empty((old.shape[0] + room, *old.shape[1:]), dtype=dtype)
    new[: old.shape[0]] = old if dtype is None else narrowed(old, dtype)
    return new


def _as_rows(source_TBKX: Tensor, rows_X: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of a layer as rows of one head and token, and the numbers there of rows of the (T * B * K, X) matrix.

    A row of a batch lies in its memory with those of other rows between its tokens.
    """
    num_tokens, batch, heads, width = source_TBKX.shape
    if source_TBKX.is_contiguous():
        return source_TBKX.view(-1, width), rows_X
    apart, own = source_TBKX.stride(0) // width, batch * heads
    flat = source_TBKX.as_strided(((num_tokens - 1) * apart + own, width), (width, 1))
    return flat, rows_X // own * apart + rows_X % own
