"""The prompts that a server hands over, as it tells of them, with what other engines compare before they take one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runahead.attention.masks import MaskRule
from runahead.model.fingerprint import checkpoint_digest
from runahead.model.loading.checkpoint import Checkpoint, weight_files
from runahead.model.model import Model
from runahead.report import package_version
from runahead.reuse.handover import HandoverFolder, file_name
from runahead.reuse.store import model_key
from runahead.reuse.tiers.file_format import FORMAT
from runahead.serving.items import Handed

TOLD = ("model_type", "hidden_size", "num_attention_heads")
"""Fields of the config that are told as they are."""


MOST_POSITIONS = 2**17
"""Positions up to which windows are looked for where a model names no limit."""


@dataclass(frozen=True, kw_only=True)
class PromptFiles:
    """The files of handed-over prompts, as rank 0 knows them.

    Attributes:
        key: of the model, for the names of files.
        folder: where they are; None if that is on another host.
        path, host: of the folder.
        limit_bytes: most bytes of all files.
        token_bytes: of a token in a file.
        about: what other engines compare.
    """

    key: str
    folder: HandoverFolder | None
    path: str
    host: str
    limit_bytes: int
    token_bytes: int
    about: Mapping[str, Any]

    def name(self, salt: str, ids: Sequence[int]) -> str:
        """Name of the file of a prompt."""
        return file_name(self.key, salt, ids)

    def found(self, name: str) -> Handed | None:
        """A prompt whose file is there, which counts as used now; None if it is not, or not on this host."""
        num_bytes = None if self.folder is None else self.folder.found(name)
        if num_bytes is None:
            return None
        return Handed(row=(-1, 0), name=name, folder=self.path, host=self.host, num_bytes=num_bytes)

    def told(self, *, model: str, salt: str, max_model_len: int | None) -> dict[str, Any]:
        """The answer of GET /v1/prefill.

        Args:
            model: its name in the API.
            salt: of who asks.
        """
        where = {"folder": self.path, "host": self.host, "max_bytes": self.limit_bytes}
        names = {"key": self.key, "salt": salt, "max_model_len": max_model_len}
        return {"object": "prefill_server", "format": FORMAT, "model": model, **where, **names, **self.about}


def prompt_files(
    model: Model, folder: HandoverFolder | None, path: str, host: str, limit_bytes: int, source: Checkpoint | None
) -> PromptFiles:
    """The files that a server with this model writes.

    Args:
        source: the checkpoint of its weights; None if they come from elsewhere.
    """
    config = model.config
    digest, why = _digest(model, source)
    layers = [
        {
            "kv_heads": shape.num_kv_heads,
            "key_dim": shape.key_dim,
            "value_dim": shape.value_dim,
            "window": None if rule is None else _window(rule, model.max_positions or MOST_POSITIONS),
        }
        for shape, rule in zip(model.kv_shapes, model.rules, strict=True)
    ]
    about = {
        "version": package_version("runahead"),
        "checkpoint": digest,
        "why_no_checkpoint": why,
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": model.vocab_size,
        "rope": _plain(getattr(config, "rope_parameters", None)),
        "layers": layers,
        **{name: getattr(config, name, None) for name in TOLD},
    }
    token_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    return PromptFiles(
        key=model_key(model),
        folder=folder,
        path=path,
        host=host,
        limit_bytes=limit_bytes,
        token_bytes=token_bytes,
        about=about,
    )


def _digest(model: Model, source: Checkpoint | None) -> tuple[str | None, str]:
    """Digest of the checkpoint whose weights a model has as they are there; else None, and why it has none."""
    for differs, why in (
        (source is None or source.config_file is not None or source.gguf is not None, "it has no safetensors weights"),
        (model.adapters, "adapters are merged into its weights"),
        (model.stored_as, f"its weights were {model.stored_as}"),
        (model.overrides, f"its config has other values than the checkpoint's: {model.overrides}"),
    ):
        if differs:
            return None, why
    assert source is not None
    return checkpoint_digest(weight_files(source)), ""


def _window(rule: MaskRule, num_positions: int) -> int | str | None:
    """Tokens that a query sees, itself included; None if it sees all before it, "other" if their number changes."""
    last, middle = num_positions - 1, num_positions // 2
    first = rule.first_key(last)
    if first == 0:
        return None
    window = last - first + 1
    return window if rule.first_key(middle) == max(0, middle - window + 1) else "other"


def _plain(value: Any) -> Any:
    """A value of a config as JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
