"""Work of a rank for a case: a top-level function, since it runs in another process."""

from __future__ import annotations

from runahead import ContextPartition, Engine, GenerationOptions, Model, Ranks
from runahead.report import GenerationBatch
from tests.differential.cases import Case
from tests.families import throughout


def generate(ranks: Ranks, case: Case) -> GenerationBatch | str:
    """Result of `Engine.generate` on this rank, with log-probabilities; or why all ranks refuse the case."""
    module = case.module()
    with throughout(module.dtype):
        model = Model(module, name=case.model_type)
        split = ContextPartition(boundaries=case.boundaries)
        try:
            engine = Engine(model, ranks, prefill=case.prefill, partition=lambda *_: split)
            options = GenerationOptions(max_new_tokens=case.num_new, ignore_eos=True, logprobs=3)
            return engine.generate(case.prompts, options)
        except ValueError as error:
            return str(error)
