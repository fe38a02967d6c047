"""Dequantised checkpoints as safetensors folders in the cache folder (`model.keep_dequantized`), mapped later on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runahead.files import cache_folder, write_whole
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading.cache_folder import bytes_in, obtain, progress_bar, require_room_for
from runahead.model.loading.checkpoint import WEIGHTS, Checkpoint
from runahead.model.loading.gguf.cache import ABOUT, CODES, SMALL_BYTES, Spill, place_of, remove_outdated
from runahead.model.loading.memory import give_back
from runahead.model.loading.stored_forms import CONFIG_KEYS

VERSION = 1
"""Raised when folders made before must not be used any more."""

FOLDER = "dequantized"
"""Their folder in the cache folder."""

DTYPES = {code: dtype for dtype, code in CODES.items()}


def kept(source: Checkpoint, dtype: torch.dtype, *, progress: bool) -> Checkpoint:
    """The plain checkpoint of a quantised one, with weights in `dtype`, made now if there is none.

    One of several processes makes it, and the others wait. It takes the memory of one tensor at a time, and the page
    cache. Those of the same folder, or of another revision of the hub's, whose files have changed are removed.

    Args:
        progress: show a progress bar.

    Raises:
        OSError: the cache folder cannot be written, or has no room; the message says how much is needed.
        ValueError: a weight cannot be read.
    """
    parts = checkpoints.stored_parts(source, dtype)
    empty = {name: _empty(name, part, source) for name, part in parts.items()}
    num_bytes = sum(each.nbytes for each in empty.values())
    label, key, path = f"{source.label} as safetensors", _key(source), place_of(source.folder)

    def write(work: Path) -> Path:
        require_room_for(work, num_bytes + SMALL_BYTES, label=label)
        folder = work / "model"
        folder.mkdir()
        spill = Spill(folder / WEIGHTS, empty)
        for name, part in parts.items():
            spill.write(name, part[...])
        spill.close()
        config = checkpoints.read_config(source)
        plain = {name: value for name, value in config.items() if name not in CONFIG_KEYS}
        write_whole(folder / "config.json", json.dumps(plain))
        for small in [source.folder / "generation_config.json", *source.folder.glob("*.py")]:
            if small.is_file():
                shutil.copyfile(small, folder / small.name)
        write_whole(folder / ABOUT, json.dumps({"path": path}))
        remove_outdated(FOLDER, path, key)
        give_back()
        return folder

    def bar(work: Path) -> AbstractContextManager[None]:
        return progress_bar(num_bytes, lambda: (f"Dequantising {source.name}", bytes_in(work)))

    shown: Callable[[Path], AbstractContextManager[None]] = bar if progress else lambda work: nullcontext()
    place = cache_folder() / FOLDER / f"{key}-{str(dtype).removeprefix('torch.')}"
    folder = obtain(place, write, label=label, progress=shown)
    return replace(source, folder=folder, form=None, opened=None, remedy=f"delete {folder}, and it is made again")


def _empty(name: str, part: Any, source: Checkpoint) -> torch.Tensor:
    code = part.get_dtype()
    if code not in DTYPES:
        raise ValueError(f"{source.label}: {name} is stored as {code}, which cannot be kept; {source.remedy}")
    return torch.empty(part.get_shape(), dtype=DTYPES[code], device="meta")


def _key(source: Checkpoint) -> str:
    """Key of a folder's files: names, sizes and times of change; of how they are read, and which are left out."""
    form = source.form
    assert form is not None
    settings = json.dumps(form.settings, sort_keys=True)  # which may be in any of several files
    digest = hashlib.sha256(f"{VERSION} {form.name} {settings} {sorted(form.left_out)}".encode())
    for path in sorted([source.folder / "config.json", *checkpoints.weight_files(source)]):
        about = path.stat()
        digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]
