"""Merging of LoRA adapters by peft: a weight at a time, in float32, rounded once.

peft lays each adapter out over a model without memory, finds the place of each stored tensor there, and merges. It is
handed one weight at a time, so a model's weights are neither written, mapped as they may be, nor there twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tqdm import tqdm
from transformers import PreTrainedModel

from runahead.failures import is_lack_of_memory
from runahead.model.loading import stored_forms
from runahead.model.loading.checkpoint import Checkpoint, StoredTensor, stored_parts
from runahead.model.loading.memory import Footprint, require_room
from runahead.model.loading.quiet import one_line, quiet
from runahead.model.loading.sharing import Parts
from runahead.model.lora import adapter as adapters
from runahead.model.lora.adapter import Adapter

NAME = "runahead_merged"
"""Name of an adapter in peft's modules, which is a part of its tensors' names."""

WRAPPERS = ("base_layer", "original_module", "token_adapter")
"""Parts that peft's modules add to the names of weights."""

COPIES = 3
"""Most float32 copies of a weight while it is merged: the weight, what is added, and what DoRA makes of both."""

Change = Callable[[Tensor], Tensor]
"""Makes a weight in float32 of another, which it may write into."""


class Merging:
    """What adapters, or none, make of the weights of one model, by the weights' names in it.

    Attributes:
        names: of the adapters.
        digest: of their files.
    """

    def __init__(self, found: Sequence[Adapter], empty: Callable[[], PreTrainedModel]) -> None:
        """Lay out adapters, which are added one after another.

        Args:
            empty: makes the model without memory.

        Raises:
            ValueError: peft is not installed, or an adapter does not fit the model; one line.
        """
        self.names, self.digest = [each.name for each in found], adapters.digest(found)
        self._found = found
        self._changes: dict[str, list[Change]] = {}
        self._sizes: dict[str, int] = {}
        self._turn = threading.Lock()
        for each in found:
            module = empty()
            self._sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
            ties = dict(getattr(module, "all_tied_weights_keys", {}))
            self._sizes |= {name: self._sizes[source] for name, source in ties.items() if source in self._sizes}
            for name, changes in _changes(each, module, ties).items():
                if isinstance(changes[0], Replaced) and name in self._changes:
                    raise ValueError(f"{each.label} replaces {name}, which an adapter before it changes; leave one out")
                self._changes.setdefault(name, []).extend(changes)

    @property
    def weights(self) -> frozenset[str]:
        """Names in the model of the weights that change."""
        return frozenset(self._changes)

    @property
    def peak_bytes(self) -> int:
        """Memory of the host that merging the largest weight takes."""
        return COPIES * torch.float32.itemsize * max((self._sizes[name] for name in self._changes), default=0)

    def taken_bytes(self, place: torch.device, label: str, ranks_on_host: int) -> int:
        """Memory that merging takes where the weights are loaded. Of a GPU it takes none, but of its host.

        Args:
            label: of the model, for messages.

        Raises:
            ValueError: the host has not as much.
        """
        if place.type == "cpu":
            return self.peak_bytes
        if self._changes:
            footprint, label = Footprint(copied=self.peak_bytes), f"merging adapters into {label}"
            require_room(footprint, torch.device("cpu"), label=label, ranks_on_host=ranks_on_host)
        return 0

    def wider(
        self, checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], empty: PreTrainedModel
    ) -> dict[str, Parts]:
        """Stored tensors that change and the model has in fewer digits, by its names: they would be rounded twice.

        Args:
            stored: headers of the checkpoint's tensors.
            empty: the model without memory.

        Raises:
            ValueError: one is made of several stored tensors.
        """
        sources: dict[str, list[str]] = {}
        for name, target in stored_forms.targets_of(empty, stored).items():
            sources.setdefault(target, []).append(name)
        ties = dict(getattr(empty, "all_tied_weights_keys", {}))
        wanted: dict[str, list[str]] = {}
        for name in sorted(self.weights):
            # What is not found may be a part of any stored tensor.
            of = sources.get(name) or sources.get(ties.get(name, "")) or list(stored)
            if max((stored[each].read_width for each in of), default=0) > empty.get_parameter(name).dtype.itemsize:
                wanted[name] = of
        if not wanted:
            return {}
        whole, parts = stored_forms.weights_as_stored(empty, stored), stored_parts(checkpoint, torch.float32)
        for name, of in wanted.items():
            if len(of) > 1 or whole.get(of[0]) not in (name, ties.get(name)):
                raise ValueError(
                    f"{checkpoint.label}: adapters change {name}, which is made of several stored tensors and would be "
                    "rounded twice; use model.dtype=float32"
                )
        return {name: parts[of[0]] for name, of in wanted.items()}

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight with what the adapters add, in float32 in memory of its own, on the CPU.

        Raises:
            ValueError: it is not finite.
        """
        with self._turn, torch.no_grad():
            made = weight.detach().to("cpu", torch.float32, copy=True)
            for change in self._changes[name]:
                made = change(made)
        if not torch.isfinite(made).all():
            raise ValueError(f"{self._found[-1].label} makes numbers of {name} that are not finite; restore its files")
        return made

    def merge_into(self, module: nn.Module, wider: Mapping[str, Parts], *, bars: bool) -> None:
        """Replace the weights of a model, which keep their dtype and device. Tied ones are untied if one changes.

        Args:
            wider: stored tensors, by names in the model, of more digits than the model has.
            bars: show a progress bar.
        """
        for name in tqdm(sorted(self._changes), desc="Merging", disable=not bars, leave=False):
            owner, _, last = name.rpartition(".")
            parameter = module.get_parameter(name)
            weight = wider[name][...] if name in wider else parameter
            made = self.merged(name, weight).to(parameter.device, parameter.dtype)
            setattr(module.get_submodule(owner), last, Parameter(made, requires_grad=False))

    def of_parts(self, parts: Mapping[str, Parts | Tensor], weights: Mapping[str, str]) -> dict[str, Parts | Tensor]:
        """Stored tensors, of which those that change are merged when a part of them is asked for.

        Args:
            weights: names in the model of stored tensors that are a weight as they are.
        """
        made = dict(parts)
        for stored, name in weights.items():
            if name in self._changes:
                made[stored] = MergedParts(self, name, parts[stored])
        return made


class MergedParts:
    """A stored tensor as adapters change it, of which a part is made at a time."""

    def __init__(self, merging: Merging, name: str, stored: Parts | Tensor) -> None:
        self._merging, self._name, self._stored = merging, name, stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape) if isinstance(self._stored, Tensor) else self._stored.get_shape()

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self._merging.merged(self._name, self._stored[...])[index]


class Replaced:
    """A weight that an adapter stores whole (`modules_to_save`)."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, before: Tensor) -> Tensor:
        return self._weight.detach().to(torch.float32, copy=True)


