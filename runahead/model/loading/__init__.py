"""Loading of a model, or a share of it: its source finds a checkpoint (`FINDERS`), which is checked and then read.

To add a source: a file with a function that finds its checkpoint, a line in `FINDERS`, and a YAML.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from runahead.config import DType, Fuse, ModelName, ModelOptions, Table, Weights
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.kernels.operators import is_loaded
from runahead.model.layer_kinds import decoder_config, unsupported_kinds
from runahead.model.layers import int8
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import hf, stored_forms
from runahead.model.loading import overrides as config_overrides
from runahead.model.loading.building import Loading
from runahead.model.loading.checkpoint import Checkpoint, StoredTensor
from runahead.model.loading.kernels import load_if_built
from runahead.model.loading.memory import PeakMemory
from runahead.model.loading.quantised.decoded import dequantised
from runahead.model.loading.sharing import Shares
from runahead.report import MemoryReport

if TYPE_CHECKING:
    from runahead.model.lora.merging import Merging


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
    source = FINDERS[options.name](options, weights=True, progress=progress)
    small = _small_files(source)
    config = _read_config(small, options)
    tokenizer = hf.read_tokenizer(small, options) if tokenizer is None else tokenizer
    if source.in_safetensors:
        form = stored_forms.form_of(source, checkpoints.read_config(source), dequantize=options.dequantize)
        source = replace(source, form=form)
    dtype = _dtype(options, config, source, checkpoints.stored_tensors(source), device)
    empty = hf.empty_model(config, dtype, options, label=source.label)
    if options.weights is Weights.int8:
        _require_int8(dtype, device, 1 if shares is None else shares.count)
    merging, stored_as = _merging(options, config, source, progress=progress), ""
    make = hf.ModelMaker(
        checkpoint=source,
        config=config,
        options=options,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
    )
    if source.gguf:
        from runahead.model.loading.gguf import cache

        stored_as, merges = cache.forms(source), bool(merging.weights)
        make = cache.readable(make, empty, small, merges=merges, in_shares=shares is not None, progress=progress)
    elif source.form is not None:
        make, stored_as = dequantised(make, empty, merging.weights, progress=progress)
    checkpoint, stored = make.checkpoint, checkpoints.stored_tensors(make.checkpoint)
    if source.in_safetensors:
        sentence = stored_forms.unused(empty, stored, source)
        if sentence is not None and progress:
            warnings.warn(sentence, stacklevel=2)
    loading = Loading(
        make=make,
        empty=empty,
        stored=stored,
        merging=merging,
        shares=shares,
        ranks_on_host=ranks_on_host,
        progress=progress,
    )
    module = loading.run(keep)
    return LoadedWeights(
        module=module,
        tokenizer=tokenizer,
        name="+".join([checkpoint.name or f"random {config.model_type}", *merging.names]),
        dtype=dtype,
        path=str(source.path),
        shares=shares,
        overrides=config_overrides.fact(config, options.overrides),
        stored_as=stored_as,
        num_coded=len(checkpoint.form.coded) if checkpoint.form else 0,
        is_mapped=loading.footprint.mapped > 0 and checkpoint.form is None,
        fuse=options.fuse,
        memory=loading.memory(module),
        peak=loading.peak,
        made_from="" if hasattr(config, "auto_map") else _made_from(options, merging.digest, source, checkpoint),
        adapters=merging.digest,
        adapter_names=merging.names,
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


def _small_files(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of which config and tokenizer are read: the conversion of a GGUF file, if there is one."""
    if checkpoint.gguf is None:
        return checkpoint
    from runahead.model.loading.gguf import cache

    return cache.known(checkpoint) or checkpoint


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


def _merging(options: ModelOptions, config: Any, source: Checkpoint, *, progress: bool) -> Merging:
    """Adapters, laid out over the model. Raises: ValueError, OSError."""
    from runahead.model.lora import adapter
    from runahead.model.lora.merging import Merging

    found = adapter.find(options, progress=progress)
    for each in found:
        adapter.require_base(each, config, source.name, progress=progress)
    return Merging(found, lambda: hf.empty_model(config, torch.float32, options, label=source.label))


def _made_from(options: ModelOptions, adapters: str, *checkpoints: Checkpoint) -> str:
    """Digest of what a model is made from: `LoadedWeights.made_from`."""
    facts = [repr(options), *([adapters] if adapters else [])]
    for checkpoint in checkpoints:
        files = checkpoint.folder.iterdir() if checkpoint.in_safetensors else [checkpoint.path]
        for path in sorted(each for each in files if each.is_file()):
            about = path.stat()
            facts.append(f"{path.name} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()
