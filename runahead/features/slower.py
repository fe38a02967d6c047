"""The table of faster ways that are not taken, by what a run asks for.

A row names a way, the facts with which it is not taken, and why. Whoever could take the way asks the table
(`takes`), so what a user is told is what is done. Programs tell it once, when the engine is there; a report and a
server's state have it, too, and `python -m launch.combinations` tells it before a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from runahead.features.combination import Combination, that_hold
from runahead.features.refused import REFUSED
from runahead.features.refused.row import Refused
from runahead.features.setup import Setup

AUTO = "decode=auto on several stages"
KEEPS = "cache policies or cache.bits"
PREFIXES = "reuse of prefixes"


class Way(Enum):
    """Faster ways, by what is told where one is not taken."""

    sharded = "decode=auto keeps all keys and values on the last stage"
    timed = "decode=auto leaves on several stages only what the last one has no memory for"
    graph = "decoding steps are computed without a CUDA graph"
    prompts_together = "prompts of several requests are computed one by one"
    rows_together = "rows are not decoded in one forward"
    shared_prompt = "each of several answers to a prompt has a copy of its keys and values"
    side_by_side = "requests are answered batch after batch, and none is computed while others are decoded"
    stopped = "a prompt whose client has left is computed to its end"
    stored_answers = "prompts are stored for later ones, and answers are not"
    at_once = "layers that hold a state compute tokens after a given one, as of later chunks and prefixes, one by one"
    once = "a prompt is computed once more while it is answered"
    few_keys = "prefill.attention=xattention chooses keys in no layer"
    retrieved = "decoding steps read all tokens in all layers"
    blocks = "ranks that keep tokens compute a layer for all new tokens at once, not in blocks of rows"
    kernels = "attention on a CPU is computed by PyTorch's kernel"


@dataclass(frozen=True)
class Slower(Combination):
    """Facts with which a faster way is not taken.

    Attributes:
        way: the faster way.
        why: with {0} for what the first fact is called, and so on.
    """

    way: Way
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.way.value}: {self.why}"


def slower(*setups: Setup) -> dict[Way, str]:
    """Tell which faster ways some of these do not take, with a sentence for each that has the first reason for it."""
    found: dict[Way, str] = {}
    for setup in setups:
        for row, message in that_hold(SLOWER, setup):
            found.setdefault(row.way, message)
    if Way.sharded in found:  # so there is nothing to be timed
        found.pop(Way.timed, None)
    return found


def takes(setup: Setup, way: Way) -> bool:
    """Whether nothing that is known of a run is in the way of a faster way."""
    return not any(that_hold([row for row in SLOWER if row.way is way], setup))


def in_the_way_of_prefixes(setup: Setup) -> str | None:
    """Why a run reuses no prefixes where nobody has asked for that: they are refused, or would make it slower.

    Args:
        setup: with `prefixes`.

    Returns:
        None if nothing that is known of the run is in the way.
    """
    refused = [replace(row, remedy="") for row in REFUSED if PREFIXES in row.facts]
    reasons = [message for _, message in that_hold(refused, setup)]
    ways = [row for row in SLOWER if PREFIXES in row.facts and row.way is not Way.stored_answers]
    without = replace(setup, prefixes="")
    reasons += [message for row, message in that_hold(ways, setup) if takes(without, row.way)]
    return next(iter(reasons), None)


def _unsharded(row: Refused) -> Slower:
    """The row of a refusal of decode=sharded: with its facts decode=auto keeps all on the last stage."""
    place = row.facts.index("decode=sharded")
    facts = tuple(AUTO if fact == "decode=sharded" else fact for fact in row.facts)
    return Slower(facts, Way.sharded, row.why.replace(f"{{{place}}}", "decode=sharded"))


SLOWER = (
    *(_unsharded(row) for row in REFUSED if "decode=sharded" in row.facts and "prefill=pipeline" not in row.facts),
    Slower(
        (AUTO, "cache policies"),
        Way.sharded,
        "with decode=sharded each rank chooses among its own tokens, which changes answers",
    ),
    Slower(
        (AUTO, "cache.bits"),
        Way.sharded,
        "with decode=sharded groups of 32 tokens begin anew on each rank, which changes answers",
    ),
    Slower(
        (AUTO, "ranks.backend=nccl"),
        Way.timed,
        "decoding steps are not timed over {1}; decode=sharded asks for it",
    ),
    Slower(
        ("prefill.attention=xattention", "exact layers alone"),
        Way.few_keys,
        "prefill.exact_layers names all layers of {1} in which it might",
    ),
    Slower(
        ("a retrieving policy", "no layer that retrieves"),
        Way.retrieved,
        "{0} retrieves in none of the layers of {1} that see the whole text",
    ),
    Slower(("prefill.row_tokens", KEEPS), Way.blocks, "{1} look at all queries of a layer"),
    Slower((KEEPS, "a GPU"), Way.graph, "{0} keep keys and values in memory of other shapes"),
    *(
        Slower((reuse, "rows of one batch", "a GPU"), Way.graph, "{0} leaves keys and values in several pieces")
        for reuse in (PREFIXES, "policy=prompt_cache")
    ),
    Slower(
        ("prefill.speculative", "a GPU"),
        Way.graph,
        "{0} leaves gaps between positions",
    ),
    Slower(("a GPU", "steps that differ"), Way.graph, "{1}"),
    Slower(("a GPU", "no kernel for graphs"), Way.graph, "{0} has no kernel for {1}"),
    Slower(("a server", KEEPS), Way.prompts_together, "{1} look at what is kept of one prompt as a whole"),
    Slower(
        ("a server", "own positions"),
        Way.rows_together,
        "{1} counts positions on its own, so those of other lengths have a forward of their own",
    ),
    Slower(("a server", KEEPS), Way.shared_prompt, "{1} choose for each answer"),
    Slower(("a server", "passes"), Way.shared_prompt, "{1} do not see the token itself (LCKV)"),
    Slower(("a server", "marks"), Way.shared_prompt, "{1} marks tokens that it evicts (DMS, DMC) for each answer"),
    Slower(
        ("a server", "decode other than last on several stages"),
        Way.shared_prompt,
        "{1} leaves a part of it on each stage; use decode=last",
    ),
    Slower(
        ("a server", "several stages", "windows"),
        Way.shared_prompt,
        "the last of {1} stages does not receive what lies before a window of {2}",
    ),
    Slower(("a server", "own positions"), Way.shared_prompt, "{1} counts positions on its own"),
    Slower(
        ("a server", "angles by length"), Way.shared_prompt, "{1} rotates by angles that depend on the length of a text"
    ),
    Slower(
        ("a server", "decode other than last on several stages"),
        Way.side_by_side,
        "with {1} all stages may decode; use decode=last",
    ),
    Slower(
        ("a server", "prefill.speculative"),
        Way.side_by_side,
        "with {1} all stages run a draft of each prompt first",
    ),
    Slower(("a server", "prefill.speculative"), Way.shared_prompt, "with {1} they are rows of a batch"),
    Slower(
        ("a server", "a share of a model"),
        Way.stopped,
        "each of its layers needs all {model.num_shards} ranks that share {1}",
    ),
    Slower(
        (PREFIXES, KEEPS),
        Way.stored_answers,
        "{1} change what the tokens of an answer attend to",
    ),
    Slower(
        ("states one by one",),
        Way.at_once,
        "in transformers those of {0} begin from a given state with a single token alone; prefill=single computes a "
        "prompt in one chunk",
    ),
    Slower(
        ("an answer past LongRoPE's threshold",),
        Way.once,
        "a text that grows past {0} tokens has other rotary tables (LongRoPE), and is computed anew by what decodes it",
    ),
    Slower(("no kernels of our own",), Way.kernels, "{0}"),
)
"""Rows with whose facts a faster way is not taken; of those of one way, the first that holds is told."""
