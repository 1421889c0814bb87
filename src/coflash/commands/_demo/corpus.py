"""The demo's text: passages of English prose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import coflash


@dataclass(frozen=True)
class Passage:
    source: str
    text: str


def load(folder: Path | None) -> list[Passage]:
    """The prose of a folder's .md and .txt files; without one, of coflash's own documentation."""
    if folder is not None:
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt"))
        passages = [
            passage for path in files for passage in _prose(str(path.relative_to(folder)), path.read_text())
        ]
        if not passages:
            raise SystemExit(f"{folder} holds no .md or .txt file with a paragraph of prose")
        return passages
    root = _checkout()
    passages = []
    if root is not None:
        for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
            passages += _prose(str(path.relative_to(root)), path.read_text())
    # The docstrings: most of what an installed package has, and the larger half of a checkout's prose.
    package = Path(coflash.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for docstring in re.findall(r'"""(.*?)"""', path.read_text(), flags=re.DOTALL):
            passages += _prose(str(path.relative_to(package)), docstring)
    return passages


def sample(passages: list[Passage], count: int) -> list[Passage]:
    """At most `count` passages, evenly spread: of the documents, where these have enough to search in."""
    documents = [passage for passage in passages if passage.source.endswith((".md", ".txt"))]
    pool = documents if len(documents) >= 40 else passages
    return pool if len(pool) <= count else [pool[i * len(pool) // count] for i in range(count)]


def describe(folder: Path | None) -> str:
    if folder is not None:
        return str(folder)
    return "this repository's docs and docstrings" if _checkout() else "coflash's docstrings"


def _checkout() -> Path | None:
    """The repository this package runs from, if it does."""
    root = Path(coflash.__file__).parents[2]
    return root if (root / "docs").is_dir() and (root / "pyproject.toml").exists() else None


def _prose(source: str, text: str) -> list[Passage]:
    """Paragraphs of at least 12 words; code, tables, headings and argument lists are left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    passages = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in paragraph.splitlines()]
        prose = " ".join(line for line in lines if line and line[0] not in "#|>")
        if len(prose.split()) >= 12:
            passages.append(Passage(source, prose))
    return passages
