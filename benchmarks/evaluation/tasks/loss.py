"""Losses of the user's text: perplexity, and the loss of a passage that occurs a second time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.metrics import COPY_NLL, PERPLEXITY
from benchmarks.evaluation.options import EvaluateRun
from benchmarks.evaluation.tasks.answering import prefilled
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
from policies.layer_view import Phase
from runahead.config import Positions
from runahead.conversation import Conversation


class Perplexity(Task):
    """Perplexity of a text that is read in chunks, with the policy applied to the cache from the first token on.

    A token sees what the policy kept of earlier chunks, and its own chunk up to itself. A share as budget refers to
    the text read so far, so that it holds at any time.
    """

    metric = PERPLEXITY
    needs_text = True

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options = options = run.perplexity
        self.cases = [{"sample": sample} for sample in range(options.samples)]
        self.settings = {"tokens": options.tokens, "chunk": options.chunk}
        material.require_text(
            "perplexity",
            options.tokens * options.samples,
            f"fewer than perplexity.samples={options.samples} x perplexity.tokens={options.tokens}",
        )
        self._material = material
        of_text = options.tokens - len(material.prefix)
        self._texts = [
            material.prefix + material.text_ids[sample * of_text : (sample + 1) * of_text]
            for sample in range(options.samples)
        ]

    def check(self, contender: Contender, num_layers: int) -> None:
        """Raise a ValueError for too few positions: re-encoded ones only need to cover kept tokens and a chunk."""
        options, policies = self._options, contender.policies
        if contender.prefill.streams:
            raise ValueError(
                f"perplexity reads a text in chunks, and {contender.name} computes whole prompts; use copy"
            )
        stay = policies.most_slots(num_layers, Phase.prefill) if policies.positions is Positions.reencoded else None
        num_tokens = options.tokens if stay is None else min(options.tokens, stay + options.chunk)
        self._material.require_positions(
            f"perplexity.tokens={options.tokens} under {contender.name}",
            num_tokens + PROBE_TOKENS,
            "use fewer, or policies of a fixed size such as {name:streaming_llm,budget:1024,positions:reencoded}",
        )

    def cost(self, case: Case) -> float:
        return 2.0 * self._options.tokens + COST_OF_NEW * PROBE_TOKENS

    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        ids, size = self._texts[case["sample"]], self._options.chunk
        conversation = Conversation(runtime.model, contender.policies, length=len(ids))
        total, number, prefill_s = 0.0, 0, 0.0
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]
            each = nll_S(conversation, chunk)
            total, number = total + each.sum().item(), number + len(each)
            prefill_s += feed_timed(conversation, chunk)
        kv, per_token_s = KVUse.measured(conversation), probe_tpot_s(conversation)
        return Outcome(
            score=math.exp(total / number),
            seen_share=kv.seen_share(conversation),
            weight=number,
            kv=kv,
            ttft_s=prefill_s,
            tpot_s=per_token_s,
            details={"nll": total / number},
        )


class CopyTask(Task):
    """Copy-NLL: the loss of a passage that occurs a second time, after filler text.

    Perplexity hardly depends on what a policy has dropped, since most of a text is predicted from the few tokens
    before. A model with the full KV cache only needs to look up the next token of the passage. The policy chose what to
    keep after the passage and the filler. Both losses can be measured: that of the passage, and that of the text which
    really follows. One prefill serves all policies that have no effect on it.
    """

    metric = COPY_NLL
    needs_text = True

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options = options = run.copy
        self.cases = [{"sample": sample} for sample in range(options.samples)]
        read = options.passage + options.filler
        num_tokens = read + options.following
        material.require_text("copy", num_tokens, "a shorter copy.passage or copy.filler")
        material.require_positions(
            "copy (twice copy.passage, and copy.filler)",
            len(material.prefix) + read + max(options.passage, options.following, PROBE_TOKENS),
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
        # Runs with other numbers of samples share those that lie in the same places.
        self.settings = {name: value for name, value in asdict(options).items() if name != "samples"} | {"apart": apart}
        windows = [ids[start : start + num_tokens] for start in range(0, apart * options.samples or 1, apart or 1)]
        self._contexts = [material.prefix + window[:read] for window in windows]
        self._passages = [window[: options.passage] for window in windows]
        self._following = [window[read:] for window in windows]

    def cost(self, case: Case) -> float:
        options = self._options
        num_new = PROBE_TOKENS if options.timed else 0
        return 2.0 * options.passage + options.filler + options.following + COST_OF_NEW * num_new

    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        [(_, outcome)] = self.run_all(runtime, [contender], case)
        return outcome

    def run_all(
        self, runtime: Runtime, contenders: Sequence[Contender], case: Case
    ) -> Iterator[tuple[Contender, Outcome]]:
        sample = case["sample"]
        context, passage, following = self._contexts[sample], self._passages[sample], self._following[sample]
        length = len(context) + max(len(passage), len(following))
        for contender, conversation, prompt_s in prefilled(runtime, contenders, context, length):
            kv = KVUse.measured(conversation)
            retrieves = contender.policies.retriever is not None
            # What is fed in one piece attends to everything.
            copied = conversation.fork() if retrieves else conversation
            details: dict[str, Any] = {"nll": nll_S(copied, passage, follows=retrieves).mean().item()}
            if following:
                after = conversation.fork() if retrieves else conversation
                details["following_nll"] = nll_S(after, following, follows=retrieves).mean().item()
            details["hit_mass"] = kv.hit_mass(copied)
            seen_share = kv.seen_share(copied)
            yield (
                contender,
                Outcome(
                    score=details["nll"],
                    seen_share=seen_share,
                    weight=len(passage),
                    kv=kv,
                    ttft_s=prompt_s,
                    tpot_s=probe_tpot_s(conversation) if self._options.timed else None,
                    details=details,
                ),
            )
