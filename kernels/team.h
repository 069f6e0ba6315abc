// One team of threads for the whole process, which shares one loop at a time.
//
// Guarantees
//   - parallel(n, grain, threads, body, context) calls body(context, first, last) on contiguous
//     pieces that cover [0, n) exactly once, and returns when all of them are done. At most
//     `threads` threads take part, the caller among them. Which thread takes which piece is a
//     matter of timing, so a body writes only what belongs to its own piece; then the result never
//     depends on the number of threads.
//   - `grain` is how many elements are worth waking a thread for. Nobody is woken for less than two
//     grains, nor for threads < 2: the caller runs the loop alone, and takes no lock.
//   - The caller never waits for a thread that has not begun. It works through the pieces itself,
//     closes the call, and waits only for pieces that others hold. A thread that wakes too late
//     finds the call closed and sleeps again.
//   - When several callers come at once, the first has the team; the others run their loops alone.
//     The same holds for a body that calls parallel.
//   - Threads are made when first needed, block all signals, never touch Python and are never
//     joined. The team is never destroyed, so at exit there is nothing to wait for and nothing to
//     wake up in. A forked child starts with a new, empty team.

#ifndef MD_TEAM_H
#define MD_TEAM_H

#include "base.h"

#if MD_HOST

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <signal.h>

typedef void (*md_body)(void *context, ptrdiff_t first, ptrdiff_t last);
typedef void (*md_parallel)(ptrdiff_t n, ptrdiff_t grain, int threads, md_body body, void *context);

// Call `parallel` with any callable as the body.
template <class Body>
static void md_share(md_parallel parallel, ptrdiff_t n, ptrdiff_t grain, int threads, Body body) {
    parallel(n, grain, threads,
             [](void *context, ptrdiff_t first, ptrdiff_t last) {
                 (*static_cast<Body *>(context))(first, last);
             },
             &body);
}

static inline void md_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// One loop that is being shared. It lives on the caller's stack: whoever holds a piece has been
// counted in md_team::working, and the caller does not leave before that count is zero.
struct md_call {
    ptrdiff_t n, pieces;
    md_body body;
    void *context;
    std::atomic<ptrdiff_t> next{0};

    void work() {
        for (ptrdiff_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
            body(context, border(piece), border(piece + 1));
    }
    ptrdiff_t border(ptrdiff_t piece) const {
        return n / pieces * piece + std::min(piece, n % pieces);
    }
};

class md_team {
  public:
    void share(ptrdiff_t n, ptrdiff_t grain, int threads, md_body body, void *context) {
        const ptrdiff_t takers = std::min<ptrdiff_t>(threads, n / grain);
        if (takers < 2 || busy.exchange(true, std::memory_order_acquire)) {
            if (n > 0) body(context, 0, n);
            return;
        }
        // Four pieces a thread: whoever is late or interrupted leaves its share to the others.
        md_call call{n, std::min(n, 4 * takers), body, context};
        open_for(call, int(takers) - 1);
        call.work();
        close();
        busy.store(false, std::memory_order_release);
    }

  private:
    std::atomic<bool> busy{false};       // true: some caller has the team
    std::atomic<unsigned> calls{0};      // rises with each call, for threads that spin
    std::atomic<int> working{0};         // threads inside the open call; rises under the mutex
    std::mutex mutex;                    // guards the three below
    md_call *open = nullptr;             // the call that threads may still join
    int places = 0;                      // how many more may join it
    int size = 0;                        // threads that exist
    std::condition_variable begin, end;  // a call was opened; the last thread left a call

    void open_for(md_call &call, int helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            while (size < helpers && start()) ++size;
            open = &call;
            places = std::min(helpers, size);
            calls.fetch_add(1, std::memory_order_release);
        }
        for (int i = 0; i < helpers; ++i) begin.notify_one();
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            open = nullptr;
        }
        for (int spins = 0; spins < 2000; ++spins) {
            if (working.load(std::memory_order_acquire) == 0) return;
            md_pause();
        }
        std::unique_lock<std::mutex> lock(mutex);
        end.wait(lock, [this] { return working.load(std::memory_order_acquire) == 0; });
    }

    // False when the system gives no more threads: the call is then shared by fewer.
    bool start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool started = true;
        try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::system_error &) {
            started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    [[noreturn]] void serve() {
        for (unsigned seen = 0;;) {
            // Loops often come in a row: look out for the next one for some microseconds.
            for (int spins = 0; spins < 200 && calls.load(std::memory_order_acquire) == seen;
                 ++spins)
                md_pause();
            md_call *call;
            {
                std::unique_lock<std::mutex> lock(mutex);
                begin.wait(lock, [this] { return open != nullptr && places > 0; });
                call = open;
                --places;
                working.fetch_add(1, std::memory_order_relaxed);
                seen = calls.load(std::memory_order_relaxed);
            }
            call->work();
            std::lock_guard<std::mutex> lock(mutex);
            if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) end.notify_one();
        }
    }
};

static md_team *md_the_team = nullptr;

static void md_new_team() { md_the_team = new md_team; }

// Make the team of this process, and see to it that a forked child gets its own: the parent's
// threads do not exist there, and its mutex may be held by one of them.
static inline int md_start_team() {
    md_new_team();
    return pthread_atfork(nullptr, nullptr, md_new_team);
}

static inline void md_team_parallel(ptrdiff_t n, ptrdiff_t grain, int threads, md_body body,
                                    void *context) {
    md_the_team->share(n, grain, threads, body, context);
}

#endif
#endif
