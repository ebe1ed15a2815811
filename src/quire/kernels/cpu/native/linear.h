/* Products of rows with a packed weight: how it lies, and what a chunk of a product is told.

A weight [N, K] lies in panels of PANEL of its rows. A panel is steps, one after another: a step holds 4 bytes of each of
the panel's rows in turn, two bf16 of neighbouring columns or one fp32. N is padded to panels, K in bf16 to steps of
KTILE columns, with zeros. So a step is what vdpbf16ps multiplies, 16 steps are tiles of AMX, and a panel is read from
one end to the other.

A gated weight is two stacked ones [2 I, K]: each panel has PANEL / 2 rows of the one, then the same rows of the other.

Each sum goes over K in order, whatever the number of rows. */
#pragma once
#include "lanes.h"

/* As products call them. */
typedef lanes wide;
typedef signs wide_int;
typedef words wide_bits;

constexpr int64_t PANEL = 32, STEP = PANEL * 4, KTILE = 32;
constexpr int64_t BLOCK = 256; /* steps that many rows go over at a time: 32 KiB of a panel */
constexpr int VECTORS = int(PANEL) / LANES;

template <class T> static inline int64_t steps_of(int64_t columns) {
    return sizeof(T) == 4 ? columns : (columns + KTILE - 1) / KTILE * (KTILE / 2);
}

/* The row of the weight that lies in this row of the packed one, or -1. `rows`: those of the weight. */
static inline int64_t source(int64_t packed, int64_t rows, bool gated) {
    if (!gated) return packed < rows ? packed : -1;
    const int64_t half = PANEL / 2, lane = packed % PANEL, at = packed / PANEL * half + lane % half;
    return at < rows / 2 ? at + (lane < half ? 0 : rows / 2) : -1;
}

struct Product {
    const char *x, *weight;
    const float *bias; /* of packed rows, or null */
    char *out;
    int64_t rows, columns, width, x_stride, out_stride; /* strides in numbers; `width`: of `out` */
    int64_t first, last;                                /* rows of x, of this chunk */
    int64_t panel, end;                                 /* and panels */
    int64_t activation;
    bool gated;
    bool alike; /* the same operations whatever the number of rows */
    bool pairs; /* by vdpbf16ps, where it is */

    /* Args: x, weight, bias, out, rows, columns (K), width, x_stride, out_stride, rows of a chunk, groups of panels,
       panels, activation, gated, alike, pairs. Chunks of one group follow one another. */
    Product(const Arg *a, int64_t chunk)
        : x(as<char>(a[0])), weight(as<char>(a[1])), bias(as<float>(a[2])), out(as<char>(a[3])), rows(a[4].integer),
          columns(a[5].integer), width(a[6].integer), x_stride(a[7].integer), out_stride(a[8].integer),
          activation(a[12].integer), gated(a[13].integer), alike(a[14].integer), pairs(a[15].integer) {
        const int64_t span = a[9].integer, groups = a[10].integer, panels = a[11].integer;
        const int64_t parts = (rows + span - 1) / span, group = chunk / parts;
        first = rows * (chunk % parts) / parts, last = rows * (chunk % parts + 1) / parts;
        panel = panels * group / groups, end = panels * (group + 1) / groups;
    }
};

/* sums [last - first, PANEL] of a panel, plus bias, activated, rounded once -> their place in `out`. */
template <class T, bool GATED>
static inline void finish(const Product &p, int64_t panel, int64_t first, int64_t last, const float *sums) {
    constexpr int HALF = VECTORS / (GATED ? 2 : 1), OUTS = HALF * LANES;
    const int64_t at = panel * OUTS, count = p.width - at < OUTS ? p.width - at : OUTS;
    wide bias[VECTORS] = {};
    for (int v = 0; v < VECTORS && p.bias; ++v) bias[v] = load<wide>(p.bias + panel * PANEL + v * LANES);
    for (int64_t row = first; row < last; ++row, sums += PANEL) {
        T *out = reinterpret_cast<T *>(p.out) + row * p.out_stride + at, some[OUTS];
        for (int v = 0; v < HALF; ++v) {
            wide sum = load<wide>(sums + v * LANES) + bias[v];
            if (p.activation) sum = activate(sum, p.activation);
            if (GATED) sum *= load<wide>(sums + OUTS + v * LANES) + bias[v + VECTORS - HALF];
            store((count == OUTS ? out : some) + v * LANES, sum);
        }
        if (count < OUTS) std::memcpy(out, some, size_t(count) * sizeof(T));
    }
}

template <class T>
static inline void finish(const Product &p, int64_t panel, int64_t first, int64_t last, const float *sums) {
    p.gated ? finish<T, true>(p, panel, first, last, sums) : finish<T, false>(p, panel, first, last, sums);
}

bool linear_tiles(const Product &product, void *scratch);
