/* AMX: whether this process may use it. */
#pragma once

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux gives the registers, which are large, to processes that ask for them. */
static inline bool tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return granted;
}

/* What was written before is in memory then: compilers aren't told that the instructions for tiles read it. */
static inline void in_memory(const void *read = nullptr) { asm volatile("" : : "r"(read) : "memory"); }

/* All eight tiles have 16 rows of 64 bytes. The caller ends with _tile_release(). */
static inline void configure_tiles() {
    alignas(64) unsigned char config[64] = {1};
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = 16;
    in_memory(config);
    _tile_loadconfig(config);
}
#endif
