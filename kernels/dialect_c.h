/* The C compiler's side of the files that nvcc compiles too (mix.h, number.h). */
#pragma once

#define KVT_FN static inline __attribute__((always_inline))

/* IEEE 754, rounded to nearest even; the file is compiled without contraction. */
#define KVT_DIV_RN(a, b) ((a) / (b))
#define KVT_MUL_RN(a, b) ((a) * (b))
