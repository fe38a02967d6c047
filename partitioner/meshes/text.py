"""A plan as text: the table of candidates, why each one lost, the command that starts the best, and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from partitioner.cost.link import BITS_PER_BYTE, Link
from partitioner.cost.sparse import Sparsity
from partitioner.meshes.machine import Machine
from partitioner.meshes.memory import RankMemory
from partitioner.meshes.plan import ALIKE, Candidate, MeshPlan, Seconds
from runahead.config import ModelName, ModelOptions, PrefillOptions, Speculative, hydra_text
from runahead.picture_style import seconds

COLUMNS = (
    "",
    "stages x shares",
    "decode",
    "weights",
    "KV",
    "activations",
    "room",
    "TTFT",
    "all-reduces",
    "waits",
    "a token, last",
    "sharded",
    "why not",
)
LEFT = ("stages x shares", "decode", "why not")

NO_POLICY: Mapping[str, Any] = MappingProxyType({"name": "full"})

HEADS = "heads"
"""Placeholder for the table of a model's heads in a command if none was given."""

PORT = 29500
"""Port at which ranks of several nodes meet: torchrun's own default."""

PARTS = {"weights": "weights", "kv": "keys and values", "activations": "activations", "reserve": "reserve"}
"""Names of the parts of a rank's memory."""


def rows(plan: MeshPlan) -> list[list[str]]:
    """The table of candidates, with memory of the fullest rank; its first row has the headings."""
    made = [list(COLUMNS)]
    for candidate in plan.candidates:
        fullest, ttft = candidate.fullest, candidate.ttft
        made.append(
            [
                "*" if candidate is plan.best else "",
                mesh_text(candidate),
                way(candidate),
                *(gib(each) for each in (fullest.weights, fullest.kv, fullest.activations, candidate.held.room)),
                "-" if ttft is None else seconds(ttft.total),
                *("-" if ttft is None else f"{part / ttft.total:.0%}" for part in _shares(ttft)),
                seconds(candidate.last_s),
                "-" if candidate.num_stages == 1 or candidate.sharded_s is None else seconds(candidate.sharded_s),
                "" if candidate is plan.best else reason(plan, candidate),
            ]
        )
    return made


def _shares(ttft: Seconds | None) -> tuple[float, float]:
    return (0.0, 0.0) if ttft is None else (ttft.allreduce, ttft.wait)


def mesh_text(candidate: Candidate) -> str:
    """Stages x shares, and the pieces in which a single stage computes."""
    pieces = "" if candidate.held.piece_tokens is None else f", pieces of {candidate.held.piece_tokens:,}"
    return f"{candidate.num_stages} x {candidate.num_shares}{pieces}"


def way(candidate: Candidate) -> str:
    return "sharded" if candidate.held.sharded else "last"


def reason(plan: MeshPlan, candidate: Candidate) -> str:
    """Why a candidate is not the plan, in words."""
    memory = plan.machine.device.memory_bytes
    if not candidate.fits:
        return f"does not fit: needs {gib(candidate.fullest.total)} of {gib(memory)}, {most_of(candidate.fullest)}"
    best = plan.best
    assert best is not None and best.ttft is not None and candidate.ttft is not None, candidate
    ratio = candidate.ttft.total / best.ttft.total
    if ratio <= 1 + ALIKE:
        slower = candidate.token_s / best.token_s
        return f"TTFT {ratio:.2f} times as long, and {slower:.2f} times as long for each new token after it"
    return f"TTFT {ratio:.2f} times as long: {_cause(plan, candidate, candidate.ttft, best.ttft)}"


