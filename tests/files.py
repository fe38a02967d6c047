"""The lists of files, in the README.md of each package, from the first line of each file: `python -m tests.files`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("runahead", "partitioner", "policies", "launch", "benchmarks")


def files_page(package: str) -> str:
    """The list as Markdown: a section per folder, with the first line of its __init__.py, and a line per file."""
    lines = [
        f"# {package}/",
        "",
        _first_line(ROOT / package / "__init__.py"),
        "",
        "Made by `python -m tests.files` from the first line of each file.",
        "[docs/architecture.md](../docs/architecture.md) says how they work together.",
    ]
    for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
        name = folder.relative_to(ROOT / package).as_posix()
        if name != ".":
            lines += ["", f"## {name}/", "", _first_line(folder / "__init__.py")]
        paths = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        lines += ["", *(f"- [{path.name}]({_link(path, package)}): {_first_line(path)}" for path in paths)]
    return "\n".join(lines) + "\n"


def _link(path: Path, package: str) -> str:
    return path.relative_to(ROOT / package).as_posix()


def _first_line(path: Path) -> str:
    """Raises: ValueError: a file does not say in its first line what it is."""
    line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    if not line.endswith((".", "?")):
        raise ValueError(f"{path.relative_to(ROOT)}: the first line of its docstring, {line!r}, is no sentence")
    return line


if __name__ == "__main__":
    for package in PACKAGES:
        (ROOT / package / "README.md").write_text(files_page(package), encoding="utf-8")
