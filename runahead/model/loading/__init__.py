"""Loading of a model, or a share of it: its source finds a checkpoint (`FINDERS`), which is checked and then read.

To add a source: a file with a function that finds its checkpoint, a line in `FINDERS`, and a YAML.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from runahead.config import DType, Fuse, ModelName, ModelOptions, Table, Weights
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.kernels.operators import is_loaded
from runahead.model.layer_kinds import decoder_config, unsupported_kinds
from runahead.model.layers import int8
from runahead.model.layers.fusing import is_wanted
from runahead.model.layers.products import may_be_siblings
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import hf, sharing, stored_forms
from runahead.model.loading import overrides as config_overrides
from runahead.model.loading.checkpoint import Checkpoint, StoredTensor
from runahead.model.loading.kernels import load_if_built
from runahead.model.loading.memory import Footprint, PeakMemory, available_bytes, give_back, require_room
from runahead.model.loading.quantised import in_8_bits
from runahead.model.loading.quantised.packed import PackedWeight
from runahead.model.loading.sharing import Shares
from runahead.report import MemoryReport

if TYPE_CHECKING:
    from runahead.model.lora.merging import Merging

LONG_LOAD_BYTES = 2**28
"""Least bytes to copy for which a progress bar is shown."""

LOADING_THREADS = 4
"""Threads in which transformers reads tensors."""

PAGE_BYTES = 4096


@dataclass(kw_only=True)
class LoadedWeights:
    """A loaded model: `module` is in eval mode, on its device, without gradients; `path` is where it came from.

    Attributes:
        shares: the ranks that hold the model together; None if `module` is all of it.
        overrides: what its config has in place of the checkpoint's, as one line; "" for nothing.
        stored_as: format and bits of quantised weights, which were decoded to `dtype`; "" for plain ones.
        num_coded: linear layers in 8 bits whose codes and scales are those of the files.
        is_mapped: whether weights are in the page cache of the checkpoint's files, those of linear layers, too.
        fuse: as of `ModelOptions`.
        memory: memory of this rank while it loaded.
        peak: goes on from there.
        made_from: digest of the options, and of names, sizes and times of the files; "" where the model's own code was
            loaded, which may be anywhere.
        adapters: digests of the adapters that are merged into the weights, in order; "" for none.
        adapter_names: their names, which the model's name has, too.
    """

    module: PreTrainedModel
    tokenizer: Any | None
    name: str
    dtype: torch.dtype
    path: str
    shares: Shares | None = None
    overrides: str = ""
    stored_as: str = ""
    num_coded: int = 0
    is_mapped: bool
    fuse: Fuse
    memory: MemoryReport
    peak: PeakMemory
    made_from: str = ""
    adapters: str = ""
    adapter_names: Sequence[str] = ()


FINDERS: Table[ModelName, Callable[..., Checkpoint]] = Table(
    {
        ModelName.smollm2: "runahead.model.loading.smollm2:find",
        ModelName.hf: "runahead.model.loading.checkpoint:find",
        ModelName.random: "runahead.model.loading.random_weights:find",
    }
)
"""Function of each source that finds a checkpoint, and downloads it if necessary.

