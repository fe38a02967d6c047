"""Work of a rank for a combination of the golden set, by the ways in which users come: a task of a `RankPool`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from launch.inputs.options import DraftOptions, RunOptions
from launch.inputs.policies import checked, rank_policies
from launch.server.options import ServeOptions, ServeRun
from policies.reuse import GivenPrompt, ReusingPrompt, Segment, SegmentUse
from runahead import (
    CacheOptions,
    ContextPartition,
    Conversation,
    DecodeOptions,
    Engine,
    GenerationOptions,
    Model,
    PrefillOptions,
    PrefixTree,
    Ranks,
    RanksOptions,
    SegmentStore,
    ShardedConversation,
    even,
)
from runahead.config import DecodeName, PrefillName, Speculate
from runahead.context import Partitioner
from runahead.features.refused import REFUSED
from runahead.model.shares import shard_model
from runahead.report import TokenLogprobs
from runahead.serving.arrangement import chunks
from runahead.serving.executor import Executor
from runahead.serving.items import Generate, Inbox, PrefillItem, Report, Tokens
from runahead.serving.limits import QueueLimits
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, keeping, prompt, throughout
from tests.golden.combinations import POLICIES, Combination

LENGTHS = {"one": (69,), "equal": (69, 69), "padded": (69, 40, 11)}
"""Tokens of each prompt. Of the longest, a group of 32 is in few bits at once, and a second one during the answer."""

NUM_NEW, NUM_MORE, NUM_TOP, RESIDUAL, CHUNK = 6, 9, 8, 8, 24

VOCABULARY = {"vocab_size": 100, "vocab_size_per_layer_input": 100}
"""A size that two ranks can share; the second one is gemma4_text's."""

SEGMENTS = (20, 24)
"""Tokens of the two segments with which prompts begin that reuse some."""

PREFILLS = {
    "whole": PrefillOptions(),
    "chunked": PrefillOptions(name=PrefillName.single, chunk_tokens=CHUNK),
    "zigzag": PrefillOptions(name=PrefillName.zigzag),
    "tsp": PrefillOptions(name=PrefillName.tsp),
}
OTHER_REFUSALS = (
    r"transformers has no tensor-parallel plan for \w+, so ranks cannot share a model of it; .*",
    r"pads=.* must give the padding of \d rows, below \d+ tokens",
    r".* counts positions from the start of the longest prompt, so prompts of different lengths cannot run at once; .*",
)
"""Messages of refusals that are not in the table, since they depend on more than which features are combined."""

DRAFT: dict[str, Any] = {"name": "streaming_llm", "budget": 24, "sinks": 2}


class NotOffered(ValueError):
    """There is no way to ask for this."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Relative noise on all weights, by which one sees how far choices are from others."""

    size: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """New tokens of a row, and at each place the most probable tokens: (T, NUM_TOP)."""

    tokens: list[int]
    top_ids: list[list[int]]
    logprobs: list[list[float]]

    @classmethod
    def of_places(cls, places: Sequence[tuple[int, TokenLogprobs]]) -> Answer:
        return cls(
            tokens=[int(token) for token, _ in places],
            top_ids=[[each for each, _ in told.top] for _, told in places],
            logprobs=[[value for _, value in told.top] for _, told in places],
        )

    @classmethod
    def of_logits(cls, logits_V: Tensor) -> Answer:
        """The place after some tokens that are not answered."""
        values, ids = logits_V.log_softmax(dim=-1).topk(NUM_TOP)
        return cls(tokens=[int(ids[0])], top_ids=[ids.tolist()], logprobs=[values.tolist()])

    @property
    def margin(self) -> float:
        """Least distance of the most probable token to the next one."""
        return min(values[0] - values[1] for values in self.logprobs)


def arrangement(combination: Combination) -> tuple[int, int]:
    """Number of stages, and of ranks that share one."""
    stages, _, shares = combination["ranks"].partition("x")
    return int(stages), int(shares or 1)


