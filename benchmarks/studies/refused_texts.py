"""How much longer does a client wait for its first token while others send texts that are refused?

    torchrun --nproc-per-node=2 launch/serve.py model=smollm2 &
    python -m benchmarks.studies.refused_texts --most_ratio 2

Some clients send a text that is far too long for the model again and again, each as soon as the last one was refused.
One more client asks for a short answer, in turn without and beside them. Its wait is the time from sending a question
to the first event with text. With --most_ratio the program fails where its median beside the others is longer than so
many times that without them, in the run's own lines.
"""

from __future__ import annotations

import json
import random
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from statistics import median
from urllib.parse import urlsplit

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, last_run, option

PATH = "/v1/completions"
PATIENCE_S = 300.0
WORDS = ("ship", "ice", "letter", "captain", "sister", "north", "of", "the", "and", "to")


def connected(options: Namespace) -> HTTPConnection:
    """A connection to the server, which is opened by its first request."""
    return HTTPConnection(urlsplit(options.url).netloc, timeout=PATIENCE_S)


def headers(options: Namespace) -> dict[str, str]:
    about = {"Content-Type": "application/json"}
    return about | ({"Authorization": f"Bearer {options.key}"} if options.key else {})


def too_long(num_bytes: int, seed: str) -> bytes:
    """A body of about so many bytes with a text of drawn words."""
    draw = random.Random(seed)
    text = " ".join(draw.choices(WORDS, k=num_bytes // 4))[:num_bytes]
    return json.dumps({"prompt": text, "max_tokens": 1}).encode()


@contextmanager
def crowd(options: Namespace, size: int) -> Iterator[Counter[int]]:
    """Context manager of so many clients, each of which has been refused before it begins; their statuses, counted.

    A connection that the server closes without an answer counts as 0.
    """
    statuses, refused, ends = Counter[int](), [threading.Event() for _ in range(size)], threading.Event()
    bodies = [too_long(options.bytes, f"{options.seed} {number}") for number in range(size)]

    def send(number: int) -> None:
        connection = connected(options)
        while not ends.is_set():
            try:
                connection.request("POST", PATH, bodies[number], headers(options))
                answer = connection.getresponse()
                answer.read()
                statuses[answer.status] += 1
            except (OSError, HTTPException):
                statuses[0] += 1
                connection.close()
            refused[number].set()
        connection.close()

    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for each in refused:
        each.wait(PATIENCE_S)
    try:
        yield statuses
    finally:
        ends.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def wait_s(options: Namespace, text: str) -> float:
    """Seconds until the first token of an answer. Raises: SystemExit: the server gives none."""
    body = json.dumps({"prompt": text, "max_tokens": options.new_tokens, "ignore_eos": True, "stream": True}).encode()
    connection, found = connected(options), None
    began_s = time.perf_counter()
    try:
        connection.request("POST", PATH, body, headers(options))
        answer = connection.getresponse()
        for line in iter(answer.readline, b""):
            if found is None and line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                found = time.perf_counter() - began_s
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise SystemExit(f"{options.url} has not answered: {error}") from error
    finally:
        connection.close()
    if found is None:
        raise SystemExit(f"{options.url} has not answered: status {answer.status}")
    return found


def variants(options: Namespace) -> Iterator[Variant]:
    """In each round without the others, then beside them."""
    for number in range(options.rounds):
        for size in (0, options.clients):
            yield {"server": options.server, "clients": size, "bytes": options.bytes, "round": number}


def measure(options: Namespace, _: None, variant: Variant) -> Iterator[Line]:
    """Ask some questions one after the other, after one that is not counted."""
    with crowd(options, variant["clients"]) as statuses:
        wait_s(options, options.text)
        before, began_s = Counter(statuses), time.perf_counter()
        waits_s = [wait_s(options, options.text) for _ in range(options.questions)]
        seconds = time.perf_counter() - began_s
        others = {str(status): number for status, number in sorted((Counter(statuses) - before).items())}
    yield variant | {"wait_s": waits_s, "seconds": seconds, "statuses": others}


def medians(found: list[Line]) -> list[Line]:
    """Waits of the last run, without and beside the others."""
    groups: dict[int, list[Line]] = {}
    for line in last_run(found):
        groups.setdefault(line["clients"], []).append(line)
    rows: list[Line] = []
    for size, lines in sorted(groups.items()):
        waits, statuses = sorted(wait for line in lines for wait in line["wait_s"]), Counter[str]()
        for line in lines:
            statuses.update(line["statuses"])
        rate = sum(statuses.values()) / sum(line["seconds"] for line in lines)
        row = {"clients": size, "bytes": lines[0]["bytes"], "questions": len(waits), "median_s": median(waits)}
        rows.append(row | {"longest_s": waits[-1], "statuses": dict(statuses), "rate": rate})
    return rows


def verdict(found: list[Line], options: Namespace) -> str | None:
    """Words for a wait that became too long, or for others that were not refused for their texts."""
    alone, *beside = medians(found)
    if options.most_ratio is None or alone["clients"] or not beside:
        return None
    [crowded] = beside
    if crowded["statuses"].keys() != {"400"}:
        return f"the other clients had statuses {crowded['statuses']}, where each should be 400"
    ratio = crowded["median_s"] / alone["median_s"]
    if ratio <= options.most_ratio:
        return None
    return f"beside {crowded['clients']} others the median wait is {ratio:.2f} times as long, over {options.most_ratio}"


TABLE = Table(
    lines=medians,
    columns={
        "other clients": lambda line: str(line["clients"]),
        "their texts": lambda line: f"{line['bytes'] / 1e6:.1f} MB",
        "refused": lambda line: f"{line['rate']:.1f} per s",
        "questions": lambda line: str(line["questions"]),
        "median wait": lambda line: f"{line['median_s']:.3f} s",
        "longest": lambda line: f"{line['longest_s']:.3f} s",
    },
)

STUDY = Study(
    name="refused_texts",
    text=__doc__,
    has="wait_s",
    variants=variants,
    measure=measure,
    table=TABLE,
    verdict=verdict,
    options={
        "url": option("http://127.0.0.1:8000", "address of the server"),
        "key": option(None, "its key"),
        "server": option("default", "what its settings are called in the lines"),
        "clients": option(6, "others"),
        "bytes": option(3_900_000, "of each of their texts"),
        "rounds": option(3, "without the others and beside them"),
        "questions": option(10, "in each half of a round"),
        "text": option("Hi", "that is asked"),
        "new_tokens": option(1, "tokens of an answer"),
        "most_ratio": option(None, "fail where the median wait becomes longer than this many times", type=float),
        "seed": option(0, "of the texts"),
    },
)

if __name__ == "__main__":
    STUDY.main()
