/* What tiers of several zones share: whose offset it is, and the counters of all. */
#pragma once

#include "tiers/tier.h"

/* The zone that @offset_bytes < capacity_bytes lies in. Any thread. */
uint32_t kvt_zone_of(const struct kvt_tier *tier, uint64_t offset_bytes);
/* Sets the tier's counters to the sums of its zones'; readers of a sum see it before or after,
 * never half of it. One thread at a time. Not the incarnation: a tier has none. */
void kvt_zones_sum(struct kvt_tier *tier);
