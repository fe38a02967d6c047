"""The behaviour that a store of a job shares with torch's own stores."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist


def require_like_torchs(given: dist.Store) -> None:
    """Use a store as torch's own code does, also through the prefixes that it puts before keys, in C++."""
    store = dist.PrefixStore("inner", dist.PrefixStore("outer", given))
    assert not store.check(["a"])
    store.set("a", "1/é \0")
    assert store.get("a") == "1/é \0".encode() and store.check(["a"]) and not store.check(["a", "b"])
    store.set("a", "")
    assert store.get("a") == b""
    assert [store.compare_set("b", "", value) for value in ("first", "second")] == [b"first", b"first"]
    assert [store.add("n", number) for number in (1, 0, 41, -2)] == [1, 1, 42, 40]
    store.wait(["a", "b"], timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        store.wait(["c"], timedelta(milliseconds=50))
    clone = store.clone()
    clone.set("c", "3")
    assert store.get("c") == b"3"
