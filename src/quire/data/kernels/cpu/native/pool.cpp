/* Threads that run programs: the caller is one of them, the others sleep between programs.

One 64-bit number says what is to be done next: the operation's number above, the next chunk below. Whoever finishes the
last chunk of an operation begins the next one. Nobody waits for a thread that holds no chunk: one that the machine has
taken away for another program's sake costs what it held, and no more. */
#include "quire.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
static inline void pause() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void pause() { asm volatile("yield"); }
#else
static inline void pause() {}
#endif

namespace {

constexpr int64_t SPINS = 4000; /* looks at the number before a thread lets others run: some 50 us */
constexpr int64_t LOW = (int64_t(1) << 32) - 1;

struct Pool {
    std::vector<std::thread> threads;
    std::vector<void *> scratch;
    const Operation *operations = nullptr;
    int64_t count = 0;
    alignas(64) std::atomic<int64_t> next{0};    /* operation << 32 | chunk */
    alignas(64) std::atomic<int64_t> done{0};    /* chunks of the operation that are done */
    alignas(64) std::atomic<int64_t> inside{0};  /* workers that may look at `operations` */
    alignas(64) std::atomic<bool> open{false};   /* a program runs */
    std::mutex mutex;
    std::condition_variable wake;
    int64_t programs = 0;
    bool ending = false;

    /* Take chunks until the program has ended. */
    void work(void *own) {
        int64_t spins = 0;
        for (;;) {
            int64_t now = next.load(std::memory_order_acquire);
            const int64_t index = now >> 32;
            if (index >= count) return;
            const Operation &operation = operations[index];
            if ((now & LOW) >= operation.chunks) { /* others finish it */
                if (++spins < SPINS) pause();
                else std::this_thread::yield();
                continue;
            }
            if (!next.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
            spins = 0;
            operation.kernel(operation.args, now & LOW, own);
            if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == operation.chunks) {
                done.store(0, std::memory_order_relaxed);
                next.store((index + 1) << 32, std::memory_order_release);
            }
        }
    }

    void loop(size_t which) {
        int64_t seen = 0;
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] { return ending || (programs != seen && open.load()); });
                if (ending) return;
                seen = programs;
                inside.fetch_add(1);
            }
            work(scratch[which]);
            inside.fetch_sub(1, std::memory_order_release);
        }
    }

    void run(const Operation *what, int64_t many) {
        operations = what;
        count = many;
        done.store(0);
        next.store(0, std::memory_order_release);
        if (!threads.empty() && (many > 1 || what[0].chunks > 1)) {
            std::lock_guard<std::mutex> lock(mutex);
            ++programs;
            open.store(true);
            wake.notify_all();
        }
        work(scratch[0]);
        {
            std::lock_guard<std::mutex> lock(mutex);
            open.store(false);
        }
        while (inside.load(std::memory_order_acquire)) pause(); /* late comers see that it has ended */
    }
};

} // namespace

/* A pool of `threads`, the caller's included, each with `bytes` of scratch. `cpus`: where each runs; -1, or null: anywhere.
   Null if there is no memory. */
QUIRE_EXPORT void *quire_pool(int64_t threads, const int64_t *cpus, int64_t bytes) {
    Pool *pool = new Pool;
    for (int64_t i = 0; i < threads; ++i) {
        void *own = nullptr;
        if (posix_memalign(&own, 64, size_t(bytes < 64 ? 64 : bytes))) return nullptr;
        pool->scratch.push_back(own);
    }
    for (int64_t i = 1; i < threads; ++i) {
        pool->threads.emplace_back([pool, i] { pool->loop(size_t(i)); });
#if defined(__linux__)
        if (cpus && cpus[i] >= 0) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(int(cpus[i]), &set);
            pthread_setaffinity_np(pool->threads.back().native_handle(), sizeof set, &set);
        }
#endif
    }
    return pool;
}

/* Run the operations one after another; returns when all are done. One caller at a time. */
QUIRE_EXPORT void quire_run(void *pool, const Operation *operations, int64_t count) {
    static_cast<Pool *>(pool)->run(operations, count);
}

QUIRE_EXPORT void quire_close(void *handle) {
    Pool *pool = static_cast<Pool *>(handle);
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        pool->ending = true;
        pool->wake.notify_all();
    }
    for (auto &thread : pool->threads) thread.join();
    for (void *own : pool->scratch) free(own);
    delete pool;
}