def _cause(plan: MeshPlan, candidate: Candidate, ttft: Seconds, best: Seconds) -> str:
    """The cause of most of a slower candidate's additional time."""
    machine = plan.machine
    more = {name: getattr(ttft, name) - getattr(best, name) for name in ("compute", "allreduce", "wait")}
    largest = max(more, key=lambda name: more[name])
    if largest == "allreduce":
        share = ttft.allreduce / ttft.total
        return f"the all-reduces of {candidate.num_shares} shares over {rate(machine.inside)} take {share:.0%} of it"
    if largest == "wait":
        crosses = any(machine.crosses(stage, candidate.num_shares) for stage in range(candidate.num_stages - 1))
        link = machine.across(candidate.num_shares) if crosses else machine.inside
        place = "between nodes" if crosses else "inside a node"
        share = ttft.wait / ttft.total
        return f"its last stage waits {share:.0%} of it for keys and values over {rate(link)} {place}"
    if candidate.num_ranks < machine.num_gpus:
        return f"{candidate.num_ranks} of {machine.num_gpus} GPUs compute"
    if not candidate.is_best_split:
        return "its chunks are evener than is fast, to fit"
    return f"its stages compute {ttft.compute / best.compute:.2f} times as long"


def most_of(memory: RankMemory) -> str:
    """The largest part of a rank's memory, in words."""
    largest = max(PARTS, key=lambda name: getattr(memory, name))
    return f"{gib(getattr(memory, largest))} of them {PARTS[largest]}"


def nothing_fits(plan: MeshPlan) -> str:
    """One line for a plan without a candidate that fits: what is missing, and what would do."""
    machine = plan.machine
    nearest = max(plan.candidates, key=lambda each: each.held.room)
    memory, total = gib(machine.device.memory_bytes), gib(nearest.fullest.total)
    need = f"{total}, {most_of(nearest.fullest)}" if nearest.fullest.total else total
    more = f"GPUs with {total}"
    if plan.least_gpus is not None:
        more = f"at least {plan.least_gpus} GPUs with {memory}, or {machine.num_gpus} with {total}"
    return (
        f"gpus={machine.num_gpus} do not fit {plan.work.tokens:,} tokens: the best mesh, {mesh_text(nearest)} with "
        f"decode={way(nearest)}, needs {need}, on a GPU of {memory}; use {more}, a shorter prompt, or a smaller model"
    )


def ratios(candidate: Candidate) -> list[float]:
    """The share of each stage, rounded so that they add up to 1."""
    num_tokens = candidate.partition.num_tokens
    rounded = [round(length / num_tokens, 4) for length in candidate.partition.chunk_lengths]
    longest = rounded.index(max(rounded))  # the last one may be empty
    rounded[longest] = round(rounded[longest] + 1 - sum(rounded), 4)
    return rounded


