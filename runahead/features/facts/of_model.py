"""Facts that the model decides, by its config or once it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runahead.config import PrefillName
from runahead.features.facts.made import Fact, Words, if_, of_last
from runahead.features.facts.of_policies import first_step, of_retriever
from runahead.features.layer_types import MARKING, STATES_ALONE, WITH_STATES, WITHOUT_CACHE, attending_to_all
from runahead.features.setup import Setup

NORMS_BY_HEAD = {"cohere": "use_qk_norm"}
"""By model_type: the option with which norms of queries and keys have weights by head, which plans leave whole."""


def model(holds: Callable[[Any], Any]) -> Fact:
    """The model, if something holds for it once it is loaded."""
    return lambda setup: None if setup.model is None else if_(holds(setup.model), setup.model_name)


def words_of(words: Callable[[Any], str]) -> Fact:
    """Something about the model, in its own words, once it is loaded."""
    return lambda setup: None if setup.model is None else words(setup.model)


def _share(holds: Callable[[Any], Any]) -> Fact:
    """The model, if something holds for it that does not where each rank has the whole model."""

    def fact(setup: Setup) -> Words:
        splits = setup.prefill is None or setup.prefill.name is PrefillName.tensor or setup.num_shares != 1
        return model(holds)(setup) if setup.model is not None or splits else ""

    return fact


def _lacks(part: str) -> Fact:
    """Why a model lacks a part, as the ValueError says that asking for it raises."""

    def fact(setup: Setup) -> Words:
        if setup.model is None:
            return None
        try:
            getattr(setup.model, part)
        except ValueError as error:
            return str(error)
        return ""

    return fact


def _looks_ahead(setup: Setup) -> Words:
    """A policy that retrieves and predicts queries a layer ahead on the model's device."""
    if setup.policies is not None and setup.retriever is None:
        return ""
    if setup.model is None:
        return None
    return first_step(lambda step: step.retrieves and step.looks_ahead_on(setup.model.device))(setup)


def _no_pairs(setup: Setup) -> Words:
    """The model, if it has no neighbouring layers that the merging policy can merge."""
    if setup.model is None or setup.policies is None:
        return None
    return if_(not setup.policies.form(setup.model), setup.model_name)


def _no_positions_left(setup: Setup) -> Words:
    """The largest distance to which a policy may clamp, if that to which it does leaves no position of the model."""
    if setup.model is None or setup.model.max_positions is None:
        return None if setup.model is None else ""
    positions = setup.model.max_positions
    return of_retriever(lambda policy: if_(policy.clamps and policy.recent >= positions, str(positions - 1)))(setup)


def _exact_alone(setup: Setup) -> Words:
    """The model, if `prefill.exact_layers` are all layers that see the whole text."""
    if setup.prefill is None or not setup.prefill.exact_layers:
        return None if setup.prefill is None else ""
    if setup.model is not None:
        choosing = {layer for layer, rule in zip(setup.model.kv_layers, setup.model.rules, strict=True) if rule is None}
    elif setup.config is None:
        return None
    else:
        choosing = set(attending_to_all(setup.config))
    return if_(choosing <= set(setup.prefill.exact_layers), setup.model_name)


def _retrieves_nowhere(setup: Setup) -> Words:
    """The model, if no layer of it that sees the whole text retrieves."""
    if setup.model is None:
        return None
    whole = [layer for layer, rule in enumerate(setup.model.rules) if rule is None]
    return of_retriever(lambda policy: if_(not any(map(policy.retrieves_in, whole)), setup.model_name))(setup)


def _outgrows(setup: Setup) -> Words:
    """The length at which LongRoPE changes its tables, if texts grow past it."""
    if setup.model is None or setup.outgrows is None:
        return None
    threshold = setup.model.length_threshold
    return f"{threshold:,}" if setup.outgrows and threshold else ""


