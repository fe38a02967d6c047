"""Facts that options decide, and what is asked for with a prompt."""

from __future__ import annotations

from runahead.config import Speculate, Speculative, Weights
from runahead.features.facts.made import Fact, choice, if_, known, number, of_last, option, other
from runahead.features.setup import DYNAMIC_CACHE


def _speculative(*kinds: Speculative) -> Fact:
    """The draft that chooses what is computed of a prompt, if it is one of these; by default any."""
    asked = kinds or (Speculative.layers, Speculative.model)
    return known(
        "prefill", lambda given: if_(given.speculative in asked, f"prefill.speculative={given.speculative.name}")
    )


def _draft(*kinds: Speculate) -> Fact:
    """The kind of draft, if it is one of these."""
    return known(
        "generation", lambda given: if_(given.speculate in kinds, f"generation.speculate={given.speculate.name}")
    )


OF_OPTIONS: dict[str, Fact] = {
    # of options
    "prefill=tsp or zigzag": choice("prefill", "tsp", "zigzag"),
    "prefill=zigzag": choice("prefill", "zigzag"),
    "prefill=tensor": choice("prefill", "tensor"),
    "prefill=pipeline": choice("prefill", "pipeline"),
    "prefill other than kv_runahead": other("prefill", "kv_runahead"),
    "prefill.chunk_tokens": option("prefill.chunk_tokens", "prefill"),
    "prefill.row_tokens": option("prefill.row_tokens", "prefill"),
    "prefill.speculative": _speculative(),
    "prefill.speculative=layers": _speculative(Speculative.layers),
    "prefill.speculative=model": _speculative(Speculative.model),
    "prefill.wire_bits": option("prefill.wire_bits", "prefill"),
    "prefill.attention=xattention": known(
        "prefill", lambda prefill: if_(prefill.is_sparse, "prefill.attention=xattention")
    ),
    "prefill.attention=streaming_heads": known(
        "prefill", lambda prefill: if_(prefill.streams, "prefill.attention=streaming_heads")
    ),
    "decode=sharded": choice("decode", "sharded"),
    "decode other than last": other("decode", "last"),
    "cache.bits": of_last(option("cache.bits", "cache")),
    "cache.tier_bits": option("cache.tier_bits", "cache"),
    "generation.speculate": _draft(Speculate.lookup, Speculate.policy, Speculate.model),
    "generation.speculate=lookup or model": _draft(Speculate.lookup, Speculate.model),
    "generation.speculate=policy": _draft(Speculate.policy),
    "generation.speculate=policy or model": _draft(Speculate.policy, Speculate.model),
    "draft.speculate=model": option("draft.speculate"),
    "model.weights=int8": known("weights", lambda weights: if_(weights is Weights.int8, "model.weights=int8")),
    "option ranks.tensor": option("ranks.tensor"),
    "option policy.positions": option("policy.positions"),
    "ranks.tensor": number("num_shares", "ranks.tensor={}"),
    "prompt.question": option("prompt.question"),
    "prompt.ids_file": option("prompt.ids_file"),
    "prompt.random_tokens": option("prompt.random_tokens"),
    "prompt.chat": option("prompt.chat"),
    "partition=ratios or table": option("partition"),
    "a server": option("a server"),
    DYNAMIC_CACHE: known("options", lambda options: if_(options.get(DYNAMIC_CACHE), DYNAMIC_CACHE)),
    "serve.decode_ranks": option("serve.decode_ranks"),
    "serve.handover": option("serve.handover"),
    # of texts
    "reuse of prefixes": lambda setup: setup.prefixes,
    "echo with logprobs": known("scores", lambda scores: if_(scores, "echo with logprobs")),
    "policy=prompt_cache": lambda setup: setup.segments,
    "policy.recompute": known("blends", lambda blends: if_(blends, "policy.recompute")),
    "a conversation": of_last(known("rows", lambda rows: "a conversation")),
    "a conversation of several rows": number("rows"),
}
