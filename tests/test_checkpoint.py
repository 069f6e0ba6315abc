"""Checkpoints: training goes on bit for bit, and whatever does not fit changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file
from states import state_dict

import minidist as md
from minidist import context
from minidist.checkpoint import Keys
from minidist.errors import ContextError, DataError, UsageError

OPTIMIZERS = {
    "sgd": lambda: md.optim.SGD(0.05),
    "momentum": lambda: md.optim.Momentum(0.05, weight_decay=0.01),
    "rmsprop": lambda: md.optim.RMSProp(0.01),
    "adam": lambda: md.optim.Adam(0.01),
}


class Training:
    """A model with batch norm and dropout, trained on batches that replicas share unevenly."""

    def __init__(self, policy="replicated", replicas=2, optimizer="momentum", seed=0):
        context.seed(seed)
        self.strategy = md.Strategy(f"cpu*{replicas}", policy)
        with self.strategy.scope():
            self.model = md.nn.Sequential(
                [
                    md.nn.Dense(8),
                    md.nn.BatchNorm(),
                    md.nn.ReLU(),
                    md.nn.Dropout(0.3),
                    md.nn.Dense(1),
                ]
            )
            self.model.build((4,))
        self.optimizer = OPTIMIZERS[optimizer]()
        self.what = (self.model, self.optimizer)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def train(self, batches):
        def step(x, y):
            def loss():
                return md.ops.reduce_mean(md.ops.square(self.model(x, training=True) - y))

            self.optimizer.minimize(loss, self.model.trainable_variables, count=x.shape[0])

        for batch in self.strategy.distribute_dataset(batches):
            self.strategy.run(step, *batch)

    def everything(self):
        """Return all that a checkpoint is about, comparable."""
        arrays = {
            copy.name: copy.tensor.numpy().tobytes()
            for v in [*self.model.variables, *self.slots()]
            for copy in v.copies
        }
        return arrays, self.counts(), self.strategy.step, context.random_state()

    def counts(self):
        """Return how many steps each copy has made."""
        places = range(len(self.model.variables[0].copies))
        return [self.optimizer.iterations_at(place) for place in places]

    def slots(self):
        return [
            self.optimizer.slot(v, slot)
            for v in self.model.trainable_variables
            for slot in self.optimizer.slots
        ]


def batches(seed, count=4):
    generator = np.random.default_rng(seed)
    sizes = [7, 4, 1, 6][:count]
    return [(x, x[:, :1] * 2) for x in (generator.normal(size=(n, 4)).astype("f4") for n in sizes)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


# --- going on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["replicated", "parameter_server", "independent"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_training_goes_on_bit_for_bit(path, policy, optimizer, replicas):
    with Training(policy, replicas, optimizer, seed=3) as uninterrupted:
        uninterrupted.train(batches(0))
        md.save(path, *uninterrupted.what)
        uninterrupted.train(batches(1))
        expected = uninterrupted.everything()
        md.load(path, *uninterrupted.what)  # back to where it was, and once more
        uninterrupted.train(batches(1))
        assert uninterrupted.everything() == expected
    with Training(policy, replicas, optimizer, seed=4) as resumed:  # all starts differently
        assert md.load(path, *resumed.what) == Keys((), ())
        resumed.train(batches(1))
        assert resumed.everything() == expected


def test_training_without_a_strategy_goes_on_bit_for_bit(path):
    class Plain(Training):
        def train(self, batches):
            for x, y in batches:
                x, y = md.constant(x), md.constant(y)
                self.optimizer.minimize(
                    lambda x=x, y=y: md.ops.reduce_mean(
                        md.ops.square(self.model(x, training=True) - y)
                    ),
                    self.model.trainable_variables,
                )

    def plain(seed):
        training = Plain(seed=seed)
        training.model = md.nn.Sequential([md.nn.Dense(8), md.nn.Dropout(0.3), md.nn.Dense(1)])
        training.model.build((4,))
        training.what = (training.model, training.optimizer)
        return training

    uninterrupted = plain(3)
    uninterrupted.train(batches(0))
    md.save(path, *uninterrupted.what)
    uninterrupted.train(batches(1))
    expected = uninterrupted.everything()
    resumed = plain(4)
    md.load(path, *resumed.what)
    resumed.train(batches(1))
    assert resumed.everything() == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [("replicated", "parameter_server"), ("parameter_server", "replicated")],
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_another_policy_goes_on_with_the_same_bits(path, before, after, optimizer):
    def values(training):
        return {
            name: array.tobytes() for name, array in state_dict(*training.what).items()
        }, training.optimizer.iterations

    with Training(before, 2, optimizer) as uninterrupted:
        uninterrupted.train(batches(0))
        md.save(path, *uninterrupted.what)
        uninterrupted.train(batches(1))
        expected = values(uninterrupted)
    with Training(after, 2, optimizer, seed=9) as resumed:
        md.load(path, *resumed.what)
        resumed.train(batches(1))
        assert values(resumed) == expected


@pytest.mark.parametrize("policy", ["replicated", "parameter_server", "independent"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_any_number_of_replicas_takes_the_saved_values(path, policy, replicas):
    with Training("replicated", 2, "adam") as saved, Training(policy, replicas, "adam") as other:
        saved.train(batches(0))
        md.save(path, *saved.what)
        md.load(path, *other.what)
        state = state_dict(*saved.what)
        for v in [*other.model.variables, *other.slots()]:
            for copy in v.copies:
                assert copy.tensor.numpy().tobytes() == state[v.name].tobytes()
        assert other.optimizer.iterations == saved.optimizer.iterations == 4
        other.train(batches(1))
        assert other.optimizer.iterations == 8


def test_independent_saves_each_replicas_model_and_count(path):
    with Training("independent", 2, "adam") as saved:
        saved.train(batches(0))  # one of them has a single example: replica 1 gets none
        assert saved.counts() == [4, 3]
        md.save(path, *saved.what)
        arrays = load_file(path)
        for v in [*saved.model.variables, *saved.slots()]:
            first, second = (copy.tensor.numpy() for copy in v.copies)
            assert arrays[v.name].tobytes() == first.tobytes()
            assert arrays[f"{v.name}/replica_1"].tobytes() == second.tobytes()
        kernel = saved.model.variables[0].name
        assert not np.array_equal(arrays[kernel], arrays[f"{kernel}/replica_1"])

    for policy, replicas, counts in [
        ("replicated", 2, [4, 4]),
        ("parameter_server", 2, [4]),
        ("independent", 1, [4]),
        ("independent", 3, [4, 3, 4]),
    ]:
        with Training(policy, replicas, "adam") as other:
            md.load(path, *other.what)
            for v in [*other.model.variables, *other.slots()]:
                for i, copy in enumerate(v.copies):
                    own = policy == "independent" and i == 1
                    key = f"{v.name}/replica_1" if own else v.name
                    assert copy.tensor.numpy().tobytes() == arrays[key].tobytes()
            assert other.counts() == counts


def test_saving_inside_a_meeting_is_saving_at_that_step(path):
    with Training() as training:

        def step():
            md.get_replica_context().merge_call(lambda strategy: md.save(path, *training.what))

        training.train(batches(0))
        before = state_dict(*training.what)
        training.strategy.run(step)
        assert {k: a.tobytes() for k, a in load_file(path).items()} == {
            k: a.tobytes() for k, a in before.items()
        }


def test_what_was_frozen_but_trained_all_the_same_goes_on_too(path):
    def make():
        v = md.Variable([1.0, 2.0], name="v", trainable=False)
        return v, md.optim.Momentum(0.1)

    v, optimizer = make()
    md.save(path, v, optimizer)
    assert list(load_file(path)) == ["v"]
    optimizer.apply_gradients([(md.constant([1.0, 1.0]), v)])
    md.save(path, v, optimizer)
    assert sorted(load_file(path)) == ["v", "v/Momentum"]
    w, other = make()
    md.load(path, w, other)
    assert other.slot(w, "momentum").numpy().tolist() == [1.0, 1.0]


def test_random_numbers_go_on_from_the_saved_seed(path):
    v = md.Variable(0.0, name="v")
    context.seed(2**64 - 1)
    md.random.stream(5)
    md.save(path, v)
    expected = md.random.stream(5).uniform((3,))
    context.seed(1)
    md.load(path, v)
    assert np.array_equal(md.random.stream(5).uniform((3,)), expected)


# --- what does not fit --------------------------------------------------------------------------


@pytest.fixture
def saved(path):
    with Training(optimizer="momentum") as training:
        training.train(batches(0, 2))
        md.save(path, *training.what)
    return path


def refused(training, path, *what, match, error=DataError, **options):
    """Load what does not fit, and check that nothing has changed."""
    before = training.everything()
    with pytest.raises(error, match=match) as caught:
        md.load(path, *(what or training.what), **options)
    assert training.everything() == before
    return str(caught.value)


def test_missing_and_unexpected_keys_are_listed_in_one_error(saved):
    with Training(optimizer="adam") as training:
        message = refused(training, saved, match="missing in the file")
        for v in training.model.trainable_variables:
            for key in (f"{v.name}/Adam/first", f"{v.name}/Adam/second", f"{v.name}/Momentum"):
                assert repr(key) in message
        assert "saved with Momentum, not Adam" in message and str(saved) in message


def test_keys_that_differ_are_returned_if_that_is_wanted(saved):
    with Training(optimizer="adam", seed=8) as training:
        extra = md.Variable(5.0, name="extra")
        keys = md.load(saved, [training.model, extra], training.optimizer, strict=False)
        slots = training.slots()
        assert set(keys.missing) == {
            "extra",
            "extra/Adam/first",
            "extra/Adam/second",
            *(s.name for s in slots),
        }
        assert set(keys.unexpected) == {
            f"{v.name}/Momentum" for v in training.model.trainable_variables
        }
        assert float(extra) == 5.0
        for v in training.model.variables:
            assert v.numpy().tobytes() == load_file(saved)[v.name].tobytes()


def test_slots_are_left_alone_without_an_optimizer(saved):
    with Training(seed=8) as training:
        assert md.load(saved, training.model) == Keys((), ())
        assert training.optimizer.iterations == 0
        assert not any(map(training.optimizer.has_slots, training.model.variables))


def test_a_file_without_an_optimizer_lacks_its_iterations(path):
    v = md.Variable(1.0, name="v")
    md.save(path, v)
    with pytest.raises(DataError, match="missing in the file: 'iterations'"):
        md.load(path, v, md.optim.SGD(0.1))
    assert md.load(path, v, md.optim.SGD(0.1), strict=False).missing == ("iterations",)


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_and_dtypes_are_refused(saved, strict):
    with Training() as training:
        kernel = training.model.variables[0].name
        other = [
            *training.model.variables[1:],
            md.Variable(np.zeros((5, 8), "f4"), name=kernel),
        ]
        refused(
            training,
            saved,
            other,
            strict=strict,
            match=r"float32\[4, 8\] there and float32\[5, 8\]",
        )
        other[-1] = md.Variable(np.zeros((4, 8), "f8"), name=kernel)
        refused(
            training,
            saved,
            other,
            strict=strict,
            match=r"float32\[4, 8\] there and float64\[4, 8\]",
        )


@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_file_changes_nothing(saved, strict):
    whole = saved.read_bytes()
    with Training(seed=8) as training:
        for what in (training.what, [training.model]):  # without an optimizer, slots matter too
            for damaged in (
                whole[:-200] + bytes(200),  # a tail of zeros, as when the power failed
                whole[:-20] + bytes([whole[-20] ^ 64]) + whole[-19:],
                whole.replace(rb"\"step\": 2", rb"\"step\": 3"),
                whole.replace(rb"/Momentum\"", rb"/Nomentum\"", 1),
                whole.replace(b'"minidist":', b'"minidisu":'),
                whole.replace(b'"minidist.checksum":', b'"minidist.checksun":'),
            ):
                assert damaged != whole
                saved.write_bytes(damaged)
                refused(training, saved, *what, match=str(saved), strict=strict)
        saved.write_bytes(whole)
        assert md.load(saved, *training.what) == Keys((), ())


def test_long_lists_of_keys_are_cut(path):
    many = [md.Variable(0.0, name=f"v{i}") for i in range(50)]
    md.save(path, many)
    with pytest.raises(DataError, match=r"'v1[0-9]', .* and 29 more"):
        md.load(path, many[0])


def test_two_variables_of_one_name_are_an_error_that_names_both(path):
    first, second = md.Variable(0.0, name="v"), md.Variable([0.0], name="v")
    for act in (md.save, md.load):
        if act is md.load:
            md.save(path, first)
        with pytest.raises(UsageError, match=r"'v' float32\[\].*'v' float32\[1\]"):
            act(path, [first, second])
    md.save(path, [first, first])  # one variable listed twice is one
    slot = md.Variable(0.0, name="v/Momentum")
    with pytest.raises(UsageError, match="the name 'v/Momentum' would mean both"):
        md.save(path, [first, slot], md.optim.Momentum(0.1))


@pytest.mark.parametrize("what", ["v", 3.0, None, np.zeros(3), [1.0]])
def test_what_is_no_variable_is_refused(path, what):
    with pytest.raises(UsageError, match="variables and models can be saved"):
        md.save(path, what)


def test_nothing_to_save_is_refused(path):
    for what in ([], md.nn.Sequential([md.nn.Dense(1)])):
        with pytest.raises(UsageError, match="has the model been built"):
            md.save(path, what)


def test_names_and_dtypes_that_the_format_lacks_are_refused(path):
    with pytest.raises(UsageError, match="the format reserves its name"):
        md.save(path, md.Variable(0.0, name="__metadata__"))
    assert not path.exists()


def test_contexts(saved):
    with Training() as training, Training() as other:

        def in_replica():
            md.load(saved, *training.what)

        before = training.everything()[0]
        with pytest.raises(ContextError, match="load was called in replica"):
            training.strategy.run(in_replica)
        with other.strategy.scope(), pytest.raises(ContextError, match="Mixing"):
            md.load(saved, *training.what)
        with pytest.raises(ContextError, match=r"Mixing.*use a file for each"):
            md.save(saved, [training.model, other.model])
        stray = md.Variable(0.0, name="stray")
        with training.strategy.scope(), pytest.raises(ContextError, match="Mixing"):
            md.load(saved, [training.model, stray], training.optimizer, strict=False)
        assert training.everything()[0] == before
        with training.strategy.scope():
            md.load(saved, *training.what)
