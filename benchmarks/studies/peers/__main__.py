"""How soon do others have the first token, and the next ones, on the same cores?

    python -m benchmarks.studies.peers
    python -m benchmarks.studies.peers --peers chain single vllm openvino --lengths 1024 --rounds 3

SmolLM2 answers the same prompts of random tokens on ours, transformers, vLLM for CPUs, OpenVINO GenAI and llama.cpp,
with --threads threads each: TTFT at each length, and seconds per token after it, in rounds in which all take turns. The
first run makes an environment for each peer in the cache folder with pip, which takes minutes (llama.cpp is compiled),
and converts the model to its format. A peer that cannot be installed or opened is left out, and the table says why. As
many peers are loaded at once as memory allows. The first prompts of each length are not counted.

Appends a JSON line per peer, length and round to benchmarks/results/peers.jsonl; the same command goes on from them
after an interruption, as long as our code, the machine and the options are the same. It needs cores that are otherwise
idle.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import median

from benchmarks.harness import lines, machine
from benchmarks.harness.declared import Curves, Panel, from_zero
from benchmarks.harness.lines import Line
from benchmarks.harness.random_prompts import random_ids
from benchmarks.harness.study import Study, Variant, errors_in_one_line, option
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.peers.loaded import Loaded
from benchmarks.studies.peers.peer import PEERS, Sizes, opened
from launch.program.ending import say
from runahead.config import ModelOptions
from runahead.model.loading import smollm2

SEEDS = 1_000_003
"""Distance of the seeds of two rounds: more than any prompt's length, which is added to a seed."""
REFERENCE = "transformers"
"""The peer whose tokens the others' are compared with."""


def rounds(options: Namespace) -> Iterator[Variant]:
    """The variants: a prompt for all peers each. Raises: ValueError: an option is out of range."""
    if unknown := [name for name in options.peers if name not in PEERS]:
        raise ValueError(f"--peers {' '.join(unknown)}: there are {', '.join(PEERS)}")
    if min(options.rounds, options.threads, *options.lengths) < 1 or options.new < 2:
        raise ValueError("--rounds, --threads and --lengths must be at least 1, --new at least 2")
    if options.warmup < 0 or options.rest < 0:
        raise ValueError("--warmup and --rest must be at least 0")
    for length, number in product(options.lengths, range(options.rounds)):
        yield {"length": length, "round": number}


class Turns:
    """The peers of a run, which take turns.

    Attributes:
        key: of everything but the peers that affects a measurement.
        kernels: whether ours takes the kernels of our own.
    """

    def __init__(self, loaded: Loaded, vocab_size: int, key: str, kernels: bool, found: Iterable[Line]) -> None:
        self.loaded, self.vocab_size, self.key, self.kernels = loaded, vocab_size, key, kernels
        self._done = {(line["peer"], line["length"], line["round"]) for line in measured_of(found, key)}
        self._skipped = set[str]()

    def take(self, names: Sequence[str], variant: Variant, num_new: int) -> Iterator[Line]:
        """Lines of the peers that have not answered this prompt yet; one that cannot answer is left out from now on."""
        length, number = variant["length"], variant["round"]
        ids = random_ids(length, self.vocab_size, seed=SEEDS * number)
        for name in names if number % 2 == 0 else reversed(names):
            if name in self._skipped or (name, length, number) in self._done:
                continue
            about = {"peer": name, "key": self.key, "kernels": self.kernels}
            try:
                found = self.loaded.ask(name, ids, num_new)
            except (ValueError, OSError) as error:
                if not PEERS[name].packages:
                    raise
                self.loaded.close(name)
                self._skipped.add(name)
                say(f"{name} is left out: {error}")
                yield about | {"skipped": str(error)}
            else:
                yield about | variant | found


@contextmanager
def turns(options: Namespace) -> Iterator[Turns]:
    """The peers, none of which is loaded yet."""
    model = smollm2.find(ModelOptions(), weights=True, progress=True).folder
    about = {name: getattr(options, name) for name in ("threads", "new", "warmup", "rest", "ours")}
    kernels = machine.has_kernels()
    key = lines.key(about | {"code": machine.code(), "hardware": machine.hardware(), "kernels": kernels})
    room = max(options.lengths) + options.new
    sizes = Sizes(model=model, threads=options.threads, room=room, given=tuple(options.ours))
    openers = {name: partial(opened, PEERS[name], sizes) for name in options.peers}
    loaded = Loaded(openers, warmup=options.warmup, rest_s=options.rest)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    try:
        yield Turns(loaded, vocab_size, key, kernels, lines.read(options.lines, option="--lines", kind="peer"))
    finally:
        loaded.close_all()


