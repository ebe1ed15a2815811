/* Products of rows with a packed weight (linear.h), by vectors; packing; and reading single rows of a packed weight. */
#include "linear.h"

#include <algorithm>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t AHEAD = 2048;     /* prefetch distance in the weight, in bytes */
constexpr int64_t WIDE = BLOCK + 8; /* stride of rows of x in scratch, in steps: not a power of 2, for the cache */
constexpr int64_t FEW = 4;          /* up to as many rows, tiles are slower: 12 against 15 GB/s of the weight */

/* The layout of x in scratch, and the product of a step: one fp32 column, two bf16, or two bf16 converted to fp32. */
struct Single {
    typedef float Number;
    typedef float X;
    static constexpr int64_t PER_STEP = 1;
    static wide add(wide sum, wide_bits w, X x) { return sum + x * (wide)w; }
    static void stage(const float *x, int64_t count, X *at) { std::memcpy(at, x, size_t(count) * 4); }
};

struct Widened {
    typedef bf16 Number;
    struct X {
        float even, odd;
    };
    static constexpr int64_t PER_STEP = 2;
    static wide add(wide sum, wide_bits w, X x) {
        sum += x.even * (wide)(w << 16);
        return sum + x.odd * (wide)(w & 0xffff0000u);
    }
    static void stage(const bf16 *x, int64_t count, X *at) {
        float *out = &at->even;
        for (int64_t k = 0; k < count; ++k) out[k] = to(x[k]);
    }
};

#if defined(__AVX512BF16__)
struct Pair {
    typedef bf16 Number;
    typedef uint32_t X;
    static constexpr int64_t PER_STEP = 2;
    static wide add(wide sum, wide_bits w, X x) {
        return (wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(x)), (__m512bh)w);
    }
    static void stage(const bf16 *x, int64_t count, X *at) { std::memcpy(at, x, size_t(count) * 2); }
};
#endif

/* The most vectors of sums in registers; a pass over a panel has R rows and V vectors of its columns. */
constexpr int SUMS = REGISTERS == 32 ? 24 : 12;
constexpr int vectors(int rows) {
    int found = VECTORS;
    while (found > 1 && found * rows > SUMS) found /= 2;
    return found;
}
constexpr int MOST = VECTORS <= 2 ? SUMS / VECTORS : 4; /* rows of a pass */

/* sums [R, PANEL] += x [R, WIDE] times steps of a panel; prefetches the weight `ahead` bytes further on. */
template <class O, int R>
inline void pass(const typename O::X *x, const char *w, int64_t steps, int64_t ahead, float *sums) {
    constexpr int V = vectors(R);
    for (int part = 0; part < VECTORS; part += V, w += V * LANES * 4) {
        wide sum[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sum[r][v] = load<wide>(sums + r * PANEL + (part + v) * LANES);
        for (int64_t s = 0; s < steps; ++s) {
            wide_bits some[V];
            const char *at = w + s * STEP;
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) some[v] = load<wide_bits>(at + v * LANES * 4);
            for (int i = 0; i < V * LANES * 4; i += 64) __builtin_prefetch(at + ahead + i);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const typename O::X own = x[r * WIDE + s];
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = O::add(sum[r][v], some[v], own);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) store(sums + r * PANEL + (part + v) * LANES, sum[r][v]);
    }
}

template <class O, int R = MOST>
inline void pass_of(int64_t rows, const typename O::X *x, const char *w, int64_t steps, int64_t ahead, float *sums) {
    if (rows == R) return pass<O, R>(x, w, steps, ahead, sums);
    if constexpr (R > 1) pass_of<O, R - 1>(rows, x, w, steps, ahead, sums);
}

/* Copies rows of x to [blocks][rows, WIDE], with zeros after the last column. */
template <class O> inline void stage(const Product &p, int64_t first, int64_t rows, typename O::X *staged) {
    const int64_t steps = steps_of<typename O::Number>(p.columns), per = O::PER_STEP;
    for (int64_t row = 0; row < rows; ++row) {
        const auto *x = reinterpret_cast<const typename O::Number *>(p.x) + (first + row) * p.x_stride;
        for (int64_t s = 0; s < steps; s += BLOCK) {
            const int64_t some = std::min(BLOCK, steps - s), count = std::min(some * per, p.columns - s * per);
            typename O::X *at = staged + s / BLOCK * rows * WIDE + row * WIDE;
            std::fill(at + count / per, at + some, typename O::X{});
            O::stage(x + s * per, count, at);
        }
    }
}

