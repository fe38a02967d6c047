"""The counts of tests/structure.py, over a source of a few lines."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.structure import Source, checks_of_stores, drivers, not_implemented, refusals

TEXT = """
class KVStore(ABC):
    @abstractmethod
    def open(self): ...
    def split(self):
        raise NotImplementedError
class Slab(KVStore): ...
class Row(Slab): ...
class Alike:
    def open(self): ...
    def split(self): ...
class Other:
    def open(self): ...
class Causal(LayerAttention[int]): ...
class Narrowing(attention.Causal): ...
class Hook:
    def save(self, call): ...
    def attended(self, call): ...

def decode(rows):
    if isinstance(rows, (Slab, list)) or isinstance(rows, list):
        names.add(1)
    self._rows[row].add(token)
    raise ValueError(f"cache.bits={bits} does not go with decode=sharded; use decode=last")

def other(names):
    names.add(1)
    raise ValueError(f"cache.bits={bits} must be 4 or 2")
"""


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "runahead").mkdir()
    (tmp_path / "runahead" / "all.py").write_text(TEXT)
    source = Source.read(tmp_path, "runahead")
    assert source.stores() == ["Slab", "Row", "Alike"]
    assert (source.attention(), source.hooks()) == (["Causal", "Narrowing"], ["Hook"])
    for count in (checks_of_stores, not_implemented, drivers, refusals):
        assert len(count(source)) == 1, count
    assert isinstance(source.modules["runahead/all.py"], ast.Module)
