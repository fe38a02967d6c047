"""Base class of tasks that ask a question about a context and score the answer, under two protocols.

With question=separate the question is a turn of its own: a policy has thinned the context without knowing it. With
question=with_context it is the end of the context, and policies keep what the question asks for. Figures of the two
must not be compared.
"""

# Legend: V vocabulary, S tokens.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.options import Question
from benchmarks.evaluation.tasks.base import Case, KVUse, Outcome, Runtime, Task, feed_timed, now_s, tpot_s
from runahead.cache.kept_cache import KeptCache
from runahead.config import GenerationOptions, PrefillOptions
from runahead.context import ContextPartition
from runahead.conversation import Conversation
from runahead.conversation.shared_prefill import feed_all, may_share_prefill
from runahead.prefill.base import PrefillJob, PromptBatch
from runahead.prefill.kv_runahead import run_in_chain
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question about a context.

    Attributes:
        context, question: token ids; the question ends where the answer begins.
        answers: strings that a right answer holds.
        reference: a right answer, as the model would word it; None if right answers differ by their order, so that
            one of them alone has no meaningful loss.
        new_tokens: maximum number of tokens of an answer; 0: the answer is what the model says up to its first
            difference from the reference, so none is generated.
        generates: whether the answer is generated even where the model gives the reference, since what comes after it
            has an effect on the score.
        details: further values for the reader.
    """

    context: list[int]
    question: list[int]
    answers: Sequence[str]
    reference: str | None
    new_tokens: int
    generates: bool = False
    details: dict[str, Any]


class AnswerTask(Task):
    """Score of answers to questions about a context.

    One prefill serves all policies that have no effect on it. The reference is compared with the answer in one forward,
    or token by token under a policy that acts while answering; only a model that does not give the reference generates
    its answer. So the score is that of greedy decoding, and an answer also has the reference's loss (`nll`, nats per
    token), which differs between policies where scores do not.
    """

    question: Question
    material: Material

    @abstractmethod
    def item(self, case: Case) -> Item:
        """The question of a case."""

    def score(self, answer: str, item: Item) -> float:
        """Score of an answer: the share of the strings that it holds, in upper or lower case, as RULER counts them."""
        return recall(answer, item.answers)

    def reference_ids(self, item: Item) -> list[int]:
        """Tokens of the reference; none without one."""
        return [] if item.reference is None else self.material.ids(item.reference)

    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        [(_, outcome)] = self.run_all(runtime, [contender], case)
        return outcome

    def run_all(
        self, runtime: Runtime, contenders: Sequence[Contender], case: Case
    ) -> Iterator[tuple[Contender, Outcome]]:
        yield from self.outcomes(runtime, contenders, self.item(case))

    def outcomes(
        self, runtime: Runtime, contenders: Sequence[Contender], item: Item
    ) -> Iterator[tuple[Contender, Outcome]]:
        """Ask one question under several policies."""
        separate = self.question is Question.separate
        prompt = item.context if separate else item.context + item.question
        length = len(item.context) + len(item.question)
        for contender, conversation, prompt_s in prefilled(runtime, contenders, prompt, length):
            kv, question_s = KVUse.measured(conversation), 0.0
            if separate and item.question:
                question_s = ask(conversation, contender.policies, item.question)
            answered = self._answer(conversation, contender.policies, item)
            yield (
                contender,
                Outcome(
                    score=self.score(answered.text, item),
                    seen_share=kv.seen_share(answered.conversation),
                    kv=kv,
                    ttft_s=prompt_s + question_s,
                    tpot_s=answered.tpot_s,
                    details={
                        "answer": answered.text,
                        "answers": list(item.answers),
                        "nll": answered.nll,
                        "question_s": question_s,
                        "hit_mass": kv.hit_mass(answered.conversation),
                        **item.details,
                    },
                ),
            )

    def _answer(self, conversation: Conversation, policies: RankPolicies, item: Item) -> Answered:
        """The greedy answer: the reference, if the model says it and it may be compared, else what it generates."""
        if item.reference is None:
            return self._generated(conversation, item, nll=None)
        tokenizer, ids = self.material.tokenizer, self.reference_ids(item)
        along, followed = logits_along(conversation, policies, ids)
        nll = torch.nn.functional.cross_entropy(along.logits_SV[:-1], torch.tensor(ids, device=along.logits_SV.device))
        greedy = along.logits_SV.argmax(dim=-1).tolist()
        said_ids = up_to_difference(greedy, ids)
        said = tokenizer.decode(said_ids, skip_special_tokens=True)
        says_it = not item.generates and len(said_ids) > len(ids) and self.score(said, item) == 1.0
        if item.new_tokens == 0 or says_it:
            return Answered(text=said, nll=nll.item(), tpot_s=along.token_s, conversation=followed)
        return self._generated(conversation, item, nll=nll.item())

    def _generated(self, conversation: Conversation, item: Item, nll: float | None) -> Answered:
        decoded = conversation.generate(GenerationOptions(max_new_tokens=item.new_tokens))
        text = self.material.tokenizer.decode(decoded.rows[0].new_ids, skip_special_tokens=True)
        return Answered(text=text, nll=nll, tpot_s=tpot_s(decoded), conversation=conversation)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An answer, the loss of the reference in nats per token if it has one, and the conversation with the answer."""

    text: str
    nll: float | None
    tpot_s: float | None
    conversation: Conversation


