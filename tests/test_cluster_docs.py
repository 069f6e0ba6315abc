"""The files to copy for clusters: docs/cluster.md names them, and their commands are right."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from minidist.bench.flags.parse import parse as parse_bench
from minidist.launch.arguments import parse as parse_launch

DOCS = Path(__file__).parent.parent / "docs"
FILES = sorted((DOCS / "cluster").iterdir())
# What the cluster puts in the place of these.
THERE = {'"$SLURM_NTASKS"': "2", "/etc/mpi/hostfile": str(DOCS / "cluster" / "hosts")}


def words(file):
    text = file.read_text()
    for name, value in THERE.items():
        text = text.replace(name, value)
    return re.sub(r"\\\n|^\s*- ", " ", text, flags=re.MULTILINE).split()


def flags_after(program, all_words):
    """Return the flags that follow a program's name, up to the next word that is none."""
    rest = all_words[all_words.index(program) + 1 :]
    return rest[: next(i for i, word in enumerate([*rest, "-m"]) if word == "-m" or word[0] != "-")]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_each_file_is_named_and_its_command_is_one_there_is(file):
    assert f"(cluster/{file.name})" in (DOCS / "cluster.md").read_text()
    all_words = words(file)
    if "minidist.bench" in all_words:
        flags = flags_after("minidist.bench", all_words)
        assert len(flags) >= 3
        assert parse_bench(flags).variable_update == "collective_all_reduce"
    if "minidist.launch" in all_words:
        start = all_words.index("minidist.launch") + 1
        plan, restarts, tag = parse_launch(all_words[start:])
        assert (plan.count, restarts, tag) == (2, 3, True)
        assert plan.command[1:3] == ["-m", "minidist.bench"]
    if file.suffix == ".sh":
        subprocess.run(["bash", "-n", str(file)], check=True)


def test_the_options_that_are_described_are_those_there_are(capsys):
    with pytest.raises(SystemExit):
        parse_launch(["--help"])
    there = set(re.findall(r"--\w+", capsys.readouterr().out)) - {"--help"}
    table = re.findall(r"^\| (`-.*?) \|", (DOCS / "cluster.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"--\w+", " ".join(table))) == there
