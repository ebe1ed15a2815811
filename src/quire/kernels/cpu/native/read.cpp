/* Reads memory sequentially: the upper limit for the speed of a product of one row. */
#include "lanes.h"

/* Args: data, bytes of a chunk (a multiple of 512), sums [chunks] (so that compilers keep the reads). */
QUIRE_EXPORT void read_all(const Arg *a, int64_t chunk, void *) {
    const int64_t bytes = a[1].integer;
    const char *data = as<char>(a[0]) + chunk * bytes;
    constexpr int MANY = 8;
    words sums[MANY] = {};
    for (int64_t i = 0; i < bytes; i += MANY * LANES * 4) {
        for (int j = 0; j < MANY * LANES * 4; j += 64) __builtin_prefetch(data + i + j + 2048);
#pragma GCC unroll 8
        for (int j = 0; j < MANY; ++j) sums[j] ^= load<words>(data + i + j * LANES * 4);
    }
    uint32_t sum = 0;
    for (int j = 0; j < MANY; ++j)
        for (int lane = 0; lane < LANES; ++lane) sum ^= sums[j][lane];
    as<uint32_t>(a[2])[chunk] = sum;
}
