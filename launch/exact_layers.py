"""Program that finds the layers that xattention should leave exact: `python -m launch.exact_layers --help`.

What a layer is worth is how much less a prompt's first tokens lose where they come again after it.
"""

# Legend: V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING, Self

from launch.inputs.sample_text import own_texts, runs_of
from launch.inputs.text_files import EXAMPLE_TEXT, read_text
from launch.program.compose import Program
from launch.program.ending import leave
from launch.program.run import run_program
from runahead.config import Attention, ModelOptions, PrefillOptions, RanksOptions, hydra_text, require

if TYPE_CHECKING:
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks
    from runahead.report import SparseReport

HELP = f"""\
usage: python -m launch.exact_layers [name=value ...]     (one rank)

Finds the layers of a model that prefill.attention=xattention should let attend to all keys: prefill.exact_layers.
Measures copy-NLL: the loss, in nats a token, of a prompt's first tokens where they come again after it, more than with
the exact prefill. First groups of layers are exact, each in turn, and the best one stays so, until the loss is small
enough or no group is worth twice its standard error; then those layers are left out one by one that cost least. Prints
a line per group and layer, and what was found, measured on other prompts, too, as those that it was chosen by flatter
it.

  most_loss=0.02            nats that may be lost
  prefill.threshold=0.99 or prefill.density=<share>   prefill.stride=16   of xattention in the other layers
  prefill.exact_layers=[<numbers>]   exact from the beginning
  group=<layers>            of a group that is tried; by default a sixth of the layers
  tokens=8000               of a prompt and the tokens that come again
  passage=512               that come again
  prompts=4                 to choose by, and as many to measure what was found
  samples=[a.txt,b.txt]     texts in UTF-8, which are cut into prompts; by default {EXAMPLE_TEXT}
                            and the pages of docs/, if they are there
  model=smollm2|hf|random   model.path=...   model.config=...   model.dtype=...
                            model.overrides={{<key of its config>:<value>}}   model.revision=<of the hub>
                            model.fuse=auto|on|off   model.adapter=<folder or hub id, or a list>
                            model.dequantize=true|false   model.keep_dequantized=false|true
                            model.weights=full|int8
  ranks.device=auto|cuda|cpu   ranks.threads=<n>

  python -m launch.exact_layers model=smollm2 prefill.threshold=0.95
"""

NOISE = 2.0
"""Standard errors that a group of layers has to be worth."""
GROUPS = 6
"""Groups of layers by default."""


@dataclass(kw_only=True)
class ExactRun:
    """Options of launch/exact_layers.py.

    Attributes:
        model, ranks: model, and device.
        prefill: options of the sparse prefill.
        most_loss: nats per token of copies that may be lost.
        group: number of layers that are tried together first; None: a sixth of them.
        tokens: number of tokens of a prompt with those that come again.
        passage: number of tokens that come again.
        prompts: number of prompts to choose by, and to measure with afterwards.
        samples: texts in UTF-8; None: those that come with the programs.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    prefill: PrefillOptions = field(default_factory=lambda: PrefillOptions(attention=Attention.xattention))
    most_loss: float = 0.02
    group: int | None = None
    tokens: int = 8000
    passage: int = 512
    prompts: int = 4
    samples: list[str] | None = None

    def __post_init__(self) -> None:
        require(self.prefill.is_sparse, "prefill.attention", self.prefill.attention.name, "must be xattention")
        require(0 <= self.most_loss < math.inf, "most_loss", self.most_loss, "must be nats of at least 0")
        require(self.group is None or self.group >= 1, "group", self.group, "must be at least 1")
        require(self.prompts >= 2, "prompts", self.prompts, "must be at least 2, as one has no standard error")
        require(self.passage >= 1, "passage", self.passage, "must be at least 1")
        rule = f"must be at least twice passage={self.passage}"
        require(self.tokens >= 2 * self.passage, "tokens", self.tokens, rule)


EXACT = Program(module="launch.exact_layers", options=ExactRun, help=HELP)


@dataclass(frozen=True)
class Estimate:
    """A mean over samples, with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """The estimate from at least two samples."""
        return cls(mean(samples), stdev(samples) / math.sqrt(len(samples)))

    @property
    def is_noise(self) -> bool:
        """Whether it is not above 0 for certain."""
        return self.mean <= NOISE * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}"


