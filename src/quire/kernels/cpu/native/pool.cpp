/* Threads that run programs: the caller is one of them; the others look for work for a moment, then sleep.

One 64-bit number says what is to be done: which operation it is, counted since the pool began, above; how many of its
chunks nobody has taken, below. Whoever finishes an operation's last chunk begins the next one. A thread looks at the
operation only while it holds a chunk of it, so that nobody waits for a thread that holds none: one whose core another
program has comes late, and finds other work or none. One that loses its core while it holds a chunk holds up all: it is
brought to the core of a thread that waits for it (cores.h). */
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

constexpr int LOW_BITS = 24; /* of chunks */
constexpr uint64_t LOW = (uint64_t(1) << LOW_BITS) - 1;
constexpr int64_t LOOK = 50'000;   /* ns that a thread looks for work before it sleeps */
constexpr int64_t SOON = 1 << 17;  /* bytes of a chunk that are brought to the cache before it is there */
constexpr int64_t MISSED = 20'000; /* ns that a caller waits before it asks whether those who hold chunks run */

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
    std::deque<Worker> workers; /* the caller's first */
    Sleepers sleepers;
    std::atomic<bool> ending{false};
    /* Written by who begins an operation, read by who holds a chunk of it. */
    const Operation *current = nullptr, *end = nullptr;
    alignas(64) std::atomic<uint64_t> next{0};  /* operation << LOW_BITS | chunks to be taken */
    alignas(64) std::atomic<int64_t> done{0};   /* chunks of the operation */
    alignas(64) std::atomic<bool> ended{true};  /* the program */
    /* What the next operation that reads much reads: memory is idle while one thread does what has one chunk. */
    std::atomic<const char *> reads{nullptr};
    std::atomic<int64_t> part{0}; /* bytes of each of its chunks */

    bool idle() const { return (next.load(std::memory_order_seq_cst) & LOW) == 0; }

    /* From `current` on: what has one chunk runs here and now, the first that has more is offered to all. */
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

    /* Say what is read behind the operation that begins. */
    void announce() {
        const Operation *next = current + 1;
        while (next != end && !next->reads) ++next;
        reads.store(nullptr, std::memory_order_relaxed);
        if (next == end) return;
        part.store(next->bytes / next->chunks, std::memory_order_relaxed);
        reads.store(next->reads, std::memory_order_release);
    }

    /* With nothing to do: bring what was announced to the cache, the beginning of the chunk that is this thread's if all
       come in time. `brought`: of which operation, and how much. */
    void prepare(const Worker &own, Brought &brought) {
        const char *from = reads.load(std::memory_order_acquire);
        if (!from) return relax();
        if (from != brought.from) brought = Brought{from, 0};
        const int64_t size = part.load(std::memory_order_relaxed), most = size < SOON ? size : SOON;
        if (brought.bytes >= most) return relax();
        for (int64_t i = 0; i < 1024; i += 64) __builtin_prefetch(from + own.number * size + brought.bytes + i, 0, 2);
        brought.bytes += 1024;
    }

    /* Take a chunk and compute it; false where there is none. */
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

    /* Somebody who holds a chunk but no core. */
    void bring(const Worker &own) {
        for (Worker &other : workers)
            if (&other != &own && other.place.bring()) return;
    }

    void loop(Worker &own) {
        sigset_t all; /* signals are for the program's own threads */
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

/* No program runs. A process that was forked from the pool's has none of its threads: there it leaves all as it is. */
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

/* A pool of `threads`, the caller's included, each with `bytes` of scratch. `cpus`: where each runs; -1, or null: anywhere.
   Null if there is no memory, or no thread to be had: then none stays. */
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

/* Run the operations one after another; returns when all are done. One caller at a time. */
QUIRE_EXPORT void quire_run(void *pool, const Operation *operations, int64_t count) {
    static_cast<Pool *>(pool)->run(operations, count);
}

/* One operation, likewise. */
QUIRE_EXPORT void quire_call(void *pool, Kernel kernel, const Arg *args, int64_t chunks) {
    const Operation operation{kernel, args, chunks, nullptr, 0};
    static_cast<Pool *>(pool)->run(&operation, 1);
}