def measure(options: Namespace, prepared: Turns, variant: Variant) -> Iterator[Line]:
    """All peers' answers to one prompt: a line each."""
    with errors_in_one_line():
        for line in prepared.take(options.peers, variant, options.new):
            yield line | {"threads": options.threads, "new": options.new, "ours": options.ours}


def measured_of(found: Iterable[Line], key: str) -> list[Line]:
    """The measurements, but for those of peers that were left out, of runs with a key."""
    return [line for line in found if line["key"] == key and "skipped" not in line]


def medians(found: list[Line]) -> list[Line]:
    """Lines of the newest key, one per peer and length: medians and ranges of the rounds."""
    of_key, made = measured_of(found, found[-1]["key"]), list[Line]()
    first = {(each["length"], each["round"]): each["tokens"][0] for each in of_key if each["peer"] == REFERENCE}
    lengths = sorted({each["length"] for each in of_key})
    for name, length in product(PEERS, lengths):
        rounds = [each for each in of_key if (each["peer"], each["length"]) == (name, length)]
        if rounds:
            compared = [first[at] == each["tokens"][0] for each in rounds if (at := (length, each["round"])) in first]
            times = {what: [each[what] for each in rounds] for what in ("ttft_s", "tpot_s")}
            made.append(rounds[-1] | times | {"same": compared})
    return made


def of_rounds(values: Sequence[float], form: Callable[[float], str]) -> str:
    """A cell: the median, and the range of several rounds."""
    middle = form(median(values))
    return middle if len(values) == 1 else f"{middle} ({form(min(values))} to {form(max(values))})"


def table(found: list[Line]) -> str:
    """The newest rounds in Markdown, with what they are of, and who was left out and why."""
    of_key = [line for line in found if line["key"] == found[-1]["key"]]
    shown = medians(found)
    lengths = sorted({line["length"] for line in shown})
    by_place = {(line["peer"], line["length"]): line for line in shown}
    rows: Rows = [
        (
            "",
            "version",
            *(f"TTFT, {length:,} tokens" for length in lengths),
            *(f"ms a token after {length:,}" for length in lengths),
            "first token of transformers",
        )
    ]
    for name, peer in PEERS.items():
        here = [by_place.get((name, length)) for length in lengths]
        of_peer = [line for line in here if line is not None]
        if not of_peer:
            continue
        same = [each for line in of_peer for each in line["same"]]
        rows.append(
            (
                peer.shown,
                of_peer[-1]["version"],
                *("-" if line is None else of_rounds(line["ttft_s"], lambda s: f"{s:.2f} s") for line in here),
                *("-" if line is None else of_rounds(line["tpot_s"], lambda s: f"{1e3 * s:.1f}") for line in here),
                f"{sum(same)} of {len(same)}" if same else "-",
            )
        )
    last = found[-1]
    given = f", {' '.join(last['ours'])}" if last["ours"] else ""
    cpu = last["hardware"]["cpu"]
    heading = f"*Measured {lines.measured(of_key)}.* {cpu}, {last['threads']} threads, {last['new']} new tokens{given}."
    measured = {line["peer"] for line in shown}
    out = dict.fromkeys(line["skipped"] for line in of_key if "skipped" in line and line["peer"] not in measured)
    left_out = "".join(f"\nLeft out: {reason}.\n" for reason in out)
    return f"{heading}\n\n{markdown(rows)}{left_out}"


PICTURE = Curves(
    title="Time to the first token and per token after it, beside others",
    subject=lambda drawn: f"SmolLM2-135M, {drawn[-1]['threads']} threads, medians" if drawn else "no measurements",
    lines=medians,
    curve=lambda line: PEERS[line["peer"]].shown,
    x_label="tokens of the prompt",
    x=lambda line: float(line["length"]),
    panels=lambda drawn: [
        Panel("first token", "seconds", lambda line: median(line["ttft_s"])),
        Panel("a token after it", "ms", lambda line: 1e3 * median(line["tpot_s"])),
    ],
    finish=from_zero,
)

STUDY = Study(
    name="peers",
    text=__doc__,
    has="peer",
    variants=rounds,
    prepare=turns,
    measure=measure,
    table=table,
    pictures={"peers.png": lambda found: PICTURE(found) if medians(found) else None},
    page="peers.md",
    options={
        "peers": option(list(PEERS), f"of {', '.join(PEERS)}", metavar="PEER"),
        "lengths": option([1024, 4096, 8000], "tokens of the prompts"),
        "new": option(16, "tokens of each answer, the first one among them"),
        "rounds": option(5),
        "threads": option(2, "of each peer"),
        "warmup": option(2, "prompts of each length that do not count, of each peer"),
        "rest": option(0.5, "seconds before each prompt, in which the threads of the peer before stop spinning"),
        "ours": {"default": [], "nargs": "*", "metavar": "name=value", "help": "options of launch/infer.py for ours"},
    },
)

if __name__ == "__main__":
    STUDY.main()
