"""Which prefixes are found again when sessions pause: eviction that knows the queue, LRU and FIFO on one trace.

    python -m benchmarks.studies.prefixes.sessions --sessions 400 --shares 0.2 0.33 0.5 --seeds 0 1 2
    python -m benchmarks.studies.prefixes.sessions --draw-only

A simulation of time, with the prefix tree itself: sessions come at random, each has some turns, and its next turn comes
after a pause. One server answers turns in the order in which they come; a turn takes a time per token that is not
found, and per token of its answer. The tree has room for two texts on the device, and in host memory a share of what
all sessions that will go on need at most at a time. Keys and values are one byte per token.

    look-ahead   the tree is told the next turns that wait (`PrefixTree.soon`)
    LRU          it is not
    FIFO         the session that came first goes first, whenever it was used

CachedAttention (Gao et al., ATC 2024) has hit rates of 86%, 58% and 48% for the three, on conversations of ShareGPT and
with other capacities. Here the rate of arrivals is chosen by `--load`, the share of the time in which the server would
be busy if all were found: look-ahead knows more the longer the queue is. The lines are in
benchmarks/results/sessions.jsonl.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_table import Rows
from launch.program.text_table import text_table
from runahead.cache.slabs import KVShape
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.tree.node import PrefixNode

KEY = "session"
SHAPES = [KVShape(num_kv_heads=1, key_dim=1, value_dim=0, dtype=torch.uint8)]
TOKEN_S, ANSWER_S = 1.0, 4.0
"""Seconds of the simulation per token of a prompt that is not found, and per token of an answer."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session.

    Attributes:
        arrives_s: when its first turn comes.
        turns: tokens of each turn's question and of its answer.
        pauses_s: after each turn but the last.
    """

    arrives_s: float
    turns: Sequence[tuple[int, int]]
    pauses_s: Sequence[float]

    def length(self, turn: int) -> int:
        """Tokens of its text up to a turn's answer."""
        return sum(question + answer for question, answer in self.turns[: turn + 1])

    def new_s(self) -> float:
        """Seconds of its turns if all that came before each was found."""
        return sum(question * TOKEN_S + answer * ANSWER_S for question, answer in self.turns)


def trace(num_sessions: int, turns: float, load: float, pause: float, seed: int) -> list[Session]:
    """Draw sessions.

    Args:
        turns: mean number of turns.
        load: share of the time in which a server is busy that finds everything.
        pause: mean pause, as a multiple of the mean seconds of a turn.
    """
    draw, drawn = random.Random(seed), list[list[tuple[int, int]]]()
    for _ in range(num_sessions):
        num_turns = 1
        while draw.random() > 1 / turns:
            num_turns += 1
        drawn.append([(_length(draw, 60), _length(draw, 40)) for _ in range(num_turns)])
    seconds = [Session(arrives_s=0.0, turns=each, pauses_s=[]).new_s() for each in drawn]
    turn_s = sum(seconds) / sum(map(len, drawn))
    sessions, now = list[Session](), 0.0
    for each in drawn:
        now += draw.expovariate(load / mean(seconds))
        pauses = [draw.expovariate(1 / (pause * turn_s)) for _ in each[1:]]
        sessions.append(Session(arrives_s=now, turns=each, pauses_s=pauses))
    return sessions


def _length(draw: random.Random, median: int) -> int:
    return max(1, min(20 * median, round(draw.lognormvariate(0, 1) * median)))


class FIFOTree(PrefixTree):
    """A tree from which the texts go first that came first."""

    def _use(self, node: PrefixNode, now: int) -> None:
        """Keep the time at which a node was stored."""

    def precedence(self, node: PrefixNode) -> tuple[bool, int, int]:
        return False, 0, node.path[0].used


POLICIES = {"look-ahead": PrefixTree, "LRU": PrefixTree, "FIFO": FIFOTree}


@dataclass(kw_only=True)
class Found:
    """Tokens of their sessions that turns after the first found.

    Attributes:
        asked, found: tokens.
        turns, whole: turns, and those that found all.
        most_waiting: longest queue.
    """

    asked: int = 0
    found: int = 0
    turns: int = 0
    whole: int = 0
    most_waiting: int = 0


def needed_bytes(sessions: Sequence[Session]) -> int:
    """Most bytes of the texts of sessions that will go on, at a time, of a server that finds everything."""
    now, most = 0, 0
    for _, change in sorted(_changes(sessions)):
        now += change
        most = max(most, now)
    return most


def _changes(sessions: Sequence[Session]) -> Iterator[tuple[float, int]]:
    """Moments at which texts grow, or are needed no more, by tokens."""
    for session in sessions:
        at_s = session.arrives_s
        for turn, (question, answer) in enumerate(session.turns):
            at_s += question * TOKEN_S + answer * ANSWER_S
            if turn < len(session.turns) - 1:
                yield at_s, question + answer
                at_s += session.pauses_s[turn]
            elif turn:
                yield at_s, -session.length(turn - 1)


