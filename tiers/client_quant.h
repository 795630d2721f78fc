/* What tiers/client.c does with a layout whose component is quantised; nobody else calls it. Pure
 * but for the copies, which are for tier threads only and run under the guard. */
#pragma once

#include "tiers/client.h"

/* 0 and what a slot holds of such a payload, or KVT_LAYOUT_E_PLANES, KVT_LAYOUT_E_ODD. The pieces
 * are otherwise checked, and add up to @payload_bytes with all their engine blocks. */
KVT_MUST_USE int kvt_client_quant_resolve(const struct kvt_layout *layout,
                                          const struct kvt_region *regions, uint64_t payload_bytes,
                                          uint64_t *ret_stored_bytes);

/* As kvt_client_gather and kvt_client_scatter, of a view that these have checked. */
KVT_MUST_USE int kvt_client_quant_gather(const struct kvt_client_view *view, uint8_t *payload,
                                         uint64_t *ret_hash);
KVT_MUST_USE int kvt_client_quant_scatter(const struct kvt_client_view *view,
                                          const uint8_t *payload);