@dataclass(frozen=True, kw_only=True)
class Along:
    """Logits (S + 1, V) before and after each of S given tokens, and the seconds per token if they came one by one."""

    logits_SV: Tensor
    token_s: float | None


def recall(answer: str, wanted: Sequence[str]) -> float:
    """Share of the strings that an answer holds, in upper or lower case."""
    return sum(each.lower() in answer.lower() for each in wanted) / len(wanted)


def up_to_difference(greedy: Sequence[int], ids: Sequence[int]) -> list[int]:
    """The tokens that a model says in place of given ones, up to the first that differs.

    Args:
        greedy: its choice before each of these tokens, and after the last one.
    """
    num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(greedy, ids, strict=False))))
    return list(greedy[: num_right + 1])


def prefilled(
    runtime: Runtime, contenders: Sequence[Contender], prompt: Sequence[int], length: int
) -> Iterator[tuple[Contender, Conversation, float]]:
    """Conversations of all contenders after a prompt, with the seconds of each: one prefill for all that may share it.

    Args:
        length: number of tokens that a conversation will have.
    """
    device = runtime.model.device
    made = {each.name: Conversation(runtime.model, each.policies, length=length) for each in contenders}
    sharing = [each.name for each in contenders if may_share_prefill(each.policies) and not each.prefill.streams]
    seconds: dict[str, float] = {}
    if len(sharing) > 1:
        together = [made[name] for name in sharing]
        seconds = dict(
            zip(sharing, feed_all(together, torch.tensor([prompt]), clock_s=partial(now_s, device)), strict=True)
        )
    for contender in contenders:
        conversation = made.pop(contender.name)  # its memory is free once it has answered
        if contender.prefill.streams:
            seconds[contender.name] = feed_streaming(conversation, contender.prefill, runtime.ranks, prompt)
        elif contender.name not in seconds:
            seconds[contender.name] = feed_timed(conversation, prompt)
        yield contender, conversation, seconds[contender.name]


@torch.inference_mode()
def feed_streaming(conversation: Conversation, prefill: PrefillOptions, ranks: Ranks, prompt: Sequence[int]) -> float:
    """Feed a prompt to an empty conversation as a chain of one stage prefills it, and return the seconds."""
    model, began_s = conversation.model, now_s(conversation.model.device)
    prefilled = run_in_chain(
        PrefillJob(
            model=model,
            ranks=ranks,
            batch=PromptBatch.from_prompts([list(prompt)], model.device),
            partition=ContextPartition(boundaries=(0, len(prompt))),
            capacity=len(prompt),
            policies=conversation.rank_policies,
            options=prefill,
        )
    )
    assert isinstance(prefilled.cache, KeptCache), type(prefilled.cache)
    conversation.cache, conversation.logits_BV = prefilled.cache, prefilled.logits_BV
    conversation.pads, conversation.rows, conversation.num_tokens = [0], [list(prompt)], len(prompt)
    conversation.cache.end_turn(room=0)
    return now_s(model.device) - began_s


def ask(conversation: Conversation, policies: RankPolicies, question: Sequence[int]) -> float:
    """Feed a question after a context, and return the seconds.

    It has no effect on what is kept of the context. Under a policy that retrieves it is fed token by token, each of
    which sees what is retrieved for it; in one piece it would see everything.
    """
    if policies.retriever is None:
        return feed_timed(conversation, question, cut_back=False)
    began_s = now_s(conversation.model.device)
    conversation.follow(torch.tensor([question]))
    return now_s(conversation.model.device) - began_s


@torch.inference_mode()
def logits_along(conversation: Conversation, policies: RankPolicies, ids: Sequence[int]) -> tuple[Along, Conversation]:
    """Logits along given tokens as if the model had generated them, and the fork of the conversation that has them.

    One forward, unless a policy retrieves for each token, or the family's steps differ.
    """
    before_BV, ids_1S = conversation.logits_BV, torch.tensor([ids])
    assert before_BV is not None
    acts = bool(policies.while_decoding) or policies.retriever is not None
    fork, token_s = conversation.fork(), None
    if acts:
        began_s = now_s(conversation.model.device)
        after_BSV = fork.follow(ids_1S, at_once=True)
        if not fork.follows_at_once:
            token_s = (now_s(conversation.model.device) - began_s) / len(ids)
    else:
        after_BSV = fork.peek(ids_1S)
    return Along(logits_SV=torch.cat([before_BV, after_BSV[0]]), token_s=token_s), fork
