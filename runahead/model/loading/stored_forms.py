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
from runahead.model.loading.gguf.header import GGUFHeader
from runahead.model.loading.quantised import FORMATS, Form
from runahead.model.loading.quantised.packed import PackedWeight

INSTEAD = f"use the model's 16-bit checkpoint, a GGUF file, or one of {', '.join(FORMATS)}"

OTHER_MODEL = "take config.json and weights of the same model"

CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of a config that describe a quantisation: transformers', compressed-tensors' and MLX's."""

OWN_FILES = (
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"),
    "quanto_qmap.json",
)
"""Files beside the config that do: of ModelOpt, GPTQ, AWQ, AutoRound and others, quanto."""

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


def form_of(checkpoint: Checkpoint, config: Mapping[str, Any], *, dequantize: bool) -> Form | None:
    """Find by the small files how the weights are quantised; None if they are not.

    Args:
        config: content of config.json.
        dequantize: whether quantised weights may be decoded.

    Raises:
        ValueError: they are quantised in a form that is not read, or may not be decoded.
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
    named = [(_name(settings), settings) for _, settings in found if _described(settings) is not None]
    known = next(
        (Form(name=name, settings=about) for name, about in named if name is not None and name in FORMATS), None
    )
    for name, settings in found:
        described, form = _described(settings), _name(settings)
        # Tools repeat some settings, without the method's name, in a file of their own.
        if described is None or (known is not None and form in (known.name, None)):
            continue
        raise ValueError(f"{checkpoint.label}: {name} says that its weights are quantised ({described}); {INSTEAD}")
    if known is not None and not dequantize:
        raise ValueError(
            f"{checkpoint.label}: its weights are quantised ({_described(known.settings)}), and are run dequantised "
            "alone; leave model.dequantize=false out"
        )
    return known


def _name(settings: Any) -> str | None:
    """Name of the method of a quantisation, from its description."""
    if not isinstance(settings, dict):
        return None
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    producer = settings.get("producer")
    name = settings.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    return name if isinstance(name, str) else None


def _described(settings: Any) -> str | None:
    """A quantisation in a few words, from its description; None if it leaves the weights as they are."""
    if not isinstance(settings, dict):
        return ascii(settings)[:40].strip("'")
    inner = settings.get("quantization")
    inner = inner if isinstance(inner, dict) else settings
    if "quant_algo" in inner and inner["quant_algo"] in (None, "", "NO_QUANT"):  # of keys and values alone
        return None
    bits = next((inner[key] for key in ("bits", "w_bit", "nbits") if isinstance(inner.get(key), int)), None)
    details = [_name(settings), inner.get("quant_algo"), None if bits is None else f"{bits} bits"]
    return ", ".join(ascii(each)[:40].strip("'") for each in details if each) or "a form that it does not name"


def forget_quantisation(config: Any) -> None:
    """Take the description of a quantisation out of a config: weights are decoded before transformers has them."""
    for each in (config, decoder_config(config)):
        for key in CONFIG_KEYS:
            if key in vars(each):
                delattr(each, key)


def empty_biases(empty: PreTrainedModel, parts: Mapping[str, Any]) -> frozenset[str]:
    """Biases of zeros beside decoded weights that the model has no place for: AutoGPTQ stores one with each weight."""
    beside = [f"{name.removesuffix('.weight')}.bias" for name, part in parts.items() if isinstance(part, PackedWeight)]
    there = [name for name in beside if name in parts]
    targets, weights = targets_of(empty, there), empty.state_dict()
    return frozenset(name for name in there if targets[name] not in weights and not parts[name][...].any())


def unused(empty: PreTrainedModel, stored: Mapping[str, StoredTensor], checkpoint: Checkpoint) -> str | None:
    """Check that the model takes the stored tensors as they are.

    Args:
        empty: the model without memory.
        stored: headers of the tensors by name.

    Returns:
        a sentence about tensors that are not used and need not be, or None.

    Raises:
        ValueError: tensors are in 8 bits or of integer type where the model has floating-point weights, or have no
            place in the model.
    """
    targets, weights = targets_of(empty, stored), empty.state_dict()
    raw = [
        name
        for name, tensor in stored.items()
        if tensor.dtype is None and (target := targets[name]) in weights and weights[target].is_floating_point()
    ]
    if raw:
        raise ValueError(
            f"{checkpoint.label}: {len(raw)} of its weights are stored as {stored[raw[0]].code}, such as {raw[0]}, and "
            f"would be used without their scales; {INSTEAD}"
        )
    names = {targets[name]: name for name in stored if targets[name] not in weights}
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


def targets_of(empty: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The names that stored tensors get in the model, as transformers gives them, in its order.

    Of tensors that are put together it is the name of what is made of them.
    """
    return {name: target for name, (target, _) in _targets(empty, names).items()}


def weights_as_stored(empty: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The model's names of stored tensors that are a weight of it as they are, by theirs."""
    return {name: target for name, (target, is_whole) in _targets(empty, names).items() if is_whole}


def _targets(empty: PreTrainedModel, names: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """The names of `targets_of`, with whether the tensor is that weight as it is."""
    conversions, weights = get_model_conversion_mapping(empty), empty.state_dict()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix, targets = empty.base_model_prefix, {}
    for name in sorted(names, key=dot_natural_key):
        target, converted_by = rename_source_key(name, renamings, converters, prefix, weights)
        if target not in weights and name in weights:
            target, converted_by = name, None
        targets[name] = target, converted_by is None and target in weights
    return targets
