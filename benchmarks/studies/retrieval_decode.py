"""Time per token while decoding, over the prompt's length: retrieving policies against the full cache.

    python -m benchmarks.studies.retrieval_decode --lengths 1024 2048 4096 8192
    python -m benchmarks.studies.retrieval_decode --draw-only

The bound is in bytes, since a step of one token reads each of them once: weights and all K,V for the full cache;
weights, the query projections once more for predictions, partial keys, and the K,V that were fetched. Its gain is the
ratio of the two, and what is printed beside a measured gain is the share of it that was reached.

Policies take turns, a few tokens each, round after round. Appends a JSON line per length and policy to
benchmarks/results/retrieval_decode.jsonl and draws docs/retrieval_decode.png from these lines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.studies.retrieved_prompt import FullCache, RetrievedPrompt
from partitioner.table.fingerprint import now
from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.quest import Quest
from runahead import Model, ModelOptions
from runahead.conversation import Conversation
from runahead.files import write_whole
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title, tokens
from runahead.ranks.devices import keep_freed_memory
from runahead.retrieval.cache import RetrievedCache

RESULTS = ROOT / "benchmarks" / "results" / "retrieval_decode.jsonl"
PICTURE = ROOT / "docs" / "retrieval_decode.png"
FULL = "full"
POLICIES: dict[str, Callable[[], Policy]] = {
    "infinigen": InfiniGen,
    "infinigen, predicted": lambda: InfiniGen(ahead=True),
    "quest, 10%": lambda: Quest(fetch=0.1),
    "exact top-k, 10%": lambda: ExactTopK(fetch=0.1),
    "offload": Offload,
}
LOOKS = {
    FULL: (INK, "o"),
    "infinigen": (ACCENT, "D"),
    "infinigen, predicted": ("#0072b2", "s"),
    "quest, 10%": ("#009e73", "^"),
    "exact top-k, 10%": ("#e69f00", "v"),
    "offload": (MUTED, "h"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    parser.add_argument("--tokens", type=int, default=8, help="of one turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES), metavar="POLICY")
    parser.add_argument("--text", default=str(ROOT / "examples" / "frankenstein_letters.txt"))
    parser.add_argument("--draw-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.draw_only:
        measure(options)
    found = lines.read(RESULTS, option="results", kind="policy")
    if not found:
        raise SystemExit(f"{RESULTS.relative_to(ROOT)} has no lines yet; leave --draw-only out")
    latest = latest_run(found)
    write_whole(PICTURE, picture(latest))
    print(table(latest))


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as the runtime does
    model = Model.load(ModelOptions(), torch.device("cpu"))
    text = model.tokenizer(Path(options.text).read_text(encoding="utf-8"), verbose=False).input_ids
    about = {"model": model.name, "commit": machine.commit(), "code": machine.code(), "date": now()}
    bar = tqdm(total=len(options.lengths) * options.rounds * (1 + len(options.policies)), unit="turn", disable=None)
    for length in options.lengths:
        ids = (text * (length // len(text) + 1))[:length]  # time does not depend on what it says
        prompt = RetrievedPrompt(model, ids)
        conversations = {name: prompt.under(POLICIES[name]()) for name in options.policies}
        room = options.tokens * (options.rounds + 1)
        full = FullCache(prompt.under(Offload()), room)
        turns: dict[str, Callable[[Tensor], Tensor]] = {FULL: full.follow}
        turns |= {name: conversation.follow for name, conversation in conversations.items()}
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(options.rounds + 1):
            start = 50 + number * options.tokens
            ids_1C = torch.tensor([ids[start : start + options.tokens]])
            for name, follow in turns.items():
                began_s = time.perf_counter()
                follow(ids_1C)
                if number:  # the first turn warms up
                    seconds[name].append((time.perf_counter() - began_s) / options.tokens)
                    bar.update()
        measured = []
        for name in turns:
            num_bytes = full_bytes(model, length) if name == FULL else bytes_of(model, conversations[name])
            measured.append(
                about
                | {"policy": name, "length": length, "tpot_s": seconds[name], "bytes": num_bytes}
                | ({} if name == FULL else {"fetched_share": fetched_share(conversations[name])})
            )
        lines.append(RESULTS, measured)
    bar.close()


def full_bytes(model: Model, length: int) -> int:
    """That one step reads with the full cache."""
    return weight_bytes(model) + length * sum(shape.bytes_per_token() for shape in model.kv_shapes)


def weight_bytes(model: Model) -> int:
    """Of every matrix that a token is multiplied with; an embedding that is tied to the output counts once."""
    parameters = {parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}
    embedding = model.module.get_input_embeddings().weight
    tied = embedding.data_ptr() == model.module.get_output_embeddings().weight.data_ptr()
    return sum(parameters.values()) - (0 if tied else embedding.nbytes)


def bytes_of(model: Model, conversation: Conversation) -> int:
    """That one step reads under a retrieving policy: as the full cache where a layer attends to everything."""
    assert isinstance(conversation.cache, RetrievedCache)
    retrieval, total = conversation.cache.retrieval, weight_bytes(model)
    shares = retrieval.report().fetched_share
    for layer, (shape, found, share) in enumerate(zip(model.kv_shapes, retrieval.layers, shares, strict=True)):
        kept = conversation.cache.layers[layer]
        total += int(kept.num_slots * shape.bytes_per_token() * (1.0 if share is None else share))
        if found is not None:
            total += found.index.num_bytes
            if isinstance(retrieval.policy, ExactTopK):
                total += kept.num_slots * shape.num_kv_heads * shape.key_dim * shape.dtype.itemsize
            if retrieval.policy.looks_ahead_on(model.device) and retrieval.policy.asks:
                heads = model.config.num_attention_heads
                total += model.config.hidden_size * heads * shape.key_dim * shape.dtype.itemsize
    return total


def fetched_share(conversation: Conversation) -> float:
    """Mean over all layers, those that attend to everything among them."""
    assert isinstance(conversation.cache, RetrievedCache)
    shares = conversation.cache.retrieval.report().fetched_share
    return sum(1.0 if share is None else share for share in shares) / len(shares)


def latest_run(found: list[Line]) -> dict[int, dict[str, Line]]:
    """Lines by length and policy: of every length those that were measured last, in turn."""
    dates = {line["length"]: line["date"] for line in found}
    latest: dict[int, dict[str, Line]] = {}
    for line in found:
        if line["date"] == dates[line["length"]]:
            latest.setdefault(line["length"], {})[line["policy"]] = line
    return dict(sorted(latest.items()))


def gain(full: Line, line: Line) -> float:
    """Full cache's time over a policy's, the median of the rounds' ratios."""
    return median(a / b for a, b in zip(full["tpot_s"], line["tpot_s"], strict=True))


