"""Interface of a retrieving policy: all keys and values stay, in host memory, and each step reads some of them.

The policy has an index per layer, on the device, which chooses slots by a query. The query is the layer's own, or one
that the runtime predicts a layer ahead, so that the chosen slots are fetched while that layer computes. The runtime
does the rest: storage, prediction, copies and statistics.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n stored slots, m chosen ones, w observed tokens, C new tokens,
# T tokens of a segment, X what is scored (slots, pages, clusters), H key dim, V value dim.

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from policies.base import ModelFacts as ModelFacts
from policies.budgeted import Budgeted
from policies.layer_view import PromptPart
from policies.options import (
    Budget,
    budget_tokens,
    check_budget,
    choice,
    nested_options,
    require,
)
from policies.pool import Pool
from policies.precision import widened


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """The stored tokens of a segment that a row reuses, see `policies.reuse`.

    Attributes:
        slots_T: slot of each token, on the host; -1 where the row does not reuse it.
        clusters_TKx: clusters of the tokens in this layer, see `Retriever.clusters_of`; on the device.
    """

    slots_T: Tensor
    clusters_TKx: Tensor


@dataclass(frozen=True, kw_only=True)
class PromptView:
    """State of one layer after a prompt, from which an index is made. Read-only.

    Attributes:
        layer, num_layers: index of this layer, and number of layers.
        q_BNwH: queries of the prompt's last tokens, rotated to the positions of the next tokens if rotations are known;
            0 on padding.
        k_BKnH, v_BKnV: keys of all slots, rotated, and values.
        scaling: factor of the scores of this layer.
        softcap: this layer's scores s become softcap * tanh(s / softcap); None: they stay as they are.
        pads: number of padding slots on the left of each row.
        positions_BKn: positions of the slots' tokens, below 0 on padding; (B, 1, n) if all KV heads have the same.
        next_B: position of the first token after the prompt, in each row.
        turn: (queries (B, X, C, H), positions (B, C)) -> the queries rotated by that many positions; None if rotations
            are not known.
        room: number of new slots for which an index may allocate memory in advance.
        stored: returns the keys (B, K, n, H) of all slots, at any later time.
        stored_parts_B: reused tokens of each row, with what the policy has stored of them; empty if there are none.
    """

    layer: int
    num_layers: int
    q_BNwH: Tensor
    k_BKnH: Tensor
    v_BKnV: Tensor
    scaling: float
    softcap: float | None
    pads: list[int]
    positions_BKn: Tensor
    next_B: Tensor
    turn: Callable[[Tensor, Tensor], Tensor] | None
    room: int
    stored: Callable[[], Tensor]
    stored_parts_B: Sequence[Sequence[StoredPart]] = ()


FEW_TOKENS = 2048
"""Number of stored tokens below which retrieval saves no time if nothing has to be fetched over a link."""
DECODED_SOON = 256
"""Number of positions after a prompt whose queries an index is made for."""
PART = 1024
"""Keys that are scored at once on a CPU."""


def positions_ahead(view: PromptView, count: int) -> Tensor:
    """Positions (B, count), spread evenly over those of the next `DECODED_SOON` tokens."""
    ahead = torch.arange(count, device=view.next_B.device) * DECODED_SOON // count
    return view.next_B[:, None] + ahead


def no_wait() -> None:
    """The `await_device` where other ranks are not waited for; returns at once."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The stored slots of a layer, from which a policy chooses.

    Attributes:
        num_slots: number of stored slots.
        pads: number of padding slots on the left of each row.
        positions_BKn: positions of the slots' tokens, below 0 on padding; None if these are all tokens of the text, in
            the order of their positions.
        next_B: position of the token that is about to be computed, in each row; None if `positions_BKn` is None.
        mean_over_shares: mean of a tensor over the ranks that share the model, all of which call it alike; None if this
            rank has all KV heads.
        await_device: to be called before the host asks the device for a value.
    """

    num_slots: int
    pads: list[int]
    positions_BKn: Tensor | None
    next_B: Tensor | None
    mean_over_shares: Callable[[Tensor], Tensor] | None = None
    await_device: Callable[[], None] = no_wait

    def mark(self, need_BKn: Tensor, how: Retriever) -> None:
        """Set the need of the policy's first and last tokens to infinity, and that of padding to minus infinity."""
        sinks, recent = how.sinks, how.recent
        if self.positions_BKn is not None:
            assert self.next_B is not None
            always = (self.positions_BKn < sinks) | (self.positions_BKn >= self.next_B[:, None, None] - recent)
            need_BKn.masked_fill_(always, math.inf).masked_fill_(self.positions_BKn < 0, -math.inf)
            return
        if recent:
            need_BKn[..., -recent:] = math.inf
        if not any(self.pads):
            need_BKn[..., :sinks] = math.inf
            return
        for row, pad in enumerate(self.pads):
            need_BKn[row, :, pad : pad + sinks] = math.inf
            need_BKn[row, :, :pad] = -math.inf


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Estimate of the attention to the slots that are not fetched, merged with that to the fetched ones.

    Attributes:
        out_BNV: their mean value by attention.
        lse_BN: log-sum-exp of their scores, at least float32; -inf where nothing is estimated.
        is_relative: `lse_BN` is the log of their share of attention over that of the chosen slots.
    """

    out_BNV: Tensor
    lse_BN: Tensor
    is_relative: bool = False


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Keys and values of chosen slots that an index holds on the device, so that they are not fetched.

    Attributes:
        kv_BKoX: keys and values of the last o chosen slots, none of which is padding.
        keys: slots (B, K, m - o) -> keys of the other ones, of which values alone are fetched; None: keys are fetched.
    """

    kv_BKoX: Tensor
    keys: Callable[[Tensor], Tensor] | None = None

    def complete(self, slab_mBKX: Tensor, fetched_BKf: Tensor) -> None:
        """Write what is held to the fetched slots, which come first, and to those after them."""
        num_fetched, num_held = fetched_BKf.shape[2], self.kv_BKoX.shape[2]
        slab_mBKX[num_fetched : num_fetched + num_held] = self.kv_BKoX.permute(2, 0, 1, 3)
        if self.keys is not None:
            k_BKfH = self.keys(fetched_BKf)
            slab_mBKX[:num_fetched, ..., : k_BKfH.shape[3]] = k_BKfH.permute(2, 0, 1, 3)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of a policy for a query.

    Attributes:
        slots_BKm: slots to fetch, in any order, each at most once. Where a row has fewer than m tokens, the other
            slots are the last ones of its padding.
        rest: estimate of the attention to the others; None leaves them out.
        weigh: (slots (B, K, m) in the order in which they are fetched, their keys (B, K, m, H)) -> logs (B, N, m) of
            what the exponentials of each query's scores are multiplied by, -inf where it does not see a slot or that is
            padding. None: each query sees all of them as they are.
        on_device: what is not fetched of the chosen slots; None: all is.
    """

    slots_BKm: Tensor
    rest: Rest | None = None
    on_device: OnDevice | None = None
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None


class Group(Enum):
    """How the query heads that share a KV head choose together.

    union: by scores relative to the best one of each head; the maximum over heads, so that a slot is needed if any
        head needs it. mean, max: by attention probabilities, their mean or maximum over heads. sum: by the sum of the
        heads' scores. The tokens of a turn that retrieves count as further heads.
    """

    union = "union"
    mean = "mean"
    max = "max"
    sum = "sum"


class Index:
    """Data about one layer's keys, on the device, by which slots are found.

    This class has none: it scores all keys where they are stored.

    Args:
        view: the layer after the prompt. It is not kept, since it holds the prompt's keys, values and queries.
        how: the policy.

    Attributes:
        stored, scaling, softcap, pads: as in `PromptView`.
        num_slots: number of slots in the index.
    """

    def __init__(self, view: PromptView, how: Retriever) -> None:
        self.how, self.stored, self.pads = how, view.stored, list(view.pads)
        self.scaling, self.softcap = view.scaling, view.softcap
        _, self.num_kv_heads, self.num_slots, _ = view.k_BKnH.shape

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device."""
        return 0

    @property
    def scored_bytes(self) -> int:
        """Bytes that a choice of one query reads, by default all."""
        return self.num_bytes

    @property
    def query_basis_BKHr(self) -> Tensor | None:  # noqa: N802
        """Basis in which the index takes queries, if any; a projection may fold it into its weights."""
        return None

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        """Add new slots, one or many, after the others."""
        self.num_slots += k_BKCH.shape[2]

    def keep(self, slots_BKm: Tensor, k_BKmH: Tensor, v_BKmV: Tensor) -> None:
        """Keep only these slots, ascending, which have these keys and values."""
        self.num_slots = slots_BKm.shape[2]

    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor, v_BKV: Tensor) -> None:
        """Replace one slot of every row and KV head by a new token."""

    def see(self, q_BNwH: Tensor) -> None:
        """Take queries of the last `observed` of later given tokens, before these are appended; see `extends`."""

    def renew(self, view: PromptView) -> None:
        """Take queries of later positions, over the same slots; see `renews_index`."""

    def fork(self, stored: Callable[[], Tensor]) -> Self:
        """Independent copy of the index. `stored` is as in `PromptView`."""
        other = copy.copy(self)
        other.stored = stored
        return other

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        """Slots to fetch for a query, by default those with the highest `need`, `fetch` of them. None: all slots.

        Args:
            q_BNH: the query, or (B, N, r) in the index's own basis. Meaningless if `asks` is False. For C tokens of a
                turn (B, N x C, H), those of a KV head side by side.
            slots: stored slots of the layer.
        """
        num_chosen = self.how.num_chosen(slots)
        if num_chosen == slots.num_slots:
            return None
        need_BKn = self.need(q_BNH, slots)
        slots.mark(need_BKn, self.how)
        return most_needed(need_BKn, num_chosen, slots)

    def need(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Need (B, K, n) of each slot, or (B, 1, n) if all KV heads choose together. It may be overwritten."""
        return need_of_group(without_padding(self.scores(q_BNH), slots), self.how.group)

    def scores(self, q_BNH: Tensor) -> Tensor:
        """Scores (B, K, G, n) of all slots, scaled, in at least float32."""
        k_BKnH = self.stored()
        q_BKGH = q_BNH.unflatten(1, (self.num_kv_heads, -1)) * self.scaling
        # On a CPU the product with keys that lie beside values takes half the time in parts that fit into its cache.
        parts = k_BKnH.split(PART if k_BKnH.device.type == "cpu" else max(1, k_BKnH.shape[2]), dim=2)
        return widened(torch.cat([q_BKGH @ part.transpose(-1, -2) for part in parts], dim=3))

    def chosen_padding(self, slots: Slots, num_chosen: int) -> list[int]:
        """Number of chosen slots that are padding, in each row; the same in all of its KV heads."""
        return [max(0, num_chosen - (slots.num_slots - pad)) for pad in slots.pads]


@dataclass(kw_only=True)
class Retriever(Budgeted):
    """Base of all policies that retrieve.

    Attributes:
        first_layer: first layer that retrieves; earlier layers attend to all tokens.
        min_tokens: number of stored tokens below which all layers attend to all of them. None is 0 if keys and values
            have to be fetched over a link, else 2,048, below which retrieval saves no time.
        sinks: first tokens that are always chosen.
        recent: last tokens that are always chosen, in addition to the one that is computed.
        fetch: slots to choose for every KV head, including sinks and recent tokens: a number, or a share of the stored
            slots. With None the policy decides by the scores, which the host has to read.
        group: how query heads that share a KV head choose together: union (what any of them needs), mean or max (of
            their attention probabilities), or sum (of their scores).
        turn_tokens: most tokens of a later turn that retrieve, all of them together; a longer turn attends to all
            tokens, and so does every turn with 0.
        late: choose for a generated token by the query of the one before, so that fetching overlaps with a whole step
            (FreeKV). KV heads whose mean cosine between the two queries is below this choose again by their own: -1 for
            none, 1 for all. None: no head is late.
        pool: host memory for keys and values.
        sample_every: number of steps after which the report's hit mass is measured, which needs all keys; 0 is never.

    Raises:
        ValueError: an option is out of range.
    """

    index_class: ClassVar[type[Index]] = Index
    """What finds and chooses the slots of a layer."""
    retrieves: ClassVar[bool] = True
    without_room: ClassVar[str] = "which are fetched anyway"
    compares_by_kv_head: ClassVar[bool] = True
    first_ahead: ClassVar[int] = 0
    """First layer with a predicted query."""
    asks: ClassVar[bool] = True
    """Whether the choice depends on the query."""
    observed: ClassVar[int] = 0
    """Number of last tokens of the prompt whose queries are given to `index`."""
    renews_index: ClassVar[bool] = False
    """Whether an index is kept when its queries are out of date, and takes later ones by `Index.renew`."""
    takes_full_pool: ClassVar[bool] = True
    """Whether slots of its index may be overwritten, in any order, when a pool with a limit is full."""
    extends: ClassVar[bool] = False
    """Whether an index that depends on queries takes later ones by `Index.see`, and is not made anew from them."""
    index_asks_device: ClassVar[bool] = False
    """Whether the host waits for a GPU where an index is made, as it does in `torch.linalg.eigh`."""

    first_layer: int = 0
    min_tokens: int | None = None
    sinks: int = 4
    recent: int = 16
    fetch: Budget | None = None
    group: Group = Group.union
    turn_tokens: int = 0
    late: float | None = None
    pool: Pool = field(default_factory=Pool)
    sample_every: int = 0

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        super().__init_subclass__(name=name)
        for method, of_index in (("choose", "choose"), ("chosen_padding", "chosen_padding"), ("renewed", "renew")):
            if method in vars(cls):
                raise ValueError(
                    f"{cls.__name__}.{method} is not called: the index of a layer chooses; write it as {of_index} of "
                    "an Index, and name this as index_class"
                )

    def __post_init__(self) -> None:
        for name in ("first_layer", "min_tokens", "sinks", "recent", "turn_tokens", "sample_every"):
            require((getattr(self, name) or 0) >= 0, name, getattr(self, name), "must not be negative")
        if self.fetch is not None:
            check_budget(self.fetch, "fetch")
        self.group = choice("group", Group, self.group)
        self.pool = nested_options(self, "pool", "bytes=2GiB")
        if self.late is not None:
            require(-1 <= self.late <= 1, "late", self.late, "must be from -1 to 1")
            self._check_late(self.late)
        if self.pool.bytes is not None and not self.takes_full_pool:
            raise ValueError(
                f"policy {self.label} looks for tokens in the order of the text, and a full pool mixes them; leave "
                "policy.pool.bytes out"
            )
        if self.fetch is not None:
            self.require_room()

    def _check_late(self, late: float) -> None:
        """Check that the policy may choose by an earlier query. Raises: ValueError."""
        if self.fetch is None or not self.asks or self.estimates_rest:
            reason = "attention of its own query is estimated" if self.estimates_rest else "policy.fetch is not given"
            raise ValueError(
                f"policy.late={late} is for a fixed number of slots that a query chooses, but {reason}; leave "
                "policy.late out, or change that"
            )

    @property
    def budget_option(self) -> str:
        return "max_fetch" if self.fetch is None else "fetch"

    def retrieves_in(self, layer: int) -> bool:
        """Whether a layer that sees the whole text retrieves; the others attend to all tokens."""
        return layer >= self.first_layer

    @property
    def clamps(self) -> bool:
        """Whether all tokens before the last `recent` ones are attended to as if they were at one distance.

        Keys are then stored before RoPE, and a text may be longer than the model's context: chunk by chunk, a prompt
        is retrieved for where it is longer. The query that chooses is at that distance.
        """
        return False

    @property
    def estimates_rest(self) -> bool:
        """Whether choices have an estimate of the attention to other slots."""
        return False

    def of_part(self, part: PromptPart) -> Self:
        if not isinstance(self.fetch, int):
            return self
        other = copy.copy(self)
        other.fetch = part.share_of(self.fetch)
        return other

    @property
    def needs_queries(self) -> bool:
        """Whether `index` depends on the queries of the prompt's last `observed` tokens."""
        return self.observed > 0

    @property
    def needs_surprise(self) -> bool:
        """Whether indices depend on how the text surprises the model, of which `tell` tells them."""
        return False

    @property
    def compares_layers(self) -> bool:
        """Whether `tell` compares keys of all KV heads and of several layers."""
        return False

    def tell(self, indices: Sequence[Index], surprise_BS: Sequence[Sequence[float]], num_told: int) -> None:
        """Tell the indices of the layers how the text surprises the model, for a policy with `needs_surprise`.

        Called after a prompt that is indexed, and after each later turn or piece, of which all tokens are stored.

        Args:
            surprise_BS: -log p of each slot's token after those before it. NaN where it is not known: of padding, of
                the first token and of generated ones.
            num_told: slots of which was told before.
        """

    @property
    def clusters_key(self) -> str | None:
        """Key of the clusters that are stored with segments, which differs where they do.

        None: nothing is stored with segments, and they are not reused.
        """
        return None

    def clusters_of(self, layer: int, k_TKH: Tensor) -> Tensor:
        """Clusters of a segment's tokens, for the indices of all prompts that reuse it: (T, K, 1), int32.

        By default each token is a cluster of its own.

        Args:
            k_TKH: keys of its tokens in a layer, rotated to their positions.
        """
        numbers_T = torch.arange(len(k_TKH), dtype=torch.int32, device=k_TKH.device)
        return numbers_T[:, None, None].repeat(1, k_TKH.shape[1], 1)

    def looks_ahead_on(self, device: torch.device) -> bool:
        """Whether queries are predicted from the layer before on this device."""
        return False

    def index(self, view: PromptView) -> Index:
        """Index of a layer from `first_layer` on."""
        return self.index_class(view, self)

    def num_chosen(self, slots: Slots, wanted: int | None = None) -> int:
        """Number of slots to choose if `wanted` slots are wanted, by default `fetch`."""
        if wanted is None:
            assert self.fetch is not None
            wanted = budget_tokens(self.fetch, slots.num_slots)
        return min(slots.num_slots, max(wanted, self.sinks + self.recent, 1))


def most_needed(need_BKn: Tensor, num_chosen: int, slots: Slots) -> Choice | None:
    """The slots with the highest needs, then the padding closest to the tokens. None: all slots."""
    if num_chosen == slots.num_slots:
        return None
    for row, pad in enumerate(slots.pads):
        if slots.num_slots - pad < num_chosen:  # with equal needs the choice of padding would be arbitrary
            need_BKn[row, :, :pad] = torch.arange(pad, device=need_BKn.device, dtype=need_BKn.dtype) - 1e30
    if need_BKn.device.type == "cpu":
        # On a CPU numpy selects five times as fast as torch, and sorted rows are gathered faster.
        first = slots.num_slots - num_chosen
        best = np.sort(np.argpartition(need_BKn.numpy(), first, axis=-1)[..., first:], axis=-1)
        return Choice(slots_BKm=torch.from_numpy(best))
    return Choice(slots_BKm=need_BKn.topk(num_chosen, dim=-1, sorted=False).indices)


def without_padding(scores_BKGn: Tensor, slots: Slots) -> Tensor:
    """The scores of all slots with those of padding set to minus infinity, in place."""
    if slots.positions_BKn is not None:
        scores_BKGn.masked_fill_(slots.positions_BKn.lt(0).unsqueeze(2), -torch.inf)
    elif any(slots.pads):
        for row, pad in enumerate(slots.pads):
            scores_BKGn[row, :, :, :pad] = -torch.inf
    return scores_BKGn


def need_of_group(scores_BKGX: Tensor, group: Group, sizes_BKX: Tensor | None = None) -> Tensor:
    """Need (B, K, X) of what a group's heads score, by the rule of the group. The scores may be overwritten.

    Args:
        sizes_BKX: number of slots that share a score; None is one. A probability is that of one of them.
    """
    if group is Group.union:
        return scores_BKGX.sub_(scores_BKGX.amax(dim=-1, keepdim=True)).amax(dim=2)
    if group is Group.sum:
        return scores_BKGX.sum(dim=2)
    counted = scores_BKGX if sizes_BKX is None else scores_BKGX + sizes_BKX.to(scores_BKGX.dtype).log().unsqueeze(2)
    probabilities_BKGX = scores_BKGX.sub(counted.logsumexp(dim=-1, keepdim=True)).exp_()
    return probabilities_BKGX.mean(dim=2) if group is Group.mean else probabilities_BKGX.amax(dim=2)


def num_needed(need_BKX: Tensor, least: float, slots: Slots, sizes_BKX: Tensor | None = None) -> int:
    """Number of slots of a KV head whose need is at least `least`: the mean over the model's heads, rounded up.

    Of several rows, that of the row with most.

    Args:
        slots: the slots that are needed.
        sizes_BKX: number of slots that share a need; None is one.
    """
    num_heads = need_BKX.shape[1]
    if sizes_BKX is not None:
        counts_B = (sizes_BKX * (need_BKX >= least)).sum(dim=(1, 2))
    elif need_BKX.device.type == "cpu":  # torch takes three times as long
        counts = [int(np.count_nonzero(row_KX.numpy() >= least)) for row_KX in need_BKX]
        if slots.mean_over_shares is None:
            return -(-max(counts) // num_heads)
        counts_B = torch.tensor(counts)
    else:
        counts_B = (need_BKX >= least).sum(dim=(1, 2))
    mean_B = counts_B.double() / num_heads
    if slots.mean_over_shares is not None:
        mean_B = slots.mean_over_shares(mean_B)
    return math.ceil(float(mean_B.max()))
