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

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "poll.h"

namespace minidist {

using steady = std::chrono::steady_clock;

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
            const bool polled = md_poll(std::chrono::nanoseconds(spin_ns), reached, help);
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

}  // namespace minidist
