"""docs/semantics.md is whole and true: every rule once, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
RULES = ROW.findall((ROOT / "docs/semantics.md").read_text())


def test_every_rule_stands_in_the_table_once():
    assert [int(number) for number, _, _ in RULES] == list(range(1, 233))


def test_a_rule_has_a_test_or_a_reason():
    for number, rule, where in RULES:
        named = re.findall(r"(\w+\.py)::(\w+)", where)
        assert named or re.match(r"(left out|overridden): \S", where), (number, rule, where)
        for file, function in named:
            text = (ROOT / "tests" / file).read_text()
            assert re.search(rf"^def {function}\(", text, re.MULTILINE), (number, file, function)


def test_a_test_that_bears_a_number_stands_in_the_table():
    table = (ROOT / "docs/semantics.md").read_text()
    for path in sorted((ROOT / "tests").glob("test_rules_*.py")):
        for function in re.findall(r"^def (test_\d{3}\w*)\(", path.read_text(), re.MULTILINE):
            assert f"{path.name}::{function}" in table, (path.name, function)
