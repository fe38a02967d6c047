"""Checkpoints on disk: find one by path or hub id, and check its files.

A user's mistakes are reported from the small files and the headers of the large ones, before any weight is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from runahead.config import ModelOptions
from runahead.files import read_user_file
from runahead.model.loading.gguf.header import GGUFHeader, read_header
from runahead.model.loading.quantised import Form
from runahead.model.loading.quantised.in_8_bits import CodedWeight
from runahead.model.loading.quantised.packed import FLOATS, PackedWeight
from runahead.model.loading.quiet import one_line, quiet

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
READ_WHOLE = (
    *("config.json", "generation_config.json", "*.index.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "vocab*", "merges*", "*.model", "*.jinja", "*.tiktoken"),
)
"""Files of a model's folder, other than weights, that transformers reads whole."""
MOST_SMALL_BYTES = 2**28
"""Largest size of such a file."""

SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")

ADAPTER = "adapter_config.json"

POINTER = b"version https://git-lfs"
"""Beginning of the few lines that git puts in place of a large file until git-lfs fetches it."""

# A folder with none of these has no tokenizer. tokenizer_config.json alone does not count: from it transformers
# makes a tokenizer of three tokens.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_GGUF = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(.+\.gguf)")


@dataclass(kw_only=True)
class Opened:
    """Safetensors files whose headers have been read.

    Attributes:
        slices: a slice object of each stored tensor, by name, which reads the part that is asked for.
        weights: of quantised ones, as of `Form.found`; None until they are asked for.
    """

    files: list[Path]
    slices: dict[str, Any]
    weights: dict[str, Any] | None = None


