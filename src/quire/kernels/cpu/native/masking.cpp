/* Masks over logits: bits of the tokens that a grammar allows. */
#include "numbers.h"

/* logits [rows, vocab] = -infinity where the row's mask has no bit; the mask of row r is bits[places[r]], 32 tokens to
   a word, the lowest bit first; a row of place -1 stays as it is. A chunk is a row. Args: logits, places (int64), bits
   (uint32), stride, vocab, words. */
template <class T> static void mask(const Arg *a, int64_t r) {
    const int64_t place = as<int64_t>(a[1])[r], vocab = a[4].integer, words = a[5].integer;
    if (place < 0) return;
    T *row = as<T>(a[0]) + r * a[3].integer;
    const T least = from<T>(-__builtin_inff());
    const uint32_t *bits = as<uint32_t>(a[2]) + place * words;
    for (int64_t w = 0; w < words; ++w) {
        const uint32_t word = bits[w];
        if (word == 0xffffffffu) continue;
        const int64_t first = w * 32, end = first + 32 < vocab ? first + 32 : vocab;
        if (word == 0) { /* of most words of most masks */
            for (int64_t i = first; i < end; ++i) row[i] = least;
            continue;
        }
        for (int64_t i = first; i < end; ++i)
            if (!(word >> (i - first) & 1)) row[i] = least;
    }
}

QUIRE_EXPORT void mask_bf16(const Arg *a, int64_t chunk, void *) { mask<bf16>(a, chunk); }
QUIRE_EXPORT void mask_f32(const Arg *a, int64_t chunk, void *) { mask<float>(a, chunk); }
