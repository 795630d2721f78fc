/* Time. All times in the daemon are uint64_t nanoseconds of CLOCK_MONOTONIC, read once by a loop
 * and passed in; only what goes to disk is CLOCK_REALTIME. Any thread. */
#pragma once

#include "daemon/base/def.h"

#define KVT_TIME_NEVER_NS UINT64_MAX

uint64_t kvt_clock_mono_ns(void);
uint64_t kvt_clock_real_ns(void);

/* @now_ns + @delta_ns without wrapping: saturates at KVT_TIME_NEVER_NS. */
static inline uint64_t kvt_time_add(uint64_t now_ns, uint64_t delta_ns)
{
    return delta_ns > KVT_TIME_NEVER_NS - now_ns ? KVT_TIME_NEVER_NS : now_ns + delta_ns;
}
