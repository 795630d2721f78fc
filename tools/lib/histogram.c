/* Values below 16 have a bucket each; from there a bucket is a power of two and the four bits below
 * its highest bit. */
#include "tools/lib/histogram.h"

#define SUB_BITS 4u
#define SUB_COUNT (1u << SUB_BITS)

static uint32_t bucket_of(uint64_t ns)
{
    uint32_t high, bucket;

    if (ns < SUB_COUNT)
        return (uint32_t)ns;
    high = 63u - (uint32_t)__builtin_clzll(ns);
    bucket = (high - SUB_BITS + 1) * SUB_COUNT + (uint32_t)((ns >> (high - SUB_BITS)) % SUB_COUNT);
    return KVT_MIN(bucket, KVT_HISTOGRAM_BUCKETS - 1);
}

static uint64_t bucket_end_ns(uint32_t bucket)
{
    uint32_t high;

    if (bucket < SUB_COUNT)
        return bucket;
    high = bucket / SUB_COUNT + SUB_BITS - 1;
    return (((uint64_t)SUB_COUNT + bucket % SUB_COUNT + 1) << (high - SUB_BITS)) - 1;
}

void kvt_histogram_add(struct kvt_histogram *histogram, uint64_t ns)
{
    histogram->count++;
    histogram->sum_ns += ns;
    histogram->ns_max = KVT_MAX(histogram->ns_max, ns);
    histogram->buckets[bucket_of(ns)]++;
}

void kvt_histogram_merge(struct kvt_histogram *histogram, const struct kvt_histogram *other)
{
    histogram->count += other->count;
    histogram->sum_ns += other->sum_ns;
    histogram->ns_max = KVT_MAX(histogram->ns_max, other->ns_max);
    for (uint32_t i = 0; i < KVT_HISTOGRAM_BUCKETS; i++)
        histogram->buckets[i] += other->buckets[i];
}

uint64_t kvt_histogram_quantile(const struct kvt_histogram *histogram, uint32_t permille)
{
    uint64_t rank = kvt_div_up(histogram->count * KVT_MIN(permille, 1000u), 1000);
    uint64_t seen = 0;

    for (uint32_t i = 0; i < KVT_HISTOGRAM_BUCKETS; i++) {
        seen += histogram->buckets[i];
        if (seen >= rank && seen > 0)
            return i + 1 == KVT_HISTOGRAM_BUCKETS ? histogram->ns_max
                                                  : KVT_MIN(bucket_end_ns(i), histogram->ns_max);
    }
    return 0;
}