def replay(sessions: Sequence[Session], policy: str, host_bytes: float, window: int) -> tuple[Found, float]:
    """Answer all turns in the order in which they come.

    Args:
        host_bytes: of the tree's host tier.
        window: turns that wait which the tree is told of, with look-ahead.

    Returns:
        what was found, and the mean seconds until a first token.
    """
    longest = max(session.length(len(session.turns) - 1) for session in sessions)
    tree = POLICIES[policy](2 * longest, host_bytes=host_bytes)
    tree.open(KEY, SHAPES, torch.device("cpu"))
    coming = [(session.arrives_s, number, 0) for number, session in enumerate(sessions)]
    heapq.heapify(coming)
    waiting, free_s, found, ttft_s = list[tuple[float, int, int]](), 0.0, Found(), list[float]()
    texts: list[list[int]] = [[] for _ in sessions]
    while coming or waiting:
        now_s = free_s if waiting else max(free_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            waiting.append(heapq.heappop(coming))
        arrived_s, number, turn = waiting.pop(0)
        found.most_waiting = max(found.most_waiting, len(waiting))
        if policy == "look-ahead":
            tree.soon([texts[number], *(texts[other] for _, other, _ in waiting[:window])], KEY)
        question, answer = sessions[number].turns[turn]
        before, text = texts[number], texts[number] + [number] * (question + answer)
        hit = tree.match(before, KEY)
        num_found = hit.num_tokens
        if turn:
            found.asked, found.found = found.asked + len(before), found.found + num_found
            found.turns, found.whole = found.turns + 1, found.whole + (num_found == len(before))
        layers = [torch.zeros(len(text) - num_found, 1, 1, dtype=torch.uint8)]
        tree.insert(text, layers, KEY, start=num_found).release()
        hit.release()
        texts[number] = text
        first_s = now_s + (len(before) - num_found + question) * TOKEN_S
        ttft_s.append(first_s - arrived_s)
        free_s = first_s + answer * ANSWER_S
        if turn < len(sessions[number].turns) - 1:
            heapq.heappush(coming, (free_s + sessions[number].pauses_s[turn], number, turn + 1))
    tree.settle()
    return found, mean(ttft_s)


def measure(run: Run) -> Iterator[Line]:
    """A line for each seed, share and policy."""
    options = run.options
    for seed in options.seeds:
        sessions = trace(options.sessions, options.turns, options.load, options.pause, seed)
        needed = needed_bytes(sessions)
        for share in options.shares:
            for policy in run.bar(list(POLICIES), "policy"):
                found, ttft_s = replay(sessions, policy, share * needed, options.window)
                yield {
                    "policy": policy,
                    "share": share,
                    "seed": seed,
                    "sessions": options.sessions,
                    "mean_turns": options.turns,
                    "load": options.load,
                    "pause": options.pause,
                    "window": options.window,
                    "needed_tokens": needed,
                    "hit_rate": found.found / max(1, found.asked),
                    "whole_rate": found.whole / max(1, found.turns),
                    "most_waiting": found.most_waiting,
                    "ttft_s": ttft_s,
                }


def table(found: list[Line]) -> str:
    """Hit rates by share of what is needed, over all seeds."""
    rows: Rows = [("host memory", "policy", "tokens found", "turns that found all", "TTFT", "longest queue")]
    settings = newest(found, "share", "policy")
    for share, policy in settings:
        lines = [line for line in found if (line["share"], line["policy"]) == (share, policy)]
        fifo_s = mean(line["ttft_s"] for line in found if (line["share"], line["policy"]) == (share, "FIFO"))
        rows.append(
            (
                f"{share:.0%} of {mean(line['needed_tokens'] for line in lines):,.0f} tokens",
                str(policy),
                f"{mean(line['hit_rate'] for line in lines):.0%}",
                f"{mean(line['whole_rate'] for line in lines):.0%}",
                f"{mean(line['ttft_s'] for line in lines) / fifo_s:.2f} of FIFO's",
                str(max(line["most_waiting"] for line in lines)),
            )
        )
    return text_table(rows, left=(0, 1))


STUDY = Study(
    name="prefixes.sessions",
    text=__doc__,
    has="policy",
    measure=measure,
    table=table,
    options={
        "sessions": option(400),
        "turns": option(5.75, "mean number of turns of a session"),
        "load": option(0.5, "share of the time in which a server is busy that finds everything"),
        "pause": option(20.0, "mean pause, in mean seconds of a turn"),
        "shares": option([0.2, 1 / 3, 0.5], "of what is needed at most, in host memory"),
        "window": option(16, "turns that wait which the tree is told of"),
        "seeds": option([0, 1, 2]),
    },
    replaces=True,
)

if __name__ == "__main__":
    STUDY.main()
