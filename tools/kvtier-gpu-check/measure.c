#include "tools/kvtier-gpu-check/measure.h"

#include <stdlib.h>

#include "daemon/base/clock.h"

#define ROUNDS 5u
#define BATCH_NS (5u * KVT_NS_PER_MS) /* of one measurement: far above what polling adds */
#define REPEATS_MAX 256u

static bool run(struct gpu_check *check, const struct gpu_check_work *work, uint32_t repeats,
                uint64_t *ret_ns)
{
    uint64_t begin_ns = kvt_clock_mono_ns();

    for (uint32_t i = 0; i < repeats; i++)
        if (!gpu_check_ok(check, work->queue(check, work->arg), "a launch or copy"))
            return false;
    if (!gpu_check_wait(check))
        return false;
    *ret_ns = (kvt_clock_mono_ns() - begin_ns) / repeats;
    return true;
}

static int compare_ns(const void *a, const void *b)
{
    const uint64_t *one = a, *two = b;

    return *one < *two ? -1 : *one > *two;
}

bool gpu_check_measure(struct gpu_check *check, struct gpu_check_work *works, uint32_t count)
{
    uint64_t ns[GPU_CHECK_WORKS_MAX][ROUNDS];
    uint32_t repeats[GPU_CHECK_WORKS_MAX], rounds = 0;

    KVT_ASSERT(count <= GPU_CHECK_WORKS_MAX);
    for (uint32_t w = 0; w < count; w++) {
        uint64_t once_ns = 0;

        /* The first time pays for what is done once; the second is a measure. */
        for (uint32_t i = 0; i < 2; i++)
            if (!run(check, &works[w], 1, &once_ns))
                return false;
        repeats[w] = (uint32_t)KVT_MIN(BATCH_NS / KVT_MAX(once_ns, 1u) + 1, REPEATS_MAX);
        if (check->options.is_small)
            repeats[w] = 1;
    }
    while (rounds < ROUNDS && (rounds == 0 || !gpu_check_is_late(check))) {
        for (uint32_t w = 0; w < count; w++)
            if (!run(check, &works[w], repeats[w], &ns[w][rounds]))
                return false;
        rounds++;
    }
    for (uint32_t w = 0; w < count; w++) {
        qsort(ns[w], rounds, sizeof(ns[w][0]), compare_ns);
        works[w].ns = KVT_MAX(ns[w][rounds / 2], 1u);
    }
    return true;
}
