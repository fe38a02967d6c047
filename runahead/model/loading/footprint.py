"""Bytes that the weights of a checkpoint take while a model is built of them."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedModel

from runahead.config import Weights
from runahead.model.layers import int8
from runahead.model.layers.fusing import is_wanted
from runahead.model.layers.products import may_be_siblings
from runahead.model.loading import sharing
from runahead.model.loading.checkpoint import StoredTensor
from runahead.model.loading.hf import ModelMaker
from runahead.model.loading.memory import Footprint

LOADING_THREADS = 4
"""Threads in which transformers reads tensors."""


def footprint_of(
    make: ModelMaker, empty: PreTrainedModel, stored: dict[str, StoredTensor], changed: Collection[str]
) -> Footprint:
    """Bytes that loading takes of all weights, which `model.weights=int8` rounds a layer at a time.

    Args:
        empty: the model without memory.
        stored: headers of the stored tensors.
        changed: parameters that become memory of this process, whatever they are stored as.
    """
    footprint = _as_read(make, empty, stored, changed)
    if make.options.weights is Weights.int8:
        given_bytes, encoded_bytes, largest_bytes = int8.bytes_of_linears(empty)
        coded = [each for each in stored.values() if each.held_bytes]
        given_bytes -= sum(each.num_elements * make.dtype.itemsize for each in coded)
        encoded_bytes -= sum(each.held_bytes for each in coded)
        if footprint.mapped and make.checkpoint.form is None:
            footprint.copied += encoded_bytes
            footprint.read += given_bytes
        elif given_bytes > 0:  # each layer's memory is freed before the next is encoded
            footprint.copied += largest_bytes
            footprint.read += max(0, given_bytes - encoded_bytes) + largest_bytes
    return footprint


def copied_tensors(make: ModelMaker, empty: PreTrainedModel, stored: dict[str, StoredTensor]) -> frozenset[str]:
    """Names of stored tensors of a quantised checkpoint that are not mapped, since fused layers would copy them."""
    options = make.options
    is_whole = make.checkpoint.form is not None and options.weights is Weights.full
    if not is_whole or make.device.type != "cpu" or not is_wanted(options.fuse, make.device, make.dtype):
        return frozenset()
    siblings, prefix = may_be_siblings(empty), empty.base_model_prefix
    return frozenset(name for name in stored if not siblings.isdisjoint(sharing.names_in_model(name, prefix)))


def _as_read(
    make: ModelMaker, empty: PreTrainedModel, stored: dict[str, StoredTensor], changed: Collection[str]
) -> Footprint:
    """Bytes of weights in the model's dtype. A stored tensor is mapped if it is a parameter, in the same dtype.

    Of quantised checkpoints all others are read, each beside what becomes of it.
    """
    if make.device.type != "cpu" or not stored:
        return Footprint(copied=sum(parameter.numel() * parameter.element_size() for parameter in empty.parameters()))
    parameters, prefix, is_quantised = empty.state_dict(), empty.base_model_prefix, make.checkpoint.form is not None
    footprint, read_bytes = Footprint(copied=0), list[int]()
    for name, tensor in stored.items():
        known = next((each for each in sharing.names_in_model(name, prefix) if each in parameters), None)
        own = make.dtype if known is None else parameters[known].dtype
        stored_bytes = tensor.num_elements * (tensor.dtype or make.dtype).itemsize
        is_plain = not tensor.packed_bytes and tensor.dtype == make.dtype and name not in make.copied
        if (is_plain or not is_quantised) and known is not None and known not in changed and own == tensor.dtype:
            footprint.mapped += stored_bytes
            continue
        footprint.copied += tensor.held_bytes or tensor.num_elements * own.itemsize
        if is_plain or not is_quantised:
            footprint.read += stored_bytes
        else:  # codes of one that stays in 8 bits are laid out anew
            read_bytes.append(tensor.packed_bytes * (2 if tensor.held_bytes else 1) or stored_bytes)
    footprint.whole = sum(sorted(read_bytes)[-LOADING_THREADS:])
    return footprint
