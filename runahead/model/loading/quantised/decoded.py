"""Choice of how the quantised weights of a checkpoint are read: decoded, kept decoded, or in 8 bits as they are."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from runahead.config import Weights
from runahead.model.layers import int8
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import stored_forms
from runahead.model.loading.hf import ModelMaker
from runahead.model.loading.quantised import in_8_bits
from runahead.model.loading.quantised.packed import PackedWeight


def dequantised(
    make: ModelMaker, empty: PreTrainedModel, changed: Collection[str], *, progress: bool
) -> tuple[ModelMaker, str]:
    """`make` with a checkpoint whose weights are decoded, as they are read or before; and what a report says of it.

    With `model.weights=int8` those that are stored so are not.

    Args:
        changed: parameters that adapters change.

    Raises:
        ValueError: a weight lacks a part.
    """
    source = make.checkpoint
    assert source.form is not None
    parts = checkpoints.stored_parts(source)
    form = replace(source.form, left_out=stored_forms.empty_biases(empty, parts))
    if make.options.weights is Weights.int8:
        form = replace(form, coded=_coded(empty, parts, changed))
    source, stored_as = replace(source, form=form), form.about(parts)
    if make.options.keep_dequantized and form.coded:
        warnings.warn(
            f"model.keep_dequantized has no effect on {source.label}: with model.weights=int8 its weights are taken in "
            "8 bits, as they are stored",
            stacklevel=2,
        )
    elif make.options.keep_dequantized:
        from runahead.model.loading.quantised.kept import kept

        try:
            return replace(make, checkpoint=kept(source, make.dtype, progress=progress)), stored_as
        except OSError as error:
            warnings.warn(f"{error}; until then every process dequantises them at every start", stacklevel=2)
    return replace(make, checkpoint=source), stored_as


def _coded(empty: PreTrainedModel, parts: Mapping[str, Any], changed: Collection[str]) -> frozenset[str]:
    """Names of stored weights that linear layers in 8 bits can have as they are: no other weight is made of them."""
    layers, ties = set(int8.linears(empty)), getattr(empty, "all_tied_weights_keys", {})
    places = {f"{name}.weight" for name, layer in empty.named_modules() if layer in layers}
    places -= {*ties, *ties.values(), *changed}
    return frozenset(
        name
        for name, target in stored_forms.weights_as_stored(empty, parts).items()
        if target in places and isinstance(parts[name], PackedWeight) and in_8_bits.fits(parts[name])
    )