def answers(
    ranks: Ranks,
    combination: Combination,
    seed: int,
    dtype: torch.dtype = torch.float64,
    noise: Noise | None = None,
) -> list[Answer] | str:
    """Answers of all rows, those of a second turn after those of the first one; or why they are refused.

    Every rank returns the same, but for a server's answers, which are on the rank that decodes. An error that is no
    refusal is raised.

    Args:
        seed: of the prompts.
        noise: on the weights.
    """
    ranks.arrange(arrangement(combination)[1])
    try:
        model = _model(ranks, combination["family"], dtype, ranks.num_shares, noise)
        smaller = None
        if combination["speculate"] == "model":
            smaller = _model(ranks, "llama", dtype, 1, None, num_hidden_layers=1)
        case = _Case(ranks=ranks, model=model, smaller=smaller, combination=combination, seed=seed)
        with throughout(dtype):
            return USES[combination["use"]](case)
    except NotOffered as error:
        return str(error)
    except ValueError as error:
        if not is_refusal(str(error)):
            raise
        return str(error)


def is_refusal(message: str) -> bool:
    """Whether an error is a refusal of a combination, and no mistake of the code or of the set."""
    rows = ("; ".join(part for part in (row.why, row.remedy) if part) for row in REFUSED)
    patterns = chain(OTHER_REFUSALS, (".*".join(map(re.escape, re.split(r"\{[^}]*\}", row))) for row in rows))
    return any(re.fullmatch(pattern, message) for pattern in patterns)


@cache
def _model(ranks: Ranks, family: str, dtype: torch.dtype, num_shares: int, noise: Noise | None, **sizes: Any) -> Model:
    """This rank's share of a family's model. The ranks are arranged so."""
    with throughout(dtype):  # rotary frequencies, too
        module = build(family, dtype=dtype, **VOCABULARY, **sizes)
        _redraw(module, noise)
        module.forward = keeping(module.forward, dtype)
        model = Model(module, name=family)
    if num_shares > 1:
        shard_model(model, ranks)
    _ = model.fingerprint  # in float64 throughout it would be another
    return model


