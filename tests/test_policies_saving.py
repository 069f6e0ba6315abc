"""A training goes on from any step, to the same bits; another policy starts from what it was."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import TwoLayers, split
from policies import EVERY, LATE, RELAXING, STAGING, Trainer, optimizer, oracle, same_bits
from safetensors.numpy import load_file
from scenarios import SHAPES, arrays, global_batch, parts, two_layers

import minidist as md
from minidist.checkpoint import Keys
from minidist.errors import DataError, UsageError

EXAMPLES = [9, 4, 1, 0, 7, 6]  # of the global batches; in one there are none


class Training(Trainer):
    """TwoLayers, a moving average of its hidden layer's bias, and an optimizer that uses all."""

    def __init__(self, policy, n, rule="adam", seed=1, **options):
        rng = np.random.default_rng(seed)
        super().__init__(policy, [TwoLayers.start(rng, "float32")] * n, **options)
        with self.strategy.scope():
            self.average = md.Variable(np.float32(seed), name="average", trainable=False)
        scale = md.optim.LossScale(4.0, automatic=True, every_n=2)
        self.optimizer = optimizer(rule, 0.01, gradient_clip_norm=0.3, loss_scale=scale)
        self.what = ([*self.variables, self.average], self.optimizer)

    def train(self, begin, end):
        for step in range(begin, end):
            rng = np.random.default_rng(step)
            counts = split(EXAMPLES[step], self.n)
            batches = parts(*global_batch(rng, EXAMPLES[step], "float32"), counts)
            self.each(lambda replica, batches=batches: self.step(*batches[replica]))

    def step(self, x, labels):
        md.moving_average.assign_moving_average(
            self.average, md.constant(np.float32(len(labels))), 0.75, count=len(labels)
        )
        self.optimizer.minimize(
            lambda: two_layers(self.variables, x, labels), self.variables, count=len(labels)
        )

    def everything(self):
        """Return all that matters, comparable: values, what is read, slots, and counts."""
        slots = [
            self.optimizer.slot(v, name) for v in self.variables for name in self.optimizer.slots
        ]
        copies = [copy for v in [*self.what[0], *slots] for copy in v.copies]
        read = [array for own in self.each(self.reads) for array in own]
        return (
            [np.asarray(array).tobytes() for array in [*(c.array for c in copies), *read]],
            self.optimizer.iterations,
            self.optimizer.loss_scale.state,
        )

    def reads(self, _):
        return [v.numpy() for v in self.what[0]]


@pytest.mark.parametrize(
    ("policy", "n", "rule"),
    [(policy, n, rule) for policy in LATE for n in (1, 3) for rule in ("sgd", "nesterov", "adam")]
    + [(policy, 2, "rmsprop") for policy in EVERY],
)
def test_training_goes_on_from_every_step_bit_for_bit(policy, n, rule, tmp_path):
    with Training(policy, n, rule) as whole:
        for step in range(len(EXAMPLES)):
            md.save(tmp_path / str(step), *whole.what)
            whole.train(step, step + 1)
        expected = whole.everything()
    with Training(policy, n, rule, seed=2) as resumed:
        for step in range(len(EXAMPLES)):  # at first in a new training, then in one that has run
            assert md.load(tmp_path / str(step), *resumed.what) == Keys((), ())
            resumed.train(step, len(EXAMPLES))
            assert resumed.everything() == expected


def test_saving_changes_nothing(tmp_path):
    for policy in LATE:
        results = []
        for saved in (False, True):
            with Training(policy, 2) as training:
                for step in range(4):
                    training.train(step, step + 1)
                    if saved:
                        md.save(tmp_path / "now", *training.what)
                results.append(training.everything())
        assert results[0] == results[1]


def test_what_is_held_is_in_the_file_beside_the_values(tmp_path):
    def keys(policy, steps):
        with Training(policy, 2, "sgd") as training:
            training.train(0, steps)
            md.save(tmp_path / "file", *training.what)
            arrays = load_file(tmp_path / "file")
            for v in training.what[0]:
                assert same_bits(arrays[v.name], v.copies[0].array)
            return sorted(key for key in arrays if "/" in key)

    names = [f"v{i}" for i in range(len(TwoLayers.shapes))]
    staged = [f"{name}/staged" for name in ["average", *names]]
    for policy in EVERY:
        if policy in STAGING:
            assert keys(policy, 2) == sorted([*staged, "average/delta"])
        elif policy in RELAXING:
            assert keys(policy, 2) == [f"{name}/relaxed" for name in names]
        elif policy != "independent":
            assert keys(policy, 2) == []
        if policy in LATE:
            assert keys(policy, 0) == []


