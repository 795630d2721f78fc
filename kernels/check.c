/* kvt_check64 on the CPU: whole words by the widest loop, then a last word padded with zeros. */
#include "kernels/check.h"

#include <string.h>

#include "kernels/dialect_c.h"
#include "kernels/kvt_kernels.h"
#include "kernels/loops.h"
#include "kernels/mix.h"

uint64_t kvt_check64_part(const void *data, uint64_t bytes, uint64_t first_word)
{
    const uint64_t words_count = bytes / 8;
    uint64_t sum = kvt_loops()->sum(data, words_count, first_word), word = 0;

    if (bytes % 8 == 0)
        return sum;
    memcpy(&word, (const unsigned char *)data + words_count * 8, bytes % 8);
    return sum + kvt_mix(word, first_word + words_count);
}

uint64_t kvt_check64(const void *payload, uint64_t bytes)
{
    return kvt_check64_part(payload, bytes, 0);
}
