"""A part on one of its ranks: `python -m benchmarks.first_day.work <JSON of a PartTask>`, started by its crew."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.doctor.crew import Job
from benchmarks.doctor.tasks import as_rank
from benchmarks.first_day import chain, copies, gpu_tests, kernels, nccl, sharing, speed
from benchmarks.first_day.estimates import machine_of
from benchmarks.first_day.figures import Figures
from benchmarks.first_day.parts import CASES, PARTS, FirstDayPart, Where
from benchmarks.first_day.visit import Visit
from launch.program.launcher import follow_launcher
from runahead.config import Carrier, DecodeName, RanksOptions, Transfer
from runahead.ranks.accelerator import prepare_environment
from runahead.ranks.ranks import Ranks

Work = Callable[[Visit], None]

WORK: dict[str, Work] = {
    "hosts_links": chain.probe,
    "hosts_chain": chain.race,
    "hosts_copy": partial(chain.race, carrier=Carrier.copy),
    "hosts_sharded": partial(chain.race, decode=DecodeName.sharded),
    "hosts_tensor": chain.race,
    "links": chain.probe,
    "chain_relay": chain.race,
    "chain_copy": partial(chain.race, carrier=Carrier.copy),
    "chain_direct": partial(chain.race, transfer=Transfer.direct),
    "chain_direct_copy": partial(chain.race, transfer=Transfer.direct, carrier=Carrier.copy),
    "chain_sharded": partial(chain.race, decode=DecodeName.sharded),
    "chain_tensor": chain.race,
    "nccl_operations": nccl.operations,
    "nccl_live_graph": nccl.live_graph,
    "speed": speed.by_length,
    "kernels": kernels.measure,
    "transformers": speed.beside_transformers,
    "doctor": chain.probe,
    "copies": copies.measure,
    "shares_2": sharing.share_model,
    "rows": speed.rows,
    "tests": gpu_tests.run,
    "memory": speed.memory,
    **{case.name: partial(sharing.run_case, case=case) for case in CASES},
}
"""The work of the ranks, by part."""

LAST_WORDS_S = 5.0
"""Seconds before the end of a part at which a rank that hangs prints where each of its threads is."""


@dataclass(frozen=True, kw_only=True)
class PartTask:
    """A part as its ranks are told it.

    Attributes:
        ranks: options of the ranks.
        figures: file that rank 0 appends findings to.
        folder: of the part's logs.
    """

    part: str
    ranks: dict[str, Any]
    figures: str
    folder: str
    limit_s: float

    def job(self, num_ranks: int) -> Job:
        """The job that does it."""
        return Job(
            name=self.part,
            module="benchmarks.first_day.work",
            args=[json.dumps(asdict(self))],
            num_ranks=num_ranks,
            limit_s=self.limit_s,
            last_words_s=self.ranks["timeout_s"] + 15,
        )


def main() -> None:
    """Do a part's work on this rank."""
    follow_launcher()
    task = PartTask(**json.loads(sys.argv[1]))
    faulthandler.enable()
    faulthandler.dump_traceback_later(task.limit_s - LAST_WORDS_S)
    part = next(each for each in PARTS if each.name == task.part)
    if part.where is Where.gpu:
        if not part.sees_all_gpus:
            _see_one_gpu()
        for sentence in prepare_environment():
            print(sentence, flush=True)
    as_rank(RanksOptions(**task.ranks), partial(_work, part, task), may_share_gpus=part.where is Where.gpu)


def _see_one_gpu() -> None:
    """Have this process see the first GPU alone, as the other ranks that share it do."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if visible is None else visible.split(",")[0]


def _work(part: FirstDayPart, task: PartTask, ranks: Ranks) -> None:
    path = Path(task.figures) if ranks.rank == 0 else None
    figures = Figures(part.name, path, machine_of(ranks.device))
    WORK[part.name](Visit(ranks=ranks, figures=figures, folder=Path(task.folder), limit_s=task.limit_s))


if __name__ == "__main__":
    main()
