"""Losses after a prompt of which some tokens were computed: of a passage that comes again, and of what follows."""

# Legend: S tokens.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from benchmarks.evaluation.tasks.base import nll_S
from benchmarks.studies.speculative_prefill.ways import LAYERS, policies_of, prefill_of, text_ids
from runahead import Model, Ranks, even
from runahead.cache.attention import CausalAttention
from runahead.conversation import Conversation
from runahead.prefill.kv_runahead import KVRunahead
from runahead.prompt_draft.drafting import PromptDraft
from runahead.reuse.cache import reusing
from runahead.reuse.reused_kv import ReusedKV

PASSAGE = 64
"""Tokens at a text's beginning that come again, and those that follow it."""


@dataclass(frozen=True)
class Losses:
    """Losses of one model in one text, in nats per token.

    Attributes:
        length: tokens of a prompt.
        samples: prompts, spread over the text.
    """

    model: Model
    ranks: Ranks
    text: str
    share: float
    length: int
    samples: int

    @cached_property
    def _windows(self) -> list[list[int]]:
        num_tokens, ids = self.length + PASSAGE, text_ids(self.model, self.text)
        apart = min(num_tokens, (len(ids) - num_tokens) // max(1, self.samples - 1))
        if apart < 1:
            raise ValueError(f"--text has {len(ids):,} tokens, and more are needed; give a longer one")
        return [ids[apart * number : apart * number + num_tokens] for number in range(self.samples)]

    def of(self, way: str) -> Iterator[dict[str, float]]:
        """Both losses of each sample."""
        for number, window in enumerate(self._windows):
            prompt, passage, following = window[: self.length], window[:PASSAGE], window[self.length :]
            if way.startswith(LAYERS):
                at = self._draft(way).chosen([prompt]).prompts[0].new_positions
                losses = [self._after(prompt, at, new) for new in (passage, following)]
            else:
                conversation = Conversation(self.model, policies_of(way, self.share), length=self.length + PASSAGE)
                conversation.feed(torch.tensor([prompt]))
                losses = [float(nll_S(conversation, new).mean()) for new in (passage, following)]
            yield {"sample": number, "copy_nll": losses[0], "following_nll": losses[1]}

    def _draft(self, way: str) -> PromptDraft:
        return PromptDraft(self.model, None, self.ranks, KVRunahead(), prefill_of(way, self.share), even)

    def _after(self, prompt: Sequence[int], at: Sequence[int], new: Sequence[int]) -> float:
        """Loss of new tokens after those of a prompt that were computed, at their positions."""
        positions = [*at, *range(len(prompt), len(prompt) + len(new))]
        ids_1S = torch.tensor([[*(prompt[each] for each in at), *new]])
        reused = ReusedKV(parts=[], positions_BS=torch.tensor([positions]), ends=[positions[-1] + 1])
        cache = reusing(self.model.empty_cache(len(positions)).slabs, reused)
        attention = CausalAttention(cache, start=0, pads=[0])
        wanted = range(len(at) - 1, len(positions) - 1)
        logits_1SV = self.model.forward(ids_1S, attention, start=0, pads=[0], logits_of=wanted)
        return float(F.cross_entropy(logits_1SV[0], torch.tensor(list(new))))
