"""State of a layer as policies see it: stored keys and values, positions, and signals of the newest queries."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, D input dim, H key dim,
# V value dim.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from policies.options import Budget


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
