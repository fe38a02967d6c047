"""Program that encodes a schema's modules in advance: `python -m policies.prompt_cache.encode --help`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launch.program.compose import Program, model_help
from launch.program.run import run_program
from policies.byte_size import num_bytes
from policies.prompt_cache.prompt_cache import PromptCacheOptions
from runahead.config import BITS, ModelOptions, RanksOptions

if TYPE_CHECKING:
    from policies.prompt_cache import PromptCache
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python -m policies.prompt_cache.encode schema=<xml> out=<folder> [name=value ...]
       torchrun --nproc-per-node=N -m policies.prompt_cache.encode schema=<xml> out=<folder> ...

Computes the keys and values of all modules and scaffolds of a schema, for launch/infer.py policy=prompt_cache with this
folder as policy.store. Several ranks encode a share each. Segments that the folder already has are not computed again.

{model_help()}
  sinks=0                   first tokens that all modules attend to; must equal policy.sinks of later runs
  disk_bytes=64GiB          limit of the folder; the least recently used segments are removed
  tier_bits=8|4|2           of each number; must equal cache.tier_bits of later runs
  ranks.device=...   ranks.threads=<n>   ranks.timeout_s=60   ranks.tensor=<ranks that share one model>

--layout prints the positions of the modules and encodes nothing.
"""


@dataclass(kw_only=True)
class EncodeOptions:
    """Options of a run: the `schema` file is encoded for a model into the folder `out`."""

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    schema: str | None = None
    out: str | None = None
    sinks: int = 0
    disk_bytes: Any = None
    tier_bits: int | None = None

    def __post_init__(self) -> None:
        if not self.schema:
            raise ValueError("schema=<xml file> is missing; name the schema")
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks} must not be negative; 0 is none")
        if self.disk_bytes is not None:
            self.disk_bytes = num_bytes(self.disk_bytes, "disk_bytes")
        if self.tier_bits not in (None, *BITS):
            raise ValueError(f"tier_bits={self.tier_bits} must be 8, 4 or 2, or null for the model's dtype")


ENCODE = Program(module="policies.prompt_cache.encode", options=EncodeOptions, help=HELP, has_layout=True)


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(ENCODE, args, _encode, print_layout=_print_layout)


def _print_layout(run: EncodeOptions) -> None:
    from launch.outputs.layout_table import layout_table

    print(layout_table(_read(run).layout), end="")


def _read(run: EncodeOptions) -> PromptCache:
    """Prompt Cache of the schema for the model. Raises: ValueError."""
    from launch.inputs.prompt_cache import read_prompt_cache
    from runahead.model import loading

    config = loading.load_decoder_config(run.model, progress=True)
    policy = PromptCacheOptions(schema=run.schema, sinks=run.sinks)
    return read_prompt_cache(policy, loading.load_tokenizer(run.model), config)


def _encode(run: EncodeOptions, ranks: Ranks) -> None:
    """Encode all segments that are missing. Every rank makes the same call.

    Raises: ValueError and OSError for a user's mistakes.
    """
    from runahead.features.refused import check
    from runahead.features.setup import SEGMENTS, Setup
    from runahead.model.shares import load_model
    from runahead.reuse.reuse import encode_missing
    from runahead.reuse.store import SegmentStore, StoreLimits

    if not run.out:
        raise ValueError("out=<folder> is missing; name the folder that is to hold what is encoded")
    segments = ranks.on_rank_0("the schema", lambda: _read(run).segments)
    model = load_model(run.model, ranks)
    check(Setup(model=model, segments=SEGMENTS))
    disk = {} if run.disk_bytes is None else {"disk_bytes": run.disk_bytes}
    # No prompt uses the segments in this run, so they need not stay in memory.
    limits = StoreLimits(device_bytes=0, host_bytes=0, **disk)
    store = ranks.on_all_ranks("the store", lambda: SegmentStore(model, run.out, limits, bits=run.tier_bits))
    bytes_per_token = store.stored_token_bytes
    needed = sum(len(segment.stored) for segment in segments) * bytes_per_token * model.num_shards
    if needed > limits.disk_bytes:
        raise ValueError(
            f"all modules and scaffolds need {needed:,} bytes, more than disk_bytes={limits.disk_bytes:,}; raise it"
        )
    began_s = time.perf_counter()
    with ranks.busy(), ranks.announcing_failure():
        encoded, _ = encode_missing(segments, store, model, ranks)
        store.wait_for_copies()
        if store.write_error is not None:
            raise store.write_error
    every = ranks.gather([segment.content_key for segment in encoded], "the end")
    if ranks.rank == 0:
        by_rank = {key: rank for rank, keys in enumerate(every) for key in keys}
        for segment in segments:
            rank = by_rank.get(segment.content_key)
            how = "was there" if rank is None else f"encoded by rank {rank}"
            size = len(segment.stored) * bytes_per_token / 2**20
            print(f"{segment.name:<30}  {len(segment.stored):>8,} tokens  {size:>9.1f} MiB  {how}")
        print(f"{len(by_rank)} of {len(segments)} encoded in {time.perf_counter() - began_s:.1f} s into {run.out}")
