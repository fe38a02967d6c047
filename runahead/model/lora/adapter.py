"""LoRA adapters on disk: found by folder or hub id, and refused by their small file where they cannot be merged."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from runahead.config import ModelOptions
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading.quiet import one_line

WEIGHTS = "adapter_model.safetensors"

CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of the initialisations (`init_lora_weights`) that change the weights which an adapter is added to."""

SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""Entries of a config that tell models apart."""

MERGE = "merge it into its model with peft's merge_and_unload() and save that as a folder"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        label: what the user wrote, for error messages.
        name: the last part of its path, or of its hub id.
        settings: content of its adapter_config.json.
        digest: of its two files, 16 hexadecimal digits.
    """

    folder: Path
    label: str
    name: str
    settings: Mapping[str, Any]
    digest: str


def find(options: ModelOptions, *, progress: bool) -> list[Adapter]:
    """The adapters of `model.adapter`, in order; those of the hub are downloaded.

    Raises:
        ValueError, OSError: there is none, a file is damaged, or it cannot be merged; one line with the remedy.
    """
    return [_found(path, progress) for path in options.adapter]


def digest(adapters: Sequence[Adapter]) -> str:
    """Of all adapters in order; "" for none."""
    return " ".join(each.digest for each in adapters)


def _found(path: str, progress: bool) -> Adapter:
    label = f"model.adapter={path}"
    folder = checkpoints.local_path(path, label)
    name = folder.resolve().name
    if not folder.exists():
        if not checkpoints.HUB_ID.fullmatch(path):
            raise ValueError(f"{label} does not exist; name an adapter's folder or a hub id such as org/name")
        folder = checkpoints.download(label, progress, path, None, [checkpoints.ADAPTER, WEIGHTS])
        name = path.rpartition("/")[2]
    files = [folder / checkpoints.ADAPTER, folder / WEIGHTS]
    if not files[0].is_file():
        raise ValueError(f"{label} has no {checkpoints.ADAPTER}; name the folder of an adapter that peft has saved")
    checkpoints.require_fetched(files, label)
    settings = checkpoints.read_json(files[0], label)
    _require_mergeable(settings, label)
    if not files[1].is_file():
        raise ValueError(f"{label} has no {WEIGHTS}; weights in other forms (.bin) can run any code, and are not read")
    digest = hashlib.sha256()
    try:
        with safe_open(files[1], framework="pt"):
            pass
        for file in files:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{label}: {WEIGHTS} is not a complete safetensors file ({one_line(error)}); copy or download it again"
        ) from error
    return Adapter(folder=folder, label=label, name=name, settings=settings, digest=digest.hexdigest()[:16])


def _require_mergeable(settings: Mapping[str, Any], label: str) -> None:
    """Check that an adapter adds to weights alone. Raises: ValueError."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{label} is an adapter of the kind {ascii(kind)[:40]}, and only LORA is merged; use another")
    bias = settings.get("bias", "none")
    if bias != "none" or settings.get("lora_bias"):
        what = f"bias={ascii(bias)[:20]}" if bias != "none" else "lora_bias=true"
        raise ValueError(f"{label} has biases of its own ({what}), which are not merged here; {MERGE}")
    if settings.get("layer_replication"):
        raise ValueError(f"{label} repeats layers of its model (layer_replication), so it has no place in it; {MERGE}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGING):
        raise ValueError(
            f"{label} is added to weights that it has changed itself (init_lora_weights={start[:40]}); save it with "
            "peft's path_initial_model_for_weight_conversion, which makes it a plain adapter"
        )


def require_base(adapter: Adapter, config: Any, name: str, *, progress: bool) -> None:
    """Check that an adapter was made for this model, as far as that is certain.

    Args:
        config: transformers' config of the model.
        name: the model's.
        progress: warn where the names of the two differ.

    Raises:
        ValueError: it was made for a model in a folder here whose config has other sizes.
    """
    base = adapter.settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        return
    path = Path(base) / "config.json"
    if path.is_file():
        made_for = checkpoints.read_json(path, adapter.label)
        here = config.to_dict()
        found = [key for key in SIZES if key in made_for and key in here and made_for[key] != here[key]]
        if found:
            raise ValueError(
                f"{adapter.label} was made for {base}, which has {found[0]} {ascii(made_for[found[0]])[:40]}, and this "
                f"model has {ascii(here[found[0]])[:40]}; take the model or an adapter that go together"
            )
    elif progress and Path(base).name.lower() != Path(name).name.lower():
        warnings.warn(f"{adapter.label} says that it was made for {base}; it is merged into {name}", stacklevel=3)
