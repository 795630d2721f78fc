/* The C compiler's side of the files that nvcc compiles too (mix.h, number.h). */
#pragma once

#define KVT_FN static inline __attribute__((always_inline))

/* Of two uint32_t: bits, not a branch, which a compiler would leave in its loops. */
#define KVT_SELECT(is_first, first, otherwise)                                                     \
    (((uint32_t)(first) & (0u - (uint32_t)((is_first) != 0))) |                                    \
     ((uint32_t)(otherwise) & ((uint32_t)((is_first) != 0) - 1u)))

/* IEEE 754, rounded to nearest even; the file is compiled without contraction. */
#define KVT_DIV_RN(a, b) ((a) / (b))
#define KVT_MUL_RN(a, b) ((a) * (b))
