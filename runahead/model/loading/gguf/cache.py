"""GGUF files as safetensors folders in the cache folder: converted once, then mapped or read in parts.

transformers takes long to read the tokens and unpack the blocks of a large file, in every process. A conversion holds
the weights in the dtype they are used in, so that they can be mapped: 4 bytes a weight on a CPU, for quantised files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from runahead.files import cache_folder, write_whole
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import hf, stored_forms
from runahead.model.loading.cache_folder import bytes_in, obtain, progress_bar, require_room_for
from runahead.model.loading.checkpoint import FLOATS, WEIGHTS, Checkpoint
from runahead.model.loading.memory import give_back
from runahead.model.loading.quiet import one_line, quiet

VERSION = 1
"""Raised when conversions made before must not be used any more."""

SAMPLES, SAMPLE_BYTES = 256, 4096
"""Number and size of the blocks, spread evenly over a file, that its key covers."""

ABOUT = "converted.json"
"""File in a conversion that names its source."""

CODES = {dtype: code for code, dtype in FLOATS.items()} | {torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}
"""Names of dtypes in safetensors files."""

MOST_WRITTEN = 2**30
"""Bytes that are written at a time."""

SMALL_BYTES = 2**26
"""Room for config and tokenizer."""

SNAPSHOT = re.compile(r"/snapshots/[0-9a-f]{40}(?=/|$)")
"""A revision in the hub's cache."""


