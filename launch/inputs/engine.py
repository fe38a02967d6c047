"""The engine that the options of a program describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from launch.inputs.options import ineffective_on_one_stage
from launch.inputs.partitions import SplitsPrompts, prepare_partition
from launch.program.ending import say
from runahead.config import DecodeOptions, GenerationOptions, ModelOptions, PrefillName, Profile
from runahead.context import Partitioner
from runahead.decoding.speculative.speculator import Draft
from runahead.engine import Engine
from runahead.model.model import Model
from runahead.model.shares import load_model
from runahead.prefill.base import exact_layers
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies

if TYPE_CHECKING:
    from runahead.reuse.prefix_tree import PrefixTree
    from runahead.reuse.store import SegmentStore


class RunsEngine(SplitsPrompts, Protocol):
    """Options of a run that answers prompts."""

    model: ModelOptions
    decode: DecodeOptions
    generation: GenerationOptions
    profile: Profile


def arrange(run: RunsEngine, ranks: Ranks) -> None:
    """Arrange the ranks into the stages of `run`'s prefill, and tell options that have no effect on so few.

    Every rank makes the same call, before it reads input.
    """
    if run.prefill.name is PrefillName.tensor:  # which is one stage, whatever the number of ranks
        ranks.arrange(ranks.size)
    for sentence in ineffective_on_one_stage(run) if ranks.num_stages == 1 else ():
        say(f"warning: {sentence}")


def load(
    run: RunsEngine, ranks: Ranks, partition: Partitioner, tokenizer: Any = None, *, serves: bool = False
) -> Model:
    """The model of `run`, on which its partition is prepared. Every rank makes the same call.

    Args:
        tokenizer: the model's, if this rank has read it.
        serves: as of `make_engine`.

    Raises:
        ValueError, SharedError: as `load_model` and `prepare_partition`.
    """
    if run.prefill.name is PrefillName.pipeline:
        from runahead.pipeline.stage import load_stage

        model = load_stage(run.model, ranks, profile=run.profile, tokenizer=tokenizer)
    else:
        model = load_model(run.model, ranks, profile=run.profile, tokenizer=tokenizer)
    if run.prefill.is_sparse:
        exact_layers(model, run.prefill)  # before layers are timed for a split
    if run.prefill.takes_partition or run.prefill.searches_chunks:
        prepare_partition(partition, model, ranks, run, lends=not serves)
    return model


def make_engine(
    run: RunsEngine,
    model: Model,
    ranks: Ranks,
    check: Callable[[Engine], object],
    *,
    partition: Partitioner,
    policies: RankPolicies,
    store: SegmentStore | None = None,
    tree: PrefixTree | None = None,
    draft: Draft | None = None,
    serves: bool = False,
) -> tuple[Engine, list[str]]:
    """The engine of `run`, and why faster ways are not taken, which is told. Every rank makes the same call.

    Args:
        check: called with the engine, raises what the run asks for and the engine does not do.
        serves: a server answers, whose ranks have other work, too.

    Raises:
        ValueError, SharedError: as `Engine` and `check` on some rank.
    """

    def made() -> Engine:
        engine = Engine(
            model,
            ranks,
            prefill=run.prefill,
            partition=partition,
            policies=policies,
            decode=run.decode,
            store=store,
            tree=tree,
            draft=draft,
            lends=not serves,
        )
        check(engine)
        return engine

    engine = ranks.on_all_ranks("the engine", made)
    slower = engine.slower([run.generation], reuses=store is not None, serves=serves)
    for sentence in slower:
        say(f"slower: {sentence}")
    return engine, slower