With `weights=False` only config and tokenizer need be there. Raises a ValueError or an OSError of one line with the
remedy if there is none.
"""


def load(
    options: ModelOptions,
    *,
    device: torch.device,
    attn_implementation: str,
    progress: bool = False,
    ranks_on_host: int = 1,
    shares: Shares | None = None,
    tokenizer: Any = None,
    keep: Callable[[PreTrainedModel], object] | None = None,
) -> LoadedWeights:
    """Load a model's weights to `device`, in eval mode and without gradients, and its tokenizer if it has one.

    Args:
        attn_implementation: a name registered with transformers' AttentionInterface. Families that choose among their
            own attention classes are built with "eager", and only their config gets the name.
        progress: show progress bars on standard error, and warn of tensors that are not used; otherwise nothing is
            written there.
        ranks_on_host: processes on this host that load the same model. Weights that cannot be mapped from the file
            need memory once per process.
        shares: load this rank's share only. Nothing is sent between ranks.
        tokenizer: the model's, of `load_tokenizer`, if it has been read; otherwise it is.
        keep: takes out of the loaded model what this rank does not need, before weights that are mapped are read, or
            those of a CPU go to another device.

    Raises:
        ValueError, OSError: the model cannot be loaded; one line that names the path and the remedy.
    """
    shares = None if shares is None or shares.count == 1 else shares
    source = checkpoint = FINDERS[options.name](options, weights=True, progress=progress)
    small = _small_files(source)
    stored_as = _forms_of_gguf(source) if source.gguf else ""
    config = _read_config(small, options)
    tokenizer = hf.read_tokenizer(small, options) if tokenizer is None else tokenizer
    is_random = source.config_file is not None
    if not source.gguf and not is_random:
        form = stored_forms.form_of(source, checkpoints.read_config(source), dequantize=options.dequantize)
        source = checkpoint = replace(source, form=form)
    stored = {} if source.gguf or is_random else checkpoints.stored_tensors(source)
    dtype = _dtype(options, config, source, stored, device)
    empty = hf.empty_model(config, dtype, options, label=source.label)
    if options.weights is Weights.int8:
        _require_int8(dtype, device, 1 if shares is None else shares.count)
    merging = _merging(options, config, source, progress=progress)
    make = hf.ModelMaker(
        checkpoint=source,
        config=config,
        options=options,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
    )
    if source.gguf:
        from runahead.model.loading import gguf_cache

        stored_forms.require_taken_of_gguf(empty, checkpoints.read_gguf(source), source)
        try:
            stored_make, stored_empty = _as_stored(make, small), empty
            if merging is not None:  # what adapters add to it is rounded once
                stored_make = replace(stored_make, dtype=torch.float32)
                stored_empty = hf.empty_model(config, torch.float32, options, label=source.label)
            checkpoint = gguf_cache.converted(stored_make, stored_empty, progress=progress)
        except OSError as error:
            if shares is not None:
                raise
            if merging is not None and dtype is not torch.float32:
                raise OSError(
                    f"{error}; what adapters add to a GGUF file is rounded once, so it is kept in float32, 4 bytes a "
                    "weight; merge them into a checkpoint of 16 bits, or use model.dtype=float32"
                ) from error
            warnings.warn(f"{error}; until then every process unpacks the file at every start", stacklevel=2)
        else:
            stored = checkpoints.stored_tensors(checkpoint)
            make = replace(make, checkpoint=checkpoint)
    elif not is_random:
        if source.form is not None:
            changed = merging.weights if merging else frozenset()
            checkpoint, stored_as = _dequantised(make, empty, changed, progress=progress)
            stored, make = checkpoints.stored_tensors(checkpoint), replace(make, checkpoint=checkpoint)
        sentence = stored_forms.unused(empty, stored, source)
        if sentence is not None and progress:
            warnings.warn(sentence, stacklevel=2)
    if is_random:
        from runahead.model.loading import random_weights
    in_parts = is_random or sharing.reads_in_parts(empty)
    as_stored = stored_forms.weights_as_stored(empty, stored) if merging else {}
    in_parts = in_parts and (merging is None or merging.weights <= set(as_stored.values()))
    if shares is not None and in_parts:
        whole = max(parameter.nbytes for parameter in empty.parameters())
        whole = max(whole, _merging_bytes(merging, device, checkpoint.label, ranks_on_host))
        untied = sharing.lay_out_apart(empty, shares.group, device, merging.weights if merging else ())
        footprint = Footprint(copied=sharing.bytes_of(empty), whole=whole)
        require_room(footprint, device, label=checkpoint.label, ranks_on_host=ranks_on_host)
        peak = PeakMemory(device)
        base_bytes = peak.now_bytes()
        decoded = dtype if merging is None else torch.float32  # rounded once, when merged
        parts = random_weights.parts(make) if is_random else checkpoints.stored_parts(checkpoint, decoded)
        bars = progress and footprint.copied > LONG_LOAD_BYTES
        merged = partial(merging.of_parts, weights=as_stored) if merging else dict
        module = hf.build_share(make, type(empty), parts, shares.group, bars=bars, untied=untied, merged=merged)
    else:
        place = device if shares is None and keep is None else torch.device("cpu")
        if shares is None:
            make = replace(make, copied=_copied(make, empty, stored))
        make = replace(make, device=place)
        footprint = _footprint(make, empty, stored, merging.weights if merging else frozenset())
        footprint.whole = max(footprint.whole, _merging_bytes(merging, place, checkpoint.label, ranks_on_host))
        are_mapped = footprint.mapped > 0 and checkpoint.form is None
        if options.weights is Weights.int8:
            given_bytes, encoded_bytes, largest_bytes = int8.bytes_of_linears(empty)
            coded = [each for each in stored.values() if each.held_bytes]
            given_bytes -= sum(each.num_elements * dtype.itemsize for each in coded)
            encoded_bytes -= sum(each.held_bytes for each in coded)
            if are_mapped:
                footprint.copied += encoded_bytes
                footprint.read += given_bytes
            elif given_bytes > 0:  # each layer's memory is freed before the next is encoded
                footprint.copied += largest_bytes
                footprint.read += max(0, given_bytes - encoded_bytes) + largest_bytes
        require_room(footprint, place, label=checkpoint.label, ranks_on_host=ranks_on_host)
        peak = PeakMemory(device)
        base_bytes = peak.now_bytes()
        bars = progress and footprint.copied > LONG_LOAD_BYTES
        model_class = None if checkpoint.form is None else type(empty)
        module = random_weights.build(make) if is_random else hf.build(make, bars=bars, model_class=model_class)
        if merging is not None:
            merging.merge_into(module, _wider(checkpoint, stored, empty, merging), bars=bars)
        if keep is not None:
            keep(module)
            module.to(device)
        if shares is not None:
            sharing.share_model(module, shares.group, device)
        elif 0 < footprint.mapped < available_bytes():
            _read_in(module)
    module.config._attn_implementation = attn_implementation
    module = module.eval().requires_grad_(False)
    if options.weights is Weights.int8:
        int8.encode_linears(module)
        if not int8.encoded_layers(module):
            raise ValueError(
                f"model.weights=int8 rounds linear layers (torch's nn.Linear), of which {checkpoint.label} has none "
                f"({config.model_type}); leave it out"
            )
        give_back()
    weights_bytes = sharing.bytes_of(module)
    adapters = merging.digest if merging else ""
    return LoadedWeights(
        module=module,
        tokenizer=tokenizer,
        name="+".join([checkpoint.name or f"random {config.model_type}", *(merging.names if merging else ())]),
        dtype=dtype,
        path=str(source.path),
        shares=shares,
        overrides=config_overrides.fact(config, options.overrides),
        stored_as=stored_as,
        num_coded=len(checkpoint.form.coded) if checkpoint.form else 0,
        is_mapped=footprint.mapped > 0 and checkpoint.form is None,
        fuse=options.fuse,
        memory=MemoryReport(
            base_bytes=base_bytes,
            weights_bytes=weights_bytes,
            load_peak_bytes=peak.peak_bytes(),
            predicted_load_peak_bytes=base_bytes + weights_bytes + footprint.whole + footprint.read,
        ),
        peak=peak,
        made_from="" if hasattr(config, "auto_map") else _made_from(options, adapters, source, checkpoint),
        adapters=adapters,
        adapter_names=merging.names if merging else (),
    )


def _require_int8(dtype: torch.dtype, device: torch.device, num_shares: int) -> None:
    """Check that weights can be in 8 bits here. Raises: ValueError."""
    check(Setup(weights=Weights.int8, device=device.type, num_shares=num_shares))
    if dtype not in int8.COMPUTED:
        raise ValueError(
            f"model.weights=int8 computes in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}; use "
            "model.dtype=float32 or bfloat16"
        )
    if not is_loaded() and (why := load_if_built()):
        raise ValueError(f"model.weights=int8 needs kernels: {why}")


def load_config(options: ModelOptions, *, progress: bool = False) -> Any:
    """Load a model's transformers config, without its weights (smollm2 is fetched as a whole on first use).

    Raises:
        ValueError, OSError: as for `load`.
    """
    return _read_config(_small_files(FINDERS[options.name](options, weights=False, progress=progress)), options)


def load_decoder_config(options: ModelOptions, *, progress: bool = False) -> Any:
    """`load_config`, of the text decoder alone: its layers, heads and positions. Raises: ValueError, OSError."""
    return decoder_config(load_config(options, progress=progress))


def _read_config(checkpoint: Checkpoint, options: ModelOptions) -> Any:
    """Read a config, of a model whose kinds of layers are supported. Raises: ValueError."""
    config = hf.read_config(checkpoint, options)
    if (why := unsupported_kinds(decoder_config(config))) is not None:
        raise ValueError(f"{checkpoint.label}: this {config.model_type} model {why}")
    return config


def expected_dtype(options: ModelOptions, config: Any, device: torch.device) -> torch.dtype:
    """The dtype in which `load` would have the weights on a device, as far as it follows from the small files.

    Raises:
        ValueError, OSError: as for `load`.
    """
    source = FINDERS[options.name](options, weights=False, progress=False)
    return _dtype(options, config, source, {}, device)


def load_tokenizer(options: ModelOptions) -> Any | None:
    """Load a model's tokenizer, without its weights; None if it has none.

    Raises:
        ValueError, OSError: as for `load`, or the tokenizer's files are damaged.
    """
    return hf.read_tokenizer(_small_files(FINDERS[options.name](options, weights=False, progress=False)), options)


def _forms_of_gguf(source: Checkpoint) -> str:
    """The types of quantised weights in a GGUF file; "" for plain ones."""
    forms = sorted(set(checkpoints.read_gguf(source).tensors.values()) - {"F64", "F32", "F16", "BF16"})
    return f"gguf, {' and '.join(forms)}" if forms else ""


def _dequantised(
    make: hf.ModelMaker, empty: PreTrainedModel, changed: Collection[str], *, progress: bool
) -> tuple[Checkpoint, str]:
    """A checkpoint of which quantised weights are decoded, as they are read or before; and what a report says of it.

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
            return kept(source, make.dtype, progress=progress), stored_as
        except OSError as error:
            warnings.warn(f"{error}; until then every process dequantises them at every start", stacklevel=2)
    return source, stored_as


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


