"""`python -m partitioner.show` prints a table and draws it, and tells what is wrong in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from partitioner.searches.record import record_path
from partitioner.show import main, table_text
from partitioner.table.lookup_table import LookupTable
from tests.partitioner.test_lookup_table import FINGERPRINT, entry, table_of

ROOT = Path(__file__).resolve().parents[2]

TABLE = table_of(
    entry([0, 1024], ttft_s=0.08),
    entry([0, 600, 1024], ttft_s=0.05, spread=0.012),
    entry([0, 400, 700, 700, 1024], ttft_s=0.0499, objective="modelled"),
    entry([0, 1200, 2048], ttft_s=0.1),
)


def test_the_text_has_a_line_per_entry_with_the_best_number_of_ranks_marked() -> None:
    lines = table_text(TABLE).splitlines()
    assert [line.split() for line in lines[6:10]] == [
        ["1,024", "1", "80.0", "ms", "1.00x", "1.000", "measured"],
        ["*", "2", "50.0", "ms", "1.60x", "0.586", "0.414", "measured,", "spread", "1.2%"],
        ["4", "49.9", "ms", "1.60x", "0.391", "0.293", "0.000", "0.316", "modelled"],
        ["*", "2,048", "2", "100", "ms", "0.586", "0.414", "measured"],
    ]
    assert lines[-1].startswith("* the best number of ranks")
    assert max(map(len, lines)) < 140


def test_a_speed_up_that_ranks_cannot_bring_is_doubted() -> None:
    """Twice as fast on two ranks is the bound; 5% above it may be noise."""
    assert "!" not in table_text(TABLE)
    for ttft_s, marked in ((0.0391, False), (0.0375, True)):
        made = table_of(entry([0, 1024], ttft_s=0.08), entry([0, 600, 1024], ttft_s=ttft_s))
        *rows, note = table_text(made).splitlines()
        assert note.startswith("! more than the ranks can bring") is marked
        assert any("2.13x!" in row for row in rows) is marked


def test_the_text_tells_what_the_table_holds_for() -> None:
    text = table_text(TABLE)
    for words in (
        "SmolLM2: llama, 30 layers, 576 wide, 9 heads of 64 (3 for KV), MLP 1,536, vocabulary 49,152",
        "a processor, 1 thread a rank, float32",
        "gloo, relay; link 25 Gbit/s, 10 µs (measured)",
        "2026-01-31T12:00:00Z, python 3.11.9, torch 2.13.0",
    ):
        assert words in text
    bare = replace(FINGERPRINT, link=None, name="", date="", versions={}, threads=None)
    text = table_text(LookupTable(bare, []))
    assert "link unknown" in text and "an unknown time" in text and "no entries" in text


def test_the_program_prints_the_table_and_the_pictures_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    TABLE.save(path)
    assert main([str(path)]) == 0
    out, err = capsys.readouterr()
    pictures = [tmp_path / f"table.{name}.png" for name in ("ratios", "ttft")]
    assert out == table_text(TABLE) + "".join(f"{picture}\n" for picture in pictures) and err == ""
    assert sorted(tmp_path.iterdir()) == sorted([path, *pictures])


def test_pictures_go_to_the_folder_that_is_named(tmp_path: Path) -> None:
    path, out = tmp_path / "table.json", tmp_path / "a" / "b"
    TABLE.save(path)
    assert main([str(path), f"out={out}"]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["table.ratios.png", "table.ttft.png"]
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "a"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one table is needed, not 0"),
        (["a.json", "b.json"], "one table is needed, not 2"),
        (["missing.json"], "lookup table missing.json cannot be read: No such file or directory"),
        (["table.json", "--flag"], "unknown flag --flag"),
        (["table.json", "out="], "out= is empty"),
        (["table.json", "out=table.json"], "pictures cannot be written: "),
        (["damaged.json"], "lookup table damaged.json: is not JSON"),
        (["recorded.json"], "recorded.json.search.json is damaged"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("table.json", "recorded.json"):
        TABLE.save(name)
    Path("damaged.json").write_text("{", encoding="utf-8")
    record_path(Path("recorded.json")).write_text("{}", encoding="utf-8")
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m partitioner.show")


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.json")
    done = subprocess.run(
        [sys.executable, "-m", "partitioner.show", "table.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(table_text(TABLE))
