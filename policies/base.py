"""Interface of a cache policy: it looks at what a layer has stored and returns the indices of the tokens to keep.

The runtime does the rest: storage, positions, padding, attention probabilities, copies and accounting. Slots hold
tokens in the order of their positions; padding is on the left of each row. A policy keeps the same number of slots in
every row and KV head, so that they form one dense tensor; a row with fewer tokens keeps some of its padding. Only a
policy that declares it (`keeps_ragged`) may keep different numbers of tokens in different heads.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m kept slots, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from policies.reuse import GivenPrompt as GivenPrompt
from policies.reuse import PromptTooLong as PromptTooLong
from policies.reuse import ReusingPrompt as ReusingPrompt
from policies.reuse import Segment as Segment
from policies.reuse import SegmentUse as SegmentUse
from policies.reuse import ids_of as ids_of
from policies.reuse import reuse_segments as reuse_segments


class Phase(Enum):
    """Phase of a forward pass: the new tokens are a prompt, or generated one at a time."""

    prefill = "prefill"
    decode = "decode"

    def spare(self, evict_every: int) -> int:
        """Tokens by which a layer may exceed what is kept, if it is cut back every so many generated tokens."""
        return evict_every - 1 if self is Phase.decode else 0


class TokenKind(Enum):
    """Kind of a token: one that a tokenizer adds, punctuation marks alone, or any other."""

    other = 0
    punctuation = 1
    special = 2


class Signals(Protocol):
    """Signals of the newest queries about the stored tokens, computed on demand in O(block) memory."""

    def votes(self, num_queries: int, newest: float = 1.0, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Attention probabilities (B, N, n), float32, averaged over the newest `num_queries` tokens' queries.

        Weights rise linearly from 1 for the oldest of them to `newest`. Queries that are padding do not count, nor in a
        KV head those that see none of its tokens, since steps before have dropped these.

        Args:
            of: what is averaged of each probability in its place, such as its square; 0 of 0.
        """
        ...

    def received(self, *, temperature: float = 1.0, seed: int | None = None) -> Tensor:
        """Attention probabilities (B, N, n), float32, summed over the queries of all new tokens.

        Args:
            temperature: what logits are divided by.
            seed: of standard Gumbel noise that is added to logits before, by layer, query head, and positions of query
                and key. None: no noise.

        With either, a query still gives the stored tokens together what it gives them without.
        """
        ...

    def neglects(self, num_queries: int) -> Tensor:
        """Number (B, N, n), float32, of the newest `num_queries` queries that give a token less than their mean.

        The mean is of a query's probabilities of the stored tokens that it sees: 1/t for t tokens, if these are all
        that it attends to. Queries that do not see the token, or are padding, do not count.
        """
        ...

    def projected_lengths(self, order: int = 1) -> Tensor:
        """Norm (B, N, n), at least float32, of the stored values after each query head's output projection.

        Only for a policy with `needs_output_projection`.

        Args:
            order: 1 or 2, of the norm.
        """
        ...

    def highest(self, weights_BC: Tensor | None = None) -> Tensor:
        """Largest attention probability (B, N, n), float32, over the queries of all new tokens.

        Args:
            weights_BC: of each query, by which its probabilities are multiplied before.
        """
        ...

    def next_queries(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Mean (B, N, H) and covariance (B, N, H, H) of the queries at the next `num_positions` positions, as expected.

        Those of the queries since the layer was last cut back, before RoPE, turned by the mean of the rotations to
        these positions; in units in which a query and a key multiply to a score. In at least float32. Only for a
        policy with `queries_from`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that a policy may check before it is used.

    Attributes:
        name: name of the model.
        fingerprint: fingerprint of its weights.
        heads: number of KV heads and key dim (K, H) of every layer, on this rank.
        input_dims: width of the attention input of every layer, for a policy with `needs_attention_input`.
        share, num_shares: this rank's share of the model's heads, and number of shares.
        copies: number of shares that have the same KV head.
    """

    name: str
    fingerprint: str
    heads: list[tuple[int, int]]
    input_dims: list[int] = field(default_factory=list)
    share: int = 0
    num_shares: int = 1
    copies: int = 1

    @property
    def heads_of_all(self) -> list[int]:
        """Number of KV heads of every layer, those of all shares."""
        return [num_heads * self.num_shares // self.copies for num_heads, _ in self.heads]

    @property
    def of_all(self) -> ModelFacts:
        """The facts of one rank that has the heads of all shares."""
        heads = [(number, dim) for number, (_, dim) in zip(self.heads_of_all, self.heads, strict=True)]
        return replace(self, heads=heads, share=0, num_shares=1, copies=1)

    def own_heads(self, layer: int) -> slice:
        """This rank's KV heads among those of all shares."""
        num_heads = self.heads[layer][0]
        first = self.share * num_heads // self.copies
        return slice(first, first + num_heads)


def alone(x: Tensor) -> Tensor:
    """A tensor over the ranks that share the model, where a rank has all of it."""
    return x


@dataclass(frozen=True, kw_only=True)
class PromptPart:
    """The tokens of a prompt that one rank keeps, where each rank keeps those of its own chunk (decode=sharded).

    Attributes:
        chunk: indices of the tokens in the padded prompt.
        num_tokens: length of the padded prompt.
        row_pads: left padding of each row of the prompt.
    """

    chunk: range
    num_tokens: int
    row_pads: Sequence[int]

    @property
    def num_after(self) -> int:
        """Number of the prompt's tokens after this part."""
        return self.num_tokens - self.chunk.stop

    def share_of(self, number: int) -> int:
        """This part's share of a number of tokens, by its length; at least 1 if that is not 0.

        The shares of all parts add up to the number, but for those that would be 0.
        """
        start, stop = (number * end // self.num_tokens for end in (self.chunk.start, self.chunk.stop))
        return max(min(number, 1), stop - start)

    def budget_of(self, budget: Budget) -> Budget:
        """This part's share of a budget; one that is a share of the prompt stays as it is."""
        return self.share_of(budget) if isinstance(budget, int) else budget

    def sinks(self, num_sinks: int) -> list[int]:
        """Number of each row's first `num_sinks` tokens that are in this part."""
        start, stop = self.chunk.start, self.chunk.stop
        return [max(0, min(pad + num_sinks, stop) - max(pad, start)) for pad in self.row_pads]


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """State of one layer after its new tokens have attended to everything stored. Read-only.

    Attributes:
        layer, num_layers: index of this layer, and number of layers.
        phase: phase of the new tokens.
        num_new: number of new tokens. Those that steps before have not dropped are in the last slots.
        chunk_tokens: number of new tokens before any layer narrowed them.
        new_positions_BC: positions of the new tokens in their rows, below 0 on padding.
        prompt_tokens: length of the padded prompt so far, which a budget that is a share refers to.
        num_generated: number of tokens generated since the prompt, this one included; 0 in a prompt.
        pads: number of padding slots on the left of each row.
        head_pads: number of them in each KV head of each row, where heads store different numbers of tokens; else None.
        alike: whether a slot has the same token in all KV heads of the model.
        positions_BKn: positions of all slots in their rows, below 0 on padding; (B, 1, n) if the same in all heads.
            On a rank that does not know which of earlier ranks' tokens are left, any positions before its own.
        k_BKnH, v_BKnV: stored keys, rotated as the new queries see them, and values.
        new_kinds_BC: kinds of the new tokens, as values of `TokenKind`, for a policy with `needs_token_kinds`.
        carried_BKn: for a policy that accumulates, what its `carry` returned for these slots; 0 for new ones.
        input_BCD: hidden states of the new tokens that this layer's attention was given, after any norm before it, for
            a policy with `needs_attention_input`.
        signals: attention probabilities of the new tokens' queries.
        unseen_BKn: whether each slot holds a token that no later query sees, since the model has marked it; None for a
            model that marks none.
        mean_over_shares: mean of a tensor over the ranks that share the model; all of them call it alike.
        joined_over_shares: values (B, K, n) of the KV heads of all these ranks, each filled up with minus infinity at
            its end to the longest; called like `mean_over_shares`.
        share, num_shares: number of this rank among them, and of them.
        part: the tokens of the prompt that this rank keeps, if each rank keeps its own. `prompt_tokens` and all slots
            then are of this part, and probabilities still are shares of the attention to all tokens. A generated token
            is in the last slot of one rank, and has a query on all of them.

    Where ranks share the model, heads are those of this rank's share. What is chosen by KV head needs no others; what
    is chosen for all heads alike has to be the same on all ranks, and so takes `mean_over_heads`; and where heads share
    a budget, all ranks need the scores of all of them, from `joined_over_shares`.
    """

    layer: int
    num_layers: int
    phase: Phase
    num_new: int
    chunk_tokens: int
    new_positions_BC: Tensor
    prompt_tokens: int
    pads: list[int]
    positions_BKn: Tensor
    k_BKnH: Tensor
    v_BKnV: Tensor
    carried_BKn: Tensor | None
    signals: Signals
    mean_over_shares: Callable[[Tensor], Tensor] = alone
    joined_over_shares: Callable[[Tensor], Tensor] = alone
    share: int = 0
    num_shares: int = 1
    part: PromptPart | None = None
    num_generated: int = 0
    new_kinds_BC: Tensor | None = None
    input_BCD: Tensor | None = None
    unseen_BKn: Tensor | None = None
    head_pads: Sequence[Sequence[int]] | None = None
    alike: bool = True

    @property
    def num_slots(self) -> int:
        return self.k_BKnH.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k_BKnH.shape[1]

    @property
    def row_tokens(self) -> list[int]:
        """Number of tokens of each row, without padding; of its longest KV head where these store different numbers."""
        return [self.num_slots - min(pads) for pads in self.head_pads or [[pad] for pad in self.pads]]

    @property
    def own_heads(self) -> slice:
        """This rank's KV heads among those of `joined_over_shares`."""
        return slice(self.share * self.num_kv_heads, (self.share + 1) * self.num_kv_heads)

    def sinks(self, num_sinks: int) -> list[int]:
        """Number of the first `num_sinks` tokens of each row that are stored here, in the first slots after padding."""
        return [num_sinks] * len(self.pads) if self.part is None else self.part.sinks(num_sinks)

    def heads_by_pad(self) -> Iterator[tuple[int, slice, int]]:
        """The KV heads of each row that have equally many padding slots: the row, these heads, and that number."""
        for row, pad in enumerate(self.pads):
            if self.head_pads is None:
                yield row, slice(None), pad
            else:
                yield from ((row, slice(head, head + 1), each) for head, each in enumerate(self.head_pads[row]))

    def is_token_BKn(self, after: Sequence[int] | None = None) -> Tensor:  # noqa: N802
        """Whether each slot (B, K, n), or (B, 1, n) for all heads alike, has a token rather than padding.

        Args:
            after: number of first tokens of each row that are left out.
        """
        found_BKn = self.positions_BKn >= 0
        if after is not None:
            numbers_BKn = found_BKn.cumsum(dim=-1)
            for row, num_first in enumerate(after):
                found_BKn[row] &= numbers_BKn[row] > num_first
        return found_BKn

    def with_new(self, new_BKC: Tensor) -> Tensor:
        """`carried_BKn`, or 0 if there is none, with `new_BKC` in the slots of the new tokens that are left.

        Steps before may have dropped some of the new tokens, so these are found by their positions.
        """
        before_BKn = new_BKC.new_zeros(()) if self.carried_BKn is None else self.carried_BKn
        positions_BKn = self.positions_BKn.expand(-1, self.num_kv_heads, -1).contiguous()
        new_positions_BKC = self.new_positions_BC[:, None].expand_as(new_BKC).to(positions_BKn.dtype).contiguous()
        at_BKn = torch.searchsorted(new_positions_BKC, positions_BKn).clamp_max_(new_BKC.shape[2] - 1)
        is_new_BKn = new_positions_BKC.gather(2, at_BKn) == positions_BKn
        return torch.where(is_new_BKn, new_BKC.gather(2, at_BKn), before_BKn)

    def mean_over_heads(self, x_BNn: Tensor) -> Tensor:
        """Mean (B, n) over all query heads of the model, those of other ranks that share it included."""
        return self.mean_over_shares(x_BNn.mean(dim=1))

    def by_kv_head(self, x_BNn: Tensor) -> Tensor:
        """Mean (B, K, n) over the query heads that share a KV head."""
        return x_BNn.unflatten(1, (self.num_kv_heads, -1)).mean(dim=2)

    def over_heads(self, x_BNn: Tensor) -> Tensor:
        """Mean (B, 1, n) over all query heads of the model; (B, K, n) by KV head if slots have other tokens in each."""
        return self.mean_over_heads(x_BNn)[:, None] if self.alike else self.by_kv_head(x_BNn)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Temporary tokens that go through the model after a prompt: each chunk of the prompt after a request.

    Attributes:
        request: text before each chunk; none for a model without a tokenizer.
        chunk_tokens: most tokens of a chunk. It is shorter where the model's positions end.
        sinks: first tokens of the prompt that are among the keys by which a chunk is scored.
        weighs: whether scores are weighed. Policies of a kind with equal replays score a prompt alike.
    """

    request: str
    chunk_tokens: int
    sinks: int
    weighs: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamedHeads:
    """KV heads whose queries see a text's first tokens and the last ones alone, so that a prefill needs no others.

    Attributes:
        by_layer: whether each KV head of this rank does, in each layer.
        sinks: number of first tokens.
        recent: number of last tokens before the query's own.
    """

    by_layer: Sequence[Sequence[bool]]
    sinks: int
    recent: int


@dataclass(frozen=True, kw_only=True)
class StreamedShare:
    """The same of a model whose heads are not known: which ones stream is not told, but how many.

    Attributes:
        share: of all KV heads.
        sinks, recent: as of `StreamedHeads`.
    """

    share: float
    sinks: int
    recent: int


class LayerForm(Protocol):
    """How a cache stores its layers once given tokens have attended to them. Until then they are exact."""

    def store(self, layers: list[Any], number: int, *, room: int) -> bool:
        """Store a layer in this form, with room for `room` more tokens. Returns whether it is; else it stays exact."""

    def settle(self, layers: list[Any], *, room: int) -> None:
        """Store all layers in this form, at the end of a prompt or turn that was computed in chunks."""

    def complete(self, layers: list[Any], number: int, *, room: int) -> bool:
        """Store a layer that is still exact in this form before a generated token. Returns whether one was stored."""

    def forked(self, layers: list[Any]) -> None:
        """Called with the layers of a forked cache, which have this form, too."""


class Policy:
    """Base of all policies. A policy holds its options only; the state of a sequence is in the `LayerView`."""

    name: ClassVar[str | None] = None
    """Name on the command line, for a policy of this package: `class SnapKV(Scorer, name="snapkv")`."""

    retrieves: ClassVar[bool] = False
    """Whether it is a `Retriever`, which keeps all tokens and reads some."""

    narrows: ClassVar[bool] = False
    """Whether `narrow` may drop tokens."""

    keeps_ragged: ClassVar[bool] = False
    """Whether `keep` may keep other numbers of tokens in different KV heads."""

    chooses_alike: ClassVar[bool] = False
    """Whether `keep` keeps the same tokens in all KV heads of the model, if these have the same ones before."""

    merges_layers: ClassVar[bool] = False
    """Neighbouring layers share what they store, see `layer_form`."""

    replaces_budget: ClassVar[tuple[str, ...]] = ()
    """Options that say what it keeps in place of its budget, where they are given."""

    while_decoding: ClassVar[bool] = True
    """Whether it decides on generated tokens, too."""

    carries_generated: ClassVar[bool] = False
    """Whether a later turn's decision needs what `carry` returns for each generated token, if it decides on none.

    `carry` sees the shapes of keys and values alone then.
    """

    follows_marks: ClassVar[bool] = False
    """Whether it evicts what the model has marked, and needs a model that marks tokens."""

    decides_on_all: ClassVar[bool] = False
    """Whether `keep_in_all` decides on all layers after a prompt, by what `carry` returned for each."""

    cascades: ClassVar[bool] = False
    """Whether `keep_so_far` decides after each layer, in place of `keep_in_all` after all; with `decides_on_all`."""

    votes_over_heads: ClassVar[bool] = False
    """Whether what is kept depends on `LayerView.over_heads`."""

    compares_by_kv_head: ClassVar[bool] = False
    """Whether what is kept or fetched for a KV head depends on all query heads that share it."""

    needs_output_projection: ClassVar[bool] = False
    """Whether the policy asks for `Signals.projected_lengths`."""

    needs_keys: ClassVar[bool] = True
    """Whether the policy looks at keys, values or signals; without, the view has their shapes alone."""

    needs_attention_input: ClassVar[bool] = False
    """Whether the policy asks for `LayerView.input_BCD`."""

    needs_token_kinds: ClassVar[bool] = False
    """Whether the policy asks for `LayerView.new_kinds_BC`."""

    occurrence: int = 0
    """Number of policies of its class before it in a sequence."""

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        super().__init_subclass__()
        cls.name = name

    @property
    def label(self) -> str:
        """Its name on the command line, for messages; of a policy of a file that of its class."""
        return self.name or type(self).__name__

    @property
    def state_key(self) -> Hashable:
        """Key of what the runtime carries for this policy beside the slots of a layer."""
        return type(self), self.occurrence

    @property
    def queries_from(self) -> int | None:
        """First position in a row whose query counts in `Signals.next_queries`; None: the policy does not ask."""
        return None

    @property
    def last_queries(self) -> int | None:
        """Number of the last queries of a prompt by which the policy decides; 0: by keys and values alone.

        None: by those of all its tokens, or by what else is computed with them. Then all of them must be computed.
        """
        return None

    @property
    def replay(self) -> Replay | None:
        """The tokens that repeat a prompt, for a policy that then decides on all layers; None: it does not.

        Such a policy has `replay_score` and `keep_in_all`, and nothing is dropped before.
        """
        return None

    def layer_form(self, shapes: Sequence[Any], sees_all: Sequence[bool], numbers: Sequence[int]) -> LayerForm | None:
        """How a policy with `merges_layers` stores the layers of a model; None: no layers can be merged.

        Args:
            shapes: of each layer's keys and values.
            sees_all: whether each layer sees the whole text.
            numbers: of these layers in the model, others of which store no keys and values.
        """
        return None

    @property
    def reads(self) -> str | None:
        """The file or folder with what the policy knows of a model, whose content decides what it does; None: none."""
        return None

    @property
    def streams(self) -> bool:
        """Whether `streamed_heads` tells heads."""
        return False

    def streamed_heads(self, prompt_tokens: int) -> StreamedHeads | None:
        """The KV heads that keep the first and the last tokens alone of a padded prompt, if it `streams`."""
        return None

    def streamed_share(self, prompt_tokens: int, num_heads: int | None = None) -> StreamedShare | None:
        """How many KV heads that will be, for plans without the model, if it `streams`; None: it does not say.

        Args:
            num_heads: KV heads of all layers, if they are known, to which it rounds.

        Raises: ValueError: an option is missing.
        """
        return None

    def require_file(self) -> None:
        """Check that the policy was given the file that it needs for a model. Raises: ValueError."""

    def require(self, model: ModelFacts) -> None:
        """Check that the policy works with a model, and read the file that it has for it. Raises: ValueError."""

    @property
    def compensates(self) -> bool:
        """Whether the mean of what a KV head dropped stands for each dropped token; only with `keeps_ragged`."""
        return False

    def rests(self, layer: int, tokens_BK: Sequence[Sequence[int]], prompt_tokens: int) -> bool:
        """Whether there is nothing to do in a layer after a generated token; its keys then are not read.

        Args:
            tokens_BK: number of tokens that each row and KV head stores, the generated one among them.
            prompt_tokens: as in `LayerView`.
        """
        return False

    def drops_of(self, prompt_tokens: int) -> bool:
        """Whether `keep_in_all` may drop tokens of a padded prompt of this length; if not, it is not called."""
        return True

    def of_part(self, part: PromptPart) -> Self:
        """The policy for a rank that keeps a part of a prompt alone: every number of tokens is its share of it."""
        return self

    def no_room(self, prompt_tokens: int) -> str:
        """A sentence if its share of a padded prompt of this length has no room for other options; else "".

        A budget that is a number of tokens is checked where the policy is made.
        """
        return ""

    def layer_tokens(self, num_tokens: int, num_layers: int, before: Sequence[int]) -> list[int]:
        """Number of tokens of a chunk that each layer computes; ranks have to know it of each other's chunks.

        Args:
            num_tokens: length of the chunk.
            num_layers: number of layers.
            before: slots of earlier chunks, per layer.

        Raises:
            ValueError: the number depends on the content of the tokens.
        """
        return [num_tokens] * num_layers

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        """Upper bound of the slots that `keep` leaves in any layer for a text of any length. None: no bound."""
        return None

    def carry(self, view: LayerView) -> Tensor | None:
        """Values (B, K, n) that the runtime carries along with the slots, for a policy that accumulates."""
        return None

    def keep(self, view: LayerView) -> Tensor | None:
        """Slots to keep (B, K, m), or (B, 1, m) for all KV heads alike, ascending. None keeps all slots.

        Where padded rows keep different numbers, or heads do (`keeps_ragged`), m is the largest, and others have -1 in
        their first places, or slots of padding.
        """
        return None

    def tokens_after(self, view: LayerView) -> list[int] | None:
        """Number of tokens of each row that `keep` keeps, if it is known without its slots, for which a host waits."""
        return None

    def replay_score(self, view: LayerView) -> Tensor:
        """Score (B, K, n) of each token of a chunk of the prompt in one layer, by how its repetition attends to it.

        By default it is the highest probability that a query of the repetition gives the token.

        Args:
            view: the chunk's tokens. New tokens are those that repeat it, and probabilities are shares of their
                attention to the sinks, the chunk and each other. Rows come one by one, without padding.
        """
        return view.signals.highest().unflatten(1, (view.num_kv_heads, -1)).amax(dim=2)

    def keep_in_all(self, scores: Sequence[Tensor], prompt_tokens: int) -> Sequence[Tensor | None]:
        """Slots to keep in all layers, each as `keep` returns them, None for all its tokens.

        They are of the heads of all ranks that share the model.

        By default all tokens stay.

        Args:
            scores: of all tokens (B, K, n) by layer, minus infinity on padding: `replay_score`, or what `carry`
                returned. Layers with windows are left out.
            prompt_tokens: length of the padded prompt.
        """
        return [marked_slots(~scores_BKn.isneginf()) for scores_BKn in scores]

    def keep_so_far(self, scores: Sequence[Tensor], prompt_tokens: int, num_layers: int) -> Sequence[Tensor | None]:
        """As `keep_in_all`, after each layer of a prompt; what is dropped here is gone.

        Args:
            scores: of the layers so far, and in each of the tokens that are left.
            num_layers: number of layers that are decided on in the end.
        """
        raise NotImplementedError

    def narrow(self, view: LayerView) -> Tensor | None:
        """New tokens that deeper layers compute: indices (B, c), ascending, including the last token. None: all.

        Deeper layers neither compute nor store the others. Called during prefill only.
        """
        return None


def marked_slots(stays_BKn: Tensor) -> Tensor:
    """The slots that stay in each head, as `Policy.keep` returns them: -1 in the first places of those with fewer."""
    num_slots, most = stays_BKn.shape[-1], int(stays_BKn.sum(dim=-1).max())
    slots_n = torch.arange(num_slots, device=stays_BKn.device)
    return torch.where(stays_BKn, slots_n, -1).sort(dim=-1).values[..., num_slots - most :]


E = TypeVar("E", bound=Enum)


def require(rule_holds: bool, option: str, value: object, rule: str) -> None:
    """Raise a ValueError with policy.<option>, its value and the rule, unless the rule holds."""
    if not rule_holds:
        raise ValueError(f"policy.{option}={as_given(value)} {rule}")


def as_given(value: object) -> object:
    """A value as options give it: a member of an enum by its name."""
    return value.name if isinstance(value, Enum) else value


def require_least(options: object, prefix: str = "", **least: int) -> None:
    """Raise a ValueError for the first of these options, whose names get a prefix, that is below its least value."""
    for name, value in least.items():
        require(getattr(options, name) >= value, prefix + name, getattr(options, name), f"must be at least {value}")


def require_default(options: object, *names: str, given: bool = True, rule: str, prefix: str = "") -> None:
    """Raise a ValueError for the first of these options that is given although it has no effect.

    Args:
        options: a dataclass; an option that has its default counts as not given.
        given: whether others are given by which these have none.
        rule: why, and what to do; {usual} in it is the option's default.
        prefix: of the options' names, such as "scorer.".
    """
    for each in fields(options) if given else ():  # type: ignore[arg-type]
        value = getattr(options, each.name)
        told = "has no effect " + rule.format(usual=as_given(each.default))
        require(each.name not in names or value == each.default, prefix + each.name, value, told)


def nested_options(policy: Any, name: str, example: str) -> Any:
    """An option that has options: those of a dictionary in place of the policy's defaults.

    Raises:
        ValueError: it is no dictionary of such options; the message ends with the example.
    """
    value, [default] = getattr(policy, name), [each.default_factory for each in fields(policy) if each.name == name]
    assert callable(default), name
    if isinstance(value, type(usual := default())):
        return value
    known = [each.name for each in fields(usual)]
    if not isinstance(value, dict) or not set(value) <= set(known):
        raise ValueError(f"policy.{name}={value} must have {', '.join(known)} only, as in policy.{name}.{example}")
    return replace(usual, **value)


def choice(option: str, kind: type[E], value: E | str) -> E:
    """Member of `kind` that `value` is or names. Raises: ValueError that lists the names."""
    if isinstance(value, kind):
        return value
    require(value in kind.__members__, option, value, f"is not one of {', '.join(kind.__members__)}")
    return kind[str(value)]


Budget = int | float
"""Number of tokens if it is an integer, else a share of the prompt in (0, 1]."""


def check_budget(budget: Budget, option: str = "budget") -> None:
    """Check a budget. Raises: ValueError that names policy.<option>."""
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    rule_holds = is_number and (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1)
    rule = "must be a whole number of tokens of at least 1, or a share of the prompt in (0, 1]"
    require(rule_holds, option, budget, rule)


def budget_tokens(budget: Budget, prompt_tokens: int) -> int:
    """A budget as a number of tokens, at least 1."""
    return budget if isinstance(budget, int) else max(1, round(budget * prompt_tokens))


def staying(options: object, *names: str) -> str:
    """Those of these options, numbers of tokens that always stay, that are not 0, in words."""
    return " and ".join(f"policy.{name}={value}" for name in names if (value := getattr(options, name)))


def require_room(options: object, name: str, *, least: int, stays: str) -> None:
    """Check that a budget that is a number of tokens is at least what always stays.

    Args:
        options: a policy.
        name: of the option that is the budget.
        least: smallest budget with room for it.
        stays: what stays, in words.

    Raises:
        ValueError: it is smaller.
    """
    budget = getattr(options, name)
    rule = f"has no room for {stays}; use at least {least}"
    require(not isinstance(budget, int) or budget >= least, name, budget, rule)


def no_room(
    options: object,
    name: str,
    prompt_tokens: int,
    has_room: Callable[[int], bool],
    *,
    stays: str,
    then: str = "of which as many stay as fit",
) -> str:
    """The sentence for a budget that is a share of the prompt, and too small for what always stays; else "".

    Args:
        options, name, stays: as of `require_room`.
        has_room: whether a number of tokens has room for it.
        then: what is done if not.
    """
    budget = getattr(options, name)
    tokens = budget_tokens(budget, prompt_tokens)
    if isinstance(budget, int) or tokens == prompt_tokens or has_room(tokens):
        return ""
    return f"policy.{name}={budget} is {tokens:,} of {prompt_tokens:,} tokens, with no room for {stays}, {then}"
