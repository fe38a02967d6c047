"""Refusals where something else decodes than what computed a prompt: another stage, transformers, another engine."""

from __future__ import annotations

from runahead.features.refused.row import CHAIN, MARKED, NO_SHARES, OTHERS_KV, Refused

ON_ONE_RANK = "{0}: prefill for other engines needs all keys and values on one rank"
AS_THEY_ARE = "set policy=full, decode=last, ranks.tensor=1"
ALL_ON_ONE_RANK = "{0} has all keys and values as they were computed, on one rank"

ROWS = (
    # serve.decode_ranks
    Refused(
        ("serve.decode_ranks", "prefill other than kv_runahead"),
        "{1} does not go with serve.decode_ranks=1, where one stage decodes and the others compute prompts",
        "use prefill=kv_runahead",
    ),
    Refused(
        ("serve.decode_ranks", "prefill.speculative"),
        "{1} answers batch after batch, and with serve.decode_ranks=1 one stage decodes while others compute prompts",
        "leave one of them out",
    ),
    Refused(
        ("serve.decode_ranks", "decode other than last"),
        "{1} does not go with serve.decode_ranks=1, where one stage decodes and the others compute prompts",
        "use decode=last",
    ),
    Refused(
        ("serve.decode_ranks", "one stage"),
        "serve.decode_ranks=1 needs a second stage, which computes the prompts",
        "start more ranks",
    ),
    # a cache of transformers
    Refused(("a DynamicCache", "a policy"), ALL_ON_ONE_RANK + ", and {1} may leave some out", "use policy=full"),
    Refused(
        ("a DynamicCache", "prefill.speculative"),
        ALL_ON_ONE_RANK + ", and {1} leaves some out",
        "use prefill.speculative=none",
    ),
    Refused(("a DynamicCache", "cache.bits"), ALL_ON_ONE_RANK + ", not with {1}", "use cache.bits=null"),
    Refused(
        ("a DynamicCache", "policy=prompt_cache"),
        ALL_ON_ONE_RANK + " at positions without gaps, which prompts of {1} may have",
        "give token ids",
    ),
    Refused(
        ("a DynamicCache", "decode=sharded"),
        ALL_ON_ONE_RANK + ", and with {1} each has a part",
        "use decode=last or decode=auto",
    ),
    Refused(("a DynamicCache", "ranks.tensor"), ALL_ON_ONE_RANK + ", and with {1} each has some heads", NO_SHARES),
    Refused(("a DynamicCache", "shared KV layers"), OTHERS_KV, "let Runahead answer"),
    Refused(("a DynamicCache", "marks"), MARKED, "let Runahead answer"),
    Refused(
        ("a DynamicCache", "states"),
        "{1} hold states, which are not taken into {0} or from it",
        "let Runahead answer",
    ),
    Refused(
        ("a DynamicCache", "angles by length"),
        "{1} rotates keys by angles that depend on the length of the text, which {0} does not know",
        "let Runahead answer",
    ),
    # serve.handover
    Refused(("serve.handover", "a policy"), ON_ONE_RANK + ", of which {1} drops or leaves out some", AS_THEY_ARE),
    Refused(
        ("serve.handover", "prefill.speculative"),
        ON_ONE_RANK + ", of which {1} leaves some out",
        "use prefill.speculative=none",
    ),
    Refused(("serve.handover", "cache.bits"), ON_ONE_RANK + ", as they are, not with {1}", "use cache.bits=null"),
    Refused(
        ("serve.handover", "cache.tier_bits"),
        ON_ONE_RANK + ", as they are, and with {1} a prefix that comes back is not",
        "use cache.tier_bits=null",
    ),
    Refused(
        ("serve.handover", "prefill.wire_bits"),
        ON_ONE_RANK + ", as they are, not with {1}",
        "use prefill.wire_bits=null",
    ),
    Refused(
        ("serve.handover", "policy=prompt_cache"),
        ON_ONE_RANK + ", and those of segments have positions that other engines do not know",
        AS_THEY_ARE,
    ),
    Refused(
        ("serve.handover", "decode other than last on several stages"),
        ON_ONE_RANK + ", and with {1} several may have a part",
        AS_THEY_ARE,
    ),
    Refused(("serve.handover", "ranks.tensor"), ON_ONE_RANK + ", and with {1} each has some heads", AS_THEY_ARE),
    Refused(("serve.handover", "prefill=tsp or zigzag"), ON_ONE_RANK + " as soon as each layer is computed", CHAIN),
    Refused(("serve.handover", "shared KV layers"), OTHERS_KV, "use a model whose layers have their own"),
    Refused(("serve.handover", "marks"), MARKED, "use a model without marks"),
    Refused(
        ("serve.handover", "states"),
        "{1} hold states, which {0} does not hand over",
        "use a model whose layers have keys and values alone",
    ),
    Refused(
        ("serve.handover", "angles by length"),
        "{1} rotates keys by angles that depend on the length of the text, which readers of {0} do not know",
        "use a model whose angles do not",
    ),
)
