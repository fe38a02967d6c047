"""Program that finds a model's retrieval heads, for RazorAttention: `python -m policies.retrieval_heads --help`."""

# Legend: N query heads, K kv heads, G = N / K, C new tokens, S tokens so far, q queries of them, H head dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launch.program.compose import Program, model_help
from launch.program.run import run_program
from runahead.config import ModelOptions, RanksOptions

if TYPE_CHECKING:
    from torch import Tensor

    from launch.program.progress import Bar
    from policies.head_scores import HeadScores
    from runahead.attention.partial import AttentionTerms
    from runahead.cache.base import SeenKV
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python -m policies.retrieval_heads out=<file.safetensors> [name=value ...]     (one rank)

Runs a model on random tokens that come several times, and measures how much each head attends to earlier copies of a
token (echo) and to the tokens after them (induction). policy=razor_attention policy.heads=<file> keeps all tokens in
the heads that do it most. The file is valid for this model only.

  tokens=500                different random tokens; no special tokens among them
  copies=4                  how often they come; tokens x copies must fit into the model's positions
  seed=0                    of the random tokens
  chunk=512                 tokens that are computed at a time
{model_help()}
  ranks.device=auto|cuda|cpu   ranks.threads=<n>

  python -m policies.retrieval_heads model=smollm2 out=heads-smollm2.safetensors
