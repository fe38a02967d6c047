"""Time to first token on all ranks against one of them, in turn (A B A B), on the same prompt.

    torchrun --nproc-per-node=2 benchmarks/prefill_speedup.py --tokens 4096 --ratios 0.58 0.6 --pairs 5

Says the bound first, prints medians and ratios, and appends a JSON line per split to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runahead import (  # noqa: E402
    Engine,
    GenerationOptions,
    Model,
    ModelOptions,
    PrefillOptions,
    Ranks,
    RanksOptions,
    from_ratios,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.6], help="shares of the first of two ranks")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each variant")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of a rank")
    parser.add_argument("--transfer", default="relay", choices=["relay", "direct"])
    options = parser.parse_args()

    with Ranks.start(RanksOptions(threads=options.threads)) as ranks:
        if ranks.size != 2:
            raise SystemExit("two ranks are compared with one; use torchrun --nproc-per-node=2")
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.vocab_size, (options.tokens,), generator=generator).tolist()
        one_token = GenerationOptions(max_new_tokens=1)
        single = Engine(model, ranks, prefill=PrefillOptions(name="single"))
        splits = {
            ratio: Engine(
                model,
                ranks,
                prefill=PrefillOptions(transfer=options.transfer),
                partition=from_ratios([ratio, 1 - ratio]),
            )
            for ratio in options.ratios
        }
        if ranks.rank == 0:
            print(f"bound: 2.00x one rank, {ranks.size} ranks with {options.threads} thread(s) each")
        for engine in (single, *splits.values()):
            engine.generate([ids[:512]], one_token)

        single_s, split_s = [], {ratio: [] for ratio in splits}
        for _ in tqdm(range(options.pairs), disable=ranks.rank != 0, unit="pair"):
            single_s.append(single.generate([ids], one_token).ttft_s)
            for ratio, engine in splits.items():
                split_s[ratio].append(engine.generate([ids], one_token).ttft_s)
        if ranks.rank == 0:
            report(options, model, single_s, split_s)


def report(options: argparse.Namespace, model: Model, single_s: list[float], split_s: dict[float, list[float]]) -> None:
    """Print the comparison and append its lines."""
    print(f"one rank: median {statistics.median(single_s):.2f} s, {min(single_s):.2f} to {max(single_s):.2f} s")
    results = ROOT / "benchmarks" / "results" / "prefill_speedup.jsonl"
    with results.open("a") as file:
        for ratio, seconds in split_s.items():
            speedups = [one / two for one, two in zip(single_s, seconds, strict=True)]
            speedup = statistics.median(speedups)
            print(
                f"split {ratio:g}: median {statistics.median(seconds):.2f} s, speed-up {speedup:.3f} "
                f"({min(speedups):.3f} to {max(speedups):.3f}, n={len(speedups)}), {speedup / 2:.1%} of the bound"
            )
            line = {
                "date": time.strftime("%Y-%m-%d"),
                "commit": commit(),
                "model": model.name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "tokens": options.tokens,
                "threads": options.threads,
                "transfer": options.transfer,
                "ratio": ratio,
                "single_s": single_s,
                "split_s": seconds,
                "median_speedup": speedup,
                "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            }
            file.write(json.dumps(line) + "\n")


def commit() -> str | None:
    """Of the checkout, with a mark if it was changed since."""
    run = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or None


if __name__ == "__main__":
    main()
