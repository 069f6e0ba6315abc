// Polling: to look out for something that is about to come, instead of sleeping until it has.
//
// A poll hands over in a fraction of a microsecond. Waking a thread that sleeps on another core
// costs several microseconds, on a virtual machine several tens. A poll yields between looks, so
// that a thread which could run on this core, perhaps the very one waited for, does.

#ifndef MD_POLL_H
#define MD_POLL_H

#include <chrono>

#include <sched.h>

// Poll until `done()`, at most for `spin` since `work()`, called between looks, last had any to do;
// say whether it came true.
template <class Done, class Work>
inline bool md_poll(std::chrono::nanoseconds spin, Done done, Work work) {
    using clock = std::chrono::steady_clock;
    auto start = clock::now();
    while (clock::now() - start < spin) {
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            if (work()) start = clock::now();
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
        sched_yield();
    }
    return done();
}

#endif
