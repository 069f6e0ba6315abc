// One team of threads for the whole process, which shares one loop at a time.
//
// Guarantees
//   - parallel(n, grain, threads, body, context) calls body(context, first, last) on contiguous
//     pieces that cover [0, n) exactly once, and returns when all of them are done. At most
//     `threads` threads take part, the caller among them. Which thread takes which piece is a
//     matter of timing, so a body writes only what belongs to its own piece; then the result never
//     depends on the number of threads.
//   - `grain` is how many elements are worth another thread. Nobody takes part for less than two
//     grains, nor for threads < 2: the caller runs the loop alone, and takes no lock.
//   - Threads that poll for something else may lend themselves: they say so with offer(1), call
//     help() between looks, which works on the open loop if there is one, and end with offer(-1)
//     and a last help(). The team's own threads sleep, and waking one is dear: that is done only
//     for as many as are not lent.
//   - The caller never waits for a thread that has not begun. It works through the pieces itself,
//     closes the call, and waits only for pieces that others hold. A thread that comes too late
//     finds the door closed.
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

// One loop that is being shared. It lives on the caller's stack: whoever works on it has come in
// through the door, and the caller does not leave before all of them have left.
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
        // Four pieces a thread, up to sixteen of a grain each: who is late or interrupted leaves
        // its share to the others.
        const ptrdiff_t pieces = std::max(4 * takers, std::min(16 * takers, n / grain));
        md_call call{n, std::min(n, pieces), body, context};
        open = &call;
        door.store(unsigned(takers - 1));
        wake(takers - 1 - lenders.load());
        call.work();
        close();
        busy.store(false, std::memory_order_release);
    }

    // Who takes an offer back looks at the door once more, and who opens it then looks at the
    // offers: one of the two sees the other, so nobody is counted on who has gone.
    void offer(int by) { lenders.fetch_add(by); }

    // Work on the loop that is open; false if there was none, or no place.
    bool help() {
        md_call *call = join();
        if (call == nullptr) return false;
        call->work();
        leave();
        return true;
    }

  private:
    static constexpr unsigned PLACES = 0xffff, INSIDE = 0x10000;

    std::atomic<bool> busy{false};       // true: some caller has the team
    std::atomic<int> lenders{0};         // threads that poll, ready to help
    md_call *open = nullptr;             // what is behind the door; read after coming in
    std::atomic<unsigned> door{0};       // how many more may come in, and INSIDE for each who has
    std::atomic<bool> waiting{false};    // true: the caller sleeps until all have left
    std::mutex mutex;                    // held to go to sleep, and by those who wake sleepers
    std::condition_variable begin, end;  // the door was opened; the last one has left
    int size = 0;                        // threads that exist; under the mutex

    void wake(ptrdiff_t helpers) {
        if (helpers <= 0) return;
        {
            std::lock_guard<std::mutex> lock(mutex);
            while (size < helpers && start()) ++size;
        }
        for (; helpers > 0; --helpers) begin.notify_one();
    }

    md_call *join() {
        unsigned seen = door.load();
        while (seen & PLACES)
            if (door.compare_exchange_weak(seen, seen - 1 + INSIDE, std::memory_order_acquire,
                                           std::memory_order_relaxed))
                return open;
        return nullptr;
    }

    // From here on the call may be gone. The last one out wakes the caller if that sleeps: it
    // changes `door` before it looks at `waiting`, the caller does the opposite, both in sequential
    // consistency, so that one of them sees the other.
    void leave() {
        if (door.fetch_sub(INSIDE) != INSIDE || !waiting.load()) return;
        { std::lock_guard<std::mutex> lock(mutex); }
        end.notify_one();
    }

    void close() {
        door.fetch_and(~PLACES);
        const auto empty = [this] { return door.load() == 0; };
        for (int looks = 0; looks < 2000; ++looks) {
            if (empty()) return;
            md_pause();
        }
        std::unique_lock<std::mutex> lock(mutex);
        waiting.store(true);
        end.wait(lock, empty);
        waiting.store(false);
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
        for (;;) {
            // Loops often come in a row: look out for the next one for some microseconds.
            md_call *call = nullptr;
            for (int looks = 0; looks < 200 && (call = join()) == nullptr; ++looks) md_pause();
            if (call == nullptr) {
                std::unique_lock<std::mutex> lock(mutex);
                begin.wait(lock, [&] { return (call = join()) != nullptr; });
            }
            call->work();
            leave();
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
static inline void md_team_offer(int by) { md_the_team->offer(by); }
static inline bool md_team_help() { return md_the_team->help(); }

#endif
#endif
