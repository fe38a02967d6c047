"""Files of prefixes: keys and values of runs of tokens, which later processes find by the tokens.

A run is the part of a text from a token on, and its file's name a hash of the whole text up to the run's last token and
of what keys and values depend on beside the tokens. So a file cannot be taken for that of another text or model, and
processes that store the same write the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from runahead.cache.quantised.records import whole_groups
from runahead.ranks.worker import Job, Worker
from runahead.reuse.folder import SegmentFolder, StoredFile
from runahead.reuse.segment import SegmentKV, checksum, read_metadata, read_segment, write_segment
from runahead.reuse.tree.layer_rows import CopiedMemory, LayerRows, LostRows
from runahead.reuse.tree.tiers import TierCopies

SUFFIX = ".prefix.safetensors"
FORMAT = "runahead prefix 1"
BACKLOG_BYTES = 2**30
"""Most bytes that wait to be written, beside a single run. What comes while there are more is not kept on disk."""


@dataclass(frozen=True, kw_only=True)
class PrefixRun:
    """A run of tokens of a text.

    Attributes:
        key: of the text.
        ids: the text up to the run's last token.
        start: index of the run's first token.
        around: rows of its file before and after it, which its first and last rows are read with. They may be of any
            text that goes on after it: nobody but the groups of its own rows needs them.
    """

    key: str
    ids: tuple[int, ...]
    start: int
    around: tuple[int, int] = (0, 0)

    @cached_property
    def name(self) -> str:
        """Name of its file, 64 hexadecimal digits."""
        place = (FORMAT, self.key, self.start, *(self.around if any(self.around) else ()))
        return hashlib.sha256(repr(place).encode() + array("q", self.ids).tobytes()).hexdigest()

    @property
    def num_tokens(self) -> int:
        return len(self.ids) - self.start

    @property
    def rows(self) -> FileRows:
        """Its rows in its file."""
        before, after = self.around
        return FileRows(name=self.name, num_tokens=before + self.num_tokens + after, first=before)

    @property
    def metadata(self) -> dict[str, str]:
        ids = base64.b64encode(array("q", self.ids).tobytes()).decode()
        about = {"format": FORMAT, "key": self.key, "start": self.start, "ids": ids}
        if any(self.around):
            about["around"] = self.around
        return {"prefix": json.dumps(about)}

    @classmethod
    def of(cls, metadata: dict[str, str], name: str) -> PrefixRun | None:
        """The run of a file of this name; None if its metadata were changed."""
        try:
            about = json.loads(metadata["prefix"])
            ids = array("q", base64.b64decode(about["ids"], validate=True))
            before, after = about.get("around", (0, 0))
            around = int(before), int(after)
            run = cls(key=str(about["key"]), ids=tuple(ids), start=int(about["start"]), around=around)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        return run if run.name == name and 0 <= run.start < len(run.ids) and min(around) >= 0 else None


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """Rows of a file from `first` on, of which it has `num_tokens`."""

    name: str
    num_tokens: int
    first: int = 0


class PrefixFiles:
    """The disk tier of a prefix tree. Files are written by one thread and read by another one.

    Args:
        folder: which processes may share.
        limit_bytes: most bytes of all prefixes in it.
        lost: gets the names of files that are gone, and copies that could not be made.

    Raises:
        ValueError: the folder cannot be created or written to.

    Attributes:
        keep: names of files that are removed last.
        errors: the first file that could not be written, and the first that could not be used, and why.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: float,
        lost: queue.SimpleQueue[str | CopiedMemory],
        *,
        option: str,
    ) -> None:
        self._folder = SegmentFolder(folder, limit_bytes, option=option, suffix=SUFFIX, is_private=True)
        self.limit_bytes, self._lost = limit_bytes, lost
        self._writing, self._reading = Worker("prefixes to disk"), Worker("prefixes from disk")
        self._unwritten: dict[str, tuple[Job, int]] = {}
        self.keep: frozenset[str] = frozenset()
        self.num_bytes = sum(file.num_bytes for file in self._folder.files())
        self.errors: dict[str, str] = {}

    def runs(self, key: str) -> tuple[dict[PrefixRun, int], int]:
        """The runs of texts of a key that have files, with the time of their last use in ns. Damaged files are removed.

        Returns:
            these runs, and the number of files of other keys.
        """
        runs, num_others = dict[PrefixRun, int](), 0
        for file in self._folder.files():
            run = _run_of(self._folder.path(file.key), file.key)
            if run is None:
                self._refuse(file)
            elif run.key == key:
                runs[run] = file.used_ns
            else:
                num_others += 1
        return runs, num_others

    def takes(self, num_bytes: int) -> bool:
        """Whether as many bytes may be written: they fit, and the disk is not far behind."""
        is_behind = self._backlog_bytes and self._backlog_bytes + num_bytes > BACKLOG_BYTES
        return num_bytes <= self.limit_bytes and not is_behind

    def save(self, run: PrefixRun, rows: LayerRows, used_ns: Mapping[str, int]) -> None:
        """Begin to write a run's file.

        Args:
            rows: in host memory, with those that they are read with.
            used_ns: times of the last use of the text's files up to this one.
        """
        path = self._folder.path(run.name)

        def write() -> None:
            try:
                if not path.exists():
                    kv = SegmentKV(layers_TKX=list(rows))
                    write_segment(path, kv, key=run.name, name="prefix", more=run.metadata)
                for name, time_ns in used_ns.items():
                    self._folder.touch(name, time_ns)
                self._make_room()
            except LostRows:
                self._lost.put(run.name)
            except OSError as error:
                self.errors.setdefault("write", f"{error.strerror or error} ({path.parent})")
                self._lost.put(run.name)

        self._unwritten = {name: each for name, each in self._unwritten.items() if not each[0].done.is_set()}
        self._unwritten[run.name] = self._writing.submit(write), rows.num_bytes

    def read(self, rows: FileRows, num_tokens: int, copies: TierCopies) -> LayerRows | None:
        """Begin to read rows of a file into host memory, layer by layer; None if the file is gone or cut off.

        A layer is there once its checksum was compared. A file that is damaged is removed, and reported as lost.
        Without a GPU the memory is the mapped file itself: that of a copy would have to be cleared first, page by page.
        """
        first, stop = rows.first, rows.first + num_tokens
        if copies.is_packed:
            first, stop = whole_groups(first, stop, rows.num_tokens)
        copy, unwritten = copies.stored_memory(stop - first), self._unwritten.get(rows.name)
        mapped: SegmentKV | None = None
        if unwritten is None or unwritten[0].done.is_set():
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
                assert kv.checksums is not None
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
                self._lost.put(copy)
                copy.fail(error)  # last, so that whoever reads it finds it dropped
            except Exception as error:  # no memory
                self._lost.put(copy)
                copy.fail(error)

        self._reading.submit(run)
        return LayerRows(copy, rows.first - first, rows.first - first + num_tokens)

    def _mapped(self, rows: FileRows, copies: TierCopies) -> SegmentKV:
        """A file's layers, mapped, with their checksums. Raises: LostRows: it is gone or damaged."""
        path = self._folder.path(rows.name)
        kv = read_segment(path, key=rows.name, shapes=copies.stored_shapes, num_tokens=rows.num_tokens)
        if kv is None or kv.checksums is None or _run_of(path, rows.name) is None:
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
        self._lost.put(name)

    @property
    def _backlog_bytes(self) -> int:
        return sum(num_bytes for job, num_bytes in self._unwritten.values() if not job.done.is_set())

    def touch(self, used_ns: Mapping[str, int]) -> None:
        """Note the times in ns at which files were used last."""

        def touch() -> None:
            for name, time_ns in used_ns.items():
                self._folder.touch(name, time_ns)

        self._writing.submit(touch)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was begun is done. Returns whether it is."""
        jobs = [worker.submit(lambda: None) for worker in (self._writing, self._reading)]
        return all(job.done.wait(timeout_s) for job in jobs)

    def _make_room(self) -> None:
        for name in self._folder.make_room(keep=self.keep):
            self._lost.put(name)
        self.num_bytes = sum(file.num_bytes for file in self._folder.files())

    def _refuse(self, file: StoredFile) -> None:
        self._remove_damaged(file.key)
        self.num_bytes -= file.num_bytes

    def _remove_damaged(self, name: str) -> None:
        self.errors.setdefault("read", f"{self._folder.path(name)} is damaged, and was removed")
        self._folder.remove(name)


def _run_of(path: Path, name: str) -> PrefixRun | None:
    """The run that a file of this name has; None if it is missing or damaged."""
    metadata = read_metadata(path)
    return None if metadata is None else PrefixRun.of(metadata, name)
