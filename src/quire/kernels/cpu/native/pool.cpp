/* A pool of threads that run programs: the caller is one of them; the others poll for work for a moment, then sleep.

One 64-bit number holds the work: the number of the operation, counted since the pool began, in the upper bits, and the
number of its chunks that are not taken in the lower ones. The thread that finishes an operation's last chunk begins the
next operation. A thread reads the operation only while it holds a chunk of it, so that no thread waits for one without
a chunk: a thread whose core another process has comes late, and finds other work or none. A thread that loses its core
while it holds a chunk delays all: it is moved to the core of a thread that waits for it (cores.h). */
#include "cores.h"
#include "quire.h"
#include "sleep.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <new>
#include <thread>

#include <signal.h>
#include <unistd.h>

namespace {

constexpr int LOW_BITS = 24; /* for the number of chunks */
constexpr uint64_t LOW = (uint64_t(1) << LOW_BITS) - 1;
constexpr int64_t LOOK = 50'000;   /* ns that a thread polls for work before it sleeps */
constexpr int64_t SOON = 1 << 17;  /* the most bytes of a chunk that are prefetched before its operation begins */
constexpr int64_t MISSED = 20'000; /* ns that a caller waits before it checks that threads with chunks run */

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

struct Brought {
    const char *from = nullptr;
    int64_t bytes = 0;
};

struct alignas(64) Worker {
    int64_t number = 0;
    void *scratch = nullptr;
    Place place;
    std::thread thread;
};

struct Pool {
    const pid_t process = getpid();
    std::deque<Worker> workers; /* the first is the caller's */
    Sleepers sleepers;
    std::atomic<bool> ending{false};
    /* Written by the thread that begins an operation, read by threads that hold a chunk of it. */
    const Operation *current = nullptr, *end = nullptr;
    alignas(64) std::atomic<uint64_t> next{0};  /* operation << LOW_BITS | chunks that are not taken */
    alignas(64) std::atomic<int64_t> done{0};   /* finished chunks of the operation */
    alignas(64) std::atomic<bool> ended{true};  /* whether the program has ended */
    /* The memory of the next operation with `reads`, for prefetching while one thread runs operations of one chunk. */
    std::atomic<const char *> reads{nullptr};
    std::atomic<int64_t> part{0}; /* bytes that each of its chunks reads */

    bool idle() const { return (next.load(std::memory_order_seq_cst) & LOW) == 0; }

    /* Runs the operations of one chunk from `current` on, and offers the first one with more chunks to all threads. */
    void go_on(void *scratch) {
        for (; current != end && current->chunks == 1; ++current) current->kernel(current->args, 0, scratch);
        if (current == end) {
            ended.store(true, std::memory_order_release);
            return;
        }
        done.store(0, std::memory_order_relaxed);
        announce();
        const uint64_t which = (next.load(std::memory_order_relaxed) >> LOW_BITS) + 1;
        next.store(which << LOW_BITS | uint64_t(current->chunks), std::memory_order_seq_cst);
        sleepers.wake();
    }

    /* Publishes what the operations after `current` read next. */
    void announce() {
        const Operation *next = current + 1;
        while (next != end && !next->reads) ++next;
        reads.store(nullptr, std::memory_order_relaxed);
        if (next == end) return;
        part.store(next->bytes / next->chunks, std::memory_order_relaxed);
        reads.store(next->reads, std::memory_order_release);
    }

    /* Called by idle threads: prefetches some announced memory, from the beginning of the chunk that this thread takes
       if all threads come in time. `brought`: the memory, and how much of it was prefetched. */
    void prepare(const Worker &own, Brought &brought) {
        const char *from = reads.load(std::memory_order_acquire);
        if (!from) return relax();
        if (from != brought.from) brought = Brought{from, 0};
        const int64_t size = part.load(std::memory_order_relaxed), most = size < SOON ? size : SOON;
        if (brought.bytes >= most) return relax();
        for (int64_t i = 0; i < 1024; i += 64) __builtin_prefetch(from + own.number * size + brought.bytes + i, 0, 2);
        brought.bytes += 1024;
    }

