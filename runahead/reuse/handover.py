"""Prompts that are handed over to other engines: one file of keys and values for each, in a folder that both sides see.

A file is written while the prompt is computed, each layer as soon as it is complete. It has its name once all layers
are there and the prompt is known to be computed to its end.
"""

# Legend: T tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from runahead.cache.host.copy_stream import copies_for
from runahead.cache.host.memory import host_empty
from runahead.failures import first_line
from runahead.ranks.accelerator import Event
from runahead.reuse.tiers.file_format import FileHead, LayerShape, read_metadata, write_layers
from runahead.reuse.tiers.folder import TierFolder
from runahead.reuse.tiers.layer_rows import Layers, LostRows
from runahead.reuse.tiers.writing import FolderWriter

BACKLOG_BYTES = 2**30
"""Most bytes of computed prompts that wait to be written, beside a single one."""

LATE_S = 10.0
"""Seconds for which prompts wait until there are fewer. After that they are computed, but not handed over."""

TITLE = "handover"
"""Name of these files for people."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of handing a prompt over.

    Attributes:
        num_bytes: of its file.
        is_new: the file was not there before.
        error: why there is no file; "" if there is.
    """

    num_bytes: int = 0
    is_new: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class HandoverPlace:
    """The place where prompts are handed over.

    Attributes:
        path: of the folder.
        host: name of its host.
        limit_bytes: most bytes of all files.
    """

    path: str
    host: str
    limit_bytes: int


def file_name(key: str, salt: str, ids: Sequence[int]) -> str:
    """Name of the file of a prompt, 64 hexadecimal digits: no text is on disk in clear.

    Args:
        key: of the model, as `model_key` gives it.
        salt: of those who share prompts.
    """
    about = f"runahead handover 1\0{key}\0{salt}\0".encode()
    return hashlib.sha256(about + torch.tensor(ids).numpy().astype("<i8").tobytes()).hexdigest()


class HandoverFolder:
    """The files of prompts in a folder of this host. Those that were not used for longest make room for others.

    Args:
        folder: created if it is missing; for this user alone.
        limit_bytes: most bytes of all files.
        key: of the model.

    Raises:
        ValueError: the folder cannot be created or written to, or others may read it.

    Attributes:
        place: of the folder, on this host.
    """

    def __init__(self, folder: str, limit_bytes: int, key: str) -> None:
        self.key = key
        self._folder = TierFolder(folder, limit_bytes, option="serve.handover", is_private=True)
        self.place = HandoverPlace(path=os.path.abspath(folder), host=socket.gethostname(), limit_bytes=limit_bytes)
        self._writer = FolderWriter(self._folder, lambda name: None)
        self._folder.make_room()
        self._late_bytes, self._is_told = 0, False
        self._coming = dict[str, int]()  # bytes of files under way, which have no name yet
        self._changed = threading.Condition()

    def found(self, name: str) -> int | None:
        """Bytes of the file of this name, which counts as used now; None if it is not there, or damaged."""
        path = self._folder.path(name)
        about = read_metadata(path)
        if about is None or about.get("key") != name:
            return None
        try:
            num_bytes = path.stat().st_size
        except OSError:
            return None
        self._folder.touch(name)
        return num_bytes

    def begin(
        self,
        name: str,
        num_tokens: int,
        device: torch.device,
        on_end: Callable[[Outcome], object],
        *,
        until_s: float = 0.0,
    ) -> Handover:
        """Begin to hand a prompt over, once what was computed before is written but for a few.

        Args:
            device: that computes it.
            on_end: called once, in any thread, with what has become of it.
            until_s: `time.monotonic` until which it may wait for that.
        """
        with self._changed:
            wait_s = max(0.0, until_s - time.monotonic())
            is_late = not self._changed.wait_for(lambda: self._late_bytes <= BACKLOG_BYTES, wait_s)
        handover = Handover(self, name, num_tokens, device, on_end)
        if is_late:
            handover.end(f"{self.place.path} takes bytes too slowly: more than {BACKLOG_BYTES:,} wait for it")
        return handover

    def note_late(self, num_bytes: int) -> None:
        """Note that so many more bytes of computed prompts wait to be written."""
        with self._changed:
            self._late_bytes += num_bytes
            self._changed.notify_all()

    def write(self, handover: Handover, shapes: Sequence[LayerShape], approve: Callable[[], None]) -> Outcome:
        """Write a file as its layers come, after others have made room for it. It waits for files under way beside
        which it has none.

        Args:
            approve: as of `write_layers`.
        """
        more = {
            "first": json.dumps([handover.num_tokens - each.shape[0] for each in shapes]),
            "tokens": str(handover.num_tokens),
            "model": self.key,
        }
        name, limit_bytes = handover.name, self.place.limit_bytes
        head = FileHead(shapes=shapes, key=name, name=TITLE, more=more)
        if (num_bytes := head.num_bytes) > limit_bytes:
            return Outcome(error=f"its file has {num_bytes:,} bytes, and serve.handover_bytes={limit_bytes}")

        def has_room() -> bool:
            return name not in self._coming and sum(self._coming.values()) + num_bytes <= limit_bytes

        with self._changed:
            self._changed.wait_for(lambda: handover.is_given_up or has_room())
            if handover.is_given_up:
                return Outcome(error=handover.error)
            self._coming[name] = num_bytes
        try:
            return self._write(handover, head, approve)
        finally:
            with self._changed:
                del self._coming[name]
                self._changed.notify_all()

    def _write(self, handover: Handover, head: FileHead, approve: Callable[[], None]) -> Outcome:
        name, mode = handover.name, self._folder.file_mode
        write = partial(write_layers, layers_TKX=handover, head=head, mode=mode, approve=approve)
        if self.found(name) is None:  # also a damaged one, which nobody would ever write anew
            self._folder.path(name).unlink(missing_ok=True)
        try:
            os.stat(self.place.path)  # a lock would make a folder that is gone anew, and for everybody
            self._folder.make_room(coming=dict(self._coming))
            is_new = self._writer.write(name, write, head.num_bytes)
            self._folder.touch(name)
            num_written = self._folder.path(name).stat().st_size
        except LostRows as error:
            return Outcome(error=str(error))
        except OSError as error:
            return Outcome(error=f"{error.strerror or error} ({self.place.path})")
        if self._writer.told and not self._is_told:
            self._is_told = True
            warnings.warn(self._writer.told, stacklevel=2)
        return Outcome(num_bytes=num_written, is_new=is_new)


