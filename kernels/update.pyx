"""Optimizer rules over a flat list of tensors, all of them in one call.

Hyperparameters are computed in double precision and rounded once to the element type. The
formulas are in update.h.
"""

cimport numpy as cnp
from kernels.arrays cimport (
    PyThreadState,
    check_threads,
    let_go,
    md_parallel,
    md_table,
    read_table,
    take_back,
    the_team,
)
from libc.math cimport pow
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
        double lr, beta1, rest1, beta2, rest2, epsilon, bias1, bias2
    void md_update[R](
        md_parallel team, const md_table &table, const R &rule, double scale,
        const double *decay, int threads,
    ) noexcept nogil

cdef md_parallel parallel = the_team(team.parallel)


cdef vector[double] read_decay(str verb, object weight_decay, Py_ssize_t tensors) except *:
    cdef vector[double] decay = weight_decay
    if <Py_ssize_t> decay.size() != tensors:
        raise ValueError(
            f"{verb}: weight_decay needs a number for each of the {tensors} tensors, "
            f"got {decay.size()}"
        )
    return decay


def sgd(weights, gradients, *, double lr, double scale, weight_decay, int threads=1):
    cdef md_table table
    read_table(table, "sgd", [weights, gradients], ["weights", "gradients"], 1)
    cdef vector[double] decay = read_decay("sgd", weight_decay, len(weights))
    check_threads("sgd", threads)

    cdef md_sgd rule = md_sgd(lr)
    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, scale, decay.data(), threads)
    take_back(state)


def momentum(
    weights, gradients, momenta, *,
    double lr, double momentum, bint nesterov, double scale, weight_decay, int threads=1,
):
    cdef md_table table
    read_table(
        table, "momentum", [weights, momenta, gradients], ["weights", "momenta", "gradients"], 2
    )
    cdef vector[double] decay = read_decay("momentum", weight_decay, len(weights))
    check_threads("momentum", threads)

    cdef md_momentum rule = md_momentum(lr, momentum, nesterov)
    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, scale, decay.data(), threads)
    take_back(state)


def rmsprop(
    weights, gradients, squares, momenta, *,
    double lr, double decay, double momentum, double epsilon, double scale, weight_decay,
    int threads=1,
):
    cdef md_table table
    read_table(
        table, "rmsprop", [weights, squares, momenta, gradients],
        ["weights", "squares", "momenta", "gradients"], 3,
    )
    cdef vector[double] weight_decays = read_decay("rmsprop", weight_decay, len(weights))
    check_threads("rmsprop", threads)

    cdef md_rmsprop rule = md_rmsprop(lr, decay, 1 - decay, momentum, epsilon)
    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, scale, weight_decays.data(), threads)
    take_back(state)


def adam(
    weights, gradients, firsts, seconds, *,
    double lr, double beta1, double beta2, double epsilon, Py_ssize_t step, double scale,
    weight_decay, int threads=1,
):
    if step < 1:
        raise ValueError(f"adam: step counts from 1, got {step}")
    cdef md_table table
    read_table(
        table, "adam", [weights, firsts, seconds, gradients],
        ["weights", "firsts", "seconds", "gradients"], 3,
    )
    cdef vector[double] decay = read_decay("adam", weight_decay, len(weights))
    check_threads("adam", threads)

    cdef md_adam rule = md_adam(
        lr, beta1, 1 - beta1, beta2, 1 - beta2, epsilon,
        1 - pow(beta1, <double> step), 1 - pow(beta2, <double> step),
    )
    cdef PyThreadState *state = let_go(table.elements)
    md_update(parallel, table, rule, scale, decay.data(), threads)
    take_back(state)
