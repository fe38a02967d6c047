"""model=hf: checkpoints of all families come back as they were saved; broken ones are refused in one sentence."""

from __future__ import annotations

import fnmatch
import json
import logging
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from runahead.config import ModelOptions
from runahead.features.versions import in_words
from runahead.model.loading import LoadedWeights, checkpoint, hf, load, load_config, load_tokenizer
from runahead.model.loading.quiet import LONGEST_REASON, one_line
from tests import families
from tests.tokenizers_for_tests import byte_level

CPU = torch.device("cpu")
ATTENTION = "loading_test"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A float32 Llama with a tokenizer, as a user has it on disk."""
    path = tmp_path / "llama"
    families.build("llama", dtype=torch.float32).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


def load_hf(path: Path | str, attention: str = ATTENTION, **options: Any) -> LoadedWeights:
    model = ModelOptions(name="hf", path=str(path), **options)
    return load(model, device=CPU, attn_implementation=attention, progress=False)


def refusal(call: Callable[[], Any]) -> str:
    """The message of the error that `call` raises, checked to be one line."""
    with pytest.raises((ValueError, OSError)) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 3 * LONGEST_REASON, message
    return message


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None takes a key away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_every_family_comes_back_as_it_was_saved(family: str, tmp_path: Path) -> None:
    saved = families.build(family, dtype=torch.float32, attention="eager")
    saved.save_pretrained(tmp_path)
    module = load_hf(tmp_path).module
    assert module.config._attn_implementation == ATTENTION  # also where transformers would not take the name
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    weights, expected = module.state_dict(), saved.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    buffers, expected_buffers = dict(module.named_buffers()), dict(saved.named_buffers())
    assert all(torch.equal(buffers[name], expected_buffers[name]) for name in expected_buffers)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_stay_tied(tied: bool, tmp_path: Path) -> None:
    families.build("llama", dtype=torch.float32, tie_word_embeddings=tied).save_pretrained(tmp_path)
    module = load_hf(tmp_path).module
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_dtype_is_the_asked_one_or_the_checkpoints(stored: torch.dtype, asked: str, tmp_path: Path) -> None:
    families.build("llama", dtype=stored).save_pretrained(tmp_path)
    loaded = load_hf(tmp_path, dtype=asked)
    expected = stored if asked == "auto" else getattr(torch, asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}


def test_auto_dtype_is_the_files_where_the_config_has_none(tmp_path: Path) -> None:
    families.build("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype=None, torch_dtype=None)
    assert load_hf(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("folder", ["", "shards/"])
def test_shards_are_put_together(tmp_path: Path, folder: str) -> None:
    saved = families.build("llama", dtype=torch.float32)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    if folder:
        (tmp_path / folder).mkdir()
        for shard in shards:
            shard.rename(tmp_path / folder / shard.name)
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(index.read_text().replace('"model-', f'"{folder}model-'))
    expected, weights = saved.state_dict(), load_hf(tmp_path).module.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_generation_config_comes_along(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_hf(folder).module.generation_config.eos_token_id == [2, 7]


def test_tokenizer_and_config_are_had_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    options = ModelOptions(name="hf", path=str(folder))
    assert load_config(options).num_hidden_layers == 3
    tokenizer = load_tokenizer(options)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer("hello world").input_ids) == "hello world"


def test_folder_without_vocabulary_has_no_tokenizer(folder: Path) -> None:
    # tokenizer_config.json stays: from it alone transformers would make up a tokenizer.
    (folder / "tokenizer.json").unlink()
    assert load_hf(folder).tokenizer is None
    assert load_tokenizer(ModelOptions(name="hf", path=str(folder))) is None


def test_home_folder_is_understood(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_config(ModelOptions(name="hf", path="~/llama")).model_type == "llama"


def test_local_folder_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError(f"network use: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_hf(folder).tokenizer is not None


def test_nothing_is_written_to_the_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    edit_weights(folder, lambda weights: weights.update({"mtp.left.over": torch.zeros(3)}))
    edit_config(folder, torch_dtype="float32")  # deprecated
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        load_hf(folder)
    assert capfd.readouterr() == ("", "")


def test_transformers_settings_are_left_as_they_were(folder: Path) -> None:
    import transformers.utils.logging as settings

    before = settings.get_verbosity(), settings.is_progress_bar_enabled()
    load_hf(folder)
    refusal(lambda: load_hf(folder / "nothing.gguf"))
    assert (settings.get_verbosity(), settings.is_progress_bar_enabled()) == before


# ---------------------------------------------------------------- what users get wrong


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "../a/b/c", "a/b/c", "no/such.gguf", "nothing.json"])
def test_missing_path_is_told_without_asking_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "snapshot_download", None)
    message = refusal(lambda: load_hf(path))
    assert f"model.path={path}" in message
    assert "does not exist" in message


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "JSON"]),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\x00\xfe"), ["config.json", "JSON"]),
        (lambda folder: (folder / "config.json").write_text("[1]"), ["JSON object"]),
        (lambda folder: edit_config(folder, model_type=None), ['no "model_type"']),
        (
            lambda folder: edit_config(folder, model_type="perceptron"),
            ["model_type 'perceptron' is unknown to transformers 5.", f"({in_words('transformers')})"],
        ),
        (lambda folder: edit_config(folder, model_type="vit"), ["model_type vit is no causal language model"]),
        (lambda folder: edit_config(folder, hidden_act="sneeze"), ["sneeze"]),
        (lambda folder: edit_config(folder, hidden_size="wide"), ["config"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["lacks", "model.safetensors"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), ["model.safetensors", "not a complete"]),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), ["tokenizer"]),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), ["tokenizer"]),
        (lambda folder: (folder / "generation_config.json").write_text("{"), ["generation_config.json", "JSON"]),
    ],
)
def test_broken_folder_is_told_in_one_line(break_it: Callable[[Path], Any], words: list[str], folder: Path) -> None:
    break_it(folder)
    message = refusal(lambda: load_hf(folder))
    for word in [f"model.path={folder}", *words]:
        assert word in message


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("XTokenizer requires the SentencePiece library but it was not found."), "install that package"),
        (ValueError("Tokenizer class XTokenizer does not exist or is not currently imported."), "has no such class"),
        (ValueError("Loading this needs `trust_remote_code=True`"), "add model.trust_remote_code=true"),
        (ValueError("expected value at line 1"), "copy or download the folder again"),
    ],
)
def test_a_copy_is_advised_only_where_it_may_help(
    error: Exception, remedy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", fail)
    message = refusal(lambda: load_hf(folder))
    assert remedy in message
    assert ("copy or download" in message) == ("copy or download" in remedy)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("This modeling file requires the following packages: einops"), "install that package"),
        (ValueError("Loading this needs `trust_remote_code=True`"), "add model.trust_remote_code=true"),
        (KeyError("model.layers.0"), "copy or download the folder again if a file is damaged; RUNAHEAD_TRACEBACK=1"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_with_a_remedy(
    error: Exception, remedy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", fail)
    message = refusal(lambda: load_hf(folder))
    assert remedy in message and "\n" not in message


def test_a_lack_of_memory_while_loading_is_no_fault_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError):
        load_hf(folder)


def test_weights_in_another_form_than_transformers_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    message = refusal(lambda: load_hf(folder))
    assert "has consolidated.safetensors but no model.safetensors" in message and "copy or download" not in message


def test_file_cut_short_is_told(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    message = refusal(lambda: load_hf(folder))
    assert "model.safetensors is not a complete safetensors file" in message


def test_weights_of_other_shapes_are_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=64)
    message = refusal(lambda: load_hf(folder))
    assert "model.layers.0.mlp.down_proj.weight has shape [32, 48] where the config makes it [32, 64]" in message
    assert "copy or download" not in message


def test_missing_weights_are_refused_rather_than_made_up(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    message = refusal(lambda: load_hf(folder))
    assert "1 of the model's weights are not in the files, such as model.layers.1.mlp.up_proj.weight" in message
    assert "copy or download" not in message


def test_missing_shard_is_named(tmp_path: Path) -> None:
    families.build("llama", dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    assert f"lacks the weights file {first.name}" in refusal(lambda: load_hf(tmp_path))


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {}}'])
def test_broken_index_is_told(content: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(lambda: load_hf(folder))


def test_pickled_weights_are_not_read(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    message = refusal(lambda: load_hf(folder))
    assert "pickled" in message and "safetensors" in message


def test_folder_of_gguf_files_leads_to_the_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "q4.gguf")
    assert f"model.path={folder}/q4.gguf" in refusal(lambda: load_hf(folder))


def test_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    assert "not a .gguf" in refusal(lambda: load_hf(folder / "model.safetensors"))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_models_own_code_runs_only_if_asked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(folder, model_type="own", architectures=["OwnModel"], auto_map=auto_map)
    assert "model.trust_remote_code=true" in refusal(lambda: load_hf(folder))
    assert not (tmp_path / "modules").exists()
    assert type(load_hf(folder, trust_remote_code=True).module).__name__ == "OwnModel"


# ---------------------------------------------------------------- the hub


class Hub:
    """Stands in for the hub: one repository, of which it hands out what is asked for."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache, self.given = repository, cache, []
        self.revisions: set[str | None] = set()

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert name == "org/model"
        self.revisions.add(revision)
        self.cache.mkdir(exist_ok=True)
        for file in self.repository.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns) and file.is_file():
                shutil.copy(file, self.cache)
                self.given.append(file.name)
        return str(self.cache)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    for extra in ("consolidated.safetensors", "pytorch_model.bin", "own.py", "picture.png"):
        (folder / extra).write_bytes(b"x")
    hub = Hub(folder, tmp_path / "cache")
    monkeypatch.setattr(checkpoint, "snapshot_download", hub.snapshot_download)
    return hub


