#include "daemon/base/steps.h"

#include "daemon/base/log.h"

static unsigned long long ms_since(uint64_t start_ns)
{
    return (kvt_clock_mono_ns() - start_ns) / KVT_NS_PER_MS;
}

int kvt_steps_start(const struct kvt_step *steps, uint32_t count, void *ctx)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t start_ns = kvt_clock_mono_ns();
        int r = steps[i].start(ctx);

        if (r < 0) {
            kvt_log_debug("start: %s failed after %llu ms", steps[i].name, ms_since(start_ns));
            kvt_steps_stop(steps, i, ctx);
            return kvt_trace(r);
        }
        KVT_ASSERT(r == 0);
        kvt_log_debug("start: %s, %llu ms", steps[i].name, ms_since(start_ns));
    }
    return 0;
}

void kvt_steps_stop(const struct kvt_step *steps, uint32_t count, void *ctx)
{
    for (uint32_t i = count; i-- > 0;) {
        uint64_t start_ns = kvt_clock_mono_ns();

        if (steps[i].undo == NULL)
            continue;
        steps[i].undo(ctx);
        kvt_log_debug("stop: %s, %llu ms", steps[i].name, ms_since(start_ns));
    }
}
