"""Tasks of ranks in the tests of cache policies."""

from __future__ import annotations

from launch.infer import INFER, infer
from launch.inputs.policies import rank_policies
from runahead import ContextPartition, Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.config import DecodeName, DecodeOptions
from runahead.context import even
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.ranks.tasks import tiny_model


def engine(
    ranks: Ranks,
    family: str,
    boundaries: tuple[int, ...],
    policies: RankPolicies,
    prefill: PrefillOptions | None = None,
    decode: DecodeName = DecodeName.auto,
) -> Engine:
    """The engine of a tiny model under policies, for prompts that are split so."""
    partition = ContextPartition(boundaries=boundaries)
    return Engine(
        tiny_model(family),
        ranks,
        prefill=prefill,
        partition=lambda *_: partition,
        policies=policies,
        decode=DecodeOptions(name=decode),
    )


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    boundaries: tuple[int, ...],
    policies: RankPolicies,
    num_new: int = 4,
    prefill: PrefillOptions | None = None,
    options: GenerationOptions | None = None,
    decode: DecodeName = DecodeName.auto,
    record: bool = False,
) -> GenerationBatch:
    """Result of `Engine.generate` under policies; with options of its own, or for `num_new` tokens."""
    with throughout(tiny_model(family).dtype):
        generating = engine(ranks, family, boundaries, policies, prefill, decode)
        options = options or GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
        return generating.generate(prompts, options, record_timeline=record)


def refusal(
    ranks: Ranks, prompts: list[list[int]], policies: RankPolicies, decode: DecodeName = DecodeName.last
) -> tuple[str, str]:
    """Whether the engine ("engine") or a call of `generate` ("prompts") is refused, or none ("") and why."""
    at = "engine"
    try:
        engine = Engine(tiny_model("llama"), ranks, policies=policies, decode=DecodeOptions(name=decode))
        at = "prompts"
        engine.generate(prompts, GenerationOptions(max_new_tokens=2, ignore_eos=True))
    except ValueError as error:
        return at, str(error)
    return "", ""


def refusal_of_infer(ranks: Ranks, args: list[str]) -> tuple[str, str]:
    """The type and the message of the error with which launch/infer.py ends on this rank."""
    run = INFER.compose(args)
    try:
        infer(run, ranks, even, rank_policies(run.policy, run.cache))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
