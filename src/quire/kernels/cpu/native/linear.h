/* Products of rows with a packed weight: the layout of the weight, and the arguments of a product's chunk.

A weight [N, K] is stored in panels of PANEL of its rows. A panel is a sequence of steps: a step holds 4 bytes of each
of the panel's rows in turn, two bf16 of adjacent columns or one fp32. N is padded to panels, and K in bf16 to multiples
of KTILE columns, with zeros. A step is an operand of vdpbf16ps, 16 steps are AMX tiles, and a panel is read
sequentially.

A gated weight is two stacked ones [2 I, K]: each panel has PANEL / 2 rows of the gate, then the same rows of up.

Each sum goes over K in order, whatever the number of rows. */
#pragma once
#include "lanes.h"

/* The names of vector types in products. */
typedef lanes wide;
typedef signs wide_int;
typedef words wide_bits;

constexpr int64_t PANEL = 32, STEP = PANEL * 4, KTILE = 32;
constexpr int64_t BLOCK = 256; /* steps that all rows multiply before the next steps: 32 KiB of a panel */
constexpr int VECTORS = int(PANEL) / LANES;

template <class T> static inline int64_t steps_of(int64_t columns) {
    return sizeof(T) == 4 ? columns : (columns + KTILE - 1) / KTILE * (KTILE / 2);
}

/* Returns the row of the weight that is stored in row `packed`, or -1 for padding. `rows`: of the weight. */
static inline int64_t source(int64_t packed, int64_t rows, bool gated) {
    if (!gated) return packed < rows ? packed : -1;
    const int64_t half = PANEL / 2, lane = packed % PANEL, at = packed / PANEL * half + lane % half;
    return at < rows / 2 ? at + (lane < half ? 0 : rows / 2) : -1;
}

struct Product {
    const char *x, *weight;
    const float *bias; /* in the order of packed rows, or null */
    char *out;
    int64_t rows, columns, width, x_stride, out_stride; /* strides in numbers; `width`: of `out` */
    int64_t first, last;                                /* this chunk's rows of x */
    int64_t panel, end;                                 /* this chunk's panels */
    int64_t activation;
    bool gated;
    bool alike; /* deterministic: the same operations whatever the number of rows */
    bool pairs; /* use vdpbf16ps, if the CPU has it */

    /* Args: x, weight, bias, out, rows, columns (K), width, x_stride, out_stride, rows of a chunk, groups of panels,
       panels, activation, gated, alike, pairs. The chunks of a group of panels are adjacent. */
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

/* Stores a panel's sums [last - first, PANEL] to `out`: plus bias, activated, rounded once. */
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
            if (GATED) sum *= up_factor(load<wide>(sums + OUTS + v * LANES) + bias[v + VECTORS - HALF], p.activation);
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
