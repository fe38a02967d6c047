"""`Loading`: weights from a checkpoint become a model, whole or a share of it, within the memory that there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from runahead.config import Weights
from runahead.model.layers import int8
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import hf, sharing, stored_forms
from runahead.model.loading.checkpoint import StoredTensor
from runahead.model.loading.footprint import copied_tensors, footprint_of
from runahead.model.loading.memory import Footprint, PeakMemory, available_bytes, give_back, require_room
from runahead.model.loading.sharing import Shares
from runahead.report import MemoryReport

if TYPE_CHECKING:
    from runahead.model.lora.merging import Merging

LONG_LOAD_BYTES = 2**28
"""Least bytes to copy for which a progress bar is shown."""

PAGE_BYTES = 4096


@dataclass(kw_only=True)
class Loading:
    """Loading of a model's weights, once it is known how they are read.

    Attributes:
        make: what the model is built from.
        empty: the model without memory.
        stored: headers of the stored tensors; none of random weights, and of a GGUF file that is unpacked.
        merging: what adapters make of the weights.
        shares: the ranks that share the model; None: this one has it whole.
        ranks_on_host: processes on this host that load the same model.
        progress: show progress bars.
        footprint: bytes that the load takes, once it has begun.
        peak: memory of this process from then on.
    """

    make: hf.ModelMaker
    empty: PreTrainedModel
    stored: dict[str, StoredTensor]
    merging: Merging
    shares: Shares | None
    ranks_on_host: int
    progress: bool
    footprint: Footprint = field(init=False)
    peak: PeakMemory = field(init=False)
    _base_bytes: int = field(init=False)

    def run(self, keep: Callable[[PreTrainedModel], object] | None) -> PreTrainedModel:
        """The model, or this rank's share of it, in eval mode, on its device, without gradients.

        Args:
            keep: as of `load`.

        Raises:
            ValueError: there is no room for the weights, or something is wrong with them.
        """
        as_stored = stored_forms.weights_as_stored(self.empty, self.stored) if self.merging.weights else {}
        in_parts = self._is_random or sharing.reads_in_parts(self.empty)
        if self.shares is not None and in_parts and self.merging.weights <= set(as_stored.values()):
            module = self._share(self.shares.group, as_stored)
        else:
            module = self._whole(keep)
        module.config._attn_implementation = self.make.attn_implementation
        module = module.eval().requires_grad_(False)
        if self.make.options.weights is Weights.int8:
            int8.encode_linears(module)
            if not int8.encoded_layers(module):
                raise ValueError(
                    "model.weights=int8 rounds linear layers (torch's nn.Linear), of which "
                    f"{self.make.checkpoint.label} has none ({self.make.config.model_type}); leave it out"
                )
            give_back()
        return module

    def _share(self, group: dist.ProcessGroup, as_stored: Mapping[str, str]) -> PreTrainedModel:
        """This rank's share, read in parts. `as_stored` is of `stored_forms.weights_as_stored`."""
        make, empty, merging = self.make, self.empty, self.merging
        whole_bytes = max(parameter.nbytes for parameter in empty.parameters())
        untied = sharing.lay_out_apart(empty, group, make.device, merging.weights)
        bars = self._begin(Footprint(copied=sharing.bytes_of(empty), whole=whole_bytes), make.device)
        if self._is_random:
            from runahead.model.loading import random_weights

            parts = random_weights.parts(make)
        else:  # what adapters change is rounded once, when it is merged
            parts = checkpoints.stored_parts(make.checkpoint, torch.float32 if merging.weights else make.dtype)
        merged = partial(merging.of_parts, weights=as_stored)
        return hf.build_share(make, type(empty), parts, group, bars=bars, untied=untied, merged=merged)

    def _whole(self, keep: Callable[[PreTrainedModel], object] | None) -> PreTrainedModel:
        """The whole model, of which a share or what `keep` leaves stays."""
        device, shares, merging, make = self.make.device, self.shares, self.merging, self.make
        if shares is None:
            make = replace(make, copied=copied_tensors(make, self.empty, self.stored))
        make = replace(make, device=device if shares is None and keep is None else torch.device("cpu"))
        bars = self._begin(footprint_of(make, self.empty, self.stored, merging.weights), make.device)
        if self._is_random:
            from runahead.model.loading import random_weights

            module = random_weights.build(make)
        else:
            model_class = None if make.checkpoint.form is None else type(self.empty)
            module = hf.build(make, bars=bars, model_class=model_class)
        if merging.weights:
            merging.merge_into(module, merging.wider(make.checkpoint, self.stored, self.empty), bars=bars)
        if keep is not None:
            keep(module)
            module.to(device)
        if shares is not None:
            sharing.share_model(module, shares.group, device)
        elif 0 < self.footprint.mapped < available_bytes():
            _read_in(module)
        return module

    @property
    def _is_random(self) -> bool:
        return self.make.checkpoint.config_file is not None

    def _begin(self, footprint: Footprint, place: torch.device) -> bool:
        """Begin to load to a place, with memory beside for adapters. Returns whether to show a progress bar.

        Raises:
            ValueError: the weights do not fit there.
        """
        label = self.make.checkpoint.label
        footprint.whole = max(footprint.whole, self.merging.taken_bytes(place, label, self.ranks_on_host))
        require_room(footprint, place, label=label, ranks_on_host=self.ranks_on_host)
        self.footprint, self.peak = footprint, PeakMemory(self.make.device)
        self._base_bytes = self.peak.now_bytes()
        return self.progress and footprint.copied > LONG_LOAD_BYTES

    def memory(self, module: PreTrainedModel) -> MemoryReport:
        """Memory of this process until the model was loaded."""
        weights_bytes = sharing.bytes_of(module)
        most_bytes = weights_bytes + self.footprint.whole + self.footprint.read
        return MemoryReport(
            base_bytes=self._base_bytes,
            weights_bytes=weights_bytes,
            load_peak_bytes=self.peak.peak_bytes(),
            predicted_load_peak_bytes=self._base_bytes + most_bytes,
        )


def _read_in(module: PreTrainedModel) -> None:
    """Touch every page of the mapped weights, so that the file is read now rather than during the first prompt."""
    for parameter in module.parameters():
        parameter.detach().flatten().view(torch.uint8)[::PAGE_BYTES].sum()
