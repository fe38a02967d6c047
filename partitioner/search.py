"""`python -m partitioner.search`: searches the partition and number of ranks with the earliest first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from launch.inputs.options import ineffective_split_settings
from launch.inputs.policies import checked, rank_policies
from launch.inputs.policy_file import load_files
from launch.program.compose import Program, model_help
from launch.program.ending import leave, say
from launch.program.run import run_program
from partitioner.options import Objective, SearchRun

if TYPE_CHECKING:
    from partitioner.cost.places import Places
    from partitioner.cost.streaming import Streams
    from partitioner.table.fingerprint import Fingerprint
    from partitioner.table.lookup_table import LookupTable
    from runahead.model.model import Model
    from runahead.ranks.mesh import Mesh
    from runahead.ranks.ranks import Ranks
    from runahead.thinning.rank_policies import RankPolicies

HELP = f"""\
usage: python -m partitioner.search table=<json> [name=value ...]
       torchrun --nproc-per-node=N -m partitioner.search search.objective=measured table=<json> ...

Finds, for every prompt length and number of ranks, the split of the prompt with the earliest first token, and writes
a lookup table for launch/infer.py partition=table. Can be stopped and started again without losing what was measured.

  search.objective=...   measured: TTFT on the ranks that were started (torchrun)
                         replayed: compute measured on one device, KV on simulated links
                         modelled: a fitted cost model, for lengths and ranks far beyond this machine
  search.lengths=[1024,2048,4096]   search.ranks=[2,4,8]   search.method=seeded|grid
  search.min_stride=32   search.reach=0.15   search.repeats=3   search.speeds=[1,0.5]   search.max_loss=0.01|null
  search.probe_chunks=[...]   search.probe_prefixes=[...]   search.probe_layers=4   search.force=false
  link.gbps=25   link.latency_us=10   link.shared=false
{model_help()}
  prefill.transfer=relay|direct   prefill.layers_in_flight=3   prefill.wire_bits=8|4
  prefill.attention=xattention   prefill.threshold=0.99 or prefill.density=<share>   prefill.stride=16
                                 prefill.exact_layers=[<numbers>]
  prefill.attention=streaming_heads   policy=duo_attention policy.heads=<folder> as of the run, or as many heads by
                                      policy.retrieval_share=0.5 policy.sinks=<n> policy.recent=<n>
  ranks.device=...   ranks.threads=<n>
  ranks.tensor=<n>       ranks that share one model, a stage: lengths and numbers of ranks are then for stages

