"""Endurance: hundreds of prompts of mixed lengths, some of them invalid, in one run on two ranks.

    python tests/faults/endurance.py --count 300 --longest 6000 [name=value ...]

Options behind the flags go to launch/infer.py (model=...). Every prompt has to get its line, in order: an answer, or
what is wrong with it. Answers have to be those of fresh runs, and no rank's memory may grow. Appends a JSON line to
benchmarks/results/prompt_endurance.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from benchmarks.harness import lines as json_lines
from benchmarks.harness import machine
from benchmarks.harness.machine import commit, hardware
from benchmarks.harness.study import errors_in_one_line
from launch import infer
from runahead.model import loading
from runahead.model.loading.position_limit import max_positions
from runahead.report import library_versions

ROOT = Path(__file__).resolve().parents[2]
INFER = ROOT / "launch" / "infer.py"
TEXT = ROOT / "examples" / "frankenstein_letters.txt"
RESULTS = ROOT / "benchmarks" / "results" / "prompt_endurance.jsonl"
NUM_RANKS = 2

INVALID_SHARE = 0.06
WARM_SHARE = 0.2
"""Share of the prompts that come first: the longest is among them, and after them a rank has all memory it needs."""

GROWTH, GROWTH_MIB = 0.03, 16.0
"""Growth of memory that is allowed after that, since an allocator never fits all lengths equally well. A leak of 1 MiB
per prompt is 15 times as much."""

SAMPLE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Lines of a .jsonl file, and by place what is to be said of those that are invalid."""

    lines: list[str]
    invalid: dict[int, str]


@dataclass(kw_only=True)
class Run:
    """Output of a run, and the memory of its ranks.

    Attributes:
        memory_mib: by rank, (lines on standard output so far, MiB that are the rank's own) over time.
    """

    status: int
    entries: list[dict[str, Any]]
    report: dict[str, Any]
    errors: str
    seconds: float
    memory_mib: list[list[tuple[int, float]]] = field(default_factory=list)


def main(args: Sequence[str] | None = None) -> int:
    """0 if all is as it has to be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="prompts")
    parser.add_argument("--longest", type=int, default=6000, help="tokens")
    parser.add_argument("--fresh", type=int, default=10, help="prompts that are also answered by a run of their own")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dirty", action="store_true", help="run for benchmarks/results with uncommitted changes")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(args)
    if not options.dirty:
        with errors_in_one_line():
            machine.require_known_code(options.results, remedy="--dirty or other --results")
    line = endurance(options.seed, options.count, options.longest, options.fresh, options.overrides)
    json_lines.append(options.results, [line])
    print(json.dumps(line, indent=1))
    return 1 if line["problems"] else 0


def endurance(seed: int, count: int, longest: int, num_fresh: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run and its fresh runs. The result's `problems` are sentences; none if all is as it has to be."""
    prompts = make_prompts(seed, count, longest, overrides)
    valid = [place for place in range(count) if place not in prompts.invalid]
    with tempfile.TemporaryDirectory(prefix="runahead-endurance-") as folder:
        whole = run(prompts.lines, overrides, Path(folder))
        problems = missing(whole, prompts) + grown(whole, count)
        by_length = sorted(valid, key=lambda place: len(prompts.lines[place]))
        picked = {by_length[round(number * (len(valid) - 1) / max(1, num_fresh - 1))] for number in range(num_fresh)}
        for place in sorted(picked):
            fresh = run([prompts.lines[place]], overrides, Path(folder))
            problems += differing(whole, place, fresh)
    lengths = [entry["prompt_tokens"] for entry in whole.entries if "error" not in entry]
    return {
        "endurance": count,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": library_versions(),
        "overrides": list(overrides),
        "ranks": NUM_RANKS,
        "answered": len(lengths),
        "skipped": len(whole.entries) - len(lengths),
        "prompt_tokens": {"shortest": min(lengths, default=0), "longest": max(lengths, default=0), "all": sum(lengths)},
        "fresh": len(picked),
        "seconds": round(whole.seconds, 1),
        "memory_mib": [memory(of_rank, count) for of_rank in whole.memory_mib],
        "problems": problems,
    }


