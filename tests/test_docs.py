"""The documents are true: examples run, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minidist.bench.flags.parse import parse

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(document, language):
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_in_python_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples save files
    for block in blocks(document, "python"):
        exec(compile(block, str(document), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:minidist|kernels|tests|bench|docs|\.ci)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_run_programs_that_there_are(document):
    """Also the peers that a command names; what is in no folder is the reader's own program."""
    for path in re.findall(r"python ((?:bench|tests|docs)/[\w./-]+)", document.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_is_left_to_be_filled_in(document):
    left = r"\b(?:[A-Z][A-Z0-9_]*_(?:OUTPUT|TABLE|FIGURES)|TODO|TBD|FIXME|XXX)\b"
    assert re.findall(left, document.read_text()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_of_the_bench_use_flags_that_there_are(document):
    for line in re.findall(r"^.*-m minidist\.bench(.*)$", document.read_text(), re.MULTILINE):
        arguments = [
            word for word in line.split("#")[0].replace("`", " ").split() if word[0] == "-"
        ]
        parse([word for word in arguments if "=" in word])


def test_the_tour_names_every_module():
    text = (ROOT / "docs/layout.md").read_text()
    for path in sorted((ROOT / "minidist").glob("*.py")):
        assert path.name == "__init__.py" or path.name in text, path
    for folder in ("device", "comm", "variable_mgr", "trace", "bench"):
        for path in (ROOT / "minidist" / folder).glob("*.py"):
            assert path.name.startswith("__") or path.name in text, path
    for path in (ROOT / "kernels").glob("*.h"):
        assert path.name in text, path


def test_the_readme_shows_the_policies_that_there_are():
    from minidist.variable_mgr import POLICIES

    text = (ROOT / "README.md").read_text()
    table = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    assert set(table) - {"variable_update"} == set(POLICIES)  # which is the heading
