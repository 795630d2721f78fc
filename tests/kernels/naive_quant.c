#include "tests/kernels/naive_quant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/common/check.h"

/* Codes in the order of their values, from zero up; of the positive half of each kind. */
#define FP8_FINITE 0x7fu    /* 0x00 .. 0x7e */
#define FP16_FINITE 0x7c00u /* 0x0000 .. 0x7bff */
#define BF16_FINITE 0x7f80u /* 0x0000 .. 0x7f7f */

static double fp8_values[FP8_FINITE], fp16_values[FP16_FINITE], bf16_values[BF16_FINITE];

/* A binary floating-point number by definition: fields, bias, and what subnormals mean. */
static double by_definition(uint32_t code, uint32_t mantissa_bits, int bias)
{
    int exponent = (int)(code >> mantissa_bits);
    double fraction = (double)(code & ((1u << mantissa_bits) - 1)) / (double)(1u << mantissa_bits);

    return exponent == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, exponent - bias);
}

void naive_quant_init(void)
{
    for (uint32_t i = 0; i < FP8_FINITE; i++)
        fp8_values[i] = by_definition(i, 3, 7);
    for (uint32_t i = 0; i < FP16_FINITE; i++)
        fp16_values[i] = by_definition(i, 10, 15);
    for (uint32_t i = 0; i < BF16_FINITE; i++)
        bf16_values[i] = by_definition(i, 7, 127);
}

/* The index of the value nearest to @value >= 0, of two the even one; @count: more than half a step
 * above the last, which has @next above it. */
static uint32_t nearest(const double *values, uint32_t count, double next, double value)
{
    uint32_t lo = 0, hi = count; /* values[lo] <= value < values[hi] */
    double above, below;

    while (hi - lo > 1) {
        uint32_t middle = lo + (hi - lo) / 2;

        if (values[middle] <= value)
            lo = middle;
        else
            hi = middle;
    }
    below = value - values[lo];
    above = (hi < count ? values[hi] : next) - value;
    if (below == above)
        return lo % 2 == 0 ? lo : hi;
    return below < above ? lo : hi;
}

double naive_elem(uint16_t half, enum kvt_quant_elem elem)
{
    uint32_t rest = half & 0x7fffu, finite = elem == KVT_ELEM_FP16 ? FP16_FINITE : BF16_FINITE;
    double value;

    if (rest > finite)
        value = (double)NAN;
    else if (rest == finite)
        value = (double)INFINITY;
    else
        value = elem == KVT_ELEM_FP16 ? fp16_values[rest] : bf16_values[rest];
    return half & 0x8000u ? -value : value;
}

double naive_code_value(uint8_t code, enum kvt_quant_kind kind)
{
    if (kind == KVT_QUANT_INT8)
        return (double)(int8_t)code;
    return code & 0x80u ? -fp8_values[code & 0x7fu] : fp8_values[code & 0x7fu];
}

float naive_scale(const uint16_t *halves, uint64_t count, enum kvt_quant_elem elem,
                  enum kvt_quant_kind kind)
{
    double most = 0;
    float scale;

    for (uint64_t i = 0; i < count; i++) {
        double value = fabs(naive_elem(halves[i], elem));

        if (isfinite(value) && value > most)
            most = value;
    }
    /* A quotient of two floats, rounded to double and then to float, is the float quotient. */
    scale = (float)(most / (kind == KVT_QUANT_INT8 ? 127.0 : 448.0));
    return isnormal(scale) ? scale : 1.0f;
}

uint8_t naive_encode(uint16_t half, float scale, enum kvt_quant_elem elem, enum kvt_quant_kind kind)
{
    double value = naive_elem(half, elem);
    uint8_t sign = half & 0x8000u ? 0x80u : 0;
    float quotient = (float)(value / (double)scale);

    if (isnan(value))
        return kind == KVT_QUANT_INT8 ? 0x80u : sign | 0x7fu;
    if (kind == KVT_QUANT_INT8) {
        double whole = nearbyint((double)quotient);

        return (uint8_t)(int8_t)fmax(fmin(whole, 127.0), -127.0);
    }
    if (fabs((double)quotient) >= 448.0)
        return sign | 0x7eu;
    return (uint8_t)(sign | nearest(fp8_values, FP8_FINITE, 480.0, fabs((double)quotient)));
}

