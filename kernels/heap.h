// A heap: memory for arrays that come and go in every step, taken from the system once.
//
// A step of training makes the same arrays as the step before. The C library gives large ones back
// to the system each time, which then clears and maps them again, page by page: beside a fast
// kernel that can take longer than the arithmetic. A heap keeps what it was given.
//
// What it has is cut into *blocks*, side by side; one that is freed joins its free neighbours. Free
// blocks are in lists by size, STEPS lists for each doubling, and two levels of bits say which lists
// have any, so that one is found in a few instructions however many there are: the two-level
// segregated fit of Masmano, Ripoll, Crespo and Real (2004). Of a list the block freed last is used
// first, while it is still in the cache; blocks of the list that a size belongs to may be too small
// for it, and only the first LOOKS of them are tried.
//
// When no free block is large enough, the system is asked for the huge pages behind those that the
// heap has, so that blocks also join across what was given at different times. If somebody else has
// these addresses, a new *segment* begins elsewhere.
//
// Guarantees
//   * Data begins at a multiple of ALIGNMENT.
//   * Any thread may free what another has allocated, and a forked child has a sound heap.
//   * The free end of a segment goes back to the system: once it lay idle while PATIENCE times what
//     the heap has was handed out; at once after `trim`, until something is allocated; and that of
//     all heaps before an allocation fails.
//   * `trim` also gives back the huge pages between blocks in use. Their addresses stay the heap's.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>

#include <pthread.h>
#include <sys/mman.h>

namespace minidist {

constexpr size_t ALIGNMENT = 64;
constexpr size_t HUGE_PAGE = size_t(1) << 21;
constexpr size_t APART = size_t(1) << 36;  // bytes from where one heap begins to where the next does
constexpr size_t PATIENCE = 32;
constexpr int LOG_STEPS = 5, STEPS = 1 << LOG_STEPS;
constexpr int ROWS = 56;  // of lists; the last is for 2^60 bytes
constexpr size_t LOOKS = 8;

constexpr size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

class Heap {
  public:
    // Above 0, memory of all heaps is filled with NaN when it is handed out and when it is freed.
    static inline std::atomic<int> poisoners{0};

    Heap() { every().enter(this); }

    // Nothing is allocated any more.
    ~Heap() {
        every().leave(this);
        trim();
    }

    Heap(const Heap &) = delete;
    Heap &operator=(const Heap &) = delete;

    // Return `bytes` of memory, or null where the system has no more.
    void *allocate(size_t bytes) noexcept {
        size_t dirty;
        return allocate(bytes, dirty);
    }

    void *allocate_zeros(size_t count, size_t bytes) noexcept {
        if (bytes && count > LARGEST / bytes) return nullptr;
        size_t dirty;
        void *data = allocate(count * bytes, dirty);
        if (data) memset(data, 0, std::min(dirty, count * bytes));
        return data;
    }

    // Like `realloc`: where it returns null, the old memory stays as it is.
    void *reallocate(void *data, size_t bytes) noexcept {
        if (!data) return allocate(bytes);
        if (bytes > LARGEST) return nullptr;
        Block *block = block_of(data);
        if (resize(block, data_size(bytes))) return data;
        void *moved = allocate(bytes);
        if (!moved) return nullptr;
        memcpy(moved, data, block->size);  // the smaller of the two
        free(data);
        return moved;
    }

    void free(void *data) noexcept {
        if (!data) return;
        Block *block = block_of(data);
        if (poisoners > 0) memset(data, POISON, block->size);
        std::lock_guard<std::mutex> hold(mutex_);
        in_use_ -= block->size;
        release(block);
    }

    void trim() noexcept {
        std::lock_guard<std::mutex> hold(mutex_);
        shrinks_ = true;
        for (Segment *segment = segments_, *next; segment; segment = next) {
            next = segment->next;
            segment->high = nullptr;
            for (Block *block = segment->first(); block->size; block = block->behind())
                if (block->free) empty(block);
            shrink(segment);
        }
    }

    struct State {
        size_t mapped;    // bytes that the heap has from the system,
        size_t in_use;    // those of them that it has handed out,
        size_t requests;  // and how often it asked
    };

