"""Interface of a cache policy: it looks at what a layer has stored and returns the indices of the tokens to keep.

The runtime does the rest: storage, positions, padding, attention probabilities, copies and accounting. Slots hold
tokens in the order of their positions; padding is on the left of each row. A policy keeps the same number of slots in
every row and KV head, so that they form one dense tensor; a row with fewer tokens keeps some of its padding. Only a
policy that declares it (`keeps_ragged`) may keep different numbers of tokens in different heads.
"""

# Legend: B batch, C new tokens, D input dim, K kv heads, n stored slots, m kept slots.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from policies.layer_view import LayerView, Phase, PromptPart


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
