"""The disk tier of a store: files that are written by one thread and read by another one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from runahead.cache.quantised.records import whole_groups
from runahead.ranks.worker import SubmittedCall, Worker
from runahead.reuse.tiers.copies import TierCopies
from runahead.reuse.tiers.entry import FileRows
from runahead.reuse.tiers.file_format import (
    FileHead,
    LayerShape,
    StoredLayers,
    checksum,
    read_layers,
    read_metadata,
    write_layers,
)
from runahead.reuse.tiers.folder import StoredFile, TierFolder
from runahead.reuse.tiers.layer_rows import CopiedMemory, LayerRows, LostRows
from runahead.reuse.tiers.writing import FolderWriter

BACKLOG_BYTES = 2**30
"""Most bytes that wait to be written, beside a single file. What comes while there are more has to wait or to go."""


@dataclass(frozen=True, kw_only=True)
class FileAbout:
    """The description of keys and values in a file.

    Attributes:
        name: of the file, 64 hexadecimal digits.
        title: for people.
        metadata: more that it says.
        is_pinned: no process removes it to make room.
    """

    name: str
    title: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    is_pinned: bool = False


class TierFiles:
    """Files in a folder that processes may share.

    Args:
        lost: called, perhaps in another thread, with the names of files that are gone, and with copies that could not
            be made.
        is_right: whether metadata are those of a file of this name.

    Attributes:
        keep: names of files that are removed last.
        num_bytes: of all files, whoever wrote them.
        errors: the first file that could not be written, and the first that could not be used, and why.
        write_error: the first one of writing.
    """

    def __init__(
        self,
        folder: TierFolder,
        lost: Callable[[str | CopiedMemory], object],
        is_right: Callable[[dict[str, str], str], bool],
    ) -> None:
        self._folder, self._lost, self._is_right = folder, lost, is_right
        self._unwritten: dict[str, tuple[SubmittedCall, int]] = {}
        self.keep: frozenset[str] = frozenset()
        self.num_bytes = sum(file.num_bytes for file in folder.files())
        self.errors: dict[str, str] = {}
        self.write_error: OSError | None = None
        self._writer = FolderWriter(folder, lost)

    @property
    def told(self) -> dict[str, str]:
        """Other sentences that are to be told, by kind."""
        return {"full": self._writer.told} if self._writer.told else {}

    @cached_property
    def _writing(self) -> Worker:
        return Worker("keys and values to disk")

    @cached_property
    def _reading(self) -> Worker:
        return Worker("keys and values from disk")

    def all_metadata(self) -> Iterator[tuple[StoredFile, dict[str, str]]]:
        """All files with their metadata. Damaged ones are removed."""
        for file in self._folder.files():
            metadata = read_metadata(self._folder.path(file.key))
            if metadata is None or not self._is_right(metadata, file.key):
                self._remove_damaged(file.key)
                self.num_bytes -= file.num_bytes
            else:
                yield file, metadata

    def has(self, rows: FileRows, copies: TierCopies) -> bool:
        """Whether a file is there or is being written. One that is damaged is removed."""
        if self._is_unwritten(rows.name):
            return True
        if not self._folder.path(rows.name).exists():
            return False
        try:
            self._mapped(rows, copies)
        except LostRows:
            self._lose(rows.name)
            return False
        return True

    def takes(self, num_bytes: int) -> bool:
        """Whether as many bytes fit into the folder."""
        return num_bytes <= self._folder.limit_bytes

    def is_behind(self, num_bytes: int) -> bool:
        """Whether as many bytes would have to wait for too many others."""
        backlog_bytes = sum(size for job, size in self._unwritten.values() if not job.done.is_set())
        return backlog_bytes > 0 and backlog_bytes + num_bytes > BACKLOG_BYTES

    def save(self, about: FileAbout, rows: LayerRows, used_ns: Mapping[str, int]) -> None:
        """Begin to write a file.

        Args:
            rows: in host memory, with those that they are read with.
            used_ns: times of the last use of files, this one among them.
        """
        path = self._folder.path(about.name)

        def write() -> None:
            try:
                self._write(about, rows)
                if about.is_pinned:
                    self._folder.pin(about.name)
                for name, time_ns in used_ns.items():
                    self._folder.touch(name, time_ns)
                for name in self._folder.make_room(keep=self.keep):
                    self._lost(name)
            except LostRows:
                self._lost(about.name)
            except OSError as error:
                self.errors.setdefault("write", f"{error.strerror or error} ({path.parent})")
                self.write_error = self.write_error or error
                self._lost(about.name)
            finally:  # files may have made room in vain
                self.num_bytes = sum(file.num_bytes for file in self._folder.files())

        self._unwritten = {name: each for name, each in self._unwritten.items() if not each[0].done.is_set()}
        self._unwritten[about.name] = self._writing.submit(write), rows.num_bytes

    def _write(self, about: FileAbout, rows: LayerRows) -> None:
        """Write a file that is not there. Raises: LostRows, OSError: it cannot be written."""

        def write(path: Path) -> None:
            layers, mode = list(rows), self._folder.file_mode
            shapes = [LayerShape(shape=tuple(layer.shape), dtype=layer.dtype) for layer in layers]
            head = FileHead(shapes=shapes, key=about.name, name=about.title, more=about.metadata)
            write_layers(path, layers, head=head, mode=mode)

        self._writer.write(about.name, write, rows.num_bytes, keep=self.keep)

    def read(self, rows: FileRows, num_tokens: int, copies: TierCopies) -> LayerRows | None:
        """Begin to read rows of a file into host memory, layer by layer; None if the file is gone or cut off.

        A layer is there once its checksum was compared. A file that is damaged is removed, and reported as lost.
        Without a GPU the memory is the mapped file itself: that of a copy would have to be cleared first, page by page.
        """
        first, stop = rows.first, rows.first + num_tokens
        if copies.is_packed:
            first, stop = whole_groups(first, stop, rows.num_tokens)
        copy, unwritten = copies.stored_memory(stop - first), self._unwritten.get(rows.name)
        mapped: StoredLayers | None = None
        if not self._is_unwritten(rows.name):
            try:
                mapped = self._mapped(rows, copies)
            except LostRows:
                self._lose(rows.name)
                return None

        def run() -> None:
            try:
                if unwritten is not None:
                    unwritten[0].done.wait()
                kv = self._mapped(rows, copies) if mapped is None else mapped
                self._read_ahead(rows.name)
                parts = None if copies.device.type == "cpu" else copy.parts(copies.host_block(copy.block_bytes))
                for number, (layer, expected) in enumerate(zip(kv.layers_TKX, kv.checksums, strict=True)):
                    part = layer[first:stop]
                    if parts is not None:
                        part = parts[number].copy_(part)
                    if checksum(part if len(part) == len(layer) else layer) != expected:
                        raise LostRows("the file is damaged")
                    copy.put(part)
            except LostRows as error:
                self._lose(rows.name)
                self._lost(copy)
                copy.fail(error)  # last, so that whoever reads it finds it dropped
            except Exception as error:  # no memory
                self._lost(copy)
                copy.fail(error)

        self._reading.submit(run)
        return LayerRows(copy, rows.first - first, rows.first - first + num_tokens)

    def _is_unwritten(self, name: str) -> bool:
        return name in self._unwritten and not self._unwritten[name][0].done.is_set()

    def _mapped(self, rows: FileRows, copies: TierCopies) -> StoredLayers:
        """A file's layers, mapped, with their checksums. Raises: LostRows: it is gone or damaged."""
        path = self._folder.path(rows.name)
        kv = read_layers(path, key=rows.name, shapes=copies.stored_shapes, num_tokens=rows.num_tokens)
        if kv is None or not self._is_right(kv.metadata, rows.name):
            raise LostRows("the file is gone or damaged")
        return kv

    def read_ahead(self, names: Sequence[str]) -> None:
        """Let the system begin to read these files, in this order."""
        for name in names:
            self._writing.submit(partial(self._read_ahead, name))  # so that nothing that is read waits for it

    def _read_ahead(self, name: str) -> None:
        """Let the system begin to read all of a file, which is faster than page by page as layers are compared."""
        if sys.platform == "linux":
            with suppress(OSError), self._folder.path(name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def _lose(self, name: str) -> None:
        if self._folder.path(name).exists():
            self._remove_damaged(name)
        self._lost(name)

    def touch(self, used_ns: Mapping[str, int]) -> None:
        """Note the times in ns at which files were used last."""

        def touch() -> None:
            for name, time_ns in used_ns.items():
                self._folder.touch(name, time_ns)

        self._writing.submit(touch)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all that was begun is done."""
        for name in ("_writing", "_reading"):
            if (worker := vars(self).get(name)) is not None:
                worker.submit(lambda: None).done.wait(timeout_s)

    def _remove_damaged(self, name: str) -> None:
        self.errors.setdefault("read", f"{self._folder.path(name)} is damaged, and was removed")
        self._folder.remove(name)
