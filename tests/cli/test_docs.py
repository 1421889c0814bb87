"""The documents keep what they promise: examples run, links lead somewhere, commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from coflash import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_first_example_runs(capsys):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL).group(1)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape and names["lse"].dtype == torch.float32
    assert "torch.Size([2, 1024, 8, 64])" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_verb_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert all(f"`coflash {verb}" in text for verb in cli.VERBS)


def test_commands_in_the_readme_parse():
    """`coflash ...` lines name verbs and flags that exist."""
    import argparse
    import importlib

    for line in re.findall(r"`coflash ([^`]+)`", (ROOT / "README.md").read_text()):
        verb, *words = line.split()
        command = importlib.import_module(f"coflash.commands.{verb}")
        parser = argparse.ArgumentParser(exit_on_error=False)
        command.configure(parser)
        parser.parse_args(words)


def test_make_targets_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()):
        if target != "gcc":
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_ci_runs_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script and "make test" in (ROOT / "README.md").read_text()
