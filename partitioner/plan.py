"""`python -m partitioner.plan`: how many stages of how many shares a model and a prompt need, and what to expect."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from launch.inputs.options import ineffective_split_settings
from launch.inputs.policies import checked, rank_policies
from launch.program.compose import Program, model_help
from launch.program.ending import refuse, say
from launch.program.text_table import text_table
from launch.program.written_files import ensure_outputs
from partitioner.meshes.options import PlanRun
from runahead.config import Attention
from runahead.files import write_whole

if TYPE_CHECKING:
    from partitioner.meshes.plan import MeshPlan
    from runahead.thinning.rank_policies import RankPolicies

HELP = f"""\
usage: python -m partitioner.plan model=random model.config=<config.json> gpus=<n> tokens=<n> [name=value ...]

Plans a mesh of stages x shares for a model that one GPU cannot hold, or a prompt that it cannot: which mesh, whether
decoding is sharded, the split, memory of a rank, TTFT and time per token, the other meshes and why they lost, and the
command that starts the plan. Weights are not needed, and no rank is started.

  gpus=8   nodes=1   tokens=131072   batch=1   new_tokens=256
  device=h100|a100 80gb|l40s|...      or, in place of its figures: memory=80GiB   flops=989TFLOP/s   bandwidth=3.35TB/s
  compute=<table.json.compute.json>   measured by python -m partitioner.search on one device, in place of flops=
  link.inside=450GB/s   link.inside_us=10       of a GPU to the others of its node
  link.between=200Gbit/s   link.between_us=20   link.nics=1   of one network card, and the cards of a node
  efficiency.matmul=0.64   efficiency.attention=0.38   efficiency.memory=0.8   efficiency.link=0.8
  efficiency.step_us=20    shares of the stated figures that are reached, and the overhead of a step of a layer
  ranks.tensor=<shares>    decode=auto|last|sharded   prefill.wire_bits=8|4   reserve=2GiB
  prefill.attention=xattention   prefill.threshold=0.99 or prefill.density=<share>   prefill.stride=16
                                 prefill.exact_layers=[<numbers>]
  prefill.attention=streaming_heads   policy=duo_attention policy.heads=<folder> policy.retrieval_share=0.5, or without
                                      the folder policy.sinks=<n> policy.recent=<n>
  prefill.speculative=layers     prefill.speculative_share=0.25   prefill.speculative_layers=<n>
                                 prefill.speculative_chunk=32     prefill.speculative_ahead=8
{model_help()}
  report=<json>   picture=<png>
"""

PLAN = Program(module="partitioner.plan", options=PlanRun, help=HELP)

WIDTH = 110
"""Characters of a line of words."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 1 if nothing fits, 2 for a mistake on the command line."""
    try:
        command = PLAN.read(sys.argv[1:] if args is None else args)
        if command.to_print is not None:
            print(command.to_print, end="")
            return 0
        if "--multirun" in command.flags:
            from launch.program.sweep import run_sweep

            return run_sweep(PLAN, command)
        assert command.run is not None
        return _plan(command.run)
    except (OSError, ValueError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _plan(run: PlanRun) -> int:
    for sentence in ineffective_split_settings(run.prefill.of_run(), run.policy):
        say(f"warning: {sentence}")
    ensure_outputs(run, {"report": [run.report], "picture": [run.picture]})
    plan = plan_of(run, shown=True)
    from partitioner.meshes.text import as_json, nothing_fits

    if run.report is not None:
        write_whole(run.report, json.dumps(as_json(plan), indent=1) + "\n")
    if run.picture is not None:
        from partitioner.pictures.plan import plan_png

        write_whole(run.picture, plan_png(as_json(plan)))
    if plan.best is None:
        say(nothing_fits(plan))
        return 1
    print(plan_text(plan, run), end="")
    return 0


def plan_of(run: PlanRun, *, shown: bool = False) -> MeshPlan:
    """Make the plan that the options ask for.

    Args:
        shown: show a progress bar on standard error.

    Raises:
        ValueError, OSError: a mistake in the options or files; one line.
    """
    # Imported here because it imports torch, which --help and a mistyped option need not wait for.
    from tqdm import tqdm

    from partitioner.cost.streaming import Streams
    from partitioner.meshes.model_size import ModelSize
    from partitioner.meshes.plan import make_plan, meshes
    from partitioner.meshes.request import machine_of, workload_of

    policies, prefill = _policies(run), run.prefill.of_run()
    size = ModelSize.read(run.model, on_gpus=run.on_gpus, decode=run.decode, prefill=prefill, policies=policies)
    assert run.tokens is not None
    streams = None if policies is None else Streams.expected(policies, run.tokens)
    machine, work = machine_of(run, size), workload_of(run, streams)
    total = len(list(meshes(size, machine, work)))
    with tqdm(total=total, desc="planning", disable=not shown or total == 0, leave=False, mininterval=0.5) as bar:

        def tick(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        return make_plan(size, machine, work, tick)


def _policies(run: PlanRun) -> RankPolicies | None:
    """The policy that says how many KV heads stream; None if none do. Raises: ValueError."""
    policy = checked(run.policy)
    if run.prefill.attention is not Attention.streaming_heads:
        return None
    return rank_policies(policy)


def plan_text(plan: MeshPlan, run: PlanRun) -> str:
    """The plan as text for a terminal."""
    from partitioner.meshes.text import COLUMNS, LEFT, assumptions, launch_commands, rows

    machine, size = plan.machine, plan.size
    place = f"{machine.num_gpus} GPUs" if machine.num_gpus > 1 else "1 GPU"
    place += f" in {machine.num_nodes} nodes" if machine.num_nodes > 1 else ""
    text = f"{plan.work.tokens:,} tokens of {size.shape}, {size.dtype}, on {place}\n\n"
    left = [column for column, name in enumerate(COLUMNS) if name in LEFT]
    text += text_table(rows(plan), left=left)
    text += "* the plan; memory of the rank with most of it, time per new token by both ways to decode\n\n"
    for title, command in launch_commands(plan, run.model, run.policy).items():
        text += f"{title}:\n{command}\n\n"
    for line in assumptions(plan, asdict(run.efficiency)):
        text += textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ") + "\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
