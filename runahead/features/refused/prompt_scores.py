"""Refusals of what needs a score of each token of a prompt: log-probabilities and events."""

from __future__ import annotations

from runahead.features.refused.row import ALL_KEYS, Refused

ROWS = (
    # log-probabilities of prompts
    Refused(
        ("echo with logprobs", "prefill.speculative"),
        "{1} computes some tokens of a prompt alone, so that {0} has nothing to score the others by",
        "use prefill.speculative=none",
    ),
    Refused(
        ("echo with logprobs", "decode other than last on several stages"),
        "{0} has each stage score its tokens of a prompt that one stage goes on with, and with {1} several may",
        "use decode=last",
    ),
    Refused(
        ("echo with logprobs", "a policy that narrows"),
        "policy {1} leaves tokens of a prompt out of deeper layers, so that {0} has nothing to score them by",
        "use one that only evicts, such as snapkv",
    ),
    # blocks that end where a prompt surprises the model
    Refused(
        ("policy.events.by=surprise", "prefill.attention=xattention"),
        "{1} chooses by all queries of a block, so that a token's surprise would depend on tokens after it",
        ALL_KEYS,
    ),
    Refused(
        ("policy.events.by=surprise", "a server", "several stages"),
        "{0} asks all stages how a prompt surprises them before the last one decodes, and those of {1} go on to others",
        "use policy.events.by=size, or one stage",
    ),
    *(
        Refused(
            (other, "policy.events.by=surprise"),
            "{0} leaves tokens of a prompt uncomputed, so that nothing tells {1} how they surprise the model",
            f"use policy.events.by=size, or {remedy}",
        )
        for other, remedy in (
            ("prefill.speculative", "prefill.speculative=none"),
            ("reuse of prefixes", "no reuse"),
            ("policy=prompt_cache", "no reuse"),
            ("a policy of earlier ranks that narrows", "policy.ranks.others=full"),
        )
    ),
    Refused(
        ("policy.events.by=surprise", "a sequence"),
        "{0} ends blocks of all tokens of a text, of which {1} may drop some",
        "use the policy that retrieves alone",
    ),
    Refused(
        ("policy.events.refine", "ranks.tensor"),
        "{0} compares the keys of all KV heads, of which with {1} each rank has some",
        "use policy.events.refine=none, or leave ranks.tensor out",
    ),
)