class Handover(Layers):
    """Keys and values of one prompt on their way to a file: layers are put in by the thread that computes, in order.

    Args:
        folder: that the file will be in.
        name: of the file.
        num_tokens: of the prompt.
        device, on_end: as of `HandoverFolder.begin`.
    """

    def __init__(
        self,
        folder: HandoverFolder,
        name: str,
        num_tokens: int,
        device: torch.device,
        on_end: Callable[[Outcome], object],
    ) -> None:
        self._folder, self.name, self.num_tokens, self._on_end = folder, name, num_tokens, on_end
        self._device, self._stream = device, copies_for(device)
        self._shapes: Sequence[LayerShape] | None = None
        self._layers: list[tuple[list[Tensor], Event | None]] = []
        self._error: str | None = None  # "": it is computed to its end
        self._changed = threading.Condition()

    def begin(self, shapes: Sequence[LayerShape]) -> None:
        """Say how large the layers are, each (T, K, H + V): those of a window may lack the prompt's first tokens."""
        with self._changed:
            if self._error is not None:
                return
            self._shapes = shapes
        threading.Thread(target=self._run, name="prompt to a file", daemon=True).start()

    def put(self, parts_TKX: Sequence[Tensor]) -> None:
        """The next layer is complete, in parts that follow each other. They must not change any more."""
        parts, mark = list(parts_TKX), None
        if self._error is not None:  # nobody reads it
            return
        if self._stream is not None:
            try:
                with self._stream.copying(*parts):
                    parts = [self._on_host(part) for part in parts]
                mark = self._stream.mark()
            except ValueError as error:  # no page-locked memory: this prompt alone is not handed over
                self.end(str(error))
                return
        with self._changed:
            self._layers.append((parts, mark))
            self._changed.notify_all()

    def _on_host(self, part_TKX: Tensor) -> Tensor:
        """A copy in host memory, which is there with the next mark of the stream."""
        block = host_empty((part_TKX.nbytes,), torch.uint8, self._device)
        return block.view(part_TKX.dtype).view(part_TKX.shape).copy_(part_TKX, non_blocking=True)

    def end(self, error: str = "") -> None:
        """Let the file have its name once all layers are written, or leave it away. Later calls change nothing.

        Args:
            error: why the prompt is not handed over; "": it is computed to its end.
        """
        with self._changed:
            if self._error is not None:
                return
            is_short = self._shapes is not None and len(self._layers) < len(self._shapes)
            self._error = error or ("not all layers were computed here" if is_short else "")
            if self._shapes is not None:
                self._folder.note_late(0 if self._error else self._num_bytes)
            self._changed.notify_all()
        if self._shapes is None:
            self._on_end(Outcome(error=error or "it was not computed here"))

    @property
    def is_given_up(self) -> bool:
        """Whether it is not handed over."""
        return bool(self._error)

    @property
    def error(self) -> str:
        """Why it is not handed over; "" if it is, or so far."""
        return self._error or ""

    @property
    def _num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._shapes or ())

    def __len__(self) -> int:
        return len(self._shapes or ())

    def layer(self, number: int) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: number < len(self._layers) or self._error)
            if self._error:
                raise LostRows(self._error)
            parts, mark = self._layers[number]
        if mark is not None:
            mark.synchronize()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _approve(self) -> None:
        """Wait until the prompt is computed to its end. Raises: LostRows: it is not."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None)
            if self._error:
                raise LostRows(self._error)

    def _run(self) -> None:
        assert self._shapes is not None
        outcome = Outcome(error="the file could not be written")
        try:
            with torch.inference_mode():
                outcome = self._folder.write(self, self._shapes, self._approve)
        except Exception as error:
            outcome = Outcome(error=f"{type(error).__name__}: {first_line(error)}")
        finally:
            with self._changed:
                was_late, self._error = self._error == "", "it is written" if self._error is None else self._error
                self._layers = []
            if was_late:
                self._folder.note_late(-self._num_bytes)
            self._on_end(outcome)
