/* How a sleeping loop is woken: an eventfd that costs a system call only when somebody sleeps.
 *
 * The consumer sleeps in this order: arm, look at its rings once more, wait. A producer puts its
 * item on a ring first and rings after. Either the consumer's second look finds the item, or the
 * producer sees the armed flag and writes. ring: any thread. arm / wait / disarm: the one consumer.
 */
#pragma once

#include <stdatomic.h>

#include "daemon/base/def.h"

struct kvt_doorbell {
    int fd;
    atomic_bool is_armed;
};
#define KVT_DOORBELL_NULL ((struct kvt_doorbell){.fd = -1})

KVT_MUST_USE int kvt_doorbell_init(struct kvt_doorbell *bell);
void kvt_doorbell_deinit(struct kvt_doorbell *bell);
void kvt_doorbell_ring(struct kvt_doorbell *bell);
void kvt_doorbell_arm(struct kvt_doorbell *bell);
void kvt_doorbell_disarm(struct kvt_doorbell *bell);
/* Sleeps until rung or @timeout_ns passed (KVT_TIME_NEVER_NS: no limit); disarms. */
void kvt_doorbell_wait(struct kvt_doorbell *bell, uint64_t timeout_ns);