def make_prompts(seed: int, count: int, longest: int, overrides: Sequence[str]) -> Prompts:
    """Pieces of a text, of 1 to `longest` tokens, as many of 1 to 10 as of 1,000 to 10,000; a few are invalid."""
    draw = random.Random(seed)
    model = infer.INFER.compose(overrides).model
    tokenizer = loading.load_tokenizer(model)
    limit = max_positions(loading.load_decoder_config(model))
    assert tokenizer is not None and limit is not None and limit > longest
    story = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]

    def piece(num_tokens: int) -> str:
        while True:  # a piece of white space alone is no prompt
            start = draw.randrange(len(story))
            ids = [story[(start + number) % len(story)] for number in range(num_tokens)]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            if text.strip() and "\ufffd" not in text:
                return text

    lengths = [max(1, round(math.exp(draw.uniform(0, math.log(longest))))) for _ in range(count)]
    lengths[draw.randrange(1, max(2, int(WARM_SHARE * count)))] = longest
    lengths[draw.randrange(count // 2, count)] = longest
    lengths[-1] = 1
    lines = [json.dumps(piece(length)) for length in lengths]
    faults = [
        ('{"prompt": "cut off', "is not JSON"),
        ('""', "is empty"),
        ('{"question": "who?"}', "must be a string or an object with a string 'prompt'"),
        ('"half a pair: \\ud800"', "not valid Unicode"),
        (json.dumps(piece(limit + 10)), f"longer than the model's {limit} positions"),
    ]
    places = [place for place in range(count) if lengths[place] not in (1, longest)]
    chosen = draw.sample(places, max(len(faults), round(INVALID_SHARE * count)))
    invalid = {}
    for number, place in enumerate(chosen):
        lines[place], invalid[place] = faults[number % len(faults)]
    return Prompts(lines=lines, invalid=invalid)


def run(lines: Sequence[str], overrides: Sequence[str], folder: Path) -> Run:
    """launch/infer.py on two ranks with these prompts."""
    (folder / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    report = folder / "run.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    options = ["prompt.skip_invalid=true", "prompt.chat=false", "generation.max_new_tokens=8"]
    options += ["partition.alone=false", *overrides]
    files = [f"prompt.file={folder / 'prompts.jsonl'}", f"report={report}"]
    began = time.monotonic()
    with (
        (folder / "stderr").open("w+") as errors,
        subprocess.Popen(
            [*command, str(INFER), *options, *files], stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        ) as job,
    ):
        assert job.stdout is not None
        sampler = Sampler(job.pid)
        sampler.start()
        for line in job.stdout:
            sampler.lines.append(line)
        status = job.wait()
        sampler.over.set()
        sampler.join()
        errors.seek(0)
        said = errors.read()
    return Run(
        status=status,
        entries=[json.loads(line) for line in sampler.lines],
        report=json.loads(report.read_text(encoding="utf-8")) if report.exists() else {},
        errors=said,
        seconds=time.monotonic() - began,
        memory_mib=sampler.memory_mib,
    )


class Sampler(threading.Thread):
    """Looks at the memory of a job's ranks while another thread collects its lines."""

    def __init__(self, launcher: int) -> None:
        super().__init__(daemon=True)
        self._launcher = psutil.Process(launcher)
        self.lines: list[str] = []
        self.memory_mib: list[list[tuple[int, float]]] = [[] for _ in range(NUM_RANKS)]
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(SAMPLE_S):
            with suppress(psutil.Error, OSError):  # a process that has just ended
                for rank in self._launcher.children():
                    number = int(rank.environ().get("RANK", -1))
                    mib = anonymous_mib(rank.pid)
                    if 0 <= number < NUM_RANKS and mib is not None:
                        self.memory_mib[number].append((len(self.lines), mib))


def anonymous_mib(process: int) -> float | None:
    """Memory that is a process's own, without what it maps from files such as weights."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return None


def missing(whole: Run, prompts: Prompts) -> list[str]:
    """Prompts that are lost, out of order, or wrongly taken for invalid."""
    count = len(prompts.lines)
    if whole.status != 0:
        return [f"status {whole.status}: {whole.errors[-500:]}"]
    found = []
    if [entry["index"] for entry in whole.entries] != list(range(count)):
        found.append(f"{count} prompts led to lines {[entry['index'] for entry in whole.entries]}")
    told = {entry["index"]: entry["error"] for entry in whole.entries if "error" in entry}
    if told.keys() != prompts.invalid.keys():
        found.append(f"prompts {sorted(prompts.invalid)} are invalid, and {sorted(told)} were skipped")
    found += [
        f"prompt {place} is wrongly explained: {told[place]}"
        for place, fault in prompts.invalid.items()
        if fault not in told.get(place, fault)
    ]
    answered = {entry["index"]: entry["new_token_ids"] for entry in whole.entries if "error" not in entry}
    if {entry["index"]: entry["new_token_ids"] for entry in whole.report.get("prompts", [])} != answered:
        found.append("the report and standard output differ")
    return found


def grown(whole: Run, count: int) -> list[str]:
    """Ranks whose memory grew after the first prompts."""
    found = []
    for rank, of_rank in enumerate(whole.memory_mib):
        seen = memory(of_rank, count)
        if not seen["warm"] or not seen["later"]:
            found.append(f"the memory of rank {rank} was not seen")
        elif seen["later"] > seen["warm"] * (1 + GROWTH) + GROWTH_MIB:
            found.append(f"rank {rank} had {seen['warm']:.0f} MiB at most, and {seen['later']:.0f} MiB later")
    return found


def memory(of_rank: Sequence[tuple[int, float]], count: int) -> Mapping[str, float]:
    """Peaks of a rank in MiB: until it is warm, and later; 0 where nothing was seen."""
    border = WARM_SHARE * count
    warm = max((mib for lines, mib in of_rank if lines <= border), default=0.0)
    later = max((mib for lines, mib in of_rank if border < lines), default=0.0)
    return {"warm": round(warm, 1), "later": round(later, 1)}


def differing(whole: Run, place: int, fresh: Run) -> list[str]:
    """Is the answer of one prompt that of a run of its own?"""
    if fresh.status != 0 or len(fresh.entries) != 1:
        return [f"a fresh run of prompt {place} failed: {fresh.errors[-500:]}"]
    [alone], among = fresh.entries, next((each for each in whole.entries if each["index"] == place), {})
    fields = ("text", "new_token_ids", "finish_reason", "prompt_tokens")
    return [
        f"prompt {place} has {name} {among.get(name)}, and {alone.get(name)} in a run of its own"
        for name in fields
        if among.get(name) != alone.get(name)
    ]


if __name__ == "__main__":
    sys.exit(main())