    /* Takes a chunk and computes it; returns false if there is none. */
    bool take(Worker &own) {
        uint64_t now = next.load(std::memory_order_acquire);
        do {
            if ((now & LOW) == 0) return false;
        } while (!next.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel, std::memory_order_acquire));
        own.place.hold();
        const Operation &operation = *current;
        const int64_t chunks = operation.chunks;
        operation.kernel(operation.args, chunks - int64_t(now & LOW), own.scratch);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) {
            ++current;
            go_on(own.scratch);
        }
        own.place.let_go();
        return true;
    }

    /* Moves a thread here that holds a chunk but has no core, if any. */
    void bring(const Worker &own) {
        for (Worker &other : workers)
            if (&other != &own && other.place.bring()) return;
    }

    void loop(Worker &own) {
        sigset_t all; /* the process's other threads handle signals */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, nullptr);
        own.place.begin();
        int64_t since = now_ns();
        Brought brought;
        while (!ending.load(std::memory_order_relaxed)) {
            if (take(own)) since = now_ns();
            else if (now_ns() - since < LOOK) prepare(own, brought);
            else {
                if (!ended.load(std::memory_order_acquire)) bring(own);
                sleepers.sleep([&] { return idle() && !ending.load(); });
                since = now_ns();
            }
        }
    }

    void run(const Operation *what, int64_t many) {
        Worker &own = workers.front();
        own.place.begin();
        own.place.hold();
        current = what;
        end = what + many;
        ended.store(false, std::memory_order_relaxed);
        go_on(own.scratch);
        own.place.let_go();
        int64_t since = now_ns();
        Brought brought;
        while (!ended.load(std::memory_order_acquire)) {
            if (take(own)) since = now_ns();
            else if (now_ns() - since < MISSED) prepare(own, brought);
            else {
                bring(own);
                std::this_thread::yield();
                since = now_ns();
            }
        }
    }
};

} // namespace

/* Ends the pool; no program may run. In a forked process, which has none of the threads, it does nothing. */
QUIRE_EXPORT void quire_close(void *handle) {
    Pool *pool = static_cast<Pool *>(handle);
    if (pool->process != getpid()) return;
    pool->ending.store(true);
    pool->sleepers.wake();
    for (Worker &worker : pool->workers) {
        if (worker.thread.joinable()) worker.thread.join();
        free(worker.scratch);
    }
    delete pool;
}

/* Makes a pool of `threads`, the caller included, each with `bytes` of scratch. `cpus`: the CPU of each; -1, or null:
   not pinned. Returns null, without a pool, if the system has no memory or no threads for it. */
QUIRE_EXPORT void *quire_pool(int64_t threads, const int64_t *cpus, int64_t bytes) {
    Pool *pool = new (std::nothrow) Pool;
    if (pool) try {
        for (int64_t i = 0; i < threads; ++i) {
            pool->workers.emplace_back();
            pool->workers.back().number = i;
            if (posix_memalign(&pool->workers.back().scratch, 64, size_t(bytes < 64 ? 64 : bytes)))
                throw std::bad_alloc();
        }
        for (int64_t i = 1; i < threads; ++i) {
            Worker &worker = pool->workers[size_t(i)];
            worker.thread = std::thread([pool, &worker] { pool->loop(worker); });
            if (cpus && cpus[i] >= 0) pin(worker.thread.native_handle(), int(cpus[i]));
        }
    } catch (...) {
        quire_close(pool);
        return nullptr;
    }
    return pool;
}

/* Runs the operations in order and returns when all are done. One caller at a time. */
QUIRE_EXPORT void quire_run(void *pool, const Operation *operations, int64_t count) {
    static_cast<Pool *>(pool)->run(operations, count);
}

/* Runs one operation. */
QUIRE_EXPORT void quire_call(void *pool, Kernel kernel, const Arg *args, int64_t chunks) {
    const Operation operation{kernel, args, chunks, nullptr, 0};
    static_cast<Pool *>(pool)->run(&operation, 1);
}
