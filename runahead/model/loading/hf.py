"""Weights from a local folder, a hub id or a GGUF file, through transformers.

transformers builds the model without memory and sets its parameters to views of the mapped safetensors files. So on a
CPU the processes of a host share one copy of the weights, in the page cache, and a GPU is filled from these views.
Weights are copied only if another dtype is asked for, or a family stores them in another form (experts, GGUF blocks).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
)

from runahead.config import MAX_LAYERS, DType, ModelOptions
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading.base import LoadedWeights
from runahead.model.loading.checkpoint import Checkpoint, StoredTensor
from runahead.model.loading.memory import Footprint, available_bytes, give_back, require_room
from runahead.model.loading.quiet import one_line, quiet

LONG_LOAD_BYTES = 2**28
"""Least bytes to copy for which a progress bar is shown."""

PAGE_BYTES = 4096

MAX_VOCABULARY = 2**31
"""Largest vocabulary, in tokens. A larger one means a damaged config, for which a model would be built all the same."""


def load(
    options: ModelOptions, *, device: torch.device, attn_implementation: str, progress: bool, ranks_on_host: int
) -> LoadedWeights:
    return load_checkpoint(
        _find(options, weights=True, progress=progress),
        options,
        name=str(options.path),
        device=device,
        attn_implementation=attn_implementation,
        progress=progress,
        ranks_on_host=ranks_on_host,
    )


def load_config(options: ModelOptions, *, progress: bool) -> Any:
    return checkpoint_config(_find(options, weights=False, progress=progress), options)


def load_tokenizer(options: ModelOptions, *, progress: bool) -> Any | None:
    return checkpoint_tokenizer(_find(options, weights=False, progress=progress), options)


def _find(options: ModelOptions, *, weights: bool, progress: bool) -> Checkpoint:
    assert options.path is not None, options
    code = options.trust_remote_code
    return checkpoints.find(options.path, option="model.path", weights=weights, code=code, progress=progress)


def load_checkpoint(
    checkpoint: Checkpoint,
    options: ModelOptions,
    *,
    name: str,
    device: torch.device,
    attn_implementation: str,
    progress: bool,
    ranks_on_host: int,
) -> LoadedWeights:
    """Load a checkpoint.

    Raises:
        ValueError: something is wrong with its files, or they need more memory than there is.
    """
    config = checkpoint_config(checkpoint, options)
    tokenizer = checkpoint_tokenizer(checkpoint, options)
    stored = {} if checkpoint.gguf else checkpoints.stored_tensors(checkpoint)
    dtype = _dtype(options, config, checkpoint, stored)
    empty = empty_model(config, dtype, options, label=checkpoint.label)
    footprint = _footprint(empty, stored, dtype, device)
    require_room(footprint, device, label=checkpoint.label, ranks_on_host=ranks_on_host)
    bars = progress and footprint.copied > LONG_LOAD_BYTES
    arguments: dict[str, Any] = {
        **checkpoint.place,
        "dtype": dtype,
        "trust_remote_code": options.trust_remote_code,
        "use_safetensors": True,
        "output_loading_info": True,
        # transformers' own error for wrong shapes does not name them; `_require_all` does.
        "ignore_mismatched_sizes": True,
    }
    if device.type != "cpu":
        arguments["device_map"] = {"": device}
    if checkpoint.gguf:
        # By default transformers looks on the hub for kernels that work on the packed blocks.
        arguments["quantization_config"] = GgufConfig(dequantize=True)
        arguments["config"] = config  # not read again, which takes seconds
    try:
        with quiet(bars=bars):
            module, report = _from_pretrained(arguments, attn_implementation)
    except Exception as error:  # transformers, torch, safetensors and the model's own code may raise anything
        raise ValueError(f"{checkpoint.label} cannot be loaded: {one_line(error)}; {checkpoint.cure}") from error
    _require_all(report, checkpoint)
    module = module.eval().requires_grad_(False)
    if checkpoint.gguf:
        give_back()
    if device.type == "cpu" and footprint.mapped < available_bytes():
        _read_in(module)
    path = checkpoint.folder / (checkpoint.gguf or "")
    return LoadedWeights(module=module, tokenizer=tokenizer, name=name, dtype=dtype, path=str(path))


def checkpoint_config(checkpoint: Checkpoint, options: ModelOptions) -> Any:
    """Load the checkpoint's transformers config.

    Raises:
        ValueError: the config is damaged, or its architecture unknown.
    """
    if checkpoint.gguf:
        checkpoints.read_gguf(checkpoint)
    else:
        checkpoints.read_config(checkpoint)
    return read_transformers_config(checkpoint.place, options, label=checkpoint.label)


def read_transformers_config(place: dict[str, Any], options: ModelOptions, *, label: str) -> Any:
    """Load a transformers config; `place` holds arguments of from_pretrained.

    Raises:
        ValueError: transformers does not know the architecture, or the config contradicts itself.
    """
    try:
        with quiet():
            config = AutoConfig.from_pretrained(**place, trust_remote_code=options.trust_remote_code)
            text = config.get_text_config(decoder=True)
    except Exception as error:
        raise ValueError(_config_trouble(error, label, options)) from error
    for name, most in (("num_hidden_layers", MAX_LAYERS), ("vocab_size", MAX_VOCABULARY)):
        size = getattr(text, name, None)
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            raise ValueError(f"{label}: its config has {name} {ascii(size)[:60]}, which must be from 1 to {most:,}")
    return config


def checkpoint_tokenizer(checkpoint: Checkpoint, options: ModelOptions) -> Any | None:
    """Load the checkpoint's tokenizer; None if it has none.

    Raises:
        ValueError: the tokenizer's files are damaged.
    """
    if not checkpoints.has_tokenizer(checkpoint):
        return None
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(**checkpoint.place, trust_remote_code=options.trust_remote_code)
            tokenizer("a", verbose=False)  # some settings are only read when a text is encoded
            return tokenizer
    except Exception as error:
        raise ValueError(
            f"{checkpoint.label}: its tokenizer cannot be loaded ({one_line(error)}); {checkpoint.cure}"
        ) from error


def empty_model(config: Any, dtype: torch.dtype, options: ModelOptions, *, label: str) -> PreTrainedModel:
    """Build the model that `config` describes, without memory for its weights (on the meta device).

    Raises:
        ValueError: it is not a causal language model, or its sizes contradict each other.
    """
    has_own_code = hasattr(config, "auto_map")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_own_code:
        raise ValueError(f"{label}: model_type {config.model_type} is no causal language model in transformers")
    try:
        with quiet(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # from_config writes into it
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=options.trust_remote_code,
            )
    except Exception as error:
        raise ValueError(_config_trouble(error, label, options)) from error


def build_with_attention(build: Any, attn_implementation: str) -> Any:
    """Call `build(name)`, with "eager" for families that look the name up in a table of their own attention classes.

    Those are Falcon, GPT-J and GPT-Neo. Callers set the name in the config afterwards.
    """
    try:
        return build(attn_implementation)
    except KeyError as error:
        if error.args != (attn_implementation,):
            raise
    return build("eager")


def _from_pretrained(arguments: dict[str, Any], attn_implementation: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    def build(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(**arguments, attn_implementation=name)

    module, report = build_with_attention(build, attn_implementation)
    module.config._attn_implementation = attn_implementation
    return module, report


def _dtype(options: ModelOptions, config: Any, checkpoint: Checkpoint, stored: dict[str, StoredTensor]) -> torch.dtype:
    """The dtype asked for; for auto the config's, else that of the first tensor; float32 for quantised GGUF files."""
    if options.dtype is not DType.auto:
        return torch_dtype(options.dtype)
    if checkpoint.gguf:
        # Norms are in float32 in every GGUF file.
        forms = set(checkpoints.read_gguf(checkpoint).tensors.values()) - {"F32"}
        halves = {"F16": torch.float16, "BF16": torch.bfloat16}
        return halves.get(forms.pop(), torch.float32) if len(forms) == 1 else torch.float32
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return next((tensor.dtype for tensor in stored.values() if tensor.dtype), torch.float32)


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of an option other than auto."""
    return {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16, DType.float16: torch.float16}[dtype]


def parameter_bytes(module: PreTrainedModel) -> int:
    """Bytes of a model's parameters; tied ones count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _footprint(
    empty: PreTrainedModel, stored: dict[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> Footprint:
    """Bytes that loading takes. A stored tensor is mapped if it is a parameter of the model in the same dtype."""
    if device.type != "cpu" or not stored:
        return Footprint(copied=parameter_bytes(empty))
    parameters, prefix = empty.state_dict(), empty.base_model_prefix
    footprint = Footprint(copied=0)
    for name, tensor in stored.items():
        # Checkpoints of the model without its head lack the prefix, and the other way round.
        names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        parameter = next((parameters[name] for name in names if name in parameters), None)
        if parameter is not None and parameter.dtype == tensor.dtype:
            footprint.mapped += tensor.num_elements * parameter.element_size()
        else:
            footprint.copied += tensor.num_elements * (parameter.dtype if parameter is not None else dtype).itemsize
    return footprint


def _require_all(report: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Check that all weights came from the files: transformers initialises missing ones at random.

    Raises:
        ValueError: weights are missing, or have another shape than the config says.
    """
    if report["mismatched_keys"]:
        name, there, expected = min(report["mismatched_keys"])
        raise ValueError(
            f"{checkpoint.label}: the weights do not fit the config: {name} has shape {list(there)} where the config "
            f"makes it {list(expected)}; {checkpoint.cure}"
        )
    if report["missing_keys"]:
        raise ValueError(
            f"{checkpoint.label}: {len(report['missing_keys'])} of the model's weights are not in the files, such as "
            f"{min(report['missing_keys'])}; {checkpoint.cure}"
        )


def _read_in(module: PreTrainedModel) -> None:
    """Touch every page of the mapped weights, so that the file is read now rather than during the first prompt."""
    for parameter in module.parameters():
        parameter.detach().flatten().view(torch.uint8)[::PAGE_BYTES].sum()


def _config_trouble(error: Exception, label: str, options: ModelOptions) -> str:
    if "trust_remote_code" in str(error) and not options.trust_remote_code:
        return f"{label} needs Python code that comes with the model; add model.trust_remote_code=true if you trust it"
    return f"{label}: transformers cannot build a model from its config ({one_line(error)})"
