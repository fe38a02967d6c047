"""Program that makes a table of gates for DuoAttention: `python -m policies.duo_gates --help`."""

# Legend: B batch, N query heads, K kv heads, C tokens of a text, D model dim, H key dim, V value dim.

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from launch.inputs.sample_text import sample_ids
from launch.inputs.text_files import EXAMPLE_TEXT
from launch.program.compose import Program, model_help
from launch.program.run import run_program
from runahead.config import ModelOptions, RanksOptions, choice

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor

    from launch.program.progress import Bar
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python -m policies.duo_gates out=<folder> [name=value ...]     (one rank)

Finds which KV heads of a model need to see all tokens, and writes a gate of each into full_attention_heads.tsv and
config.json, the format of DuoAttention's authors. policy=duo_attention policy.heads=<folder> keeps all tokens in the
heads with the largest gates. The folder is valid for this model only.

  by=optimising|kvzip       optimising: gates mix attention to all tokens with attention to the first and last ones, and
                            are trained so that the last hidden states stay what they are where passkeys are answered,
                            and gates become small; kvzip: a gate is the largest score that the policy kvzip gives to
                            any token of the sample, which takes a few forwards
  sample=<text in UTF-8>    by default {EXAMPLE_TEXT}
  tokens=512                tokens of a text
  sinks=16   recent=64      first and last tokens that are seen without a gate; also written into config.json
  seed=0                    of where texts begin, and of passkeys
  samples=4                 texts, for by=kvzip
  steps=100   learning_rate=0.02   penalty=0.05   of the mean gate      for by=optimising
  passkeys=4   words=8      of a text, and tokens of each               for by=optimising
{model_help()}
  ranks.device=auto|cuda|cpu   ranks.threads=<n>

  python -m policies.duo_gates model=smollm2 by=kvzip out=gates-smollm2
