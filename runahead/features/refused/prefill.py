"""Refusals of the ways of prefill, and of prompts in chunks or blocks of rows."""

from __future__ import annotations

from runahead.features.refused.row import CHAIN, MARKED, OTHERS_KV, Refused

LAYERS_APART = "{0} leaves each rank the keys and values of its own layers, and {1} "

ROWS = (
    Refused(
        ("option ranks.tensor", "prefill=tensor"),
        "prefill=tensor makes all ranks one stage, whatever {0} says",
        "leave ranks.tensor out, or use prefill=single",
    ),
    Refused(
        ("prefill=tensor", "several stages"),
        "prefill=tensor is one stage of all ranks, and these are {1} stages",
        "arrange them as one, with ranks.tensor=<number of ranks>, or use prefill=single",
    ),
    Refused(
        ("prefill=tsp or zigzag", "a policy"),
        "{1} needs prefill=kv_runahead or prefill=single",
        "{0} keeps all keys and values",
    ),
    Refused(
        ("prefill=tsp or zigzag", "policy=prompt_cache"),
        "{1} needs prefill=kv_runahead or prefill=single",
        "{0} keeps all keys and values",
    ),
    Refused(("prefill=tsp or zigzag", "shared KV layers"), OTHERS_KV, CHAIN),
    Refused(("prefill=tsp or zigzag", "marks"), MARKED, CHAIN),
    Refused(
        ("prefill=tsp or zigzag", "states"),
        "{1} hold states that each rank needs of all tokens before its own, and with {0} all ranks compute a layer at "
        "the same time",
        CHAIN,
    ),
    Refused(
        ("prefill=zigzag", "several stages", "own positions"),
        "{2} counts positions itself, and prefill=zigzag gives ranks tokens that are not contiguous",
        "use prefill=kv_runahead or prefill=tsp",
    ),
    Refused(("prefill=pipeline", "a policy"), LAYERS_APART + "is made for ranks with all layers", CHAIN),
    Refused(
        ("prefill=pipeline", "policy=prompt_cache"),
        LAYERS_APART + "has segments of all layers",
        CHAIN,
    ),
    Refused(("prefill=pipeline", "cache.bits"), LAYERS_APART + "is made for ranks with all layers", CHAIN),
    Refused(
        ("prefill=pipeline", "decode=sharded"),
        "{0} leaves each rank the keys and values of its own layers, with which all ranks decode one after the other",
        "use decode=auto, or prefill=kv_runahead",
    ),
    Refused(
        ("prefill=pipeline", "generation.speculate"), LAYERS_APART + "verifies drafts on ranks with all layers", CHAIN
    ),
    Refused(("prefill=pipeline", "reuse of prefixes"), LAYERS_APART + "stores those of all layers", CHAIN),
    Refused(
        ("prefill=pipeline", "a server"),
        "{0} is for launch/infer.py: a server decodes on ranks with all layers",
        CHAIN,
    ),
    Refused(
        ("prefill=pipeline", "a conversation"),
        "{0} computes one prompt and its answer, and a conversation goes on after them on ranks with all layers",
        CHAIN,
    ),
    Refused(("prefill=pipeline", "a DynamicCache"), LAYERS_APART + "has those of all layers", CHAIN),
    Refused(
        ("prefill=pipeline", "ranks.tensor"),
        "{0} shares a model out by layers, and {1} by heads",
        "leave one of them out",
    ),
    Refused(
        ("prefill=pipeline", "prefill.row_tokens"),
        "{0} computes a chunk at a time, as {1} would",
        "use prefill.chunk_tokens",
    ),
    Refused(
        ("prefill=pipeline", "partition=ratios or table"),
        "{1} gives each rank a chunk of the prompt, and with {0} each has some of the layers and all chunks",
        "use partition=auto or even, or prefill.chunk_tokens",
    ),
    Refused(
        ("prefill=pipeline", "model.weights=int8"),
        "{0} compares the logits of all stages with the whole model's, and {1} rounds those of the stages",
        "use prefill=kv_runahead, or model.weights=full",
    ),
    Refused(
        ("prefill=pipeline", "prefill.speculative"),
        "{0} leaves each rank some of the layers, and the draft of {1} is computed by ranks with all of them",
        CHAIN,
    ),
    Refused(
        ("prefill=pipeline", "prefill.wire_bits"),
        "{1} is for the keys and values of a chain, and with {0} these stay where they are computed",
        CHAIN,
    ),
    Refused(("prefill=pipeline", "shared KV layers"), OTHERS_KV, CHAIN),
    Refused(("prefill=pipeline", "marks"), MARKED, CHAIN),
    Refused(
        ("prefill=pipeline", "states"),
        "{1} hold states, which {0} does not hand from chunk to chunk",
        CHAIN,
    ),
    Refused(
        ("prefill=pipeline", "angles by length"),
        "{1} rotates by angles that depend on the length of the text, and with {0} no rank can compute a text anew as "
        "it grows",
        CHAIN,
    ),
    Refused(
        ("prefill=pipeline", "no list of layers"),
        "{0}: {1} has no list of layers",
        CHAIN,
    ),
    Refused(
        ("prefill.chunk_tokens", "a prompt in several chunks"),
        "{0} is for a prompt that one rank computes alone",
        "use prefill=single, or leave it out: several ranks have a chunk each",
    ),
    Refused(
        ("prefill.row_tokens", "prefill=tsp or zigzag"),
        "{0} completes a layer's keys and values with its last block of rows, and with {1} all ranks wait for these",
        CHAIN,
    ),
    Refused(
        ("prefill.row_tokens", "prefill.chunk_tokens"),
        "{0} and {1} both bound the tokens that are computed at a time",
        "leave one of them out",
    ),
    Refused(
        ("prefill.row_tokens", "a policy that narrows"),
        "{1} chooses in each layer among all tokens of a chunk, of which {0} computes some at a time",
        "leave one of them out",
    ),
    Refused(
        ("prefill.row_tokens", "policy.recompute"),
        "{1} chooses in a layer among the tokens of the whole prompt, of which {0} computes some at a time",
        "leave one of them out",
    ),
    Refused(("prefill.row_tokens", "marks"), MARKED, "leave it out"),
    Refused(
        ("prefill.row_tokens", "no list of layers"),
        "{0}: {1} has no list of layers",
        "leave it out",
    ),
)
