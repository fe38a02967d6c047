"""Methods whose losses are compared, each at three shares of the context, as entries of policies=."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """A policy with the options that it is compared with.

    Attributes:
        name: for readers.
        entries: its settings at each share, the largest first; fewer if it cannot keep so little.
        file: what the settings name and a program makes for a model; a method without it is left out.
    """

    name: str
    entries: tuple[Settings, ...]
    file: str | None = None

    @property
    def is_there(self) -> bool:
        return self.file is None or Path(self.file).exists()


KEPT = (0.5, 0.25, 0.125)
"""Shares of the context that methods which drop, merge or share keep."""
FETCHED = (0.1, 0.05, 0.02)
"""Shares of the context that methods which retrieve fetch for each token, in the layers that retrieve."""
GATES, HEADS, KVZAP = "gates", "heads.safetensors", "kvzap.safetensors"
"""Files of a model: made by policies.duo_gates, policies.retrieval_heads and policies.fit_kvzap."""


def scored(name: str, *, file: str | None = None, **options: Any) -> Method:
    """A policy with a budget."""
    return Method(
        name=told(name, options, file), entries=tuple(within(share, name, options) for share in KEPT), file=file
    )


def wrapped(wrapper: str, name: str, *, file: str | None = None, **options: Any) -> Method:
    """A policy that chooses by the scores of another one, which has the budget."""
    entries = tuple({"name": wrapper, "scorer": within(share, name, options)} for share in KEPT)
    return Method(name=f"{wrapper} over {told(name, options, file)}", entries=entries, file=file)


def within(share: float, name: str, options: Settings) -> Settings:
    return {"name": name, "budget": share, **options}


def listed(name: str, *each: Settings, file: str | None = None) -> Method:
    """A policy without a budget, with options for each share."""
    return Method(name=name, entries=tuple({"name": name, **options} for options in each), file=file)


def retrieving(name: str, **options: Any) -> Method:
    """A policy that retrieves. All read the first two layers, four sinks and 16 recent tokens, as most papers do."""
    alike: Settings = {"first_layer": 2, "sinks": 4, "recent": 16, "sample_every": 4}
    entries = tuple({"name": name, "fetch": share, **alike, **options} for share in FETCHED)
    return Method(name=told(name, options), entries=entries)


def told(name: str, options: Settings, file: str | None = None) -> str:
    given = ", ".join(f"{key}={value}" for key, value in options.items() if value != file)
    return f"{name} ({given})" if given else name


EPSILON = 0.01
"""Epsilon of Expected Attention, as NVIDIA's leaderboard has it under AdaKV."""

DROPPING = (
    scored("window"),
    scored("streaming_llm"),
    scored("snapkv"),
    scored("pyramidkv"),
    scored("chunkkv"),
    scored("zigzagkv"),
    scored("cake"),
    scored("tova"),
    scored("h2o"),
    scored("keyformer"),
    scored("scissorhands"),
    scored("r_kv"),
    scored("expected_attention", epsilon=EPSILON),
    scored("keydiff"),
    scored("lagkv"),
    scored("k_centers"),
    wrapped("adakv", "snapkv"),
    wrapped("adakv", "expected_attention", epsilon=EPSILON),
    wrapped("criticalkv", "snapkv"),
    scored("kvzip"),
    scored("kvzip", plus=True),
    scored("kvzap", file=KVZAP, predictor=KVZAP, recent=32),
    wrapped("adakv", "kvzap", file=KVZAP, predictor=KVZAP, recent=32),
    listed(
        "kvzap, by a threshold",
        *({"name": "kvzap", "predictor": KVZAP, "recent": 32, "threshold": at} for at in (-4.2, -2.8, -1.3)),
        file=KVZAP,
    ),
    # 50%, 25% and 12.5% of the bytes of 2,048 tokens.
    listed(
        "duo_attention",
        *(
            {"heads": GATES, "retrieval_share": share, "sinks": 4, "recent": recent}
            for share, recent in ((0.43, 252), (0.2, 124), (0.097, 60))
        ),
        file=GATES,
    ),
    listed(
        "razor_attention",
        *(
            {"heads": HEADS, "induction_share": share, "recent": recent}
            for share, recent in ((0.42, 252), (0.19, 124), (0.087, 60))
        ),
        file=HEADS,
    ),
    listed(
        "fastgen",
        *(
            {"recovered": mass, "frequent": most, "local": most}
            for mass, most in ((0.85, 0.12), (0.58, 0.05), (0.35, 0.02))
        ),
    ),
    # Half of the layers, as published, take 77% of the bytes, and all of them little more than half.
    listed("minicache, all layers", {"name": "minicache", "start_share": 0.0}),
    listed("minicache", {}),
    listed(
        "pyramidinfer", *({"mean_keep": share, "recent_ratio": min(0.2, share / 2), "min_tokens": 1} for share in KEPT)
    ),
)

RETRIEVING = (
    retrieving("exact_topk"),
    retrieving("infinigen"),
    retrieving("sparq"),
    retrieving("quest"),
    retrieving("quest", digest="shrunk"),
    retrieving("quest", digest="mean"),
    retrieving("infllm", block=16, clamped=False),
    retrieving("em_llm", events={"most": 32}, clamped=False),
    retrieving("clusterkv", cluster=16),
    retrieving("squeezed_attention", cluster=16),
    retrieving("retroinfer"),
    retrieving("retroinfer", estimate=0.0),
    # For keys of 128 to 192 dims in all KV heads together; published: rank 160 of 1,024, 48 outliers of 128k tokens.
    retrieving("shadowkv", rank=32, outliers=4),
    retrieving("retrieval_attention"),
    retrieving("magicpig", dense_every=0),
)

FAMILIES = {"dropping": DROPPING, "retrieving": RETRIEVING}
SHARES = {"dropping": KEPT, "retrieving": FETCHED}


def share_of(settings: Settings) -> tuple[str, float] | None:
    """Name and share of the method with these settings; None if it is none of these.

    What programs make for a model may have any name there.
    """
    for family, methods in FAMILIES.items():
        for method in methods:
            for share, entry in zip(SHARES[family], method.entries, strict=False):
                files = {option: method.file for option in settings if entry.get(option) == method.file}
                if len(method.entries) == len(SHARES[family]) and settings | files == entry:
                    return method.name, share
    return None


def override(settings: Settings) -> str:
    """Settings in the form of an option on the command line."""
    parts = (f"{key}:{override(value) if isinstance(value, dict) else value}" for key, value in settings.items())
    return "{" + ",".join(parts) + "}"
