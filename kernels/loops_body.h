/* The bodies behind loops.h, to be inlined into functions of one width each: KVT_LOOPS_DEFINE makes
 * the four functions and their table with a given attribute. */
#pragma once

#include <assert.h>
#include <string.h>

#include "kernels/dialect_c.h"
#include "kernels/loops.h"
#include "kernels/mix.h"
#include "kernels/number.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

KVT_FN uint64_t loops_sum(const unsigned char *data, uint64_t words_count, uint64_t first_word)
{
    const uint64_t first_key = (first_word + 1) * KVT_MIX_STEP;
    uint64_t sum = 0;

    for (uint64_t i = 0; i < words_count; i++) {
        uint64_t word;

        memcpy(&word, data + i * 8, sizeof(word));
        sum += kvt_mix_keyed(word, first_key + i * KVT_MIX_STEP);
    }
    return sum;
}

KVT_FN uint32_t loops_magnitude(const unsigned char *halves, uint64_t count, int is_bf16)
{
    uint32_t most = 0;

    for (uint64_t i = 0; i < count; i++) {
        uint16_t half;
        uint32_t magnitude;

        memcpy(&half, halves + i * 2, sizeof(half));
        magnitude = kvt_elem_magnitude(half, is_bf16);
        most = KVT_MAX(most, magnitude);
    }
    return most;
}

KVT_FN void loops_encode(unsigned char *restrict codes, const unsigned char *restrict halves,
                         uint64_t count, float scale, int is_bf16, int is_int8)
{
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half;

        memcpy(&half, halves + i * 2, sizeof(half));
        codes[i] = (unsigned char)kvt_quant_code(half, scale, is_bf16, is_int8);
    }
}

KVT_FN void loops_decode(unsigned char *restrict halves, const unsigned char *restrict codes,
                         uint64_t count, float scale, int is_bf16, int is_int8)
{
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half = (uint16_t)kvt_quant_value(codes[i], scale, is_bf16, is_int8);

        memcpy(halves + i * 2, &half, sizeof(half));
    }
}

/* Constants instead of @kinds in each branch, so that every loop is of one kind only. */
#define KVT_LOOPS_DEFINE(name, attribute)                                                          \
    attribute static uint64_t sum_##name(const unsigned char *data, uint64_t words_count,          \
                                         uint64_t first_word)                                      \
    {                                                                                              \
        return loops_sum(data, words_count, first_word);                                           \
    }                                                                                              \
    attribute static uint32_t magnitude_##name(const unsigned char *halves, uint64_t count,        \
                                               int kinds)                                          \
    {                                                                                              \
        return kinds & KVT_LOOPS_BF16 ? loops_magnitude(halves, count, 1)                          \
                                      : loops_magnitude(halves, count, 0);                         \
    }                                                                                              \
    attribute static void encode_##name(unsigned char *codes, const unsigned char *halves,         \
                                        uint64_t count, float scale, int kinds)                    \
    {                                                                                              \
        if (kinds == 0)                                                                            \
            loops_encode(codes, halves, count, scale, 0, 0);                                       \
        else if (kinds == KVT_LOOPS_BF16)                                                          \
            loops_encode(codes, halves, count, scale, 1, 0);                                       \
        else if (kinds == KVT_LOOPS_INT8)                                                          \
            loops_encode(codes, halves, count, scale, 0, 1);                                       \
        else                                                                                       \
            loops_encode(codes, halves, count, scale, 1, 1);                                       \
    }                                                                                              \
    attribute static void decode_##name(unsigned char *halves, const unsigned char *codes,         \
                                        uint64_t count, float scale, int kinds)                    \
    {                                                                                              \
        if (kinds == 0)                                                                            \
            loops_decode(halves, codes, count, scale, 0, 0);                                       \
        else if (kinds == KVT_LOOPS_BF16)                                                          \
            loops_decode(halves, codes, count, scale, 1, 0);                                       \
        else if (kinds == KVT_LOOPS_INT8)                                                          \
            loops_decode(halves, codes, count, scale, 0, 1);                                       \
        else                                                                                       \
            loops_decode(halves, codes, count, scale, 1, 1);                                       \
    }                                                                                              \
    static const struct kvt_loops loops_##name = {                                                 \
        .sum = sum_##name,                                                                         \
        .magnitude = magnitude_##name,                                                             \
        .encode = encode_##name,                                                                   \
        .decode = decode_##name,                                                                   \
    }
