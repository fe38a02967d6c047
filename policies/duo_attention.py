"""DuoAttention (Xiao et al., ICLR 2025, arXiv 2410.10819): retrieval heads keep all tokens, others the first and last.

A gate of each KV head says how much the model's answers need it to see all tokens. The gates are a table, which the
authors publish for some models; `python -m policies.duo_gates` makes one for any other.

It takes the heads with the largest gates, `retrieval_share` of them, the earlier of equal ones (published code: noise
decides). A table is a folder in the authors' format, full_attention_heads.tsv and config.json: theirs (attn_patterns/
of github.com/mit-han-lab/duo-attention), which is checked by its shape, or one that the program made, which is checked
by its model, too. `by=optimising` trains gates as published, with passkeys in a sample text, and other numbers: 100
steps with texts of 512 tokens instead of 2,000 with up to 32,000, and the student sees its own keys in both kinds of
attention (published code: the teacher's output). It does not go with soft caps or sinks in attention. `by=kvzip` takes
the largest score that KVzip gives to a token, in a few forwards. If all heads retrieve, it is the full cache bit by
bit; if none does, StreamingLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from policies.base import ModelFacts
from policies.duo_table import REMEDY, DuoTable
from policies.layer_view import PromptPart
from policies.options import require
from policies.streaming_heads import StreamingHeads, best_heads, share_of_others


@dataclass(kw_only=True)
class DuoAttention(StreamingHeads, name="duo_attention"):
    """Keep all tokens in the KV heads with the largest gates, and in all others the first and last ones.

    Attributes:
        heads: folder with full_attention_heads.tsv and config.json, the authors' or of `python -m policies.duo_gates`.
        retrieval_share: share of the model's KV heads that keep all tokens.
        sinks: first tokens that other heads keep; None is the number in the folder.
        recent: last tokens that other heads keep; None is the number in the folder.
    """

    made_by: ClassVar[str] = (
        "folder with full_attention_heads.tsv, as of python -m policies.duo_gates model=... out=..."
    )

    retrieval_share: float = 0.5
    sinks: int | None = None
    recent: int | None = None
    _of_table: DuoTable | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_share = 0 <= self.retrieval_share <= 1
        require(is_share, "retrieval_share", self.retrieval_share, "must be a share of the heads in [0, 1]")
        for name, least in (("sinks", 0), ("recent", 1)):
            given = getattr(self, name)
            require(given is None or given >= least, name, given, f"must be at least {least}")
        if self.heads is not None:
            self._of_table = self._load(self.heads)  # finds mistakes in the folder before the model is loaded

    def _load(self, heads: str) -> DuoTable:
        table = DuoTable.load(heads)
        self._tokens_by(table, f"policy.heads={heads}")
        return table

    def _tokens_by(self, table: DuoTable | None, name: str) -> tuple[int, int]:
        """First and last tokens that stay, of these options or a table's. Raises: ValueError with the `name`."""
        sinks = self.sinks if self.sinks is not None or table is None else table.sinks
        recent = self.recent if self.recent is not None or table is None else table.recent
        if sinks is None or recent is None:
            found = {"policy.sinks=<number>": sinks, "policy.recent=<number>": recent}
            missing = " and ".join(option for option, tokens in found.items() if tokens is None)
            raise ValueError(f"{name} does not say how many tokens stay; give {missing}")
        return sinks, recent

    def found_in(self, heads: str, model: ModelFacts) -> list[list[bool]]:
        table = self._load(heads)
        shape, wanted = [len(gates_K) for gates_K in table.gates], model.heads_of_all
        if shape != wanted:
            raise ValueError(
                f"policy.heads={heads} has gates of {_shape(shape)}, and model {model.name} has {_shape(wanted)}; "
                f"{REMEDY}"
            )
        if table.fingerprint is not None and table.fingerprint != model.fingerprint:
            raise ValueError(f"policy.heads={heads} was made for another model; {REMEDY}")
        self._of_table = table
        return best_heads(table.gates, self.retrieval_share)

    def expected_share(self, num_heads: int | None) -> float:
        return share_of_others([self.retrieval_share], num_heads)

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        other.recent = part.share_of(self.first_and_last(part.num_tokens)[1])
        return other

    def first_and_last(self, prompt_tokens: int) -> tuple[int, int]:
        return self._tokens_by(self._of_table, f"policy={self.label} without policy.heads")


def _shape(heads: list[int]) -> str:
    each = "/".join(str(number) for number in sorted(set(heads)))
    return f"{len(heads)} layers with {each} KV heads"
