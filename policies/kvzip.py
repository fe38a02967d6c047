"""KVzip (Kim et al., NeurIPS 2025, arXiv 2505.23416): keep what the model needs to repeat the prompt.

After the prompt its chunks go through the model once more, each after a request to repeat the context, as tokens that
leave no trace. A token's score is the largest attention probability that it receives from them, among the sinks, its
chunk and these tokens. One threshold over all layers and heads decides. No question has been seen, so a prompt that was
cut back once serves any of them. It takes about as long again as the prompt did. Later tokens are all kept.

KVzip+ (Jegou and Jeblick, 2026, arXiv 2601.07891) weighs each probability by what its token adds to the residual stream
of the one that attends, relative to the latter: the length of the value after the output projection, over that of the
hidden state that attention is given there.

During the repetition a server's rank that decodes does nothing else, and all keys and values of the prompt are stored
until then. The repetition stands at the positions after the prompt, so a prompt has to leave some of the model's: those
of the request and one more, and chunks are as long as what is left. A prompt within the budget is not repeated. In a
conversation the first turn is cut back, and later ones are kept. KVzip+ (`plus`) needs what CriticalKV needs of a
model, and that the hidden states can be seen.
"""

# Legend: B batch, K kv heads, n stored slots, X all slots of all layers and heads.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.base import Replay
from policies.budgeted import Budgeted
from policies.kept_slots import best_first, first_slots
from policies.layer_view import LayerView
from policies.options import Budget, budget_tokens, check_budget, require_least


@dataclass(kw_only=True)
class KVzip(Budgeted, name="kvzip"):
    """Score: largest attention probability from what repeats the prompt, over the query heads of a KV head.

    Attributes:
        budget: tokens to keep per layer and KV head on average: a number, or a share of the prompt.
        sinks: first tokens that always stay, and that the tokens that repeat a chunk see besides it.
        recent: last tokens of the prompt that always stay.
        chunk_tokens: most tokens of the prompt that are repeated at a time.
        plus: weigh probabilities by lengths of projected values and of hidden states (KVzip+).
    """

    keeps_ragged: ClassVar[bool] = True
    while_decoding: ClassVar[bool] = False
    compares_by_kv_head: ClassVar[bool] = True
    request: ClassVar[str] = "\n\nRepeat the previous context:"

    budget: Budget = 1024
    sinks: int = 4
    recent: int = 0
    chunk_tokens: int = 2000
    plus: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget)
        require_least(self, sinks=0, recent=0, chunk_tokens=1)
        self.require_room()

    @property
    def last_queries(self) -> int:
        return 0  # those of the repeated prompt are computed for it

    @property
    def replay(self) -> Replay:
        return Replay(request=self.request, chunk_tokens=self.chunk_tokens, sinks=self.sinks, weighs=self.plus)

    @property
    def needs_attention_input(self) -> bool:  # type: ignore[override]
        return self.plus

    @property
    def needs_output_projection(self) -> bool:  # type: ignore[override]
        return self.plus

    def replay_score(self, view: LayerView) -> Tensor:
        if not self.plus:
            return super().replay_score(view)
        assert view.input_BCD is not None, "it is there for a policy with needs_attention_input"
        wide = torch.promote_types(view.input_BCD.dtype, torch.float32)
        lengths_BC = view.input_BCD.to(wide).norm(dim=-1).clamp_min(torch.finfo(wide).tiny)
        highest_BNn = view.signals.highest(1 / lengths_BC) * view.signals.projected_lengths(2)
        return highest_BNn.unflatten(1, (view.num_kv_heads, -1)).amax(dim=2)

    def drops_of(self, prompt_tokens: int) -> bool:
        return prompt_tokens > budget_tokens(self.budget, prompt_tokens)

    def keep_in_all(self, scores: Sequence[Tensor], prompt_tokens: int) -> list[Tensor]:
        m, n = budget_tokens(self.budget, prompt_tokens), scores[0].shape[-1]
        sinks = min(self.sinks, m)
        recent = min(self.recent, m - sinks)
        ordered = [best_first(scores_BKn, sinks=sinks, recent=recent) for scores_BKn in scores]
        kept: list[list[list[int]]] = [[] for _ in scores]
        heads = [scores_BKn.shape[1] for scores_BKn in scores]
        tokens_B: list[int] = (~scores[0][:, 0].isneginf()).sum(dim=-1).tolist()
        for row, num_tokens in enumerate(tokens_B):
            best_X = torch.cat([best_BKn[row].flatten() for best_BKn, _ in ordered])
            first_X = best_X.sort(descending=True, stable=True).indices[: sum(heads) * min(m, num_tokens)]
            counts = torch.bincount(first_X // n, minlength=sum(heads)).split(heads)
            for of_layer, counts_K in zip(kept, counts, strict=True):
                of_layer.append(counts_K.tolist())
        return [
            first_slots(slots_BKn, kept_BK, [[tokens] * num_heads for tokens in tokens_B])
            for (_, slots_BKn), kept_BK, num_heads in zip(ordered, kept, heads, strict=True)
        ]
