"""What a tape promises: which gradients, when, in whose memory, and what it forgets."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from minidist import ops, tape
from minidist.errors import ContextError, ShapeError
from minidist.tape import GradientTape
from minidist.tensor import Tensor


class Weight:
    """The least that a tape takes for a variable: reading gives a Tensor."""

    def __init__(self, value: list[float], trainable: bool = True, cached: bool = True) -> None:
        self.tensor = ops.constant(value)
        self.trainable = trainable
        self.cached = cached

    def read(self) -> Tensor:
        if not self.cached:
            self.tensor = ops.constant(self.tensor)
        tape.read(self, self.tensor)
        return self.tensor


ops.install_operators(Weight)


def values(gradient: Tensor | None) -> list[float]:
    assert gradient is not None
    return gradient.numpy().tolist()


def test_watched_tensors_and_trainable_variables_have_gradients():
    x, frozen, w = ops.constant([2.0]), Weight([3.0], trainable=False), Weight([5.0])
    with GradientTape() as t:
        t.watch(x)
        y = x * w * frozen
    dx, dw, nothing = t.gradient(y, [x, w, frozen])
    assert (values(dx), values(dw), nothing) == ([15], [6], None)


def test_a_frozen_variable_can_be_watched():
    w = Weight([3.0], trainable=False)
    with GradientTape() as t:
        t.watch(w)
        y = ops.square(w)
    assert values(t.gradient(y, w)) == [6]


def test_sources_may_be_nested_and_the_result_has_their_structure():
    a, b = ops.constant([1.0]), Weight([2.0])
    with GradientTape() as t:
        t.watch(a)
        y = a * b
    result = t.gradient(y, {"a": a, "rest": [(b,), b]})
    assert values(result["a"]) == [2]
    assert values(result["rest"][0][0]) == values(result["rest"][1]) == [1]


def test_what_the_target_does_not_depend_on_gives_none():
    used, unused, late = Weight([1.0]), Weight([1.0]), Weight([1.0])
    with GradientTape() as t:
        y = used * 2.0
        late * 3.0
    assert t.gradient(y, [unused, late]) == [None, None]

    with GradientTape() as t:
        pass
    assert t.gradient(ops.constant([1.0]), [used]) == [None]


def test_a_target_of_any_rank_is_summed():
    w = Weight([1.0, 2.0])
    with GradientTape() as t:
        y = w * ops.constant([[1.0, 10.0], [2.0, 20.0]])
    assert values(t.gradient(y, w)) == [3, 30]


@pytest.mark.parametrize("cached", [True, False], ids=["one reading", "a reading each"])
def test_repeated_use_adds_up(cached):
    w = Weight([3.0], cached=cached)
    with GradientTape() as t:
        y = w * w + w * 2.0 - w
    assert values(t.gradient(y, w)) == [7]


def test_a_reading_and_its_variable_both_have_gradients():
    w = Weight([3.0], cached=False)
    with GradientTape() as t:
        first, second = w.read(), w.read()
        y = first * 2.0 + second * 5.0
    d_first, dw, d_second = t.gradient(y, [first, w, second])
    assert (values(d_first), values(dw), values(d_second)) == ([2], [7], [5])
    assert_separate([d_first, dw, d_second])


def test_stop_gradient_blocks_one_path():
    w = Weight([3.0])
    with GradientTape() as t:
        y = w * ops.stop_gradient(w)
    assert values(t.gradient(y, w)) == [3]


def test_stop_recording_by_the_tape_and_for_the_thread():
    w = Weight([3.0])
    with GradientTape(persistent=True) as outer, GradientTape() as inner:
        with inner.stop_recording():
            y = ops.square(w)
        with tape.stop_recording():
            z = ops.square(w)
    assert inner.gradient(y, w) is None
    assert values(outer.gradient(y, w)) == [6]
    assert outer.gradient(z, w) is None


def test_intermediate_tensors_and_the_target_itself_can_be_sources():
    w = Weight([3.0])
    with GradientTape() as t:
        h = w * 2.0
        y = h * h
    dw, dh, dy = t.gradient(y, [w, h, y])
    assert (values(dw), values(dh), values(dy)) == ([24], [12], [1])
    assert_separate([dw, dh, dy])


def test_nested_tapes_each_record():
    w = Weight([3.0])
    with GradientTape() as outer:
        a = ops.square(w)
        with GradientTape() as inner:
            b = a * w
        assert values(inner.gradient(b, w)) == [9]
    assert values(outer.gradient(b, w)) == [27]


def test_a_tape_records_its_own_thread_only():
    w = Weight([3.0])
    found = []

    def other():
        y = ops.square(w)
        found.append(y)

    with GradientTape() as t:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert t.gradient(found[0], w) is None


def test_a_tape_gives_one_gradient_unless_persistent():
    w = Weight([3.0])
    with GradientTape() as t:
        y = ops.square(w)
    t.gradient(y, w)
    with pytest.raises(ContextError, match="persistent=True"):
        t.gradient(y, w)
    with pytest.raises(ContextError, match="new GradientTape"), t:
        pass

    with GradientTape(persistent=True) as t:
        y = ops.square(w)
        z = y * w
    first, again, other = t.gradient(y, w), t.gradient(y, w), t.gradient(z, w)
    assert (values(first), values(again), values(other)) == ([6], [6], [27])
    assert_separate([first, again])


def test_a_tape_cannot_be_entered_twice_at_a_time():
    with GradientTape() as t, pytest.raises(ContextError, match="records already"), t:
        pass


def test_targets_that_have_no_derivative_are_refused():
    w = Weight([3.0])
    with GradientTape(persistent=True) as t:
        y = ops.argmax(w)
    with pytest.raises(ShapeError, match="int64"):
        t.gradient(y, w)
    with pytest.raises(TypeError, match="list"):
        t.gradient([y], w)


def test_the_sink_gets_each_gradient_once_it_is_final():
    # The walk passes c·h, then b (used again first: final only at its first use), then a.
    a, b, c, unused = (Weight([v]) for v in (2.0, 3.0, 5.0, 7.0))
    events = []

    def watch_walk(x: Tensor, name: str) -> Tensor:
        def backward(dy, needs):
            events.append(f"walk {name}")
            return (dy,)

        return tape.record(x.array, (x,), backward)

    with GradientTape() as t:
        h = watch_walk(a * b, "1")
        h = watch_walk(h * b, "2")
        h = watch_walk(h * c, "3")
    names = {id(a): "a", id(b): "b", id(c): "c"}
    result = t.gradient(
        h, [a, b, c, unused], sink=lambda v, array: events.append((names[id(v)], array.tolist()))
    )
    assert result is None
    assert events == ["walk 3", ("c", [18]), "walk 2", "walk 1", ("a", [45]), ("b", [60])]


def test_the_sink_does_not_wait_for_entries_that_cannot_add():
    # w is read again after the target was computed, and before it by what the target ignores.
    w, events = Weight([2.0]), []
    with GradientTape() as t:
        ignored = w * 4.0
        v = Weight([3.0])
        h = ops.square(v)
        y = h * w
        y * w * ignored
    t.gradient(y, [v, w], sink=lambda source, array: events.append((source is w, array.tolist())))
    assert events == [(True, [9]), (False, [12])]


def test_what_a_sink_raises_ends_the_walk():
    w = Weight([2.0])
    with GradientTape() as t:
        y = ops.square(w)
    with pytest.raises(ZeroDivisionError):
        t.gradient(y, w, sink=lambda source, array: 1 / 0)


def assert_separate(gradients: list[Tensor], *others: Tensor) -> None:
    arrays = [g.array for g in (*gradients, *others)]
    for i, a in enumerate(arrays):
        for b in arrays[:i]:
            assert not np.shares_memory(a, b)


def test_no_two_gradients_share_memory():
    # Each of these closures hands dy itself, or a view of it, to more than one input.
    a, b, c, d = (Weight([[1.0, 2.0]]) for _ in range(4))
    with GradientTape() as t:
        flat = ops.reshape(c, (2,)) + ops.bias_add(ops.reshape(d, (2,)), ops.constant([1.0, 1.0]))
        y = (a + b) + a + ops.reshape(flat, (1, 2)) - ops.stop_gradient(a)
    gradients = t.gradient(y, [a, b, c, d, y])
    assert [values(g) for g in gradients] == [[[2, 2]], [[1, 1]], [[1, 1]], [[1, 1]], [[1, 1]]]
    assert_separate(gradients, a.tensor, b.tensor, c.tensor, d.tensor, y)
    for gradient in gradients:
        assert gradient.array.flags.writeable


def test_adding_to_one_gradient_never_changes_another():
    # x gets dy from the sum, and more later; z holds the same dy and must not see that.
    x, z = Weight([1.0]), Weight([1.0])
    with GradientTape() as t:
        s = x * 10.0
        y = ops.reduce_sum(s + x + z)
    dx, dz = t.gradient(y, [x, z])
    assert (values(dx), values(dz)) == ([11], [1])


def test_the_same_source_twice_gives_two_arrays():
    w = Weight([1.0])
    with GradientTape() as t:
        y = w * 2.0
    one, two = t.gradient(y, [w, w])
    assert values(one) == values(two) == [2]
    assert_separate([one, two])


def test_the_same_program_gives_the_same_bits():
    rng = np.random.default_rng(0)
    x, start = rng.standard_normal((7, 5)).astype("f"), rng.standard_normal((5, 5)).astype("f")

    def run() -> np.ndarray:
        w = Weight(start)
        with GradientTape() as t:
            h = ops.constant(x)
            for _ in range(4):
                h = ops.relu(h @ w) + h @ w
            y = ops.reduce_mean(h)
        return t.gradient(y, w).numpy()

    assert run().tobytes() == run().tobytes()


def test_only_wanted_gradients_are_computed():
    asked = []

    def spy(x: Tensor, w: Weight) -> Tensor:
        def backward(dy, needs):
            asked.append(tuple(needs))
            return (dy if needs[0] else None, dy if needs[1] else None)

        return tape.record(x.array, (x, w.read()), backward)

    x, first, second = ops.constant([1.0]), Weight([1.0]), Weight([1.0])
    with GradientTape() as t:
        y = spy(spy(x, first), second)
    t.gradient(y, [second])
    assert asked == [(False, True)]


def test_nothing_is_recorded_that_depends_on_nothing_watched():
    with GradientTape(persistent=True) as t:
        refs = [weakref.ref(ops.constant([1.0]) * 2.0)]
    assert refs[0]() is None
    assert t.gradient(ops.constant([1.0]), []) == []


def test_the_walk_frees_what_it_has_passed():
    w, freed = Weight([2.0]), []

    def look(dy, needs):
        freed.append(ref() is None)
        return (dy,)

    with GradientTape() as t:
        start = tape.record(w.tensor.array, (w.read(),), look)
        h = ops.square(start)
        ref = weakref.ref(h)
        y = ops.square(h)
        del h
    t.gradient(y, w)
    assert freed == [True]


def test_an_unfinished_tape_frees_its_memory_with_itself():
    w = Weight([2.0])
    with GradientTape() as t:
        h = ops.square(w)
    ref = weakref.ref(h)
    del h
    assert ref() is not None
    del t
    assert ref() is None


# --- gradients that are wanted in a bucket


def wanting(bucket, asked):
    """Return an `into` that has a bucket for some sources, and notes for which it is asked."""

    def into(source):
        asked.append(source)
        return bucket.get(id(source))

    return into


def test_a_gradient_is_computed_in_the_bucket_where_it_is_wanted():
    x = ops.constant(np.arange(6, dtype="f4").reshape(3, 2))
    w, bias = Weight([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), Weight([1.0, -1.0, 0.5])
    bucket = {id(w): np.full((2, 3), np.nan, "f4")}
    asked, found = [], {}
    with GradientTape() as t:
        y = ops.dense(x, w.read(), bias.read())
    t.gradient(y, [w, bias], lambda v, g: found.update({id(v): g}), wanting(bucket, asked))
    assert found[id(w)] is bucket[id(w)]
    np.testing.assert_array_equal(found[id(w)], np.arange(6).reshape(3, 2).T @ np.ones((3, 3)))
    assert found[id(bias)].tolist() == [3, 3, 3]
    assert {id(source) for source in asked} == {id(w), id(bias)}


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: ops.matmul(ops.matmul(x, w.read()), w.read()),  # used twice
        lambda x, w: ops.matmul(x, w.read()) + ops.reduce_sum(w.read()),  # by two operations
    ],
)
@pytest.mark.parametrize("cached", [True, False])
def test_nobody_is_asked_for_a_bucket_of_one_part_of_a_gradient(compute, cached):
    x, value = np.array([[1.0, 2.0], [3.0, 4.0]], "f4"), [[0.5, -1.0], [2.0, 3.0]]
    gradients, asked = [], []
    for into in (None, wanting({}, asked)):
        w = Weight(value, cached=cached)
        with GradientTape() as t:
            y = compute(ops.constant(x), w)
        t.gradient(y, w, lambda v, g: gradients.append(g), into)
    assert not asked
    np.testing.assert_array_equal(*gradients)


def test_a_source_that_is_given_twice_is_in_no_bucket():
    w, found, asked = Weight([[2.0]]), [], []
    with GradientTape() as t:
        y = ops.matmul(ops.constant([[3.0]]), w.read())
    t.gradient(y, [w, w], lambda v, g: found.append(g), wanting({}, asked))
    assert [g.tolist() for g in found] == [[[3.0]], [[3.0]]] and found[0] is not found[1]
    assert not asked


def test_nobody_is_asked_for_a_bucket_of_what_the_walk_goes_on_from():
    """A result that is a source too is still to be read when its gradient has been taken."""
    x, w, asked, found = ops.constant([[1.0, 2.0]]), Weight([[3.0], [4.0]]), [], {}
    with GradientTape() as t:
        h = ops.matmul(x, w.read())
        y = ops.dense(h, ops.constant([[5.0, 6.0]]), ops.constant([0.0, 0.0]))

    def take(source, gradient):
        found[id(source)] = gradient.copy()
        gradient[...] = np.nan  # it is the sink's own

    bucket = {id(h): np.empty((1, 1), "f4"), id(w): np.empty((2, 1), "f4")}
    t.gradient(y, [h, w], take, wanting(bucket, asked))
    assert asked == [w]
    assert found[id(h)].tolist() == [[11.0]] and found[id(w)].tolist() == [[11.0], [22.0]]