@torch.no_grad()
def _redraw(module: torch.nn.Module, noise: Noise | None) -> None:
    """Give a model of `build` weights that are the same on every CPU, as normal numbers are not in their last bits."""
    draw = torch.Generator().manual_seed(0)
    noisy = None if noise is None else torch.Generator().manual_seed(abs(noise.seed))
    for name, parameter in module.named_parameters():
        centre, spread = torch.zeros((), dtype=torch.float64), 0.3
        if "sinks" in name:
            spread = 1.0
        elif parameter.ndim < 2:  # biases and the weights of norms, 0 or 1 but for what `build` adds
            centre, spread = parameter.double().round(), 0.1
        uniform = torch.rand(parameter.shape, generator=draw, dtype=torch.float64)
        weights = centre + spread * math.sqrt(3) * (2 * uniform - 1)
        if noise is not None:
            change = torch.randn(parameter.shape, generator=noisy, dtype=torch.float64)
            weights *= 1 + (noise.size if noise.seed > 0 else -noise.size) * change
        parameter.copy_(weights)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One combination on one rank.

    Attributes:
        model: this rank's share of it.
        smaller: a model that drafts, which every rank has whole; None if none does.
        seed: of the prompts.
    """

    ranks: Ranks
    model: Model
    smaller: Model | None
    combination: Combination
    seed: int

    def generate(self) -> list[Answer]:
        """Answers of `Engine.generate`."""
        engine, found = self._engine(), list[Answer]()
        for prompts in self._rounds():
            for each in engine.generate(prompts, self._options).generations:
                assert each.logprobs is not None
                found.append(Answer.of_places(list(zip(each.new_token_ids, each.logprobs, strict=True))))
        return found

    def converse(self) -> list[Answer]:
        """Two turns, each answered: the place after each row of a turn, then the answers."""
        chosen, conversation = self.combination, self._conversation()
        lengths = LENGTHS[chosen["rows"]]
        pads = [max(lengths) - length for length in lengths]
        first = [[0] * pad + self._ids(row) for row, pad in enumerate(pads)]
        second = [prompt(NUM_MORE, 10 * self.seed + 5 + row) for row in range(len(lengths))]
        found = list[Answer]()
        for turn, rows in enumerate((first, second)):
            pieces = torch.tensor(rows).split(CHUNK if chosen["prefill"] == "chunked" else max(lengths), dim=1)
            for number, ids_BC in enumerate(pieces, start=1):
                given = pads if (turn, number) == (0, 1) else None
                logits_BV = conversation.feed(ids_BC, pads=given, cut_back=number == len(pieces))
            found += map(Answer.of_logits, logits_BV)
            for row in conversation.generate(self._options[0]).rows:
                found.append(Answer.of_places(list(zip(row.new_ids, row.logprobs, strict=True))))
        return found

    def serve(self) -> list[Answer]:
        """Answers of a server's executor; none on ranks that are not told them.

        Equal prompts come as one item and share what they have. Others join one after the other.
        """
        heard: dict[tuple[int, int], list[Any]] = {}

        def hear(report: Report) -> None:
            if isinstance(report, Tokens):
                for row, token in report.tokens.items():
                    heard.setdefault(row, []).append(token)

        engine, options, number = self._engine(), self._options, 0
        executor = Executor(engine, Inbox(), hear, QueueLimits(itl_s=1e3))
        for turn, prompts in enumerate(self._rounds()):
            engine.check_speculation(options, prompts)
            if any(isinstance(each, ReusingPrompt) for each in prompts):
                engine.check_reuse(blends=self.combination["reuse"] == "blend")
            items = [([each], [option]) for each, option in zip(prompts, options, strict=True)]
            if self.combination["rows"] == "equal":
                items = [([prompts[0]] * len(prompts), options)]
            for given, asked in items:
                if engine.may_shard:
                    executor.carry_out(Generate(number=number, prompts=given, options=asked))
                else:
                    stored = [len(given[0]) - NUM_MORE] * len(given) if turn else []
                    boundaries = chunks(engine, len(given[0]) - sum(stored[:1]), 1.0, (0.0, 0.0)).boundaries
                    item = PrefillItem(
                        number=number, prompts=given, options=asked, boundaries=boundaries, stored=stored
                    )
                    executor.carry_out(item)
                number += 1
            executor.decode_all()
        return [Answer.of_places([(each, each.logprobs) for each in heard[row]]) for row in sorted(heard)]

    def _engine(self) -> Engine:
        """An engine by the options of a program. Raises: ValueError."""
        chosen = self.combination
        policy = dict(POLICIES[chosen["policy"]])
        if chosen["reuse"] in ("prompt cache", "blend"):
            policy = {"name": "prompt_cache", "positions": policy.pop("positions", "original"), "retrieve": policy}
            policy |= {"recompute": 0.5 if chosen["reuse"] == "blend" else 0.0}
        options: dict[str, Any] = {
            "ranks": RanksOptions(tensor=self.ranks.num_shares),
            "prefill": PREFILLS[chosen["prefill"]],
            "policy": policy,
            "cache": self._storage,
            "decode": DecodeOptions(name=DecodeName[chosen["decode"]]),
            "generation": self._options[0],
        }
        run: RunOptions | ServeRun
        if chosen["use"] == "server":
            run = ServeRun(**options, serve=ServeOptions(prefix_cache_bytes=self._tree_bytes))
        else:
            run = RunOptions(**options, draft=DraftOptions(model="a smaller one", policy=DRAFT))
        return Engine(
            self.model,
            self.ranks,
            prefill=run.prefill,
            partition=self._partition,
            policies=rank_policies(run.policy, run.cache),
            decode=run.decode,
            store=SegmentStore(self.model),
            tree=PrefixTree(self._tree_bytes) if self._tree_bytes else None,
            draft=self._draft,
        )

    def _conversation(self) -> Conversation:
        chosen = self.combination
        policies = rank_policies(checked(POLICIES[chosen["policy"]]), self._storage)
        if chosen["reuse"] != "none":
            raise NotOffered(f"a conversation has no {chosen['reuse']}")
        if chosen["ranks"] == "1":
            if chosen["decode"] == "sharded" or chosen["prefill"] in ("zigzag", "tsp"):
                raise NotOffered("a conversation of one process has no parts")
            return Conversation(self.model, policies, draft=self._draft)
        alone = {("prefill", "chunked"), ("decode", "last"), ("speculate", "policy")}
        if policies or alone & set(chosen.items()):
            raise NotOffered("a conversation over several ranks takes no policies, bits or pieces, and is sharded")
        return ShardedConversation(
            self.model, self.ranks, partition=self._partition, prefill=PREFILLS[chosen["prefill"]]
        )

    @property
    def _draft(self) -> RankPolicies | Model | None:
        return rank_policies(checked(DRAFT)) if self.combination["speculate"] == "policy" else self.smaller

    @property
    def _tree_bytes(self) -> int:
        return 1 << 30 if self.combination["reuse"] == "prefix tree" else 0

    @property
    def _storage(self) -> CacheOptions:
        bits = self.combination["bits"]
        return CacheOptions(bits=None if bits == "none" else int(bits), residual=RESIDUAL)

    @property
    def _partition(self) -> Partitioner:
        return even if self.combination["chunks"] == "even" else _uneven

    @property
    def _options(self) -> list[GenerationOptions]:
        """Options of each row. Rows end one after the other, and equal prompts have other answers."""
        return [
            GenerationOptions(
                max_new_tokens=NUM_NEW - row,
                ignore_eos=True,
                logprobs=NUM_TOP,
                repetition_penalty=1 + 0.2 * row,
                speculate=Speculate[self.combination["speculate"]],
                speculate_tokens=3,
                speculate_match=1,
                speculate_always=True,
            )
            for row in range(len(LENGTHS[self.combination["rows"]]))
        ]

    def _rounds(self) -> list[list[GivenPrompt]]:
        """Prompts of each call. With a prefix tree there are two; prompts of the second begin as those of the first."""
        rows = [self._ids(row) for row in range(len(LENGTHS[self.combination["rows"]]))]
        if self.combination["reuse"] == "prefix tree":
            second = [
                [*ids[: len(ids) - 3 * row], *prompt(NUM_MORE, 10 * self.seed + 5 + row)]
                for row, ids in enumerate(rows)
            ]
            return [[*rows], [*second]]
        if self.combination["reuse"] == "none":
            return [[*rows]]
        return [[self._reusing(ids) for ids in rows]]

    def _ids(self, row: int) -> list[int]:
        return prompt(LENGTHS[self.combination["rows"]][row], 10 * self.seed + row)

    def _reusing(self, ids: list[int]) -> ReusingPrompt:
        """A prompt that begins with two segments. With blending the second one is computed again in part."""
        start, uses = 0, list[SegmentUse]()
        for number, length in enumerate(SEGMENTS):
            segment = Segment(
                name=f"segment {number}",
                ids=tuple(prompt(length, 10 * self.seed + 7 + number)),
                positions=tuple(range(start, start + length)),
            )
            uses.append(SegmentUse(segment=segment, parts=(range(length),)))
            start += length
        again = uses[1:] if self.combination["reuse"] == "blend" else []
        new = [*(each for use in again for each in use.tokens)]
        new += enumerate(ids[: max(1, len(ids) - start)], start=start)
        return ReusingPrompt(
            uses=tuple(use for use in uses if use not in again),
            new_ids=tuple(token for _, token in new),
            new_positions=tuple(position for position, _ in new),
            blended=tuple(again),
            share=0.5 if again else 0.0,
        )


USES = {"generate": _Case.generate, "conversation": _Case.converse, "server": _Case.serve}


def _uneven(num_tokens: int, num_ranks: int) -> ContextPartition:
    """One token, most of the prompt, and the rest."""
    ends: dict[int, tuple[int, ...]] = {1: (), 2: (1,), 3: (1, num_tokens * 3 // 4)}
    return ContextPartition(boundaries=(0, *ends[num_ranks], num_tokens))
