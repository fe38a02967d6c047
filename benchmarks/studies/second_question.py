"""How much sooner does a server answer the second question about a document, and what does a conversation compute?

    torchrun --nproc-per-node=2 launch/serve.py model=smollm2 ranks.threads=1 serve.prefix_cache_bytes=2000000000 &
    python -m benchmarks.studies.second_question --document 4000 --documents 3

Each document of random tokens is asked about twice, one request after the other. TTFT is that of a client. Then a
conversation goes over some turns: a message of the user, and the model's answer as it came. Each of its tokens is
computed once if the new tokens of all prompts and of all answers are those of the text; the last token of an answer is
computed with the next prompt. Appends a JSON line to benchmarks/results/second_question.jsonl.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from statistics import median

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_table import Rows
from benchmarks.studies.serving import Outcome, ask, fetched
from launch.program.text_table import text_table

MESSAGES = (
    "Tell me of a ship that is caught in the ice.",
    "Who is on board?",
    "What do they eat?",
    "Does anybody come to help them?",
    "How does it end?",
    "Tell it again in one sentence.",
)


def measure(run: Run) -> Iterator[Line]:
    """Measure one line."""
    options = run.options
    draw = random.Random(options.seed)
    pairs: list[list[Outcome]] = []
    for _ in run.bar(range(options.documents), "document"):
        document = draw.choices(range(options.vocabulary), k=options.document)
        questions = [draw.choices(range(options.vocabulary), k=options.question) for _ in range(2)]
        if questions[0][0] == questions[1][0]:  # so that the document is all that they have in common
            questions[1][0] = (questions[0][0] + 1) % options.vocabulary
        asking = (ask(options.url, document + each, options.new_tokens, options.key) for each in questions)
        pairs.append([asyncio.run(each) for each in asking])
        if not all(each.is_answered for each in pairs[-1]):
            raise SystemExit(f"{options.url} gave no answer: {pairs[-1][-1].reason or 'is a server there?'}")
    yield {
        "server": options.server,
        "document": options.document,
        "question": options.question,
        "first_ttft_s": [first.events_s[0] for first, _ in pairs],
        "second_ttft_s": [second.events_s[0] for _, second in pairs],
        "second_cached": [second.cached_tokens for _, second in pairs],
        "conversation": None if options.no_conversation else converse(options.url, options.key, options.new_tokens),
    }


def converse(url: str, key: str | None, new_tokens: int) -> Line:
    """Tokens of each turn of a conversation: those of its prompt, of these the stored ones, and those of its answer."""
    messages, turns = list[dict[str, str]](), list[dict[str, int]]()
    for content in MESSAGES:
        messages.append({"role": "user", "content": content})
        body = {"messages": messages, "max_tokens": new_tokens}
        answer = json.loads(fetched(f"{url}/v1/chat/completions", key, body, timeout_s=600))
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append({"prompt": usage["prompt_tokens"], "cached": cached, "answer": usage["completion_tokens"]})
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return {"turns": turns}


def computed_and_text(conversation: Line) -> tuple[int, int]:
    """Tokens that were computed of a conversation, given or new, and those of its text without the last one.

    They are the same if each is computed once.
    """
    turns = conversation["turns"]
    computed = sum(turn["prompt"] - turn["cached"] + turn["answer"] - 1 for turn in turns)
    return computed, turns[-1]["prompt"] + turns[-1]["answer"] - 1


def table(found: list[Line]) -> str:
    """The last run of each server and length."""
    rows: Rows = [
        ("server", "document", "question", "first TTFT", "second TTFT", "times", "found", "computed", "of text")
    ]
    for line in newest(found, "server", "document", "question").values():
        times = median(a / b for a, b in zip(line["first_ttft_s"], line["second_ttft_s"], strict=True))
        computed = ("-", "-") if line["conversation"] is None else computed_and_text(line["conversation"])
        rows.append(
            (
                line["server"],
                f"{line['document']:,}",
                str(line["question"]),
                f"{median(line['first_ttft_s']):.2f} s",
                f"{median(line['second_ttft_s']):.3f} s",
                f"{times:.1f}",
                f"{median(line['second_cached']):,.0f}",
                *map(str, computed),
            )
        )
    return text_table(rows, left=(0,))


STUDY = Study(
    name="second_question",
    text=__doc__,
    has="second_ttft_s",
    measure=measure,
    table=table,
    options={
        "url": option("http://127.0.0.1:8000", "address of the server"),
        "key": option(None, "its key"),
        "server": option("default", "what its settings are called in the table"),
        "document": option(4000, "tokens of a document"),
        "documents": option(3, "number of documents"),
        "question": option(32, "tokens of a question"),
        "new_tokens": option(32, "most tokens of an answer"),
        "vocabulary": option(10_000, "documents and questions are drawn from the token ids below it"),
        "no_conversation": option(False, "leave the conversation out, for a model without a chat template"),
        "seed": option(0, "of documents and questions"),
    },
)

if __name__ == "__main__":
    STUDY.main()
