"""Drill of vLLM with prompts of ours: faults by chance, and what becomes of answers, blocks and files.

    python -m tests.connector.drill
    python -m tests.connector.drill --only 17

In each of --rounds one to four prompts are asked for side by side, each with a fault by chance (`FAULTS` and `KILLS` in
faulty.py), of a vLLM that has so few blocks that it pre-empts requests, and of our server of two ranks. All that are
not aborted must have the tokens of plain vLLM; after a killed process the next one must give them. Appends a JSON line
per round to benchmarks/results/connector_drill.jsonl, and the same command goes on from them; then it prints a table.
A round takes two seconds, or thirty where a process is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations" / "vllm"))

from benchmarks.harness import lines as json_lines
from benchmarks.harness import machine
from benchmarks.harness.study import errors_in_one_line
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.endurance import Server
from benchmarks.studies.serving import fetched
from tests.connector.engines import engine, python_of_vllm
from tests.connector.fake_server import FakeServer, serving
from tests.connector.faulty import FAULTS, KILLS, Faulty
from tests.connector.tiny_models import save

LINES = machine.RESULTS / "connector_drill.jsonl"
FAMILY = "gemma3"
"""Its layers are of both kinds: with windows, and without."""
FEW = {"num_gpu_blocks_override": 62, "max_model_len": 576}
"""Room of vLLM for two or three prompts with their answers, of four."""
NEW, LONGEST, PROMPTS = 60, 500, 12
KILLED = 0.08
"""Probability of a killed process, of each kind, for a round."""
HANG_S = 300.0
"""Seconds after which vLLM counts as hung in a call."""


def prompts(number: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random ones of 100 tokens or more, of which every third begins as the one before it does."""
    chance = random.Random(seed)
    made: list[list[int]] = []
    for place in range(number):
        ids = [chance.randrange(5, 576) for _ in range(chance.randrange(100, longest))]
        if place % 3 == 2:
            shared = made[-1][: chance.randrange(50, min(250, len(made[-1])))]
            ids = shared + ids[: max(100, len(ids) - len(shared))]  # more than vLLM would compute alone
        made.append(ids)
    return made


def plan(seed: int, number: int) -> tuple[list[int], list[str], random.Random]:
    """A round: the numbers of its prompts, the fault of each, and what its other choices are drawn from."""
    chance = random.Random(f"{seed} {number}")
    places = chance.sample(range(PROMPTS), chance.randrange(1, 5))
    faults = [chance.choice(FAULTS) for _ in places]
    for kind in KILLS:
        if chance.random() < KILLED:
            faults[chance.randrange(len(faults))] = kind
    return places, faults, chance


def how(fault: str, answer: dict[str, Any] | None, *, wanted: list[int], num_tokens: int) -> str:
    """The end of a prompt of so many tokens: loaded, computed, aborted, or what is wrong with it."""
    if fault == "aborted" and (answer is None or len(answer["tokens"]) < len(wanted)):
        return "aborted"
    if answer is None or answer["tokens"] != wanted:
        return "wrong: no answer" if answer is None else "wrong tokens"
    return "loaded" if answer["cached"] >= num_tokens - 1 else "computed"