"""


class GatesMethod(Enum):
    optimising = "optimising"
    kvzip = "kvzip"


@dataclass(kw_only=True)
class GatesRun:
    """Options of launch/duo_gates.py.

    Attributes:
        model, ranks: model, and device.
        by: how gates are found.
        sample: text in UTF-8; None: the one in examples/.
        tokens: number of tokens of a text.
        sinks, recent: number of first and last tokens that streaming heads see.
        seed: of where texts begin, and of passkeys.
        samples: number of texts, by KVzip.
        steps, learning_rate: of the optimiser, a text per step.
        penalty: weight of the mean gate in what is minimised.
        passkeys, words: number of passkeys in a text, and of tokens of each.
        out: folder that is written.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    by: GatesMethod = GatesMethod.optimising
    sample: str | None = None
    tokens: int = 512
    sinks: int = 16
    recent: int = 64
    seed: int = 0
    samples: int = 4
    steps: int = 100
    learning_rate: float = 0.02
    penalty: float = 0.05
    passkeys: int = 4
    words: int = 8
    out: str | None = None

    def __post_init__(self) -> None:
        self.by = choice("by", GatesMethod, self.by)
        if not self.out:
            raise ValueError("out=<folder> is needed: where the table of gates goes")
        least = {"tokens": 1, "sinks": 0, "recent": 1, "samples": 1, "steps": 1, "passkeys": 1, "words": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {number}")
        if self.sinks + self.recent >= self.tokens:
            raise ValueError(
                f"tokens={self.tokens} must be more than the sinks={self.sinks} and recent={self.recent} tokens that "
                "all heads see; raise tokens"
            )
        for name in ("learning_rate", "penalty"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a number of at least 0")


GATES = Program(module="policies.duo_gates", options=GatesRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(GATES, args, write_gates)


def write_gates(run: GatesRun, ranks: Ranks) -> None:
    """Find the gates and write the folder.

    Raises: ValueError and OSError for a user's mistakes.
    """
    from launch.program.progress import Bar
    from policies.duo_table import DuoTable
    from runahead.files import write_whole
    from runahead.model.shares import load_model

    ids = ranks.on_rank_0("the options", lambda: _prepare(run, ranks))
    model = load_model(run.model, ranks)
    with Bar(f"gates by {run.by.name}", shown=True) as bar:
        found = by_kvzip(model, ids, run, bar) if run.by is GatesMethod.kvzip else by_optimising(model, ids, run, bar)
    table = DuoTable(gates=found, sinks=run.sinks, recent=run.recent, fingerprint=model.fingerprint)
    about = {"by": run.by.name, "tokens": run.tokens, "model_name": model.name}
    if run.by is GatesMethod.optimising:
        about |= {"num_steps": run.steps, "lr": run.learning_rate, "reg_weight": run.penalty}
    assert run.out is not None
    Path(run.out).mkdir(exist_ok=True)
    for name, content in table.files(**about).items():
        write_whole(os.path.join(run.out, name), content)
    high = sum(int((gates_K >= 0.5).sum()) for gates_K in found)
    print(f"{run.out}: gates of {sum(map(len, found))} KV heads in {len(found)} layers, {high} of them at least 0.5")


def _prepare(run: GatesRun, ranks: Ranks) -> list[int]:
    """Token ids of the sample, after all checks that do not need the model's weights."""
    GATES.require_one_rank(ranks.size, "gates are found")
    assert run.out is not None
    folder = Path(os.path.realpath(run.out))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out={run.out} is a file; name a folder")
    if not folder.parent.is_dir():
        raise ValueError(f"out={run.out}: there is no folder {folder.parent}; create it first")
    return sample_ids(run.model, run.sample, run.tokens)


def by_kvzip(model: Model, ids: Sequence[int], run: GatesRun, bar: Bar | None = None) -> list[Tensor]:
    """Largest score of KVzip (K) by layer, over all tokens but the first `run.sinks` of some texts; 0 under windows.

    As KVzip's authors rank heads (arXiv 2505.23416). The first tokens are left out, since all heads attend to them.
    """
    from random import Random

    import torch

    from policies.kvzip import KVzip
    from runahead.cache.attention import CausalAttention
    from runahead.cache.kept_cache import KeptCache
    from runahead.thinning.replay import score_prompt

    policy, random = KVzip(sinks=min(run.sinks, 4)), Random(run.seed)
    gates = [torch.zeros(shape.num_kv_heads) for shape in model.kv_shapes]
    for _ in range(run.samples):
        start = random.randint(0, len(ids) - run.tokens)
        ids_1S = torch.tensor([list(ids[start : start + run.tokens])], device=model.device)
        with torch.inference_mode():
            kept = KeptCache.empty(model.kv_shapes, batch=1, device=model.device)
            model.forward(ids_1S, CausalAttention(kept, start=0, pads=[0]), start=0, pads=[0])
            for layer, scores_1Kn in enumerate(score_prompt(model, policy, kept, ids_1S, [0])):
                if scores_1Kn is not None:
                    best_K = scores_1Kn[0, :, run.sinks :].amax(dim=-1).float().cpu()
                    gates[layer] = torch.maximum(gates[layer], best_K)
        if bar is not None:
            bar.advance(1 / run.samples)
    return gates


def by_optimising(model: Model, ids: Sequence[int], run: GatesRun, bar: Bar | None = None) -> list[Tensor]:
    """Gates (K) by layer that are trained against the model with all of its attention (Sec. 2.2 of the paper).

    A gate g makes attention g * full + (1 - g) * streaming. What is minimised is the mean squared difference of the
    last hidden states where passkeys are answered, plus `run.penalty` times the mean gate.

    Raises:
        ValueError: a text has no room for passkeys, or gates cannot be trained through this model's attention.
    """
    from random import Random

    import torch

    from runahead.attention.gated import GatedAttention
    from runahead.model.layers.fusing import apart

    random = Random(run.seed)
    gates = [torch.ones(shape.num_kv_heads, device=model.device, requires_grad=True) for shape in model.kv_shapes]
    optimiser = torch.optim.AdamW(gates, lr=run.learning_rate, weight_decay=0.0)
    model.module.requires_grad_(False)
    for _ in range(run.steps):
        text, answers = passkey_text(model, ids, run, random)
        ids_1C, answers_A = torch.tensor([text], device=model.device), torch.tensor(answers, device=model.device)
        with torch.no_grad(), apart(model.module):  # as with gradients: else they would round unlike
            expected_AD = model.hidden_states(ids_1C, GatedAttention(None))[0, answers_A]
        gated = GatedAttention(gates, sinks=run.sinks, recent=run.recent)
        found_AD = model.hidden_states(ids_1C, gated)[0, answers_A]
        loss = (found_AD.float() - expected_AD.float()).square().mean()
        loss = loss + run.penalty * torch.cat(gates).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for gates_K in gates:
                gates_K.clamp_(0, 1)
        if bar is not None:
            bar.say(f"loss {float(loss.detach()):.4f}, mean gate {float(torch.cat(gates).detach().mean()):.2f}")
            bar.advance(1 / run.steps)
    return [gates_K.detach().cpu() for gates_K in gates]


def passkey_text(model: Model, ids: Sequence[int], run: GatesRun, random: Random) -> tuple[list[int], list[int]]:
    """Token ids of a text of `run.tokens` with passkeys in it, which are asked for and answered at its end.

    Returns:
        the ids, and the indices of the tokens at which the answers are predicted.

    Raises:
        ValueError: there is no room for them.
    """
    said = [[*_ids(model, f"\nRemember passkey {i + 1}:"), *random.sample(ids, run.words)] for i in range(run.passkeys)]
    asked = [_ids(model, f"\nWhat was passkey {i + 1}? It was:") for i in range(run.passkeys)]
    filler = run.tokens - sum(map(len, said)) - sum(map(len, asked)) - run.passkeys * run.words
    if filler < run.passkeys + run.sinks:
        raise ValueError(
            f"tokens={run.tokens} has no room for passkeys={run.passkeys} of words={run.words} tokens; raise tokens"
        )
    start = random.randint(0, len(ids) - filler)
    places = sorted(random.randint(run.sinks, filler) for _ in range(run.passkeys))
    text: list[int] = []
    for passkey, first, last in zip(said, [0, *places], places, strict=False):
        text += [*ids[start + first : start + last], *passkey]
    text += ids[start + places[-1] : start + filler]
    answers = list[int]()
    for i in random.sample(range(run.passkeys), run.passkeys):
        text += [*asked[i], *said[i][-run.words :]]
        answers += range(len(text) - run.words - 1, len(text) - 1)
    return text, answers


def _ids(model: Model, text: str) -> list[int]:
    found: list[int] = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found