@dataclass(kw_only=True)
class Checkpoint:
    """A folder with config, tokenizer and safetensors weights, or a GGUF file in it, which holds all of these.

    Attributes:
        gguf: name of the GGUF file in the folder, or None.
        config_file: the config of a model with random weights, for which the folder may have a tokenizer; or None.
        name: the model's name; "" if its config gives it.
        label: what the user wrote, for error messages.
        remedy: what to do if the files are damaged, for error messages.
        from_hub: missing files, such as code in another repository, may be fetched.
        form: how the weights are quantised; None if they are not, or it is not known yet.
        opened: its files, once they were opened; whoever changes `folder` or the format has none.
    """

    folder: Path
    gguf: str | None = None
    config_file: Path | None = None
    name: str = ""
    label: str
    remedy: str
    from_hub: bool = False
    form: Form | None = None
    opened: Opened | None = field(default=None, repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The folder, or the one file that was named."""
        return self.config_file or self.folder / (self.gguf or "")

    @property
    def in_safetensors(self) -> bool:
        """Whether its weights are in safetensors files."""
        return self.gguf is None and self.config_file is None

    @property
    def place(self) -> dict[str, Any]:
        """Arguments of transformers' from_pretrained for this checkpoint."""
        place = {"pretrained_model_name_or_path": str(self.folder), "local_files_only": not self.from_hub}
        return place if self.gguf is None else place | {"gguf_file": self.gguf}

    @property
    def config_place(self) -> dict[str, Any]:
        """Arguments of from_pretrained for the config."""
        # transformers finds a model's own code beside config.json only if the folder is named.
        if self.config_file is None or self.config_file.name == "config.json":
            return self.place
        return self.place | {"pretrained_model_name_or_path": str(self.config_file)}


@dataclass(kw_only=True)
class StoredTensor:
    """A tensor in a safetensors file: the file's name of its type; `dtype` is None if that is not in `FLOATS`.

    One that is decoded has the dtype that it is decoded to; `packed_bytes` is what it has in the file then, else 0.
    `held_bytes` is what one has in memory that stays in 8 bits, else 0.
    """

    code: str
    dtype: torch.dtype | None
    num_elements: int
    packed_bytes: int = 0
    held_bytes: int = 0

    @property
    def read_width(self) -> int:
        """Bytes of a number, as it is read; what is packed is decoded in float32."""
        if self.packed_bytes:
            return torch.float32.itemsize
        return self.dtype.itemsize if self.dtype else 0


def find(options: ModelOptions, *, weights: bool, progress: bool) -> Checkpoint:
    """Find the checkpoint of model=hf: a local folder, a .gguf file, or a hub id, which is downloaded.

    Args:
        weights: also download the weights.

    Raises:
        ValueError, OSError: there is no such checkpoint; one line with the remedy.
    """
    assert options.path is not None, options
    path, label, revision = options.path, f"model.path={options.path}", options.revision
    local = local_path(path, label)
    if revision is not None and local.exists():
        raise ValueError(
            f"model.revision={revision} is for models of the hub, and {label} is on this machine; leave it out"
        )
    if local.is_file():
        if local.suffix != ".gguf":
            raise ValueError(f"{label} is a file but not a .gguf; name the model's folder, a .gguf file or a hub id")
        return Checkpoint(folder=local.parent, gguf=local.name, name=path, label=label, remedy="download it again")
    if local.is_dir():
        require_small_files(local, label)
        return Checkpoint(folder=local, name=path, label=label, remedy="copy or download the folder again")
    if match := HUB_GGUF.fullmatch(path):
        file = download(label, progress, match[1], revision, [match[2]]) / match[2]
        if not file.is_file():
            raise ValueError(f"{label}: the hub's {match[1]} has no file {match[2]}; name one that it has")
        remedy = f"delete {file} and run again"
        return Checkpoint(folder=file.parent, gguf=file.name, name=path, label=label, remedy=remedy)
    if not HUB_ID.fullmatch(path) or local.suffix in (".gguf", ".json", ".safetensors"):
        raise ValueError(f"{label} does not exist; name a model's folder, a .gguf file or a hub id such as org/name")
    # The small files first: they say which large ones belong to the model if a repository holds several formats.
    small = SMALL_FILES + (["*.py"] if options.trust_remote_code else [])
    folder = download(label, progress, path, revision, small)
    remedy = f"delete {folder} and run again"
    checkpoint = Checkpoint(folder=folder, name=path, label=label, remedy=remedy, from_hub=True)
    if weights:
        download(label, progress, path, revision, weight_names(checkpoint))
    return checkpoint


def local_path(path: str, label: str) -> Path:
    """The path on this machine. Raises: ValueError: its home folder is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise ValueError(f"{label} cannot be found: {error}; write the whole path") from error


def require_small_files(folder: Path, label: str) -> None:
    """Check config, tokenizer and similar files in a folder, which transformers reads whole.

    Raises:
        ValueError: a file is larger than `MOST_SMALL_BYTES`, or was not fetched by git-lfs.
    """
    try:
        small = [each for each in folder.iterdir() if each.is_file() and any(map(each.match, READ_WHOLE))]
        large = [each.name for each in small if each.stat().st_size > MOST_SMALL_BYTES]
    except OSError as error:
        raise ValueError(f"{label} cannot be read: {error.strerror}; name a model's folder") from error
    if large:
        raise ValueError(f"{label}: {min(large)} is larger than {MOST_SMALL_BYTES // 2**20} MiB; restore or remove it")
    require_fetched(small, label)


def require_fetched(files: Iterable[Path], label: str) -> None:
    """Check that files are no pointers of git-lfs, which a clone without it has in their place. Raises: ValueError."""
    for path in files:
        try:
            with path.open("rb") as file:
                is_pointer = file.read(len(POINTER)) == POINTER
        except OSError:  # whoever needs the file says so
            continue
        if is_pointer:
            raise ValueError(
                f"{label}: {path.name} is a pointer of git-lfs and not the file itself; run `git lfs pull` in "
                f"{path.parent}, or download the model with `hf download`"
            )


def download(label: str, progress: bool, repository: str, revision: str | None, files: list[str]) -> Path:
    """Download files of a repository of the hub. Raises: OSError: it does not give them; one line with the remedy."""
    try:
        with quiet(bars=progress):
            return Path(snapshot_download(repository, revision=revision, allow_patterns=files))
    except Exception as error:  # the hub's library raises its own, its HTTP library's, and OSError
        at = "" if revision is None else f" at model.revision={revision}"
        raise FileNotFoundError(
            f"{label} is no folder here, and the hub does not give it{at} ({one_line(error)}); "
            "check the name and the network, or give the path of a local folder"
        ) from error


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the checkpoint's config, which names the architecture, and check its generation_config.json.

    Raises:
        ValueError: a file is missing, damaged, or not a transformers config.
    """
    label, path = checkpoint.label, checkpoint.config_file or checkpoint.folder / "config.json"
    # transformers would ignore a damaged generation config, and with it the tokens that end an answer.
    generation = checkpoint.folder / "generation_config.json"
    if checkpoint.config_file is None and generation.is_file():
        _require_end_tokens(read_json(generation, label), label)
    if checkpoint.config_file is None:
        _require_no_adapter(checkpoint)
    if not path.is_file():
        raise ValueError(f"{label} has no {path.name}; name the folder of a transformers model")
    config = read_json(path, label)
    # Repositories with their own code may name a class instead.
    if "model_type" not in config and "auto_map" not in config:
        raise ValueError(f'{label}: {path.name} has no "model_type"; transformers needs it to know the architecture')
    _require_end_tokens(config, label)
    return config


def _require_no_adapter(checkpoint: Checkpoint) -> None:
    """Check that a model's folder holds no adapter, which transformers would apply or not. Raises: ValueError."""
    path = checkpoint.folder / ADAPTER
    if not path.is_file():
        return
    settings = read_json(path, checkpoint.label)
    kind, base = settings.get("peft_type") or "peft", settings.get("base_model_name_or_path")
    alone = not (checkpoint.folder / "config.json").is_file()
    of = f" for {ascii(base)[1:-1]}" if isinstance(base, str) and base else ""
    remedy = "" if alone else f", or remove {ADAPTER} to run the model without it"
    raise ValueError(
        f"{checkpoint.label} holds an adapter ({kind}{of}), where a model is named; name its model there, and this "
        f"folder with model.adapter{remedy}"
    )


def _require_end_tokens(config: dict[str, Any], label: str) -> None:
    """Check that eos_token_id is a token id, a list of them, or absent."""
    ids = config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"{label}: eos_token_id {ascii(ids)[:60]} must be a token id or a list of them; restore the file"
        )