class Drilling:
    """Both sides, with the proxy between them. Use it in a `with` block.

    Args:
        folder: for the model, the files and what is said.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._handed = folder, folder / "handed"
        self._undo = ExitStack()
        self._lost: set[str] = set()
        self._blocks: int | None = None

    def __enter__(self) -> Drilling:
        with ExitStack() as undo:
            python = self._python = python_of_vllm()
            self._model = save(FAMILY, self._folder / "model")
            self.asked = prompts(PROMPTS, LONGEST, seed=3)
            with engine(python, self._model, self._folder, None, **FEW) as plain:
                self.wanted = [self._of(plain, [ids])["answers"][0]["tokens"] for ids in self.asked]
            self._servers, self._engines = undo.enter_context(ExitStack()), undo.enter_context(ExitStack())
            self._start_server()
            self.faulty = Faulty(self._handed, lambda: self._server.url, self._kill)
            about = json.loads(fetched(f"{self._server.url}/v1/prefill", None))
            self._proxy = undo.enter_context(serving(FakeServer(about, self.faulty)))
            self._start_vllm()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def round(self, seed: int, number: int) -> dict[str, Any]:
        """One round: what was asked for, and what was wrong."""
        places, faults, chance = plan(seed, number)
        for path in self._handed.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        self._lost.clear()
        self.faulty.chance = chance
        self.faulty.fault = {tuple(self.asked[place]): fault for place, fault in zip(places, faults, strict=True)}
        after = [chance.randrange(0, 60) if fault == "aborted" else None for fault in faults]
        problems, found = list[str](), None
        try:
            found = self._of(self._vllm, [self.asked[place] for place in places], after)
        except ValueError as error:
            if KILLS[1] not in self._lost:
                problems.append(f"vLLM has ended: {error}")
        hows = ["killed"] * len(places)
        if found is not None:
            answers = zip(places, faults, found["answers"], strict=True)
            hows = [
                how(fault, answer, wanted=self.wanted[place], num_tokens=len(self.asked[place]))
                for place, fault, answer in answers
            ]
            problems += [
                f"{each} ({fault})" for each, fault in zip(hows, faults, strict=True) if each.startswith("wrong")
            ]
            problems += ["it hangs"] if found["hung"] else []
            problems += [f"{found['left']} requests are left"] if found["left"] else []
            self._blocks = self._blocks or found["free_blocks"]
            if found["free_blocks"] != self._blocks:
                problems.append(f"{self._blocks - found['free_blocks']} blocks are lost")
        problems += self._after(places, faults, is_killed=found is None)
        preempted = 0 if found is None else found["preempted"]
        asked = [{"fault": fault, "how": each} for fault, each in zip(faults, hows, strict=True)]
        return {"seed": seed, "round": number, "asked": asked, "preempted": preempted, "problems": problems}

    def _after(self, places: Sequence[int], faults: Sequence[str], *, is_killed: bool) -> list[str]:
        """Start what was killed, and look at what is left behind."""
        problems = list[str]()
        if KILLS[0] in faults or not self._server.is_running:
            if KILLS[0] not in faults:
                problems.append(f"our server has ended: {self._server.last_words}")
            self._servers.close()
            self._start_server()
        unharmed = {"none", "late", "busy", "hangs", "aborted", *KILLS}
        if unharmed >= set(faults):
            files = self._handed.glob("*.safetensors")
            problems += [f"the file {path.name[:8]} is damaged" for path in files if not whole(path)]
        others = {path.name for path in self._handed.iterdir() if path.suffix != ".safetensors"} - {".lock"}
        problems += [f"{name} is left" for name in sorted(others)]
        if is_killed or KILLS[1] in self._lost:
            self._engines.close()
            self._start_vllm()
            self.faulty.fault = {tuple(self.asked[place]): "none" for place in places}
            again = self._of(self._vllm, [self.asked[place] for place in places])["answers"]
            if [answer and answer["tokens"] for answer in again] != [self.wanted[place] for place in places]:
                problems.append("wrong tokens of the next vLLM")
        return problems

    def _of(self, vllm: Any, ids: list[list[int]], after: Sequence[int | None] | None = None) -> dict[str, Any]:
        """Answers of a vLLM. Raises: ValueError: it has ended."""
        watch = threading.Timer(HANG_S, vllm.kill)
        watch.start()
        try:
            found: dict[str, Any] = vllm.ask({"ids": ids, "new": NEW, "abort_after": after, "reset": True})
        finally:
            watch.cancel()
        return found

    def _kill(self, kind: str) -> None:
        self._lost.add(kind)
        if kind == KILLS[1]:
            with suppress(OSError):
                os.kill(self._vllm._processes[0].pid, signal.SIGKILL)
            return
        with suppress(ProcessLookupError):
            os.kill(self.faulty.chance.choice(self._server.processes), signal.SIGKILL)

    def _start_server(self) -> None:
        log = self._servers.enter_context((self._folder / "server.log").open("w+b"))
        given = ["model=hf", f"model.path={self._model}", f"serve.handover={self._handed}", "serve.log=false"]
        # Each prompt is computed by both ranks, also one that was computed before, or that is as short as these.
        given += ["serve.prefix_cache_bytes=0", "serve.decode_ranks=1", "partition=even", "ranks.threads=1"]
        self._server = self._servers.enter_context(Server(given, 2, log))

    def _start_vllm(self) -> None:
        settings = {"server": self._proxy.url, "wait_s": 1.0}
        self._vllm = self._engines.enter_context(engine(self._python, self._model, self._folder, settings, **FEW))
        self._blocks = None


def whole(path: Path) -> bool:
    """Whether a file has the checksums that it says."""
    try:
        with safe_open(path, framework="pt") as file:
            sums = json.loads(file.metadata()["crc32"])
            layers = [file.get_tensor(f"layer.{number}") for number in range(len(sums))]
    except (OSError, SafetensorError):
        return False
    return sums == [zlib.crc32(layer.contiguous().numpy().tobytes()) for layer in layers]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Ends by fault, in Markdown."""
    ends = {fault: Counter[str]() for fault in (*FAULTS, *KILLS)}
    for line in found:
        for each in line["asked"]:
            ends[each["fault"]][each["how"].partition(":")[0]] += 1
    hows = ("loaded", "computed", "aborted", "killed")
    rows: Rows = [("fault", "prompts", *hows, "wrong")]
    for fault, counts in ends.items():
        wrong = counts.total() - sum(counts[how] for how in hows)
        rows.append((fault, str(counts.total()), *(str(counts[how]) for how in hows), str(wrong)))
    preempted, bad = sum(line["preempted"] for line in found), sum(bool(line["problems"]) for line in found)
    return f"{len(found)} rounds, {preempted} pre-emptions, {bad} rounds with problems.\n\n{markdown(rows)}"


def main(args: Sequence[str] | None = None) -> int:
    """0 if all rounds of this seed were as they should be, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", type=int, help="this round alone, which is not recorded")
    parser.add_argument("--lines", type=Path, default=LINES)
    parser.add_argument("--dirty", action="store_true", help="run for benchmarks/results with uncommitted changes")
    options = parser.parse_args(args)
    with errors_in_one_line():
        if options.only is None and not options.dirty:
            machine.require_known_code(options.lines, remedy="--dirty or other --lines")
        known = json_lines.read(options.lines, option="--lines", kind="round")
    done = {line["round"] for line in known if line["seed"] == options.seed}
    numbers = [number for number in range(options.rounds) if number not in done]
    numbers = numbers if options.only is None else [options.only]
    if numbers:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with (
            tempfile.TemporaryDirectory(prefix="runahead-drill-", dir=shared) as folder,
            Drilling(Path(folder)) as drilling,
        ):
            for number in numbers:
                date = datetime.now(UTC).isoformat(timespec="seconds")
                line = {"date": date, "commit": machine.commit()} | drilling.round(options.seed, number)
                told = "; ".join(line["problems"]) or "as expected"
                print(f"{number}: {', '.join(each['fault'] for each in line['asked'])}: {told}", flush=True)
                if options.only is not None:
                    return 1 if line["problems"] else 0
                json_lines.append(options.lines, [line])
    found = [line for line in json_lines.read(options.lines, kind="round") if line["seed"] == options.seed]
    print(table(found))
    return 1 if any(line["problems"] for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
