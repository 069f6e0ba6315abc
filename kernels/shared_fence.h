// A fence in memory that several processes share: the same promises as Fence (rendezvous.h).
//
// It is made of nothing but three words, all zero at first, so it needs no making and no ending: a
// process that dies leaves nothing locked, and memory fresh from the system is a fence at 0.
//
// Sleepers sleep on `bell`, which is rung when one of them is announced. Why no wake-up is lost: a
// sleeper announces itself, looks at the bell, and then at `value`; advance() changes `value`,
// looks for sleepers, and rings. If it sees none, the sleeper sees the value. If it rings after the
// sleeper's look at the bell, the system does not let that one sleep.

#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "rendezvous.h"

namespace minidist {

struct SharedFence {
    std::atomic<uint64_t> value_;
    std::atomic<uint32_t> bell;
    std::atomic<uint32_t> sleepers;

    uint64_t value() const { return value_.load(); }

    void advance(uint64_t by) {
        value_.fetch_add(by);
        if (sleepers.load() > 0) {
            bell.fetch_add(1);
            wake();
        }
    }

    bool wait(uint64_t target, int64_t spin_ns, int64_t timeout_ns, const Lending *) {
        const auto reached = [&] { return value_.load() >= target; };
        if (reached()) return true;
        const auto deadline = steady::now() + std::chrono::nanoseconds(timeout_ns);
        if (spin_ns > timeout_ns) spin_ns = timeout_ns;
        const auto nothing = [] { return false; };
        if (spin_ns > 0 && md_poll(std::chrono::nanoseconds(spin_ns), reached, nothing)) return true;
        sleepers.fetch_add(1);
        bool passed;
        for (;;) {
            const uint32_t heard = bell.load();
            const auto left = deadline - steady::now();
            passed = reached();
            if (passed || left <= left.zero()) break;
            sleep(heard, std::chrono::duration_cast<std::chrono::nanoseconds>(left).count());
        }
        sleepers.fetch_sub(1);
        return passed;
    }

  private:
#if defined(__linux__)
    void wake() { syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
    void sleep(uint32_t heard, int64_t ns) {
        const timespec time = {time_t(ns / 1000000000), long(ns % 1000000000)};
        syscall(SYS_futex, &bell, FUTEX_WAIT, heard, &time, nullptr, 0);
    }
#else  // look again after a while
    void wake() {}
    void sleep(uint32_t, int64_t ns) {
        const timespec time = {0, long(ns < 100000 ? ns : 100000)};
        nanosleep(&time, nullptr);
    }
#endif
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would be this process's own");

}  // namespace minidist
