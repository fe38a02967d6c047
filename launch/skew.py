"""Program that collects typical queries of a model for InfiniGen: `python -m policies.skew --help`."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launch.inputs.sample_text import sample_ids
from launch.inputs.text_files import EXAMPLE_TEXT
from launch.program.compose import Program, model_help
from launch.program.run import run_program
from runahead.config import ModelOptions, RanksOptions

if TYPE_CHECKING:
    from launch.program.progress import Bar
    from policies.skewing import Skew
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks
    from runahead.rotary import Rotary

HELP = f"""\
usage: python -m policies.skew out=<file.safetensors> [name=value ...]     (one rank)

Runs a model on a text and collects the directions of its queries in every layer and KV head. With policy=infinigen
policy.skew=<file> the columns of the partial keys are chosen from these directions instead of those of the prompt. The
file is valid for this model only. Attention over the fetched tokens stays exact, whatever is in the file.

  sample=<text in UTF-8>    by default {EXAMPLE_TEXT}
  tokens=2048               number of its tokens that are read
  chunk=512                 tokens that are computed at a time
{model_help()}
  ranks.device=auto|cuda|cpu   ranks.threads=<n>

  python -m policies.skew model=smollm2 sample=book.txt out=skew-smollm2.safetensors
"""


@dataclass(kw_only=True)
class SkewRun:
    """Options of launch/skew.py.

    Attributes:
        model, ranks: model, and device.
        sample: text in UTF-8; None: the one in examples/.
        tokens: number of its tokens that are read.
        chunk: number of tokens that are computed at a time.
        out: file that is written.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    sample: str | None = None
    tokens: int = 2048
    chunk: int = 512
    out: str | None = None

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out=<file.safetensors> is needed: where the queries that are found go")
        for name in ("tokens", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


SKEW = Program(module="policies.skew", options=SkewRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(SKEW, args, write_skew)


def write_skew(run: SkewRun, ranks: Ranks) -> None:
    """Collect queries and write the file.

    Raises: ValueError and OSError for a user's mistakes.
    """
    from launch.program.progress import Bar
    from runahead.files import write_whole
    from runahead.model.shares import load_model

    ids_S = ranks.on_rank_0("the options", lambda: _prepare(run, ranks))
    model = load_model(run.model, ranks)
    with Bar("reading the sample", shown=True) as bar:
        skew = skew_of(model, ids_S, rotaries=model.known_rotaries, chunk=run.chunk, bar=bar)
    assert run.out is not None
    write_whole(run.out, skew.packed(model.fingerprint))
    where = "as at position 0" if skew.at_position_0 else "as in the sample"
    print(f"{run.out}: queries of {len(skew.queries)} layers from {len(ids_S)} tokens, {where}")


def _prepare(run: SkewRun, ranks: Ranks) -> list[int]:
    """Token ids of the sample, after all checks that do not need the model's weights."""
    from launch.program.written_files import ensure_outputs

    SKEW.require_one_rank(ranks.size, "queries are collected")
    assert run.out is not None
    ensure_outputs(run, {"out": [run.out]})
    return sample_ids(run.model, run.sample, run.tokens)[: run.tokens]


def skew_of(
    model: Model, ids: Sequence[int], *, rotaries: Sequence[Rotary] | None, chunk: int, bar: Bar | None = None
) -> Skew:
    """Typical queries of a model on these tokens.

    Args:
        model: the model.
        ids: token ids of the sample.
        rotaries: rotation of every layer, by which queries are rotated back to position 0; None: they are not rotated.
        chunk: number of tokens that are computed at a time.
        bar: progress bar.
    """
    import torch

    from policies.skewing import Skew, query_products
    from runahead.cache.attention import CausalAttention, LayerCall, LayerHook

    products = [
        torch.zeros(shape.num_kv_heads, shape.key_dim, shape.key_dim, dtype=torch.float64) for shape in model.kv_shapes
    ]

    class Collecting(LayerHook):
        """Adds up products of queries."""

        def before_save(self, call: LayerCall) -> None:
            at_0_BNCH, start = call.q_BNCH, call.tokens.start
            if rotaries is not None:
                positions_1C = torch.arange(start, start + at_0_BNCH.shape[2], device=at_0_BNCH.device)[None]
                at_0_BNCH = rotaries[call.layer].turned(at_0_BNCH.float(), -positions_1C)
            products[call.layer] += query_products(at_0_BNCH, call.k_BKCH.shape[1]).cpu()

    cache = model.empty_cache(len(ids))
    ids_1S = torch.tensor([list(ids)], device=model.device)
    for start in range(0, len(ids), chunk):
        ids_1C = ids_1S[:, start : start + chunk]
        attention = CausalAttention(cache, start=start, pads=[0], hooks=[Collecting()])
        model.forward(ids_1C, attention, start=start, pads=[0], length=len(ids))
        if bar is not None:
            bar.advance(ids_1C.shape[1] / len(ids))
    return Skew.from_products(products, len(ids), at_position_0=rotaries is not None)
