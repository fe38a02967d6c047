"""Refusals of prefill.attention, where queries see fewer tokens."""

from __future__ import annotations

from runahead.features.refused.row import ALL_KEYS, CHAIN, MARKED, Refused

ROWS = (
    # prefill.attention=xattention
    Refused(
        ("prefill.attention=xattention", "prefill.speculative"),
        "{0} chooses among blocks of all tokens, and {1} leaves gaps between those that are computed",
        "leave one of them out",
    ),
    Refused(
        ("prefill.attention=xattention", "prefill.wire_bits"),
        "{0} chooses by keys as they are, the same on all ranks, and {1} rounds those that travel",
        "leave one of them out",
    ),
    Refused(
        ("prefill.attention=xattention", "prefill=pipeline"),
        "{1} splits a prompt into chunks of its own, and {0} chooses among whole blocks of it",
        CHAIN,
    ),
    Refused(
        ("prefill.attention=xattention", "prefill=tsp or zigzag"),
        "{1} splits a prompt by a rule of its own, and {0} chooses among whole blocks of it",
        CHAIN,
    ),
    Refused(
        ("prefill.attention=xattention", "reuse of prefixes"),
        "{0} chooses among blocks from a prompt's first token on, and with {1} those that are computed begin anywhere",
        "use prefill.attention=causal, or leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("prefill.attention=xattention", "policy=prompt_cache"),
        "{0} chooses among blocks from a prompt's first token on, and with {1} those that are computed begin anywhere",
        ALL_KEYS,
    ),
    Refused(
        ("prefill.attention=xattention", "prefill.chunk_tokens", "cache policies or cache.bits"),
        "{0} chooses among blocks of all tokens, and with {1} and {2} later pieces may see what was kept of them",
        "leave prefill.chunk_tokens out",
    ),
    Refused(
        ("prefill.attention=xattention", "decode=sharded", "a policy that drops tokens"),
        "with {1} a rank's keys count for {2} by what queries see of all ranks', and with {0} they see some alone",
        "use decode=last",
    ),
    Refused(
        ("prefill.attention=xattention", "a policy that narrows"),
        "{0} chooses among blocks of all tokens, and policy {1} leaves some out of deeper layers",
        "use a policy that only evicts, such as snapkv",
    ),
    *(
        Refused(
            ("prefill.attention=xattention", option),
            "{1} needs keys that are not rotated, and {0} chooses by means of rotated ones",
            remedy,
        )
        for option, remedy in (
            ("policy.positions=reencoded", "use policy.positions=original"),
            ("policy.clamped=true", "use policy.clamped=false"),
        )
    ),
    Refused(
        ("prefill.attention=xattention", "echo with logprobs"),
        "{0} chooses by all queries of a block, so that a token's log-probability would depend on tokens after it",
        ALL_KEYS,
    ),
    Refused(
        ("prefill.attention=xattention", "ALiBi"),
        "{1} adds a bias to its attention by distance (ALiBi), which the mean keys lack by which {0} chooses",
        ALL_KEYS,
    ),
    Refused(("prefill.attention=xattention", "marks"), MARKED, ALL_KEYS),
    # prefill.attention=streaming_heads
    Refused(
        ("prefill.attention=streaming_heads", "prefill.speculative"),
        "{0} counts tokens, and {1} leaves gaps between those that are computed",
        "leave one of them out",
    ),
    Refused(
        ("prefill.attention=streaming_heads", "prefill=tsp or zigzag"),
        "{0} is for the keys and values of a chain, and with {1} all ranks exchange theirs",
        CHAIN,
    ),
    Refused(
        ("prefill.attention=streaming_heads", "reuse of prefixes"),
        "with {0} a rank lacks keys and values of the heads that stream, and {1} needs all of them",
        "use prefill.attention=causal, or leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("prefill.attention=streaming_heads", "prefill.chunk_tokens"),
        "{0} lets each query see its own last tokens, and with {1} a policy drops them after each piece",
        "leave prefill.chunk_tokens out",
    ),
    Refused(
        ("prefill.attention=streaming_heads", "policy.positions=reencoded"),
        "{1} numbers tokens by what a layer keeps, and with {0} KV heads see different numbers of them",
        "use policy.positions=original",
    ),
    Refused(("prefill.attention=streaming_heads", "marks"), MARKED, ALL_KEYS),
    Refused(
        ("prefill.attention=streaming_heads", "a policy of earlier ranks that narrows"),
        "{0} lets queries see tokens by their places in the whole prompt, and policy {1} leaves some out of deeper "
        "layers",
        "use policy=duo_attention on all ranks",
    ),
    Refused(
        ("prefill.attention=streaming_heads", "no policy of streaming heads alone"),
        "{0} takes the heads that stream from a cache policy that runs alone and drops what they do not see",
        "use policy=duo_attention policy.heads=<folder>",
    ),
)
