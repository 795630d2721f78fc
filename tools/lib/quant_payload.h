/* Payloads of quantised components: what an engine in miniature stores, and what it gets back.
 *
 * The oracle's bytes are no numbers that an engine would have: as FP16 half of them would vanish
 * beside the largest. So 4 of the 5 exponent bits are kept, and values lie within 2^-7 .. 2^9.
 *
 * What comes back is the kernels' conversion there and back; of a block that an engine loaded and
 * stores again, that conversion once more. The codes stay the same, the scale may move once: after
 * twice nothing changes any more. Pure; any thread. */
#pragma once

#include "daemon/base/def.h"
#include "kernels/kvt_kernels.h"

#define KVT_QUANT_TIMES_MAX 2u /* conversions after which nothing changes */

/* Makes FP16 numbers of whole elements, in place. */
void kvt_quant_payload_shape(void *payload, size_t bytes);
/* There and back, in place: whole planes, aligned for their elements. -errno or 0. */
KVT_MUST_USE int kvt_quant_payload_convert(const struct kvt_quant_spec *spec, void *planes,
                                           size_t bytes);
