"""The golden set's file: for each combination its prompts' seed, its tokens, and log-probabilities in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runahead.report import library_versions
from tests.golden.combinations import DIMENSIONS, Combination, plain
from tests.golden.running import NUM_TOP, Answer

INDEX, NUMBERS = Path(__file__).with_name("golden.json"), Path(__file__).with_name("golden.npz")


@dataclass(frozen=True, kw_only=True)
class Record:
    """Result of the code for a combination.

    Attributes:
        seed: of the prompts.
        answers: of all rows.
        margin: least distance of a token's log-probability to the next one's.
        sensitivity: largest change of a log-probability by noise on the weights, per relative noise. It would be much
            larger if a choice flipped.
        bfloat16_error: root mean square of the errors of log-probabilities in bfloat16; None where it was not measured.
    """

    combination: Combination
    seed: int
    answers: list[Answer]
    margin: float
    sensitivity: float
    bfloat16_error: float | None = None

    @property
    def name(self) -> str:
        return name_of(self.combination)


def not_plain(combination: Combination) -> dict[str, str]:
    """The values that are not plain. A dimension that is added later is plain in what was recorded before."""
    return {name: value for name, value in combination.items() if value != DIMENSIONS[name][0]}


def name_of(combination: Combination) -> str:
    return ", ".join(f"{name}={value}" for name, value in not_plain(combination).items()) or "plain"


def save(records: Sequence[Record], index: Path = INDEX, numbers: Path = NUMBERS) -> None:
    lines = [
        json.dumps(
            {
                "combination": not_plain(each.combination),
                "seed": each.seed,
                "margin": float(f"{each.margin:.2g}"),
                "sensitivity": float(f"{each.sensitivity:.2g}"),
                "bfloat16_error": None if each.bfloat16_error is None else float(f"{each.bfloat16_error:.3g}"),
                "tokens": [answer.tokens for answer in each.answers],
            }
        )
        for each in records
    ]
    text = ",\n".join(lines)
    index.write_text(f'{{"versions": {json.dumps(library_versions())}, "records": [\n{text}\n]}}\n', encoding="utf-8")
    every = [answer for each in records for answer in each.answers]
    np.savez_compressed(
        numbers,
        top_ids=np.array([ids for answer in every for ids in answer.top_ids], dtype=np.uint8),
        logprobs=np.array([values for answer in every for values in answer.logprobs], dtype=np.float64),
    )


def load(index: Path = INDEX, numbers: Path = NUMBERS) -> list[Record]:
    """The records; none where there is no file yet."""
    if not index.exists():
        return []
    found, start = list[Record](), 0
    with np.load(numbers) as arrays:
        top_ids, logprobs = arrays["top_ids"], arrays["logprobs"]
    assert top_ids.shape == logprobs.shape == (len(top_ids), NUM_TOP), (top_ids.shape, logprobs.shape)
    for entry in json.loads(index.read_text(encoding="utf-8"))["records"]:
        combination, answers = plain(entry.pop("combination").items()), list[Answer]()
        for tokens in entry.pop("tokens"):
            end = start + len(tokens)
            places = slice(start, end)
            answers.append(Answer(tokens=tokens, top_ids=top_ids[places].tolist(), logprobs=logprobs[places].tolist()))
            start = end
        found.append(Record(**entry, combination=combination, answers=answers))
    assert start == len(logprobs), (start, len(logprobs))
    return found