def launch_commands(plan: MeshPlan, model: ModelOptions, policy: Mapping[str, Any] = NO_POLICY) -> dict[str, str]:
    """The commands that run the plan, by what each is for. A plan from a config alone names where its weights would be.

    Every one can be pasted into a shell; of several nodes, into one on each.

    Args:
        policy: name and options of the policy that says which KV heads stream, if any do.
    """
    best, machine, work = plan.best, plan.machine, plan.work
    assert best is not None, plan
    num_nodes = -(-best.num_ranks // machine.per_node)
    nodes, where = "--standalone", ""
    if num_nodes > 1:
        nodes = f'--nnodes={num_nodes} --rdzv-backend=c10d --rdzv-endpoint="$HEAD:{PORT}"'
        where = f", on each of {num_nodes} nodes after HEAD=<name of the first>"
    start = f"torchrun {nodes} --nproc-per-node={min(machine.per_node, best.num_ranks)} -m launch.infer"
    words = [] if best.num_shares == 1 else [f"ranks.tensor={best.num_shares}"]
    if len(best.partition.chain) > 1:
        listed = ",".join(f"{ratio:g}" for ratio in ratios(best))
        words += ["partition=ratios", f"partition.ratios=[{listed}]", f"decode={way(best)}"]
    if best.held.piece_tokens is not None:
        words += ["prefill=single", f"prefill.chunk_tokens={best.held.piece_tokens}"]
    words += _prefill_words(work.prefill, len(best.partition.chain))
    words += [] if work.streams is None else _policy_words(policy)
    words += [] if work.batch == 1 else [f"prompt.batch={work.batch}"]
    words.append(f"generation.max_new_tokens={work.new_tokens}")

    def command(model: ModelOptions, prompt: str) -> str:
        return f"{start} {shlex.join([*_model_words(model), prompt, *words])}"

    prompts = "prompt.file=prompt.txt" if work.batch == 1 else "prompt.file=prompts.jsonl"
    if model.name is not ModelName.random:
        return {f"The plan{where}": command(model, prompts)}
    timed = {f"Its times, with random weights{where}": command(model, f"prompt.random_tokens={work.tokens}")}
    if model.layers is not None:  # which no checkpoint has
        return timed
    assert model.config is not None, model
    name = Path(model.config).resolve()
    folder = f"weights/{name.stem if name.suffix == '.json' and name.stem != 'config' else name.parent.name}"
    if name.is_dir() or name.name == "config.json":
        folder = str(name if name.is_dir() else name.parent)
    found = replace(model, name=ModelName.hf, path=folder, config=None, seed=0)
    return {f"The plan, with weights in {folder}{where}": command(found, prompts)} | timed


def _prefill_words(prefill: PrefillOptions, num_stages: int) -> list[str]:
    """The options of a prefill that differ from their defaults, where they have an effect."""
    defaults = PrefillOptions()
    given = {name: value for name, value in prefill.sparsity.items() if value != getattr(defaults, name)}
    if prefill.speculative is not Speculative.none:
        names = ("speculative_share", "speculative_chunk", "speculative_ahead", "speculative_layers")
        drafted = {name: getattr(prefill, name) for name in names}
        given = {"speculative": prefill.speculative.name} | {
            name: value for name, value in drafted.items() if value != getattr(PrefillOptions, name)
        }
    if prefill.wire_bits is not None and num_stages > 1:
        given["wire_bits"] = prefill.wire_bits
    told = {name: hydra_text(value) if isinstance(value, list) else value for name, value in given.items()}
    return [f"prefill.{name}={value}" for name, value in told.items()]


def _policy_words(policy: Mapping[str, Any]) -> list[str]:
    """A policy and its options."""
    given = {name: value for name, value in policy.items() if name not in ("name", "positions") and value is not None}
    return [
        f"policy={policy['name']}",
        *(f"policy.{name}={value}" for name, value in ({"heads": HEADS} | given).items()),
    ]


def _model_words(model: ModelOptions) -> list[str]:
    """The options of a model that differ from their defaults."""
    words = [f"model={model.name.name}"]
    for each in fields(model):
        value = getattr(model, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.name != "name" and value != default:
            told = value.name if isinstance(value, Enum) else str(value).lower() if isinstance(value, bool) else value
            told = hydra_text(told) if isinstance(told, dict | list) else told
            words.append(f"model.{each.name}={told}")
    return words


def as_json(plan: MeshPlan) -> dict[str, Any]:
    """The plan as plain values, seconds and bytes."""
    return {
        "model": {**vars(plan.size.shape), "dtype": plan.size.dtype, "weight_bytes": plan.size.weight_bytes()},
        "gpus": plan.machine.num_gpus,
        "nodes": plan.machine.num_nodes,
        "device": vars(plan.machine.device),
        "tokens": plan.work.tokens,
        "batch": plan.work.batch,
        "new_tokens": plan.work.new_tokens,
        "candidates": [_candidate_json(plan, candidate) for candidate in plan.candidates],
        "least_gpus": plan.least_gpus,
    }


def _candidate_json(plan: MeshPlan, candidate: Candidate) -> dict[str, Any]:
    ttft = candidate.ttft
    return {
        "stages": candidate.num_stages,
        "shares": candidate.num_shares,
        "decode": way(candidate),
        "chunk_tokens": candidate.held.piece_tokens,
        "boundaries": list(candidate.partition.boundaries),
        "best_split": candidate.is_best_split,
        "memory": [vars(each) | {"total": each.total} for each in candidate.held.memory],
        "room": candidate.held.room,
        "ttft_s": None if ttft is None else ttft.total,
        "ttft_parts_s": None if ttft is None else vars(ttft),
        "tpot_last_s": candidate.last_s,
        "tpot_sharded_s": candidate.sharded_s,
        "why_not": None if candidate is plan.best else reason(plan, candidate),
    }


def gib(num_bytes: float) -> str:
    """Bytes in GiB with three digits, in MiB below one."""
    size, unit = (num_bytes / 2**30, "GiB") if abs(num_bytes) >= 2**30 else (num_bytes / 2**20, "MiB")
    return f"{size:,.0f} {unit}" if abs(size) >= 100 else f"{size:.3g} {unit}"


def rate(link: Link) -> str:
    """Bandwidth of a link in GB/s."""
    return f"{link.bandwidth_Bps / 1e9:.3g} GB/s"


def bits(link: Link) -> str:
    """Bandwidth of a network link in Gbit/s."""
    return f"{link.bandwidth_Bps * BITS_PER_BYTE / 1e9:.3g} Gbit/s"


def assumptions(plan: MeshPlan, shares: dict[str, float]) -> list[str]:
    """The assumptions behind the figures, a line each.

    Args:
        shares: shares of the stated figures that are assumed to be reached, by name.
    """
    machine, size = plan.machine, plan.size
    device = machine.device
    lines = []
    if machine.measured is None:
        lines.append(
            f"{device.name}: {device.matmul_flops / 1e12:,.3g} TFLOP/s in matrix products and "
            f"{device.attention_flops / 1e12:,.3g} in causal attention ({shares['matmul']:.0%} and "
            f"{shares['attention']:.0%} of what is stated, assumed), {device.step_s * 1e6:.3g} µs overhead per step of "
            "a layer"
        )
    else:
        lines.append("compute of one device measured; a share of t does 1/t of it")
    lines.append(
        f"memory of {gib(device.memory_bytes)}, {gib(plan.work.reserve)} of it for libraries; read at "
        f"{device.memory_Bps / 1e9:,.0f} GB/s ({shares['memory']:.0%} of what is stated, assumed)"
    )
    lines.append(_links_text(machine, shares["link"]))
    sparsity = Sparsity.of(plan.work.prefill)
    if sparsity is not None:
        share = sparsity.mean_share(plan.work.tokens, 0, size.num_attending)
        why = "" if sparsity.density else " (of SmolLM2 in text, assumed)"
        exact = f"; all in {len(sparsity.exact_layers)} of its layers" if sparsity.exact_layers else ""
        lines.append(
            f"attention to {share:.0%} of the pairs of queries and keys{why}{exact}, once a stage has all keys before"
        )
    if plan.work.streams is not None:
        lines.append(
            f"{plan.work.streams}, in all layers alike, and no others are sent, or kept while decoding; which heads "
            "these are, the model's table says (policy.heads)"
        )
    lines.append(
        "two all-reduces per layer, ring or tree, overlapped with nothing; shares of a stage are inside a node, and "
        "their chains send at the same time"
    )
    if plan.best is not None and plan.best.draft is not None:
        lines.append(
            f"the first layers choose {plan.best.partition.num_tokens:,} of {plan.work.tokens:,} tokens, in "
            f"{seconds(plan.best.draft.total)} of the plan's TTFT; the split is of those"
        )
    lines += size.notes
    if size.max_positions is not None and plan.work.tokens + plan.work.new_tokens > size.max_positions:
        lines.append(
            f"the model has {size.max_positions:,} positions, too few for the prompt and its answer, so the command is "
            f"refused; plan for tokens={size.max_positions - plan.work.new_tokens} or fewer"
        )
    return lines


def _links_text(machine: Machine, share: float) -> str:
    words = []
    if machine.per_node > 1:
        words.append(f"{rate(machine.inside)} and {machine.inside.latency_s * 1e6:.3g} µs inside a node")
    if machine.between is not None:
        cards = f"{machine.nics} network card{'s' if machine.nics > 1 else ''} a node"
        words.append(
            f"{bits(machine.between)} and {machine.between.latency_s * 1e6:.3g} µs between nodes, {cards}, shared by "
            "the chains that cross"
        )
    return f"links: {'; '.join(words) or 'none'} ({share:.0%} of what is stated, assumed)"
