"""How much does speculation gain, what does it cost where it cannot gain, and are its tokens the same?

    python -m benchmarks.studies.speculation --tokens 2000 --new 128

Three prompts of a length, one at a time on one thread: `repeats` begins a passage anew that it has had twice, so that
the answer, greedy, is the passage; `greedy` is plain text that the model goes on with greedily, where small models
often repeat themselves; `sampled` is plain text that it goes on with by sampling, where look-up seldom finds anything.
Each is answered without speculation (`none`), with it (`lookup`) and with every draft verified (`lookup always`), in
turn, round after round (A B C A B C). With `--drafts policy` the model drafts over the share `--budget` of its keys
and values, which `--policy` keeps (snapkv) or retrieves for each token (quest); with `policy lookup` look-up drafts for
that draft. Times are those per token after the first.

Then as many plain prompts as `--prompts` says are answered greedily without and with it, and all tokens are compared.
Where they differ first, the two largest log-probabilities at that place say how close the model's choice was.

With `--costs` a plain step, verifications and a drafted token of quest are timed at these lengths, also beyond the
model's context, over random keys and values. The table says which gains they allow at acceptance rates.

Appends JSON lines to benchmarks/results/speculation.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_samples import EXAMPLE, samples, text_ids
from benchmarks.harness.text_table import Rows
from benchmarks.studies.speculation.costs import costs, costs_table
from launch.program.text_table import text_table
from policies.quest import Quest
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks
from runahead.config import Device, DType, RanksOptions, Speculate
from runahead.decoding.speculative.speculator import Draft
from runahead.report import GenerationBatch, SpeculationReport
from runahead.thinning.rank_policies import RankPolicies

BEGUN_TOKENS = 24
"""Tokens of a passage with which its third time begins."""


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and text, and one of the comparison of tokens."""
    options = run.options
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    model = Model.load(ModelOptions(dtype=DType[options.dtype]), ranks.device)
    policy = Quest(fetch=options.budget) if options.policy == "quest" else SnapKV(budget=options.budget)
    draft = RankPolicies.everywhere([policy])
    engine = Engine(model, ranks, draft=draft)
    engine_of = dict.fromkeys(("none", "lookup", "policy"), engine)
    engine_of["policy lookup"] = Engine(model, ranks, draft=Draft(by=draft, first="lookup"))
    ids = text_ids(model, options.text)
    common = {"model": model.name, "dtype": options.dtype, "new": options.new}
    if "policy" in " ".join(options.drafts) or options.costs:
        common |= {"policy": options.policy, "budget": options.budget}
    for num_tokens in options.costs:
        if not isinstance(policy, Quest):
            raise SystemExit("--costs times a policy that retrieves; add --policy quest")
        yield common | {"text": "costs", "tokens": num_tokens} | costs(run, model, policy, num_tokens)
    for num_tokens in options.tokens if options.rounds else []:
        for text, (prompt, generation) in _prompts(ids, num_tokens, options.new).items():
            line = common | {"text": text, "tokens": num_tokens}
            yield line | _gain(run, engine_of, prompt, generation)
    if options.prompts:
        same = common | {"text": "prompts", "tokens": options.sample}
        found = list(samples(ids, options.prompts, options.sample, option=f"--text {options.text}"))
        for number, (_, prompt) in enumerate(run.bar(found, "prompt")):
            if not run.has(line := same | {"number": number}):
                yield line | _same_tokens(run, engine, prompt)


def _prompts(ids: list[int], num_tokens: int, num_new: int) -> dict[str, tuple[list[int], GenerationOptions]]:
    """The texts of a length, each with how it is gone on with; those alone for which there are tokens enough.

    Raises:
        SystemExit: the text is too short.
    """
    num_passage = (num_tokens - BEGUN_TOKENS) // 2
    if len(ids) < num_passage:
        raise SystemExit(
            f"--text has {len(ids)} tokens, and --tokens {num_tokens} needs half as many; use a longer one"
        )
    passage = ids[:num_passage]
    greedy = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    prompts = {"repeats": ([*passage, *passage, *passage[:BEGUN_TOKENS]], greedy)}
    if len(ids) >= num_tokens:
        plain = ids[-num_tokens:]
        prompts |= {"greedy": (plain, greedy), "sampled": (plain, replace(greedy, do_sample=True))}
    return prompts


def _ways(generation: GenerationOptions, drafts: Sequence[str]) -> dict[str, GenerationOptions]:
    ways = {"none": generation}
    for name in drafts:
        speculating = replace(generation, speculate=Speculate[name.split()[0]])
        ways |= {name: speculating, f"{name} always": replace(speculating, speculate_always=True)}
    return ways


def _gain(run: Run, engine_of: Mapping[str, Engine], prompt: list[int], generation: GenerationOptions) -> Line:
    """Seconds per token of each way, and what the last answer of each reported."""
    last: dict[str, GenerationBatch] = {}

    def turn(name: str, options: GenerationOptions) -> Callable[[int], float]:
        engine = engine_of[name.removesuffix(" always")]

        def seconds(number: int) -> float:
            last[name] = engine.generate([prompt], options)
            tpot_s = last[name].tpot_s
            assert tpot_s is not None, "--new is at least 2"
            return tpot_s

        return seconds

    turns = {name: turn(name, options) for name, options in _ways(generation, run.options.drafts).items()}
    tpot_s = run.in_turn(turns, run.options.rounds, warmup=1)
    expected = last["none"].generations[0].new_token_ids
    return {
        "tpot_s": tpot_s,
        "same_tokens": {name: batch.generations[0].new_token_ids == expected for name, batch in last.items()},
        "speculation": {name: asdict(_report(batch)) for name, batch in last.items() if name != "none"},
    }


