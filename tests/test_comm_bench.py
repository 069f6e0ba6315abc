"""python -m minidist.comm_bench: what it counts as wrong, what it prints, and how it ends."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import minidist as md
from minidist import comm
from minidist.comm_bench import data
from minidist.comm_bench.__main__ import main
from minidist.comm_bench.buffers import Buffers
from minidist.comm_bench.data import DTYPES, OPS
from minidist.comm_bench.flags import Flags, parse
from minidist.comm_bench.measure import Measured
from minidist.comm_bench.verbs import VERBS
from minidist.errors import UsageError

QUICK = ("--iters=2", "--warmup_iters=1")
LINE = re.compile(
    r"^ *(?P<bytes>\d+) +(?P<count>\d+) +(?P<datatype>\w+) +(?P<op>[\w-]+) (?P<verb>\w+) +"
    r"(?P<algorithm>\S+) +(?P<in_place>yes|no) +(?P<time>[\d.]+) +(?P<lowest>[\d.]+) \.\. "
    r"(?P<highest>[\d.]+) +(?P<algbw>[\d.]+) +(?P<busbw>[\d.]+) +(?P<wrong>\d+|N/A)$",
    re.MULTILINE,
)


def run(*flags):
    """Run the command in this process; return its exit status, output and errors."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        status = main(flags)
    return status, out.getvalue(), errors.getvalue()


def lines(text):
    return [match.groupdict() for match in LINE.finditer(text)]


# --- the values -----------------------------------------------------------------------------------


def brought(dtype, op, replicas, round_=0, size=1000):
    return [data.brought(dtype, size, op, replicas, k, round_) for k in range(replicas)]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.permutations(range(7)), st.integers(1, 6), st.integers(0, 3))
def test_sums_are_the_same_in_any_order(dtype, order, middle, round_):
    values = brought(dtype, "sum", 7, round_)
    right = data.result(dtype, 1000, "sum", 7, round_)

    def total(members):
        found = values[members[0]].copy()
        for member in members[1:]:
            found = found + values[member]
            assert found.dtype == right.dtype
        return found

    assert data.wrong(total(order[:middle]) + total(order[middle:]), right) == 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_are_those_of_whole_numbers(dtype, op):
    counts = {"sum": [1] * 5, "mean": [1] * 5, "weighted": [1, 2, 3, 1, 2]}[op]
    values = [[int(v) for v in array] for array in brought(dtype, op, 5)]
    columns = zip(*values, strict=True)
    totals = [sum(c * v for c, v in zip(counts, column, strict=True)) for column in columns]
    wide = np.float64 if dtype == "float64" else np.float32
    factor = wide(1.0) if op == "sum" else wide(1 / sum(counts))
    right = (np.array(totals, np.int64).astype(wide) * factor).astype(np.dtype(dtype_of(dtype)))
    assert [int(total) for total in np.array(totals, np.int64).astype(wide)] == totals
    assert data.wrong(data.result(dtype, 1000, op, 5, 0), right) == 0


def dtype_of(name):
    return bfloat16 if name == "bfloat16" else name


def test_replicas_and_rounds_bring_values_of_their_own():
    values = [*brought("float32", "sum", 3), *brought("float32", "sum", 3, round_=1)]
    for i, one in enumerate(values):
        for other in values[:i]:
            assert np.count_nonzero(one != other) > 990
    again = brought("float32", "sum", 3)
    assert all(map(np.array_equal, again, values))


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_what_went_through_a_narrower_type_is_wrong(narrow):
    right = data.result("float32", 1000, "sum", 2, 0)
    with np.errstate(over="ignore"):
        rounded = right.astype(dtype_of(narrow)).astype(np.float32)
    assert data.wrong(rounded, right) > 950


def test_more_replicas_than_have_exact_sums_are_refused():
    data.brought("bfloat16", 3, "sum", 256, 0, 0)
    with pytest.raises(UsageError, match=r"at most 256 terms.*take float32"):
        data.brought("bfloat16", 3, "sum", 257, 0, 0)


# --- what is wrong --------------------------------------------------------------------------------

N, DEVICES = 24, 3


