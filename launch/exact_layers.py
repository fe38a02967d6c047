"""Program that finds the layers that xattention should leave exact: `python -m launch.exact_layers --help`.

What a layer is worth is how much less a prompt's first tokens lose where they come again after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.exact.search import Exact, Known, Loss, Losses, named, search
from launch.inputs.sample_text import own_texts, runs_of
from launch.inputs.text_files import EXAMPLE_TEXT, read_text
from launch.program.compose import Program, model_help
from launch.program.ending import leave
from launch.program.run import run_program
from launch.program.written_files import ensure_outputs
from runahead.config import Attention, ModelOptions, PrefillOptions, RanksOptions, hydra_text, require
from runahead.files import KeptLines

if TYPE_CHECKING:
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python -m launch.exact_layers [name=value ...]     (one rank)

Finds the layers of a model that prefill.attention=xattention should let attend to all keys: prefill.exact_layers.
Measures copy-NLL: the loss, in nats a token, of a prompt's first tokens where they come again after it, more than with
the exact prefill. First groups of layers are exact, each in turn, and the best one stays so, until the loss is small
enough or no group is worth twice its standard error; then those layers are left out one by one that cost least. Prints
a line per group and layer, and what was found, measured on other prompts, too, as those that it was chosen by flatter
it. Up to 4 GiB of host memory hold hidden states from which other choices of layers go on, prompt by prompt.

  most_loss=0.02            nats that may be lost
  prefill.threshold=0.99 or prefill.density=<share>   prefill.stride=16   of xattention in the other layers
  prefill.exact_layers=[<numbers>]   exact from the beginning
  group=<layers>            of a group that is tried; by default a sixth of the layers
  tokens=8000               of a prompt and the tokens that come again
  passage=512               that come again
  prompts=4                 to choose by, and as many to measure what was found
  samples=[a.txt,b.txt]     texts in UTF-8, which are cut into prompts; by default {EXAMPLE_TEXT}
                            and the pages of docs/, if they are there
  lines=<jsonl>             keeps what was measured; a run that was interrupted goes on from there
{model_help()}
  ranks.device=auto|cuda|cpu   ranks.threads=<n>

  python -m launch.exact_layers model=smollm2 prefill.threshold=0.95 lines=exact.jsonl
"""

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
        lines: file of what was measured, from which a run goes on; None: nothing is kept.
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
    lines: str | None = None

    def __post_init__(self) -> None:
        require(self.prefill.is_sparse, "prefill.attention", self.prefill.attention.name, "must be xattention")
        require(0 <= self.most_loss < math.inf, "most_loss", self.most_loss, "must be nats of at least 0")
        require(self.group is None or self.group >= 1, "group", self.group, "must be at least 1")
        require(self.prompts >= 2, "prompts", self.prompts, "must be at least 2, as one has no standard error")
        require(self.passage >= 1, "passage", self.passage, "must be at least 1")
        rule = f"must be at least twice passage={self.passage}"
        require(self.tokens >= 2 * self.passage, "tokens", self.tokens, rule)


EXACT = Program(module="launch.exact_layers", options=ExactRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(EXACT, args, find_layers)


def find_layers(run: ExactRun, ranks: Ranks) -> None:
    """Find the layers and print them.

    Raises: ValueError for a user's mistakes.
    """
    from launch.exact.copies import Copies
    from launch.program.progress import Bar
    from runahead.engine import Engine
    from runahead.model.shares import load_model

    prompts = ranks.on_rank_0("the options", lambda: _prepare(run, ranks))
    model = load_model(run.model, ranks)
    Engine(model, ranks, prefill=run.prefill)  # which refuses what cannot be
    layers, group = _that_choose(model, ranks, prompts[0], run), run.group or max(1, len(model.kv_layers) // GROUPS)
    copies = Copies(model, ranks, prompts, run.passage, run.prefill)
    kept = KeptLines(None if run.lines is None else Path(run.lines), _purpose(run, model, prompts))
    known = _known(kept)
    about = 2 + -(-len(layers) // group) + 2 * group + 3  # a round of groups, layers one by one, and what was found
    with Bar("measuring", shown=True) as bar:
        num_left = about * run.prompts - len(known)

        def measure(prompt: int, sets: Sequence[Exact], ahead: Sequence[Exact]) -> Iterator[Loss]:
            for number, (exact, loss) in enumerate(zip(sets, copies.losses(prompt, sets, ahead), strict=True), start=1):
                kept.add(exact=sorted(exact), prompt=prompt, **loss._asdict())
                text = f"prompt {prompt // 2 + 1} of {run.prompts}, set of layers {number} of {len(sets)}"
                bar.step_of(max(num_left, bar.n + len(sets) - number + 1), text)
                yield loss

        by, others = (Losses(range(first, len(prompts), 2), layers, measure, known) for first in (0, 1))
        bar.write(
            f"{run.tokens:,} tokens, of which {run.passage} come again; {run.prompts} prompts to choose by. More nats "
            "than the exact prefill (mean ± standard error):"
        )
        if known:
            bar.write(f"{len(known)} losses of prompts are known from lines={run.lines}")
        for line, found in search(by, layers, run.prefill.exact_layers, group=group, most_loss=run.most_loss):
            bar.write(line)
            exact = found
        others.learn([frozenset(run.prefill.exact_layers), exact])
        for line in summary(run, exact, by, others):
            bar.write(line)
    print(options_text(replace(run.prefill, exact_layers=sorted(exact))))


def _purpose(run: ExactRun, model: Model, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Facts on which the loss of a prompt depends, beside its number and the exact layers."""
    from runahead.ranks.agreement import digest_of, library_facts

    return {
        "model": model.fingerprint,
        "dtype": str(model.dtype),
        "device": model.device.type,
        "prompts": digest_of(json.dumps(prompts).encode())[:16],
        "passage": run.passage,
        "prefill": options_text(replace(run.prefill, exact_layers=[])),
        **library_facts(),
    }


def _known(kept: KeptLines) -> Known:
    """Losses that earlier runs have measured."""
    known: Known = {}
    for line in kept.read():
        with suppress(ValueError, KeyError, TypeError):
            loss = Loss(nll=float(line["nll"]), density=float(line["density"]))
            known[frozenset(map(int, line["exact"])), int(line["prompt"])] = loss
    return known


def summary(run: ExactRun, exact: Exact, by: Losses, others: Losses) -> Iterator[str]:
    """Lines about what was found: what it loses, of other prompts, too, and beside what was given."""
    given = frozenset(run.prefill.exact_layers)
    yield (
        f"found: {by.more(exact)} nats, density {by.density(exact):.0%}; on {run.prompts} prompts that it was not "
        f"chosen by {others.more(exact)}, {named(given)} {others.more(given)}"
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
    from runahead.features.refused import check
    from runahead.features.setup import Setup
    from runahead.model import loading
    from runahead.model.loading.position_limit import max_positions

    EXACT.require_one_rank(ranks.size, "layers are found")
    ensure_outputs(run, {"lines": [run.lines]})
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
    from launch.exact.copies import copy_nll
    from runahead.config import SPARSE_BLOCK

    prefill = replace(run.prefill, exact_layers=[])
    _, sparse = copy_nll(model, ranks, ids[: 3 * SPARSE_BLOCK], 1, prefill)
    density = [] if sparse is None else sparse.density
    return [layer for layer, chosen in zip(model.kv_layers, density, strict=False) if chosen is not None]


if __name__ == "__main__":
    leave(main())
