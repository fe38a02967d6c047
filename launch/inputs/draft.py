"""The drafter that a run asks for: a smaller model, or policies that choose what the model drafts from."""

from __future__ import annotations

from typing import Literal

from launch.inputs.options import RunOptions
from launch.inputs.policies import named, rank_policies
from launch.inputs.policy_file import load_files
from runahead.config import ModelName, ModelOptions, Speculate, Speculative
from runahead.decoding.speculative.speculator import Draft
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.model import loading
from runahead.model.model import Model
from runahead.model.shares import load_model
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies


def draft_of(run: RunOptions, ranks: Ranks) -> Draft | None:
    """The drafter, if the options ask for a model or policies. Every rank calls this.

    Raises:
        ValueError, OSError: for a user's mistakes.
        SharedError: for mistakes that rank 0 reports.
    """
    kind, draft = run.generation.speculate, run.draft
    if kind not in (Speculate.model, Speculate.policy) and run.prefill.speculative is not Speculative.model:
        return None
    policies = None
    if kind is Speculate.policy:
        load_files(draft.policy, ranks, "draft.policy")
        policies = ranks.on_rank_0("the drafting policy", lambda: _policies(run))
    model = None
    if draft.needs_model(kind, run.prefill.speculative):
        options = ranks.on_rank_0("the drafting model", lambda: _model_options(run))
        model = load_model(options, ranks, profile=run.profile)
    first: Model | Literal["lookup"] | None = "lookup" if draft.speculate is Speculate.lookup else None
    if policies is not None:
        return Draft(by=policies, first=first if model is None else model)
    assert model is not None
    return Draft(by=model, first=first)


def _model_options(run: RunOptions) -> ModelOptions:
    """The options of draft.model, whose config can be read. Rank 0 calls it. Raises: ValueError."""
    draft = run.draft
    options = ModelOptions(name=ModelName.hf, path=draft.model, dtype=run.model.dtype, overrides=draft.overrides)
    try:
        loading.load_decoder_config(options)
    except ValueError as error:
        raise ValueError(str(error).replace("model.overrides", "draft.overrides")) from error
    return options


def _policies(run: RunOptions) -> RankPolicies:
    """The policies of draft.policy, checked against the config of the model. Rank 0 calls it. Raises: ValueError."""
    with named("draft.policy"):
        policies = rank_policies(run.draft.policy, file_option="draft.policy")
        policies.require_files()
        check(Setup(policies=policies, config=loading.load_decoder_config(run.model)))
    return policies
