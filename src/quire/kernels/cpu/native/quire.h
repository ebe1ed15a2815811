/* What every kernel for CPUs is given, and how a program of them runs.

A kernel is cut into chunks, any of which may run on any thread, in any order: a chunk writes what no other chunk of its
operation reads or writes, and computes each number wholly, so that results depend neither on threads nor on who runs
what. An operation begins when all chunks of the one before it are done. Arguments are an array of 8 bytes each:
pointers, integers and doubles. Nothing here knows torch or Python. */
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

/* `scratch`: bytes of the running thread's own, as many as quire_pool was asked for, aligned to 64. */
typedef void (*Kernel)(const Arg *args, int64_t chunk, void *scratch);

struct Operation {
    Kernel kernel;
    const Arg *args;
    int64_t chunks;    /* >= 1, < 2^24 */
    const char *reads; /* memory that the chunks read one part after another, as many bytes each; or null */
    int64_t bytes;
};