A run with prefill.speculative takes the table of a search without: its draft splits prompts of their whole length, and
the model what stays of them (prefill.speculative_share=0.25), so search.lengths should have both.
"""

SEARCH = Program(module="partitioner.search", options=SearchRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(SEARCH, args, _print_table, warnings=_warnings)


def _warnings(run: SearchRun) -> list[str]:
    return ineffective_split_settings(run.prefill, run.policy)


def _print_table(run: SearchRun, ranks: Ranks) -> None:
    table = search(run, ranks)
    if ranks.rank == 0:
        from partitioner.show import table_text

        print(table_text(table), end="")


def search(run: SearchRun, ranks: Ranks) -> LookupTable:
    """Search the table that `run` asks for, and write it to its file. Every rank calls this.

    Raises:
        ValueError, OSError: a mistake in the options or files.
    """
    from partitioner.calibration import calibrated_clusters, link_between
    from partitioner.cost.places import Places
    from partitioner.searches.evaluators import Evaluator, LiveEvaluator, SimulatedEvaluator
    from partitioner.searches.progress import SearchProgress
    from partitioner.searches.record import SearchRecord
    from partitioner.searches.refinement import Refinement
    from partitioner.searches.table_search import TableSearch
    from partitioner.table.fingerprint import Fingerprint
    from partitioner.table.lookup_table import LookupTable
    from runahead.model.shares import load_model
    from runahead.prefill.base import exact_layers

    counts = run.search.ranks or list(range(1, ranks.num_stages + 1))
    load_files(run.policy, ranks)
    policies = ranks.on_rank_0("the policy", lambda: _policies(run))
    num_layers, layer_types = ranks.on_rank_0("the search's options", lambda: _prepare(run, counts, ranks.mesh))
    assert run.table is not None
    path = Path(run.table)
    model = load_model(run.model, ranks)
    if run.prefill.is_sparse and run.model.layers is None:  # by its masks, of which a config need not tell all
        exact_layers(model, run.prefill)
    places = Places.of_model(model, num_layers, layer_types)
    link = link_between(run, ranks)
    streams = ranks.on_all_ranks("the heads that stream", lambda: _streams(run, policies, model, places))
    fingerprint = Fingerprint.of_model(
        model,
        places=places,
        device=ranks.device,
        backend=ranks.backend,
        prefill=run.prefill,
        link=link,
        link_measured=run.link.gbps is None,
        speeds=run.search.speeds or (),
        streams=streams,
    )
    table = ranks.on_rank_0("the table", lambda: _existing(path, fingerprint)) or LookupTable(fingerprint, [])
    clusters = calibrated_clusters(
        run, ranks, model, counts, link=link, places=places, fingerprint=fingerprint, streams=streams
    )
    entries = [(length, count) for length in run.search.lengths for count in counts]
    progress = SearchProgress(entries, run.search, shown=ranks.rank == 0)
    evaluator: Evaluator = SimulatedEvaluator(clusters, progress)
    if run.search.objective is Objective.measured:
        key = fingerprint.key()
        evaluator = LiveEvaluator(
            clusters, progress, run=run, ranks=ranks, model=model, policies=policies, fingerprint_key=key
        )
    searched = TableSearch(table, evaluator, run.search, progress)
    lengths = run.search.lengths
    with progress:
        for _ in chain(searched.run(lengths), Refinement(searched).run(lengths) if evaluator.is_quick else ()):
            if ranks.rank == 0:
                searched.table.save(path)
    if ranks.rank == 0:
        from partitioner.pictures.table import save_pictures  # not sooner, since it loads matplotlib

        record = SearchRecord.beside(path).with_run(searched.trails, clusters)
        record.save_beside(path)
        save_pictures(searched.table, record, path)
    return searched.table


def _policies(run: SearchRun) -> RankPolicies | None:
    """The policy that says which KV heads stream; None if none do. Raises: ValueError."""
    policy = checked(run.policy)
    if not run.prefill.streams:
        return None
    from runahead.features.refused import check
    from runahead.features.setup import Setup

    policies = rank_policies(policy)
    check(Setup(prefill=run.prefill, policies=policies))
    if run.search.objective is Objective.measured:
        policies.require_files()
    return policies


def _streams(run: SearchRun, policies: RankPolicies | None, model: Model, places: Places) -> Streams | None:
    """The KV heads that stream, or as many as the options say, of whichever heads. Raises: ValueError."""
    if policies is None:
        return None
    from partitioner.cost.streaming import Streams
    from runahead.features.refused import check
    from runahead.features.setup import Setup

    check(Setup(prefill=run.prefill, policies=policies, model=model))
    names_heads = policies.last[0].reads is not None
    if names_heads:
        return Streams.of(policies, model)
    return Streams.expected(policies, model=model, num_attending=len(places) - len(places.states))


def _prepare(run: SearchRun, counts: list[int], mesh: Mesh) -> tuple[int, list[str]]:
    """Check the options before the model is loaded, on rank 0; return the number and the types of its layers."""
    from launch.program.written_files import ensure_outputs
    from partitioner.searches import STRATEGIES
    from partitioner.searches.record import record_path
    from runahead.features.layer_types import attending_to_all
    from runahead.features.setup import Setup
    from runahead.features.slower import Way, slower
    from runahead.model import loading
    from runahead.model.loading.position_limit import max_positions
    from runahead.model.shares import check_shares
    from runahead.prefill.base import require_exact

    assert run.table is not None
    ensure_outputs(run, {"table": [run.table, record_path(Path(run.table))]})
    if run.search.objective is Objective.measured and max(counts) > mesh.num_stages:
        needed = max(counts) * mesh.num_shares
        raise ValueError(
            f"search.ranks={counts} needs {needed} ranks to be measured but {mesh.size} were started; "
            f"use torchrun --nproc-per-node={needed} or search.objective=replayed"
        )
    if run.link.gbps is None and mesh.num_stages == 1 and max(counts) > 1:
        raise ValueError("link.gbps=<1e9 bits per second> is needed: a single stage has no link to measure")
    most = STRATEGIES[run.search.method].most_ranks
    if most is not None and max(counts) > most:
        method = run.search.method.name
        raise ValueError(
            f"search.method={method} is limited to {most} ranks, not {max(counts)}; use search.method=seeded"
        )
    config = loading.load_decoder_config(run.model, progress=True)
    check_shares(config, mesh.num_shares)
    limit = max_positions(config)
    if run.search.objective is Objective.measured and limit is not None and max(run.search.lengths) >= limit:
        raise ValueError(
            f"search.lengths goes up to {max(run.search.lengths)} tokens, but the model has {limit} positions, one of "
            "them for the first new token; leave the longest out or use search.objective=replayed"
        )
    whole = loading.load_decoder_config(replace(run.model, layers=None))
    if run.prefill.is_sparse:  # of all layers, of which fewer may be run
        require_exact(run.prefill, attending_to_all(whole), str(whole.model_type))
        if sentence := slower(Setup(prefill=run.prefill, config=whole)).get(Way.few_keys):
            say(f"slower: {sentence}")
    return int(whole.num_hidden_layers), list(getattr(whole, "layer_types", None) or [])


def _existing(path: Path, fingerprint: Fingerprint) -> LookupTable | None:
    """The table of an earlier run, which this run adds to; None if there is none."""
    from partitioner.table.lookup_table import LookupTable

    if not path.exists():
        return None
    table = LookupTable.load(path)
    table.check_fits(fingerprint, force=False)
    return table


if __name__ == "__main__":
    leave(main())
