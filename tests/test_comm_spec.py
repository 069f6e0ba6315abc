"""The grammar of all_reduce_spec, and what each of its words makes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import ORDER

import minidist as md
from minidist import comm
from minidist.comm.spec import (
    ALGORITHMS,
    BETWEEN,
    SHARDED,
    SHARDED_BETWEEN,
    Range,
    Spec,
    parse,
)
from minidist.errors import UsageError

UNITS = {"": 1, "k": 2**10, "K": 2**10, "m": 2**20, "M": 2**20, "g": 2**30, "G": 2**30}


@st.composite
def specs(draw):
    """Return a text and the spec that it says."""
    limits = sorted(
        draw(st.sets(st.tuples(st.integers(0, 4096), st.sampled_from(sorted(UNITS))), max_size=3)),
        key=lambda limit: limit[0] * UNITS[limit[1]],
    )
    values = [number * UNITS[unit] for number, unit in limits]
    limits = [limit for i, limit in enumerate(limits) if values.index(values[i]) == i]
    ranges, parts = [], []
    for limit in [*limits, None]:
        algorithm = draw(st.sampled_from(ALGORITHMS))
        shards = draw(st.integers(1, 64)) if algorithm in SHARDED else 1
        shown = shards > 1 or draw(st.booleans())
        parts.append(f"{algorithm}#{shards}" if shown else algorithm)
        between, across = None, 1
        if algorithm != "collective" and draw(st.booleans()):
            between = draw(st.sampled_from(BETWEEN))
            across = draw(st.integers(1, 9)) if between in SHARDED_BETWEEN else 1
            parts[-1] += f"/{between}" + f"#{across}" * (across > 1 or draw(st.booleans()))
        value = None
        if limit is not None:
            parts.append(f"{limit[0]}{limit[1]}")
            value = limit[0] * UNITS[limit[1]]
        ranges.append(Range(algorithm, shards, value, between, across))
    return ":".join(parts), Spec(tuple(ranges))


@given(specs())
def test_a_text_means_its_ranges_and_back(both):
    text, spec = both
    assert parse(text) == spec
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)
    assert len(str(spec)) <= len(text)


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("xring", "xring"),
        ("xring#1", "xring"),
        ("pscpu:2k:xring#2", "pscpu:2K:xring#2"),
        ("pscpu:2048:xring", "pscpu:2K:xring"),
        ("pscpu:2049:psgpu#4:3m:rechd", "pscpu:2049:psgpu#4:3M:rechd"),
        ("copy:1g:xring", "copy:1G:xring"),
        ("copy:0:xring", "copy:0:xring"),
        ("copy:1024m:xring", "copy:1G:xring"),
        ("pscpu#2/pscpu#1:4K:copy/xring", "pscpu#2/pscpu:4K:copy/xring"),
        ("pscpu/pscpu#3", "pscpu/pscpu#3"),
    ],
)
def test_the_text_of_a_spec_is_the_shortest(text, shortest):
    assert str(parse(text)) == shortest


@given(st.lists(st.integers(0, 5000)), specs())
def test_each_tensor_is_in_the_first_range_that_takes_it(sizes, both):
    _, spec = both
    members = spec.members(sizes)
    assert sorted(i for own in members for i in own) == list(range(len(sizes)))
    for own, one in zip(members, spec.ranges, strict=True):
        assert own == sorted(own)
        before = spec.ranges[: spec.ranges.index(one)]
        for i in own:
            assert one.limit is None or sizes[i] <= one.limit
            assert all(earlier.limit < sizes[i] for earlier in before)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no algorithm is called ''"),
        ("ring", "'ring'.*there are auto, copy, pscpu"),
        ("XRING", "'XRING'"),
        (" xring", "' xring'"),
        ("xring:2k", "2 parts.*odd"),
        ("xring:2k:pscpu:4k", "4 parts.*odd"),
        ("xring:", "2 parts"),
        ("xring:x:pscpu", "'x' is no limit"),
        ("xring:-1:pscpu", "'-1' is no limit"),
        ("xring:1.5k:pscpu", "'1.5k' is no limit"),
        ("xring:2t:pscpu", "'2t' is no limit"),
        ("xring:٣:pscpu", "is no limit"),
        ("xring:k:pscpu", "'k' is no limit"),
        ("xring::pscpu", "'' is no limit"),
        ("xring:4:pscpu:4:copy", r"\[4, 4\] must rise"),
        ("xring:4k:pscpu:4:copy", r"\[4096, 4\] must rise"),
        ("xring#", "not ''"),
        ("xring#0", "not '0'"),
        ("pscpu#1025", "from 1 to 1024"),
        ("xring#-1", "not '-1'"),
        ("xring#two", "not 'two'"),
        ("xring#2#3", "not '2#3'"),
        ("copy#2", "copy has no shards; pscpu, psgpu, xring may have"),
        ("rechd#2", "rechd has no shards"),
        ("auto#2", "auto has no shards"),
        ("nccl#2", "nccl has no shards"),
        ("copy/nccl#2", "nccl has no shards between machines"),
        ("copy/", "no algorithm is called '' between machines"),
        ("/xring", "no algorithm is called ''"),
        ("copy/copy", "'copy' between machines; there are xring, rechd, pscpu, nccl, collective"),
        ("copy/xring/xring", "'xring/xring' between machines"),
        ("copy/xring#2", "xring has no shards between machines; pscpu may have"),
        ("collective/xring", "over all ranks; before the slash"),
    ],
)
def test_what_is_no_spec_here_is_an_error_when_it_is_parsed(text, says):
    with pytest.raises(UsageError, match=says) as raised:
        parse(text)
    assert isinstance(raised.value, ValueError)
    assert repr(text) in str(raised.value)
    with pytest.raises(ValueError, match=says):
        md.Strategy("cpu*2", all_reduce_spec=text)


@given(st.text(alphabet="xringpscu:#0123kKMG/copyauto ", max_size=24))
def test_any_text_is_a_spec_or_a_usage_error(text):
    try:
        spec = parse(text)
    except UsageError:
        return
    assert parse(str(spec)) == spec
    one = r"[a-z_]+(#\d+)?(/[a-z_]+(#\d+)?)?"
    assert re.fullmatch(rf"{one}(:\d+[kKMmGg]?:{one})*", text)


def test_what_is_no_text_is_a_usage_error():
    for wrong in (None, 3, ["xring"]):
        with pytest.raises(UsageError, match="no text"):
            parse(wrong)


@pytest.mark.parametrize("text", [*(name for name in ALGORITHMS if name != "nccl"), *ORDER])
def test_every_algorithm_says_its_class_of_order(text):
    expected = ORDER[text] if text in ORDER else comm.make(text, md.devices("cpu*2")).order
    assert comm.make(text, md.devices("cpu*2")).order == expected
    assert expected in ("serial", "ring", "tree", "mixed")


def test_auto_stays_in_the_serial_class():
    """Decision 1."""
    for devices in ("cpu", "cpu*2", "cpu*8", "host"):
        assert comm.make("auto", md.devices(devices)).order == "serial"


def test_only_algorithms_have_shards():
    assert set(SHARDED) < set(ALGORITHMS)


@pytest.mark.parametrize("text", ["nccl", "pscpu:2k:nccl", "nccl/xring"])
def test_nccl_is_for_gpus(text):
    assert parse(text).by_nccl and not parse("copy/xring:4:auto").by_nccl
    with pytest.raises(UsageError, match="nccl sums on GPUs, and cpu:0 is none; use auto"):
        comm.make(text, md.devices("cpu*2"))
    with pytest.raises(UsageError, match="nccl sums on GPUs"):
        md.Strategy("cpu*2", all_reduce_spec=text)


# --- options of policies ------------------------------------------------------------------------


def test_hierarchical_copy_is_a_spec_of_that_name():
    def order(**options):
        return md.Strategy("cpu*2", **options)._communicator.order

    assert order() == "serial"
    assert order(hierarchical_copy=True) == "tree"
    assert order(hierarchical_copy=True, all_reduce_spec="hierarchical_copy") == "tree"
    for other in ("copy", "xring", "rechd"):
        with pytest.raises(ValueError, match=f"hierarchical_copy and .*{other}"):
            order(hierarchical_copy=True, all_reduce_spec=other)


@pytest.mark.parametrize(
    "options",
    [
        {"hierarchical_copy": True},
        {"all_reduce_spec": "hierarchical_copy"},
        {"all_reduce_spec": "copy:4k:hierarchical_copy"},
    ],
)
def test_hierarchical_copy_needs_two_devices(options):
    with pytest.raises(ValueError, match="one device"):
        md.Strategy("cpu*1", **options)


def test_what_gradients_may_be_rounded_to():
    for wrong in ("float32", "half", 2, None):
        with pytest.raises(ValueError, match="compact_gradient_transfer"):
            md.Strategy("cpu*2", compact_gradient_transfer=wrong)
    for right in (False, True, "float16", "bfloat16"):
        md.Strategy("cpu*2", compact_gradient_transfer=right).close()