def test_hub_model_is_fetched_without_what_is_not_needed(hub: Hub) -> None:
    loaded = load_hf("org/model")
    assert loaded.tokenizer is not None
    assert loaded.name == "org/model"
    weights = [name for name in hub.given if not name.endswith((".json", ".jinja"))]
    assert weights == ["model.safetensors"]


def test_hub_tokenizer_is_fetched_without_weights(hub: Hub) -> None:
    assert load_tokenizer(ModelOptions(name="hf", path="org/model")) is not None
    assert not any(name.endswith((".safetensors", ".bin", ".py")) for name in hub.given)


def test_gguf_file_of_a_hub_repository_is_found(hub: Hub) -> None:
    (hub.repository / "tiny.gguf").write_text("not a model")
    assert "is not a complete GGUF file" in refusal(lambda: load_hf("org/model/tiny.gguf"))
    assert hub.given == ["tiny.gguf"]
    assert "org/model has no file other.gguf" in refusal(lambda: load_hf("org/model/other.gguf"))


def test_hub_repository_without_safetensors_is_told(hub: Hub) -> None:
    (hub.repository / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(lambda: load_hf("org/model"))


def test_all_files_are_of_the_revision_that_is_asked_for(hub: Hub, folder: Path) -> None:
    load_hf("org/model", revision="v1.5")
    assert hub.revisions == {"v1.5"}
    assert "model.revision=v1.5 is for models of the hub" in refusal(lambda: load_hf(folder, revision="v1.5"))
    with pytest.raises(ValueError, match="has no effect with model=smollm2"):
        ModelOptions(revision="v1.5")


def test_hub_code_is_fetched_only_if_asked(hub: Hub) -> None:
    load_hf("org/model", trust_remote_code=True)
    assert "own.py" in hub.given


@pytest.mark.parametrize("path", ["org/model", "modle", "org/model/q4.gguf"])
def test_unreachable_hub_is_told_in_one_line(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> str:
        raise ConnectionError("Name or service not known\nAn error happened.\n\nPlease check your connection.")

    monkeypatch.setattr(checkpoint, "snapshot_download", fail)
    message = refusal(lambda: load_hf(path))
    assert f"model.path={path} is no folder here" in message
    assert "local folder" in message


def test_one_line_keeps_the_first_sentence() -> None:
    page = "The size of \x1b[1ma.b\x1b[0m is v5.1 wrong, e.g. 3.\n\nTips:\n - read the `docs`. Or not"
    assert one_line(page) == "The size of a.b is v5.1 wrong, e.g. 3"
    assert one_line("Wrong:\n  size 3\nSee the docs") == "Wrong: size 3"
    assert one_line(RuntimeError()) == "RuntimeError"
    assert one_line(KeyError("gelo")) == "KeyError 'gelo'"
    assert len(one_line("a" * 1000)) == LONGEST_REASON


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_go_straight_to_the_gpu(folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    options = ModelOptions(name="hf", path=str(folder))
    module = load(options, device=device, attn_implementation=ATTENTION).module
    assert {tensor.device for tensor in [*module.parameters(), *module.buffers()]} == {device}
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in module.state_dict().items())


def test_config_is_transformers_own(folder: Path) -> None:
    ours = load_config(ModelOptions(name="hf", path=str(folder)))
    assert ours.to_dict() == AutoConfig.from_pretrained(folder).to_dict()
