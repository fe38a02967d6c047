"""A run of tokens of a text as it is in a file, which later processes find by the tokens.

A run is the part of a text from a token on, and its file's name a hash of the whole text up to the run's last token and
of what keys and values depend on beside the tokens. So a file cannot be taken for that of another text or model, and
processes that store the same write the same. States after a text are a run without tokens, of one row.
"""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from runahead.reuse.prefix_node import PrefixNode, moved
from runahead.reuse.tiers.entry import FileRows

SUFFIX = ".prefix.safetensors"
FORMAT = "runahead prefix 1"


@dataclass(frozen=True, kw_only=True)
class PrefixRun:
    """A run of tokens of a text.

    Attributes:
        key: of the text.
        ids: the text up to the run's last token.
        start: index of the run's first token.
        numbers: of those of its tokens whose keys and values the file has, ascending; () if it has all.
        around: rows of its file before and after it, which its first and last rows are read with. They may be of any
            text that goes on after it: nobody but the groups of its own rows needs them.
        is_snapshot: the file has the states after the text.
    """

    key: str
    ids: tuple[int, ...]
    start: int
    numbers: Sequence[int] = ()
    around: tuple[int, int] = (0, 0)
    is_snapshot: bool = False

    @classmethod
    def of(cls, node: PrefixNode, key: str, around: tuple[int, int]) -> PrefixRun:
        """The run of a node, from where that before it ends: tokens between, which other stages have, are in it too."""
        text = node.text
        if node.is_snapshot:
            return cls(key=key, ids=text, start=len(text), is_snapshot=True)
        start = first = len(text) - len(node.ids)
        for each in reversed(node.path[:-1]):
            if each.numbers:
                break
            start -= len(each.ids)
        has_all = node.num_tokens == len(text) - start
        numbers = () if has_all else tuple(moved(node.numbers, first - start))
        return cls(key=key, ids=text, start=start, numbers=numbers, around=around)

    @cached_property
    def name(self) -> str:
        """Name of its file, 64 hexadecimal digits."""
        place = (FORMAT, self.key, self.start, *(self.around if any(self.around) else ()))
        if self.numbers:
            place = (*place, tuple(self.numbers))
        if self.is_snapshot:
            place = (*place, "states")
        return hashlib.sha256(repr(place).encode() + array("q", self.ids).tobytes()).hexdigest()

    @property
    def here(self) -> Sequence[int]:
        """Numbers of those of its tokens whose keys and values are in its file."""
        return self.numbers or range(1 if self.is_snapshot else len(self.ids) - self.start)

    def rows(self, first: int) -> FileRows:
        """The rows of its tokens from this number on, in its file."""
        before, after = self.around
        num_tokens, num_before = before + len(self.here) + after, bisect_left(self.here, first)
        return FileRows(name=self.name, num_tokens=num_tokens, first=before + num_before)

    @property
    def metadata(self) -> dict[str, str]:
        ids = base64.b64encode(array("q", self.ids).tobytes()).decode()
        about = {"format": FORMAT, "key": self.key, "start": self.start, "ids": ids}
        if any(self.around):
            about["around"] = self.around
        if self.numbers:
            about["numbers"] = list(self.numbers)
        if self.is_snapshot:
            about["states"] = True
        return {"prefix": json.dumps(about)}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str], name: str) -> PrefixRun | None:
        """The run of a file of this name; None if its metadata were changed."""
        try:
            about = json.loads(metadata["prefix"])
            ids = array("q", base64.b64decode(about["ids"], validate=True))
            before, after = about.get("around", (0, 0))
            around = int(before), int(after)
            numbers = tuple(map(int, about.get("numbers", ())))
            run = cls(
                key=str(about["key"]),
                ids=tuple(ids),
                start=int(about["start"]),
                numbers=numbers,
                around=around,
                is_snapshot=about.get("states") is True,
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        has_place = run.start == len(run.ids) > 0 if run.is_snapshot else 0 <= run.start < len(run.ids)
        return run if run.name == name and has_place and min(around) >= 0 else None
