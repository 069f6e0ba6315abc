// A fence: a counter that only rises, and threads that wait until it has reached a value.
//
// GPU programmers know it as a timeline semaphore. Everything in minidist that waits, waits here:
// replicas for each other, streams for events, a caller for its replicas.
//
// Guarantees
//   * advance() never blocks for longer than a sleeping waiter needs to be told, and what a thread
//     wrote before advance() is seen by each thread whose wait() it ended.
//   * wait() returns true as soon as value >= target; false only once the timeout has passed.
//   * A waiter spins for at most `spin_ns`, then sleeps. Spinning hands over in well under a
//     microsecond but needs a core of its own, so the caller decides; a woken sleeper costs about
//     eight microseconds.
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

namespace minidist {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

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

    bool wait(uint64_t target, int64_t spin_ns, int64_t timeout_ns) {
        using clock = std::chrono::steady_clock;
        if (value_.load() >= target) return true;
        const auto start = clock::now();
        if (spin_ns > timeout_ns) spin_ns = timeout_ns;
        while (clock::now() - start < std::chrono::nanoseconds(spin_ns)) {
            for (int i = 0; i < 32; i++) {
                if (value_.load(std::memory_order_acquire) >= target) return true;
                relax();
            }
        }
        const auto deadline = start + std::chrono::nanoseconds(timeout_ns);
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);
        const bool reached =
            woken_.wait_until(hold, deadline, [&] { return value_.load() >= target; });
        sleepers_.fetch_sub(1);
        return reached;
    }

  private:
    std::atomic<uint64_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

}  // namespace minidist
