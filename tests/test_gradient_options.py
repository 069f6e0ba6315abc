"""What happens to gradients on their way: accumulation, loss scale, clipping; then the rule.

The other side are formulas in plain NumPy.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from policies import CONSTANTS, EVERY, POLICIES, Trainer, same_bits

import minidist as md
from minidist.errors import MinidistError

LR = CONSTANTS["sgd"]["lr"]
SHARED = [policy for policy in POLICIES if policy in ("replicated", "parameter_server")]
DTYPES = ["float32", "float64"]


def arrays(rng, shapes, dtype):
    return [np.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def mean(gradients, dtype):
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total, 1 / len(gradients)


# --- clipping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("policy", SHARED)
def test_values_are_clipped_after_the_mean_and_before_weight_decay(policy, n, dtype):
    rng, shapes = np.random.default_rng(n), [(3, 5), (), (20_001,)]
    r = np.dtype(dtype).type
    w = arrays(rng, shapes, dtype)
    opt = md.optim.SGD(LR, weight_decay=0.01, gradient_clip=0.3)
    with Trainer(policy, [w] * n) as trainer:
        for _ in range(3):
            gradients = [arrays(rng, shapes, dtype) for _ in range(n)]
            trainer.apply(opt, gradients)
            for i in range(len(w)):
                total, scale = mean([own[i] for own in gradients], dtype)
                clipped = np.clip(total * r(scale), r(-0.3), r(0.3))
                w[i] = np.asarray(w[i] - r(LR) * (clipped + r(0.01) * w[i]))
            trainer.check([w] * n)
        assert np.abs(w[2]).max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("policy", [*SHARED, "parameter_server_device"])
def test_the_global_norm_is_that_of_the_mean_over_all_variables(policy, limit, dtype):
    rng, shapes, n = np.random.default_rng(7), [(3, 5), (), (20_001,)], 3
    r = np.dtype(dtype).type
    w = arrays(rng, shapes, dtype)
    opt = md.optim.SGD(LR, gradient_clip_norm=limit)
    with Trainer(policy, [w] * n) as trainer:
        gradients = [arrays(rng, shapes, dtype) for _ in range(n)]
        trainer.apply(opt, gradients)
        means = [mean([own[i] for own in gradients], dtype) for i in range(len(w))]
        norm = math.sqrt(sum(float((m.astype(float) ** 2).sum()) * s * s for m, s in means))
        expected = [
            w_i - LR * (m * r(s) * min(1.0, limit / norm))
            for w_i, (m, s) in zip(w, means, strict=True)
        ]
        got = trainer.weights()[0]
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-13)
        moved = math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(got, w, strict=True)))
        assert moved == pytest.approx(LR * min(limit, norm), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_by_norm_gives_the_same_bits_under_every_synchronous_policy(dtype):
    results = []
    for policy in [*SHARED, "parameter_server_device"]:
        rng = np.random.default_rng(5)
        shapes = [(40_001,), (3,), (7, 7)]
        opt = md.optim.Adam(0.01, gradient_clip_norm=0.7)
        with Trainer(policy, [arrays(rng, shapes, dtype)] * 3) as trainer:
            for counts in [None, [1, 2, 0]]:
                trainer.apply(opt, [arrays(rng, shapes, dtype) for _ in range(3)], counts)
            results += trainer.weights()
    for weights in results:
        assert all(same_bits(a, b) for a, b in zip(weights, results[0], strict=True))


def test_a_gradient_of_zeros_has_no_norm_to_clip():
    with Trainer("replicated", [[np.ones(3)]] * 2) as trainer:
        trainer.apply(md.optim.SGD(1.0, gradient_clip_norm=1.0), [[np.zeros(3)]] * 2)
        trainer.check([[np.ones(3)]] * 2)


@pytest.mark.parametrize("option", ["gradient_clip", "gradient_clip_norm"])
def test_nan_is_not_clipped_away(option):
    with Trainer("replicated", [[np.ones(3)]] * 2) as trainer:
        gradient = [np.array([np.nan, 1.0, 1.0])]
        trainer.apply(md.optim.SGD(1.0, **{option: 0.5}), [gradient, gradient])
        assert np.isnan(trainer.weights()[0][0][0])


@pytest.mark.parametrize("option", ["gradient_clip", "gradient_clip_norm"])
@pytest.mark.parametrize("value", [0, -1, math.nan, "1"])
def test_limits_that_make_no_sense_are_refused(option, value):
    with pytest.raises(MinidistError, match=option):
        md.optim.SGD(0.1, **{option: value})


def test_one_way_to_clip_is_enough():
    with pytest.raises(ValueError, match="contradict"):
        md.optim.SGD(0.1, gradient_clip=1.0, gradient_clip_norm=1.0)


# --- accumulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("policy", ["independent", *SHARED])
@pytest.mark.parametrize("with_counts", [False, True])
def test_accumulated_gradients_are_the_mean_over_all_examples(policy, n, dtype, with_counts):
    rng, shapes, steps = np.random.default_rng(n), [(3, 5), (), (20_001,)], 3
    r = np.dtype(dtype).type
    start = [arrays(rng, shapes, dtype) for _ in range(n)]
    if policy != "independent":
        start = [start[0]] * n
    opt = md.optim.SGD(LR, gradient_accumulation_steps=steps)
    all_counts = [[4, 1, 2][:n], [0, 3, 1][:n], [2, 2, 0][:n]]
    with Trainer(policy, start) as trainer:
        calls = []
        for counts in all_counts:
            trainer.check(start)  # nothing is applied before the last call
            calls.append([arrays(rng, shapes, dtype) for _ in range(n)])
            trainer.apply(opt, calls[-1], counts if with_counts else None)
        own, weight = [], []
        for replica in range(n):
            c = [counts[replica] if with_counts else 1 for counts in all_counts]
            row = []
            for i in range(len(shapes)):
                total = None
                for call, count in zip(calls, c, strict=True):
                    if count:
                        term = r(count) * call[replica][i]
                        total = term if total is None else total + term
                row.append(np.asarray(total * r(1 / sum(c)), dtype))
            own.append(row)
            weight.append(sum(c))
        if policy == "independent":
            expected = [
                [np.asarray(w - r(LR) * g) for w, g in zip(ws, gs, strict=True)]
                for ws, gs in zip(start, own, strict=True)
            ]
        else:
            equal = len(set(weight)) == 1
            expected = []
            for i, w in enumerate(start[0]):
                total = None
                for replica in range(n):
                    term = own[replica][i] if equal else r(weight[replica]) * own[replica][i]
                    total = term if total is None else total + term
                expected.append(
                    np.asarray(w - r(LR) * (total * r(1 / (n if equal else sum(weight)))))
                )
            expected = [expected] * n
        trainer.check(expected)
        assert opt.iterations == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_minimize_accumulates_too(policy):
    with Trainer(policy, [[np.array([1.0, 2.0])]] * 2) as trainer:
        (w,) = trainer.variables
        opt = md.optim.SGD(0.5, gradient_accumulation_steps=2)
        for factor in (1.0, 3.0):
            trainer.each(
                lambda replica, factor=factor: opt.minimize(
                    lambda: md.ops.reduce_sum(w * factor), [w]
                )
            )
        trainer.check([[np.array([0.0, 1.0])]] * 2)


def test_what_is_unused_in_all_calls_is_left_alone(caplog):
    with Trainer("replicated", [[np.ones(2), np.ones(2)]] * 2) as trainer:
        opt = md.optim.SGD(1.0, gradient_accumulation_steps=2)
        for gradient in (np.ones(2), 3 * np.ones(2)):
            trainer.apply(opt, [[gradient, None]] * 2)
        trainer.check([[-np.ones(2), np.ones(2)]] * 2)
    assert "no gradient for v1" in caplog.text


def test_a_training_cannot_be_saved_between_two_calls_of_a_step(tmp_path):
    with Trainer("replicated", [[np.ones(2)]] * 2) as trainer:
        opt = md.optim.SGD(1.0, gradient_accumulation_steps=2)
        trainer.apply(opt, [[np.ones(2)]] * 2)
        with pytest.raises(ValueError, match="1 of 2 gradients that make a step"):
            md.save(tmp_path / "x", trainer.variables, opt)
        trainer.apply(opt, [[np.ones(2)]] * 2)
        md.save(tmp_path / "x", trainer.variables, opt)


def test_accumulation_says_what_is_wrong():
    with pytest.raises(ValueError, match="gradient_accumulation_steps is a number of calls"):
        md.optim.SGD(1.0, gradient_accumulation_steps=0)
    with Trainer("replicated", [[np.ones(2)]] * 2) as trainer:
        opt = md.optim.SGD(1.0, gradient_accumulation_steps=2)
        trainer.apply(opt, [[np.ones(2)]] * 2, [1, 1])
        with pytest.raises(ValueError, match="some batches came with a count and some without"):
            trainer.apply(opt, [[np.ones(2)]] * 2)


# --- loss scale ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_static_scale_of_two_to_the_n_changes_no_bit(policy):
    results = []
    for scale in (None, 128.0, md.optim.LossScale(2.0**-5)):
        rng = np.random.default_rng(2)
        start = arrays(rng, [(3, 4), (5,)], "float32")
        with Trainer(policy, [start] * 2) as trainer:
            opt = md.optim.Adam(0.01, loss_scale=scale, weight_decay=0.01, gradient_clip=0.5)

            def body(replica, opt=opt, variables=trainer.variables):
                def loss():
                    total = md.ops.reduce_sum(md.ops.square(variables[0])) * (replica + 1.0)
                    return total + md.ops.reduce_sum(variables[1])

                return float(opt.minimize(loss, variables))

            losses = [trainer.each(body) for _ in range(3)]
            results.append((losses, trainer.weights()))
    for losses, weights in results:
        assert losses == results[0][0]
        for a, b in zip(weights, results[0][1], strict=True):
            assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def scaled_steps(policy, n, steps, opt, **options):
    """Apply gradients of 1·scale, or what `steps` has; return weight and scale after each."""
    history = []
    with Trainer(policy, [[np.zeros(3)]] * n, **options) as trainer:
        for bad in steps:
            gradient = opt.current_loss_scale * np.ones(3)
            rows = [
                [np.full(3, bad) if bad is not None and r == n - 1 else gradient] for r in range(n)
            ]
            trainer.apply(opt, rows)
            history.append(
                (trainer.weights()[0][0][0], opt.loss_scale.value, opt.loss_scale.counter)
            )
    return history


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_automatic_scale_halves_on_what_is_not_finite_and_doubles_after_every_n(policy, bad):
    opt = md.optim.SGD(1.0, loss_scale=md.optim.LossScale(4.0, automatic=True, every_n=2))
    history = scaled_steps(policy, 3, [None, bad, None, None, None, None, bad, bad], opt)
    assert history == [
        (-1.0, 4.0, 1),
        (-1.0, 2.0, 0),
        (-2.0, 2.0, 1),
        (-3.0, 2.0, 2),
        (-4.0, 4.0, 0),
        (-5.0, 4.0, 1),
        (-5.0, 2.0, 0),
        (-5.0, 1.0, 0),
    ]
    assert opt.iterations == 5


def test_the_ancestors_cases():
    """4 becomes 8 at counter 10 of 10; 9 of 10 becomes 10; NaN turns 4 into 2."""
    for counter, finite, after in [(10, True, (8, 0)), (9, True, (4, 10)), (9, False, (2, 0))]:
        scale = md.optim.LossScale(4.0, automatic=True, every_n=10)
        scale.counter = counter
        assert scale.update(finite) is finite
        assert (scale.value, scale.counter) == after


def test_a_step_without_examples_leaves_the_scale_alone():
    for policy in POLICIES:
        opt = md.optim.SGD(1.0, loss_scale=md.optim.LossScale(4.0, automatic=True))
        with Trainer(policy, [[np.ones(2)]] * 2) as trainer:
            trainer.apply(opt, [[np.zeros(2)]] * 2, [0, 0])
            assert (opt.loss_scale.value, opt.loss_scale.counter) == (4.0, 0)
            trainer.check([[np.ones(2)]] * 2)


def test_the_scale_is_saved_and_loaded(tmp_path):
    opt = md.optim.SGD(1.0, loss_scale=md.optim.LossScale(64.0, automatic=True, every_n=9))
    with Trainer("replicated", [[np.ones(2)]] * 2) as trainer:
        trainer.apply(opt, [[np.ones(2)]] * 2)
        md.save(tmp_path / "x", trainer.variables, opt)
        other = md.optim.SGD(1.0, loss_scale=md.optim.LossScale(2.0, automatic=True, every_n=9))
        md.load(tmp_path / "x", trainer.variables, other)
        assert (other.loss_scale.value, other.loss_scale.counter) == (64.0, 1)
        plain = md.optim.SGD(1.0)
        md.load(tmp_path / "x", trainer.variables, plain)
        assert plain.loss_scale is None


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "8"])
def test_a_scale_that_is_no_positive_number_is_refused(value):
    with pytest.raises(ValueError, match="a loss scale is a finite number above 0"):
        md.optim.LossScale(value)


def test_every_n_is_a_number_of_steps():
    with pytest.raises(ValueError, match="every_n is a number of steps from 1"):
        md.optim.LossScale(1.0, every_n=0)


def test_a_scale_that_cannot_be_halved_any_more_is_an_error_and_stays_loadable(tmp_path):
    scale = md.optim.LossScale(2.0**-62, automatic=True, every_n=1)
    opt = md.optim.SGD(1.0, loss_scale=scale)
    with Trainer("replicated", [[np.ones(2)]] * 2) as trainer:
        bad = [[np.full(2, np.inf)]] * 2
        trainer.apply(opt, bad)
        trainer.apply(opt, bad)
        with pytest.raises(md.errors.NonFiniteError, match=r"at a loss scale of 5\.42"):
            trainer.apply(opt, bad)
        md.save(tmp_path / "x", trainer.variables, opt)
        md.load(tmp_path / "x", trainer.variables, opt)
    largest = md.optim.LossScale(2.0**64, automatic=True, every_n=1)
    for _ in range(4):
        largest.update(True)
    assert largest.value == 2.0**64


@pytest.mark.parametrize("exponent", [200, -200])
def test_the_norm_of_very_large_and_small_gradients_is_right(exponent):
    gradient = np.array([3.0, 4.0]) * 10.0**exponent
    with Trainer("replicated", [[np.zeros(2)]] * 2) as trainer:
        trainer.apply(md.optim.SGD(1.0, gradient_clip_norm=1.0), [[gradient]] * 2)
        expected = -gradient / max(1.0, 5 * 10.0**exponent)
        np.testing.assert_allclose(trainer.weights()[0][0], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": "8"},
        {"loss_scale": True},
        {"gradient_accumulation_steps": True},
        {"gradient_accumulation_steps": 1.5},
    ],
)
def test_options_of_a_wrong_type_are_refused(options):
    with pytest.raises(ValueError, match="not"):
        md.optim.SGD(0.1, **options)
    with pytest.raises(ValueError, match="automatic is True or False"):
        md.optim.LossScale(1.0, automatic="no")


@pytest.mark.parametrize("count", [math.nan, math.inf, "3", -1, 2.0, True])
def test_a_count_is_a_whole_number(count):
    with (
        Trainer("replicated", [[np.zeros(2)]]) as trainer,
        pytest.raises(ValueError, match="count is a number of examples"),
    ):
        trainer.apply(md.optim.SGD(1.0), [[np.ones(2)]], [count])


@pytest.mark.parametrize("rate", [math.nan, -1.0, "x", None])
def test_a_learning_rate_that_a_function_gives_is_checked_too(rate):
    with (
        Trainer("replicated", [[np.zeros(2)]]) as trainer,
        pytest.raises(ValueError, match="lr must be at least 0"),
    ):
        trainer.apply(md.optim.SGD(lambda step: rate), [[np.ones(2)]])


@pytest.mark.parametrize(
    "option",
    [
        {"overlap": "no"},
        {"staged_vars": "no"},
        {"caching": None},
        {"hierarchical_copy": "yes"},
        {"gradient_repacking": 1.5},
        {"gradient_repacking": "2"},
        {"agg_small_grads_max_bytes": 2.5},
        {"agg_small_grads_max_group": -3},
        {"bucket_cap_mb": True},
        {"bucket_cap_mb": math.nan},
    ],
)
def test_policy_options_of_a_wrong_type_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=name):
        md.Strategy("cpu*2", "parameter_server", **option)


def test_one_optimizer_is_saved(tmp_path):
    with Trainer("replicated", [[np.zeros(2)]] * 2) as trainer:
        two = (md.optim.SGD(1.0), md.optim.SGD(1.0))
        with pytest.raises(ValueError, match="the state of one optimizer"):
            md.save(tmp_path / "x", trainer.variables, two)
        md.save(tmp_path / "x", trainer.variables, two[0])
        with pytest.raises(ValueError, match="the state of one optimizer"):
            md.load(tmp_path / "x", trainer.variables, two)


# --- several updates in one run -----------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", EVERY)
def test_two_updates_in_one_run_do_what_they_do_in_two(policy, overlap):
    if policy == "independent" and overlap:
        pytest.skip("independent sums nothing")
    name, options = EVERY[policy]

    def weights(together):
        rng = np.random.default_rng(4)
        start, data = rng.normal(size=5), rng.normal(size=(3, 2, 2))
        more = {"overlap": overlap, "bucket_cap_mb": 1e-9}
        with md.Strategy("cpu*2", name, **options, **more) as strategy:
            with strategy.scope():
                a, b = (md.Variable(start, name=v) for v in "ab")
            opt = md.optim.Momentum(0.05)

            def update(factor):
                def loss():
                    squares = md.ops.square(a) * factor + md.ops.square(b)
                    return md.ops.reduce_sum(squares)

                opt.minimize(loss, [a, b])

            def step(factors):
                for factor in factors[:, md.get_replica_context().replica_id]:
                    update(float(factor))

            for factors in data:
                for part in [factors] if together else [factors[:1], factors[1:]]:
                    strategy.run(step, part)
            return [v.copies[0].array.copy() for v in (a, b)]

    for ours, theirs in zip(weights(True), weights(False), strict=True):
        assert same_bits(ours, theirs)
