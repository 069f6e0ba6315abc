"""Optimizer rules over a flat list of tensors, all of them in one call.

Every rule takes lists of C-contiguous arrays, float32 or float64, all of one dtype: one array per
tensor, of the same size in each list. Weights and slots are changed in place. Before the rule sees
a gradient it is multiplied by `scale` (the 1/n of a mean), each element is clipped to
[-clip, clip], and weight_decay[i] * weights[i] is added, or left out where weight_decay[i] is 0.

`others` has lists of gradients of more replicas. What is scaled then is ((c0 g0 + c1 g1) + c2 g2)
..., with `counts` c that are 1 unless given: the bits that reduce.sum gives, but nowhere stored.
`copies` has lists of arrays that get the new weights too.

Hyperparameters are computed in double precision and rounded once to the element type. At most
`threads` threads share the work; the result is the same for any number of them.

A TypeError names the array of a wrong type, a ValueError the one of a wrong size or layout, the
list of a wrong length, or a clip that is not above 0. The formulas are in update.h.
"""

cimport numpy as cnp
from kernels.arrays cimport (
    PyThreadState,
    let_go,
    md_parallel,
    md_table,
    read_table,
    take_back,
    the_team,
)
from libc.math cimport INFINITY, pow, sqrt
from libcpp.vector cimport vector

from minidist.kernels import team

cnp.import_array()

cdef extern from "update.h":
    ctypedef struct md_sgd "md_sgd<double>":
        double lr
    ctypedef struct md_momentum "md_momentum<double>":
        double lr, momentum
        bint nesterov
    ctypedef struct md_rmsprop "md_rmsprop<double>":
        double lr, decay, rest, momentum, epsilon
    ctypedef struct md_adam "md_adam<double>":
        double beta1, rest1, beta2, rest2, rate, floor
    void md_update[Rule](
        md_parallel team, const md_table &table, const Rule &rule, Py_ssize_t copies,
        const vector[double] &counts, double scale, double clip, const double *decay, int threads,
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


cdef vector[double] read_decay(
    str verb, object weight_decay, double clip, md_table &table
) except *:
    """The weight decay of each tensor; raises where it or the clip is not what it must be."""
    cdef vector[double] decay = weight_decay
    if not clip > 0:
        raise ValueError(f"{verb}: clip must be above 0 (infinity: do not clip), got {clip}")
    if decay.size() != table.size.size():
        raise ValueError(
            f"{verb}: weight_decay needs a number for each of the {table.size.size()} tensors, "
            f"got {decay.size()}"
        )
    return decay


cdef vector[double] read_counts(str verb, object others, object counts) except *:
    """How many times each replica's gradients are taken; raises where there is not one for each."""
    cdef vector[double] read
    if counts is None:
        read.assign(1 + len(others), 1.0)
    else:
        read = counts
    if <Py_ssize_t> read.size() != 1 + len(others):
        raise ValueError(f"{verb}: {read.size()} counts for {1 + len(others)} lists of gradients")
    return read


cdef int read_rule(
    md_table &table, str verb, list changed, list names, object copies, object gradients,
    object others,
) except -1:
    """Read a rule's columns: what it changes, by names, what gets the new weights, gradients."""
    names = names + [f"copies[{i}]" for i in range(len(copies))]
    cdef Py_ssize_t written = len(names)
    names += ["gradients"] + [f"others[{i}]" for i in range(len(others))]
    return read_table(table, verb, [*changed, *copies, gradients, *others], names, written)


def sgd(
    weights, gradients, *, double lr, double scale, weight_decay, double clip=INFINITY,
    copies=(), others=(), counts=None, int threads=1,
):
    """Apply w -= lr g."""
    cdef md_table table
    cdef vector[double] each = read_counts("sgd", others, counts)
    read_rule(table, "sgd", [weights], ["weights"], copies, gradients, others)
    cdef vector[double] decays = read_decay("sgd", weight_decay, clip, table)
    cdef md_sgd rule = md_sgd(lr)

    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, len(copies), each, scale, clip, decays.data(), threads)
    take_back(state)


def momentum(
    weights, gradients, momenta, *, double lr, double momentum, bint nesterov, double scale,
    weight_decay, double clip=INFINITY, copies=(), others=(), counts=None, int threads=1,
):
    """Apply m = momentum m + g, then w -= lr m, or with Nesterov w -= lr (g + momentum m)."""
    cdef md_table table
    cdef vector[double] each = read_counts("momentum", others, counts)
    read_rule(
        table, "momentum", [weights, momenta], ["weights", "momenta"], copies, gradients, others
    )
    cdef vector[double] decays = read_decay("momentum", weight_decay, clip, table)
    cdef md_momentum rule = md_momentum(lr, momentum, nesterov)

    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, len(copies), each, scale, clip, decays.data(), threads)
    take_back(state)


def rmsprop(
    weights, gradients, squares, momenta, *, double lr, double decay, double momentum,
    double epsilon, double scale, weight_decay, double clip=INFINITY, copies=(),
    others=(), counts=None, int threads=1,
):
    """Apply s = decay s + (1 - decay) g^2, m = momentum m + lr g / sqrt(s + epsilon), w -= m.

    The mean squares s of tf_cnn_benchmarks start from 1, the momenta m from 0.
    """
    cdef md_table table
    cdef vector[double] each = read_counts("rmsprop", others, counts)
    read_rule(
        table, "rmsprop", [weights, squares, momenta], ["weights", "squares", "momenta"], copies,
        gradients, others,
    )
    cdef vector[double] decays = read_decay("rmsprop", weight_decay, clip, table)
    cdef md_rmsprop rule = md_rmsprop(lr, decay, 1 - decay, momentum, epsilon)

    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, len(copies), each, scale, clip, decays.data(), threads)
    take_back(state)


def adam(
    weights, gradients, firsts, seconds, *, double lr, double beta1, double beta2, double epsilon,
    Py_ssize_t step, double scale, weight_decay, double clip=INFINITY, copies=(),
    others=(), counts=None, int threads=1,
):
    """Apply algorithm 1 of Kingma and Ba, "Adam: a method for stochastic optimization" (2015).

    `firsts` and `seconds` are the moment estimates, from 0; `step` counts from 1 (ValueError).
    """
    if step < 1:
        raise ValueError(f"adam: step counts from 1, got {step}")
    cdef md_table table
    cdef vector[double] each = read_counts("adam", others, counts)
    read_rule(
        table, "adam", [weights, firsts, seconds], ["weights", "firsts", "seconds"], copies,
        gradients, others,
    )
    cdef vector[double] decays = read_decay("adam", weight_decay, clip, table)
    cdef double bias1 = 1 - pow(beta1, <double> step), bias2 = 1 - pow(beta2, <double> step)
    cdef md_adam rule = md_adam(
        beta1, 1 - beta1, beta2, 1 - beta2, lr * sqrt(bias2) / bias1, epsilon * sqrt(bias2)
    )

    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, len(copies), each, scale, clip, decays.data(), threads)
    take_back(state)