"""


@dataclass(kw_only=True)
class HeadsRun:
    """Options of launch/retrieval_heads.py.

    Attributes:
        model, ranks: model, and device.
        tokens: number of different random tokens.
        copies: how often they come.
        seed: of the random tokens.
        chunk: number of tokens that are computed at a time.
        out: file that is written.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    tokens: int = 500
    copies: int = 4
    seed: int = 0
    chunk: int = 512
    out: str | None = None

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out=<file.safetensors> is needed: where the scores of the heads go")
        for name, least in (("tokens", 2), ("copies", 2), ("chunk", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


HEADS = Program(module="policies.retrieval_heads", options=HeadsRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """The exit status of `run_program`."""
    return run_program(HEADS, args, write_scores)


def write_scores(run: HeadsRun, ranks: Ranks) -> None:
    """Measure all heads and write the file.

    Raises: ValueError and OSError for a user's mistakes.
    """
    from launch.program.progress import Bar
    from runahead.files import write_whole
    from runahead.model.shares import load_model

    ranks.on_rank_0("the options", lambda: _check(run, ranks))
    model = load_model(run.model, ranks)
    with Bar("reading random tokens", shown=True) as bar:
        ids = random_ids(model, run.tokens, run.seed)
        scores = scores_of(model, ids, copies=run.copies, chunk=run.chunk, bar=bar)
    assert run.out is not None
    write_whole(run.out, scores.packed(model.fingerprint))
    best = sorted(
        ((float(score), layer, head) for layer, of in enumerate(scores.induction) for head, score in enumerate(of)),
        reverse=True,
    )
    found = ", ".join(f"{layer}.{head} ({score:.0%})" for score, layer, head in best[:8])
    print(f"{run.out}: {len(best)} query heads of {len(scores.induction)} layers; most induction: {found}")


def _check(run: HeadsRun, ranks: Ranks) -> None:
    """Check what does not need the model's weights. Raises: ValueError."""
    from launch.program.written_files import ensure_outputs
    from runahead.model import loading
    from runahead.model.loading.position_limit import max_positions

    HEADS.require_one_rank(ranks.size, "heads are measured")
    assert run.out is not None
    ensure_outputs(run, {"out": [run.out]})
    limit = max_positions(loading.load_decoder_config(run.model, progress=True))
    if limit is not None and run.tokens * run.copies > limit:
        raise ValueError(
            f"tokens={run.tokens} and copies={run.copies} are {run.tokens * run.copies} tokens, more than the model's "
            f"{limit} positions; use tokens={limit // run.copies}"
        )


def random_ids(model: Model, tokens: int, seed: int) -> list[int]:
    """Different random token ids, none of them special.

    Raises:
        ValueError: the model has fewer.
    """
    import torch

    special = set() if model.tokenizer is None else set(model.tokenizer.all_special_ids)
    usable = [token for token in range(model.vocab_size) if token not in special | model.eos_token_ids]
    if tokens > len(usable):
        raise ValueError(f"tokens={tokens} is more than the model's {len(usable)} tokens; lower it")
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))
    return [usable[at] for at in order[:tokens].tolist()]


def scores_of(model: Model, ids: Sequence[int], *, copies: int, chunk: int, bar: Bar | None = None) -> HeadScores:
    """Scores of all query heads on these tokens, which come `copies` times.

    Args:
        model: the model.
        ids: different token ids.
        copies: at least 2.
        chunk: number of tokens that are computed at a time.
        bar: progress bar.

    Raises:
        ValueError: attention depends on more than queries and keys (ALiBi), or does not see the token itself (LCKV).
    """
    import torch

    from policies.head_scores import HeadScores
    from runahead.cache.attention import CausalAttention, LayerCall, LayerHook

    if model.has_key_bias or model.runs_in_passes:
        sees = "has layers that do not see the token itself (LCKV)"
        what = "adds a bias to its attention by distance (ALiBi)" if model.has_key_bias else sees
        raise ValueError(f"model {model.name} ({model.config.model_type}) {what}, with which cache policies do not go")
    period, totals = len(ids), [torch.zeros(2, 0)] * model.num_layers

    class Measuring(LayerHook):
        """Adds up what queries give to copies, and to what follows these."""

        def closed(self, call: LayerCall) -> None:
            given_2N = to_copies(call.seen, call.terms, start=call.tokens.start, period=period).cpu()
            total_2N = totals[call.layer]
            totals[call.layer] = total_2N + given_2N if total_2N.numel() else given_2N

    num_tokens = period * copies
    cache, ids_1S = model.empty_cache(num_tokens), torch.tensor([list(ids) * copies], device=model.device)
    for start in range(0, num_tokens, chunk):
        ids_1C = ids_1S[:, start : start + chunk]
        attention = CausalAttention(cache, start=start, pads=[0], hooks=[Measuring()])
        model.forward(ids_1C, attention, start=start, pads=[0], length=num_tokens)
        if bar is not None:
            bar.advance(ids_1C.shape[1] / num_tokens)
    means = [(total_2N / (num_tokens - period)).clamp(0, 1).float() for total_2N in totals]  # rounding may exceed 1
    return HeadScores(induction=[mean_2N[0] for mean_2N in means], echo=[mean_2N[1] for mean_2N in means])


def to_copies(seen: SeenKV, terms: AttentionTerms, *, start: int, period: int) -> Tensor:
    """Attention probabilities (2, N) of what follows copies, and of the copies, summed over queries and copies.

    Args:
        seen: queries of the tokens from `start` on, and all keys up to them, of one row.
        period: number of tokens after which they come again.
    """
    import torch

    q_NCH, k_KSH, lse_NC = seen.q_BNCH[0], seen.read()[0][0], seen.lse()[0]
    num_heads, (num_kv_heads, end) = len(q_NCH), k_KSH.shape[:2]
    total_2N = torch.zeros(2, num_heads, dtype=torch.float64, device=q_NCH.device)
    if terms.rule is not None:
        return total_2N
    if terms.sinks_N is not None:
        lse_NC = torch.logaddexp(lse_NC, terms.sinks_N.to(lse_NC.dtype)[:, None])
    for back in range(period, end, period):
        first = max(start, back)  # earlier tokens have no copy that far back
        q_KGqH = q_NCH[:, first - start :].unflatten(0, (num_kv_heads, -1)).to(lse_NC.dtype)
        for kind, ahead in enumerate((1, 0)):
            k_K1qH = k_KSH[:, None, first - back + ahead : end - back + ahead].to(lse_NC.dtype)
            scores_Nq = (q_KGqH * k_K1qH).sum(dim=-1).flatten(0, 1) * terms.scaling
            if terms.softcap is not None:
                scores_Nq = terms.softcap * torch.tanh(scores_Nq / terms.softcap)
            total_2N[kind] += (scores_Nq - lse_NC[:, first - start :]).exp().sum(dim=1)
    return total_2N
