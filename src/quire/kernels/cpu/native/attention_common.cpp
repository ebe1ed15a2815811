/* Finds rows of one query that share a prefix of pages: their page tables begin with the same entries. */
#include "attention.h"

#include <algorithm>
#include <functional>

namespace {

constexpr int64_t PART = 256;       /* the fewest tokens of a part */
constexpr int64_t GRAIN = 128;      /* parts begin at multiples of this */
constexpr int64_t LEAST_TOKENS = 96; /* shorter prefixes are not shared */

/* Returns the tokens in the first pages that two rows share, of pages of which both see all tokens. */
int64_t same(const int64_t *one, const int64_t *two, int64_t tokens, int64_t page) {
    int64_t i = 0;
    while ((i + 1) * page <= tokens && one[i] == two[i]) ++i;
    return i * page;
}

} // namespace

/* Groups each row with the `few` - 1 rows that share the longest prefix with it, and with all that share at least half
   of that. Args: slots, positions, tables, table stride, tokens of a page, rows, the most rows of a tile, the fewest
   rows of a group (`few`), Common (output). */
QUIRE_EXPORT void attention_share(const Arg *a, int64_t, void *) {
    const int64_t *slots = as<int64_t>(a[0]), *positions = as<int64_t>(a[1]), *tables = as<int64_t>(a[2]);
    const int64_t stride = a[3].integer, page = a[4].integer, rows = a[5].integer, most = a[6].integer, few = a[7].integer;
    const Common found(a[8], rows);
    int64_t placed = 0;
    found.tiles() = 0;
    for (int64_t row = 0; row < rows; ++row) found.parts(row) = 0;
    for (int64_t row = 0; row + few <= rows; ++row) {
        if (found.parts(row)) continue;
        int64_t others = 0, count = 1, *members = found.order() + placed;
        for (int64_t other = row + 1; other < rows; ++other)
            if (!found.parts(other))
                members[others++] = found.begin(other) =
                    same(tables + slots[row] * stride, tables + slots[other] * stride,
                         std::min(positions[row], positions[other]), page);
        if (others < few - 1) break;
        std::nth_element(members, members + few - 2, members + others, std::greater<int64_t>());
        int64_t tokens = members[few - 2];
        if (tokens < LEAST_TOKENS) continue;
        const int64_t least = std::max(LEAST_TOKENS, (tokens + 1) / 2);
        members[0] = row;
        for (int64_t other = row + 1; other < rows; ++other)
            if (!found.parts(other) && found.begin(other) >= least)
                members[count++] = other, tokens = std::min(tokens, found.begin(other));
        const int64_t parts = std::clamp(tokens / PART, int64_t(1), COMMON_PARTS), even = (tokens + parts - 1) / parts;
        const int64_t size = (even + GRAIN - 1) / GRAIN * GRAIN, tiles = (count + most - 1) / most;
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t first = count * i / tiles, last = count * (i + 1) / tiles;
            found.tile(found.tiles()++) = {placed + first, last - first, tokens, size};
        }
        for (int64_t i = 0; i < count; ++i)
            found.begin(members[i]) = tokens, found.parts(members[i]) = (tokens + size - 1) / size;
        placed += count;
    }
}