def read_json(path: Path, label: str) -> dict[str, Any]:
    """Read a JSON object from a checkpoint's file. Raises: ValueError."""
    try:
        content = json.loads(read_user_file(path).decode("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"{label}: {path.name} cannot be read as JSON ({one_line(error)}); restore the file"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{label}: {path.name} does not hold a JSON object; restore the file")
    return content


def weight_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the safetensors files that hold the weights, which need not be downloaded yet.

    Raises:
        ValueError: config.json or the index is damaged or names other files.
    """
    # Some repositories name the file themselves; transformers follows that too.
    name = read_config(checkpoint).get("transformers_weights")
    if name is None:
        has_index = (checkpoint.folder / INDEX).is_file() and not (checkpoint.folder / WEIGHTS).is_file()
        name = INDEX if has_index else WEIGHTS
    _require_names([name], "config.json", checkpoint)
    if not name.endswith(".index.json"):
        return [name]
    shards = read_json(checkpoint.folder / name, checkpoint.label).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f'{checkpoint.label}: {name} has no "weight_map"; {checkpoint.remedy}')
    _require_names(list(shards.values()), name, checkpoint)
    return sorted(set(shards.values()))


def _is_inside(name: str) -> bool:
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts


def _require_names(names: list[Any], where: str, checkpoint: Checkpoint) -> None:
    """Check that these are names of safetensors or index files in the checkpoint's folder."""
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or not _is_inside(name):
            raise ValueError(
                f"{checkpoint.label}: {where} names {ascii(name)[:60]} as a file of weights, which is no name of a "
                f"file in the folder; {checkpoint.remedy}"
            )
        if not name.endswith((".safetensors", ".index.json")):
            raise ValueError(
                f"{checkpoint.label}: {where} names {name} as a file of weights, and weights are read from "
                ".safetensors alone; convert them, or take a checkpoint that has them"
            )


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Paths of the safetensors files that hold the weights. Pickled weights are refused: reading them can run code.

    Raises:
        ValueError: a file is missing, or the weights are pickled.
    """
    files = [checkpoint.folder / name for name in weight_names(checkpoint)]
    missing = [file.name for file in files if not file.is_file()]
    if missing == [WEIGHTS] and checkpoint.from_hub:
        raise ValueError(
            f"{checkpoint.label}: the hub's repository has no {WEIGHTS}; weights in other forms (.bin, .pt) are not "
            "read, since they can run any code; take a repository with safetensors"
        )
    if missing == [WEIGHTS]:
        if any(next(checkpoint.folder.glob(pattern), None) for pattern in PICKLES):
            raise ValueError(
                f"{checkpoint.label} holds pickled weights (.bin, .pt) only, which can run any code when they are "
                "read; convert them to safetensors, or take a checkpoint that has them"
            )
        if ggufs := sorted(checkpoint.folder.glob("*.gguf")):
            raise ValueError(
                f"{checkpoint.label} holds no {WEIGHTS}; name the GGUF file, such as model.path={ggufs[0]}"
            )
    others = sorted(file.name for file in checkpoint.folder.glob("*.safetensors"))
    if missing == [WEIGHTS] and others and not SHARD.fullmatch(others[0]):
        raise ValueError(
            f"{checkpoint.label} has {others[0]} but no {WEIGHTS}; weights are read in transformers' form alone, so "
            "take a checkpoint in that form"
        )
    if missing:
        raise ValueError(f"{checkpoint.label} lacks the weights file {missing[0]}; {checkpoint.remedy}")
    return files


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Read the headers of the safetensors files: tensors by name, of quantised weights those that they are decoded to.

    There are none of a GGUF file, nor of a model with random weights.

    Raises:
        ValueError: as for `stored_parts`.
    """
    if not checkpoint.in_safetensors:
        return {}
    return {
        name: StoredTensor(
            code=part.get_dtype(),
            dtype=FLOATS.get(part.get_dtype()),
            num_elements=torch.Size(part.get_shape()).numel(),
            packed_bytes=part.stored_bytes if isinstance(part, PackedWeight) else 0,
            held_bytes=part.held_bytes if isinstance(part, CodedWeight) else 0,
        )
        for name, part in stored_parts(checkpoint).items()
    }


def stored_parts(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, *, mapped: bool = False, copied: Collection[str] = ()
) -> dict[str, Any]:
    """Open the safetensors files, without mapping them: a slice object by name, which reads the part that is asked for.

    Of a mapped file each page that is read counts as memory of the process, also where only a part of it is kept.
    Quantised weights are decoded as they are read. The headers are read once for a checkpoint.

    Args:
        dtype: of what is decoded; None for that of the format's library.
        mapped: map those that are neither decoded nor converted to `dtype`: they are used as they lie in the file.
        copied: names of those that are not mapped all the same.

    Raises:
        ValueError: a file is missing, damaged or truncated, or a quantised weight lacks a part.
    """
    opened = checkpoint.opened
    if opened is None:
        files = weight_files(checkpoint)
        require_fetched(files, checkpoint.label)
        opened = checkpoint.opened = Opened(files=files, slices=_slices(files, checkpoint, backend="pread"))
    if checkpoint.form is None:
        found = dict(opened.slices)
    else:
        try:
            if opened.weights is None:
                opened.weights = checkpoint.form.found(opened.slices)
            found = checkpoint.form.weights(opened.weights, dtype)
        except ValueError as error:
            raise ValueError(f"{checkpoint.label}: {error}; {checkpoint.remedy}") from error
    if mapped:
        as_stored = [name for name, part in found.items() if part is opened.slices.get(name) and name not in copied]
        views = _slices(opened.files, checkpoint)
        found |= {name: views[name] for name in as_stored if FLOATS.get(found[name].get_dtype()) == dtype}
    return found


def _slices(files: Iterable[Path], checkpoint: Checkpoint, **options: Any) -> dict[str, Any]:
    """Slice objects of safetensors files, by name. Raises: ValueError."""
    parts: dict[str, Any] = {}
    for path in files:
        try:
            file = safe_open(path, framework="pt", **options)
            parts |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{checkpoint.label}: {path.name} is not a complete safetensors file ({one_line(error)}); "
                f"{checkpoint.remedy}"
            ) from error
    return parts


