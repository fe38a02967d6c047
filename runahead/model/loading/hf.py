"""Weights from a local folder, a hub id or a GGUF file, through transformers.

transformers builds the model without memory and sets its parameters to views of the mapped safetensors files. So on a
CPU the processes of a host share one copy of the weights, in the page cache, and a GPU is filled from these views.
Weights are copied only if another dtype is asked for, or a family stores them in another form (experts, GGUF blocks).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
)

from runahead.config import MAX_LAYERS, ModelOptions
from runahead.failures import is_lack_of_memory
from runahead.features.versions import in_words
from runahead.model.adapters import know
from runahead.model.layer_kinds import decoder_config
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import stored_forms
from runahead.model.loading.checkpoint import Checkpoint
from runahead.model.loading.memory import giving_back
from runahead.model.loading.overrides import overridden
from runahead.model.loading.quiet import one_line, quiet
from runahead.model.loading.sharing import names_in_model, share_class

MAX_VOCABULARY = 2**31
"""Largest vocabulary, in tokens. A larger one means a damaged config, for which a model would be built all the same."""


@dataclass(frozen=True, kw_only=True)
class ModelMaker:
    """Everything that a model is built from.

    Attributes:
        config: transformers' config.
        attn_implementation: name of the attention that transformers calls.
        copied: stored tensors of a quantised checkpoint that are not mapped, whatever they are.
    """

    checkpoint: Checkpoint
    config: Any
    options: ModelOptions
    dtype: torch.dtype
    device: torch.device
    attn_implementation: str
    copied: frozenset[str] = frozenset()


def build(make: ModelMaker, *, bars: bool, model_class: Any = None) -> PreTrainedModel:
    """Build the model with the checkpoint's weights.

    Args:
        bars: show progress bars.
        model_class: whose `from_pretrained` loads it; by default transformers' choice. Quantised weights need it.

    Raises:
        ValueError: something is wrong with the files.
    """
    checkpoint = make.checkpoint
    arguments: dict[str, Any] = {
        **checkpoint.place,
        "config": copy.deepcopy(make.config),
        "trust_remote_code": make.options.trust_remote_code,
        "use_safetensors": True,
    }
    if checkpoint.gguf:
        # By default transformers looks on the hub for kernels that work on the packed blocks.
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    elif checkpoint.form is not None:
        parts = checkpoints.stored_parts(checkpoint, make.dtype, mapped=True, copied=make.copied)
        arguments = _of_parts(parts, arguments["config"]) | {"key_mapping": stored_forms.names_in_decoder(parts)}
    else:
        arguments["key_mapping"] = stored_forms.names_in_decoder(checkpoints.stored_tensors(checkpoint))
    with giving_back() if checkpoint.gguf or checkpoint.form is not None else nullcontext():
        module = _from_pretrained(model_class or AutoModelForCausalLM, make, arguments, bars=bars)
    if checkpoint.form is not None:
        _read_generation_config(module, checkpoint)
    return module


def build_share(
    make: ModelMaker,
    model_class: type[PreTrainedModel],
    parts: dict[str, Any],
    group: dist.ProcessGroup,
    *,
    bars: bool,
    untied: Mapping[str, str],
    merged: Callable[[dict[str, Any]], dict[str, Any]],
) -> PreTrainedModel:
    """Build this rank's share of the model, from the parts of the stored tensors that it needs.

    Args:
        model_class: class of the whole model.
        parts: stored tensors by name.
        group: the ranks that share the model.
        bars: show progress bars.
        untied: for tied weights that each become one of their own, the name of the one that they equal.
        merged: makes of the parts those that adapters change.

    Raises:
        ValueError: something is wrong with the files.
    """
    config = copy.deepcopy(make.config)
    if untied:
        for each in (config, decoder_config(config)):
            each.tie_word_embeddings = False
        for name, source in untied.items():
            prefix = model_class.base_model_prefix
            parts = {
                stored_name: part
                for stored, part in parts.items()
                for stored_name in ((stored, name) if source in names_in_model(stored, prefix) else (stored,))
            }
    own_class = share_class(model_class, group, make.device)
    module = _from_pretrained(own_class, make, _of_parts(merged(parts), config), bars=bars)
    module.__class__ = model_class
    _read_generation_config(module, make.checkpoint)
    return module


def _of_parts(parts: dict[str, Any], config: Any) -> dict[str, Any]:
    """Arguments of from_pretrained for weights that are not read from a folder."""
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": parts}


def _read_generation_config(module: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Give a model its generation config, which transformers itself finds only where it reads the folder."""
    if checkpoint.config_file is None and (checkpoint.folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(str(checkpoint.folder))


def _from_pretrained(model_class: Any, make: ModelMaker, arguments: dict[str, Any], *, bars: bool) -> PreTrainedModel:
    checkpoint = make.checkpoint
    arguments |= {
        "dtype": make.dtype,
        "output_loading_info": True,
        # transformers' own error for wrong shapes does not name them; `_require_all` does.
        "ignore_mismatched_sizes": True,
    }
    if make.device.type != "cpu":
        arguments["device_map"] = {"": make.device}
    try:
        with quiet(bars=bars):
            module, report = build_with_attention(
                lambda name: model_class.from_pretrained(**arguments, attn_implementation=name),
                make.attn_implementation,
            )
    except Exception as error:  # transformers, torch, safetensors and the model's own code may raise anything
        if is_lack_of_memory(error):
            raise
        raise ValueError(_loading_trouble(error, checkpoint, make.options)) from error
    _require_all(report, checkpoint)
    # By their names in the model: of what it unpacks only transformers knows which of the stored names it takes.
    stored_forms.require_taken(module, {name: name for name in report["unexpected_keys"]}, checkpoint)
    return module


def read_config(checkpoint: Checkpoint, options: ModelOptions) -> Any:
    """Load the checkpoint's transformers config, with the entries and the number of layers that `options` give.

    Raises:
        ValueError: the config is damaged or contradicts itself, transformers does not know the architecture, or the
            overrides do not go with it.
    """
    if checkpoint.gguf:
        checkpoints.read_gguf(checkpoint)
    else:
        stored = checkpoints.read_config(checkpoint)
        know(stored.get("model_type"))
        _require_known(stored, checkpoint.label)
        if checkpoint.config_file is None:
            stored_forms.form_of(checkpoint, stored, dequantize=options.dequantize)
    label = checkpoint.label
    try:
        with quiet():
            config = AutoConfig.from_pretrained(**checkpoint.config_place, trust_remote_code=options.trust_remote_code)
    except Exception as error:
        raise ValueError(_config_trouble(error, label, options)) from error
    if options.overrides:
        try:
            with quiet():
                config = overridden(config, options.overrides)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error
    text = decoder_config(config)
    for name, most in (("num_hidden_layers", MAX_LAYERS), ("vocab_size", MAX_VOCABULARY)):
        size = getattr(text, name, None)
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            raise ValueError(f"{label}: its config has {name} {ascii(size)[:60]}, which must be from 1 to {most:,}")
    stored_forms.forget_quantisation(config)
    if options.layers is not None:
        # Some families make them from the number of layers: theirs cannot be set.
        if getattr(text, "layer_types", None) and "layer_types" in vars(text):
            text.layer_types = [text.layer_types[layer % len(text.layer_types)] for layer in range(options.layers)]
        if hasattr(config, "decoder_layers"):  # beside an encoder, where `text` is a copy
            config.decoder_layers = options.layers
        else:
            text.num_hidden_layers = options.layers
    return config


def read_tokenizer(checkpoint: Checkpoint, options: ModelOptions) -> Any | None:
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
        raise ValueError(_tokenizer_trouble(error, checkpoint, options)) from error


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


def _require_all(report: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Check that all weights came from the files: transformers initialises missing ones at random.

    Raises:
        ValueError: weights are missing, or have another shape than the config says.
    """
    if report["mismatched_keys"]:
        name, there, expected = min(report["mismatched_keys"])
        raise ValueError(
            f"{checkpoint.label}: the weights do not fit the config: {name} has shape {list(there)} where the config "
            f"makes it {list(expected)}; {stored_forms.OTHER_MODEL}"
        )
    if report["missing_keys"]:
        raise ValueError(
            f"{checkpoint.label}: {len(report['missing_keys'])} of the model's weights are not in the files, such as "
            f"{min(report['missing_keys'])}; {stored_forms.OTHER_MODEL}"
        )


def _require_known(config: Mapping[str, Any], label: str) -> None:
    """Check that transformers has the architecture, unless its code comes with the model. Raises: ValueError."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type not in CONFIG_MAPPING and "auto_map" not in config:
        raise ValueError(
            f"{label}: model_type {ascii(model_type)[:60]} is unknown to transformers {transformers.__version__}; use "
            f"the newest that Runahead takes ({in_words('transformers')}), or another model"
        )


def _loading_trouble(error: Exception, checkpoint: Checkpoint, options: ModelOptions) -> str:
    if _needs_code(error, options):
        return _config_trouble(error, checkpoint.label, options)
    remedy = f"{checkpoint.remedy} if a file is damaged; RUNAHEAD_TRACEBACK=1 prints where it fails"
    if isinstance(error, ImportError):
        remedy = "install that package"
    return f"{checkpoint.label} cannot be loaded ({one_line(error)}); {remedy}"


def _tokenizer_trouble(error: Exception, checkpoint: Checkpoint, options: ModelOptions) -> str:
    if _needs_code(error, options):
        return _config_trouble(error, checkpoint.label, options)
    remedy = checkpoint.remedy
    if isinstance(error, ImportError):
        remedy = "install that package"
    elif "Tokenizer class" in str(error):
        remedy = f"transformers {transformers.__version__} has no such class; take a checkpoint with a tokenizer.json"
    return f"{checkpoint.label}: its tokenizer cannot be loaded ({one_line(error)}); {remedy}"


def _needs_code(error: Exception, options: ModelOptions) -> bool:
    return "trust_remote_code" in str(error) and not options.trust_remote_code


def _config_trouble(error: Exception, label: str, options: ModelOptions) -> str:
    if _needs_code(error, options):
        return f"{label} needs Python code that comes with the model; add model.trust_remote_code=true if you trust it"
    return f"{label}: transformers cannot build a model from its config ({one_line(error)})"