class Merged:
    """A weight into which peft merges what one of its layers adds."""

    def __init__(self, layer: Any, parameter: str) -> None:
        self._layer, self._parameter = layer, parameter

    def __call__(self, weight: Tensor) -> Tensor:
        base = self._layer.get_base_layer()
        empty = getattr(base, self._parameter)
        setattr(base, self._parameter, Parameter(weight, requires_grad=False))
        try:
            self._layer.merge(adapter_names=[NAME])
            merged: Tensor = getattr(base, self._parameter).detach()
            return merged
        finally:
            setattr(base, self._parameter, empty)
            self._layer.merged_adapters.clear()


def _changes(found: Adapter, module: PreTrainedModel, ties: Mapping[str, str]) -> dict[str, list[Change]]:
    """The changes of one adapter to the weights of a model without memory, in order. Raises: ValueError."""
    try:
        from peft import LoraConfig, PeftModel, __version__
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ValueError(
            f"{found.label} needs the package peft ({one_line(error)}); install it: pip install 'runahead[adapters]'"
        ) from error
    known = {each.name for each in fields(LoraConfig)} | {"peft_version"}
    if new := [key for key, value in found.settings.items() if key not in known and value]:
        raise ValueError(f"{found.label} has the option {new[0]}, which peft {__version__} does not know; update peft")
    places = _place_weights(module)
    try:
        with quiet():
            settings = LoraConfig.from_pretrained(str(found.folder))
            settings.inference_mode = True
            laid_out = PeftModel(module, settings, adapter_name=NAME, low_cpu_mem_usage=True)
            names = getattr(module, "_checkpoint_conversion_mapping", {})  # of files of earlier versions
            folder, how = str(found.folder), {"torch_device": "cpu", "low_cpu_mem_usage": True, "key_mapping": names}
            report = laid_out.load_adapter(folder, NAME, **how)
    except Exception as error:  # peft, torch and safetensors may raise anything
        if is_lack_of_memory(error):
            raise
        raise ValueError(
            f"{found.label} cannot be laid out over this model ({_reason(error)}); take the model that it was made for"
        ) from error
    model = laid_out.base_model.model
    whole, lacking = _replaced(model, places, ties)
    changes = {name: list[Change]([change]) for name, change in whole.items()}
    if report.unexpected_keys:
        some = report.unexpected_keys
        raise ValueError(
            f"{found.label}: the model has no place for {len(some)} of its tensors, such as {_stored(some[0])}; take "
            "the model that it was made for"
        )
    if lacking:
        raise ValueError(
            f"{found.label} lacks {len(lacking)} of the tensors that its config describes, such as "
            f"{_stored(lacking[0])}; restore its files"
        )
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        parameter = getattr(layer, "parameter_name", "weight")
        changes.setdefault(_in_model(f"{name}.{parameter}"), []).append(Merged(layer, parameter))
    if not changes:
        raise ValueError(f"{found.label} changes no weight of this model; take the model that it was made for")
    return changes


