"""The connector's two sides put together as vLLM does, over stubs of its classes: steps, refusals at start, metrics."""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runahead_vllm.checkpoint import digest
from tests.connector import vllm_stubs as stubs
from tests.connector.fake_server import Answer, FakeServer, serving
from tests.connector.request import request
from tests.connector.test_loading import Layer
from tests.connector.written import KEY, SALT, numbers, write

IDS = list(range(13))
NAMES = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]
GROUPS = ((stubs.FullAttentionSpec(), NAMES[::2]), (stubs.SlidingWindowSpec(), NAMES[1:2]))


def checkpoint(folder: Path, bias: int = 0) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({"a": torch.arange(100.0) + bias, "b": torch.ones(2, 3)}, folder / "model.safetensors")
    return folder


class Place:
    """Both sides of a connector on one machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: FakeServer) -> None:
        self.module, self.server, self.folder = stubs.install(monkeypatch), server, tmp_path / "handed"
        self.folder.mkdir()
        self.model = checkpoint(tmp_path / "model")
        shape = {"kv_heads": 2, "key_dim": 4, "value_dim": 2, "window": None}
        server.about = {
            "format": "runahead segment 1",
            "folder": str(self.folder),
            "host": "here",
            "key": KEY,
            "salt": SALT,
            "checkpoint": digest(self.model),
            "why_no_checkpoint": "",
            "dtype": "float32",
            "vocab_size": 640,
            "model_type": "llama",
            "rope": {"rope_theta": 10000, "rope_type": "default"},
            "layers": [shape, shape | {"window": 5}, shape],
        }
        self.extra: dict[str, Any] = {"server": server.url, "min_tokens": 4, "start_s": 20.0}

    def make(self, role: stubs.Role, groups: Any = GROUPS, **more: Any) -> Any:
        config = stubs.config(str(self.model), self.extra, **more)
        return self.module.RunaheadConnector(config, role, stubs.cache_config(*groups))

    def worker(self, layers: dict[str, Any], **more: Any) -> Any:
        made = self.make(stubs.Role.WORKER, **more)
        made._vllm_config.compilation_config.static_forward_context = layers
        made.register_kv_caches(dict.fromkeys(layers))
        return made


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    def prefill(ids: list[int], closed: Callable[[float], bool]) -> Answer:
        return 200, {"file": write(made.folder, ids, numbers(ids)).name}

    with serving(FakeServer({}, prefill)) as server:
        made = Place(monkeypatch, tmp_path, server)
        yield made


def attention(**more: Any) -> Any:
    layer: Any = Layer(2)
    layer.kv_sharing_target_layer_name = None
    layer.attn_backend = SimpleNamespace(forward_includes_kv_cache_update=False, get_name=lambda: "CPU_ATTN")
    vars(layer).update(more)
    return layer


def step(scheduler: Any, worker: Any) -> Any:
    """A step of vLLM in which nothing is computed."""
    worker.metadata = scheduler.build_connector_meta(None)
    worker.start_load_kv(None)
    results = worker.get_transfer_results(set())
    output = SimpleNamespace(
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    scheduler.update_connector_output(output)
    return results


@pytest.mark.parametrize("damaged", [False, True])
def test_a_prompt_comes_from_the_server_into_the_cache(place: Place, damaged: bool) -> None:
    scheduler, layers = place.make(stubs.Role.SCHEDULER), {name: attention() for name in NAMES}
    worker, asked = place.worker(layers), request("a", IDS)
    end = time.monotonic() + 20
    while (answer := scheduler.get_num_new_matched_tokens(asked, 0))[0] is None:
        step(scheduler, worker)
        assert time.monotonic() < end
    assert answer == (12, True)
    if damaged:
        [path] = place.folder.glob("*.safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3], [0, 5, 4]))
    scheduler.update_state_after_alloc(asked, blocks, 12)
    found: Counter[str] = Counter()
    steps_left = 50  # once it is reported: it must not be again
    while steps_left:
        results = step(scheduler, worker)
        found.update(results.finished_recving)
        assert results.failed_recving == (results.finished_recving if damaged else set())
        steps_left -= bool(found)
        assert time.monotonic() < end + 20
        time.sleep(0.001)
    assert found == {"a": 1}
    if damaged:
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    else:
        assert torch.equal(layers[NAMES[0]].kv_cache[4:16], numbers(IDS)[0][:12])
        assert torch.equal(layers[NAMES[1]].kv_cache[16:20], numbers(IDS)[1][8:12])
    assert scheduler.request_finished_all_groups(asked, ([1], [2])) == (False, None)
    stats = scheduler.get_kv_connector_stats()
    again = place.module.RunaheadConnector.build_kv_connector_stats(json.loads(json.dumps(stats.data)))
    assert again.aggregate(stats).reduce()["Runahead prompts " + ("given_up" if damaged else "loaded")] == 2
    assert scheduler.get_kv_connector_stats() is None and worker.get_kv_connector_stats() is None
    scheduler.shutdown()
    worker.shutdown()


def test_reports_of_ranks_are_put_together(place: Place) -> None:
    first, second = (place.module.Reports({"a": [number]}) for number in (1, 2))
    assert first.aggregate(second).by_request == {"a": [1, 2]}


def test_metrics_are_counted_by_outcome(place: Place) -> None:
    seen: Counter[str] = Counter()

    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
            self.name = name

        def labels(self, *values: object) -> Any:
            name = ":".join([self.name.removeprefix("vllm:runahead_"), *map(str, values)])

            def add(value: float = 1) -> None:
                seen[name] += value

            return SimpleNamespace(inc=add, observe=add)

    kinds = {"counter": Metric, "histogram": Metric}
    metrics = place.module.RunaheadConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    happened = {"waited_s": 2.0, "num_tokens": 7, "num_bytes": 9, "load_s": 0.5}
    metrics.observe({"happened": [happened | {"kind": kind} for kind in ("loaded", "given_up", "dropped", "alone")]}, 0)
    assert seen == {
        "prompts:0:loaded": 1,
        "prompts:0:given_up": 1,
        "prompts:0:dropped": 1,
        "prompts:0:alone": 1,
        "tokens_loaded:0": 7,
        "bytes_loaded:0": 9,
        "wait_seconds:0": 6,
        "load_seconds:0": 0.5,
    }


OTHERS = "cannot take K,V of another engine; start vLLM without this connector"
ROPE = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "longrope"}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "set it to recompute"),
        ({"kv_transfer_config__kv_role": "kv_both"}, "set it to kv_consumer"),
        ({"parallel_config__decode_context_parallel_size": 2}, f"runahead: context parallelism {OTHERS}"),
        ({"parallel_config__prefill_context_parallel_size": 2}, f"runahead: context parallelism {OTHERS}"),
        ({"parallel_config__pipeline_parallel_size": 2}, f"runahead: pipeline parallelism {OTHERS}"),
        (
            {"speculative_config": SimpleNamespace(method="eagle")},
            f"runahead: speculation with a draft model's cache {OTHERS}",
        ),
        ({"cache_config__cache_dtype": "fp8"}, f"runahead: a KV cache in fp8 {OTHERS}"),
        ({"model_config__quantization": "awq"}, f"runahead: weights quantised by awq {OTHERS}"),
        ({"load_config__load_format": "dummy"}, f"runahead: load_format=dummy {OTHERS}"),
        ({"model_config__hf_overrides": {"rms_norm_eps": 1e-3}}, "--hf-overrides {'rms_norm_eps': 0.001} .* leave it"),
        ({"model_config__hf_overrides": lambda config: config}, "--hf-overrides .* set trust_weights"),
        ({"model_config__hf_config_path": "/other"}, "--hf-config-path /other gives vLLM another config"),
        (
            {"model_config__hf_text_config__rope_parameters": {"rope_type": "dynamic"}},
            f"runahead: RoPE that depends on the text's length {OTHERS}",
        ),
        ({"model_config__hf_text_config__rope_parameters": ROPE}, "RoPE that depends on the text's length"),
        (
            {"groups": ((stubs.FullAttentionSpec(), NAMES[:2]), (stubs.MambaSpec(), NAMES[2:]))},
            f"runahead: MLA, Mamba, chunked or other caches {OTHERS}",
        ),
    ],
)
@pytest.mark.parametrize("role", stubs.Role)
def test_what_would_be_wrong_is_refused_at_start(
    place: Place, role: stubs.Role, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        place.make(role, **more)


def test_speculation_from_the_text_is_taken(place: Place) -> None:
    place.make(stubs.Role.SCHEDULER, speculative_config=SimpleNamespace(method="ngram"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kv_sharing_target_layer_name": "x"}, "layer model.layers.1.attn reads the keys and values of another layer"),
        (
            {"attn_backend": SimpleNamespace(forward_includes_kv_cache_update=True, get_name=lambda: "FUSED")},
            "attention backend FUSED writes its cache in its forward",
        ),
    ],
)
def test_layers_that_cannot_be_written_to_are_refused(place: Place, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place.worker({name: attention(**(more if name == NAMES[1] else {})) for name in NAMES})


def test_layers_without_a_group_are_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="without a KV cache group of their own"):
        place.worker({name: attention() for name in [*NAMES, "model.layers.3.attn"]})


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"format": "runahead segment 2"}, "the file format runahead segment 2, vLLM runahead segment 1"),
        ({"checkpoint": "0" * 64}, "a checkpoint with the digest 0000"),
        ({"checkpoint": None, "why_no_checkpoint": "random weights"}, r"has loaded \(random weights\).* trust_weights"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, vLLM float32"),
        ({"vocab_size": 641}, "vocab_size 641, vLLM 640"),
        ({"model_type": "qwen3"}, "model_type qwen3, vLLM llama"),
        ({"rope": {"rope_theta": 500000.0}}, "has RoPE .*500000.0.*10000.0"),
        ({"rope": None}, "has RoPE"),
        ({"layers": []}, "has layers 0, vLLM 3"),
        ({"layers": [{"kv_heads": 2, "key_dim": 4, "value_dim": 2, "window": None}] * 3}, "has in layer 1"),
        ({"layers": [{"kv_heads": 3, "key_dim": 4, "value_dim": 2, "window": None}] * 3}, "has in layer 0"),
        ({"folder": "/nowhere/at/all"}, "/nowhere/at/all, to which .* on host here, cannot be read here"),
    ],
)
def test_a_server_with_another_model_is_refused_at_start(place: Place, about: dict[str, Any], words: str) -> None:
    place.server.about |= about
    with pytest.raises(ValueError, match=words):
        place.make(stubs.Role.SCHEDULER)


def test_what_cannot_be_compared_is_taken_on_trust_alone(place: Place) -> None:
    place.server.about |= {"checkpoint": None}
    place.extra["trust_weights"] = True
    place.make(stubs.Role.SCHEDULER, model_config__hf_overrides={"rms_norm_eps": 1e-3})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"error": {"message": "serve.handover is off"}}), "answered 404: serve.handover is off"),
        ((503, {"error": {"message": "it starts"}}), "does not answer within 0.1 s: it answered 503: it starts"),
    ],
)
def test_a_server_that_hands_nothing_over_is_refused_at_start(place: Place, answer: Answer, words: str) -> None:
    place.server.about = answer
    if answer[0] == 503:
        place.extra["start_s"] = 0.1
    with pytest.raises(ValueError, match=words):
        place.make(stubs.Role.SCHEDULER)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"min_token": 5}, "min_token, which is none of api_key_file, .*wait_s"),
        ({"min_tokens": 5.5}, "min_tokens=5.5 of kv_connector_extra_config must be a whole number"),
        ({"min_tokens": True}, "must be a whole number"),
        ({"wait_s": "5"}, "wait_s='5' of kv_connector_extra_config must be a number"),
        ({"wait_s": 0}, "wait_s=0 of kv_connector_extra_config must be above 0"),
        ({"wait_s": float("nan")}, "must be above 0"),
        ({"wait_s": float("inf")}, "wait_s=inf of kv_connector_extra_config must be at most 10000000 seconds"),
        ({"start_s": 1e300}, "start_s=1e[+]300 of kv_connector_extra_config must be at most 10000000 seconds"),
        ({"server": "127.0.0.1:8000"}, "must be the address of Runahead's server"),
        ({"server": ""}, "must be the address of Runahead's server"),
        ({"api_key_file": "/nowhere"}, "api_key_file=/nowhere cannot be read"),
    ],
)
def test_wrong_settings_are_refused_at_start(place: Place, extra: dict[str, Any], words: str) -> None:
    place.extra |= extra
    with pytest.raises(ValueError, match=words):
        place.make(stubs.Role.SCHEDULER)


def test_a_digest_does_not_depend_on_the_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(100.0), "b": torch.ones(2, 3)}
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    weight_map = {}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / "two" / f"{name}.safetensors")
        weight_map[name] = f"{name}.safetensors"
    (tmp_path / "two" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file(tensors | {"b": tensors["b"] + 1}, tmp_path / "other" / "model.safetensors")
    assert digest(tmp_path / "one") == digest(tmp_path / "two") != digest(tmp_path / "other")
    with pytest.raises(ValueError, match="has no"):
        digest(tmp_path)


def test_a_digest_is_what_the_page_says(tmp_path: Path) -> None:
    import hashlib

    made, folder = hashlib.sha256(), checkpoint(tmp_path / "model")
    for name, tensor in (("a", torch.arange(100.0)), ("b", torch.ones(2, 3))):
        data = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        made.update(f"{name} F32 {json.dumps(list(tensor.shape))}\n".encode())
        for at in (0, len(data) // 2, max(0, len(data) - 64)):
            made.update(data[at : at + 64])
    assert digest(folder) == made.hexdigest()


def both_digests(folder: Path) -> tuple[str, str]:
    """The connector's and the server's."""
    from runahead.model.fingerprint import checkpoint_digest
    from runahead.model.loading.checkpoint import Checkpoint, weight_files

    source = Checkpoint(folder=folder, name="m", label="model.path=m", remedy="copy it again")
    return digest(folder), checkpoint_digest(weight_files(source))


def test_a_digest_is_that_of_the_server(tmp_path: Path) -> None:
    """Both sides have the same digest of every folder of which they read the same weights."""
    from safetensors.torch import save_file

    first, second, third = ({name: torch.arange(100.0) * number} for number, name in enumerate("abc"))

    def folder(name: str, files: dict[str, dict[str, torch.Tensor]], index: Any = None, **config: Any) -> Path:
        made = tmp_path / name
        made.mkdir()
        for file, tensors in files.items():
            save_file(tensors, made / file, metadata={"format": "pt"})
        if index is not None:
            (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        (made / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
        return made

    whole = {"model.safetensors": first | second}
    folders = [
        folder("one file", whole),
        folder(
            "beside others",
            whole | {"consolidated.safetensors": third, "adapter_model.safetensors": {"d": second["b"]}},
        ),
        folder(
            "index", {"x.safetensors": first, "y.safetensors": second}, {"a": "x.safetensors", "b": "y.safetensors"}
        ),
        folder("index of the one file", whole, {"a": "model.safetensors", "b": "model.safetensors"}),
        folder("named by the config", {"z.safetensors": first | second}, transformers_weights="z.safetensors"),
    ]
    found = {each for made in folders for each in both_digests(made)}
    assert len(found) == 1
    # A tensor that the index leaves out is in the file all the same: both engines read it.
    more = folder(
        "more", {"x.safetensors": first | second, "y.safetensors": third}, {"a": "x.safetensors", "c": "y.safetensors"}
    )
    ours, servers = both_digests(more)
    assert ours == servers and ours not in found


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"model.safetensors": "a", "x.safetensors": "b", "index": "x.safetensors"},
            "server reads .*/model.safetensors and",
        ),
        (
            {"model.safetensors": "ab", "model.fp16.safetensors": "b"},
            "also reads .*/model.fp16.safetensors, which has b",
        ),
    ],
)
def test_a_folder_with_two_sets_of_weights_has_no_digest(tmp_path: Path, files: dict[str, str], words: str) -> None:
    """vLLM and the server would each take another one."""
    from safetensors.torch import save_file

    for file, names in files.items():
        if file == "index":
            text = json.dumps({"weight_map": {"b": names}})
            (tmp_path / "model.safetensors.index.json").write_text(text)
        else:
            save_file({name: torch.ones(3) for name in names}, tmp_path / file)
    with pytest.raises(ValueError, match=words):
        digest(tmp_path)


@pytest.mark.parametrize(
    "header", ["[1]", "{", '{"a": 1}', '{"a": {"dtype": "F32"}}', '{"a": {"data_offsets": [0, 4]}}']
)
def test_a_damaged_checkpoint_is_named_in_words(tmp_path: Path, header: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
    with pytest.raises(ValueError, match="model.safetensors is no readable safetensors file"):
        digest(tmp_path)


@pytest.mark.parametrize("index", ["[", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named_in_words(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json (cannot be read|holds no|has no weight_map)"):
        digest(tmp_path)


def test_the_package_imports_nothing_of_runahead() -> None:
    """vLLM wants another transformers than Runahead: both cannot be in one environment."""
    import ast
    import sys

    package = Path(__file__).parents[2] / "integrations" / "vllm" / "runahead_vllm"
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
            with_vllm = {"vllm"} if path.stem in ("connector", "metrics") else set()
            assert roots <= {"torch", "runahead_vllm"} | with_vllm, f"{path.name} imports {roots}"
