// A GPU on the host: enough of CUDA C++ that g++ compiles a .cu file as it is, and runs its kernels
// thread by thread.
//
// The threads of a block are fibers. One runs until it ends or waits: at __syncthreads for all
// threads of the block, at a shuffle for the lanes of its mask. They take turns in an order that
// the launch gives, so what only goes well in one order shows in another. Blocks run one after the
// other, in an order that is given too. A wait that nobody can end, and a barrier that some threads
// of a block do not come to, are failures; so is an access of 8 or 16 bytes at an address that is
// no multiple of them.

#ifndef MD_EMULATE_H
#define MD_EMULATE_H

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <utility>

#define __CUDACC__
#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __shared__ static  // among blocks nothing is shared: one ends before the next begins

struct gpu_dim {
    unsigned x, y, z;
};
static gpu_dim threadIdx, blockIdx, blockDim, gridDim;

namespace gpu {

enum { WARP = 32, THREADS = 1024, STACK = 1 << 16 };
enum State { READY, AT_BARRIER, AT_SHUFFLE, DONE };

struct Fiber {
    ucontext_t context;
    char *stack;
    State state;
    unsigned mask;               // of the lanes that it waits for
    unsigned long long offered;  // to the other lanes
    unsigned long long taken[WARP];
};

static Fiber fibers[THREADS];
static ucontext_t scheduler;
static int current, threads;
static bool misaligned;
static void (*kernel)(void **arguments);
static void **arguments;

static void check(const void *address, size_t size) {
    misaligned = misaligned || reinterpret_cast<size_t>(address) % size != 0;
}

static void wait(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}

static void run() {
    kernel(arguments);
    wait(DONE);
}

// Whether all lanes of a mask are at a shuffle, with this mask.
static bool complete(const Fiber *warp, unsigned mask) {
    for (int lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1 && (warp[lane].state != AT_SHUFFLE || warp[lane].mask != mask))
            return false;
    return true;
}

static void exchange(Fiber *warp, unsigned mask) {
    for (int lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        for (int other = 0; other < WARP; ++other) warp[lane].taken[other] = warp[other].offered;
        warp[lane].state = READY;
    }
}

// Let those go on that need not wait any longer; false if there are none.
static bool release() {
    bool any = false;
    for (int i = 0; i < threads; ++i) {
        Fiber *warp = fibers + i / WARP * WARP;
        const unsigned mask = fibers[i].mask;
        if (fibers[i].state != AT_SHUFFLE || !complete(warp, mask)) continue;
        exchange(warp, mask);
        any = true;
    }
    if (any) return true;
    for (int i = 0; i < threads; ++i)
        if (fibers[i].state != AT_BARRIER) return false;
    for (int i = 0; i < threads; ++i) fibers[i].state = READY;
    return true;
}

static bool run_block(const int *turns) {
    for (int i = 0; i < threads; ++i) {
        Fiber &fiber = fibers[i];
        if (!fiber.stack) fiber.stack = static_cast<char *>(malloc(STACK));
        fiber.state = READY;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, run, 0);
    }
    for (;;) {
        int done = 0;
        for (int i = 0; i < threads; ++i) {
            current = turns[i];
            threadIdx.x = current;
            if (fibers[current].state == READY)
                swapcontext(&scheduler, &fibers[current].context);
            done += fibers[current].state == DONE;
        }
        if (done == threads) return true;
        if (!release()) return false;
    }
}

struct Launch {
    int grid[2], threads;
    const int *blocks, *turns;  // the order of the blocks, counted row by row, and of the threads
    void **arguments;
};

enum Outcome { WELL, HANGING, MISALIGNED };

static Outcome launch(void (*function)(void **), const Launch &given) {
    kernel = function;
    arguments = given.arguments;
    threads = given.threads;
    misaligned = false;
    gridDim = {unsigned(given.grid[0]), unsigned(given.grid[1]), 1};
    blockDim = {unsigned(threads), 1, 1};
    for (int i = 0; i < given.grid[0] * given.grid[1]; ++i) {
        blockIdx.x = given.blocks[i] % given.grid[0];
        blockIdx.y = given.blocks[i] / given.grid[0];
        if (!run_block(given.turns)) return HANGING;
    }
    return misaligned ? MISALIGNED : WELL;
}

template <class... Types, size_t... I>
static void call(void (*kernel)(Types...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<Types> *>(arguments[I])...);
}
template <class... Types> static void call(void (*kernel)(Types...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<Types...>());
}

template <class V> static V shuffle(unsigned mask, V value, int from) {
    Fiber &me = fibers[current];
    me.mask = mask;
    memcpy(&me.offered, &value, sizeof value);
    wait(AT_SHUFFLE);
    memcpy(&value, &me.taken[from], sizeof value);
    return value;
}

}  // namespace gpu

static inline void __syncthreads() { gpu::wait(gpu::AT_BARRIER); }

// Lanes beyond the segment of `width` keep what they have.
template <class V> static V __shfl_down_sync(unsigned mask, V value, int by, int width = 32) {
    const int lane = threadIdx.x % 32, from = lane % width + by < width ? lane + by : lane;
    return gpu::shuffle(mask, value, from);
}
template <class V> static V __shfl_xor_sync(unsigned mask, V value, int by) {
    return gpu::shuffle(mask, value, int(threadIdx.x % 32) ^ by);
}

// Words that are loaded by being copied, and stored by __stwb.
struct uint2 {
    unsigned x, y;
    uint2() = default;
    uint2(const uint2 &from) : x(from.x), y(from.y) { gpu::check(&from, sizeof from); }
};
struct uint4 {
    unsigned x, y, z, w;
    uint4() = default;
    uint4(const uint4 &from) : x(from.x), y(from.y), z(from.z), w(from.w) {
        gpu::check(&from, sizeof from);
    }
};
template <class V> static void __stwb(V *at, const V &value) {
    gpu::check(at, sizeof value);
    memcpy(at, &value, sizeof value);
}

static inline int atomicMin(int *at, int value) {
    const int before = *at;
    *at = before < value ? before : value;
    return before;
}

// What Python calls.
#define GPU_ENTRY(name)                                                          \
    static void call_##name(void **arguments) { gpu::call(name, arguments); }    \
    extern "C" gpu::Outcome launch_##name(const gpu::Launch *given) {            \
        return gpu::launch(call_##name, *given);                                 \
    }

#endif
