#include "daemon/base/clock.h"

#include <time.h>

static uint64_t clock_ns(clockid_t id)
{
    struct timespec ts;

    KVT_ASSERT(clock_gettime(id, &ts) == 0);
    return (uint64_t)ts.tv_sec * KVT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

uint64_t kvt_clock_mono_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t kvt_clock_real_ns(void)
{
    return clock_ns(CLOCK_REALTIME);
}
