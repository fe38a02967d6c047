"""Stand-ins for the few modules of vLLM that the connector imports."""

from __future__ import annotations

import enum
import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class ConnectorBase:
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self.metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


@dataclass
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Stats:
    data: dict[str, Any] = field(default_factory=dict)


class PromMetrics:
    def __init__(self, config: Any, kinds: dict[Any, Any], names: list[str], values: dict[int, list[object]]) -> None:
        self._counter_cls, self._histogram_cls = kinds["counter"], kinds["histogram"]
        self._labelnames, self.per_engine_labelvalues = names, values


def install(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> ModuleType:
    """Put them where Python looks for modules, and import the connector anew."""

    class Empty:
        pass

    modules: dict[str, dict[str, Any]] = {
        BASE: {
            "KVConnectorBase_V1": ConnectorBase,
            "KVConnectorMetadata": Empty,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": TransferResults,
            "KVConnectorWorkerMetadata": Empty,
            "SupportsHMA": Empty,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorPromMetrics": PromMetrics,
            "KVConnectorStats": Stats,
        },
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: rank},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": None},
        "vllm.model_executor.models.utils": {"extract_layer_index": lambda name: int(name.split(".")[2])},
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(HOST="host")},
    }
    # SupportsHMA has to be another class than the base.
    modules[BASE]["SupportsHMA"] = type("SupportsHMA", (), {})
    for path, names in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
    for name in ("connector", "metrics"):
        monkeypatch.delitem(sys.modules, f"runahead_vllm.{name}", raising=False)
    import runahead_vllm.connector as made

    for name in ("connector", "metrics"):  # removed again with the stubs
        monkeypatch.setitem(sys.modules, f"runahead_vllm.{name}", sys.modules[f"runahead_vllm.{name}"])
    return made


@dataclass
class FullAttentionSpec:
    block_size: int = 4
    num_kv_heads: int = 2
    head_size: int = 4
    head_size_v: int = 2
    sliding_window: int | None = None


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int | None = 5


class MambaSpec(FullAttentionSpec):
    pass


def cache_config(*groups: tuple[Any, list[str]]) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
    )


def config(model: str, extra: dict[str, Any], **more: Any) -> Any:
    """vLLM's configuration; `more` by dotted names."""
    made = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", kv_role="kv_consumer", kv_connector_extra_config=extra
        ),
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            dtype="torch.float32",
            quantization=None,
            hf_overrides={},
            hf_config_path=None,
            get_vocab_size=lambda: 640,
            hf_text_config=SimpleNamespace(model_type="llama", rope_parameters={"rope_theta": 10000.0}),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    for path, value in more.items():
        *parts, last = path.split("__")
        place = made
        for part in parts:
            place = getattr(place, part)
        setattr(place, last, value)
    return made
