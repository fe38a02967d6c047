"""The table of combinations that are refused, and the one check of it.

A row names facts that do not go together, says why, and what to do instead. Programs check their options before ranks
start, and with the policies and the model's config before its weights are read; `Engine` and `Conversation` check with
the model. The table of docs/combinations.md and the tests of all rows are made from this one. Missing inputs, ranges
and files are checked where they are read, and options of one policy in policies/.
"""

from __future__ import annotations

from dataclasses import dataclass

from runahead.features.combination import Combination, that_hold
from runahead.features.facts import Setup

OTHERS_KV = "{1} read the keys and values of other layers, which {0} does not support"
MARKED = "{1} marks tokens that it evicts (DMS, DMC), which {0} does not support"
LATER_KV = (
    "{1} read the keys and values of later ones, in passes over a whole prompt (LCKV), which {0} does not support"
)
REENCODED = "{1}, so its positions cannot be re-encoded"
CHAIN = "use prefill=kv_runahead or prefill=single"
ON_ONE_RANK = "{0}: prefill for other engines needs all keys and values on one rank"
AS_THEY_ARE = "set policy=full, decode=last, ranks.tensor=1"
OTHER_POLICY = "use another policy, such as snapkv"
LAYERS_APART = "{0} leaves each rank the keys and values of its own layers, and {1} "
ALL_ON_ONE_RANK = "{0} has all keys and values as they were computed, on one rank"
ALL_TOKENS = "use prefill.speculative=none"
ALL_KEYS = "use prefill.attention=causal"
NO_SHARES = "leave ranks.tensor out, and use another prefill than tensor"


@dataclass(frozen=True)
class Refused(Combination):
    """Facts that do not go together.

    Attributes:
        why: with {0} for what the first fact is called, and so on, {model} and {retriever}.
        remedy: in the same form.
    """

    why: str
    remedy: str

    @property
    def sentence(self) -> str:
        return "; ".join(part for part in (self.why, self.remedy) if part)


def check(setup: Setup) -> None:
    """Check that what is known of a run goes together. Raises: ValueError, with the first row that refuses it."""
    for _, message in that_hold(REFUSED, setup):
        raise ValueError(message)


