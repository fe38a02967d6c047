"""Whether the server has the model that vLLM has: a key typed by hand would not be enough."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runahead_vllm.prompt_file import FORMAT


@dataclass(frozen=True)
class LayerShape:
    """A layer's cache on a TP rank, in vLLM's words.

    Attributes:
        num_kv_heads: of this rank.
        window: tokens that a query sees, itself among them; None: all.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True)
class Wanted:
    """The model that vLLM has loaded.

    Attributes:
        checkpoint: digest of its weights (`checkpoint.digest`).
        rope: `rope_parameters` of transformers' config.
        layers: by ascending number.
    """

    checkpoint: str
    dtype: str
    vocab_size: int
    model_type: str
    rope: Mapping[str, Any] | None
    layers: Sequence[LayerShape]
    num_ranks: int


def compare(url: str, about: Mapping[str, Any], wanted: Wanted, *, trust_weights: bool) -> None:
    """Compare the server's answer to GET /v1/prefill.

    Raises: ValueError: names the first thing that differs, with both values.
    """
    if about.get("format") != FORMAT:
        raise _differs(url, "the file format", about.get("format"), FORMAT)
    if about.get("checkpoint") is None:
        if not trust_weights:
            why = about.get("why_no_checkpoint") or "it does not say why"
            raise ValueError(
                f"runahead: {url} cannot say which weights it has loaded ({why}); if they are vLLM's, set "
                "trust_weights to true in kv_connector_extra_config"
            )
    elif about["checkpoint"] != wanted.checkpoint:
        raise _differs(url, "a checkpoint with the digest", about["checkpoint"], wanted.checkpoint)
    for name in ("dtype", "vocab_size", "model_type"):
        if about.get(name) != getattr(wanted, name):
            raise _differs(url, name, about.get(name), getattr(wanted, name))
    if plain_rope(about.get("rope")) != plain_rope(wanted.rope):
        raise _differs(url, "RoPE", plain_rope(about.get("rope")), plain_rope(wanted.rope))
    layers = about.get("layers") or ()
    if len(layers) != len(wanted.layers):
        raise _differs(url, "layers", len(layers), len(wanted.layers))
    for number, (theirs, ours) in enumerate(zip(layers, wanted.layers, strict=True)):
        total = theirs["kv_heads"]
        shape = LayerShape(max(1, total // wanted.num_ranks), theirs["key_dim"], theirs["value_dim"], theirs["window"])
        fits = total % wanted.num_ranks == 0 or wanted.num_ranks % total == 0
        if shape != ours or not fits:
            raise _differs(url, f"in layer {number}", theirs, f"{ours} on each of {wanted.num_ranks} ranks")


def plain_rope(parameters: Mapping[str, Any] | None) -> object:
    """Parameters as JSON has them, without those that say nothing."""
    if not parameters:
        return {}
    plain = json.loads(json.dumps(parameters, default=str))
    return _said(plain)


def _said(value: Any) -> Any:
    """Numbers as floats, and no entries that are null or name the default."""
    if isinstance(value, dict):
        kept = {name: _said(each) for name, each in value.items() if each is not None}
        return {name: each for name, each in kept.items() if (name, each) not in DEFAULTS and each != {}}
    if isinstance(value, list):
        return [_said(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


DEFAULTS = (("rope_type", "default"), ("partial_rotary_factor", 1.0))


def _differs(url: str, what: str, theirs: object, ours: object) -> ValueError:
    return ValueError(
        f"runahead: {url} has {what} {theirs}, vLLM {ours}; the server has other weights, dtype, RoPE or shapes: start "
        "both with the same model and dtype"
    )
