"""Fingerprint of a lookup table: the model's shape, the device and the links that it is valid for."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.cost.link import BITS_PER_BYTE, Link
from partitioner.cost.places import Places
from partitioner.cost.streaming import Streams
from runahead.config import PrefillOptions, Weights, hydra_text
from runahead.report import library_versions

if TYPE_CHECKING:
    import torch

    from runahead.model.model import Model

LINK_FACTOR = 2.0
"""Factor within which bandwidths count as equal if either was measured: a ping of five rounds is that noisy, and the
best split changes little in this range. Bandwidths that were both given must be equal."""


OF_STATES = ("num_states", "state_bytes")
"""Sizes that a table of a model without states does not have."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model that determine its compute and the size of its KV cache.

    Attributes:
        mlp_dim: None if the config uses an unknown name for it.
        num_states: number of states that layers hold, and their bytes together, of one text.
    """

    type: str
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp_dim: int | None = None
    num_states: int = 0
    state_bytes: int = 0

    @property
    def known(self) -> dict[str, Any]:
        """The sizes by name; a model without states has none of theirs."""
        return {name: size for name, size in vars(self).items() if size != 0 or name not in OF_STATES}

    def __str__(self) -> str:
        mlp = "" if self.mlp_dim is None else f", MLP {self.mlp_dim:,}"
        states = f" with {self.num_states} states" if self.num_states else ""
        heads = f"{self.num_heads} heads of {self.head_dim} ({self.num_kv_heads} for KV)"
        if self.num_heads == 0:
            heads = "no attention"
        return (
            f"{self.type}, {self.num_layers} layers{states}, {self.model_dim:,} wide, {heads}{mlp}, "
            f"vocabulary {self.vocab_size:,}"
        )


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The model, device and links with which the times of a table were found.

    Attributes:
        device: name of the processor or GPU that a rank computes on.
        threads: intra-op threads of a rank; None on a GPU.
        transfer: "relay" or "direct".
        layers_in_flight: as `prefill.layers_in_flight`.
        speeds: of the ranks, relative to the device; () if all are equal to it, None if unknown, as in a run that only
            looks up splits.
        tensor: ranks of a stage, as `ranks.tensor`; where it is not 1, the ranks of a table are stages.
        overrides: what the model's config has in place of the checkpoint's (`model.overrides`), as one line of JSON.
        kernels: whose kernels compute attention, "torch" or "runahead".
        fuse: as `model.fuse`, "on" or "off"; "off" where it has no effect on the model.
        products: what computes products of many rows on a CPU, "torch" (by its own choice), "onednn" or "int8"
            (of weights in 8 bits).
        attention: options of a sparse attention, or how many KV heads stream, as a text; "" for attention to all keys.
        adapters: digests of the adapters in the model's weights (`model.adapter`); "" for none.
        wire_bits: as `prefill.wire_bits`.
        link: between ranks; None if unknown, as in a run that only looks up splits.
        link_measured: the link was measured rather than given.
        name, versions, date: for readers, not compared. The date is UTC, ISO 8601.
    """

    model: ModelShape
    dtype: str
    device: str
    threads: int | None
    backend: str
    transfer: str
    link: Link | None = None
    link_measured: bool = True
    layers_in_flight: int = 3
    speeds: tuple[float, ...] | None = ()
    tensor: int = 1
    overrides: str = ""
    kernels: str = "torch"
    fuse: str = "off"
    products: str = "torch"
    attention: str = ""
    adapters: str = ""
    wire_bits: int | None = None
    name: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    date: str = ""

    @classmethod
    def of_model(
        cls,
        model: Model,
        *,
        device: torch.device,
        backend: str,
        prefill: PrefillOptions,
        places: Places | None = None,
        link: Link | None = None,
        link_measured: bool = True,
        speeds: Sequence[float] | None = None,
        streams: Streams | None = None,
    ) -> Fingerprint:
        """Make the fingerprint of this process's model and device.

        Args:
            places: of the model to plan for, if `model` was loaded with fewer layers.
            link: between ranks, if known.
            link_measured: whether it was measured rather than given.
            speeds: of the ranks, if known.
            streams: KV heads that stream in the prefill, if any do.
        """
        import torch  # here, so that programs that only read tables do not load it

        from runahead.kernels.operators import KERNELS
        from runahead.model.layers.fusing import is_fused

        return cls(
            model=_shape(model, places or Places.of_model(model)),
            dtype=str(model.dtype).removeprefix("torch."),
            device=device_name(device),
            threads=None if device.type == "cuda" else torch.get_num_threads(),
            backend=backend,
            transfer=prefill.transfer.name,
            link=link,
            link_measured=link_measured,
            layers_in_flight=prefill.layers_in_flight,
            tensor=model.num_shards,
            overrides=model.overrides,
            kernels="runahead" if KERNELS.in_use else "torch",
            fuse="on" if is_fused(model.module) else "off",
            products=_products(model, device),
            attention=" ".join(map(str, [*prefill.sparsity.values(), *([] if streams is None else [streams])])),
            adapters=model.adapters,
            wire_bits=prefill.wire_bits,
            speeds=None if speeds is None else tuple(speeds) if any(speed != 1 for speed in speeds) else (),
            name=model.name,
            versions=library_versions(),
            date=now(),
        )

    @property
    def place(self) -> str:
        """Device and threads of a rank, in a few words."""
        if self.threads is None:
            return self.device
        return f"{self.device}, {self.threads} thread{'s' if self.threads > 1 else ''} a rank"

    @property
    def added(self) -> set[str]:
        """Fields that older tables lack, and whose value is not the default."""
        return {each.name for each in fields(self) if each.name in ADDED and getattr(self, each.name) != each.default}

    def key(self) -> str:
        """One line that is equal for runs whose measurements may be combined.

        It does not include the link and the speeds: measurements of one device or of live ranks depend neither on the
        result of a ping nor on what is planned.
        """
        values = [*self.model.known.values(), *(getattr(self, name) for name in COMPARED)]
        values += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        values += [self.overrides] if self.overrides else []
        values += [
            f"{name} {getattr(self, name)}"
            for name in ("kernels", "fuse", "products", "attention", "adapters", "wire_bits")
            if name in self.added
        ]
        return "|".join(str(value) for value in values)

    def differences(self, other: Fingerprint) -> list[str]:
        """List what differs, such as "dtype float32, not bfloat16", with the other's value last; empty if they fit."""
        found = []
        for name in vars(self.model):
            mine, theirs = getattr(self.model, name), getattr(other.model, name)
            if mine != theirs:
                found.append(f"model {name.replace('_', ' ')} {mine}, not {theirs}")
        for name in COMPARED:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name} {mine}, not {theirs}")
        for name, what in (
            ("tensor", "ranks.tensor="),
            ("kernels", "attention by kernels of "),
            ("fuse", "model.fuse="),
            ("products", "products by "),
            ("wire_bits", "prefill.wire_bits="),
        ):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{what}{mine}, not {theirs}")
        for name, what in (
            ("overrides", "model.overrides="),
            ("attention", "prefill.attention="),
            ("adapters", "model.adapter of digest "),
        ):
            mine, theirs = (getattr(each, name) or "nothing" for each in (self, other))
            if mine != theirs:
                found.append(f"{what}{mine}, not {theirs}")
        if self.speeds is not None and other.speeds is not None and self.speeds != other.speeds:
            found.append(f"{_speeds_text(self.speeds)}, not {_speeds_text(other.speeds)}")
        if self.link is not None and other.link is not None and not self._link_fits(other):
            found.append(f"a link of {link_text(self.link)}, not {link_text(other.link)}")
        return found

    def search_options(self, other: Fingerprint) -> list[str]:
        """Options of a search whose table fits `other`, for what differs from this one."""
        options = [
            f"{option}={getattr(other, name)}"
            for name, option in OPTIONS.items()
            if getattr(other, name) not in (None, getattr(self, name))
        ]
        if other.overrides:
            options.append(shlex.quote(f"model.overrides={hydra_text(json.loads(other.overrides))}"))
        if other.adapters:
            options.append("model.adapter=<as here>")
        if other.products == Weights.int8.name:  # of the others a machine has one
            options.append("model.weights=int8")
        return options

    def _link_fits(self, other: Fingerprint) -> bool:
        assert self.link is not None and other.link is not None
        if not (self.link_measured or other.link_measured):
            return self.link == other.link
        ratio = self.link.bandwidth_Bps / other.link.bandwidth_Bps
        return 1 / LINK_FACTOR <= ratio <= LINK_FACTOR and self.link.shared == other.link.shared

    def joined(self, other: Fingerprint) -> Fingerprint:
        """Fingerprint of two merged tables: this one, with versions and date of the newer one and any known link."""
        newer = max(self, other, key=lambda each: each.date)
        linked = self if self.link is not None else other
        return replace(
            self,
            link=linked.link,
            link_measured=linked.link_measured,
            speeds=other.speeds if self.speeds is None else self.speeds,
            name=self.name or other.name,
            versions=newer.versions,
            date=newer.date,
        )