REFUSED = (
    # prefill
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
    # prefill.speculative
    Refused(
        ("prefill.speculative", "states"),
        "{1} hold states of all tokens before, and {0} computes some of a prompt's tokens alone",
        "use prefill.speculative=none",
    ),
    Refused(("prefill.speculative", "marks"), MARKED, ALL_TOKENS),
    Refused(("prefill.speculative", "passes"), LATER_KV, ALL_TOKENS),
    Refused(
        ("prefill.speculative", "prefill=tsp or zigzag"),
        "{0} gives the tokens that are computed positions with gaps, which {1} does not know",
        CHAIN,
    ),
    *(
        Refused(
            ("prefill.speculative", fact),
            f"{{0}} gives the tokens that are computed positions with gaps, and {{1}} {what}",
            ALL_TOKENS,
        )
        for fact, what in (
            ("own positions", "counts positions on its own"),
            ("angles by length", "rotates by angles that depend on the length of the text"),
        )
    ),
    Refused(
        ("prefill.speculative=layers", "no list of layers"),
        "{0}: {1} has no list of layers",
        "use prefill.speculative=model",
    ),
    Refused(("prefill.speculative=layers", "shared KV layers"), OTHERS_KV, "use prefill.speculative=model"),
    Refused(
        ("prefill.speculative=layers", "model.weights=int8"),
        "{0} makes a model of the first layers' weights, which {1} has in 8 bits",
        "use prefill.speculative=model or model.weights=full",
    ),
    Refused(("prefill.speculative", "ranks.tensor"), "{0} has the whole draft on each rank, not with {1}", NO_SHARES),
    Refused(("prefill.speculative", "prefill=tensor"), "{0} has the whole draft on each rank, not with {1}", NO_SHARES),
    Refused(
        ("prefill.speculative", "policy=prompt_cache"),
        "{0} chooses among the tokens of a prompt, of which {1} has some computed already",
        "leave one of them out",
    ),
    Refused(
        ("prefill.speculative", "a policy that drops tokens"),
        "{1} may drop tokens, which are counted by their places, and with {0} there are gaps between these",
        "use one of them, or a policy that retrieves, such as quest",
    ),
    *(
        Refused(
            ("prefill.speculative", "a retrieving policy", fact),
            f"policy {{1}} does not go with {{2}}, which {what}, and {{0}}, which leaves gaps between positions",
            "use policy=full",
        )
        for fact, what in (
            ("windows", "has layers with windows"),
            ("ALiBi", "adds a bias to its attention by distance (ALiBi)"),
        )
    ),
    Refused(
        ("prefill.speculative", "policy.clamped=true"),
        "{1} counts distances to the tokens that are kept, and {0} leaves gaps between these",
        "use policy.clamped=false",
    ),
    Refused(
        ("prefill.speculative", "policy.positions=reencoded"),
        "{1} numbers tokens without gaps, and {0} keeps them at their positions",
        "use policy.positions=original",
    ),
    Refused(
        ("prefill.speculative", "decode=sharded", "cache policies or cache.bits"),
        "decode=sharded with {2} lets each rank choose among its own tokens, and with {0} there are gaps between these",
        "use decode=last",
    ),
    Refused(
        ("prefill.speculative", "generation.speculate", "decode=sharded"),
        "{1} does not go with {0} and decode=sharded, where ranks have parts of a draft at positions with gaps",
        "use decode=last",
    ),
    Refused(
        ("prefill.speculative", "generation.speculate=policy"),
        "{1} chooses among all tokens of a prompt, of which {0} computes some alone",
        "use generation.speculate=lookup",
    ),
    Refused(
        ("prefill.speculative=model", "a server"),
        "{0} is for launch/infer.py, as a server has no draft.model",
        "use prefill.speculative=layers",
    ),
    Refused(
        ("prefill.wire_bits", "prefill=tsp or zigzag"),
        "{0} is for the keys and values of a chain, and with {1} all ranks exchange theirs",
        CHAIN,
    ),
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
    # policy=prompt_cache
    *(
        Refused(
            (f"prompt.{name}", "policy=prompt_cache"),
            f"prompt.{name} does not go with policy=prompt_cache",
            "give a prompt in PML as prompt.file",
        )
        for name in ("question", "ids_file", "random_tokens")
    ),
    Refused(
        ("prompt.chat", "policy=prompt_cache"),
        "prompt.chat does not go with policy=prompt_cache",
        "<system>, <user> and <assistant> are messages",
    ),
    Refused(
        ("option policy.positions", "policy=prompt_cache"),
        "{0} does not go with policy=prompt_cache, whose positions are fixed",
        "",
    ),
    Refused(
        ("a server", "policy=prompt_cache", "decode other than last"),
        "policy=prompt_cache needs decode=last in a server, not {2}",
        "",
    ),
    Refused(
        ("policy=prompt_cache", "policy.clamped=true"),
        "{1} needs keys that are not rotated, and {0} stores them rotated to their positions",
        "use policy.clamped=false",
    ),
    Refused(
        ("policy=prompt_cache", "a policy that drops tokens"),
        "{1} may drop tokens, which are counted by their places, and prompts of {0} may have gaps between these",
        "use one that retrieves, such as quest or clusterkv",
    ),
    Refused(("policy=prompt_cache", "marks"), MARKED, "give prompts without schemas"),
    Refused(
        ("policy=prompt_cache", "states"),
        "segments of {0} are encoded apart from each other, and {1} hold states of all tokens before",
        "give prompts without schemas",
    ),
    Refused(
        ("policy=prompt_cache", "angles by length"),
        "{1} rotates by angles that depend on the length of the text, so keys and values cannot be reused in other "
        "prompts",
        "use policy=full",
    ),
    Refused(
        ("policy=prompt_cache", "own positions"),
        "{1} counts positions on its own, so keys and values cannot be reused in other prompts",
        "use policy=full",
    ),
    *(
        Refused(
            ("policy=prompt_cache", "a retrieving policy", fact),
            f"policy {{1}} does not go with segments of {{2}}, which {what}: their prompts may have gaps between "
            "positions",
            "use no cache policy",
        )
        for fact, what in (
            ("windows", "has layers with windows"),
            ("ALiBi", "adds a bias to its attention by distance (ALiBi)"),
        )
    ),
    Refused(
        ("policy.recompute", "prefill.chunk_tokens"),
        "policy.recompute chooses in a layer among the tokens of the whole prompt, of which {1} computes a part",
        "leave one of them out",
    ),
    Refused(("policy.recompute", "shared KV layers"), OTHERS_KV, "use policy.link_tokens"),
    Refused(
        ("policy.recompute", "no list of layers"),
        "policy.recompute: {1} has no list of layers",
        "use policy.link_tokens",
    ),
    # decode=sharded
    Refused(
        ("decode=sharded", "prefill=tsp or zigzag"),
        "decode=sharded needs prefill=kv_runahead: {1} collects all keys and values on the last rank",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.positions=reencoded"),
        "decode=sharded keeps tokens of a text on several ranks, and policy.positions=reencoded counts all that are "
        "kept",
        "use policy.positions=original or decode=last",
    ),
    Refused(
        ("decode=sharded", "a policy that needs the whole prompt"),
        "decode=sharded leaves each rank the tokens of its own chunk, and this policy has to see those of all chunks "
        "at once",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.clamped=true"),
        "decode=sharded keeps tokens of a text on several ranks, and policy.clamped=true counts the slots of one",
        "use policy.clamped=false or decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.events.by=surprise"),
        "decode=sharded keeps tokens of a text on several ranks, and the events of {1} may reach over two of these",
        "use policy.events.by=size or decode=last",
    ),
    Refused(
        ("decode=sharded", "policy=prompt_cache", "cache policies or cache.bits"),
        "decode=sharded with {2} lets each rank choose among its own tokens, and reused segments are tokens of no rank",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "several stages", "reuse of prefixes", "cache policies or cache.bits"),
        "decode=sharded with {3} lets each rank choose among the tokens that it computes, and those of a stored prefix "
        "are computed by none",
        "use decode=last",
    ),
    Refused(
        ("decode=sharded", "policy.recompute"),
        "decode=sharded keeps what a rank computes, and with policy.recompute layers compute fewer tokens one by one",
        "use decode=last or policy.link_tokens",
    ),
    Refused(("decode=sharded", "marks"), MARKED, "use decode=last"),
    Refused(
        ("decode=sharded", "states"),
        "decode=sharded has all ranks that keep tokens compute the new ones, and only the last one has the states of "
        "{1}",
        "use decode=last",
    ),
    # cache.bits
    Refused(
        ("cache.bits", "prefill=tsp or zigzag"),
        "{0} needs prefill=kv_runahead or prefill=single",
        "{1} stores keys and values as they are",
    ),
    Refused(
        ("cache.bits", "policy.pool.bytes"),
        "{0} does not go with {1}, since in a full pool single tokens are replaced",
        "leave one of them out",
    ),
    Refused(
        ("cache.bits", "a policy that merges layers"),
        "{0} does not go with policy {1}, whose layers share what they store",
        "use cache.bits=null or another policy, such as snapkv",
    ),
    Refused(
        ("cache.bits", "a conversation", "a retrieving policy", "a sequence"),
        "{0} with policy {2} keeps keys in groups of tokens, of which policies before it in a sequence would drop "
        "some after a later turn",
        "use one policy",
    ),
    Refused(("cache.bits", "marks"), MARKED, "use cache.bits=null"),
    # generation.speculate
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
    # reuse of prefixes
    Refused(("reuse of prefixes", "marks"), MARKED, "use no prefix tree"),
    Refused(
        ("reuse of prefixes", "a policy that narrows"),
        "policy {1} leaves tokens out of deeper layers, so that no prompt is stored whole",
        "use one that only evicts, such as snapkv, or leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("reuse of prefixes", "a policy that needs all tokens of a prompt"),
        "policy {1} decides by what is computed of all tokens of a prompt, and those of a stored prefix are not",
        "use one that looks at the last tokens or at keys, such as snapkv, or leave the tree out "
        "(serve.prefix_cache_bytes=0)",
    ),
    *(
        Refused(
            ("reuse of prefixes", option),
            "{1} needs keys that are not rotated, and {0} stores them rotated to their positions",
            remedy,
        )
        for option, remedy in (
            ("policy.positions=reencoded", "use policy.positions=original"),
            ("policy.clamped=true", "use policy.clamped=false"),
        )
    ),
    Refused(
        ("reuse of prefixes", "prefill=tsp or zigzag"),
        "{0} does not go with {1}, which has no stage that stores a prompt while others compute it",
        CHAIN,
    ),
    Refused(
        ("reuse of prefixes", "angles by length"),
        "{1} rotates by angles that depend on the length of the text, so keys and values cannot be reused in other "
        "prompts",
        "leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("reuse of prefixes", "own positions"),
        "{1} counts positions on its own, so keys and values cannot be reused in other prompts",
        "leave the tree out (serve.prefix_cache_bytes=0)",
    ),
    Refused(
        ("reuse of prefixes", "prefill.speculative"),
        "{1} leaves out tokens that the next prompt may need, so that no prompt is stored",
        "leave the tree out (serve.prefix_cache_bytes=0)",
    ),
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
        ("policy.events.by=surprise", "prefill.speculative"),
        "{1} computes some tokens of a prompt alone, so that nothing tells {0} how the others surprise the model",
        "use prefill.speculative=none",
    ),
    Refused(
        ("policy.events.by=surprise", "a server", "several stages"),
        "{0} asks all stages how a prompt surprises them before the last one decodes, and those of {1} go on to others",
        "use policy.events.by=size, or one stage",
    ),
    *(
        Refused(
            (reuse, "policy.events.by=surprise"),
            "{0} leaves tokens uncomputed, so that nothing tells {1} how they surprise the model",
            "use policy.events.by=size, or no reuse",
        )
        for reuse in ("reuse of prefixes", "policy=prompt_cache")
    ),
    Refused(
        ("policy.events.by=surprise", "a policy of earlier ranks that narrows"),
        "policy {1} leaves tokens out of deeper layers, so that nothing tells {0} how these surprise the model",
        "use policy.ranks.others=full",
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
    # layers that read later ones
    Refused(
        ("several stages", "passes"),
        "{1} read what later ones have stored of all tokens in the pass before (LCKV), and in a chain of {0} stages a "
        "layer's keys and values are sent once",
        "use one stage",
    ),
    *(
        Refused((fact, "passes"), LATER_KV, remedy)
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
    # policies in a chain
    Refused(
        ("a policy that needs attention inputs of each token", "several stages with decode=last"),
        "policy {0} scores tokens by hidden states, which {1} stages do not send each other",
        "use prefill=single or decode=sharded",
    ),
    Refused(
        ("a policy that decides on the whole prompt", "a policy of earlier ranks that narrows"),
        "policy {0} decides on the whole prompt, of which earlier ranks may drop no tokens",
        "use policy.ranks.others=full",
    ),
    *(
        Refused(
            ("a policy that merges layers", others),
            "policy {0} merges layers that store the same tokens, and must be the only one on all ranks",
            "",
        )
        for others in ("a sequence", "a policy of earlier ranks that narrows")
    ),
    # policies in a sequence
    Refused(
        ("unequal heads", "a sequence", "a retrieving policy"),
        "policy {0} leaves heads of different lengths, and an index of policy {2} holds equally many tokens of each",
        "leave out one of the two",
    ),
    Refused(
        ("unequal heads, decided on the whole prompt", "a sequence"),
        "policy {0} decides on the whole prompt, of which others in a sequence drop tokens",
        "it must be the only one",
    ),
    Refused(
        ("unequal heads, compensated", "a sequence"),
        "policy {0} stands in for the tokens that it drops, and not for those that others in a sequence drop",
        "use policy.compensate=false",
    ),
    Refused(
        ("unequal heads", "a sequence", "a share of a model"),
        "policy {0} in a sequence leaves other numbers of tokens on each of the {model.num_shards} ranks that share "
        "the heads, which have to decide alike",
        "use it alone, or ranks.tensor=1",
    ),
    Refused(
        ("unequal heads, compensated", "policy.positions=reencoded"),
        "policy {0} lets the mean of the tokens that it drops stand for them, which has no position",
        "use policy.compensate=false or policy.positions=original",
    ),
    Refused(
        ("unequal heads", "policy.positions=reencoded", "a policy that turns queries"),
        "policy {2} turns queries to the next position of a row, and with policy {0} each head has another one",
        "use policy.positions=original",
    ),
    Refused(
        ("a retrieving policy", "a step after one that retrieves"),
        "policy {0} decides what attention sees of all that is kept, so it must be the only one that does, and the "
        "last step of a sequence",
        "",
    ),
    Refused(
        ("a retrieving policy", "policy.positions=reencoded"),
        "policy {0} keeps all tokens at their positions",
        "use policy.positions=original",
    ),
    Refused(
        ("policy.clamped=true", "policy.recent of all positions"),
        "policy.recent={retriever.recent} is the distance of all tokens before, and model {model.name} has "
        "{model.max_positions} positions",
        "use at most {1}",
    ),
    Refused(
        ("a policy twice",),
        "policy {0} is in a sequence twice with the same options, so the second would decide as the first",
        "leave out one of the two, or give it other options",
    ),
    Refused(
        ("a sequence", "a policy that narrows later"),
        "policy {1} narrows what deeper layers compute, by votes on all new tokens, not after {0} has dropped some",
        "make it the first step of the sequence",
    ),
    # weights in 8 bits
    Refused(
        ("model.weights=int8", "a GPU"),
        "{0} has kernels for CPUs alone",
        "use model.weights=full, or ranks.device=cpu",
    ),
    Refused(
        ("model.weights=int8", "ranks.tensor"),
        "{0} rounds whole weights in blocks, of which transformers' tensor-parallel plans cut no shares",
        "use model.weights=full, or leave ranks.tensor out and use another prefill than tensor",
    ),
    # ranks.tensor and a model
    Refused(
        ("ranks.tensor", "marks"),
        "{1} marks tokens that it evicts (DMS, DMC), and ranks cannot share such a model",
        NO_SHARES,
    ),
    Refused(
        ("ranks.tensor", "shared KV layers"),
        "{1} read keys and values of other layers, and ranks cannot share such a model",
        NO_SHARES,
    ),
    Refused(
        ("ranks.tensor", "states"),
        "{1} hold states, and transformers' tensor-parallel plans do not say which heads of them a rank has",
        NO_SHARES,
    ),
    Refused(
        ("ranks.tensor", "norms by head"),
        "{1} gives each head a norm of its own, which transformers' tensor-parallel plan does not share out",
        NO_SHARES,
    ),
)
"""Rows whose facts do not go together. The first one that holds is what the user is told."""
