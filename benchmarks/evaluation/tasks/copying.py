"""Copy-NLL: the loss of a passage that occurs a second time, after filler text.

Perplexity hardly depends on what a policy has dropped, since most of a text is predicted from the few tokens before. A
model with the full KV cache only needs to look up the next token of the passage.
"""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.options import EvaluateRun
from benchmarks.evaluation.tasks.base import (
    COST_OF_NEW,
    PROBE_TOKENS,
    Case,
    KVUse,
    Outcome,
    Runtime,
    Task,
    feed_timed,
    nll_S,
    probe_tpot_s,
)
from runahead.conversation import Conversation


class Copying(Task):
    """Loss of a repeated passage, where the policy chose what to keep after the passage and the filler."""

    metric = "copy-NLL, nats"
    lower_is_better = True
    needs_text = True

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options = options = run.copy
        self.cases = [{"sample": sample} for sample in range(options.samples)]
        self.settings = asdict(options)  # the number of samples determines their positions
        num_tokens = options.passage + options.filler
        material.require_text("copy", num_tokens, "a shorter copy.passage or copy.filler")
        material.require_positions(
            "copy (twice copy.passage, and copy.filler)",
            len(material.prefix) + num_tokens + max(options.passage, PROBE_TOKENS),
        )
        ids, last = material.text_ids, len(material.text_ids) - num_tokens
        # Samples are spread over the text; in a short text they overlap.
        apart = min(num_tokens, last // max(1, options.samples - 1))
        if options.samples > 1 and apart < options.passage:
            material.require_text(
                "copy",
                num_tokens + options.passage * (options.samples - 1),
                f"fewer than copy.samples={options.samples}",
            )
        windows = [ids[start : start + num_tokens] for start in range(0, apart * options.samples or 1, apart or 1)]
        self._contexts = [material.prefix + window for window in windows]
        self._passages = [window[: options.passage] for window in windows]

    def cost(self, case: Case) -> float:
        return 2.0 * self._options.passage + self._options.filler + COST_OF_NEW * PROBE_TOKENS

    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        context, passage = self._contexts[case["sample"]], self._passages[case["sample"]]
        conversation = Conversation(runtime.model, contender.policies, length=len(context) + len(passage))
        ttft_s = feed_timed(conversation, context)
        kv = KVUse.of(conversation)
        nll = nll_S(conversation, passage).mean().item()
        return Outcome(score=nll, weight=len(passage), kv=kv, ttft_s=ttft_s, tpot_s=probe_tpot_s(conversation))