def do(verb, buffers):
    """Do a verb in NumPy."""
    gives, gets, op = buffers.gives, buffers.gets, buffers.op
    part = buffers.part
    if verb == "broadcast":
        for array in gets:
            array[...] = gives[buffers.root].copy()
        return
    if verb == "all_gather":
        whole = np.concatenate([array.copy() for array in gives])
        for array in gets:
            array[...] = whole
        return
    counts = [1, 2, 3] if op == "weighted" else [1, 1, 1]
    total = sum(c * array.astype(np.float64) for c, array in zip(counts, gives, strict=True))
    if op != "sum":
        total *= 1 / sum(counts)
    for k, array in enumerate(gets):
        if array is not None:
            array[...] = total[k * part : (k + 1) * part] if verb == "reduce_scatter" else total


def buffers_for(verb, op="sum", in_place=False, dtype="float64"):
    devices = md.devices(f"cpu*{DEVICES}")
    how = {"devices": devices, "replicas": DEVICES, "root": 1, "in_place": in_place}
    return Buffers(VERBS[verb], dtype, N + 2, op, **how)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_right_is_right_and_every_single_element_can_be_wrong(verb, in_place):
    for op in OPS if VERBS[verb].sums else ["sum"]:
        buffers = buffers_for(verb, op, in_place)
        for round_ in range(2):
            buffers.fill(round_)
            do(verb, buffers)
            assert buffers.wrong(round_) == 0
            assert buffers.wrong(round_ + 1) > 0, "data of another round would do as well"
        for array in buffers.gets:
            for i in range(0 if array is None else len(array)):
                was = array[i]
                array[i] += 1
                assert buffers.wrong(round_) == 1
                array[i] = was


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("verb", VERBS)
def test_to_do_nothing_is_wrong(verb, dtype, in_place):
    buffers = buffers_for(verb, in_place=in_place, dtype=dtype)
    buffers.fill(0)
    assert buffers.wrong(0) > 0


