"""RazorAttention (Tang et al., ICLR 2025, arXiv 2407.15891): heads that retrieve keep all, others the first and last.

Retrieval heads are those that look for earlier copies of a token, found once per model on random tokens that come
again. Every other head takes each token that it dropped for the mean of all of these, by one slot that attention counts
as often. That is exact if the dropped keys and values are equal.

It takes the heads that attend most to what followed an earlier copy of their token (`induction_share`, 14%) or to the
copy itself (`echo_share`, 1%). Shares are of the model's KV heads, and a KV head has the largest score of its query
heads; the paper does not say how groups are treated. The mean gives tokens that are not equal too little weight.
`recent` is a number of tokens, or a share of the prompt and then at least `least_recent` tokens: 4,000 as published, so
that shorter prompts are kept whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from policies.base import ModelFacts
from policies.head_scores import HeadScores
from policies.layer_view import PromptPart
from policies.options import Budget, budget_tokens, check_budget, require, require_default, require_least
from policies.streaming_heads import StreamingHeads, best_heads, share_of_others


@dataclass(kw_only=True)
class RazorAttention(StreamingHeads, name="razor_attention"):
    """Keep all tokens in heads that look for copies; in others the first and last ones, and the mean of the rest.

    A KV head looks for copies as much as any of its query heads does.

    Attributes:
        heads: file of `python -m policies.retrieval_heads` for this model.
        induction_share: share of the model's KV heads that retrieve, since they attend to what followed a copy.
        echo_share: share of those that retrieve, since they attend to the copy itself.
        sinks: first tokens that other heads keep.
        recent: last tokens that other heads keep: a number, or a share of the prompt.
        least_recent: least number of them, whatever the share.
        compensate: let one slot stand for what a head dropped.
    """

    made_by: ClassVar[str] = "file of python -m policies.retrieval_heads model=... out=..."

    induction_share: float = 0.14
    echo_share: float = 0.01
    sinks: int = 4
    recent: Budget = 0.2
    least_recent: int = 4000
    compensate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("induction_share", "echo_share"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must be a share of the heads in [0, 1]")
        check_budget(self.recent, "recent")
        require_least(self, sinks=0, least_recent=0)
        rule = f"with policy.recent={self.recent}, which is a number; leave one of them out, or make that a share"
        require_default(self, "least_recent", given=isinstance(self.recent, int), rule=rule)
        if self.heads is not None:
            HeadScores.load(self.heads)  # finds mistakes in the file before the model is loaded

    @property
    def compensates(self) -> bool:
        return self.compensate

    def found_in(self, heads: str, model: ModelFacts) -> list[list[bool]]:
        induction, echo = HeadScores.load(heads, model.fingerprint).by_kv_head(model)
        by_layer = zip(best_heads(induction, self.induction_share), best_heads(echo, self.echo_share), strict=True)
        return [[a or b for a, b in zip(*layer, strict=True)] for layer in by_layer]

    def expected_share(self, num_heads: int | None) -> float:
        # Or more, where a head is of both kinds.
        return share_of_others([self.induction_share, self.echo_share], num_heads)

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        other.recent, other.least_recent = part.budget_of(self.recent), part.share_of(self.least_recent)
        return other

    def first_and_last(self, prompt_tokens: int) -> tuple[int, int]:
        recent = budget_tokens(self.recent, prompt_tokens)
        return self.sinks, recent if isinstance(self.recent, int) else max(self.least_recent, recent)