def _as_stored(make: hf.ModelMaker, small: Checkpoint) -> hf.ModelMaker:
    """`make` without the config's overrides, for a conversion, which later runs use with others."""
    if not make.options.overrides:
        return make
    options = replace(make.options, overrides={})
    return replace(make, config=hf.read_config(small, options), options=options)


def _small_files(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of which config and tokenizer are read: the conversion of a GGUF file, if there is one."""
    if checkpoint.gguf is None:
        return checkpoint
    from runahead.model.loading import gguf_cache

    return gguf_cache.known(checkpoint) or checkpoint


def _dtype(
    options: ModelOptions, config: Any, checkpoint: Checkpoint, stored: dict[str, StoredTensor], device: torch.device
) -> torch.dtype:
    """The dtype asked for; for auto the config's, else that of the first tensor.

    Quantised GGUF files have none: float32 on a CPU; bfloat16 on a GPU, where float32 is about ten times slower.
    """
    if options.dtype is not DType.auto:
        chosen: torch.dtype = getattr(torch, options.dtype.name)
        return chosen
    if checkpoint.gguf:
        # Norms are in float32 in every GGUF file.
        forms = set(checkpoints.read_gguf(checkpoint).tensors.values()) - {"F32"}
        halves = {"F16": torch.float16, "BF16": torch.bfloat16}
        if forms and not forms <= set(halves) and device.type != "cpu":
            return torch.bfloat16
        return halves.get(forms.pop(), torch.float32) if len(forms) == 1 else torch.float32
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return next((tensor.dtype for tensor in stored.values() if tensor.dtype), torch.float32)


def _merging(options: ModelOptions, config: Any, source: Checkpoint, *, progress: bool) -> Merging | None:
    """Adapters, laid out over the model; None if there are none. Raises: ValueError, OSError."""
    if not options.adapter:
        return None
    from runahead.model.lora import adapter
    from runahead.model.lora.merging import Merging

    found = adapter.find(options, progress=progress)
    for each in found:
        adapter.require_base(each, config, source.name, progress=progress)
    return Merging(found, lambda: hf.empty_model(config, torch.float32, options, label=source.label))


def _merging_bytes(merging: Merging | None, place: torch.device, label: str, ranks_on_host: int) -> int:
    """Memory that merging takes where the weights are loaded. Of a GPU it takes none, but of its host.

    Raises:
        ValueError: the host has not as much.
    """
    if merging is None:
        return 0
    if place.type == "cpu":
        return merging.peak_bytes
    footprint = Footprint(copied=merging.peak_bytes)
    require_room(footprint, torch.device("cpu"), label=f"merging adapters into {label}", ranks_on_host=ranks_on_host)
    return 0


def _wider(
    checkpoint: Checkpoint, stored: dict[str, StoredTensor], empty: PreTrainedModel, merging: Merging
) -> Mapping[str, Any]:
    """Stored tensors that adapters change and the model has in fewer digits: rounded first they would be rounded twice.

    Raises:
        ValueError: one is made of several stored tensors.
    """
    sources: dict[str, list[str]] = {}
    for name, target in stored_forms.targets_of(empty, stored).items():
        sources.setdefault(target, []).append(name)
    ties = dict(getattr(empty, "all_tied_weights_keys", {}))
    wanted: dict[str, list[str]] = {}
    for name in sorted(merging.weights):
        # What is not found may be a part of any stored tensor.
        of = sources.get(name) or sources.get(ties.get(name, "")) or list(stored)
        if max(map(_read_width, map(stored.__getitem__, of)), default=0) > empty.get_parameter(name).dtype.itemsize:
            wanted[name] = of
    if not wanted:
        return {}
    whole, parts = stored_forms.weights_as_stored(empty, stored), checkpoints.stored_parts(checkpoint, torch.float32)
    for name, of in wanted.items():
        if len(of) > 1 or whole.get(of[0]) not in (name, ties.get(name)):
            raise ValueError(
                f"{checkpoint.label}: adapters change {name}, which is made of several stored tensors and would be "
                "rounded twice; use model.dtype=float32"
            )
    return {name: parts[of[0]] for name, of in wanted.items()}


def _read_width(tensor: StoredTensor) -> int:
    """Bytes of a number of a stored tensor, as it is read; what is packed is decoded in float32."""
    if tensor.packed_bytes:
        return torch.float32.itemsize
    return tensor.dtype.itemsize if tensor.dtype else 0


def _copied(make: hf.ModelMaker, empty: PreTrainedModel, stored: dict[str, StoredTensor]) -> frozenset[str]:
    """Names of stored tensors of a quantised checkpoint that are not mapped, since fused layers would copy them."""
    options = make.options
    is_whole = make.checkpoint.form is not None and options.weights is Weights.full
    if not is_whole or make.device.type != "cpu" or not is_wanted(options.fuse, make.device, make.dtype):
        return frozenset()
    siblings, prefix = may_be_siblings(empty), empty.base_model_prefix
    return frozenset(name for name in stored if not siblings.isdisjoint(sharing.names_in_model(name, prefix)))


def _footprint(
    make: hf.ModelMaker, empty: PreTrainedModel, stored: dict[str, StoredTensor], changed: Collection[str]
) -> Footprint:
    """Bytes that loading takes. A stored tensor is mapped if it is a parameter of the model, in the same dtype.

    Of quantised checkpoints all others are read, each beside what becomes of it.

    Args:
        changed: parameters that become memory of this process, whatever they are stored as.
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


def _made_from(options: ModelOptions, adapters: str, *checkpoints: Checkpoint) -> str:
    """Digest of what a model is made from: `LoadedWeights.made_from`."""
    facts = [repr(options), *([adapters] if adapters else [])]
    for checkpoint in checkpoints:
        files = [checkpoint.path] if checkpoint.gguf or checkpoint.config_file else checkpoint.folder.iterdir()
        for path in sorted(each for each in files if each.is_file()):
            about = path.stat()
            facts.append(f"{path.name} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _read_in(module: PreTrainedModel) -> None:
    """Touch every page of the mapped weights, so that the file is read now rather than during the first prompt."""
    for parameter in module.parameters():
        parameter.detach().flatten().view(torch.uint8)[::PAGE_BYTES].sum()
