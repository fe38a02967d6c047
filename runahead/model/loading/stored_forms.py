"""Forms in which a checkpoint stores weights: which of them are read, and which a model would take for plain weights.

transformers loads whatever it finds a name for and leaves out the rest: quantised weights become numbers without their
scales, and biases or layers that the config does not name are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from runahead.model.layer_kinds import decoder_config
from runahead.model.loading.checkpoint import Checkpoint, StoredTensor, read_json
from runahead.model.loading.gguf_header import GGUFHeader

UNPACKED = ("fp8", "mxfp8", "mxfp4")
"""Quantisations (`quant_method`) that transformers unpacks while it loads them."""

INSTEAD = "use the model's 16-bit checkpoint, one in fp8 or mxfp4 as transformers stores them, or a GGUF file"

OTHER_MODEL = "take config.json and weights of the same model"

CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of a config that describe a quantisation: transformers', compressed-tensors' and MLX's."""

OWN_FILES = (
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"),
    "quanto_qmap.json",
)
"""Files beside the config that do: of ModelOpt, GPTQ, AWQ, AutoRound and others, quanto."""

PARTS = re.compile(r"(.+)(_blocks|_scale_inv|_scales|\.scale|\.qscale_weight|\.activation_scale)")
"""Names of the parts of a weight in quantisations that are unpacked, after the beginning of the weight's name."""

SPARE = {
    "multi-token prediction": re.compile(r"(^|\.)(mtp|nextn)\w*\."),
    "images and sound": re.compile(
        r"(^|\.)(vis(ion|ual)|image|audio|speech|multi_?modal|mm_|embed_(vision|audio))\w*(\.|$)"
    ),
    "causal masks": re.compile(r"\.(attn|attention)\.(bias|masked_bias|causal_mask)$|\.masked_bias$"),
}
"""Parts of checkpoints besides the text decoder, by patterns of their tensors' names; earlier versions of transformers
stored masks."""

ENCODER = {
    "the encoder": re.compile(r"(^|\.)(encoder|shared)\.|\.encoder_attn\w*\."),
    "a bias that a decoder alone does not add": re.compile(r"^final_logits_bias$"),
}
"""Tensors of encoder-decoder checkpoints that a decoder alone leaves out, by patterns of their names."""

GGUF_SPARE = re.compile(r"^rope_|\.nextn\.")
"""Tensors of GGUF files that a model can do without: factors of RoPE that are read from the metadata, and layers for
multi-token prediction."""

QUANTISED_NAMES = re.compile(
    r"\.(q(weight|zeros)|scales|weight_(packed|scale\w*|zero_point|format)|(absmax|quant_)\w*)$"
)


def names_in_decoder(stored: Container[str]) -> dict[str, str] | None:
    """Names that a decoder alone has for tensors which are stored once for it and its encoder: pattern -> replacement.

    BART's files and those of six families like it have the embeddings of both as `model.shared`.
    """
    if "model.shared.weight" not in stored or "model.decoder.embed_tokens.weight" in stored:
        return None
    return {r"^model\.shared\.": "model.decoder.embed_tokens."}


