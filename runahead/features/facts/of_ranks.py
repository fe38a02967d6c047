"""Facts that the ranks decide, their number and devices, and the length of the prompt."""

from __future__ import annotations

from runahead.config import DecodeName, PrefillName
from runahead.features.facts.made import Fact, Words, choice, if_, known, number, option, other
from runahead.features.setup import Setup


def _last_keeps_all(setup: Setup) -> Words:
    """The number of stages of a chain whose last one keeps all tokens."""
    if setup.prefill is None or setup.decode is None or setup.num_stages is None:
        return None
    is_chain = setup.prefill.name is PrefillName.kv_runahead and setup.decode.name is not DecodeName.sharded
    return if_(is_chain and setup.num_stages > 1, str(setup.num_stages))


def _may_shard(setup: Setup) -> Words:
    """The way of decoding, if keys and values may stay on several stages."""
    return "" if setup.num_stages == 1 else other("decode", "last")(setup)


def _auto(setup: Setup) -> Words:
    """The way of decoding, if it is left open whether keys and values stay on several stages."""
    is_auto = choice("decode", "auto")(setup)
    several = number("num_stages")(setup)
    return is_auto and (several and is_auto)


def _joins_none(setup: Setup) -> Words:
    """Rows of one batch: of no server, or of one that does not decode all of its rows on one stage."""
    together, serves = _may_shard(setup), option("a server")(setup)
    if serves and together is None:
        return None
    return if_(not serves or bool(together), "rows of one batch")


def _is_split(setup: Setup) -> Words:
    if setup.prefill is None or not setup.prefill.takes_partition:
        return None if setup.prefill is None else ""
    return number("num_chunks")(setup)


OF_RANKS: dict[str, Fact] = {
    "decode other than last on several stages": _may_shard,
    "decode=auto on several stages": _auto,
    "rows of one batch": _joins_none,
    "a GPU": known("device", lambda device: if_(device == "cuda", "a GPU")),
    "ranks.backend=nccl": known("backend", lambda backend: if_(backend == "nccl", "NCCL")),
    "one stage": known("num_stages", lambda stages: if_(stages == 1, "one stage")),
    "several stages": number("num_stages"),
    "several stages with decode=last": _last_keeps_all,
    "a prompt in several chunks": _is_split,
}
