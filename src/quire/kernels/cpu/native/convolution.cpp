/* The causal convolution of layers with states, along the tokens of each row of a step. */
#include "lanes.h"

constexpr int MAX_EARLIER = 15;

/* out = silu(sum over taps k of weight[k] * x[t - taps + 1 + k] + bias) for each token t of a row and each channel, from
   the inputs before the row that the state in page `read` holds (below 0: zeros). The last inputs at each end of a run
   of page_tokens tokens, and of the row, are stored to a page of `write` (below 0: nothing is). A chunk is a part of a
   row's channels.
   Args: x, out, weight [taps, channels], bias (null: none), states [pages, channels, taps - 1], offsets, lengths,
   starts, read, write (int64), stride of x, channels, taps, stride of pages, columns of `write`, page_tokens,
   whether to apply SiLU, channels of a chunk. */
template <class T> static void convolution(const Arg *a, int64_t chunk) {
    const int64_t channels = a[11].integer, earlier = a[12].integer - 1, part = a[17].integer;
    const int64_t parts = (channels + part - 1) / part, row = chunk / parts, first = chunk % parts * part;
    const int64_t last = first + part < channels ? first + part : channels;
    const int64_t offset = as<int64_t>(a[5])[row], length = as<int64_t>(a[6])[row], start = as<int64_t>(a[7])[row];
    const int64_t read = as<int64_t>(a[8])[row], *write = as<int64_t>(a[9]) + row * a[14].integer;
    const float *weight = as<float>(a[2]), *bias = as<float>(a[3]);
    T *states = as<T>(a[4]);
    for (int64_t c = first; c < last; c += LANES) {
        const int64_t count = last - c < LANES ? last - c : LANES;
        lanes before[MAX_EARLIER], taps[MAX_EARLIER + 1], shift{};
        for (int64_t k = 0; k <= earlier; ++k) taps[k] = load(weight + k * channels + c, count);
        if (bias) shift = load(bias + c, count);
        for (int64_t k = 0; k < earlier; ++k) {
            before[k] = lanes{};
            const T *from = states + read * a[13].integer + c * earlier + k;
            for (int64_t i = 0; read >= 0 && i < count; ++i) before[k][i] = to(from[i * earlier]);
        }
        int64_t run = 0, end = a[15].integer - start % a[15].integer;
        for (int64_t t = 0; t < length; ++t) {
            const lanes here = load(as<T>(a[0]) + (offset + t) * a[10].integer + c, count);
            lanes sum = fused(here, taps[earlier], shift);
            for (int64_t k = 0; k < earlier; ++k) sum = fused(before[k], taps[k], sum);
            if (a[16].integer) sum = sum / (1.0f + power(sum * -LOG2E));
            store(as<T>(a[1]) + (offset + t) * channels + c, sum, count);
            for (int64_t k = 0; k + 1 < earlier; ++k) before[k] = before[k + 1];
            before[earlier - 1] = here;
            if (t + 1 < end && t + 1 < length) continue;
            const int64_t page = write[run++];
            end += a[15].integer;
            for (int64_t k = 0; page >= 0 && k < earlier; ++k) {
                T *onto = states + page * a[13].integer + c * earlier + k;
                for (int64_t i = 0; i < count; ++i) onto[i * earlier] = from<T>(before[k][i]);
            }
        }
    }
}

QUIRE_EXPORT void convolution_bf16(const Arg *a, int64_t chunk, void *) { convolution<bf16>(a, chunk); }
QUIRE_EXPORT void convolution_f32(const Arg *a, int64_t chunk, void *) { convolution<float>(a, chunk); }
