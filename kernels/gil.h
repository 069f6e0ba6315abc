// Python's GIL: let go for the length of a kernel, and asked for again without being put to sleep.
//
// Whoever asks for the GIL while another thread has it is put to sleep by Python, and to wake a
// thread on another core takes several tens of microseconds, on a virtual machine the longer part
// of a hundred. Threads that compute hold the GIL for a few microseconds at a time, between two
// kernels, so who comes out of a kernel had better look out for a moment: a thread that lets go of
// the GIL lowers one flag of the process, who has it again has raised it, and who wants it polls
// until it can raise the flag itself. It is a hint: what Python does of its own accord, or another
// extension, it does not tell. A wrong one costs MD_GIL_SPIN, no more.

#ifndef MD_GIL_H
#define MD_GIL_H

#include <Python.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "poll.h"

using md_flag = std::atomic<bool>;

constexpr std::chrono::microseconds MD_GIL_SPIN{100};

// The flag of the process, which minidist.kernels.gil has; one of this module's own if there is
// none. The GIL must be held the first time. An import may let go of it, so this is no local static
// with an initialiser: a second thread would wait for that with the GIL in hand.
static inline md_flag &md_gil_is_held() {
    static md_flag own{false};
    static md_flag *flag = nullptr;
    if (flag == nullptr) {
        Py_XDECREF(PyImport_ImportModule("minidist.kernels.gil"));
        void *const found = PyCapsule_Import("minidist.kernels.gil.is_held", 0);
        PyErr_Clear();
        flag = found == nullptr ? &own : static_cast<md_flag *>(found);
    }
    return *flag;
}

// Say once more that this thread has the GIL: somebody who has just been told something will ask.
static inline void md_hold() { md_gil_is_held().store(true); }

static inline PyThreadState *md_let_go() {
    md_flag &held = md_gil_is_held();
    PyThreadState *state = PyEval_SaveThread();
    held.store(false);  // not before: who asks too early is put to sleep
    return state;
}

// Where Python is being torn down there is no GIL for a daemon thread any more. Before 3.14 Python
// ends such a thread then and there, which unwinds its frames: destructors would release objects
// without the GIL, and whoever may not throw would end the process. So the thread sleeps instead
// until the process ends, as it does in 3.14.
static inline void md_take_back(PyThreadState *state) {
    md_flag &held = md_gil_is_held();
    const auto raised = [&] { return !held.load() && !held.exchange(true); };
    md_poll(MD_GIL_SPIN, raised, [] { return false; });
    try {
        PyEval_RestoreThread(state);
    } catch (...) {  // not an exception: pthread_exit's way up the stack, which must not end here
        while (true) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    held.store(true);
}

#endif
