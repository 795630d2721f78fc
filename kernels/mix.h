/* What one word adds to a check (kvt_kernels.h has the formula). A file of its own because it is
 * compiled three times: by the C compiler, by nvcc, and for the kernels on host threads; it uses
 * only what C and C++ share. KVT_FN is how the including dialect marks a function. */
#pragma once

#include <stdint.h>

#define KVT_MIX_STEP 0x9e3779b97f4a7c15ull

/* @key is (i + 1) * KVT_MIX_STEP: a loop adds KVT_MIX_STEP to it. */
KVT_FN uint64_t kvt_mix_keyed(uint64_t word, uint64_t key)
{
    uint64_t x = word ^ key;

    x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
    return x ^ (x >> 32);
}

KVT_FN uint64_t kvt_mix(uint64_t word, uint64_t index)
{
    return kvt_mix_keyed(word, (index + 1) * KVT_MIX_STEP);
}
