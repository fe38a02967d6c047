"""The repository as its readers find it: every module explained, no machine's paths, no package index."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from policies.layer_view import LayerView
from tests.files import PACKAGES, ROOT
from tests.policy_table import BEGIN, END, tables

ARCHITECTURE = "docs/architecture.md"
POLICIES_PAGE = "docs/policies.md"
MANUAL_WORDS = 40_000
"""Words of docs/ without docs/studies/ and docs/log.md: what somebody who uses Runahead may have to read."""
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
MODULE_PATH = re.compile(rf"\b(?:{'|'.join(PACKAGES)})/[\w/]*\w\.py\b")

# Spelled so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~$}-])/(?:root|work|home/\w+|tmp/\w+)(?:/|\b)"),
    "a package index": re.compile(
        r"index[-_]url|find[-_]links|pypi\.(?:org|python)|pythonhosted\.|download\.pytorch\.", re.IGNORECASE
    ),
}


def test_the_architecture_page_is_short() -> None:
    """It is read in one go by whoever changes something; lists of files are beside the files."""
    assert len(read(ROOT / ARCHITECTURE).split()) <= 2_500


def test_the_policies_page_has_the_tables_of_their_classes() -> None:
    for what, lines in tables().items():
        assert BEGIN.format(what) + lines + END in read(ROOT / POLICIES_PAGE), (
            "python -m tests.policy_table writes them"
        )


def test_what_a_policy_sees_is_explained() -> None:
    attributes = (LayerView.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    named = re.findall(r"^ {8}([\w, ]+): ", attributes, re.MULTILINE)
    assert sorted(", ".join(named).split(", ")) == sorted(each.name for each in fields(LayerView))


@pytest.mark.parametrize("page", ["README.md", ARCHITECTURE, POLICIES_PAGE])
def test_the_pages_name_no_module_that_is_gone(page: str) -> None:
    text = read(ROOT / page)
    folders = re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]*/)`", text)
    gone = [path for path in (*MODULE_PATH.findall(text), *folders) if not (ROOT / path).exists()]
    assert not gone, f"{page} names {', '.join(gone)}"


def test_the_architecture_page_names_nothing_that_is_gone() -> None:
    """Classes, their methods and tables of the library stand in backticks, as `Engine.generate`."""
    definition = re.compile(r"(?:^ *(?:class|def) |^(?=[A-Z]\w*\b.* = ))(\w+)", re.MULTILINE)
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    defined = {name for path in paths for name in definition.findall(read(path))} | set(dir(builtins))
    named = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", read(ROOT / ARCHITECTURE))
    gone = {name for names in named for name in names if name and name not in defined}
    assert not gone, f"{ARCHITECTURE} names {', '.join(sorted(gone))}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/log.md"])
def test_commands_name_modules_that_are_there(page: str) -> None:
    """A study whose question is answered has lines and a page, which says which commit has its code."""
    text = read(ROOT / page)
    modules = re.findall(rf"-m ((?:{'|'.join(PACKAGES)}|tests)(?:\.\w+)+)", text)
    paths = [ROOT / name.replace(".", "/") for name in modules]
    gone = [path.name for path in paths if not path.with_suffix(".py").is_file() and not path.is_dir()]
    assert not gone or re.search(r"(?:at commit|git switch --detach) [0-9a-f]{7}\b", text), f"{page} names {gone}"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "examples/README.md", "integrations/vllm/README.md"])
def test_links_lead_to_files_and_headings(page: str) -> None:
    assert not dead_links(ROOT / page)


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Some `heading`, here\n## Twice\n## Twice\n```\n# no heading\n```\n")
    fine = (
        "[a](other.md#some-heading-here) [b](#mine) [c](other.md#twice-1) [d](https://x.org/y#z) `[e](gone)`\n# Mine\n"
    )
    page = tmp_path / "page.md"
    page.write_text(fine + "[a](other.md#no-heading) [b](gone.md) [c](#yours) ![d](gone.png)\n    [e](code.md)\n")
    assert dead_links(page) == ["other.md#no-heading", "gone.md", "#yours", "gone.png"]


def test_every_picture_is_linked_from_a_page() -> None:
    linked = {target for page in PAGES for target, _ in links(ROOT / page)}
    lost = [path for path in ROOT.glob("docs/**/*.png") if path not in linked]
    assert not lost, f"no page links {', '.join(path.relative_to(ROOT).as_posix() for path in lost)}"


def test_every_page_is_in_the_index() -> None:
    listed = {target for target, _ in links(ROOT / "docs" / "README.md")}
    missing = [page for page in PAGES[1:] if ROOT / page not in listed and page != "docs/README.md"]
    assert not missing, f"docs/README.md does not list {', '.join(missing)}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/studies/")])
def test_tables_of_figures_say_when_and_by_which_commit(page: str) -> None:
    """The section of a table says it, or one around it."""
    around: dict[int, str] = {}
    for section in re.split(r"^(?=#)", read(ROOT / page), flags=re.MULTILINE):
        level = len(section) - len(section.lstrip("#"))
        around = {at: text for at, text in around.items() if at < level} | {level: section}
        if re.search(r"^\|[ :|-]*---", section, re.MULTILINE):
            said = "".join(around.values())
            assert re.search(r"\b20\d\d-\d\d-\d\d\b.*\bcommits? ", said), f"{page}: {section.splitlines()[0]}"


def test_the_manual_is_short_enough_to_be_read() -> None:
    manual = [page for page in PAGES[1:] if not page.startswith("docs/studies/") and page != "docs/log.md"]
    words = {page: len(read(ROOT / page).split()) for page in manual}
    assert sum(words.values()) <= MANUAL_WORDS, f"measurements belong to docs/studies/: {words}"


@pytest.mark.parametrize("page", PAGES)
def test_options_with_braces_are_quoted_in_commands(page: str) -> None:
    """Bash makes two words of `policy.scorer={name:snapkv,budget:512}`, and the program gets neither option."""
    assert not expanded_by_bash(read(ROOT / page))


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("    run.py policy.scorer={name:h2o,budget:8} a=1\n", ["policy.scorer={name:h2o,budget:8}"]),
        ("    run.py a=1 \\\n        steps=[x,{name:y,z:{b:1}}]\n", ["steps=[x,{name:y,z:{b:1}}]"]),
        ("say `policy.options={a:1,b:2}` and\n", ["policy.options={a:1,b:2}"]),
        ("    # the user's choice\n    run.py policy={name:h2o,budget:8}\n", ["policy={name:h2o,budget:8}"]),
        ("    run.py 'policies=[x,\n        {name:y,z:1}]' b='{c:1,d:2}' \"e={f:1,g:2}\"\n", []),
        ("    run.py a={name:h2o}\n    # as a={b,c}\n    json {1,2}\n", []),
        ("```python\nx={1,2}\n```\nan entry `{name:full,bits:4}` of it\n", []),
    ],
)
def test_what_bash_expands_is_found(page: str, found: list[str]) -> None:
    assert expanded_by_bash(page) == found


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    citation = yaml.safe_load(read(ROOT / "CITATION.cff"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_numbers_of_examples_grow_with_the_profile() -> None:
    """With fixed ones `make test-slow` would try those of `make test` again. Properties inside a test have others."""
    fixed = [
        path for path in sorted((ROOT / "tests").rglob("*.py")) if re.search(r"^@settings\(", read(path), re.MULTILINE)
    ]
    assert not fixed, f"use tests.examples.examples in {', '.join(map(str, fixed))}"


def test_no_file_names_a_machine_or_an_index() -> None:
    files = repository_files()
    assert len(files) > 20, files
    found = [
        f"{path.relative_to(ROOT)}:{number} has {what}: {line.strip()[:80]}"
        for path in files
        if (data := path.read_bytes()) and b"\0" not in data
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), start=1)
        for what in forbidden_in(line)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "pieces",
    [
        ("cd /", "root/runahead"),
        ("report=/", "tmp/run.json"),
        ("open('/", "work/main')"),
        ("file:///", "home/ann/model"),
        ("pip install --extra-index", "-url x"),
        ("https://pypi", ".org/simple"),
        ("https://files.pythonhosted", ".org/x"),
        ("https://download", ".pytorch.org/whl/cpu"),
    ],
)
def test_a_forbidden_text_is_found(pieces: tuple[str, str]) -> None:
    assert len(forbidden_in("".join(pieces))) == 1


@pytest.mark.parametrize("line", ["paper/work/notes", "~/tmp/x", "/tmp", "$HOME/root/x", "a/b: work/root"])
def test_a_harmless_text_is_accepted(line: str) -> None:
    assert forbidden_in(line) == []


def expanded_by_bash(page: str) -> list[str]:
    """Options in a page's indented blocks and inline code that brace expansion splits: an unquoted `name=...{a,b}`."""
    text = without_code_blocks(page)
    blocks = re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^ {4}.*", "", text, flags=re.MULTILINE))
    word = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|(?<!\S)#.*|([\w.]+=[^\s'"{]*\{[^\s'"]*,[^\s'"]*\}[^\s'"]*)""")
    return [found[1] for code in (*blocks, *inline) for found in word.finditer(code) if found[1]]