def table(latest: dict[int, dict[str, Line]]) -> str:
    rows = [f"{'tokens':>7}  {'policy':<24} {'ms a token':>10}  {'gain':>5}  {'bound':>5}  {'reached':>7}  fetched"]
    for length, by_policy in latest.items():
        full = by_policy[FULL]
        for name, line in by_policy.items():
            bound, reached = full["bytes"] / line["bytes"], "-"
            if name != FULL and bound > 1.1:
                reached = f"{(gain(full, line) - 1) / (bound - 1):.0%}"
            share = f"{line['fetched_share']:.1%}" if "fetched_share" in line else "100%"
            rows.append(
                f"{length:>7,}  {name:<24} {1e3 * median(line['tpot_s']):>10.1f}  {gain(full, line):>5.2f}  "
                f"{bound:>5.2f}  {reached:>7}  {share}"
            )
    return "\n".join(rows)


def picture(latest: dict[int, dict[str, Line]]) -> bytes:
    figure = new_figure(10.4, 4.4)
    left, right = panels(figure, 2, 1, 2)
    names = [name for name in LOOKS if any(name in by_policy for by_policy in latest.values())]
    for name in names:
        colour, marker = LOOKS[name]
        points = [(length, by_policy) for length, by_policy in latest.items() if name in by_policy]
        x = [length for length, _ in points]
        left.plot(x, [1e3 * median(by[name]["tpot_s"]) for _, by in points], color=colour, marker=marker, label=name)
        if name != FULL:
            right.plot(x, [gain(by[FULL], by[name]) for _, by in points], color=colour, marker=marker)
            right.plot(x, [by[FULL]["bytes"] / by[name]["bytes"] for _, by in points], color=colour, linestyle=":")
    right.axhline(1.0, color=MUTED, linewidth=1, linestyle="--")
    dress(left, title="Time per token", x="tokens in the cache", y="ms")
    dress(right, title="Full cache's time over it; dotted: by bytes alone", x="tokens in the cache", y="times faster")
    left.set_ylim(0)
    for axes in (left, right):
        axes.set_xticks(list(latest), [tokens(length) for length in latest])
    left.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    some: dict[str, Any] = next(iter(next(iter(latest.values())).values()))
    set_title(figure, "Decoding with K,V that are retrieved", f"{some['model']}, one CPU thread")
    return png(figure)


if __name__ == "__main__":
    main()
