"""Every wait of the transfers over NCCL is needed: without it two accesses to a slab race, or the host runs ahead.

Each test takes one wait out of the module's source, and has to find that out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from runahead.config import Exchange, Transfer
from runahead.kv_transfer import nccl, nccl_exchange
from tests.test_imports import called_name
from tests.virtual.device import Job, Race, Stream, VirtualRanks, transfers_late
from tests.virtual.jobs import chain, exchange

WAITS = ("wait", "wait_stream", "_wait", "_watch", "_await")


class WithoutWait(ast.NodeTransformer):
    """Replaces the wait with this number, in the order of the source."""

    def __init__(self, number: int) -> None:
        self.number, self.waits = number, list[str]()

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if not isinstance(node.value, ast.Call) or called_name(node.value) not in WAITS:
            return node
        self.waits.append(f"line {node.lineno}: {ast.unparse(node)}")
        return ast.Pass() if len(self.waits) == self.number + 1 else node


def without_wait(module: ModuleType, number: int) -> tuple[Any, list[str]]:
    """The module's namespace without one of its waits, and all its waits."""
    transformer = WithoutWait(number)
    tree = transformer.visit(ast.parse(inspect.getsource(module)))
    namespace = {"__name__": module.__name__}
    exec(compile(ast.fix_missing_locations(tree), module.__name__, "exec"), namespace)
    return namespace, transformer.waits


def waits_of(module: ModuleType) -> list[Any]:
    _, waits = without_wait(module, -1)
    return [pytest.param(number, id=wait) for number, wait in enumerate(waits)]


def check(bodies: list[Callable[[VirtualRanks], None]], sizes: list[int]) -> None:
    """Raises: Race or AssertionError."""
    for body, size in zip(bodies, sizes, strict=True):
        Job(size, choose=transfers_late).run(body)


def check_chain(carrier: Any) -> None:
    check([chain(4, transfer, num_layers=5, carrier=carrier, after=sends_are_timed) for transfer in Transfer], [4, 4])
    # Of these layers four are sent out of memory for three.
    check([chain(2, Transfer.relay, num_layers=6, num_stored=3, carrier=carrier, after=sends_are_timed)], [2])


def check_exchange(carrier: Any) -> None:
    check([exchange(3, way, carrier=carrier, after=sends_are_timed) for way in Exchange], [3] * len(Exchange))


def sends_are_timed(ranks: VirtualRanks, transfer: Any) -> None:
    """The mark at the end of each send in the log comes after the transfer, on its stream."""
    program = ranks.accelerator.job.programs[ranks.rank]
    assert len(transfer.log.sends) > 0 or not any(transfer.schedule.sends(0))
    for _, _, end in transfer.log.sends:
        at = next(n for n, each in enumerate(program) if each.kind == "record" and each.event == end.number)
        assert any(each.kind == "wait" and each.stream == program[at].stream for each in program[at - 1 : at]), (
            "untimed"
        )


def test_nothing_races() -> None:
    check_chain(nccl.NcclTransfer)
    check_exchange(nccl_exchange.NcclExchange)


@pytest.mark.parametrize("number", waits_of(nccl))
def test_a_chain_needs_every_wait(number: int) -> None:
    namespace, _ = without_wait(nccl, number)
    with pytest.raises((Race, AssertionError)):
        check_chain(namespace["NcclTransfer"])


@pytest.mark.parametrize("number", waits_of(nccl_exchange))
def test_an_exchange_needs_every_wait(number: int) -> None:
    namespace, _ = without_wait(nccl_exchange, number)
    with pytest.raises((Race, AssertionError)):
        check_exchange(namespace["NcclExchange"])


@pytest.mark.parametrize("carrier", [nccl.NcclTransfer])
def test_a_communicator_that_does_not_wait_for_compute_races(carrier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector sees messages as well as kernels."""
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    with pytest.raises(Race):
        check_chain(carrier)