def known(source: Checkpoint) -> Checkpoint | None:
    """A conversion of the checkpoint's GGUF file, in whatever dtype, for its config and tokenizer; None without one."""
    key = _key(source)
    folders = [_folder(key, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    return next((_checkpoint(source, folder) for folder in folders if folder.is_dir()), None)


def readable(
    make: hf.ModelMaker, empty: PreTrainedModel, small: Checkpoint, *, merges: bool, in_shares: bool, progress: bool
) -> hf.ModelMaker:
    """`make` with the conversion of its GGUF file; with the file itself, which is unpacked, if none can be kept.

    Args:
        empty: the model without memory.
        small: the checkpoint of which config and tokenizer are read.
        merges: adapters change weights, so they are kept in float32: what is added is rounded once.
        in_shares: ranks load shares of the model, which no file can be unpacked for.
        progress: show a progress bar.

    Raises:
        OSError: no conversion can be kept, and the file itself does not do.
        ValueError: the file cannot be converted, or the model has no place for some of it.
    """
    source, options = make.checkpoint, make.options
    stored_forms.require_taken_of_gguf(empty, checkpoints.read_gguf(source), source)
    stored = make
    try:
        if options.overrides:  # later runs use the conversion with others
            options = replace(options, overrides={})
            stored = replace(make, config=hf.read_config(small, options), options=options)
        if merges:
            stored = replace(stored, dtype=torch.float32)
            empty = hf.empty_model(make.config, torch.float32, make.options, label=source.label)
        return replace(make, checkpoint=converted(stored, empty, progress=progress))
    except OSError as error:
        if in_shares:
            raise
        if merges and make.dtype is not torch.float32:
            raise OSError(
                f"{error}; what adapters add to a GGUF file is rounded once, so it is kept in float32, 4 bytes a "
                "weight; merge them into a checkpoint of 16 bits, or use model.dtype=float32"
            ) from error
        warnings.warn(f"{error}; until then every process unpacks the file at every start", stacklevel=2)
        return make


def forms(source: Checkpoint) -> str:
    """The types of quantised weights in a GGUF file; "" for plain ones."""
    found = sorted(set(checkpoints.read_gguf(source).tensors.values()) - {"F64", "F32", "F16", "BF16"})
    return f"gguf, {' and '.join(found)}" if found else ""


def converted(make: hf.ModelMaker, empty: PreTrainedModel, *, progress: bool) -> Checkpoint:
    """The conversion of a GGUF file in the dtype of `make`, made now if there is none.

    One of several processes makes it, and the others wait. It takes the memory of one tensor at a time, and the page
    cache. Conversions of the same path, or of another revision of the hub's, whose file has changed are removed.

    Args:
        make: the GGUF checkpoint, its config and the dtype.
        empty: the model without memory.
        progress: show a progress bar.

    Raises:
        OSError: the cache folder cannot be written, or has no room; the message says how much is needed.
        ValueError: the file cannot be converted.
    """
    source = make.checkpoint
    num_bytes = sum(tensor.nbytes for tensor in _stored(empty).values())
    label = f"{source.label} as safetensors"

    def write(work: Path) -> Path:
        require_room_for(work, num_bytes + SMALL_BYTES, label=label)
        folder = _convert(replace(make, device=torch.device("cpu")), empty, work / "model")
        remove_outdated("gguf", place_of(source.path), _key(source))
        return folder

    def bar(work: Path) -> AbstractContextManager[None]:
        return progress_bar(num_bytes, lambda: (f"Converting {source.gguf}", bytes_in(work)))

    shown: Callable[[Path], AbstractContextManager[None]] = bar if progress else lambda work: nullcontext()
    return _checkpoint(source, obtain(_folder(_key(source), make.dtype), write, label=label, progress=shown))


def _checkpoint(source: Checkpoint, folder: Path) -> Checkpoint:
    return replace(source, folder=folder, gguf=None, opened=None, remedy=f"delete {folder}, and it is made again")


def _folder(key: str, dtype: torch.dtype) -> Path:
    return cache_folder() / "gguf" / f"{key}-{str(dtype).removeprefix('torch.')}"


def _key(source: Checkpoint) -> str:
    """Key of a file: its size, time of change and part of its content, and the versions that it is read with."""
    assert source.gguf is not None
    path = source.folder / source.gguf
    about = path.stat()
    digest = hashlib.sha256(f"{VERSION} {transformers.__version__} {about.st_size} {about.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for place in range(SAMPLES):
            file.seek(place * max(0, about.st_size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:24]


def remove_outdated(kind: str, path: str, key: str) -> None:
    """Remove conversions of other content of the same path. A process that has mapped one keeps it.

    Args:
        kind: of conversions, which is their folder in the cache folder.
        key: of the present content, with which the names of its conversions begin.
    """
    for about in (cache_folder() / kind).glob(f"*/{ABOUT}"):
        try:
            made_of = json.loads(about.read_text())
        except (OSError, ValueError):
            continue
        if made_of == {"path": path} and not about.parent.name.startswith(f"{key}-"):
            shutil.rmtree(about.parent, ignore_errors=True)


def place_of(path: Path) -> str:
    """Where a checkpoint lies, of the hub's cache without the revision: each of these has a folder of its own there."""
    absolute = os.path.abspath(path)
    place = SNAPSHOT.sub("", absolute)
    return os.path.realpath(absolute) if place == absolute else place


def _stored(module: PreTrainedModel) -> dict[str, Tensor]:
    """Weights and persistent buffers by name; tied ones once."""
    tied = getattr(module, "all_tied_weights_keys", {})
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def _convert(make: hf.ModelMaker, empty: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir()
    spill = Spill(folder / WEIGHTS, _stored(empty))
    try:
        module = hf.build(make, bars=False, model_class=spill.model_class(type(empty)))
        spill.finish(module)
        tokenizer = hf.read_tokenizer(make.checkpoint, make.options)
        with quiet():
            make.config.save_pretrained(folder)
            module.generation_config.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        write_whole(folder / ABOUT, json.dumps({"path": place_of(make.checkpoint.path)}))
    except Exception as error:  # transformers may raise anything for settings that it does not expect
        if (unwritten := spill.error or _system_error(error)) is not None:
            raise OSError(unwritten.errno, unwritten.strerror) from error
        if isinstance(error, (OSError, ValueError)):
            raise
        raise ValueError(
            f"{make.checkpoint.label} cannot be converted: {one_line(error)}; use the model's safetensors folder"
        ) from error
    finally:
        del spill
        give_back()
    return folder


def _system_error(error: Exception) -> OSError | None:
    """The error of the operating system that a library in Rust names in its message, such as a full disk."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


class Spill:
    """A safetensors file that a model's weights are moved to while transformers loads them, one by one.

    Args:
        path: the file; it is made.
        tensors: what it will hold, by name, without memory.

    Attributes:
        error: why a weight could not be written; transformers may raise another error then, or none.
    """

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            offsets = [end, end + tensor.nbytes]
            header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            end += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64)  # aligns the data
        start = 8 + len(text)
        self.error: OSError | None = None
        self._file = path.open("x+b")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(start + end)
        self._file.flush()
        whole = torch.from_file(str(path), shared=True, size=start + end, dtype=torch.uint8)
        self._places: dict[str, tuple[int, Tensor]] = {}
        for name, tensor in tensors.items():
            begin, end = (start + offset for offset in header[name]["data_offsets"])
            self._places[name] = begin, whole[begin:end].view(tensor.dtype).view(tensor.shape)

    def model_class(self, own: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """A model class whose weights move to the file as they are loaded."""

        def load(model: PreTrainedModel, *args: Any, **keywords: Any) -> Any:
            names = {id(module): name for name, module in model.named_modules()}

            def move(module: nn.Module, last: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
                name = ".".join(filter(None, (names.get(id(module)), last)))
                if parameter is None or parameter.is_meta or name not in self._places:
                    return None
                moved = self.write(name, parameter.detach())
                if moved is None:
                    return None
                moved_parameter = nn.Parameter(moved, requires_grad=False)
                moved_parameter.__dict__.update(parameter.__dict__)
                return moved_parameter

            hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
            try:
                return own._load_pretrained_model(model, *args, **keywords)
            finally:
                hook.remove()

        contents = {"__module__": own.__module__, "_load_pretrained_model": staticmethod(load)}
        return type(own.__name__, (own,), contents)

    def finish(self, module: PreTrainedModel) -> None:
        """Write what is not in the file yet."""
        tensors = module.state_dict()
        for name, (_, place) in self._places.items():
            if tensors[name].data_ptr() != place.data_ptr():
                self.write(name, tensors[name].detach())
        self.close()

    def close(self) -> None:
        """End the file, of which everything is written."""
        self._file.close()

    def write(self, name: str, tensor: Tensor) -> Tensor | None:
        """Write a tensor, and return its mapped copy; None if it is another one than expected.

        It is not copied to the mapped memory, where a full disk would end the process.
        """
        offset, place = self._places[name]
        if place.shape != tensor.shape:
            return None
        data = memoryview(tensor.to(place.dtype).contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        while data:
            try:
                written = os.pwrite(self._file.fileno(), data[:MOST_WRITTEN], offset)
            except OSError as error:
                self.error = error
                raise
            data, offset = data[written:], offset + written
        return place