class Losses:
    """Losses of copies with the layers that are exact, each measured once.

    Args:
        measure: sorted numbers of exact layers, or None for the exact prefill, and number of a prompt -> NLL, density.
        num_prompts: number of prompts.
    """

    def __init__(self, measure: Callable[[tuple[int, ...] | None, int], tuple[float, float]], num_prompts: int) -> None:
        self._measure, self._num_prompts = measure, num_prompts
        self._known: dict[tuple[int, ...] | None, list[tuple[float, float]]] = {}

    def _of(self, exact: Iterable[int] | None) -> list[tuple[float, float]]:
        key = None if exact is None else tuple(sorted(exact))
        if key not in self._known:
            self._known[key] = [self._measure(key, number) for number in range(self._num_prompts)]
        return self._known[key]

    def more(self, exact: Iterable[int], than: Iterable[int] | None = None) -> Estimate:
        """How much more some layers lose than others, by default than the exact prefill, of the same prompts."""
        pairs = zip(self._of(exact), self._of(than), strict=True)
        return Estimate.of([one - other for (one, _), (other, _) in pairs])

    def density(self, exact: Iterable[int]) -> float:
        """Blocks that are computed, mean over prompts and layers."""
        return mean(density for _, density in self._of(exact))


def search(
    losses: Losses, layers: Sequence[int], given: Iterable[int], *, group: int, most_loss: float
) -> Iterator[tuple[str, frozenset[int]]]:
    """Find the layers, and tell a line as soon as it is known, with the layers that are exact so far.

    Args:
        layers: that may be exact, ascending.
        given: that are so from the beginning, and stay so.
        group: number of layers that are tried together.
        most_loss: nats that may be lost.
    """
    given = exact = frozenset(given)
    others = [layer for layer in layers if layer not in given]
    groups = [others[first : first + group] for first in range(0, len(others), group)]
    yield f"{_named(exact)}: {losses.more(exact)} nats, density {losses.density(exact):.0%}", exact
    while groups and losses.more(exact).mean > most_loss:
        worth = dict[int, float]()
        for number, each in enumerate(groups):
            less = losses.more(exact, exact.union(each))
            density = losses.density(exact.union(each))
            yield f"  layers {ranges(each):>9} exact: {less} nats less, density {density:.0%}", exact
            if not less.is_noise:  # a larger mean that may be noise is not preferred to one that is not
                worth[number] = less.mean
        if not worth:
            yield f"no other layers are worth more than {NOISE:g} standard errors", exact
            break
        exact = exact.union(groups.pop(max(worth, key=worth.__getitem__)))
        yield f"{_named(exact)}: {losses.more(exact)} nats, density {losses.density(exact):.0%}", exact
    allowed, worth_of = max(most_loss, losses.more(exact).mean), dict[int, float]()
    for layer in sorted(exact - given) if len(exact - given) > 1 else ():
        more = losses.more(exact - {layer}, exact)
        worth_of[layer] = more.mean
        yield f"  without layer {layer:>3}: {more} nats more", exact
    for layer in sorted(worth_of, key=worth_of.__getitem__):
        if losses.more(exact - {layer}).mean <= allowed:
            exact -= {layer}
            yield f"{_named(exact)}: {losses.more(exact)} nats, density {losses.density(exact):.0%}", exact


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(EXACT, args, find_layers)


