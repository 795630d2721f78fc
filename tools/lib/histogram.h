/* Latencies in buckets that grow with the value: 16 of them for each power of two, so a quantile is
 * right to 6 % from nanoseconds to hours in 2.6 KB. Plain memory without pointers: it may lie in
 * memory that processes share, and two of them add up. One writer at a time. */
#pragma once

#include "daemon/base/def.h"

#define KVT_HISTOGRAM_BUCKETS 656u

struct kvt_histogram {
    uint64_t count;
    uint64_t sum_ns;
    uint64_t ns_max;
    uint32_t buckets[KVT_HISTOGRAM_BUCKETS];
};

void kvt_histogram_add(struct kvt_histogram *histogram, uint64_t ns);
void kvt_histogram_merge(struct kvt_histogram *histogram, const struct kvt_histogram *other);
/* The value that @permille of 1,000 samples do not pass (upper end of its bucket, never more than
 * the greatest sample); 0 when there are none. */
uint64_t kvt_histogram_quantile(const struct kvt_histogram *histogram, uint32_t permille);
