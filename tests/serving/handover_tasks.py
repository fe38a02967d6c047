"""Tasks of ranks that hand prompts over to other engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from runahead import Engine, GenerationOptions, PrefillOptions
from runahead.config import DecodeName, DecodeOptions
from runahead.prefill.base import Prefilled
from runahead.prefill.stage_run import StageRun
from runahead.ranks.ranks import Ranks
from runahead.reuse.handover import HandoverFolder, file_name
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.store import model_key
from runahead.serving.arrangement import chunks
from runahead.serving.executor import Executor
from runahead.serving.items import Handed, Inbox, PrefillItem, Report
from runahead.serving.limits import QueueLimits
from tests.families import throughout
from tests.ranks.tasks import tiny_model
from tests.waiting import until

OPTIONS = GenerationOptions(max_new_tokens=1, ignore_eos=True)


def hand_over(
    ranks: Ranks,
    family: str,
    batches: Sequence[Sequence[list[int]]],
    folder: str,
    stored: Sequence[int] = (),
    chunk_tokens: int | None = None,
    boundaries: Sequence[int] = (),
    row_tokens: int | None = None,
) -> list[Handed]:
    """Prefill batches of prompts one after another, and hand all prompts over.

    Args:
        stored: by batch, number of first tokens of each of its prompts that all stages reuse.
        boundaries: of the stages' chunks; by default the server's.
    """
    model, reports = tiny_model(family), list[Report]()
    tree = PrefixTree(1 << 40) if stored else None
    engine = Engine(
        model,
        ranks,
        prefill=PrefillOptions(chunk_tokens=chunk_tokens, row_tokens=row_tokens),
        decode=DecodeOptions(name=DecodeName.last),
        tree=tree,
    )
    key, is_last = model_key(model), ranks.stage == ranks.num_stages - 1
    handover = HandoverFolder(folder, 1 << 30, key) if is_last else None
    executor = Executor(engine, Inbox(), reports.append, QueueLimits(itl_s=1e3), handover=handover)
    num_asked = 0
    with throughout(model.dtype):
        for number, prompts in enumerate(batches):
            num = stored[number] if stored else 0
            item = PrefillItem(
                number=number,
                prompts=prompts,
                options=[OPTIONS] * len(prompts),
                boundaries=tuple(boundaries)
                or chunks(engine, max(map(len, prompts)) - num, 1.0, (0.0, 0.0)).boundaries,
                stored=[num] * len(prompts) if num else (),
                handovers=[file_name(key, "", ids) for ids in prompts],
            )
            executor.carry_out(item)
            executor.decode_all()
            if is_last:
                num_asked += len(prompts)
                until(lambda so_far=num_asked: len(_handed(reports)) == so_far)
            assert set(executor._taken_room._num_tokens) <= {number}, "rows of earlier items still have room"
    return _handed(reports)


def hand_over_in_blocks(
    ranks: Ranks, family: str, batches: Sequence[Sequence[list[int]]], folder: str, row_tokens: int
) -> tuple[list[Handed], list[int | None]]:
    """As `hand_over`, with the tokens of the blocks in which layers were computed."""
    used, compute = list[int | None](), StageRun.compute

    def noted(run: StageRun, *args: Any, **more: Any) -> Prefilled:
        done = compute(run, *args, **more)
        used.append(done.report.row_tokens)
        return done

    with patch.object(StageRun, "compute", noted):
        return hand_over(ranks, family, batches, folder, row_tokens=row_tokens), used


def _handed(reports: Sequence[Report]) -> list[Handed]:
    return [each for each in reports if isinstance(each, Handed)]