def dead_links(page: Path) -> list[str]:
    """Links of a page to files that are not there, or to headings that their page does not have."""
    found = []
    for target, anchor in links(page):
        if not target.exists() or (anchor and anchor not in anchors(target)):
            path = "" if target == page else os.path.relpath(target, page.parent)
            found.append(path + (f"#{anchor}" if anchor else ""))
    return found


def links(page: Path) -> list[tuple[Path, str]]:
    """File and anchor of each link of a page into the repository, pictures included."""
    prose = re.sub(r"^ {4}.*|`[^`\n]*`", "", without_code_blocks(read(page)), flags=re.MULTILINE)
    targets = re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose)
    parts = [target.partition("#") for target in targets if not re.match(r"\w+:", target)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


def without_code_blocks(page: str) -> str:
    """A page without its fenced blocks, which are Python."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    made: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code_blocks(read(page)), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{anchor}-{made[anchor]}" if made[anchor] else anchor)
        made[anchor] += 1
    return found


def forbidden_in(line: str) -> list[str]:
    return [what for what, pattern in FORBIDDEN.items() if pattern.search(line)]


def repository_files() -> list[Path]:
    """Files of the repository, or of its next commit; without git, all that no tool left behind."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    if listing.returncode != 0 or not paths:
        left = re.compile(r"\.(?!ci$|gitignore$).*|__pycache__|build|dist|outputs|.*\.egg-info")
        paths = [path for path in ROOT.rglob("*") if not any(map(left.fullmatch, path.relative_to(ROOT).parts))]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
