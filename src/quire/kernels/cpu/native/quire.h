/* The interface of CPU kernels and programs of these.

A kernel is cut into chunks, which may run on any threads, in any order: a chunk writes what no other chunk of its
operation reads or writes, and computes each number completely, so that results do not depend on threads. An operation
begins when all chunks of the one before it are done. Arguments are an array of 8 bytes each: pointers, integers and
doubles. Nothing here depends on torch or Python. */
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__GNUC__)
#define QUIRE_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define QUIRE_EXPORT extern "C"
#endif

union Arg {
    void *pointer;
    int64_t integer;
    double number;
};

template <class T> static inline T *as(const Arg &arg) { return static_cast<T *>(arg.pointer); }

/* `scratch`: memory of the running thread, of the size given to quire_pool, aligned to 64. */
typedef void (*Kernel)(const Arg *args, int64_t chunk, void *scratch);

struct Operation {
    Kernel kernel;
    const Arg *args;
    int64_t chunks;    /* >= 1, < 2^24 */
    const char *reads; /* memory of which each chunk reads an equal part, in order; or null */
    int64_t bytes;
};
