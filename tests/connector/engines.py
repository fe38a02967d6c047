"""Plain vLLM and vLLM with the connector, each in a process of its own, over one tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.line_processes import LineProcesses
from benchmarks.studies.peers.environment import python_with
from benchmarks.studies.peers.peer import PEERS

PACKAGE = Path(__file__).parents[2] / "integrations" / "vllm"
PROGRAM = Path(__file__).with_name("vllm_program.py")
SETTINGS = {"min_tokens": 64, "wait_s": 60.0}


def python_of_vllm() -> Path:
    """Python of an environment with vLLM, kept in the cache folder. The test is skipped if it does not install."""
    peer = PEERS["vllm"]
    try:
        return python_with(peer.program.stem, peer.packages, peer.without)
    except (ValueError, OSError) as error:
        pytest.skip(f"vLLM does not install here: {error}")


@contextmanager
def engine(python: Path, model: Path, folder: Path, settings: dict[str, Any] | None, **more: Any) -> Iterator[Any]:
    """A process that answers lines of token ids; with `settings` of the connector, or without it."""
    options: dict[str, Any] = {"model": str(model), "max_model_len": 1024, "max_num_seqs": 4, "block_size": 32} | more
    if settings is None:
        options["enable_prefix_caching"] = False
    else:
        options["kv_transfer_config"] = {
            "kv_connector": "RunaheadConnector",
            "kv_connector_module_path": "runahead_vllm.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": SETTINGS | settings,
        }
    log = folder / ("plain.log" if settings is None else "connector.log")
    command = [str(python), str(PROGRAM), json.dumps(options)]
    environment = {"PYTHONPATH": str(PACKAGE), "PYTHONSAFEPATH": "1"}
    made = LineProcesses(command, [environment], cwd=folder, what="vLLM", log=log)
    try:
        yield made
    finally:
        made.close()
