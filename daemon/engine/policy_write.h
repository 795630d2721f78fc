/* The write policy: does a copy that is in host memory go to disk, now?
 *
 * Asked at two moments: when the copy became READY in L2, and when it has to leave L2 for room. It
 * sees a snapshot and answers; it moves nothing. The write budget is a token bucket: it fills with
 * the configured bytes a second up to one second's worth, and a write that it cannot pay is not
 * wanted now. Policy BACK writes whatever is evicted while the bucket is fuller than a quarter;
 * below that the budget is short, and goes to what was read selective_touches times: that is what
 * will be read again. Pure but for the bucket, which is the caller's; any one thread. */
#pragma once

#include "daemon/base/def.h"

enum kvt_write_policy { KVT_WRITE_BACK, KVT_WRITE_THROUGH, KVT_WRITE_SELECTIVE };

struct kvt_write_bucket {
    uint64_t rate_bytes_per_s; /* 0: no budget, everything is paid */
    uint64_t level_bytes;
    uint64_t filled_ns; /* when the level was right */
};

struct kvt_write_facts {
    enum kvt_write_policy policy;
    bool is_evicted;            /* it leaves L2; else it just became READY there */
    bool is_lower_on;           /* there is an L3, and it is in service */
    bool is_lower_busy;         /* L3 takes no more transfers now */
    uint32_t touches;           /* reads since it was stored (saturating) */
    uint32_t selective_touches; /* as many are worth a write: SELECTIVE, BACK on a short budget */
    uint64_t bytes;
};

enum kvt_write_verdict {
    KVT_WRITE_YES,
    KVT_WRITE_NOT_WANTED, /* by the policy */
    KVT_WRITE_NO_BUDGET,  /* the bucket is empty, or L3's queue is full */
    KVT_WRITE_NO_LOWER,
};

/* Lets the bucket fill up to @now_ns. */
void kvt_write_bucket_fill(struct kvt_write_bucket *bucket, uint64_t now_ns);
/* Answers, and takes the bytes of a YES from the (filled) bucket. */
enum kvt_write_verdict kvt_write_decide(const struct kvt_write_facts *facts,
                                        struct kvt_write_bucket *bucket);
