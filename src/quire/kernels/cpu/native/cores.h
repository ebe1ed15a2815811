/* Placement of threads on cores, and the rescue of a thread that holds a chunk while another process has its core. */
#pragma once
#include <atomic>
#include <cstdint>

#include <pthread.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { asm volatile("yield"); }
#else
static inline void relax() {}
#endif

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

/* A thread's placement. Only that thread calls begin, hold and let_go; others call bring, between its begin and its
end. */
class Place {
    std::atomic<bool> holds{false};
    enum : int { MINE, CLAIMED, MOVED };
    std::atomic<int> state{MINE};
    std::atomic<int> cpu{-1}; /* on which the chunk was begun */
    std::atomic<pid_t> thread{0};
    cpu_set_t allowed; /* the thread's CPUs before it was moved, written by the moving thread */

    /* Returns the CPU time that the thread has used, in ns. */
    int64_t used() const {
        timespec time;
        const clockid_t clock = clockid_t((~uint32_t(thread.load(std::memory_order_relaxed))) << 3 | 6);
        if (clock_gettime(clock, &time)) return -1;
        return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
    }

  public:
    void begin() {
        static thread_local const pid_t own = pid_t(syscall(SYS_gettid));
        thread.store(own, std::memory_order_relaxed);
    }

    void hold() {
        cpu.store(sched_getcpu(), std::memory_order_relaxed);
        holds.store(true, std::memory_order_relaxed);
    }

    /* Called when the chunk is done. A thread that was moved goes back to its former core, or leaves this one if that is
       the same, and gets its former set of CPUs. */
    void let_go() {
        holds.store(false, std::memory_order_seq_cst);
        if (state.load(std::memory_order_seq_cst) == MINE) return;
        while (state.load(std::memory_order_acquire) == CLAIMED) relax();
        if (state.load(std::memory_order_acquire) == MOVED) { /* else another thread may have claimed it already */
            const int here = sched_getcpu(), home = cpu.load(std::memory_order_relaxed);
            cpu_set_t others = allowed;
            CPU_CLR(here, &others);
            if (home != here) pin(pthread_self(), home);
            else if (CPU_COUNT(&others)) pthread_setaffinity_np(pthread_self(), sizeof others, &others);
            pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
            state.store(MINE, std::memory_order_release);
        }
    }

    /* Moves the thread to the caller's CPU if it holds a chunk and does not run. The caller then yields to it. */
    bool bring() {
        if (!holds.load(std::memory_order_relaxed)) return false;
        const int64_t before = used();
        for (int i = 0; i < 50; ++i) relax();
        if (used() != before || before < 0) return false;
        int mine = MINE;
        if (!state.compare_exchange_strong(mine, CLAIMED, std::memory_order_seq_cst)) return false;
        bool moved = false;
        if (holds.load(std::memory_order_seq_cst)) {
            const pid_t who = thread.load(std::memory_order_relaxed);
            cpu_set_t here;
            CPU_ZERO(&here);
            CPU_SET(sched_getcpu(), &here);
            moved = !sched_getaffinity(who, sizeof allowed, &allowed) && !sched_setaffinity(who, sizeof here, &here);
        }
        state.store(moved ? MOVED : MINE, std::memory_order_release);
        return moved;
    }
};
#else
static inline void pin(pthread_t, int) {}

struct Place {
    void begin() {}
    void hold() {}
    void let_go() {}
    bool bring() { return false; }
};
#endif
