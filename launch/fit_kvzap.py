"""Program that fits the maps of policy=kvzap for a model: `python -m policies.fit_kvzap --help`.

Texts are read in contexts of equal length. Each goes through the model, is repeated as policy=kvzip repeats a prompt,
and gives every token a KVzip+ score in each layer and KV head. Ridge regression then maps what a layer's attention is
given to the logarithms of these scores.
"""

# Legend: K kv heads, T tokens of a context, D width of the attention input.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launch.inputs.sample_text import own_texts, runs_of
from launch.inputs.text_files import EXAMPLE_TEXT, read_text
from launch.program.compose import Program, model_help
from launch.program.run import run_program
from runahead.config import ModelOptions, RanksOptions

if TYPE_CHECKING:
    from torch import Tensor

    from policies.score_maps import ScoreMaps
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

EVERY = 8
"""One of so many contexts is not fitted on; the last one, if there are fewer."""

HELP = f"""\
usage: python -m policies.fit_kvzap out=<file.safetensors> [name=value ...]     (one rank)

Fits, for policy=kvzap policy.predictor=<file>, a linear map in every layer from hidden states to KVzip+ scores of
tokens, by ridge regression. The file is valid for this model only. Prints how much of the scores' variance the maps
explain in contexts that they were not fitted on, by layer, and which thresholds keep which share of these contexts.

  samples=[a.txt,b.txt]     texts in UTF-8; by default {EXAMPLE_TEXT}
                            and the pages of docs/, if they are there
  context=1024              tokens that are scored as one prompt; texts are cut into runs of so many
  contexts=32               runs that are read at most, spread evenly over all; every {EVERY}th is not fitted on
  ridge=0.01                penalty of the weights, in units of the mean variance of hidden states
  random_tokens=false       read random token ids instead of texts, for a model without a tokenizer
{model_help()}
  ranks.device=auto|cuda|cpu   ranks.threads=<n>

  python -m policies.fit_kvzap model=smollm2 out=kvzap-smollm2.safetensors
"""

SINKS = 4
"""First tokens of a context that are not fitted on: their hidden states are unlike all others, and they always stay."""
LEAST_SCORE = 1e-8
"""Scores below are taken for this one, so that tokens that are never attended to do not rule the fit."""
SHARES = (0.75, 0.5, 0.25, 0.125)
"""Shares of tokens for which thresholds are told."""


@dataclass(kw_only=True)
class FitRun:
    """Options of launch/fit_kvzap.py.

    Attributes:
        model, ranks: model, and device.
        samples: texts in UTF-8; None: those that come with the programs.
        context: number of tokens that are scored as one prompt.
        contexts: most of these that are read.
        ridge: penalty of the weights, in units of the mean variance of hidden states.
        random_tokens: read random token ids instead of texts.
        out: file that is written.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    samples: list[str] | None = None
    context: int = 1024
    contexts: int = 32
    ridge: float = 0.01
    random_tokens: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out=<file.safetensors> is needed: where the maps go")
        for name, least in (("context", 2 * SINKS), ("contexts", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 < self.ridge < math.inf:
            raise ValueError(f"ridge={self.ridge} must be a number above 0")
        if self.random_tokens and self.samples is not None:
            raise ValueError("samples has no effect with random_tokens=true; leave one of them out")


FIT = Program(module="policies.fit_kvzap", options=FitRun, help=HELP)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Maps, and what they predict of contexts that they were not fitted on.

    Attributes:
        explained: R² by layer.
        predicted: scores of all layers and KV heads, one after another.
    """

    maps: ScoreMaps
    explained: dict[int, float]
    predicted: Tensor

    def threshold(self, share: float) -> float:
        """Threshold that keeps this share of tokens."""
        ordered = self.predicted.sort(descending=True).values
        return float(ordered[min(len(ordered) - 1, round(share * len(ordered)))])


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(FIT, args, write_maps)


def write_maps(run: FitRun, ranks: Ranks) -> None:
    """Fit the maps and write the file.

    Raises: ValueError and OSError for a user's mistakes.
    """
    from launch.program.progress import Bar
    from runahead.files import write_whole
    from runahead.model.shares import load_model

    contexts = ranks.on_rank_0("the options", lambda: _prepare(run, ranks))
    model = load_model(run.model, ranks)
    with Bar("scoring contexts", shown=True) as bar:
        fit = fitted(model, contexts, ridge=run.ridge, done=lambda: bar.advance(1 / len(contexts)))
    assert run.out is not None
    write_whole(run.out, fit.maps.packed(model.fingerprint))
    num_other = len(contexts) - len(fitted_on(len(contexts)))
    print(f"{run.out}: maps of {len(fit.explained)} layers from {len(contexts)} contexts of {run.context} tokens")
    print(f"R² in the {num_other} that were not fitted on, by layer:")
    for layer, share in fit.explained.items():
        print(f"  {layer:3}  {share:6.3f}")
    print(f"  mean {sum(fit.explained.values()) / len(fit.explained):6.3f}")
    for share in SHARES:
        print(
            f"policy.threshold={fit.threshold(share):.2f} keeps {100 * share:g}% of their tokens, besides recent ones"
        )