def _report(batch: GenerationBatch) -> SpeculationReport:
    [report] = [rank.speculation for rank in batch.ranks]
    assert report is not None
    return report


def _same_tokens(run: Run, engine: Engine, prompt: list[int]) -> Line:
    """How far apart the two largest log-probabilities are where two answers differ first; None if they do not."""
    greedy = GenerationOptions(max_new_tokens=run.options.new, ignore_eos=True, logprobs=2)
    plain, drafted = (
        engine.generate([prompt], each) for name, each in _ways(greedy, ["lookup"]).items() if name != "lookup"
    )
    [one], [other] = plain.generations, drafted.generations
    assert one.logprobs is not None
    pairs = zip(one.new_token_ids, other.new_token_ids, one.logprobs, strict=True)
    differing = [at.top[0][1] - at.top[1][1] for theirs, ours, at in pairs if theirs != ours]
    return {"gap": differing[0] if differing else None, "accepted": _report(drafted).accepted}


def table(found: list[Line]) -> str:
    """A row per length, text and way of the last runs, and a sentence on the tokens."""
    rows: Rows = [
        (
            "tokens",
            "text",
            "dtype",
            "way",
            "tokens/s",
            "gain",
            "from",
            "to",
            "accepted",
            "a draft",
            "verified",
            "drafted",
            "left out",
        )
    ]
    sentences, timed = list[str](), list[Line]()
    found = [{"policy": None, "budget": None, "number": None} | line for line in found]
    names = "model", "dtype", "new", "text", "tokens", "policy", "budget", "number"
    compared: dict[tuple[str, int, int], list[Line]] = {}
    for line in newest(found, *names).values():
        if line["text"] == "costs":
            timed.append(line)
            continue
        if line["text"] == "prompts":
            if line["number"] is not None:  # a line of an earlier version is of all prompts
                compared.setdefault((line["dtype"], line["new"], line["tokens"]), []).append(line)
            continue
        for name, seconds in line["tpot_s"].items():
            gains = [none / own for none, own in zip(line["tpot_s"]["none"], seconds, strict=True)]
            rows.append(
                (
                    f"{line['tokens']:,}",
                    line["text"],
                    line["dtype"],
                    name,
                    f"{1 / median(seconds):.1f}",
                    *(f"{each:.2f}" for each in (median(gains), min(gains), max(gains))),
                    *_figures(line["speculation"].get(name), line["tpot_s"]["none"]),
                )
            )
    for (dtype, num_new, num_tokens), lines in compared.items():
        gaps = [line["gap"] for line in lines if line["gap"] is not None]
        largest = f", where the two largest log-probabilities are at most {max(gaps):.1e} apart" if gaps else ""
        sentences.append(
            f"{len(lines)} prompts of {num_tokens} tokens in {dtype}, {num_new} greedy tokens each: {len(gaps)} "
            f"answers differ{largest}; {sum(line['accepted'] for line in lines):,} drafted tokens were accepted."
        )
    tables = (text_table(rows) if len(rows) > 1 else "", costs_table(timed) if timed else "")
    return "\n\n".join(part for part in (*tables, *sentences) if part)


def _figures(report: Mapping[str, float | list[int]] | None, plain_s: Sequence[float]) -> tuple[str, ...]:
    """Share of drafted tokens that were accepted, and number per draft; costs in plain steps of a verification and of a
    drafted token; drafts that were left out.
    """
    if report is None:
        return ("",) * 5
    lengths = report["accepted_lengths"]
    assert isinstance(lengths, list)
    drafted, accepted, verifications, verify_s, draft_s, declined = (
        float(report[name])  # type: ignore[arg-type]  # only the lengths are a list
        for name in ("drafted", "accepted", "verifications", "verify_s", "draft_s", "declined")
    )
    if not drafted:
        return ("-", "-", "-", "-", f"{declined:.0f}")
    costs = (seconds / median(plain_s) for seconds in (verify_s / verifications, draft_s / drafted))
    return (
        f"{accepted / drafted:.0%}",
        f"{accepted / sum(lengths):.1f}",
        *(f"{cost:.2f}" for cost in costs),
        f"{declined:.0f}",
    )


STUDY = Study(
    name="speculation",
    text=__doc__,
    has="text",
    measure=measure,
    table=table,
    key=("model", "dtype", "new", "text", "tokens", "number"),
    options={
        "tokens": option([2000], "of each prompt"),
        "drafts": option(["lookup"], "who drafts", choices=["lookup", "policy", "policy lookup"]),
        "policy": option("snapkv", "from what the model drafts", choices=["snapkv", "quest"]),
        "budget": option(0.1, "share of the prompt's tokens that a policy drafts from"),
        "costs": {"type": int, "nargs": "*", "default": [], "help": "lengths whose steps are timed alone, of quest"},
        "new": option(128, "tokens that are generated"),
        "rounds": option(5, "0 times no answers"),
        "prompts": option(50, "that are compared token by token; 0 compares none"),
        "sample": option(100, "tokens of each of these"),
        "dtype": option("float32", "of the model", choices=["float32", "bfloat16"]),
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
    },
)

if __name__ == "__main__":
    STUDY.main()