def require_read(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Check by the small files that the weights are in a form that is read.

    Args:
        config: content of config.json.

    Raises:
        ValueError: they are quantised in another form.
    """
    places = [("config.json", config), ("config.json", config.get("text_config"))]
    found = [
        (name, settings[key])
        for name, settings in places
        if isinstance(settings, dict)
        for key in CONFIG_KEYS
        if settings.get(key)
    ]
    for name in OWN_FILES:
        if (checkpoint.folder / name).is_file():
            found.append((name, read_json(checkpoint.folder / name, checkpoint.label)))
    for name, settings in found:
        form = _form(settings)
        if form is not None and form not in UNPACKED:
            raise ValueError(f"{checkpoint.label}: {name} says that its weights are quantised ({form}); {INSTEAD}")


def _form(settings: Any) -> str | None:
    """Name of a quantisation, from its description; None if it leaves the weights as they are."""
    if not isinstance(settings, dict):
        return ascii(settings)[:40].strip("'")
    inner = settings.get("quantization")
    inner = inner if isinstance(inner, dict) else settings
    if "quant_algo" in inner and inner["quant_algo"] in (None, "", "NO_QUANT"):  # of keys and values alone
        return None
    producer = settings.get("producer")
    name = settings.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    if name in UNPACKED:
        return str(name)
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        name = "bitsandbytes"
    bits = next((inner[key] for key in ("bits", "w_bit", "nbits") if isinstance(inner.get(key), int)), None)
    details = [name, inner.get("quant_algo"), None if bits is None else f"{bits} bits"]
    return ", ".join(ascii(each)[:40].strip("'") for each in details if each) or "a form that it does not name"


def unpacks(config: Any) -> bool:
    """Whether transformers unpacks the weights while it loads them, by the model's config."""
    return bool(_settings(config))


def unpack_everywhere(config: Any) -> None:
    """Have quantised weights unpacked on GPUs too, where transformers would keep some for kernels of its own."""
    settings = _settings(config)
    if settings:
        settings["dequantize"] = True


def _settings(config: Any) -> dict[str, Any]:
    configs = (config, decoder_config(config))
    found = (getattr(each, "quantization_config", None) for each in configs)
    return next((settings for settings in found if isinstance(settings, dict)), {})


def unused(
    empty: PreTrainedModel, stored: Mapping[str, StoredTensor], checkpoint: Checkpoint, *, unpacked: bool
) -> str | None:
    """Check that the model takes the stored tensors as they are.

    Args:
        empty: the model without memory.
        stored: headers of the tensors by name.
        unpacked: whether transformers unpacks quantised ones.

    Returns:
        a sentence about tensors that are not used and need not be, or None.

    Raises:
        ValueError: tensors are in 8 bits or of integer type where the model has floating-point weights, or have no
            place in the model.
    """
    targets, weights = _targets(empty, stored), empty.state_dict()
    parts = {name: match for name in stored if unpacked and (match := PARTS.fullmatch(name))}
    scaled = {match[1] for match in parts.values() if "scale" in match[2]}
    raw = [name for name, match in parts.items() if match[2] == "_blocks" and match[1] not in scaled]
    raw += [
        name
        for name, tensor in stored.items()
        if tensor.dtype is None
        and name not in parts
        and scaled.isdisjoint((name, name.removesuffix(".weight")))
        and (target := targets[name]) in weights
        and weights[target].is_floating_point()
    ]
    if raw:
        raise ValueError(
            f"{checkpoint.label}: {len(raw)} of its weights are stored as {stored[raw[0]].code}, such as {raw[0]}, and "
            f"would be used without their scales; {INSTEAD}"
        )
    names = {targets[name]: name for name in stored if targets[name] not in weights and name not in parts}
    return require_taken(empty, names, checkpoint)


def require_taken_of_gguf(empty: PreTrainedModel, header: GGUFHeader, checkpoint: Checkpoint) -> None:
    """Check that the model has a place for all numbers in a GGUF file: transformers drops tensors without a word.

    Raises:
        ValueError: it has fewer.
    """
    tied = getattr(empty, "all_tied_weights_keys", {})
    places = sum(weight.numel() for name, weight in empty.state_dict().items() if name not in tied)
    sizes = {name: size for name, size in header.num_elements.items() if not GGUF_SPARE.search(name)}
    if tied:
        sizes.pop("output.weight", None)
    if sum(sizes.values()) <= places:
        return
    processor = TENSOR_PROCESSORS.get(header.metadata.get("general.architecture"), TensorProcessor)(config={})
    known = get_gguf_hf_weights_map(empty, processor)
    wrong = [name for name in sizes if name not in known and name.removesuffix(".weight") not in known]
    such = f", such as {wrong[0]}" if wrong else ""
    raise ValueError(
        f"{checkpoint.label}: the model that its metadata describes has no place for {len(wrong) or 'some'} of the "
        f"stored tensors{such}, which transformers would leave out; use the model's safetensors folder"
    )


def require_taken(model: PreTrainedModel, names: Mapping[str, str], checkpoint: Checkpoint) -> str | None:
    """Check that stored tensors that the model does not take are ones that it can do without.

    Args:
        names: of the tensors, by the name that each would have in the model.

    Returns:
        as `unused`.

    Raises:
        ValueError: some are not.
    """
    if not names:
        return None
    info = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    model._adjust_missing_and_unexpected_keys(info)
    kinds: dict[str, list[str]] = {}
    wrong = []
    for target, name in sorted(names.items()):
        kind = (
            f"what {type(model).__name__} leaves out"
            if target not in info.unexpected_keys
            else _kind(model, name, names)
        )
        if kind is None:
            wrong.append(name)
        else:
            kinds.setdefault(kind, []).append(name)
    if wrong:
        raise ValueError(
            f"{checkpoint.label}: the model that its config describes has no place for {len(wrong)} of the stored "
            f"tensors, such as {wrong[0]}; {_remedy(wrong)}"
        )
    parts = [f"{len(found)} of {kind}, such as {found[0]}" for kind, found in kinds.items()]
    return f"{checkpoint.label}: stored tensors that are not used: {'; '.join(parts)}"


def _kind(model: PreTrainedModel, name: str, unexpected: Mapping[str, str]) -> str | None:
    """Part of a checkpoint that this tensor is of and a text decoder can do without; None for any other tensor."""
    config = decoder_config(model.config)
    if getattr(config, "tie_word_embeddings", False) and name.endswith("lm_head.weight"):
        return "a head that is tied to the embeddings"
    # transformers' decoders say of themselves that they are no encoder and decoder.
    spare = SPARE | ENCODER if hasattr(model.config, "encoder_layers") else SPARE
    if (kind := next((kind for kind, pattern in spare.items() if pattern.search(name)), None)) is not None:
        return kind
    layer = re.match(r"(.*\blayers\.(\d+)\.)", name)
    if layer and int(layer[2]) >= int(config.num_hidden_layers):
        # A layer that predicts a further token joins two hidden states, which no other layer does.
        return "multi-token prediction" if _joins(layer[1], unexpected.values()) else None
    return None


def _joins(layer: str, names: Iterable[str]) -> bool:
    return any(name.startswith(layer) and ".eh_proj." in name for name in names)


def _remedy(names: list[str]) -> str:
    if any(".lora_" in name for name in names):
        return "they are an adapter's; merge it into its model with peft's merge_and_unload() and save that as a folder"
    if any(QUANTISED_NAMES.search(name) for name in names):
        return f"they belong to quantised weights; {INSTEAD}"
    return OTHER_MODEL


def _targets(empty: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The names that stored tensors get in the model, as transformers gives them, in its order."""
    conversions, weights = get_model_conversion_mapping(empty), empty.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix, targets = empty.base_model_prefix, {}
    for name in sorted(names, key=dot_natural_key):
        target, _ = rename_source_key(name, renamings, converters, prefix, weights)
        if target not in weights and name in weights:
            target = name
        targets[name] = target
    return targets
