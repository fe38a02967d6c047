"""Refusals of kinds of layers and positions that a model has, most of them under policies."""

from __future__ import annotations

from runahead.features.refused.row import ALL_KEYS, MARKED, NOT_ITSELF, Refused

REENCODED = "{1}, so its positions cannot be re-encoded"
OTHER_POLICY = "use another policy, such as snapkv"

ROWS = (
    # layers that do not see the token itself
    Refused(
        ("several stages", "passes"),
        "{1} do not see the token itself, or read what later ones stored in the pass before (LCKV), and in a chain of "
        "{0} stages layers see all tokens up to this one, whose keys and values are sent once",
        "use one stage",
    ),
    *(
        Refused((fact, "passes"), NOT_ITSELF, remedy)
        for fact, remedy in (
            ("prefill.chunk_tokens", "leave it out"),
            ("prefill.row_tokens", "leave it out"),
            ("prefill.attention=xattention", ALL_KEYS),
            ("cache.bits", "use cache.bits=null"),
            ("generation.speculate", "use generation.speculate=none"),
            ("reuse of prefixes", "leave the tree out (serve.prefix_cache_bytes=0)"),
            ("policy=prompt_cache", "give prompts without schemas"),
            ("a conversation", "give each prompt as a whole"),
            ("a policy", "use policy=full"),
        )
    ),
    # a policy and a model
    Refused(
        ("a policy", "states alone"),
        "{1} stores no keys and values, of which {0} would keep or read fewer",
        "use policy=full",
    ),
    Refused(
        ("cache.bits", "states alone"),
        "{1} stores no keys and values, which {0} would quantise",
        "use cache.bits=null",
    ),
    Refused(
        ("a policy that narrows", "states"),
        "policy {0} drops tokens between layers, and the states of {1} are of all tokens",
        "use a policy that only evicts, such as snapkv",
    ),
    Refused(
        ("a policy that looks ahead", "states"),
        "policy {0} predicts queries from the input of the layer before the next attention, and between them are {1}",
        "use policy.ahead=false",
    ),
    Refused(
        ("a policy that repeats the prompt", "states"),
        "policy {0} scores tokens by how the model repeats the prompt, and {1} hold states that would take it in twice",
        OTHER_POLICY,
    ),
    Refused(
        ("a retrieving policy", "ALiBi"),
        "{1} adds a bias to its attention by distance (ALiBi), and policy {0} finds tokens by products of queries and "
        "keys, which lack it",
        "use a policy that evicts, such as snapkv",
    ),
    Refused(
        ("a policy that narrows", "ALiBi"),
        "{1} adds a bias to its attention by distance (ALiBi), and policy {0} drops tokens between layers, of which "
        "ranks do not tell each other the positions of those that are left",
        "use a policy that only evicts, such as snapkv",
    ),
    Refused(
        ("unequal heads, compensated", "ALiBi"),
        "{1} adds a bias to its attention by distance (ALiBi), and what stands for tokens that policy {0} drops is at "
        "no distance",
        "use policy.compensate=false",
    ),
    Refused(
        ("a policy that follows marks", "no marks"),
        "policy {0} evicts the tokens that a model marks, and this one ({1}) marks none",
        OTHER_POLICY,
    ),
    Refused(
        ("a policy that follows no marks", "marks"),
        MARKED.replace("{0}", "policy {0}"),
        "use policy=dms or policy=full",
    ),
    Refused(("policy.positions=reencoded", "marks"), MARKED, "use policy.positions=original"),
    *(
        row
        for option, remedy in (
            ("policy.clamped=true", "use policy.clamped=false"),
            ("policy.positions=reencoded", "use policy.positions=original"),
        )
        for row in (
            Refused(
                (option, "shared KV layers"),
                "{1} read the keys of other layers, which with {0} are stored unrotated, so that each of them would "
                "have to rotate them by its own angles",
                remedy,
            ),
            Refused((option, "positions that cannot be re-encoded"), REENCODED, remedy),
        )
    ),
    Refused(
        ("a policy that narrows, retrieves or merges layers", "shared KV layers"),
        "{1} read what other layers store, and policy {0} decides by the queries of one layer what is computed, "
        "fetched or merged of it",
        "use a policy that only evicts, such as snapkv",
    ),
    Refused(
        ("a policy that compares by KV head", "KV heads that ranks copy"),
        "policy {0} compares what all query heads of a KV head attend to, and with {model.num_shards} ranks that "
        "share the {model.config.num_key_value_heads} KV heads of model {model.name} these are on different ranks",
        "use at most ranks.tensor={model.config.num_key_value_heads}, or another policy",
    ),
    Refused(
        ("a policy that turns queries", "rotations unknown"),
        "{1}, but policy {0} turns queries to later positions",
        OTHER_POLICY,
    ),
    Refused(
        ("a policy that needs output projections", "output projections unknown"),
        "{1}, but policy {0} weighs values after them",
        OTHER_POLICY,
    ),
    Refused(
        ("a policy that needs attention inputs", "attention inputs unknown"),
        "{1}, but policy {0} scores tokens by these",
        OTHER_POLICY,
    ),
    Refused(
        ("a policy that looks ahead", "queries that cannot be predicted"),
        "{1}, so queries cannot be predicted a layer ahead",
        "use policy.ahead=false",
    ),
    Refused(
        ("a policy that narrows", "scaled queries"),
        "{1} scales queries by numbers of tokens that each layer counts, and policy {0} drops tokens between layers",
        "use a policy that only evicts, such as snapkv",
    ),
    Refused(
        ("a policy that narrows", "windows"),
        "policy {0} drops tokens between layers, but layers of model {model.name} look at windows of the text as it is",
        "use a policy that only evicts, such as snapkv",
    ),
    Refused(
        ("a policy that merges layers", "no layers to merge"),
        "policy {0} merges neighbouring layers that see the whole text, and {1} has none among its layers with "
        "attention from policy.start_share on",
        "use a smaller policy.start_share, or another policy",
    ),
)
