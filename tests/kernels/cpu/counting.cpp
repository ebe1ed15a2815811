/* Kernels that say who ran what: for tests of the pool. */
#include "quire.h"

/* Args: counts. */
QUIRE_EXPORT void count(const Arg *a, int64_t chunk, void *) { ++as<int64_t>(a[0])[chunk]; }

/* Args: from, to, size. A chunk needs all that the operation before wrote. */
QUIRE_EXPORT void sum(const Arg *a, int64_t chunk, void *) {
    int64_t total = 0;
    for (int64_t i = 0; i < a[2].integer; ++i) total += as<int64_t>(a[0])[i];
    as<int64_t>(a[1])[chunk] = total % 1000003 + chunk;
}

/* Args: out, bytes. The scratch of each chunk's thread is its own, and aligned. */
QUIRE_EXPORT void fill(const Arg *a, int64_t chunk, void *scratch) {
    auto *bytes = static_cast<volatile unsigned char *>(scratch);
    const auto mine = static_cast<unsigned char>(chunk);
    for (int64_t i = 0; i < a[1].integer; ++i) bytes[i] = mine;
    bool own = reinterpret_cast<uintptr_t>(scratch) % 64 == 0;
    for (int64_t i = 0; i < a[1].integer; ++i) own &= bytes[i] == mine;
    as<int64_t>(a[0])[chunk] = own;
}
