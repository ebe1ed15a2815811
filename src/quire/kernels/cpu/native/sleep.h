/* Threads that sleep until there is work. On Linux without a lock, so that no sleeper can delay the waking thread. */
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

class Sleepers {
    alignas(64) std::atomic<int32_t> count{0};
    std::atomic<int32_t> calls{0};
#if defined(__linux__)
    long futex(int what, int32_t value) {
        return syscall(SYS_futex, reinterpret_cast<int32_t *>(&calls), what | FUTEX_PRIVATE_FLAG, value, nullptr);
    }

  public:
    /* Sleeps until wake(), unless `idle()` is already false. */
    template <class Idle> void sleep(Idle idle) {
        const int32_t heard = calls.load();
        ++count;
        if (idle()) futex(FUTEX_WAIT, heard);
        --count;
    }

    /* Wakes all sleepers. The caller must have made idle() false before, in sequentially consistent order. */
    void wake() {
        if (!count.load()) return;
        ++calls;
        futex(FUTEX_WAKE, INT_MAX);
    }
#else
    std::mutex mutex;
    std::condition_variable bell;

  public:
    template <class Idle> void sleep(Idle idle) {
        std::unique_lock<std::mutex> lock(mutex);
        ++count;
        const int32_t heard = calls.load();
        bell.wait(lock, [&] { return !idle() || calls.load() != heard; });
        --count;
    }

    void wake() {
        if (!count.load()) return;
        std::lock_guard<std::mutex> lock(mutex);
        ++calls;
        bell.notify_all();
    }
#endif
};
