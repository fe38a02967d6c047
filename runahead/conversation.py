"""Turns that follow each other on one KV cache: feed tokens, let the model answer, feed more.

Tokens that a policy dropped after one turn are missing in the next. So this serves for a chat with a thinned cache, for
a long text in chunks that each see what was kept of the text before, and for a question to a context of which tokens
were chosen without it.
"""

# Legend: B batch, C new tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from runahead.attention.base import LayerAttention
from runahead.cache.kept import KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.config import GenerationOptions
from runahead.decoding.decode import Decoded, Row, attention_over, decode
from runahead.model.model import Model
from runahead.thinning.attention import KeptAttention
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.steps import PolicySteps


class Conversation:
    """The KV cache of what was said so far, as far as policies keep it, in one process.

    Args:
        model: the model.
        policies: at work after each layer in every turn, as on the rank that decodes; by default all is kept.
        length: tokens that the conversation will have, for models whose RoPE depends on that.

    Raises:
        ValueError: the policies cannot work on this model.
    """

    def __init__(self, model: Model, policies: RankPolicies | None = None, *, length: int | None = None) -> None:
        policies = policies or RankPolicies()
        policies.check(model)
        self.model, self.policies = model, policies.of(is_last=True)
        self._while_decoding = policies.while_decoding
        self._empty_cache = policies.cache
        self._retrieves = policies.retriever is not None
        self._rotaries = policies.rotaries(model)
        self.pads: list[int] = []
        """Left padding of each row."""
        self.rows: list[list[int]] = []
        """Token ids of each row, without padding, those that were generated among them."""
        self.cache: KeptCache | None = None
        self.num_tokens = 0
        """Tokens per row that went through the cache, padding included."""
        self.logits_BV: Tensor | None = None
        """Of the last token that was fed; None after an answer, whose last token is fed with the next turn."""
        self._length = length or 0
        self._unfed_B1: Tensor | None = None
        self._is_long: bool | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for what is kept."""
        return 0 if self.cache is None else self.cache.num_bytes

    @property
    def full_kv_bytes(self) -> int:
        """Bytes of keys and values of all tokens so far."""
        return self.num_tokens * sum(shape.bytes_per_token(len(self.pads)) for shape in self.model.kv_shapes)

    @property
    def kept_tokens(self) -> list[int]:
        """Tokens per layer that are kept, of the longest row."""
        return [] if self.cache is None else [layer.num_slots - min(layer.pads) for layer in self.cache.layers]

    @torch.inference_mode()
    def feed(
        self, ids_BC: Tensor, *, pads: list[int] | None = None, all_logits: bool = False, cut_back: bool = True
    ) -> Tensor:
        """Go on with these tokens.

        Args:
            ids_BC: token ids; one row is the same for all.
            pads: with the first tokens: left padding of each row.
            all_logits: of each of these tokens rather than of the last one. With policies that narrow the others are
                those of `peek`, a second forward, since what is dropped on the way has no logits.
            cut_back: False to keep all of them for now: for the chunks of a prompt before the last one, where policies
                are to see it whole.

        Returns:
            logits (B, V), or (B, C, V), in at least float32.

        Raises:
            ValueError: no or unknown tokens, another number of rows, padding later on, or more tokens than the model
                has positions.
        """
        pads = self._checked_pads(ids_BC, pads)
        if self.cache is None:
            self.pads, self.rows = pads, [[] for _ in pads]
            self.cache = self._empty_cache(self.model, batch=len(pads))
        ids_BC = ids_BC.to(self.model.device).expand(len(self.pads), -1)
        given = ids_BC.shape[1]
        for row, ids, pad in zip(self.rows, ids_BC.tolist(), pads, strict=True):
            row += ids[pad:]
        if self._unfed_B1 is not None:
            ids_BC, self._unfed_B1 = torch.cat([self._unfed_B1, ids_BC], dim=1), None
        every = None
        if all_logits and ids_BC.shape[1] > 1 and any(policy.narrows for policy in self.policies):
            every = self._unthinned()._forward(ids_BC, all_logits=True, cut_back=False)
        logits = self._forward(ids_BC, all_logits=all_logits and every is None, cut_back=cut_back)
        self.logits_BV = logits[:, -1] if logits.ndim == 3 else logits
        if not all_logits:
            return self.logits_BV
        if every is not None:
            every[:, -1] = self.logits_BV
            logits = every
        return logits[:, -given:]

    def peek(self, ids_BC: Tensor) -> Tensor:
        """Logits (B, C, V) after each of these tokens if they came next. The conversation stays as it is.

        Every token sees what is kept of earlier turns and all of this one before it. Under a policy that retrieves it
        sees what is retrieved for it, as tokens do that are generated.

        Raises:
            ValueError: as `feed`.
        """
        if self.cache is not None and self._retrieves:
            return self.fork().follow(ids_BC)
        return self._unthinned().feed(ids_BC, all_logits=True)

    @torch.inference_mode()
    def follow(self, ids_BC: Tensor) -> Tensor:
        """Go on with these tokens one at a time, as if the model had generated them.

        Returns:
            logits (B, C, V) after each of them, in at least float32.

        Raises:
            ValueError: as `feed`, or there is nothing that they could follow.
        """
        if self.cache is None:
            raise ValueError("there is nothing that tokens could follow; feed some first")
        self._checked_pads(ids_BC, None)
        ids_BC = ids_BC.to(self.model.device).expand(len(self.pads), -1)
        given = ids_BC.shape[1]
        for row, ids in zip(self.rows, ids_BC.tolist(), strict=True):
            row += ids
        if self._unfed_B1 is not None:
            ids_BC, self._unfed_B1 = torch.cat([self._unfed_B1, ids_BC], dim=1), None
        attention_at = self._attention_at()
        parts = []
        for ids_B1 in ids_BC.split(1, dim=1):
            attention = attention_at(self.num_tokens)
            parts.append(self.model.forward(ids_B1, attention, start=self.num_tokens, pads=self.pads))
            self.num_tokens += 1
        self.logits_BV = parts[-1]
        return torch.stack(parts[-given:], dim=1)

    def generate(self, options: GenerationOptions | None = None) -> Decoded:
        """Let the model go on, greedily by default. A row that ended waits for the others.

        Raises:
            ValueError: nothing to answer, or more tokens than the model has positions.
        """
        options = options or GenerationOptions()
        if self.cache is None or self.logits_BV is None:
            raise ValueError("there is nothing to answer; feed tokens first")
        for end in (self.num_tokens, self.num_tokens + options.max_new_tokens - 1):
            self._check_length(end, end, self.pads)
        rows = [Row(self.model, ids, options, seed=options.seed + index) for index, ids in enumerate(self.rows)]
        decoded = decode(
            self.model,
            rows,
            self.logits_BV,
            self._attention_at(),
            num_tokens=self.num_tokens,
            pads=self.pads,
            on_step=lambda tokens: None,
        )
        self.num_tokens += decoded.num_steps - 1
        self.rows = [row.prompt + row.new_ids for row in rows]
        self.logits_BV = None
        self._unfed_B1 = torch.tensor([[row.new_ids[-1]] for row in rows], device=self.model.device)
        return decoded

    def fork(self) -> Conversation:
        """A conversation that goes on from here on its own. Until it does, both share memory."""
        other = copy(self)
        other.rows = [list(row) for row in self.rows]
        other.cache = None if self.cache is None else self.cache.fork()
        return other

    def _attention_at(self) -> Callable[[int], LayerAttention]:
        """Attention of single tokens, by their index."""
        assert self.cache is not None
        return attention_over(
            self.cache,
            self._while_decoding,
            pads=self.pads,
            prompt_tokens=self.num_tokens,
            num_layers=self.model.num_layers,
        )

    def _unthinned(self) -> Conversation:
        """A fork where nothing more is dropped."""
        other = self.fork()
        other.policies, other._while_decoding = [], []
        return other

    def _forward(self, ids_BC: Tensor, *, all_logits: bool, cut_back: bool) -> Tensor:
        """Logits of a turn, whose tokens are stored as the policies say."""
        assert self.cache is not None
        end = self.num_tokens + ids_BC.shape[1]
        tokens = NewTokens(self.num_tokens, self.pads)
        steps = PolicySteps(
            self.policies,
            tokens,
            prompt_tokens=end,
            num_layers=self.model.num_layers,
            cuts_back=cut_back,
            cache=self.cache,
        )
        logits = self.model.forward(
            ids_BC,
            KeptAttention(self.cache, steps),
            start=self.num_tokens,
            pads=self.pads,
            length=max(end, self._length),
            tokens=tokens if any(policy.narrows for policy in self.policies) else None,
            all_logits=all_logits,
        )
        self.num_tokens = end
        if ids_BC.shape[1] > 1:  # single tokens use the room that is left
            self.cache.free(room=0)
        return logits

    def _checked_pads(self, ids_BC: Tensor, pads: list[int] | None) -> list[int]:
        """How many of the new tokens are padding, by row. Raises: ValueError."""
        batch, num_new = ids_BC.shape
        if num_new == 0:
            raise ValueError("no tokens were given; a turn has at least one")
        if int(ids_BC.min()) < 0 or int(ids_BC.max()) >= self.model.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.model.vocab_size - 1}")
        if self.cache is None:
            pads = [0] * batch if pads is None else pads
            if len(pads) != batch or not all(0 <= pad < num_new for pad in pads):
                raise ValueError(f"pads={pads} must give the padding of {batch} rows, below {num_new} tokens")
        else:
            if pads is not None and any(pads):
                raise ValueError(f"pads={pads}: only the first turn may be padded; feed rows of equal length")
            if batch not in (1, len(self.pads)):
                raise ValueError(f"{batch} rows were given but the conversation has {len(self.pads)}")
            if len({pad + len(row) for pad, row in zip(self.pads, self.rows, strict=True)}) > 1:
                raise ValueError(
                    "rows ended their answers after different numbers of tokens, so they cannot go on together; use "
                    "one row, or generation.ignore_eos=true"
                )
            pads = [0] * len(self.pads)
        end = self.num_tokens + (self._unfed_B1 is not None) + num_new
        self._check_length(max(end, self._length), end, self.pads or pads)
        return pads

    def _check_length(self, length: int, end: int, pads: list[int]) -> None:
        """What the model allows of `end` tokens, padding included, of a text that RoPE takes for `length` tokens.

        Raises:
            ValueError: more than it has positions, rows of different lengths, or another RoPE than before.
        """
        model = self.model
        num_positions = end - min(pads)
        if self._rotaries is not None and self.cache is not None:  # of what is kept and what is new
            num_positions = max(self.cache.slots_by_layer) + end - self.num_tokens
        if model.max_positions is not None and num_positions > model.max_positions:
            raise ValueError(
                f"the conversation would have {num_positions} tokens, which exceeds the {model.max_positions} "
                f"positions of model {model.name}; shorten it"
            )
        if len(set(pads)) > 1 and model.uneven_limit is not None and end > model.uneven_limit:
            raise ValueError(
                f"model {model.name} ({model.config.model_type}) counts positions from the start of the longest row, "
                "so rows of different lengths cannot run at once; use one row"
            )
        if model.length_threshold is not None:
            is_long = length > model.length_threshold
            if self._is_long is not None and is_long != self._is_long:
                raise ValueError(
                    f"the conversation grows past {model.length_threshold} tokens, where this model's RoPE changes; "
                    "give its length from the start, or keep it shorter"
                )
            self._is_long = is_long