COMPARED = ("dtype", "device", "threads", "backend", "transfer", "layers_in_flight")
"""Fields that must be equal, besides the model's shape, the link and the speeds."""

ADDED = ("tensor", "overrides", "kernels", "fuse", "products", "attention", "adapters", "wire_bits")
"""Fields that must be equal, too, and are left out of keys and files at their defaults: those of before stay valid."""

OPTIONS = {
    "dtype": "model.dtype",
    "threads": "ranks.threads",
    "backend": "ranks.backend",
    "transfer": "prefill.transfer",
    "layers_in_flight": "prefill.layers_in_flight",
    "tensor": "ranks.tensor",
    "fuse": "model.fuse",
    "wire_bits": "prefill.wire_bits",
}
"""Fields that options set, with these."""


def _speeds_text(speeds: Sequence[float]) -> str:
    return f"ranks of speeds {', '.join(f'{speed:g}' for speed in speeds)}" if speeds else "ranks all alike"


def link_text(link: Link) -> str:
    """Description of a link in a few words."""
    shared = ", shared" if link.shared else ""
    return f"{link.bandwidth_Bps * BITS_PER_BYTE / 1e9:.4g} Gbit/s, {link.latency_s * 1e6:.4g} µs{shared}"


def device_name(device: torch.device) -> str:
    """Name of a GPU, or of the processor."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() knows only the architecture on Linux
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine()


def _products(model: Model, device: torch.device) -> str:
    """The library that computes products of many rows of a model."""
    from runahead.model.layers.cpu_linear import library

    if model.weights is Weights.int8:
        return Weights.int8.name
    return library(model.dtype) if device.type == "cpu" else "torch"


def now() -> str:
    """The present time, UTC, in the format of tables."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def mlp_dim_of(config: Any) -> int | None:
    """Width of the MLP, from a transformers config; None if it has an unknown name for it."""
    mlp_dims = (getattr(config, name, None) for name in ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"))
    return next((dim for dim in mlp_dims if isinstance(dim, int)), None)


def _shape(model: Model, places: Places) -> ModelShape:
    config, first = model.config, next(iter(model.kv_shapes), None)
    return ModelShape(
        type=str(config.model_type),
        num_layers=places.num_layers,
        model_dim=int(config.hidden_size),
        num_heads=0 if first is None else int(config.num_attention_heads),
        num_kv_heads=0 if first is None else first.num_kv_heads * model.num_shards,
        head_dim=0 if first is None else first.key_dim,
        vocab_size=model.vocab_size,
        mlp_dim=mlp_dim_of(config),
        num_states=len(places.states),
        state_bytes=sum(places.state_bytes),
    )