@pytest.mark.parametrize("verb", VERBS)
def test_to_write_into_what_is_given_is_wrong(verb):
    buffers = buffers_for(verb)
    buffers.fill(0)
    do(verb, buffers)
    buffers.gives[1][0] += 1
    assert buffers.wrong(0) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_in_place_is_the_same_memory_and_else_it_is_not(verb):
    for in_place in (True, False):
        buffers = buffers_for(verb, in_place=in_place)
        for number, (gives, gets) in enumerate(zip(buffers.gives, buffers.gets, strict=True)):
            if gives is not None and gets is not None:
                assert np.shares_memory(gives, gets) == in_place
            if in_place and verb in ("all_gather", "reduce_scatter"):
                whole, part = (gets, gives) if verb == "all_gather" else (gives, gets)
                size = N + 2
                assert part.ctypes.data - whole.ctypes.data == number * (size // DEVICES) * 8


def test_rest_leaves_zeros_that_stay_zeros():
    buffers = buffers_for("all_reduce", in_place=True)
    buffers.rest()
    do("all_reduce", buffers)
    assert not any(array.any() for array in buffers.gets)


# --- what is counted ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "factors"),
    [
        ("all_reduce", [0, 1, 4 / 3, 1.5, 1.75]),
        ("reduce", [1, 1, 1, 1, 1]),
        ("broadcast", [1, 1, 1, 1, 1]),
        ("all_gather", [0, 1 / 2, 2 / 3, 3 / 4, 7 / 8]),
        ("reduce_scatter", [0, 1 / 2, 2 / 3, 3 / 4, 7 / 8]),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(verb, factors):
    assert [VERBS[verb].bus(n) for n in (1, 2, 3, 4, 8)] == pytest.approx(factors)


def test_bandwidth_is_bytes_by_the_median_time():
    seconds = (5e-6, 4e-6, 100e-6)
    one = Measured("copy", "all_reduce", "float32", "sum", True, 4000, 1000, 4, 1.5, seconds, 0)
    assert one.microseconds["median"] == pytest.approx(5)
    assert one.microseconds["lowest"] == pytest.approx(4)
    assert one.microseconds["highest"] == pytest.approx(100)
    assert one.algbw == pytest.approx(0.8)  # 4000 bytes in 5 us
    assert one.busbw == pytest.approx(1.2)


@pytest.mark.parametrize("verb", VERBS)
def test_sizes_are_of_the_whole_and_counts_are_of_what_one_replica_has_a_part_of(verb):
    buffers = buffers_for(verb)
    parts = VERBS[verb].parts
    assert buffers.nbytes == (24 if parts else 26) * 8
    assert buffers.part == (8 if parts else 26)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_communicator_is_right_with_every_verb_type_and_op(replicas, tmp_path):
    file = tmp_path / "results.json"
    flags = ("-b=40", "-e=40K", "-f=1024", f"-g={replicas}", "-d=all", "-o=all")
    flags += ("--all_reduce_spec=all", f"--json={file}", "--iters=1", "--warmup_iters=0")
    status, text, errors = run(*flags)
    assert (status, errors) == (0, "")
    assert "# Out of bounds values : 0 OK" in text
    results = json.loads(file.read_text())
    expected = {"copy", "pscpu", "psgpu", "xring", "rechd", "hierarchical_copy"}
    if replicas == 1:
        expected.remove("hierarchical_copy")
        assert "two" in results["elsewhere"]["hierarchical_copy"]
    assert {line["algorithm"] for line in results["results"]} == expected
    kinds = {(line["verb"], line["datatype"], line["op"]) for line in results["results"]}
    for verb in ("all_reduce", "reduce", "reduce_scatter"):
        assert {kind[1:] for kind in kinds if kind[0] == verb} == {
            *((dtype, "sum") for dtype in DTYPES),
            *((dtype, op) for dtype in DTYPES if "float" in dtype for op in OPS),
        }
    assert {kind[1:] for kind in kinds if kind[0] == "broadcast"} == {(d, "-") for d in DTYPES}


def test_the_table_says_what_the_file_says(tmp_path):
    file = tmp_path / "results.json"
    status, text, _ = run(
        *QUICK, "-b=1K", "-e=4K", "-f=2", "--all_reduce_spec=copy", "-J", f"{file}"
    )
    assert status == 0
    results = json.loads(file.read_text())
    assert results["schema"] == 1
    assert results["wrong"] == 0
    assert results["config"]["min_bytes"] == 1024
    assert results["processes"][0]["devices"] == ["cpu:0", "cpu:1"]
    assert results["versions"]["mpi"] is None
    table = lines(text)
    assert len(table) == len(results["results"]) > 3
    for told, line in zip(table, results["results"], strict=True):
        for name in ("bytes", "count", "wrong"):
            assert int(told[name]) == line[name]
        for name in ("datatype", "op", "verb", "algorithm"):
            assert told[name] == line[name]
        assert told["in_place"] == ("yes" if line["in_place"] else "no")
        times = line["time_us"]
        assert min(line["times_us"]) == times["lowest"] <= times["median"] <= times["highest"]
        assert len(line["times_us"]) == 2
        assert float(told["time"]) == pytest.approx(times["median"], abs=0.51)
        assert line["algbw"] == pytest.approx(line["bytes"] / times["median"] / 1e3)
        assert line["busbw"] == pytest.approx(line["algbw"] * VERBS[line["verb"]].bus(2))
    sizes = [int(told["bytes"]) for told in table if told["verb"] == "all_reduce"]
    assert sizes == [1024, 1024, 2048, 2048, 4096, 4096]
    average = sum(line["busbw"] for line in results["results"]) / len(table)
    assert float(re.search(r"# Avg bus bandwidth    : (.+)", text)[1]) == pytest.approx(
        average, rel=1e-4
    )


class Spoilt(comm.Communicator):
    """Sums as another one, and then adds 1 to the last element that destination 1 gets."""

    def __init__(self, whole):
        self.whole, self.devices, self.order = whole, whole.devices, whole.order

    def _all_reduce(self, sources, destinations, *how):
        self.whole._all_reduce(sources, destinations, *how)
        destinations[-1][0][-1:] += 1

    def predicted_bytes(self, tensors, destinations):
        return self.whole.predicted_bytes(tensors, destinations)


def test_a_communicator_that_is_wrong_in_one_element_ends_the_command_with_1(monkeypatch, tmp_path):
    make = comm.make
    monkeypatch.setattr(comm, "make", lambda *args, **how: Spoilt(make(*args, **how)))
    file = tmp_path / "results.json"
    flags = (*QUICK, "--verb=all_reduce", "-b=4K", "-e=4K", f"--json={file}")
    status, text, errors = run(*flags, "--check=3")
    assert (status, errors) == (1, "")
    assert [told["wrong"] for told in lines(text)] == ["3", "3"]
    assert "# Out of bounds values : 6 FAILED" in text
    assert json.loads(file.read_text())["wrong"] == 6
    status, text, errors = run(*flags, "--check=0")
    assert (status, errors) == (0, "")
    assert [told["wrong"] for told in lines(text)] == ["N/A", "N/A"]
    assert "# Out of bounds values : N/A" in text
    assert json.loads(file.read_text())["wrong"] is None


def test_a_communicator_that_rounds_to_16_bits_is_wrong(monkeypatch):
    make = comm.make
    monkeypatch.setattr(comm, "make", lambda *args, **how: make(*args, compact="bfloat16", **how))
    status, text, _ = run(*QUICK, "--verb=all_reduce", "-b=4K", "-e=4K")
    assert status == 1
    assert all(int(told["wrong"]) > 1900 for told in lines(text))  # of 2 × 1024


# --- the flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--min_bytes=1K", "--max_bytes=8"], "--max_bytes=8 is below --min_bytes=1024"),
        (["-b=0", "-e=8"], "--min_bytes=0 never gets larger"),
        (["-b=many"], "-b=many is not a number of bytes such as 8, 64K, 16M or 1G"),
        (["--step_factor=1"], "--step_factor=1 is not a whole number from 2"),
        (["--verb=all_reduce,gather"], "all, or with commas between them some of all_reduce"),
        (["--datatype=float8"], "--datatype=float8 is not all, or with commas"),
        (["--op=prod"], "some of sum, mean, weighted"),
        (["--op=mean", "-d=int32,int8"], "there is only the sum"),
        (["--root=2"], "--root=2: there are 2 replicas, and the first is number 0"),
        (["--all_reduce_spec=xring,ring"], "no algorithm is called 'ring'"),
        (["--all_reduce_spec=nccl"], "nccl sums on GPUs, and cpu:0 is none; use auto"),
        (["--all_reduce_spec=mpi"], "start this under mpiexec"),
        (["--all_reduce_spec=copy,"], "--all_reduce_spec=copy, is not all, or specs"),
        (["--all_reduce_spec=copy", "-g=1", "--verb=all_gather"], "none of these communicators"),
        (["--iters=0"], "--iters=0 is not a whole number from 1"),
        (["--timeout=0"], "--timeout=0 is not a number above 0"),
        (["--minbytes=8"], "did you mean --min_bytes?"),
        (["-z=8"], "'-z=8' is not a flag"),
        (["-b=8", "--min_bytes=16"], "--min_bytes and -b are the same flag"),
    ],
)
def test_flags_that_are_wrong_end_the_command_with_2_and_a_sentence(flags, words):
    status, text, errors = run(*flags)
    assert status == 2
    assert lines(text) == []
    assert errors.startswith("minidist.comm_bench: ")
    assert errors.count("\n") == 1, "a sentence and nothing else"
    assert words in errors


