"""The loop of a study's rank: requests on standard input, answers on standard output, a JSON line each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from runahead import Ranks
from runahead.config import RanksOptions


class Measured(Protocol):
    """The model with which a rank measures."""

    def answer(self, request: dict[str, Any]) -> Any: ...


def answer_requests(measured_on: Callable[[Ranks, str], Measured]) -> None:
    """Answer requests on ranks of one thread until standard input ends.

    Args:
        measured_on: given the ranks and a folder for splits, which goes with the process.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    with Ranks.start(RanksOptions(threads=1)) as ranks, TemporaryDirectory(prefix="runahead-splits-") as folder:
        measured = measured_on(ranks, folder)
        print(json.dumps(None), file=answers, flush=True)  # ready
        for request in sys.stdin:
            print(json.dumps(measured.answer(json.loads(request))), file=answers, flush=True)