def _prepare(run: FitRun, ranks: Ranks) -> list[list[int]]:
    """Token ids of the contexts, after all checks that do not need the model's weights."""
    import torch

    from launch.program.written_files import ensure_outputs
    from policies.kvzip import KVzip
    from runahead.features.refused import check
    from runahead.features.setup import Setup
    from runahead.model import loading
    from runahead.model.loading.position_limit import max_positions
    from runahead.thinning.rank_policies import RankPolicies

    FIT.require_one_rank(ranks.size, "maps are fitted")
    assert run.out is not None
    ensure_outputs(run, {"out": [run.out]})
    texts = [] if run.random_tokens else [read_text(path, f"samples={path}") for path in run.samples or own_texts()]
    config = loading.load_decoder_config(run.model, progress=True)
    check(Setup(policies=RankPolicies.everywhere([KVzip()]), config=config))
    tokenizer, limit = loading.load_tokenizer(run.model), max_positions(config)
    request = 0 if tokenizer is None else len(tokenizer(KVzip.request, add_special_tokens=False).input_ids)
    if limit is not None and 2 * run.context + request > limit:
        raise ValueError(
            f"context={run.context} and its repetition are more than the model's {limit} positions; use at most "
            f"context={(limit - request) // 2}"
        )
    if run.random_tokens:
        draw = torch.Generator().manual_seed(run.model.seed)
        ids: list[list[int]] = torch.randint(config.vocab_size, (run.contexts, run.context), generator=draw).tolist()
        return ids
    if tokenizer is None:
        raise ValueError(
            "texts need a tokenizer, and this model has none; give a model that has one, or use random_tokens=true"
        )
    found = runs_of(texts, tokenizer, run.context)
    if len(found) < 2:
        raise ValueError(
            f"the texts have {len(found)} runs of context={run.context} tokens, and 2 are the least; give longer texts "
            "or a smaller context"
        )
    num = min(run.contexts, len(found))
    return [found[number * len(found) // num] for number in range(num)]


def fitted_on(num_contexts: int) -> list[int]:
    """Numbers of the contexts that maps are fitted on."""
    every = min(EVERY, num_contexts)
    return [number for number in range(num_contexts) if number % every < every - 1]


def fitted(model: Model, contexts: Sequence[Sequence[int]], *, ridge: float, done: Callable[[], None]) -> Fit:
    """Fit maps on contexts of at least two, one of which is not fitted on.

    Args:
        model: the model.
        contexts: token ids.
        ridge: penalty, as of `Ridge.solved`.
        done: called after each context.

    Raises:
        ValueError: a model whose hidden states or output projections are not found, or without a layer that attends to
            all tokens.
    """
    import torch

    from policies.ridge import Ridge, explained
    from policies.score_maps import ScoreMaps

    dims, sums = model.attention_input_dims, dict[int, Ridge]()
    on = fitted_on(len(contexts))
    for number in on:
        for layer, (x_TD, y_TK) in scored(model, contexts[number]).items():
            if layer not in sums:
                sums[layer] = Ridge(dims[layer], y_TK.shape[1], model.device)
            sums[layer].add(x_TD, y_TK)
        done()
    if not sums:
        raise ValueError(f"all layers of model {model.name} attend to windows, which keep their own tokens")
    solved = {layer: each.solved(ridge) for layer, each in sums.items()}
    maps = ScoreMaps(
        weights={layer: weight_KD.cpu() for layer, (weight_KD, _) in solved.items()},
        biases={layer: bias_K.cpu() for layer, (_, bias_K) in solved.items()},
    )
    targets: dict[int, list[Tensor]] = {layer: [] for layer in sums}
    found: dict[int, list[Tensor]] = {layer: [] for layer in sums}
    for number in sorted({*range(len(contexts))} - {*on}):
        for layer, (x_TD, y_TK) in scored(model, contexts[number]).items():
            targets[layer].append(y_TK)
            found[layer].append(maps.scores(layer, x_TD[None])[0].mT)
        done()
    return Fit(
        maps=maps,
        explained={layer: explained(torch.cat(targets[layer]), torch.cat(found[layer])) for layer in sums},
        predicted=torch.cat([x_TK.flatten() for of_layer in found.values() for x_TK in of_layer]),
    )


def scored(model: Model, ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Attention inputs (T, D) of a context's tokens but the first, and logarithms (T, K) of KVzip+ scores, by layer.

    Layers with windows are left out.
    """
    import torch

    from policies.kvzip import KVzip
    from runahead.cache.attention import CausalAttention, LayerCall, LayerHook
    from runahead.cache.kept_cache import KeptCache
    from runahead.thinning.replay import score_prompt

    given: dict[int, Tensor] = {}
    _ = model.attention_input_dims  # from then on forwards show them

    class Noting(LayerHook):
        """Notes what attention is given."""

        def before_save(self, call: LayerCall) -> None:
            assert call.input_BCD is not None, "the model shows it"
            given[call.layer] = call.input_BCD[0]

    policy = KVzip(plus=True, sinks=SINKS, chunk_tokens=len(ids))
    with torch.inference_mode():
        kept = KeptCache.empty(model.kv_shapes, batch=1, device=model.device)
        ids_1T = torch.tensor([list(ids)], device=model.device)
        attention = CausalAttention(kept, start=0, pads=[0], hooks=[Noting()])
        model.forward(ids_1T, attention, start=0, pads=[0])
        scores = score_prompt(model, policy, kept, ids_1T, [0])
        return {
            layer: (given[layer][SINKS:], scores_1KT[0, :, SINKS:].mT.clamp_min(LEAST_SCORE).log())
            for layer, scores_1KT in enumerate(scores)
            if scores_1KT is not None
        }
