/* Quantisation as kvt_kernels.h describes it, from tables and double arithmetic: the nearest of all
 * codes is looked for, and no bit is shifted the way kernels/number.h does. Single-threaded after
 * naive_quant_init. */
#pragma once

#include "kernels/kvt_kernels.h"

void naive_quant_init(void);

/* Of 16 bits of the given kind; infinities and NaN as float has them. */
double naive_elem(uint16_t half, enum kvt_quant_elem elem);
/* Of any code but a NaN's. */
double naive_code_value(uint8_t code, enum kvt_quant_kind kind);
float naive_scale(const uint16_t *halves, uint64_t count, enum kvt_quant_elem elem,
                  enum kvt_quant_kind kind);
uint8_t naive_encode(uint16_t half, float scale, enum kvt_quant_elem elem,
                     enum kvt_quant_kind kind);
uint16_t naive_decode(uint8_t code, float scale, enum kvt_quant_elem elem,
                      enum kvt_quant_kind kind);

/* A whole payload of @planes_count planes, each way; index by index. @quantised is of
 * kvt_quant_bytes. */
void naive_quantise(const struct kvt_quant_spec *spec, uint32_t planes_count, const uint16_t *raw,
                    uint8_t *quantised);
void naive_dequantise(const struct kvt_quant_spec *spec, uint32_t planes_count,
                      const uint8_t *quantised, uint16_t *raw);
