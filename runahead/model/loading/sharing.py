"""Shares of a model: the ranks of a group hold one model together, by transformers' own tensor-parallel plan.

A share is loaded without the whole model: transformers builds the model without memory, its plan lays the parameters
out over the group (`DTensor`), and each rank asks for its part of each stored tensor (`Parts`).
"""

# Legend: B batch, N query heads, K KV heads, n stored slots, t shares of a model.

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter, functional
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.distributed import DistributedConfig

from runahead.model.layer_kinds import decoder_config
from runahead.model.loading.quiet import one_line, quiet
from runahead.model.parts import is_laid_out, local_part
from runahead.ranks.meeting.seal import Seal
from runahead.ranks.objects import gather_objects

AXIS, COPIES = "tp", "_runahead_copies"
KV_PROJECTIONS = ("k_proj", "v_proj")
SHARED_HEADS = (*KV_PROJECTIONS, "qkv_proj", "query_key_value")
"""Modules whose rows are heads; a plan that calls one of them "colwise" gives each share some of the heads."""

STYLES = ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel")
"""transformers' modules that know what a plan's words mean; versions before 5.23 may have them elsewhere."""

Run = Callable[[Callable[[], Any]], Any]
"""Runs a call that waits for the other ranks of a group, such as a forward, and returns its result."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The ranks that hold one model together.

    Attributes:
        group: their process group; nothing else may use it while one of them runs a forward.
        hosts: group of the same ranks, for numbers of their hosts, which wait for no GPU.
        run: runs a call that waits for the other ranks of the group.
        seal: of their messages.
        device: where tensors are that the group carries.
    """

    group: dist.ProcessGroup
    hosts: dist.ProcessGroup
    run: Run
    seal: Seal
    device: torch.device

    @property
    def count(self) -> int:
        return self.group.size()

    @property
    def number(self) -> int:
        """Number of this rank's share."""
        return self.group.rank()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all shares, in order, on every rank of the group."""
        about = "values of the shares of a model"
        values: list[Any] = self.run(lambda: gather_objects(value, self.group, self.seal, about, self.device))
        return values

    def mean(self, x: Tensor) -> Tensor:
        """Mean of a tensor over the shares. All of them call this, inside a forward."""
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.count

    def of_first(self, numbers: Tensor) -> Tensor:
        """The first share's numbers, of the same shape on every rank. All of them call this."""
        told = numbers.clone()
        dist.broadcast(told, group=self.group, group_src=0)
        return told

    def joined(self, x_BKn: Tensor) -> Tensor:
        """Values of the KV heads of all shares, in order. All of them call this, inside a forward.

        Each share's are filled up with minus infinity at their end to the longest.
        """
        lengths = [torch.empty(1, dtype=torch.long, device=x_BKn.device) for _ in range(self.count)]
        dist.all_gather(lengths, torch.full_like(lengths[0], x_BKn.shape[2]), group=self.group)
        longest = max(int(length) for length in lengths)
        x_BKn = functional.pad(x_BKn, (0, longest - x_BKn.shape[2]), value=-torch.inf).contiguous()
        joined = [torch.empty_like(x_BKn) for _ in range(self.count)]
        dist.all_gather(joined, x_BKn, group=self.group)
        return torch.cat(joined, dim=1)


class Parts(Protocol):
    """A stored tensor, of which a part is read at a time. A `Tensor` in memory is used alike."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


def splits_heads(plan: Mapping[str, str]) -> bool:
    """Whether a tensor-parallel plan gives each share some of the heads, rather than all of them."""
    return any(name.rsplit(".", 1)[-1] in SHARED_HEADS and style == "colwise" for name, style in plan.items())


def fitting_shares(heads: int, kv_heads: int, plan: Mapping[str, str]) -> list[int]:
    """Numbers of shares that give each as many heads: whole KV heads, or a copy of one that several shares have."""
    copied = _copies_heads(plan)
    return [
        count
        for count in range(1, heads + 1)
        if heads % count == 0 and (kv_heads % count == 0 or (copied and count % kv_heads == 0))
    ]


def _copies_heads(plan: Mapping[str, str]) -> bool:
    """Whether KV heads can be copied: their projections are matrices of their own."""
    return any(name.rsplit(".", 1)[-1] in KV_PROJECTIONS and style == "colwise" for name, style in plan.items())


def copies_of_heads(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Number of copies of each KV head, and rows of a head, by the names of the parameters that have copies."""
    return getattr(module, COPIES, {})


