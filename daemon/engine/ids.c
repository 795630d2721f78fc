/* Engine blocks that a Promote would write twice. What is written twice holds one of the two
 * afterwards, and both moves would be DONE.
 *
 * Clients choose the ids, on the engine's thread: a hash could be made to clump. They are sorted
 * instead, digit by digit from the lowest, and then equals are neighbours. How much work that is
 * depends on how many ids there are and how many engine blocks the memory holds, never on which ids
 * were chosen. Rising ids, as most are, are not sorted. */
#include <string.h>

#include "daemon/engine/internal.h"

#define DIGIT_BITS 8u
#define DIGITS (1u << DIGIT_BITS)

bool eng_ids_are_rising(const uint64_t *ids, uint32_t count)
{
    uint64_t last = 0;

    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] == KVT_ENGINE_BLOCK_NONE)
            continue;
        if (ids[i] < last)
            return false;
        last = ids[i] + 1;
    }
    return true;
}

/* By one digit; what has the same digit keeps its order. */
static void sort_digit(const uint64_t *from, uint64_t *to, uint32_t count, uint32_t shift)
{
    uint32_t places[DIGITS] = {0}, at = 0;

    for (uint32_t i = 0; i < count; i++)
        places[from[i] >> shift & (DIGITS - 1)]++;
    for (uint32_t digit = 0; digit < DIGITS; digit++) {
        uint32_t of_digit = places[digit];

        places[digit] = at;
        at += of_digit;
    }
    for (uint32_t i = 0; i < count; i++)
        to[places[from[i] >> shift & (DIGITS - 1)]++] = from[i];
}

uint64_t eng_ids_find_twice(const uint64_t *ids, uint32_t count, uint64_t limit, uint64_t *scratch,
                            uint64_t *inout_steps)
{
    uint64_t *from = scratch, *to = scratch + count;
    uint32_t named = 0;

    for (uint32_t i = 0; i < count; i++)
        if (ids[i] != KVT_ENGINE_BLOCK_NONE)
            from[named++] = ids[i];
    *inout_steps += count;
    for (uint32_t shift = 0; shift < 64 && limit > 1 && (limit - 1) >> shift != 0;
         shift += DIGIT_BITS) {
        uint64_t *sorted = to;

        sort_digit(from, to, named, shift);
        *inout_steps += 2ull * named + DIGITS;
        to = from;
        from = sorted;
    }
    for (uint32_t i = 1; i < named; i++)
        if (from[i] == from[i - 1])
            return from[i];
    return KVT_ENGINE_BLOCK_NONE;
}