    State state() noexcept {
        std::lock_guard<std::mutex> hold(mutex_);
        return {mapped_, in_use_, requests_};
    }

  private:
    struct Segment;

    // The head of a block, in front of its data. The next block is behind them; behind the last one
    // of a segment is the END, a head without data.
    struct alignas(ALIGNMENT) Block {
        size_t size;  // of the data
        bool free;
        Segment *segment;
        Block *before;           // the neighbour; null for the first of a segment
        Block *previous, *next;  // in the list of free blocks

        char *data() { return reinterpret_cast<char *>(this + 1); }
        Block *behind() { return reinterpret_cast<Block *>(data() + size); }
    };

    // Addresses that the system gave, one behind the other: this head, then blocks.
    struct alignas(ALIGNMENT) Segment {
        size_t bytes;
        Segment *next;
        char *high;     // where the last block ends of those handed out since the last look
        char *touched;  // and of those ever handed out; behind it all bytes but heads are 0

        char *start() { return reinterpret_cast<char *>(this); }
        Block *first() { return reinterpret_cast<Block *>(this + 1); }
        Block *end() { return reinterpret_cast<Block *>(start() + bytes) - 1; }
    };

    static constexpr size_t HEAD = sizeof(Block);
    static constexpr size_t LARGEST = size_t(1) << 59;
    static constexpr int POISON = 0xFF;  // bytes of which any floating point number is NaN
    static_assert(HEAD == ALIGNMENT && sizeof(Segment) == ALIGNMENT);

    static size_t data_size(size_t bytes) {
        return rounded_up(std::max(bytes, size_t(1)), ALIGNMENT);
    }
    static Block *block_of(void *data) { return static_cast<Block *>(data) - 1; }

    // The same, with how many bytes there are in front of those that are surely 0.
    void *allocate(size_t bytes, size_t &dirty) noexcept {
        if (bytes > LARGEST) return nullptr;
        const size_t size = data_size(bytes);
        std::unique_lock<std::mutex> hold(mutex_);
        shrinks_ = false;
        Block *block;
        size_t looks = LOOKS;
        while (!(block = find(size, looks))) {
            if (grow(size)) continue;
            if (looks > LOOKS) return nullptr;
            looks = SIZE_MAX;  // of what there is, all
            hold.unlock();
            every().trim();
            hold.lock();
            shrinks_ = false;
        }
        remove(block);
        cut(block, size);
        dirty = std::max(block->segment->touched, block->data()) - block->data();
        count(block);
        handed_out_ += block->size;
        if (handed_out_ > PATIENCE * mapped_) give_back_idle();
        hold.unlock();
        if (poisoners > 0) {
            memset(block->data(), POISON, block->size);
            dirty = block->size;
        }
        return block->data();
    }

    // --- the system

    // Return so many new bytes, at that address if there is one, or null.
    static char *map(size_t bytes, char *at = nullptr) {
        void *found = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) return nullptr;
        if (at && found != at) {
            munmap(found, bytes);
            return nullptr;
        }
        return static_cast<char *>(found);
    }

    // Return so many new bytes that begin with a huge page, somewhere, or null.
    char *map_somewhere(size_t bytes) const {
        char *found = map(bytes + HUGE_PAGE);
        if (!found) return nullptr;
        char *start = found + -reinterpret_cast<uintptr_t>(found) % HUGE_PAGE;
        // Other mappings lie close to what the system chose. Far from them there is room to grow.
        if (char *far = map(bytes, start - APART * place_)) {
            munmap(found, bytes + HUGE_PAGE);
            return far;
        }
        if (start > found) munmap(found, start - found);
        munmap(start + bytes, found + HUGE_PAGE - start);
        return start;
    }

