"""Sharding of a loaded model's weights over ranks, by transformers' own tensor parallelism (`tp_plan="auto"`)."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
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
    """Keep only this rank's shard of the weights in `module`, on `device`; its forward then needs all ranks.

    transformers does this while it loads a checkpoint, with groups that it makes itself. Here it is done to a loaded
    model, so that random weights are the same as unsharded ones, and with a group that nothing else uses. Nothing is
    sent between ranks.

    Raises:
        ValueError: transformers cannot shard this model.
    """
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(AXIS,))
    _untie(module)
    distribute = type(module).maybe_distribute_model
    meshes: Any = mesh
    if "mesh_manager" in inspect.signature(distribute).parameters:  # not in transformers 5.17
        meshes = SimpleNamespace(get_mesh=lambda dims: mesh)  # tensor parallelism is its only axis
    try:
        with quiet(), torch.no_grad():
            distribute(module, DistributedConfig(tp_size=mesh.size(), tp_plan="auto"), meshes)
    except Exception as error:  # transformers may raise anything for sizes that do not divide
        raise ValueError(
            f"transformers cannot shard this model over {mesh.size()} ranks: {one_line(error)}; use another prefill"
        ) from error
    _drop_the_rest(module)
    module.to(device)


def _untie(module: PreTrainedModel) -> None:
    """Give tied parameters a `Parameter` each, on the same memory: plans do not support a parameter with two names."""
    seen = set()
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(child, name, Parameter(parameter.detach(), requires_grad=False))
            seen.add(id(parameter))


def _drop_the_rest(module: PreTrainedModel) -> None:
    """Replace shards that are views of whole weights by copies, so that the whole weights are freed."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > local.nbytes:
                parameter._local_tensor = local.clone()
