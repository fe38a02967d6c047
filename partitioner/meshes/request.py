"""Request of a plan, read from its options: the model's sizes, the machine and the work."""

from __future__ import annotations

from pathlib import Path

from partitioner.cost.measured import MeasuredCost
from partitioner.cost.streaming import Streams
from partitioner.meshes.machine import Machine, PlannedDevice
from partitioner.meshes.memory import Workload
from partitioner.meshes.model_size import ModelSize
from partitioner.meshes.options import PlanRun
from policies.byte_size import num_bytes
from runahead.config import DecodeName, Speculative
from runahead.failures import first_line
from runahead.files import read_user_file


def machine_of(run: PlanRun, size: ModelSize) -> Machine:
    """The machine that the options describe.

    Raises:
        ValueError: measured compute cannot be read, or is not of this model.
    """
    stated, share = run.stated, run.efficiency
    inside, between = run.links()
    return Machine(
        device=PlannedDevice(
            name=run.device or "the device",
            memory_bytes=stated.memory_bytes,
            matmul_flops=share.matmul * stated.matmul_flops,
            attention_flops=share.attention * stated.matmul_flops,
            memory_Bps=share.memory * stated.memory_Bps,
            step_s=share.step_us * 1e-6,
        ),
        num_gpus=run.gpus,
        num_nodes=run.nodes,
        inside=inside,
        between=between,
        nics=run.link.nics,
        measured=None if run.compute is None else read_compute(Path(run.compute), size, run.batch),
        pass_on_as_landed=not run.on_gpus,
    )


def workload_of(run: PlanRun, streams: Streams | None = None) -> Workload:
    """The work that the options describe, with the KV heads that stream in it."""
    assert run.tokens is not None
    return Workload(
        tokens=run.tokens,
        batch=run.batch,
        new_tokens=run.new_tokens,
        tensor=run.ranks.tensor if run.prefill.speculative is Speculative.none else 1,
        sharded=None if run.decode.name is DecodeName.auto else run.decode.name is DecodeName.sharded,
        reserve=num_bytes(run.reserve, "reserve"),
        prefill=run.prefill.of_run(),
        streams=streams,
    )


def read_compute(path: Path, size: ModelSize, batch: int) -> MeasuredCost:
    """Read the compute of one device, which python -m partitioner.search keeps beside its table.

    Raises:
        ValueError: it cannot be read, is of another model or dtype, or is used for several prompts at once.
    """
    option = f"compute={path}"
    try:
        purpose, _, text = read_user_file(path).decode("utf-8").partition("\n")
        cost = MeasuredCost.from_json(text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option} cannot be read ({first_line(error)}); python -m partitioner.search table=<json> writes "
            "<json>.compute.json"
        ) from error
    expected = [str(value) for value in (*size.shape.known.values(), size.dtype)]
    found = purpose.split("|")[: len(expected)]
    if found != expected:
        raise ValueError(
            f"{option} was measured with another model ({' '.join(found)}), not this one ({' '.join(expected)}); "
            "measure it with the same model and dtype"
        )
    if cost.states != size.places.states:
        raise ValueError(
            f"{option} was measured with another model (states in places {list(cost.states)}), not this one (in "
            f"{list(size.places.states)}); measure it with the same layers"
        )
    if "|tensor " in purpose:
        raise ValueError(f"{option} was measured on a share of a stage; measure it with ranks.tensor=1")
    if batch > 1:
        raise ValueError(f"{option} is the compute of one prompt at a time; leave batch={batch} out")
    return cost
