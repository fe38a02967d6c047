"""A second turn after a long prompt: its time and loss if it retrieves, beside reading all keys and values.

    python -m benchmarks.studies.retrieval.retrieved_turn --length 8000
    python -m benchmarks.studies.retrieval.retrieved_turn --draw-only

The turn repeats a passage of the prompt, so that its loss in nats per token (copy-NLL) tells whether the passage was
found. Every round is a turn with another passage, after the same prompt, in a fork of the conversation that has memory
of its own before the time begins. All policies and the one that reads everything take turns. Appends a JSON line per
policy to benchmarks/results/retrieved_turn.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import mean, median

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import compute_as_a_rank
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_samples import EXAMPLE, text_ids
from benchmarks.harness.text_table import Rows
from benchmarks.studies.retrieval_quality import nll
from benchmarks.studies.retrieved_prompt import RetrievedPrompt, fetched_share
from launch.program.text_table import text_table
from policies.base import Policy
from policies.clusterkv import ClusterKV
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.quest import Digest, Quest
from policies.retroinfer import RetroInfer
from policies.sparq import SparQ
from policies.squeezed_attention import SqueezedAttention
from runahead import Model, ModelOptions
from runahead.conversation import Conversation

ALL = "reads everything"
POLICIES: dict[str, Callable[[int], Policy]] = {
    "infinigen": lambda turn: InfiniGen(turn_tokens=turn),
    "quest, 10%": lambda turn: Quest(turn_tokens=turn, fetch=0.1),
    "quest, mean keys, 10%": lambda turn: Quest(turn_tokens=turn, fetch=0.1, digest=Digest.mean),
    "exact top-k, 10%": lambda turn: ExactTopK(turn_tokens=turn, fetch=0.1),
    "sparq, 10%": lambda turn: SparQ(turn_tokens=turn, fetch=0.1),
    "clusterkv, 10%": lambda turn: ClusterKV(turn_tokens=turn, fetch=0.1),
    "squeezed": lambda turn: SqueezedAttention(turn_tokens=turn),
    "retroinfer, 10%": lambda turn: RetroInfer(turn_tokens=turn, fetch=0.1),
}


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per policy."""
    options = run.options
    compute_as_a_rank()
    model = Model.load(ModelOptions(), torch.device("cpu"))
    ids = text_ids(model, options.text)[: options.length]
    if len(ids) < options.length:
        raise SystemExit(f"--text={options.text} has {len(ids)} tokens; use a longer text, or a smaller --length")
    prompt, size = RetrievedPrompt(model, ids), options.turn
    after = {ALL: prompt.under(Offload())} | {name: prompt.under(POLICIES[name](size)) for name in options.policies}
    firsts = [number * (options.length - size) // options.rounds for number in range(options.rounds + 1)]
    passages = [ids[first : first + size] for first in firsts]
    losses: dict[str, list[float]] = {name: [] for name in after}
    shares: dict[str, float] = {}
    for passage in passages[1:]:
        for name, conversation in after.items():
            assert conversation.logits_BV is not None
            fork = conversation.fork()
            logits_1CV = fork.feed(torch.tensor([passage]), all_logits=True)
            losses[name].append(nll(conversation.logits_BV, logits_1CV[:, :-1], passage))
            shares[name] = 1.0 if name == ALL else fetched_share(fork.cache)
    turns = {name: timed(conversation, passages) for name, conversation in after.items()}
    seconds = run.in_turn(turns, options.rounds, warmup=1)
    for name in after:
        yield {
            "model": model.name,
            "policy": name,
            "length": options.length,
            "turn": size,
            "turn_s": seconds[name],
            "all_turn_s": seconds[ALL],
            "copy_nll": losses[name],
            "fetched_share": shares[name],
        }


def timed(conversation: Conversation, passages: list[list[int]]) -> Callable[[int], float]:
    """Make a function that measures the seconds of a turn with the passage of a round."""

    def turn(number: int) -> float:
        fork = conversation.fork()
        assert fork.cache is not None
        for layer in fork.cache.layers:
            layer.copy_out(room=len(passages[number]))
        ids_1C = torch.tensor([passages[number]])
        began_s = time.perf_counter()
        fork.feed(ids_1C)
        return time.perf_counter() - began_s

    return turn


def table(found: list[Line]) -> str:
    """Rows of the last line of each policy."""
    rows: Rows = [("tokens", "turn", "policy", "ms a turn", "times faster", "copy-NLL", "fetched")]
    for line in newest(found, "length", "turn", "policy").values():
        faster = median(a / b for a, b in zip(line["all_turn_s"], line["turn_s"], strict=True))
        times = f"{1e3 * median(line['turn_s']):.0f}", f"{faster:.2f}"
        loss, share = f"{mean(line['copy_nll']):.2f}", f"{line['fetched_share']:.1%}"
        rows.append((f"{line['length']:,}", str(line["turn"]), line["policy"], *times, loss, share))
    return text_table(rows, left=(2,))


STUDY = Study(
    name="retrieval.retrieved_turn",
    text=__doc__,
    has="policy",
    measure=measure,
    table=table,
    options={
        "length": option(8000, "tokens of the first turn"),
        "turn": option(64, "tokens of the second turn"),
        "rounds": option(5),
        "policies": option(list(POLICIES), choices=list(POLICIES), metavar="POLICY"),
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
    },
)

if __name__ == "__main__":
    STUDY.main()
