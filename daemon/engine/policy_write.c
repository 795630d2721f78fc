#include "daemon/engine/policy_write.h"

void kvt_write_bucket_fill(struct kvt_write_bucket *bucket, uint64_t now_ns)
{
    uint64_t passed_ns, gained_bytes;

    if (bucket->rate_bytes_per_s == 0 || now_ns <= bucket->filled_ns)
        return;
    passed_ns = now_ns - bucket->filled_ns;
    if (bucket->filled_ns == 0 || passed_ns >= KVT_NS_PER_S) {
        bucket->level_bytes = bucket->rate_bytes_per_s;
        bucket->filled_ns = now_ns;
        return;
    }
    /* passed < 1 s: rate * passed overflows only above 18 GB/s; divide first there. */
    if (bucket->rate_bytes_per_s > UINT64_MAX / KVT_NS_PER_S)
        gained_bytes = bucket->rate_bytes_per_s / KVT_NS_PER_S * passed_ns;
    else
        gained_bytes = bucket->rate_bytes_per_s * passed_ns / KVT_NS_PER_S;
    if (gained_bytes == 0)
        return; /* keeps the time, so that slow rates gain at all */
    bucket->filled_ns = now_ns;
    if (gained_bytes > bucket->rate_bytes_per_s - bucket->level_bytes)
        bucket->level_bytes = bucket->rate_bytes_per_s;
    else
        bucket->level_bytes += gained_bytes;
}

/* A write larger than a second's worth is paid by a full bucket: else it could never be made. */
static bool bucket_pay(struct kvt_write_bucket *bucket, uint64_t bytes)
{
    if (bucket->rate_bytes_per_s == 0)
        return true;
    if (bytes > bucket->level_bytes) {
        if (bucket->level_bytes < bucket->rate_bytes_per_s)
            return false;
        bucket->level_bytes = 0;
        return true;
    }
    bucket->level_bytes -= bytes;
    return true;
}

#define SHORT_SHARE 4u /* of a second's worth; less is short */

static bool is_short(const struct kvt_write_bucket *bucket)
{
    return bucket->rate_bytes_per_s != 0 &&
           bucket->level_bytes < bucket->rate_bytes_per_s / SHORT_SHARE;
}

enum kvt_write_verdict kvt_write_decide(const struct kvt_write_facts *facts,
                                        struct kvt_write_bucket *bucket)
{
    if (!facts->is_lower_on)
        return KVT_WRITE_NO_LOWER;
    switch (facts->policy) {
    case KVT_WRITE_BACK:
        if (!facts->is_evicted)
            return KVT_WRITE_NOT_WANTED;
        if (is_short(bucket) && facts->touches < facts->selective_touches)
            return KVT_WRITE_NO_BUDGET;
        break;
    case KVT_WRITE_THROUGH:
        break;
    case KVT_WRITE_SELECTIVE:
        if (!facts->is_evicted || facts->touches < facts->selective_touches)
            return KVT_WRITE_NOT_WANTED;
        break;
    }
    if (facts->is_lower_busy || !bucket_pay(bucket, facts->bytes))
        return KVT_WRITE_NO_BUDGET;
    return KVT_WRITE_YES;
}