def share_model(module: PreTrainedModel, group: dist.ProcessGroup, device: torch.device) -> None:
    """Keep only this rank's share of the weights in a loaded `module`, on `device`; its forward then needs all ranks.

    Nothing is sent between ranks.

    Raises:
        ValueError: transformers cannot split this model.
    """
    _untie(module)
    lay_out(module, group, device)
    _drop_the_rest(module)
    module.to(device)


def lay_out(module: PreTrainedModel, group: dist.ProcessGroup, device: torch.device) -> dict[str, tuple[int, int]]:
    """Lay a model's parameters out over a group: those that its plan splits become DTensors, also without memory.

    transformers makes groups itself; here it is given one that nothing else uses.

    Returns:
        as `copies_of_heads`.

    Raises:
        ValueError: transformers cannot split this model.
    """
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(AXIS,))
    distribute = type(module).maybe_distribute_model
    meshes: Any = mesh
    if "mesh_manager" in inspect.signature(distribute).parameters:  # not in transformers 5.17
        meshes = SimpleNamespace(get_mesh=lambda dims: mesh)  # tensor parallelism is its only axis
    try:
        import_styles()
        with quiet(), torch.no_grad():
            copies = _copy_kv_heads(module, mesh.size())
            setattr(module, COPIES, copies)
            distribute(module, DistributedConfig(tp_size=mesh.size(), tp_plan="auto"), meshes)
    except Exception as error:  # transformers may raise anything for sizes that do not divide
        raise ValueError(
            f"transformers cannot shard this model over {mesh.size()} ranks: {one_line(error)}; use another prefill"
        ) from error
    return copies


def import_styles() -> None:
    """Import the modules that register what a plan's words mean, where this transformers has them.

    A lean start has not imported them.

    Raises:
        ModuleNotFoundError: one of them is there, and lacks a module that it imports.
    """
    for styles in STYLES:
        try:
            import_module(styles)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{styles}.".startswith(f"{error.name}."):
                raise


def lay_out_apart(
    module: PreTrainedModel, group: dist.ProcessGroup, device: torch.device, changed: Collection[str]
) -> dict[str, str]:
    """Lay out a model without memory, and tie again the weights whose layouts are the same.

    Args:
        changed: names of weights that adapters change, which are no longer those that they are tied to.

    Returns:
        tied weights that become one of their own, with the name of the one that they equal.
    """
    tied = dict(getattr(module, "all_tied_weights_keys", {}))
    _untie(module)
    lay_out(module, group, device)
    apart = {}
    for name, source in tied.items():
        weight, other = (module.get_parameter(each) for each in (name, source))
        are_alike = getattr(weight, "placements", None) == getattr(other, "placements", None)
        if are_alike and name not in changed and source not in changed:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, other)
        else:
            apart[name] = source
    return apart


def reads_in_parts(module: PreTrainedModel) -> bool:
    """Whether a part of a weight is made of parts of the stored tensors.

    transformers makes a weight of several stored tensors, or of one in another order, for some families. It reads parts
    where each is an expert. Other weights must be made whole before a part is taken.
    """
    conversions = get_model_conversion_mapping(module)
    operations = [getattr(conversion, "operations", []) for conversion in conversions]
    names = [{type(operation).__name__ for operation in each} for each in operations if each]
    return all("MergeModulelist" in each and each <= {"MergeModulelist", "Concatenate"} for each in names)


def _copy_kv_heads(module: PreTrainedModel, num_shares: int) -> dict[str, tuple[int, int]]:
    """Extend the key and value projections of a model with fewer KV heads than shares by copies of each head.

    With K KV heads and t shares each head gets t / K copies in a row, so share j has KV head j K / t, which is the one
    that its query heads [j N / t, (j + 1) N / t) attend to.
    """
    config = decoder_config(module.config)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    copies = num_shares // kv_heads
    if copies < 2 or not _copies_heads(getattr(config, "base_model_tp_plan", None) or {}):
        return {}
    extended = {}
    for name, child in module.named_modules():
        projections = [getattr(child, each, None) for each in KV_PROJECTIONS]
        if not all(isinstance(each, nn.Linear) for each in projections):
            continue
        for each, projection in zip(KV_PROJECTIONS, projections, strict=True):
            assert isinstance(projection, nn.Linear)
            for kind, parameter in projection.named_parameters(recurse=False):
                rows = parameter.detach().unflatten(0, (kv_heads, -1)).repeat_interleave(copies, 0).flatten(0, 1)
                setattr(projection, kind, Parameter(rows, requires_grad=False))
                extended[f"{name}.{each}.{kind}"] = copies, parameter.shape[0] // kv_heads
            projection.out_features *= copies
        for attribute, factor in (("num_key_value_groups", 1 / copies), ("num_key_value_heads", copies)):
            if hasattr(child, attribute):
                setattr(child, attribute, int(getattr(child, attribute) * factor))
    return extended


