"""Ranks that were given different work are told apart, by name and value."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.harness import machine
from launch.inputs.options import RunOptions
from runahead.config import GenerationOptions, ModelOptions
from runahead.ranks import agreement
from runahead.ranks.agreement import code_files, disagreement, fact, library_facts, option_facts, secret
from runahead.ranks.meeting.presence import Presence
from runahead.ranks.meeting.rendezvous import environment_store, meet
from runahead.ranks.ranks import SharedError


def test_ranks_that_agree_are_not_spoken_of() -> None:
    assert disagreement([{"torch": "2.13", "the prompts": secret([[1]])}] * 3) is None


def test_who_differs_and_in_what_is_named() -> None:
    facts = [{"torch": "2.13", "numpy": "2"}, {"torch": "2.13", "numpy": "2"}, {"torch": "2.11", "numpy": "2"}]
    assert disagreement(facts) == "rank 2 and rank 0 differ in torch (2.13 on rank 0, 2.11 on rank 2)"


def test_secrets_are_compared_and_not_shown() -> None:
    facts = [{"the prompts": secret("mine")}, {"the prompts": secret("yours")}, {"the prompts": secret("yours")}]
    assert disagreement(facts) == "rank 1, 2 and rank 0 differ in the prompts"


def test_what_one_rank_does_not_know_of_is_a_difference() -> None:
    assert disagreement([{}, {"new": "1"}]) == "rank 1 and rank 0 differ in new (nothing on rank 0, 1 on rank 1)"


def test_many_differences_make_one_line() -> None:
    text = disagreement([{str(n): "a" for n in range(9)}, {str(n): "b" for n in range(9)}])
    assert text is not None
    assert "0 (a on rank 0, b on rank 1), 1 (" in text
    assert text.endswith("and 6 more")


@pytest.mark.parametrize("value", ["x" * 100, "two\nlines"])
def test_a_long_value_is_compared_by_its_digest(value: str) -> None:
    assert fact(value) == fact(value)
    assert fact(value) != fact(value + "!")
    assert len(fact(value)) < 80


def test_every_option_is_compared_but_those_of_one_host() -> None:
    ours = RunOptions(model=ModelOptions(path=None), report="a.json")
    theirs = RunOptions(generation=GenerationOptions(top_p=0.5), report="b.json")
    facts = [option_facts(each, ["report"]) for each in (ours, theirs)]
    assert disagreement(facts) == "rank 1 and rank 0 differ in generation.top_p (1.0 on rank 0, 0.5 on rank 1)"
    assert facts[0]["prefill.name"] == "kv_runahead"


def test_libraries_and_code_are_facts() -> None:
    assert library_facts().keys() >= {"torch", "transformers", "the code of runahead"}
    assert library_facts() == library_facts()


def test_the_code_is_that_of_kernels_too() -> None:
    root = Path(agreement.__file__).resolve().parent.parent.parent
    names = [path.relative_to(root).as_posix() for path in code_files(root, agreement.CODE)]
    assert {"runahead/kernels/attention.cpp", "runahead/ranks/agreement.py", "policies/base.py"} <= set(names)
    assert names == sorted(names)


def test_another_kernel_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "runahead").mkdir()
    found = set[str]()
    for text in ("one", "another"):
        (tmp_path / "runahead" / "attention.cpp").write_text(text)
        found.add(machine.code(["runahead"]))
    assert len(found) == 2


def present(path: Path, facts: list[dict[str, str]], patience_s: float = 10.0) -> list[list[Presence] | Exception]:
    """Results or errors of `meet` for each of these ranks, which come at once."""

    def come(rank: int) -> list[Presence] | Exception:
        store = dist.FileStore(str(path), len(facts))
        try:
            return meet(store, rank, len(facts), facts[rank], patience_s=patience_s)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(come, range(len(facts))))


def test_other_versions_are_refused_before_any_work(tmp_path: Path) -> None:
    first, second = present(tmp_path / "store", [{"torch": "2.13"}, {"torch": "2.11"}])
    assert isinstance(first, ValueError)
    assert str(first).startswith("rank 1 and rank 0 differ in torch (2.13 on rank 0, 2.11 on rank 1); install")
    assert isinstance(second, SharedError)


def test_those_who_meet_know_each_others_processes(tmp_path: Path) -> None:
    first, second = present(tmp_path / "store", [{}, {}])
    assert isinstance(first, list)
    assert first == second
    assert [each.rank for each in first] == [0, 1]
    assert first[0].is_beside(first[1])
    assert not first[1].has_ended


def test_a_job_meets_where_the_variables_are_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store of a job before only if it is given the same address and port."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    stores = []
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in (one, other)]
    for port in (*ports, ports[0]):
        monkeypatch.setenv("MASTER_PORT", port)
        stores.append(environment_store(0, 1, 30.0))
    assert stores[0] is stores[2]
    stores[0].set("name", "first")
    assert not stores[1].check(["name"])