ALIKE = [set(STAGING), set(RELAXING)]  # each of these goes on with what another has held


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a in EVERY for b in EVERY if not any({a, b} <= kin for kin in ALIKE)],
)
def test_another_policy_starts_from_what_was_saved(before, after, tmp_path):
    n, rng = 2, np.random.default_rng(3)
    with Trainer(before, [arrays(rng, SHAPES, "float64")] * n) as saved:
        for _ in range(3):
            saved.apply(md.optim.SGD(0.1), [arrays(rng, SHAPES, "float64")] * n)
        md.save(tmp_path / "file", saved.variables)
        starts = [[v.copies[0].array.copy() for v in saved.variables]] * n
    expected, opt = oracle(after, "momentum", starts), optimizer("momentum")
    with Trainer(after, [arrays(rng, SHAPES, "float64")] * n) as trainer:
        trainer.apply(md.optim.SGD(0.1), [arrays(rng, SHAPES, "float64")] * n)
        assert md.load(tmp_path / "file", trainer.variables) == Keys((), ())
        for _ in range(4):
            trainer.check(expected.weights, expected.reads)
            gradients = [arrays(rng, SHAPES, "float64") for _ in range(n)]
            trainer.apply(opt, gradients)
            expected.step(gradients)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("policy", LATE)
def test_any_number_of_replicas_goes_on_from_any_others(policy, n, m, tmp_path):
    """All replicas bring the same, and a mean over 1, 2 or 4 of the same is exact."""
    rng = np.random.default_rng(5)
    starts = arrays(rng, SHAPES, "float32")
    gradients = [arrays(rng, SHAPES, "float32") for _ in range(6)]
    expected = oracle(policy, "nesterov", [starts] * m)
    opt, other = optimizer("nesterov"), optimizer("nesterov")
    with Trainer(policy, [starts] * n) as saved, Trainer(policy, [gradients[0]] * m) as resumed:
        for step, gradient in enumerate(gradients):
            expected.step([gradient] * m)
            if step < 3:
                saved.apply(opt, [gradient] * n)
            else:
                if step == 3:
                    md.save(tmp_path / "file", saved.variables, opt)
                    assert md.load(tmp_path / "file", resumed.variables, other) == Keys((), ())
                resumed.apply(other, [gradient] * m)
                resumed.check(expected.weights, expected.reads)


@pytest.mark.parametrize("policy", RELAXING)
def test_what_was_unused_in_the_step_before_is_not_applied_after_it(policy, tmp_path):
    """Nor is anything where there was no example: neither is the same as zeros."""
    n, rng = 2, np.random.default_rng(6)
    starts = [arrays(rng, SHAPES, "float32")] * n
    for counts, unused in [(None, 2), ([0, 0], None), (None, None)]:
        expected, opt = (
            oracle(policy, "momentum", starts, weight_decay=0.1),
            optimizer("momentum", 0.1),
        )
        with Trainer(policy, starts) as trainer:
            for step in range(4):
                gradients = [arrays(rng, SHAPES, "float32") for _ in range(n)]
                if step == 1 and unused is not None:
                    for own in gradients:
                        own[unused] = None
                trainer.apply(opt, gradients, counts if step == 1 else None)
                expected.step(gradients, counts if step == 1 else None)
                md.save(tmp_path / "file", trainer.variables, opt)
                trainer.each(
                    lambda replica: [v.copies[replica].array.fill(0) for v in trainer.variables]
                )
                md.load(tmp_path / "file", trainer.variables, opt)
                trainer.check(expected.weights)


def test_some_variables_can_be_loaded_without_the_others(tmp_path):
    for policy in LATE:
        n, rng = 2, np.random.default_rng(7)
        with Trainer(policy, [arrays(rng, SHAPES, "float32")] * n) as trainer:
            starts = [[v.numpy() for v in trainer.variables]] * n
            expected, opt = oracle(policy, "sgd", starts), optimizer("sgd")
            for step in range(5):
                gradients = [arrays(rng, SHAPES, "float32")] * n
                trainer.apply(opt, gradients)
                expected.step(gradients)
                md.save(tmp_path / "file", trainer.variables[:2])
                md.load(
                    tmp_path / "file",
                    trainer.variables[:1] if step % 2 else trainer.variables[1:2],
                    strict=False,
                )
                trainer.check(expected.weights, expected.reads)


def test_a_variable_with_the_name_of_what_is_held_is_an_error(tmp_path):
    with Trainer("parameter_server+staged_vars", [[np.zeros(2)]]) as trainer:
        with trainer.strategy.scope():
            other = md.Variable(0.0, name="v0/staged")
        with pytest.raises(UsageError, match="the name 'v0/staged' would mean both"):
            md.save(tmp_path / "file", [*trainer.variables, other])


def test_what_is_held_must_fit_its_variable(tmp_path):
    def file(shape):
        with Trainer("parameter_server+staged_vars", [[np.zeros(shape)]]) as trainer:
            trainer.apply(md.optim.SGD(1.0), [[np.ones(shape)]])
            md.save(tmp_path / "file", trainer.variables)

    file((3,))
    with Trainer("parameter_server+staged_vars", [[np.zeros(2)]]) as trainer:
        with pytest.raises(DataError, match=r"'v0/staged' is float64\[3\] there"):
            md.load(tmp_path / "file", trainer.variables)
        file((2,))
        whole = (tmp_path / "file").read_bytes()
        assert whole.count(rb"\"v0/staged\": 1.0") == 1
        for wrong in (rb"\"v0/staged\": \"\"", rb"\"v0/staged\": [] ", rb"\"v0/staged\": nul"):
            (tmp_path / "file").write_bytes(whole.replace(rb"\"v0/staged\": 1.0", wrong))
            with pytest.raises(DataError):
                md.load(tmp_path / "file", trainer.variables)