def share_class(
    model_class: type[PreTrainedModel], group: dist.ProcessGroup, device: torch.device
) -> type[PreTrainedModel]:
    """A model class whose `from_pretrained(None, state_dict=...)` loads this rank's share.

    The parameters are laid out between the model's making, without memory, and the reading of its weights. The state
    dict has `Parts`; transformers asks each for this rank's part.
    """

    def load(model: PreTrainedModel, state_dict: dict[str, Parts], *args: Any, **keywords: Any) -> Any:
        copies = lay_out(model, group, device)
        turn = threading.Lock()
        parts: dict[str, Parts] = {}
        for name, stored in state_dict.items():
            same = next((each for each in names_in_model(name, model.base_model_prefix) if each in copies), None)
            parts[name] = OneAtATime(stored if same is None else HeadCopies(stored, *copies[same]), turn)
        return model_class._load_pretrained_model(model, parts, *args, **keywords)

    return type(
        model_class.__name__,
        (model_class,),
        {"__module__": model_class.__module__, "_load_pretrained_model": staticmethod(load)},
    )


def names_in_model(name: str, prefix: str) -> Iterator[str]:
    """Names that a stored tensor may have in the model: checkpoints may lack the prefix of the model without head."""
    yield from (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))


class OneAtATime:
    """Parts of a stored tensor, made while no other is: transformers' threads would make several at a time.

    A part is a copy, so that nothing of the whole tensor stays in memory.
    """

    def __init__(self, stored: Parts | Tensor, turn: threading.Lock) -> None:
        self._stored, self._turn = stored, turn

    def get_shape(self) -> list[int]:
        return list(self._stored.shape) if isinstance(self._stored, Tensor) else self._stored.get_shape()

    def get_dtype(self) -> Any:
        return self._stored.dtype if isinstance(self._stored, Tensor) else self._stored.get_dtype()  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Tensor:
        with self._turn:
            part = self._stored[index]
            fills = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
            return part if fills else part.clone(memory_format=torch.contiguous_format)


class HeadCopies:
    """A stored weight or bias of KV heads, as if each head were there `copies` times in a row."""

    def __init__(self, stored: Parts | Tensor, copies: int, rows_of_head: int) -> None:
        self._stored, self._copies, self._rows_of_head = stored, copies, rows_of_head
        self._shape = list(stored.shape) if isinstance(stored, Tensor) else stored.get_shape()

    def get_shape(self) -> list[int]:
        return [self._shape[0] * self._copies, *self._shape[1:]]

    def get_dtype(self) -> Any:
        return self._stored.dtype if isinstance(self._stored, Tensor) else self._stored.get_dtype()  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Tensor:
        rows, *rest = index if isinstance(index, tuple) else (slice(None) if index is Ellipsis else index,)
        wanted = torch.arange(*rows.indices(self.get_shape()[0]))
        stored = wanted // (self._rows_of_head * self._copies) * self._rows_of_head + wanted % self._rows_of_head
        if len(stored) == 0:
            return self._stored[(slice(0, 0), *rest)]
        first = int(stored.min())
        part = self._stored[(slice(first, int(stored.max()) + 1), *rest)]
        return part[(stored - first).to(part.device)]


def bytes_of(module: nn.Module) -> int:
    """Bytes of the weights that this rank has of a module, tied ones once; also of one without memory."""
    seen: dict[Any, int] = {}
    for parameter in module.parameters():
        local = local_part(parameter)
        seen[local.untyped_storage()._cdata, local.storage_offset()] = local.nbytes
    return sum(seen.values())


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
        if is_laid_out(parameter):
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > local.nbytes:
                parameter._local_tensor = local.clone()
