/* Permission to use AMX, and the configuration of its tiles. */
#pragma once

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Returns whether the process may use the registers, which are large, and which Linux grants on request. */
static inline bool tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return granted;
}

/* Forces earlier writes to memory: compilers do not know that tile instructions read it. */
static inline void in_memory(const void *read = nullptr) { asm volatile("" : : "r"(read) : "memory"); }

/* All eight tiles have 16 rows of 64 bytes. The caller ends with _tile_release(). */
static inline void configure_tiles() {
    alignas(64) unsigned char config[64] = {1};
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = 16;
    in_memory(config);
    _tile_loadconfig(config);
}
#endif
