"""vLLM's connector: hands vLLM's calls to the scheduler's side and the worker's side.

vLLM makes two of it: one in the engine's process, which knows requests, and one in each worker, which has the cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from runahead_vllm.asking import Asking, Source
from runahead_vllm.checkpoint import digest
from runahead_vllm.identity import LayerShape, Wanted, compare
from runahead_vllm.loading import Group, Rank, WorkerSide
from runahead_vllm.metrics import RunaheadPromMetrics, RunaheadStats
from runahead_vllm.refusals import check_config, check_layers, refuse
from runahead_vllm.scheduling import Load, Report, SchedulerSide
from runahead_vllm.server import Server
from runahead_vllm.settings import Settings

logger = init_logger("vllm.runahead")


@dataclass
class Loads(KVConnectorMetadata):
    """The loads that workers begin in this step."""

    loads: list[Load] = field(default_factory=list)


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """The reports of workers about loads, by request."""

    by_request: dict[str, list[Report]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        for name, reports in other.by_request.items():
            self.by_request.setdefault(name, []).extend(reports)
        return self


class RunaheadConnector(KVConnectorBase_V1, SupportsHMA):
    """Prompts from Runahead: asynchronous, failures by request, never a hang.

    Raises, when it is made: ValueError: vLLM or the server has what keys and values cannot be handed over with.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        check_config(vllm_config, kinds, trust_weights=settings.trust_weights)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._reports: dict[str, list[Report]] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_side(settings)

    def _scheduler_side(self, settings: Settings) -> SchedulerSide:
        server = Server(settings.server, settings.api_key())
        about = server.about(settings.start_s)
        wanted = self._wanted(needs_digest=about.get("checkpoint") is not None)
        compare(settings.server, about, wanted, trust_weights=settings.trust_weights)
        folder = Path(settings.folder or about["folder"])
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ValueError(
                f"runahead: {folder}, to which {settings.server} writes on host {about.get('host')}, cannot be read "
                "here; start vLLM on that host and as that user, or set folder in kv_connector_extra_config"
            )
        source = Source(
            server=server, folder=folder, key=about["key"], salt=about["salt"], num_layers=len(wanted.layers)
        )
        logger.info("runahead: prompts of %d tokens or more come from %s", settings.min_tokens, settings.server)
        asking = Asking(source, at_once=settings.at_once, wait_s=settings.wait_s)
        return SchedulerSide(asking, min_tokens=settings.min_tokens, look_only=settings.look_only)

    def _wanted(self, *, needs_digest: bool) -> Wanted:
        """The model that vLLM has loaded, to compare with the server's."""
        model, loading = self._vllm_config.model_config, self._vllm_config.load_config
        by_number = {
            number: LayerShape(spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.sliding_window)
            for group in self._kv_cache_config.kv_cache_groups
            for number in self._layers_of(group)
            for spec in [group.kv_cache_spec]
        }
        checkpoint = ""
        if needs_digest:
            folder = model.model
            if not os.path.isdir(folder):
                folder = download_weights_from_hf(folder, loading.download_dir, ["*.safetensors"], model.revision)
            try:
                checkpoint = digest(Path(folder))
            except ValueError as error:
                raise ValueError(f"runahead: the weights cannot be compared with the server's: {error}") from error
        return Wanted(
            checkpoint=checkpoint,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=model.get_vocab_size(),
            model_type=model.hf_text_config.model_type,
            rope=getattr(model.hf_text_config, "rope_parameters", None),
            layers=[by_number[number] for number in sorted(by_number)],
            num_ranks=self._vllm_config.parallel_config.tensor_parallel_size,
        )

    @staticmethod
    def _layers_of(group: Any) -> dict[int, str]:
        return {extract_layer_index(name): name for name in group.layer_names}

    # The scheduler's side: vLLM's engine calls it.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return Loads(self._scheduler.take_loads())

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler.reported(connector_output.kv_connector_worker_meta.by_request)
        self._scheduler.received(connector_output.finished_recving or (), connector_output.failed_recving or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.ended(request.request_id)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # The worker's side: vLLM's model runner calls it.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        context = self._vllm_config.compilation_config.static_forward_context
        layers = {name: context[name] for name in kv_caches}
        check_layers(layers)
        groups = [
            Group(group.kv_cache_spec.block_size, self._layers_of(group))
            for group in self._kv_cache_config.kv_cache_groups
        ]
        named = {name for group in groups for name in group.layers.values()}
        if named != set(layers):
            raise refuse(f"layers without a KV cache group of their own ({', '.join(sorted(named ^ set(layers)))})")
        rank = Rank(get_tensor_model_parallel_rank(), self._vllm_config.parallel_config.tensor_parallel_size)
        self._worker = WorkerSide(layers, groups, rank, num_layers=len(named))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads), metadata
        if metadata.loads:
            assert self._worker is not None, "vLLM registers its cache before it loads"
            self._worker.start(metadata.loads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Each load once, those of requests that were aborted, too: vLLM holds their blocks until then."""
        ended = {} if self._worker is None else self._worker.ended()
        for name, report in ended.items():
            self._reports[name] = [report]
        return KVConnectorTransferResults(
            finished_recving=set(ended), failed_recving={name for name, report in ended.items() if report.error}
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports, self._reports = self._reports, {}
        return Reports(reports) if reports else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a load ends before the request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: vLLM's own keys and values stay with it."""

    def wait_for_save(self) -> None:
        """Nothing, likewise."""

    # Both.

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def get_kv_connector_stats(self) -> RunaheadStats | None:
        """Prompts that have ended since the last call; the scheduler's side knows all of them."""
        if self._scheduler is None or not self._scheduler.happened:
            return None
        happened, self._scheduler.happened = self._scheduler.happened, []
        return RunaheadStats.of(happened)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RunaheadStats:
        return RunaheadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RunaheadPromMetrics:
        return RunaheadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