    // Get more from the system, so that a block of `size` fits; false if it has no more.
    bool grow(size_t size) {
        Segment *segment = segments_;
        Block *block = nullptr;
        size_t bytes = 0;
        if (segment) {
            block = segment->end();
            const Block *last = block->before;
            bytes = rounded_up(size + HEAD - (last->free ? last->size + HEAD : 0), HUGE_PAGE);
        }
        if (segment && map(bytes, segment->start() + segment->bytes)) {
            segment->bytes += bytes;
        } else {
            bytes = rounded_up(size + 3 * HEAD, HUGE_PAGE);
            char *start = map_somewhere(bytes);
            if (!start) return false;
            segment = segments_ = new (start) Segment{bytes, segments_, nullptr, start};
            block = new (segment->first()) Block{0, false, segment, nullptr, nullptr, nullptr};
        }
#ifdef MADV_HUGEPAGE
        madvise(segment->start() + segment->bytes - bytes, bytes, MADV_HUGEPAGE);
#endif
        mapped_ += bytes;
        requests_++;
        end_at(segment->end(), block);
        release(block);
        return true;
    }

    // Give back the huge pages inside a free block; the system gives empty ones when they are used.
    static void empty(Block *block) {
        const uintptr_t start = rounded_up(reinterpret_cast<uintptr_t>(block->data()), HUGE_PAGE);
        const uintptr_t end = reinterpret_cast<uintptr_t>(block->behind()) / HUGE_PAGE * HUGE_PAGE;
        if (start < end) madvise(reinterpret_cast<void *>(start), end - start, MADV_DONTNEED);
    }

    // Let a block, which is in no list, be the last of its segment, in front of this END.
    static void end_at(Block *end, Block *block) {
        new (end) Block{0, false, block->segment, block, nullptr, nullptr};
        block->size = reinterpret_cast<char *>(end) - block->data();
    }

    // Give back the huge pages at the end of a segment in which nothing is, or was since `high` was
    // reset.
    void shrink(Segment *segment) {
        Block *last = segment->end()->before;
        if (!last->free) return;
        char *start = segment->start();
        char *used = std::max(last->before ? last->data() : start, segment->high);
        // What stays is room for the last block, and an END.
        const size_t bytes = segment->bytes;
        const size_t kept =
            used > start ? rounded_up(used - start + ALIGNMENT + HEAD, HUGE_PAGE) : 0;
        if (kept >= bytes) return;
        remove(last);
        if (kept) {
            segment->bytes = kept;
            segment->touched = std::min(segment->touched, start + kept);
            end_at(segment->end(), last);
            insert(last);
        } else {
            Segment **link = &segments_;
            while (*link != segment) link = &(*link)->next;
            *link = segment->next;
        }
        mapped_ -= bytes - kept;
        munmap(start + kept, bytes - kept);
    }

    void give_back_idle() {
        for (Segment *segment = segments_, *next; segment; segment = next) {
            next = segment->next;
            shrink(segment);
        }
        for (Segment *segment = segments_; segment; segment = segment->next)
            segment->high = nullptr;
        handed_out_ = 0;
    }

    // --- blocks

    // Count a block as handed out.
    void count(Block *block) {
        in_use_ += block->size;
        Segment *segment = block->segment;
        segment->high = std::max(segment->high, block->data() + block->size);
        segment->touched = std::max(segment->touched, segment->high);
    }

    // Let a block that is in no list have `size` bytes, and free what it has beyond that.
    void cut(Block *block, size_t size) {
        if (block->size < size + HEAD + ALIGNMENT) return;
        Block *behind = block->behind();
        const size_t left = block->size - size - HEAD;
        block->size = size;
        behind->before =
            new (block->behind()) Block{left, false, block->segment, block, nullptr, nullptr};
        release(behind->before);
    }

    // Make one block of this and the one behind it, neither of which is in a list. The head between
    // them may lie where all else is 0.
    static void join(Block *block) {
        Block *behind = block->behind();
        block->size += HEAD + behind->size;
        memset(static_cast<void *>(behind), 0, HEAD);
        block->behind()->before = block;
    }

    void release(Block *block) {
        Block *behind = block->behind(), *before = block->before;
        if (behind->free) {
            remove(behind);
            join(block);
        }
        if (before && before->free) {
            remove(before);
            join(before);
            block = before;
        }
        insert(block);
        if (shrinks_) shrink(block->segment);
    }

    // Let a block that is in use have `size` bytes where it is; false if it cannot.
    bool resize(Block *block, size_t size) {
        std::lock_guard<std::mutex> hold(mutex_);
        Block *behind = block->behind();
        const size_t before = block->size;
        if (size > before && behind->free && before + HEAD + behind->size >= size) {
            remove(behind);
            join(block);
        }
        if (size > block->size) return false;
        in_use_ -= before;
        cut(block, size);
        count(block);
        return true;
    }