def _place_weights(module: PreTrainedModel) -> set[int]:
    """Give a model without memory weights of one number each, that peft leaves an adapter on the CPU. Their ids."""
    places = set()
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            zeros = Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
            setattr(child, name, zeros)
            places.add(id(zeros))
    return places


def _replaced(model: nn.Module, places: set[int], ties: Mapping[str, str]) -> tuple[dict[str, Replaced], list[str]]:
    """Weights that an adapter's file has whole, and names of the adapter's tensors that it lacks."""
    whole, of_base = dict[str, Replaced](), dict[str, Replaced]()
    lacking = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        saved = f".modules_to_save.{NAME}."
        if NAME in name.split(".") and parameter.is_meta:
            lacking.append(f"base_model.model.{name}")
        elif saved in name:
            whole[_in_model(name.replace(saved, "."))] = Replaced(parameter)
        elif NAME not in name.split(".") and id(parameter) not in places:
            of_base[_in_model(name)] = Replaced(parameter)
    # Embeddings that peft stores beside what is added to them are those of all names that the model ties.
    for name, source in ties.items():
        of_base.update({each: of_base[other] for each, other in ((name, source), (source, name)) if other in of_base})
    return of_base | whole, lacking


def _in_model(name: str) -> str:
    """Name in the model of a weight in peft's modules."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _stored(name: str) -> str:
    """Name of an adapter's tensor in its file, for messages."""
    return name.replace(f".{NAME}", "")


def _reason(error: Exception) -> str:
    """peft's reason: of what torch lists the first entry, with names as in the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    at = next((line for line in lines if line.startswith("size mismatch")), "")
    if isinstance(error, KeyError):
        return f"it lacks {_stored(str(error.args[0]))}"
    return one_line(_stored(at)) if at else one_line(error)