def find_layers(run: ExactRun, ranks: Ranks) -> None:
    """Find the layers and print them.

    Raises: ValueError for a user's mistakes.
    """
    from launch.program.progress import Bar
    from runahead.engine import Engine
    from runahead.model.shares import load_model

    prompts = ranks.on_rank_0("the options", lambda: _prepare(run, ranks))
    model = load_model(run.model, ranks)
    Engine(model, ranks, prefill=run.prefill)  # which refuses what cannot be
    ways, num_layers = 0, len(model.kv_layers)
    group = run.group or max(1, num_layers // GROUPS)
    with Bar("measuring", shown=True) as bar:

        def losses_of(some: Sequence[list[int]]) -> Losses:
            def measured(exact: tuple[int, ...] | None, number: int) -> tuple[float, float]:
                nonlocal ways
                ways += number == 0
                about = 2 + -(-num_layers // group) + 2 * group
                bar.step_of(max(about, ways) * len(some) + 2 * len(some), f"prompt {number + 1} of {len(some)}")
                prefill = PrefillOptions() if exact is None else replace(run.prefill, exact_layers=list(exact))
                nll, sparse = copy_nll(model, ranks, some[number], run.passage, prefill)
                return nll, 1.0 if sparse is None else sparse.mean_density or 1.0

            return Losses(measured, len(some))

        by, others = losses_of(prompts[::2]), losses_of(prompts[1::2])
        bar.write(
            f"{run.tokens:,} tokens, of which {run.passage} come again; {run.prompts} prompts to choose by. More nats "
            "than the exact prefill (mean ± standard error):"
        )
        layers = _that_choose(model, ranks, prompts[0], run)
        for line, found in search(by, layers, run.prefill.exact_layers, group=group, most_loss=run.most_loss):
            bar.write(line)
            exact = found
        for line in summary(run, exact, by, others):
            bar.write(line)
    print(options_text(replace(run.prefill, exact_layers=sorted(exact))))


def summary(run: ExactRun, exact: frozenset[int], by: Losses, others: Losses) -> Iterator[str]:
    """Lines about what was found: what it loses, of other prompts, too, and beside what was given."""
    given = frozenset(run.prefill.exact_layers)
    yield (
        f"found: {by.more(exact)} nats, density {by.density(exact):.0%}; on {run.prompts} prompts that it was not "
        f"chosen by {others.more(exact)}, {_named(given)} {others.more(given)}"
    )
    if others.more(exact).mean > run.most_loss:
        rule = "threshold" if run.prefill.density is None else "density"
        yield f"which is more than most_loss={run.most_loss:g}; a higher prefill.{rule} loses less"


def options_text(prefill: PrefillOptions) -> str:
    """The options to copy."""
    given = prefill.sparsity | {"exact_layers": prefill.exact_layers}
    return " ".join(
        f"prefill.{name}={hydra_text(value) if isinstance(value, list) else value}" for name, value in given.items()
    )


def _prepare(run: ExactRun, ranks: Ranks) -> list[list[int]]:
    """Token ids of the prompts, after all checks that do not need the model's weights."""
    from runahead.features.facts import Setup
    from runahead.features.refused import check
    from runahead.model import loading
    from runahead.model.loading.position_limit import max_positions

    EXACT.require_one_rank(ranks.size, "layers are found")
    texts = [read_text(path, f"samples={path}") for path in run.samples or own_texts()]
    config = loading.load_decoder_config(run.model, progress=True)
    check(Setup(prefill=run.prefill, config=config))
    limit, tokenizer = max_positions(config), loading.load_tokenizer(run.model)
    if limit is not None and run.tokens > limit:
        raise ValueError(f"tokens={run.tokens} is more than the model's {limit} positions; lower it")
    if tokenizer is None:
        raise ValueError("texts need a tokenizer, and this model has none; give a model that has one")
    found, length, num = runs_of(texts, tokenizer, run.tokens - run.passage), run.tokens - run.passage, 2 * run.prompts
    if len(found) < num:
        raise ValueError(
            f"the texts have {len(found)} runs of {length} tokens, and prompts={run.prompts} needs {num}, half of them "
            "to measure what was found; give longer texts, fewer prompts or fewer tokens"
        )
    return [found[number * len(found) // num] for number in range(num)]


def _that_choose(model: Model, ranks: Ranks, ids: Sequence[int], run: ExactRun) -> list[int]:
    """Layers that would not attend to all keys, by a short prompt."""
    from runahead.config import SPARSE_BLOCK

    prefill = replace(run.prefill, exact_layers=[])
    _, sparse = copy_nll(model, ranks, ids[: 3 * SPARSE_BLOCK], 1, prefill)
    density = [] if sparse is None else sparse.density
    return [layer for layer, chosen in zip(model.kv_layers, density, strict=False) if chosen is not None]


def copy_nll(
    model: Model, ranks: Ranks, ids: Sequence[int], passage: int, prefill: PrefillOptions
) -> tuple[float, SparseReport | None]:
    """Loss of a prompt's first tokens where they come again after it, in nats per token, and what it attended to.

    It is computed on this rank; a chain chooses the same. What comes again attends to all keys.

    Args:
        ids: token ids of the prompt.
        passage: number of tokens that come again.
        prefill: of the prompt.
    """
    import torch

    from runahead.cache.attention import CausalAttention
    from runahead.context import ContextPartition
    from runahead.prefill.base import PrefillJob, PromptBatch
    from runahead.prefill.kv_runahead import run_in_chain

    with torch.inference_mode():
        prefilled = run_in_chain(
            PrefillJob(
                model=model,
                ranks=ranks,
                batch=PromptBatch.from_prompts([list(ids)], ranks.device),
                partition=ContextPartition(boundaries=(0,) + (len(ids),) * ranks.num_stages),
                capacity=len(ids) + passage,
                options=prefill,
            )
        )
        assert prefilled.cache is not None and prefilled.logits_BV is not None
        attention = CausalAttention(prefilled.cache, start=len(ids), pads=[0])
        copied_1C = torch.tensor([ids[:passage]], device=ranks.device)
        logits_CV = model.forward(copied_1C, attention, start=len(ids), pads=[0], all_logits=True)[0]
        before_CV = torch.cat([prefilled.logits_BV, logits_CV[:-1]]).float().log_softmax(dim=-1)
        return -before_CV.gather(1, copied_1C.T).mean().item(), prefilled.report.attention


def _named(exact: frozenset[int]) -> str:
    return f"layers {ranges(sorted(exact))} exact" if exact else "all layers sparse"


def ranges(layers: Sequence[int]) -> str:
    """Ascending numbers in a few characters: 5-9, 12."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


if __name__ == "__main__":
    leave(main())