def _marks(setup: Setup) -> Words:
    """The model, if it marks tokens that it evicts."""
    config = setup.text_config
    marks = any(getattr(config, option, None) is not None for option in MARKING)
    return None if config is None else if_(marks, setup.model_name)


def _no_marks(setup: Setup) -> Words:
    """The model's type, if it marks no tokens."""
    config = setup.text_config
    return None if config is None else if_(not _marks(setup), str(config.model_type))


def _shared_kv(setup: Setup) -> Words:
    """The layers that read keys and values of others."""
    if setup.model is not None:
        return if_(setup.model.reads_kv_of, f"{len(setup.model.reads_kv_of)} layers of {setup.model_name}")
    shares = getattr(setup.config, "num_kv_shared_layers", 0) or getattr(setup.config, "reads_kv_of", None)
    return None if setup.config is None else if_(shares, f"layers of {setup.model_name}")


def _passes(setup: Setup) -> Words:
    """The layers of a model in which some do not see the token itself."""
    config = setup.text_config
    return None if config is None else if_(getattr(config, "runs_in_passes", False), f"layers of {setup.model_name}")


def _states(setup: Setup) -> Words:
    """The layers that hold a state of the text before."""
    config = setup.text_config
    kinds = sorted({kind for kind in getattr(config, "layer_types", None) or [] if kind in WITH_STATES})
    if getattr(config, MARKING[-1], None) is not None:
        kinds = ["averaging (DMC)"]
    return None if config is None else if_(kinds, f"{' and '.join(kinds)} layers of {setup.model_name}")


def _states_alone(setup: Setup) -> Words:
    """The model, if none of its layers stores keys and values."""
    config = setup.text_config
    kinds = set(getattr(config, "layer_types", None) or [])
    return None if config is None else if_(kinds and kinds <= {*STATES_ALONE, *WITHOUT_CACHE}, setup.model_name)


def _norms_by_head(setup: Setup) -> Words:
    config = setup.text_config
    option = "" if config is None else NORMS_BY_HEAD.get(config.model_type, "")
    return None if config is None else if_(getattr(config, option, False), f"{option}=true of {setup.model_name}")


def _windows(model: Any) -> bool:
    return any(rule is not None for rule in model.rules)


OF_MODEL: dict[str, Fact] = {
    "marks": _marks,
    "no marks": _no_marks,
    "shared KV layers": _shared_kv,
    "passes": _passes,
    "states": _states,
    "states alone": _states_alone,
    "states one by one": model(lambda model: model.gives_one_by_one),
    "norms by head": _norms_by_head,
    "windows": model(_windows),
    "ALiBi": model(lambda model: model.has_key_bias),
    "angles by length": model(lambda model: model.rotates_by_length),
    "angles by length, of each token": model(lambda model: model.rotates_by_length and model.length_threshold is None),
    "an answer past LongRoPE's threshold": _outgrows,
    "scaled queries": model(lambda model: model.scales_queries),
    "own positions": model(lambda model: model.uneven_limit is not None),
    "KV heads that ranks copy": _share(lambda model: model.copies_kv_heads),
    "a share of a model": _share(lambda model: model.num_shards > 1),
    "rotations unknown": _lacks("rotations"),
    "positions that cannot be re-encoded": of_last(_lacks("rotaries")),
    "output projections unknown": _lacks("output_projections"),
    "attention inputs unknown": _lacks("attention_input_dims"),
    "queries that cannot be predicted": _lacks("query_prediction"),
    "no list of layers": model(lambda model: not model.has_layers),
    "no layers to merge": _no_pairs,
    "exact layers alone": _exact_alone,
    "no layer that retrieves": _retrieves_nowhere,
    "steps that differ": words_of(lambda model: model.steps_differ),
    "no kernel for graphs": words_of(lambda model: model.lacks_step_kernel),
    "no kernels of our own": words_of(lambda model: model.lacks_kernels),
    "a policy that looks ahead": _looks_ahead,
    "policy.recent of all positions": _no_positions_left,
}
