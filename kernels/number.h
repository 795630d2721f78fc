/* Numbers of 8, 16 and 32 bits and the ways between them, in integer arithmetic and in float32
 * operations that IEEE 754 defines to the bit, so that a GPU and a CPU give the same codes. The
 * rules are those of kvt_kernels.h. A file of its own for the same reason as mix.h; KVT_FN,
 * KVT_SELECT, KVT_DIV_RN and KVT_MUL_RN belong to the dialect.
 *
 *   FP16        1 sign, 5 exponent (bias 15),  10 mantissa; 0x7c00 infinity
 *   BF16        1 sign, 8 exponent (bias 127),  7 mantissa; 0x7f80 infinity
 *   FP8 E4M3FN  1 sign, 4 exponent (bias 7),    3 mantissa; 0x7f NaN, no infinity, 0x7e is 448 */
#pragma once

#include <stdint.h>
#include <string.h>

#define KVT_FP16_INF 0x7c00u
#define KVT_BF16_INF 0x7f80u
#define KVT_FP32_INF 0x7f800000u
#define KVT_FP8_MAX 448.0f
#define KVT_INT8_MAX 127.0f

KVT_FN uint32_t kvt_float_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

KVT_FN float kvt_bits_float(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Everything below computes all cases and selects (KVT_SELECT, the dialect's): loops of it become
 * vectors on a CPU, and threads of a warp stay together on a GPU. */

/* Exact; NaN stays NaN. */
KVT_FN float kvt_fp16_to_float(uint32_t half)
{
    uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    /* A subnormal is a multiple of 2^-24. */
    uint32_t subnormal = kvt_float_bits(KVT_MUL_RN((float)(int32_t)rest, 0x1p-24f));
    uint32_t normal = (rest << 13) + ((127u - 15u) << 23);
    uint32_t finite = KVT_SELECT(rest < 0x0400u, subnormal, normal);

    return kvt_bits_float(sign |
                          KVT_SELECT(rest >= KVT_FP16_INF, (rest << 13) | KVT_FP32_INF, finite));
}

KVT_FN float kvt_bf16_to_float(uint32_t half)
{
    return kvt_bits_float(half << 16);
}

/* To nearest even; too large is infinity, any NaN is 0x7e00. */
KVT_FN uint32_t kvt_float_to_fp16(float value)
{
    uint32_t bits = kvt_float_bits(value), sign = (bits >> 16) & 0x8000u;
    uint32_t rest = bits & 0x7fffffffu;
    /* Below 2^-14: adding 0.5 leaves multiples of 2^-24. */
    uint32_t subnormal = kvt_float_bits(kvt_bits_float(rest) + 0.5f) - 0x3f000000u;
    uint32_t normal = ((rest + 0x0fffu + ((rest >> 13) & 1u)) >> 13) - ((127u - 15u) << 10);
    uint32_t finite = sign | KVT_SELECT(rest < 0x38800000u, subnormal, normal);
    /* 65,520 lies half way to what would come after 65,504. */
    uint32_t number = KVT_SELECT(rest >= 0x477ff000u, sign | KVT_FP16_INF, finite);

    return KVT_SELECT(rest > KVT_FP32_INF, 0x7e00u, number);
}

/* To nearest even; any NaN is 0x7fc0. */
KVT_FN uint32_t kvt_float_to_bf16(float value)
{
    uint32_t bits = kvt_float_bits(value);
    uint32_t number = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;

    return KVT_SELECT((bits & 0x7fffffffu) > KVT_FP32_INF, 0x7fc0u, number);
}

/* To nearest even, saturated; not of NaN. */
KVT_FN uint32_t kvt_float_to_fp8(float value)
{
    uint32_t bits = kvt_float_bits(value), sign = (bits >> 24) & 0x80u;
    uint32_t rest = bits & 0x7fffffffu;
    /* Below 2^-6: adding 2^14 leaves multiples of 2^-9. */
    uint32_t subnormal = kvt_float_bits(kvt_bits_float(rest) + 0x1p14f) - 0x46800000u;
    uint32_t normal = ((rest + 0x7ffffu + ((rest >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
    uint32_t finite = KVT_SELECT(rest < 0x3c800000u, subnormal, normal);

    return sign | KVT_SELECT(rest >= 0x43e00000u /* 448 */, 0x7eu, finite);
}

/* Exact; not for the NaN codes. */
KVT_FN float kvt_fp8_to_float(uint32_t code)
{
    uint32_t sign = (code & 0x80u) << 24, rest = code & 0x7fu;
    /* A subnormal is a multiple of 2^-9. */
    uint32_t subnormal = kvt_float_bits(KVT_MUL_RN((float)(int32_t)rest, 0x1p-9f));

    return kvt_bits_float(sign |
                          KVT_SELECT(rest < 0x08u, subnormal, (rest << 20) + ((127u - 7u) << 23)));
}

/* To nearest even, saturated at +-127; not of NaN. */
KVT_FN uint32_t kvt_float_to_int8(float value)
{
    uint32_t bits = kvt_float_bits(value), most = KVT_SELECT((int)(bits >> 31), 0x81u, 0x7fu);
    /* Adding 1.5 * 2^23 leaves integers, in two's complement in the low bits. */
    uint32_t number = kvt_float_bits(value + 0x1.8p23f) & 0xffu;

    return KVT_SELECT((bits & 0x7fffffffu) >= 0x42fe0000u /* 127 */, most, number);
}

KVT_FN float kvt_int8_to_float(uint32_t code)
{
    return (float)((int32_t)(code ^ 0x80u) - 128);
}

/* ---- an element with its scale; is_bf16 and is_int8 are the same for a whole launch ---------- */

KVT_FN float kvt_elem_to_float(uint32_t half, int is_bf16)
{
    return is_bf16 ? kvt_bf16_to_float(half) : kvt_fp16_to_float(half);
}

/* The part of a half that orders finite magnitudes; 0 of what is not finite. */
KVT_FN uint32_t kvt_elem_magnitude(uint32_t half, int is_bf16)
{
    uint32_t rest = half & 0x7fffu;

    return KVT_SELECT(rest < (is_bf16 ? KVT_BF16_INF : KVT_FP16_INF), rest, 0);
}

/* From the greatest magnitude of a (plane, head). */
KVT_FN float kvt_quant_scale(uint32_t magnitude, int is_bf16, int is_int8)
{
    float scale =
        KVT_DIV_RN(kvt_elem_to_float(magnitude, is_bf16), is_int8 ? KVT_INT8_MAX : KVT_FP8_MAX);

    return kvt_float_bits(scale) < 0x00800000u ? 1.0f : scale; /* zero or subnormal */
}

KVT_FN uint32_t kvt_quant_code(uint32_t half, float scale, int is_bf16, int is_int8)
{
    float quotient = KVT_DIV_RN(kvt_elem_to_float(half, is_bf16), scale);
    uint32_t code = is_int8 ? kvt_float_to_int8(quotient) : kvt_float_to_fp8(quotient);
    uint32_t nan = is_int8 ? 0x80u : ((half >> 8) & 0x80u) | 0x7fu;

    return KVT_SELECT((half & 0x7fffu) > (is_bf16 ? KVT_BF16_INF : KVT_FP16_INF), nan, code);
}

KVT_FN uint32_t kvt_quant_value(uint32_t code, float scale, int is_bf16, int is_int8)
{
    float value = KVT_MUL_RN(is_int8 ? kvt_int8_to_float(code) : kvt_fp8_to_float(code), scale);
    uint32_t half = is_bf16 ? kvt_float_to_bf16(value) : kvt_float_to_fp16(value);
    uint32_t sign = is_int8 ? 0u : (code & 0x80u) << 8;
    uint32_t nan = sign | (is_bf16 ? 0x7fc0u : 0x7e00u);

    return KVT_SELECT(is_int8 ? code == 0x80u : (code & 0x7fu) == 0x7fu, nan, half);
}
