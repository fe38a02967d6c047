"""Refusals of generation.speculate, and of the policies that make drafts."""

from __future__ import annotations

from runahead.features.refused.row import MARKED, OTHERS_KV, Refused

ROWS = (
    Refused(
        ("a server", "generation.speculate=policy or model"),
        "{1} is for launch/infer.py, as a server's drafter would need keys and values of every row",
        "use generation.speculate=lookup",
    ),
    Refused(
        ("generation.speculate=policy", "cache policies"),
        "{0} drafts from what a policy keeps of all tokens, and does not go with cache policies, which drop some or "
        "retrieve some themselves",
        "use generation.speculate=lookup",
    ),
    Refused(
        ("generation.speculate", "a retrieving policy"),
        "{0} does not go with policy {1}, which takes each token into its index before the next one asks, and none "
        "out of it",
        "let it draft, with generation.speculate=policy and draft.policy={{name:...}}, and use policy=full",
    ),
    Refused(
        ("generation.speculate", "a policy that merges layers"),
        "{0} does not go with policy {1}, which merges tokens of two layers, from which none can be taken back",
        "use another policy, such as snapkv",
    ),
    Refused(
        ("generation.speculate", "a policy that decides on each token", "shared KV layers"),
        "{0} does not go with policy {1}: it decides on each token before the next one is stored, but {2} read the "
        "keys and values of a whole draft",
        "use a policy that decides after the prompt alone, such as snapkv",
    ),
    Refused(
        ("generation.speculate", "cache.bits", "shared KV layers"),
        "{0} does not go with {1}: tokens are quantised before the next one is stored, but {2} read the keys and "
        "values of a whole draft",
        "use cache.bits=null or generation.speculate=none",
    ),
    Refused(
        ("generation.speculate=policy", "cache.bits"),
        "{0} drafts from keys and values as they are, and does not go with {1}",
        "use generation.speculate=lookup",
    ),
    Refused(
        ("generation.speculate=policy", "decode=sharded"),
        "{0} does not go with decode=sharded, since a drafting policy chooses among all tokens of a text on one rank",
        "use decode=last, or generation.speculate=lookup",
    ),
    Refused(
        ("generation.speculate", "policy=prompt_cache", "decode=sharded"),
        "{0} does not go with {1} and decode=sharded, where a rank has reused segments beside its part of a draft",
        "use decode=last",
    ),
    Refused(
        ("generation.speculate", "reuse of prefixes", "decode=sharded", "several stages"),
        "{0} does not go with {1} and decode=sharded, where a rank has stored tokens beside its part of a draft",
        "use decode=last",
    ),
    Refused(
        ("generation.speculate", "a conversation", "decode=sharded"),
        "{0} does not go with a conversation whose text is stored by several ranks, each of which takes whole turns",
        "use generation.speculate=none, or a conversation on one stage",
    ),
    *(
        Refused(
            ("generation.speculate", kept, "decode=sharded"),
            "{0} does not go with {1} and decode=sharded, where what a rank keeps depends on the drafted tokens of "
            "others",
            "use decode=last",
        )
        for kept in ("cache policies", "cache.bits")
    ),
    Refused(
        ("generation.speculate=lookup or model", "draft.speculate=model"),
        "{1} drafts for a policy, and not for {0}: look-up needs no drafts, and draft.model names one model alone",
        "use generation.speculate=policy, draft.speculate=lookup, or Draft(by=..., first=...) from Python",
    ),
    Refused(
        ("a conversation of several rows", "generation.speculate"),
        "{1} does not go with a conversation of {0} rows, which stay in step: with drafts each has its own pace",
        "use one row, or a conversation for each",
    ),
    Refused(("generation.speculate", "marks"), MARKED, "use generation.speculate=none"),
    Refused(
        ("generation.speculate", "angles by length, of each token"),
        "{0} does not go with model {model.name}, whose rotary angles depend on the length of the text, which is "
        "another one for each token of a draft",
        "use generation.speculate=none",
    ),
    Refused(
        ("generation.speculate=policy", "angles by length"),
        "{0} does not go with model {model.name}, whose rotary angles depend on the length of the text: drafts are "
        "made from keys that are computed anew as it grows",
        "use generation.speculate=lookup",
    ),
    *(
        Refused(
            ("generation.speculate=policy", reuse),
            "generation.speculate=policy does not go with reused prefixes and segments, since policies choose among "
            "the computed tokens",
            "use generation.speculate=lookup",
        )
        for reuse in ("reuse of prefixes", "policy=prompt_cache")
    ),
    Refused(
        ("generation.speculate=policy", "shared KV layers"),
        OTHERS_KV,
        "use generation.speculate=lookup",
    ),
    Refused(
        ("drafts by a retrieving policy after others",),
        "a drafting policy {0} retrieves from what others keep, which would be a second copy of these tokens",
        "use it alone",
    ),
    Refused(
        ("drafts by policy.late or policy.pool",),
        "a drafting policy {0} chooses late or drops tokens, which suits memory that is far: drafts read what verifies",
        "leave policy.late and policy.pool.bytes out",
    ),
    Refused(
        ("drafts by policy.events.by=surprise",),
        "a drafting policy {0} asks how each token surprises the model, which is not computed for drafts",
        "use policy.events.by=size",
    ),
    Refused(
        ("drafts by policy.clamped=true",),
        "a drafting policy {0} clamps distances, for which keys are stored unrotated",
        "use another, such as quest",
    ),
    Refused(
        ("drafts by a policy that narrows",),
        "a drafting policy {0} drops tokens between layers",
        "use one that only drops from the cache, such as snapkv",
    ),
    Refused(
        ("drafts by a policy that decides on layers together",),
        "a drafting policy {0} decides on several layers together, once the prompt is there",
        "use another, such as snapkv",
    ),
    Refused(
        ("drafts by policy.positions=reencoded",),
        "a drafting policy {0} re-encodes positions, and drafts are made from keys that are rotated in the text",
        "use policy.positions=original",
    ),
)
