"""Choices are measured once for each kind of work, remembered, and shared by processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

import minidist as md
from minidist import threads
from minidist.device import cpu_choice, cpu_linear, cpu_onednn
from minidist.device.cpu_choice import Choices
from minidist.device.cpu_work import Convolution, Product
from minidist.device.ops import Window
from minidist.errors import UsageError

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
    for broken in ("", "{", "[]", '{"choices": 3}', '{"choices": {"work": {}}}', '{"other": 1}'):
        path.write_text(broken)
        assert Choices(path, {}).get("work", {"gemm": clock.takes(1)}) == "gemm"
        assert read(path)["work"]["chosen"] == "gemm"


def test_without_a_place_for_files_choices_stay_in_the_process(clock, tmp_path) -> None:
    (tmp_path / "taken").write_text("no folder")
    choices = Choices(tmp_path / "taken" / "kernels.json", {})
    ways = {"slow": clock.takes(2), "fast": clock.takes(1)}
    assert choices.get("work", ways) == "fast"
    runs = clock.runs
    assert choices.get("work", ways) == "fast" and clock.runs == runs and len(choices) == 1


def test_a_user_s_file_is_only_read(clock, tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"choices": {"work": {"chosen": "slow"}}}')
    before = path.read_bytes()
    choices = Choices(path, {}, fixed=True)
    ways = {"fast": clock.takes(1), "slow": clock.takes(2)}
    assert choices.get("work", ways) == "slow"
    assert choices.get("other", ways) is None
    assert clock.runs == 0 and path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "it is not there"), ("{", "it is not as minidist"), ("{}", "it is not as minidist")],
)
def test_a_user_s_file_that_cannot_be_read_is_an_error(tmp_path, kernels, text, why) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=f"mine.json cannot be used: {why}"):
        kernels(str(path))


def test_the_number_of_examples_makes_no_other_kind_of_work() -> None:
    def name(n: int) -> set[str]:
        x, w = (n, 32, 32, 8), (3, 3, 8, 16)
        return {
            Convolution("forward", x, w, WINDOW, FLOAT, 1).name,
            Product((n, 8), (8, 4), False, False, FLOAT, 1).name,
            Product((n, 4), (8, 4), False, True, FLOAT, 1).name,
            Product((n, 8), (n, 4), True, False, FLOAT, 1).name,
        }

    assert name(2) == name(64) and len(name(2)) == 4


def test_everything_else_does() -> None:
    one = Convolution("forward", (2, 32, 32, 8), (3, 3, 8, 16), WINDOW, FLOAT, 1)
    others = [
        one._replace(direction="backward_filter"),
        one._replace(x=(2, 32, 31, 8)),
        one._replace(w=(3, 3, 8, 8)),
        one._replace(window=WINDOW._replace(strides=(2, 2))),
        one._replace(window=WINDOW._replace(before=(0, 1))),
        one._replace(dtype=np.dtype(np.float64)),
        one._replace(threads=2),
    ]
    assert len({each.name for each in [one, *others]}) == 8


def convolve(n: int = 8):
    x, w = np.ones((n, 32, 32, 8), FLOAT), np.ones((3, 3, 8, 16), FLOAT)
    return cpu_linear.conv2d(x, w, WINDOW)


@pytest.mark.parametrize("name", ["gemm", "onednn"])
def test_an_implementation_can_be_asked_for(kernels, name) -> None:
    if name == "onednn" and cpu_onednn.find() is None:
        pytest.skip(cpu_onednn.why_not())
    kernels(name)
    convolve()
    assert set(cpu_linear.used().values()) == {name} and cpu_linear.choices() is None


def test_a_file_can_be_asked_for_and_names_what_is_at_hand(kernels, tmp_path) -> None:
    path = tmp_path / "mine.json"
    work = Convolution("forward", (8, 32, 32, 8), (3, 3, 8, 16), WINDOW, FLOAT, threads.each()).name
    for chosen, used in (("gemm", "gemm"), ("somebody else's", "gemm"), ("onednn", "onednn")):
        if chosen == "onednn" and cpu_onednn.find() is None:
            continue
        path.write_text(json.dumps({"choices": {work: {"chosen": chosen}}}))
        kernels(str(path))
        convolve()
        assert cpu_linear.used() == {work: used}


def test_small_work_goes_the_plain_way_unmeasured(kernels) -> None:
    kernels("auto")
    before = len(cpu_linear.choices())
    with md.Strategy("cpu*2") as strategy:
        strategy.run(lambda: cpu_linear.matmul(np.ones((8, 8), FLOAT), np.ones((8, 8), FLOAT)))
    assert set(cpu_linear.used().values()) == {"gemm"} and len(cpu_linear.choices()) == before


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
