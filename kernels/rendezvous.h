// A fence: a counter that only rises, and threads that wait until it has reached a value.
//
// GPU programmers know it as a timeline semaphore. Everything in minidist that waits, waits here:
// replicas for each other, streams for events, a caller for its replicas.
//
// Guarantees
//   * advance() never blocks for longer than a sleeping waiter needs to be told, and what a thread
//     wrote before advance() is seen by each thread whose wait() it ended.
//   * wait() returns true as soon as value >= target; false only once the timeout has passed.
//   * A waiter polls for at most `spin_ns`, then sleeps.
//
// Why no wake-up is lost: a sleeper announces itself in `sleepers` before it looks at `value` for
// the last time, and advance() changes `value` before it looks at `sleepers`. Both are sequentially
// consistent, so one of the two sees the other.
//
// Why poll at all: a poll hands over in a fraction of a microsecond. Waking a thread that sleeps on
// another core costs several microseconds, on a virtual machine several tens. A poll yields between
// looks, so that a thread which could run on this core, perhaps the very one waited for, does.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include <sched.h>

namespace minidist {

using steady = std::chrono::steady_clock;

// Poll until `done()`, at most for `spin_ns` since `work()`, called between looks, last had any to
// do; say whether it came true.
template <class Done, class Work>
inline bool poll(int64_t spin_ns, Done done, Work work) {
    auto start = steady::now();
    while (steady::now() - start < std::chrono::nanoseconds(spin_ns)) {
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            if (work()) start = steady::now();
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
        sched_yield();
    }
    return done();
}

// Where a thread that polls may make itself useful: it offers itself (1), helps between two looks,
// takes the offer back (-1) and helps once more. help() says whether there was anything to do.
struct Lending {
    void (*offer)(int by);
    bool (*help)();
};

class Fence {
  public:
    uint64_t value() const { return value_.load(); }

    void advance(uint64_t by) {
        value_.fetch_add(by);
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> hold(mutex_); }
            woken_.notify_all();
        }
    }

    // While it polls, a waiter lends itself if it is told where.
    bool wait(uint64_t target, int64_t spin_ns, int64_t timeout_ns, const Lending *lending) {
        const auto reached = [&] { return value_.load() >= target; };
        if (reached() || timeout_ns <= 0) return reached();  // to sleep for no time takes 50 us
        const auto deadline = steady::now() + std::chrono::nanoseconds(timeout_ns);
        if (spin_ns > timeout_ns) spin_ns = timeout_ns;
        if (spin_ns > 0) {
            const auto help = [&] { return lending && lending->help(); };
            if (lending) lending->offer(1);
            const bool polled = poll(spin_ns, reached, help);
            if (lending) lending->offer(-1);
            help();
            if (polled) return true;
        }
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);
        const bool passed = woken_.wait_until(hold, deadline, reached);
        sleepers_.fetch_sub(1);
        return passed;
    }

  private:
    std::atomic<uint64_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

// Whether a thread that comes out of a wait had better poll a little longer.
//
// Whoever asks for Python's GIL while another thread has it is put to sleep by Python, and woken at
// the price above. A thread that advances a fence mostly holds the GIL for a few microseconds more,
// until it waits itself; and of several threads that come out of a wait one has it first. So both
// raise this flag, entering a wait lowers it, and a waiter goes on polling until it can raise it
// itself. It is a hint for the whole process: a wrong one costs GIL_SPIN_NS, no more.
inline std::atomic<bool> gil_is_held{false};
constexpr int64_t GIL_SPIN_NS = 10000;

template <class AnyFence>
inline bool wait_without_gil(AnyFence &fence, uint64_t target, int64_t spin_ns, int64_t timeout_ns,
                             const Lending *lending) {
    gil_is_held.store(false);
    const bool reached = fence.wait(target, spin_ns, timeout_ns, lending);
    if (reached && spin_ns > 0) {
        const auto raised = [] { return !gil_is_held.load() && !gil_is_held.exchange(true); };
        poll(GIL_SPIN_NS, raised, [] { return false; });
    }
    return reached;
}

}  // namespace minidist
