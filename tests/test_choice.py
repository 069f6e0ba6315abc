"""Choices are measured once for each kind of work, remembered, and shared by processes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import minidist as md
from minidist import threads
from minidist.device import cpu_choice, cpu_linear, cpu_onednn, cpu_work, kernel_choice
from minidist.device.cpu_choice import Choices
from minidist.device.cpu_work import Convolution, Product
from minidist.device.ops import Window
from minidist.dtypes import as_dtype
from minidist.errors import UsageError
from minidist.kernels import layer, tiles

DEEP = "[" * 100_000
FLOAT = np.dtype(np.float32)
WINDOW = Window((3, 3), (1, 1), (1, 1), (1, 1), (32, 32))


class Clock:
    """Time that only passes while one of the ways is at work."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.runs = 0
        monkeypatch.setattr(cpu_choice.time, "thread_time", lambda: self.now)

    def takes(self, *seconds: float):
        """Return a way that takes so long, time after time."""
        left = [seconds[0], *seconds] if len(seconds) > 1 else list(seconds) * 100

        def way() -> None:
            self.runs += 1
            self.now += left.pop(0)

        return way


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def kernels():
    """Let a test say which implementations compute."""
    before = cpu_linear.kernels()
    yield cpu_linear.set_kernels
    cpu_linear.set_kernels(before)


def read(path: Path):
    return json.loads(path.read_text())["choices"]


def test_the_fastest_is_chosen_by_its_best_time(clock, tmp_path) -> None:
    choices = Choices(tmp_path / "of" / "kernels.json", {"processor": "this"})
    jumpy = clock.takes(9, 9, 1, 9, 9)
    assert choices.get("work", {"steady": clock.takes(2), "jumpy": jumpy}) == "jumpy"
    found = read(choices.path)["work"]
    assert found == {"chosen": "jumpy", "microseconds": {"steady": 2e6, "jumpy": 1e6}}
    assert json.loads(choices.path.read_text())["processor"] == "this"


def test_what_a_way_does_first_is_not_timed(clock, tmp_path) -> None:
    left = [0.0]  # as where one call finds all in the cache; the others take longer

    def lucky() -> None:
        clock.now += left.pop() if left else 3.0

    choices = Choices(tmp_path / "kernels.json", {})
    assert choices.get("work", {"lucky": lucky, "steady": clock.takes(2)}) == "steady"
    assert clock.runs == 1 + cpu_choice.ROUNDS


def test_of_equals_the_first_is_chosen(clock, tmp_path) -> None:
    choices = Choices(tmp_path / "kernels.json", {})
    assert choices.get("work", {"gemm": clock.takes(1), "other": clock.takes(1)}) == "gemm"


def test_what_was_measured_is_never_measured_again(clock, tmp_path) -> None:
    path = tmp_path / "kernels.json"
    first, second = Choices(path, {}), Choices(path, {})
    ways = {"slow": clock.takes(2), "fast": clock.takes(1)}
    assert first.get("work", ways) == "fast"
    runs = clock.runs
    reversed_ = {"slow": clock.takes(1), "fast": clock.takes(2)}
    assert first.get("work", reversed_) == second.get("work", reversed_) == "fast"
    assert Choices(path, {}).get("work", reversed_) == "fast" and clock.runs == runs
    assert second.get("other", reversed_) == "slow"
    assert first.get("third", reversed_) == "slow"
    assert set(read(path)) == {"work", "other", "third"}  # nobody's choices were lost


def test_who_comes_while_another_measures_waits_for_it(clock, tmp_path) -> None:
    path = tmp_path / "kernels.json"
    begun, go_on = threading.Event(), threading.Event()
    told: list[str | None] = []

    def slow() -> None:
        begun.set()
        go_on.wait(60)
        clock.now += 1

    def measure() -> None:
        told.append(Choices(path, {}).get("work", {"slow": slow, "first": clock.takes(0)}))

    def come_late() -> None:
        told.append(Choices(path, {}).get("work", {"second": clock.takes(0)}))

    both = [threading.Thread(target=measure), threading.Thread(target=come_late)]
    both[0].start()
    assert begun.wait(60)
    both[1].start()
    go_on.set()
    for thread in both:
        thread.join()
    assert told == ["first", "first"]