def test_flags_have_the_letters_of_nccl_tests():
    pairs = {"b": 8, "e": "1K", "f": 4, "n": 3, "w": 2, "c": 5, "d": "float64", "o": "mean"}
    pairs |= {"r": 1, "g": 3, "T": 9}
    letters = parse([str(part) for name, value in pairs.items() for part in (f"-{name}", value)])
    words = parse(
        [
            *("--min_bytes=8", "--max_bytes=1024", "--step_factor=4", "--iters=3"),
            *("--warmup_iters=2", "--check=5", "--datatype=float64", "--op=mean", "--root=1"),
            *("--num_devices=3", "--timeout=9"),
        ]
    )
    assert letters == words
    assert list(words.sizes()) == [8, 32, 128, 512]


def test_flags_are_told_as_they_are_given():
    assert str(parse([])) == "comm_bench"
    flags = ["--min_bytes=8", "--verb=reduce,broadcast", "--iters=3"]
    assert str(parse(flags)) == " ".join(["comm_bench", *flags])


def test_sizes_end_with_the_last_that_is_not_too_large():
    assert list(parse(["-b=3", "-e=50", "-f=2"]).sizes()) == [3, 6, 12, 24, 48]
    assert list(parse(["-b=0", "-e=0"]).sizes()) == [0]
    assert list(parse(["-b=1M", "-e=1M"]).sizes()) == [1 << 20]
    assert list(parse(["-b=1G", "-e=4g", "-f=4"]).sizes()) == [1 << 30, 4 << 30]


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in parse([]).config():
        assert f"--{name}" in text


def test_the_document_names_every_flag_and_its_commands_can_be_run():
    text = (Path(__file__).parent.parent / "docs/comm_bench.md").read_text()
    for item in fields(Flags):
        assert f"`--{item.name}`" in text
        for letter in item.metadata["aliases"]:
            assert re.search(rf"^\| .*`--{item.name}`.* \| .*\b{letter}\b", text, re.MULTILINE)
    commands = re.findall(r"^ .*-m minidist\.comm_bench(.*)$", text, re.MULTILINE)
    assert len(commands) > 4
    for command in commands:
        parse(command.split("#")[0].split())