/* _staged_bytes of linear.py computes the same use of `scratch`. */
template <class O> void linear(const Product &p, void *scratch) {
    typedef typename O::Number T;
    const int64_t rows = p.last - p.first, steps = steps_of<T>(p.columns), passes = (rows + MOST - 1) / MOST;
    const int64_t row_size = (steps + BLOCK - 1) / BLOCK * WIDE;
    float *sums = static_cast<float *>(scratch);
    auto *staged = reinterpret_cast<typename O::X *>(sums + rows * PANEL);
    const auto begin = [&](int64_t pass) { return rows * pass / passes; };
    for (int64_t i = 0; i < passes; ++i)
        stage<O>(p, p.first + begin(i), begin(i + 1) - begin(i), staged + begin(i) * row_size);
    for (int64_t panel = p.panel; panel < p.end; ++panel) {
        const char *weight = p.weight + panel * steps * STEP;
        std::fill(sums, sums + rows * PANEL, 0.0f);
        for (int64_t s = 0; s < steps; s += BLOCK) {
            const int64_t some = std::min(BLOCK, steps - s);
            for (int64_t i = 0; i < passes; ++i) {
                const int64_t from = begin(i), count = begin(i + 1) - from;
                const int64_t ahead = i > 0 && i + 1 == passes ? some * STEP : AHEAD; /* the next block, or soon */
                pass_of<O>(count, staged + from * row_size + s / BLOCK * count * WIDE, weight + s * STEP, some, ahead,
                           sums + from * PANEL);
            }
        }
        finish<T>(p, panel, p.first, p.last, sums);
    }
}

/* Args: weight [rows, columns], packed, rows, columns, stride (in numbers), gated. A chunk is a panel. */
template <class T> void pack(const Arg *a, int64_t panel) {
    const int64_t rows = a[2].integer, size = a[3].integer * int64_t(sizeof(T)), steps = steps_of<T>(a[3].integer);
    char *out = as<char>(a[1]) + panel * steps * STEP;
    if (size % 4 || size / 4 < steps || (panel + 1) * PANEL > rows) std::memset(out, 0, size_t(steps * STEP));
    for (int64_t from = 0; from < size; from += 128) /* by blocks, so that written lines stay in the cache */
        for (int64_t lane = 0; lane < PANEL; ++lane) {
            const int64_t row = source(panel * PANEL + lane, rows, a[5].integer), end = std::min(from + 128, size);
            if (row < 0) continue;
            const char *weight = as<char>(a[0]) + row * a[4].integer * int64_t(sizeof(T));
            char *at = out + from / 4 * STEP + lane * 4;
            for (int64_t i = from; i + 4 <= end; i += 4, at += STEP) std::memcpy(at, weight + i, 4);
            if (end % 4) std::memcpy(at, weight + end - 2, 2);
        }
}

/* Reads rows `ids` (int64) of a packed weight that is not gated, times `scale`. Args: ids, packed, out, count, columns,
   out_stride (in numbers), scale, rows of a chunk. */
template <class T> void rows_of(const Arg *a, int64_t chunk) {
    const int64_t columns = a[4].integer, per = 4 / int64_t(sizeof(T)), panel = steps_of<T>(columns) * STEP;
    const float scale = float(a[6].number);
    for (int64_t i = chunk * a[7].integer; i < std::min(a[3].integer, (chunk + 1) * a[7].integer); ++i) {
        const int64_t row = as<int64_t>(a[0])[i];
        const char *lane = as<char>(a[1]) + row / PANEL * panel + row % PANEL * 4;
        T *out = as<T>(a[2]) + i * a[5].integer;
        for (int64_t k = 0; k + per <= columns; k += per, lane += STEP) std::memcpy(out + k, lane, 4);
        if (columns % per) std::memcpy(out + columns - 1, lane, sizeof(T));
        for (int64_t k = 0; k < columns && scale != 1.0f; ++k) out[k] = from<T>(to(out[k]) * scale);
    }
}

} // namespace

QUIRE_EXPORT void linear_bf16(const Arg *a, int64_t chunk, void *scratch) {
    const Product product(a, chunk);
    const bool few = product.rows <= FEW && !product.alike;
    if (!few && linear_tiles(product, scratch)) return;
#if defined(__AVX512BF16__)
    if (product.pairs) return linear<Pair>(product, scratch);
#endif
    linear<Widened>(product, scratch);
}

QUIRE_EXPORT void linear_f32(const Arg *a, int64_t chunk, void *scratch) { linear<Single>(Product(a, chunk), scratch); }

QUIRE_EXPORT void pack_bf16(const Arg *a, int64_t chunk, void *) { pack<bf16>(a, chunk); }
QUIRE_EXPORT void pack_f32(const Arg *a, int64_t chunk, void *) { pack<float>(a, chunk); }
QUIRE_EXPORT void packed_rows_bf16(const Arg *a, int64_t chunk, void *) { rows_of<bf16>(a, chunk); }
QUIRE_EXPORT void packed_rows_f32(const Arg *a, int64_t chunk, void *) { rows_of<float>(a, chunk); }
