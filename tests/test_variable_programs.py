"""Random programs of assign, read, reduce and merge, against a plain sequential model."""

from __future__ import annotations

from operator import add, sub

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import POLICIES

import minidist as md

A, S = md.VariableAggregation, md.VariableSynchronization
VERBS = {"assign": lambda old, new: new, "assign_add": add, "assign_sub": sub}
KINDS = [(how, when) for when in (S.AUTO, S.ON_READ) for how in A]


class Illegal(Exception):
    """What the program asks for has no meaning."""


# --- the model ----------------------------------------------------------------------------------


def aggregate(how, parts):
    if how is A.NONE:
        raise Illegal
    if how is A.ONLY_FIRST_REPLICA:
        return parts[0]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total * (1 / len(parts)) if how is A.MEAN else total


class Model:
    """A variable as one list of numbers: what each replica reads."""

    def __init__(self, n, kind, plain):
        self.n, (self.how, self.when), self.plain = n, kind, plain
        self.parts = [0.0] * n

    def replicas_assign(self, verb, values):
        if self.when is S.AUTO:
            one = values[0] if self.plain else aggregate(self.how, values)
            values = [one] * self.n
        self.parts = [VERBS[verb](old, new) for old, new in zip(self.parts, values, strict=True)]

    def all_assign(self, verb, value):
        if self.when is S.ON_READ and self.how is A.SUM:
            if verb != "assign":
                raise Illegal
            value = value / self.n
        self.update(verb, value)

    def update(self, verb, value):
        self.parts = [VERBS[verb](old, value) for old in self.parts]

    def read(self):
        if self.when is S.AUTO or self.n == 1:
            return self.parts[0]
        return aggregate(self.how, self.parts)


# --- programs -----------------------------------------------------------------------------------

numbers = st.integers(-8, 8).map(float)
variables = st.integers(0, 2)
ops = st.sampled_from(["sum", "mean"])
verbs = st.sampled_from(list(VERBS))
in_replicas = st.one_of(
    st.tuples(st.just("assign"), variables, verbs, st.lists(numbers, min_size=5, max_size=5)),
    st.tuples(st.just("copy"), variables, verbs, variables),
    st.tuples(st.just("read"), variables),
    st.tuples(st.just("all_reduce"), variables, ops),
    st.tuples(st.just("merge"), variables, verbs, numbers),
    st.tuples(st.just("merge_read"), variables),
)
for_all = st.one_of(
    st.tuples(st.just("assign"), variables, verbs, numbers),
    st.tuples(st.just("copy"), variables, verbs, variables),
    st.tuples(st.just("read"), variables),
    st.tuples(st.just("update"), variables, verbs, numbers),
    st.tuples(st.just("reduce"), variables, ops),
    st.tuples(st.just("restore"), variables, variables),
)
programs = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.lists(in_replicas, min_size=1, max_size=5)),
        st.tuples(st.just("all"), for_all),
    ),
    max_size=6,
)


def expected(models, where, what):
    """Let the models do an instruction; return what it shows, of each replica inside a run."""
    verb, model, *rest = what[0], models[what[1]], *what[2:]
    n = model.n
    if where == "run":
        if verb == "assign":
            model.replicas_assign(rest[0], rest[1][:n])
        if verb == "copy":
            model.replicas_assign(rest[0], list(models[rest[1]].parts))
        if verb == "merge":
            model.all_assign(*rest)
        if verb == "merge_read":
            return [model.read()] * n
        if verb == "all_reduce":
            scaled = [part * (i + 1) for i, part in enumerate(model.parts)]
            return [aggregate(A(rest[0]), scaled)] * n
        return list(model.parts)
    if verb == "assign":
        model.all_assign(*rest)
    if verb == "copy":
        model.all_assign(rest[0], models[rest[1]].read())
    if verb == "update":
        model.update(*rest)
    if verb == "reduce":
        return aggregate(A(rest[0]), model.parts)
    if verb == "restore":
        model.all_assign("assign", models[rest[0]].read())
    return model.read() if verb == "read" else list(model.parts)


def in_replica(variables, what):
    """Do an instruction in a replica; return what it shows."""
    replica = md.get_replica_context()
    verb, v, *rest = what[0], variables[what[1]], *what[2:]
    if verb == "assign":
        getattr(v, rest[0])(np.array(rest[1][replica.replica_id]))
    if verb == "copy":
        getattr(v, rest[0])(variables[rest[1]])
    if verb == "merge":
        replica.merge_call(lambda _: (getattr(v, rest[0])(rest[1]), None)[1])
    if verb == "merge_read":
        return float(replica.merge_call(lambda _: float(v)))
    if verb == "all_reduce":
        return float(replica.all_reduce(rest[0], v * float(replica.replica_id + 1)))
    return float(v)


def in_cross_replica(strategy, variables, what):
    verb, v, *rest = what[0], variables[what[1]], *what[2:]
    if verb == "assign":
        getattr(v, rest[0])(rest[1])
    if verb == "copy":
        getattr(v, rest[0])(variables[rest[1]])
    if verb == "update":
        strategy.update(v, lambda w: getattr(w, rest[0])(rest[1]))
    if verb == "reduce":
        return float(strategy.reduce(rest[0], strategy.run(lambda: v * 1.0)))
    if verb == "restore":
        v.restore(variables[rest[0]].to_save())
    return float(v) if verb == "read" else each(strategy, lambda: float(v))


def each(strategy, fn):
    shown = [None] * strategy.num_replicas

    def call():
        shown[md.get_replica_context().replica_id] = fn()

    strategy.run(call)
    return shown


@pytest.fixture(scope="module")
def strategies():
    made = {}
    for policy in ("replicated", "parameter_server", "parameter_server_device"):
        name, options = POLICIES[policy]
        for n in range(1, 6):
            made[policy, n] = md.Strategy(f"cpu*{n}", name, **options)
    yield made
    for strategy in made.values():
        strategy.close()


@given(
    policy=st.sampled_from(["replicated", "parameter_server", "parameter_server_device"]),
    n=st.integers(1, 5),
    scope=st.booleans(),
    kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=3),
    program=programs,
)
@settings(max_examples=250, deadline=None)
def test_a_program_shows_what_the_model_says(strategies, policy, n, scope, kinds, program):
    strategy = strategies[policy, n]
    with strategy.scope():
        variables = [
            md.Variable(0.0, dtype="float64", name=f"v{i}", aggregation=how, synchronization=when)
            for i, (how, when) in enumerate(kinds)
        ]
    plain = n == 1 and policy != "replicated"  # one copy, one replica: nothing to aggregate
    models = [Model(n, kind, plain) for kind in kinds]
    for where, what in program:
        legal, right, illegal = [], [], None
        for step in what if where == "run" else [what]:
            try:
                right.append(expected(models, where, step))
            except Illegal:
                illegal = step  # in a run of its own: a run that fails ends replicas anywhere
                break
            legal.append(step)

        def act(steps, where=where):
            if where == "run":
                shown = each(strategy, lambda: [in_replica(variables, step) for step in steps])
                return [list(column) for column in zip(*shown, strict=True)]
            if not scope:
                return [in_cross_replica(strategy, variables, step) for step in steps]
            with strategy.scope():
                return [in_cross_replica(strategy, variables, step) for step in steps]

        assert act(legal) == right, (where, what)
        if illegal is not None:
            with pytest.raises(ValueError, match="v"):
                act([illegal])
        state = [each(strategy, lambda v=v: float(v)) for v in variables]
        assert state == [model.parts for model in models], (where, what)