    // --- lists of free blocks

    struct Place {
        int row, column;
    };

    static int log2(uint64_t number) { return 63 - __builtin_clzll(number); }

    // In row 0 each list has one size; in those above, a STEPS-th of a doubling.
    static Place place(size_t size) {
        const size_t units = size / ALIGNMENT;
        if (units < STEPS) return {0, int(units)};
        const int shift = log2(units) - LOG_STEPS;
        return {shift + 1, int(units >> shift) - STEPS};
    }

    // Return a block of at least that size: of the first `looks` of its own list one that is large
    // enough, else any of the next list that has one.
    Block *find(size_t size, size_t looks) {
        const Place at = place(size);
        for (Block *block = lists_[at.row][at.column]; block && looks--; block = block->next)
            if (block->size >= size) return block;
        const uint64_t columns = uint64_t(columns_[at.row]) >> (at.column + 1);
        if (columns) return lists_[at.row][at.column + 1 + __builtin_ctzll(columns)];
        const uint64_t rows = rows_ >> (at.row + 1);
        if (!rows) return nullptr;
        const int row = at.row + 1 + __builtin_ctzll(rows);
        return lists_[row][__builtin_ctz(columns_[row])];
    }

    void insert(Block *block) {
        const Place at = place(block->size);
        Block *&first = lists_[at.row][at.column];
        block->free = true;
        block->previous = nullptr;
        block->next = first;
        if (first) first->previous = block;
        first = block;
        columns_[at.row] |= uint32_t(1) << at.column;
        rows_ |= uint64_t(1) << at.row;
    }

    void remove(Block *block) {
        const Place at = place(block->size);
        block->free = false;
        if (block->next) block->next->previous = block->previous;
        if (block->previous) {
            block->previous->next = block->next;
            return;
        }
        lists_[at.row][at.column] = block->next;
        if (block->next) return;
        columns_[at.row] &= ~(uint32_t(1) << at.column);
        if (!columns_[at.row]) rows_ &= ~(uint64_t(1) << at.row);
    }

    // --- all heaps of the process

    class Every {
      public:
        Every() { pthread_atfork(before_fork, after_fork, after_fork); }

        void enter(Heap *heap) {
            std::lock_guard<std::mutex> hold(mutex_);
            heap->place_ = count_++ % 256 + 1;
            heap->following_ = first_;
            first_ = heap;
        }

        void leave(Heap *heap) {
            std::lock_guard<std::mutex> hold(mutex_);
            Heap **link = &first_;
            while (*link != heap) link = &(*link)->following_;
            *link = heap->following_;
        }

        void trim() {
            std::lock_guard<std::mutex> hold(mutex_);
            for (Heap *heap = first_; heap; heap = heap->following_) heap->trim();
        }

      private:
        // While a process is forked, no thread that is not copied may hold a lock.
        static void before_fork() {
            every().mutex_.lock();
            for (Heap *heap = every().first_; heap; heap = heap->following_) heap->mutex_.lock();
        }
        static void after_fork() {
            for (Heap *heap = every().first_; heap; heap = heap->following_) heap->mutex_.unlock();
            every().mutex_.unlock();
        }

        std::mutex mutex_;
        Heap *first_ = nullptr;
        size_t count_ = 0;
    };

    // Never destroyed: arrays may be freed after all static objects are.
    static Every &every() {
        static Every *one = new Every;
        return *one;
    }

    std::mutex mutex_;
    size_t place_ = 0;  // of this heap's addresses among those of others
    Heap *following_ = nullptr;
    Segment *segments_ = nullptr;  // the one that grows first
    size_t mapped_ = 0, in_use_ = 0, requests_ = 0;
    size_t handed_out_ = 0;  // bytes, since idle ones were last looked for
    bool shrinks_ = false;   // whether what gets free goes back at once
    uint64_t rows_ = 0;
    uint32_t columns_[ROWS] = {};
    Block *lists_[ROWS][STEPS] = {};
};

}  // namespace minidist
