"""RULER's questions about documents: SQuAD 2.0 (qa_1) and HotpotQA (qa_2), among documents of other questions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.tasks.ruler.base import RulerPrompt, longest
from launch.inputs.text_files import read_text

HEAD = "The documents below hold the answer to a question.\n\n"
LEAST_TOKENS = 8
"""Fewer tokens than any document has."""
ASKED = "\n\nAnswer the question from the documents above, with the answer alone.\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """A question of a data set.

    Attributes:
        answers: any of them is right.
        needed: the documents that hold the answer, as indices.
        near: other documents that belong to the question, such as those of the same article.
    """

    question: str
    answers: list[str]
    needed: list[int]
    near: list[int]


@dataclass(frozen=True, kw_only=True)
class DocumentSet:
    """Questions and all documents of a data set."""

    asked: list[DocumentQuestion]
    documents: list[str]


def squad(data: Any) -> DocumentSet:
    """Questions of SQuAD 2.0 (Rajpurkar et al., 2018) that have an answer; a document is a paragraph."""
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in data["data"]]
    documents = sorted({paragraph for article in articles for paragraph in article})
    index = {document: at for at, document in enumerate(documents)}
    asked = []
    for article, paragraphs in zip(data["data"], articles, strict=True):
        places = [index[paragraph] for paragraph in paragraphs]
        for paragraph in article["paragraphs"]:
            place = index[paragraph["context"]]
            for each in paragraph["qas"]:
                if not each["is_impossible"]:
                    answers = list(dict.fromkeys(answer["text"] for answer in each["answers"]))
                    near = [other for other in places if other != place]
                    asked.append(
                        DocumentQuestion(question=each["question"], answers=answers, needed=[place], near=near)
                    )
    return DocumentSet(asked=asked, documents=documents)


def hotpotqa(data: Any) -> DocumentSet:
    """Questions of HotpotQA's distractor setting (Yang et al., 2018), each of which needs two of ten paragraphs."""
    paragraphs = [{title: f"{title}\n{''.join(text)}" for title, text in each["context"]} for each in data]
    documents = sorted({document for of_question in paragraphs for document in of_question.values()})
    index = {document: at for at, document in enumerate(documents)}
    asked = []
    for each, of_question in zip(data, paragraphs, strict=True):
        supporting = {title for title, _ in each["supporting_facts"]}
        places = {title: index[document] for title, document in of_question.items()}
        needed = [place for title, place in places.items() if title in supporting]
        near = [place for title, place in places.items() if title not in supporting]
        asked.append(DocumentQuestion(question=each["question"], answers=[each["answer"]], needed=needed, near=near))
    return DocumentSet(asked=asked, documents=documents)


READERS: dict[str, Callable[[Any], DocumentSet]] = {"squad": squad, "hotpotqa": hotpotqa}
SOURCES = {
    "squad": "dev-v2.0.json of SQuAD 2.0, from https://rajpurkar.github.io/SQuAD-explorer",
    "hotpotqa": "hotpot_dev_distractor_v1.json of HotpotQA, from https://hotpotqa.github.io",
}
"""Places of the files on the web, by option."""


@cache
def document_set(option: str, path: str) -> DocumentSet:
    """Read the file that an option of ruler names.

    Raises:
        ValueError: in one line: the file cannot be read, or is another one.
    """
    name = f"ruler.{option}={path}"
    text = read_text(path, name, pipes=False)
    try:
        return READERS[option](json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} is not {SOURCES[option]}; give that file") from error


def prompt(found: DocumentSet, draw: random.Random, room: int, material: Material) -> RulerPrompt:
    """A question, with the documents that it needs, those near it, and others as far as there is room, in any order."""
    asked = draw.choice(found.asked)
    near, others = list(asked.near), set(range(len(found.documents))) - {*asked.needed, *asked.near}
    draw.shuffle(near)
    # Few more than can fit are drawn, as there are tens of thousands.
    most_others = min(len(others), max(1, room // LEAST_TOKENS))
    order = [*asked.needed, *near, *draw.sample(sorted(others), most_others)]
    order_seed = draw.random()

    def build(size: int) -> RulerPrompt:
        chosen = order[:size]
        random.Random(order_seed).shuffle(chosen)
        texts = [f"Document {number}:\n{found.documents[at]}" for number, at in enumerate(chosen, start=1)]
        return RulerPrompt(
            context=HEAD + "\n\n".join(texts),
            question=ASKED.format(question=asked.question),
            answers=asked.answers,
            reference=f" {asked.answers[0]}",
            any_answer=True,
        )

    return longest(build, room, material, least=len(asked.needed), most=len(order))