def read_gguf(checkpoint: Checkpoint) -> GGUFHeader:
    """Read the header of the checkpoint's GGUF file, and check that transformers reads such a file correctly.

    Raises:
        ValueError: the file is damaged or truncated, or uses a RoPE scaling.
    """
    assert checkpoint.gguf is not None
    require_fetched([checkpoint.path], checkpoint.label)
    try:
        header = read_header(checkpoint.folder / checkpoint.gguf)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{checkpoint.label} is not a complete GGUF file ({one_line(error)}); {checkpoint.remedy}"
        ) from error
    # transformers reads RoPE scalings from GGUF metadata for one family only, and silently ignores them otherwise: the
    # positions of a long prompt would be wrong.
    family = header.metadata.get("general.architecture")
    scaling = header.metadata.get(f"{family}.rope.scaling.type", "none")
    factors = [name for name in header.tensors if name.startswith(("rope_freqs", "rope_factors"))]
    if family != "gpt-oss" and (factors or scaling != "none"):
        raise ValueError(
            f"{checkpoint.label} uses a RoPE scaling ({factors[0] if factors else scaling}), which transformers does "
            "not read from GGUF files; use the model's safetensors folder"
        )
    return header


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a vocabulary."""
    if checkpoint.gguf is not None:
        return "tokenizer.ggml.tokens" in read_gguf(checkpoint).metadata
    return any(next(checkpoint.folder.glob(name), None) for name in VOCABULARIES)