def test_another_process_that_measures_is_waited_for(clock, tmp_path, monkeypatch) -> None:
    path = tmp_path / "kernels.json"
    choices = Choices(path, {})

    def finish(seconds: float) -> None:
        """Let the other process come to an end, while this one sleeps."""
        path.write_text(json.dumps({"choices": {"work": {"chosen": "theirs"}}}))
        fcntl.flock(other, fcntl.LOCK_UN)

    with open(path.with_suffix(".lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(cpu_choice.time, "sleep", finish)
        assert choices.get("work", {"ours": clock.takes(1)}) == "theirs"
    assert clock.runs == 0


def taken(path: Path) -> bool:
    """Whether somebody holds the lock on a file of choices."""
    with open(path.with_suffix(".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_child_forked_while_a_thread_measures_holds_no_lock(tmp_path, monkeypatch) -> None:
    path = tmp_path / "kernels.json"
    choices = Choices(path, {})
    monkeypatch.setattr(cpu_linear, "_choices", choices)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=choices.get, args=("work", {"slow": slow}))
    thread.start()
    assert begun.wait(60)
    (reads, says), (hears, tells) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # which ends it, should it wait for a lock
        done = 1
        try:
            os.write(says, b"forked")
            os.read(hears, 4)
            held: list[bool] = []
            choices.get("other", {"gemm": lambda: held.append(taken(path))})
            done = 0 if held and all(held) else 2
        finally:
            os._exit(done)
    assert os.read(reads, 6) == b"forked"
    assert taken(path)  # the child has not let go of what its parent holds
    go_on.set()
    thread.join()
    assert not taken(path)  # nor does it keep it
    os.write(tells, b"done")
    assert os.waitpid(child, 0)[1] == 0
    for end in (reads, says, hears, tells):
        os.close(end)


def test_a_way_may_itself_have_something_to_choose(clock, tmp_path) -> None:
    choices = Choices(tmp_path / "kernels.json", {})
    inner = {"slow": clock.takes(2), "fast": clock.takes(1)}

    def outer() -> None:
        choices.get("inner", inner)
        clock.now += 1

    assert choices.get("outer", {"slow": clock.takes(2), "two": outer}) == "two"
    assert {work: each["chosen"] for work, each in read(choices.path).items()} == {
        "inner": "fast",
        "outer": "two",
    }


def test_a_file_that_is_not_whole_is_written_anew(clock, tmp_path) -> None:
    path = tmp_path / "kernels.json"
    for broken in (
        "",
        "{",
        "[]",
        '{"choices": 3}',
        '{"choices": {"work": {}}}',
        '{"other": 1}',
        DEEP,
    ):
        path.write_text(broken)
        assert Choices(path, {}).get("work", {"gemm": clock.takes(1)}) == "gemm"
        assert read(path)["work"]["chosen"] == "gemm"


def test_another_build_chooses_anew_and_needs_no_installation(tmp_path, monkeypatch) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    paths = [cpu_choice.of_machine().path, cpu_choice.of_machine().path]
    build = tmp_path / "layer.so"
    monkeypatch.setattr(layer, "__file__", str(build))
    for content in (b"one", b"other"):
        build.write_bytes(content)
        paths.append(cpu_choice.of_machine().path)
    assert paths[0] == paths[1] and len(set(paths)) == 3


def test_without_a_place_for_files_choices_stay_in_the_process(clock, tmp_path) -> None:
    (tmp_path / "taken").write_text("no folder")
    choices = Choices(tmp_path / "taken" / "kernels.json", {})
    ways = {"slow": clock.takes(2), "fast": clock.takes(1)}
    assert choices.get("work", ways) == "fast"
    runs = clock.runs
    assert choices.get("work", ways) == "fast" and clock.runs == runs and len(choices) == 1


def test_without_a_home_choices_stay_in_the_process(clock, kernels, monkeypatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    kernels("auto")
    choices = cpu_linear.choices()
    assert "no home directory" in choices.why_not_kept()
    assert choices.get("work", {"slow": clock.takes(2), "fast": clock.takes(1)}) == "fast"
    assert choices.get("work", {"slow": clock.takes(1)}) == "fast" and len(choices) == 1


def test_what_was_measured_can_be_a_user_s_file(clock, tmp_path) -> None:
    choices = Choices(tmp_path / "kernels.json", {})
    choices.get("work", {"slow": clock.takes(2), "fast": clock.takes(1)})
    assert kernel_choice.read(choices.path) == {"work": "fast"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "is neither auto, gemm, onednn nor a file: give one of these"),
        ("{", "cannot be used: it is not as minidist"),
        ("{}", "cannot be used: it is not as minidist"),
        pytest.param(DEEP, "cannot be used: it is not as minidist", id="deep"),
    ],
)
def test_a_user_s_file_that_cannot_be_read_is_an_error(tmp_path, kernels, text, why) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=f"mine.json`? {why}"):
        kernels(str(path))


IMAGE = "image 32x32x8, filter 3x3x16, strides 1x1, padding 1x1 1x1, threads 1"
UNFIT = [
    ("conv2d forward float32", name, "gemm, tiles, onednn, onednn-any")
    for name in ("zzz", None, ["gemm"], 3, "onednn-sgemm", "direct", "float32", "auto")
]
UNFIT += [
    ("conv2d backward_input float32", "direct", "gemm, tiles, onednn, onednn-any"),
    ("conv2d backward_filter float32", "onednn-sgemm", "gemm, direct, tiles, onednn, onednn-any"),
    ("conv2d forward float64", "onednn", "gemm"),
    ("conv2d forward bfloat16", "gemm", "float32, onednn, onednn-any"),
    ("conv2d forward float16", "onednn", "float32"),
    ("matmul float32", "onednn-any", "gemm, tiles, onednn, onednn-sgemm"),
    ("matmul bfloat16", "onednn", "float32"),
]


@pytest.mark.parametrize(("kind", "chosen", "can"), UNFIT)
def test_who_cannot_do_a_work_is_refused_in_a_user_s_file(
    tmp_path, kernels, kind, chosen, can
) -> None:
    path, work = tmp_path / "mine.json", f"{kind}, {IMAGE}"
    path.write_text(json.dumps({"choices": {work: {"chosen": chosen}}}))
    before = cpu_linear.kernels()
    with pytest.raises(UsageError) as caught:
        kernels(str(path))
    assert f"{json.dumps(chosen)} is chosen for '{work}'; it may be {can};" in str(caught.value)
    assert cpu_linear.kernels() == before


@pytest.mark.parametrize(("kind", "chosen", "can"), UNFIT)
def test_and_measured_anew_where_the_process_remembers(clock, tmp_path, kind, chosen, can) -> None:
    path, work = tmp_path / "kernels.json", f"{kind}, {IMAGE}"
    path.write_text(json.dumps({"choices": {work: {"chosen": chosen}, "a": {"chosen": "b"}}}))
    choices, best = Choices(path, {}), can.split(", ")[-1]
    assert choices.get(work, {"slow": clock.takes(2), best: clock.takes(1)}) == best
    assert {work: each["chosen"] for work, each in read(path).items()} == {work: best, "a": "b"}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_who_does_a_work_is_among_those_who_may(dtype) -> None:
    of = as_dtype(dtype)
    works = [
        Convolution(direction, (8, 32, 32, 16), (3, 3, 16, 16), WINDOW, of, 1)
        for direction in ("forward", "backward_input", "backward_filter")
    ]
    for work in [*works, Product((8, 8), (8, 4), False, False, of, 1)]:
        ways = [name for name, _ in cpu_linear._ways(work)]
        assert set(ways) <= set(cpu_work.able(work.name)), work
        if cpu_onednn.find() is not None and tiles.has_tiles():
            assert set(ways) == set(cpu_work.able(work.name)), work


def test_what_a_file_names_and_this_machine_lacks_goes_the_plain_way(
    kernels, tmp_path, monkeypatch, caplog
) -> None:
    path = tmp_path / "mine.json"
    of = threads.per_replica()
    work = Convolution("forward", (8, 32, 32, 8), (3, 3, 8, 16), WINDOW, FLOAT, of).name
    product = "matmul float32, (nx64) by (64x64), threads 1"
    for has_tiles, lacking in ((True, "names onednn,"), (False, "names onednn and tiles,")):
        chosen = {work: {"chosen": "onednn"}, product: {"chosen": "tiles"}}
        path.write_text(json.dumps({"choices": chosen}))
        monkeypatch.setattr(cpu_onednn, "find", lambda: None)
        monkeypatch.setattr(tiles, "has_tiles", lambda has_tiles=has_tiles: has_tiles)
        caplog.clear()
        kernels(str(path))
        convolve()
        convolve(9)
        assert cpu_linear.used() == {(work, "gemm")}
        (said,) = caplog.messages
        assert lacking in said and "last bits may differ" in said


def test_processes_that_may_not_all_use_tiles_share_no_choices(monkeypatch) -> None:
    paths = set()
    for has_tiles in (True, False):
        monkeypatch.setattr(tiles, "has_tiles", lambda has_tiles=has_tiles: has_tiles)
        paths.add(cpu_choice.of_machine().path)
    assert len(paths) == 2


def test_a_cache_that_is_no_whole_path_counts_for_nothing(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for cache in ("somewhere", "", "./here"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert cpu_choice.folder() == tmp_path / ".cache" / "minidist"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert cpu_choice.folder() == tmp_path / "there" / "minidist"


def test_the_number_of_examples_makes_no_other_kind_of_work() -> None:
    def name(n: int) -> set[str]:
        x, w = (n, 32, 32, 8), (3, 3, 8, 16)
        return {
            Convolution("forward", x, w, WINDOW, FLOAT, 1).name,
            Product((n, 8), (8, 4), False, False, FLOAT, 1).name,
            Product((n, 4), (8, 4), False, True, FLOAT, 1).name,
            Product((n, 8), (n, 4), True, False, FLOAT, 1).name,
            Product((n, 8), (4, n), True, True, FLOAT, 1).name,
        }

    assert name(2) == name(64) and len(name(2)) == 5


def test_everything_else_does() -> None:
    one = Convolution("forward", (2, 32, 32, 8), (3, 3, 8, 16), WINDOW, FLOAT, 1)
    others = [
        one._replace(direction="backward_filter"),
        one._replace(x=(2, 32, 31, 8)),
        one._replace(w=(3, 3, 8, 8)),
        one._replace(window=WINDOW._replace(strides=(2, 2))),
        one._replace(window=WINDOW._replace(before=(0, 1))),
        one._replace(window=WINDOW._replace(after=(0, 1))),
        one._replace(dtype=np.dtype(np.float64)),
        one._replace(threads=2),
    ]
    assert len({each.name for each in [one, *others]}) == 9
    square = [  # each takes the same arrays
        Product((8, 8), (8, 8), transpose_a, transpose_b, FLOAT, 1)
        for transpose_a in (False, True)
        for transpose_b in (False, True)
    ]
    wider = [square[3]._replace(b=(9, 8)), square[3]._replace(a=(8, 9))]
    assert len({each.name for each in [*square, *wider]}) == 6


def test_what_was_made_is_kept_for_so_many_kinds_of_work(kernels, monkeypatch) -> None:
    monkeypatch.setattr(cpu_linear, "MOST", 3)
    kernels("gemm")
    for k in range(1, 9):
        c = cpu_linear.matmul(np.ones((2, k), FLOAT), np.ones((k, 2), FLOAT))
        assert (c == k).all() and 1 <= len(cpu_linear.used()) <= 3


def convolve(n: int = 8):
    x, w = np.ones((n, 32, 32, 8), FLOAT), np.ones((3, 3, 8, 16), FLOAT)
    return cpu_linear.conv2d(x, w, WINDOW)


@pytest.mark.parametrize("name", ["gemm", "onednn"])
def test_an_implementation_can_be_asked_for(kernels, name) -> None:
    if name == "onednn" and cpu_onednn.find() is None:
        pytest.skip(cpu_onednn.why_not())
    kernels(name)
    convolve()
    assert {used for _, used in cpu_linear.used()} == {name} and cpu_linear.choices() is None


def test_a_file_is_only_read_and_names_what_is_at_hand(kernels, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu_choice, "_measured", None)  # a call would fail
    path = tmp_path / "mine.json"
    of = threads.per_replica()
    work = Convolution("forward", (8, 32, 32, 8), (3, 3, 8, 16), WINDOW, FLOAT, of).name
    for named, chosen, used in (
        (work, "gemm", "gemm"),
        ("other work", "onednn", "gemm"),
        (work, "onednn", "onednn"),
    ):
        if used == "onednn" and cpu_onednn.find() is None:
            continue
        path.write_text(json.dumps({"choices": {named: {"chosen": chosen}}}))
        before = path.read_bytes()
        kernels(str(path))
        convolve()
        assert cpu_linear.used() == {(work, used)} and path.read_bytes() == before


def test_small_work_goes_the_plain_way_unmeasured(kernels) -> None:
    kernels("auto")
    before = len(cpu_linear.choices())
    with md.Strategy("cpu*2") as strategy:
        strategy.run(lambda: cpu_linear.matmul(np.ones((8, 8), FLOAT), np.ones((8, 8), FLOAT)))
    assert {used for _, used in cpu_linear.used()} == {"gemm"}
    assert len(cpu_linear.choices()) == before


def test_with_several_threads_nothing_is_measured(kernels, monkeypatch) -> None:
    monkeypatch.setattr(Choices, "get", None)  # a call would fail
    monkeypatch.setattr(threads, "per_replica", lambda: 2)
    kernels("auto")
    convolve()
    wanted = "gemm" if cpu_onednn.find() is None else "onednn"
    assert {used for _, used in cpu_linear.used()} == {wanted}


def test_replicas_choose_together(kernels, monkeypatch) -> None:
    measured = []
    plain = cpu_choice._measured
    monkeypatch.setattr(
        cpu_choice, "_measured", lambda ways: measured.append(sorted(ways)) or plain(ways)
    )
    monkeypatch.setattr(threads, "cores", lambda: 4)  # one thread for each replica
    kernels("auto")
    with md.Strategy("cpu*4") as strategy:
        first = strategy.run(convolve)
        second = strategy.run(convolve, 3)
    assert len(measured) == 1
    assert len(cpu_linear.used()) == 1
    for results, n in ((first, 8), (second, 3)):
        for y in strategy.local_results(results):
            assert y.shape == (n, 32, 32, 16) and y[0, 5, 5, 0] == 72
