/* The CPU's conversions, for its table (host.c). Any thread. */
#pragma once

#include "kernels/kvt_kernels.h"

int kvt_host_quantise(void *stream, const struct kvt_quant_batch *batch);
int kvt_host_dequantise(void *stream, const struct kvt_quant_batch *batch);
