"""How many of the keys that queries attend to most does an index find, over the share of keys that it looks at?

    pip install faiss-cpu
    python -m benchmarks.studies.index_recall --text wikitext2-raw-validation.txt.gz

Queries are those of the tokens that follow a text, keys those of the text, and what is to be found are the `best` keys
of each query head. quest and clusterkv are asked as while decoding, without sinks and recent tokens, with several
values of fetch: each query meets the digests of pages or clusters, and the keys that are fetched. The graph of
retrieval_attention is searched by each query head with several numbers of hops, as it is and made of keys in place of
queries. Ordinary indices are those of faiss, of each KV head's keys by inner product: lists of neighbouring keys (IVF),
of which some are scanned, and a graph of neighbours (HNSW), which counts its products.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, T test tokens, H key dim.

from __future__ import annotations

import gzip
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, newest, option
from policies.clusterkv import ClusterKV
from policies.exact_topk import ExactTopK
from policies.quest import Quest
from policies.retrieval_attention import KeyGraph, RetrievalAttention
from policies.retriever import Choice, Index, PromptView, Retriever, Slots
from runahead.config import ModelName, ModelOptions
from runahead.conversation import Conversation
from runahead.files import read_user_file
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies

OBSERVED = 1024
"""Last tokens of the text whose queries an index may be made of."""
BARE: Mapping[str, Any] = {"min_tokens": 0, "first_layer": 0, "sinks": 0, "recent": 0}
POLICIES: Mapping[str, Retriever] = {
    "exact_topk": ExactTopK(**BARE),
    "quest": Quest(**BARE),
    "clusterkv": ClusterKV(**BARE, cluster=16),
}
FETCH = (0.025, 0.05, 0.1, 0.2, 0.4)
GRAPH = RetrievalAttention(**BARE, observed=OBSERVED, width=8)
HOPS = (1, 2, 4, 8, 16, 32)
LISTS = (1, 2, 4, 8, 16, 32)
"""Lists of an IVF index that are scanned, of about one for each sqrt(n) keys."""
EFFORTS = (16, 32, 64, 128, 256, 512)
"""Keys that a search in HNSW holds at a time."""
FIELDS = ("tokens", "best", "index", "effort")


class Asked(Index):
    """Index that chooses all slots, and tells its policy the queries."""

    how: Noting

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        self.how.asked.append(q_BNH.clone())
        return None


class Noting(ExactTopK):
    """Retrieves all, and notes what indices would be made of and the queries that follow."""

    index_class = Asked
    observed = OBSERVED

    def __init__(self) -> None:
        super().__init__(**BARE, fetch=1.0)
        self.views: dict[int, PromptView] = {}
        self.asked: list[Tensor] = []

    def index(self, view: PromptView) -> Index:
        self.views[view.layer] = replace(view, k_BKnH=view.k_BKnH.clone(), v_BKnV=view.v_BKnV.clone())
        return super().index(view)


@dataclass(frozen=True, kw_only=True)
class Noted:
    """Keys and queries of a text, by layer: the view of its keys and the queries (T, N, H) that follow."""

    views: Mapping[int, PromptView]
    q_TNH: Mapping[int, Tensor]


@contextmanager
def prepare(options: Namespace) -> Iterator[Noted]:
    """Compute the text and the tokens after it. Raises: ValueError: it is too short, or faiss is missing."""
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise ValueError("faiss is missing; pip install faiss-cpu") from None
    content = read_user_file(options.text)
    text = (gzip.decompress(content) if options.text.endswith(".gz") else content).decode("utf-8")
    model = Model.load(ModelOptions(name=ModelName.smollm2), torch.device("cpu"))
    needed = options.tokens + options.queries
    ids: list[int] = model.tokenizer(text[: 16 * needed], verbose=False)["input_ids"]
    if len(ids) < needed:
        raise ValueError(f"--text {options.text} has {len(ids):,} tokens, fewer than {needed:,}")
    noting = Noting()
    conversation = Conversation(model, RankPolicies.everywhere([noting]))
    conversation.feed(torch.tensor([ids[: options.tokens]]))
    conversation.follow(torch.tensor([ids[options.tokens : needed]]))
    layers = list(noting.views)
    by_layer = {layer: torch.cat(noting.asked[place :: len(layers)]) for place, layer in enumerate(layers)}
    yield Noted(views=noting.views, q_TNH=by_layer)


def variants(options: Namespace) -> Iterator[Variant]:
    """Every `every`-th layer."""
    for layer in range(0, options.layers, options.every):
        yield {"tokens": options.tokens, "best": options.best, "layer": layer}


def measure(options: Namespace, noted: Noted, variant: Variant) -> Iterator[Line]:
    """Recall and share of each index of a layer."""
    view, q_TNH = noted.views[variant["layer"]], noted.q_TNH[variant["layer"]]
    view = replace(view, stored=lambda: view.k_BKnH)
    num_heads, number = view.k_BKnH.shape[1], view.k_BKnH.shape[2]
    scores_TKGn = q_TNH.unflatten(1, (num_heads, -1)) @ view.k_BKnH[0].mT
    best_TKGm = scores_TKGn.topk(options.best, dim=-1).indices
    variant = variant | {"queries": best_TKGm[..., 0].numel()}
    for name, policy in POLICIES.items():
        index = policy.index(view)
        for fetch in FETCH:
            index.how = replace(policy, fetch=fetch)
            found = [_asked(index, q_NH, number) for q_NH in q_TNH]
            recalls = [_recall(best, slots_Km) for best, (slots_Km, _) in zip(best_TKGm, found, strict=True)]
            yield variant | {
                "index": name,
                "effort": fetch,
                "recall": mean(recalls),
                "share": mean(s for _, s in found),
            }
    keys_BNwH = view.k_BKnH[:, :, -OBSERVED:].repeat_interleave(q_TNH.shape[1] // num_heads, dim=1)
    for name, q_BNwH in (("retrieval_attention", view.q_BNwH), ("the same of keys", keys_BNwH)):
        graph = KeyGraph(replace(view, q_BNwH=q_BNwH), GRAPH)
        for hops in HOPS:
            recall, share = _searched(graph, hops, q_TNH, best_TKGm)
            yield variant | {"index": name, "effort": hops, "recall": recall, "share": share}
    for name, efforts in (("IVF", LISTS), ("HNSW", EFFORTS)):
        for effort, recall, share in _of_faiss(name, efforts, view.k_BKnH[0], q_TNH, best_TKGm):
            yield variant | {"index": name, "effort": effort, "recall": recall, "share": share}


def _asked(index: Index, q_NH: Tensor, num_slots: int) -> tuple[Tensor, float]:
    """Slots (K, m) that are chosen for a query, and the share of keys that it meets for that or in attention."""
    choice = index.choose(q_NH[None], Slots(num_slots=num_slots, pads=[0], positions_BKn=None, next_B=None))
    assert choice is not None
    slots_Km = choice.slots_BKm[0]
    if isinstance(index.how, ExactTopK):
        return slots_Km, 1.0
    key_bytes = len(slots_Km) * num_slots * q_NH.shape[1] * q_NH.element_size()
    return slots_Km, index.scored_bytes / key_bytes + slots_Km.shape[1] / num_slots


def _recall(best_KGm: Tensor, slots_Km: Tensor) -> float:
    """Share of the best slots of each query head that is among those chosen for its KV head."""
    hits = [torch.isin(best_Gm, slots_m) for best_Gm, slots_m in zip(best_KGm, slots_Km, strict=True)]
    return torch.stack(hits).double().mean().item()


def _searched(graph: KeyGraph, hops: int, q_TNH: Tensor, best_TKGm: Tensor) -> tuple[float, float]:
    """Recall, and the share of keys that a query head scores."""
    number, num_heads = best_TKGm.shape[3], best_TKGm.shape[1]
    q_BXH = q_TNH.unflatten(1, (num_heads, -1)).transpose(0, 1).flatten(0, 2)[None]  # as a turn of T tokens
    graph.how = replace(GRAPH, hops=hops)
    slots_BKXf, scores_BKXf, seen_BKXn = graph.search(q_BXH, number)
    slots_KXf = slots_BKXf[0].masked_fill(scores_BKXf[0] == -torch.inf, -1)
    best_KXm = best_TKGm.transpose(0, 1).flatten(1, 2)
    hits = (best_KXm[..., None] == slots_KXf[:, :, None]).any(dim=-1)
    return hits.double().mean().item(), seen_BKXn.double().mean().item()


def _of_faiss(
    name: str, efforts: tuple[int, ...], k_KnH: Tensor, q_TNH: Tensor, best_TKGm: Tensor
) -> Iterator[tuple[int, float, float]]:
    """Effort, recall and share of keys whose products were computed, for an index of each KV head."""
    import faiss

    num_heads, num_slots, dim = k_KnH.shape
    number, num_lists = best_TKGm.shape[3], max(1, round(num_slots**0.5))
    indices = []
    for k_nH in k_KnH.float().numpy():
        if name == "IVF":
            made = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, num_lists, faiss.METRIC_INNER_PRODUCT)
            made.train(k_nH)
        else:
            made = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
        made.add(k_nH)
        indices.append(made)
    stats = faiss.cvar.indexIVF_stats if name == "IVF" else faiss.cvar.hnsw_stats
    for effort in efforts:
        hits, products, queries = 0, 0, 0
        for head, made in enumerate(indices):
            setattr(*((made, "nprobe", effort) if name == "IVF" else (made.hnsw, "efSearch", effort)))
            q_XH = q_TNH.unflatten(1, (num_heads, -1))[:, head].flatten(0, 1).float().contiguous().numpy()
            stats.reset()
            _, slots = made.search(q_XH, number)
            best_Xm = best_TKGm[:, head].flatten(0, 1)
            found_Xm = torch.from_numpy(slots)
            hits += int((best_Xm[:, :, None] == found_Xm[:, None]).any(dim=-1).sum())
            products += stats.ndis + (num_lists * len(q_XH) if name == "IVF" else 0)
            queries += len(q_XH)
        yield effort, hits / (queries * number), products / (queries * num_slots)


def means(found: list[Line]) -> list[Line]:
    """Means over layers, of each index and effort."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in newest(*FIELDS, "layer")(found):
        groups.setdefault(tuple(line[name] for name in FIELDS), []).append(line)
    return [
        dict(zip(FIELDS, key, strict=True))
        | {"layers": len(group), "queries": sum(line["queries"] for line in group)}
        | {name: mean(line[name] for line in group) for name in ("recall", "share")}
        for key, group in groups.items()
    ]


TABLE = Table(
    lines=means,
    columns={
        "tokens": lambda line: f"{line['tokens']:,}",
        "index": lambda line: f"{line['index']}, {line['effort']}",
        "scanned": lambda line: f"{line['share']:.1%}",
        "recall": lambda line: f"{line['recall']:.3f}",
        "n": lambda line: f"{line['queries']:,}",
    },
)

STUDY = Study(
    name="index_recall",
    text=__doc__,
    has="recall",
    variants=variants,
    prepare=prepare,
    measure=measure,
    table=TABLE,
    options={
        "text": option("wikitext2-raw-validation.txt.gz", "text file, which may be compressed by gzip"),
        "tokens": option(4096, "of the text"),
        "queries": option(32, "tokens after it whose queries are asked"),
        "best": option(100, "keys of each query head that are to be found"),
        "layers": option(30, "layers of the model"),
        "every": option(6, "one in this many layers is measured"),
    },
)

if __name__ == "__main__":
    STUDY.main()