uint16_t naive_decode(uint8_t code, float scale, enum kvt_quant_elem elem, enum kvt_quant_kind kind)
{
    uint16_t nan = elem == KVT_ELEM_FP16 ? 0x7e00u : 0x7fc0u, sign;
    double value;

    if (kind == KVT_QUANT_INT8 && code == 0x80u)
        return nan;
    if (kind == KVT_QUANT_FP8_E4M3 && (code & 0x7fu) == 0x7fu)
        return (uint16_t)(nan | (code & 0x80u) << 8);
    /* Exact in double (11 + 24 bits), so this rounds once, to float. */
    value = (double)(float)(naive_code_value(code, kind) * (double)scale);
    if (isnan(value))
        return nan;
    sign = signbit(value) ? 0x8000u : 0;
    value = fabs(value);
    if (elem == KVT_ELEM_FP16)
        return (uint16_t)(sign | nearest(fp16_values, FP16_FINITE, 65536.0, value));
    return (uint16_t)(sign | nearest(bf16_values, BF16_FINITE, ldexp(1, 128), value));
}

/* Element (plane, token, head, dim) of a payload. */
static uint64_t index_of(const struct kvt_quant_spec *spec, uint64_t plane, uint64_t token,
                         uint64_t head, uint64_t dim)
{
    if (spec->order == KVT_ORDER_TOKENS_FIRST)
        return ((plane * spec->plane_tokens + token) * spec->heads + head) * spec->head_dim + dim;
    return ((plane * spec->heads + head) * spec->plane_tokens + token) * spec->head_dim + dim;
}

static uint64_t scale_at(const struct kvt_quant_spec *spec, uint32_t planes_count, uint64_t plane,
                         uint32_t head)
{
    uint64_t codes = (uint64_t)planes_count * spec->plane_tokens * spec->heads * spec->head_dim;

    return (codes + 15) / 16 * 16 + (plane * spec->heads + head) * 4;
}

void naive_quantise(const struct kvt_quant_spec *spec, uint32_t planes_count, const uint16_t *raw,
                    uint8_t *quantised)
{
    uint64_t elems = (uint64_t)spec->plane_tokens * spec->head_dim;
    uint16_t *halves = calloc(elems, sizeof(*halves));

    CHECK(halves != NULL);
    memset(quantised, 0, (scale_at(spec, planes_count, planes_count, 0) + 15) / 16 * 16);
    for (uint32_t plane = 0; plane < planes_count; plane++) {
        for (uint32_t head = 0; head < spec->heads; head++) {
            float scale;

            for (uint64_t i = 0; i < elems; i++)
                halves[i] =
                    raw[index_of(spec, plane, i / spec->head_dim, head, i % spec->head_dim)];
            scale = naive_scale(halves, elems, spec->elem, spec->kind);
            memcpy(quantised + scale_at(spec, planes_count, plane, head), &scale, 4);
            for (uint64_t i = 0; i < elems; i++)
                quantised[index_of(spec, plane, i / spec->head_dim, head, i % spec->head_dim)] =
                    naive_encode(halves[i], scale, spec->elem, spec->kind);
        }
    }
    free(halves);
}

void naive_dequantise(const struct kvt_quant_spec *spec, uint32_t planes_count,
                      const uint8_t *quantised, uint16_t *raw)
{
    uint64_t elems = (uint64_t)spec->plane_tokens * spec->head_dim;

    for (uint32_t plane = 0; plane < planes_count; plane++) {
        for (uint32_t head = 0; head < spec->heads; head++) {
            float scale;

            memcpy(&scale, quantised + scale_at(spec, planes_count, plane, head), 4);
            for (uint64_t i = 0; i < elems; i++) {
                uint64_t at = index_of(spec, plane, i / spec->head_dim, head, i % spec->head_dim);

                raw[at] = naive_decode(quantised[at], scale, spec->elem, spec->kind);
            }
        }
    }
}
