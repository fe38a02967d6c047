"""A loaded model's weights shared out over ranks, by transformers' own tensor parallelism (`tp_plan="auto"`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from runahead.model.loading.quiet import one_line, quiet

AXIS = "tp"


def shard_module(module: PreTrainedModel, group: dist.ProcessGroup, device: torch.device) -> None:
    """Leave this rank's share of the weights in `module`, on `device`; its forward then needs all ranks of the group.

    transformers does it while it loads a checkpoint, over groups that it makes itself. Here it is done to a loaded
    model, so that random weights are the same as without shares, and over a group that nothing else runs on. The
    forward is the same. Nothing is sent.

    Raises:
        ValueError: transformers cannot share this model out.
    """
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(AXIS,))
    _untie(module)
    distribute = type(module).maybe_distribute_model
    wants_meshes = "mesh_manager" in inspect.signature(distribute).parameters  # not in transformers 5.17
    try:
        with quiet(), torch.no_grad():
            distribute(
                module,
                DistributedConfig(tp_size=mesh.size(), tp_plan="auto"),
                _OneMesh(mesh) if wants_meshes else mesh,
            )
    except Exception as error:  # whatever transformers makes of sizes that do not divide
        raise ValueError(
            f"transformers cannot share this model out over {mesh.size()} ranks: {one_line(error)}; use another prefill"
        ) from error
    _drop_the_rest(module)
    module.to(device)


class _OneMesh:
    """Stands for transformers' set of meshes where tensor parallelism is the only axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def get_mesh(self, dims: Any) -> DeviceMesh:
        return self._mesh


def _untie(module: PreTrainedModel) -> None:
    """Give every module a parameter of its own, on the same memory: a plan knows no parameter that has two names."""
    seen = set()
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(child, name, Parameter(parameter.detach(), requires_grad=False))
            seen.add(id(parameter))


def _drop_the_rest(module: PreTrainedModel) -> None:
    """Shares are views of whole weights; a copy lets the rest go."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > local.nbytes:
                parameter._local_tensor = local.clone()
