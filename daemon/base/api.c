#include "daemon/base/api.h"

#include <stdarg.h>
#include <stdio.h>

#define LIMIT 1e15 /* of numbers for people: exact in a double, far from the end of 64 bits */
#define SAMPLE_NS_MIN (3600 * KVT_NS_PER_S)

void kvt_op_fail(struct kvt_op *op, enum kvt_code code, const char *format, ...)
{
    va_list args;

    KVT_ASSERT(code != KVT_CODE_OK);
    op->code = code;
    va_start(args, format);
    (void)vsnprintf(op->message, sizeof(op->message), format, args);
    va_end(args);
}

void kvt_api_device_wear(struct kvt_api_device_stats *device, uint64_t uptime_ns)
{
    const double day_ns = 86400.0 * (double)KVT_NS_PER_S;
    double bytes_a_day, left_days;
    uint64_t left_bytes = 0;

    device->dwpd_milli = 0;
    device->life_left_days = KVT_DEVICE_LIFE_UNKNOWN;
    if (uptime_ns == 0)
        return;
    bytes_a_day = (double)device->written_bytes * day_ns / (double)uptime_ns;
    if (device->capacity_bytes > 0)
        device->dwpd_milli =
            (uint64_t)KVT_MIN(bytes_a_day * 1000.0 / (double)device->capacity_bytes, LIMIT);
    if (device->endurance_bytes == 0)
        return;
    if (device->life_written_bytes < device->endurance_bytes)
        left_bytes = device->endurance_bytes - device->life_written_bytes;
    if (left_bytes == 0)
        device->life_left_days = 0;
    if (left_bytes == 0 || device->written_bytes == 0 || uptime_ns < SAMPLE_NS_MIN)
        return;
    left_days = (double)left_bytes / bytes_a_day;
    device->life_left_days = (uint64_t)KVT_MIN(left_days, LIMIT);
}

const char *kvt_op_kind_text(enum kvt_op_kind kind)
{
    static const char *const texts[KVT_OP_KINDS] = {
        [KVT_OP_OPEN_NAMESPACE] = "OpenNamespace",
        [KVT_OP_ATTACH] = "Attach",
        [KVT_OP_DETACH] = "Detach",
        [KVT_OP_LOOKUP] = "Lookup",
        [KVT_OP_PROMOTE] = "Promote",
        [KVT_OP_RESERVE] = "Reserve",
        [KVT_OP_DEMOTE] = "Demote",
        [KVT_OP_QUIESCE] = "Quiesce",
        [KVT_OP_RELEASE] = "Release",
        [KVT_OP_EVICT] = "Evict",
        [KVT_OP_RESET] = "Reset",
        [KVT_OP_STATS] = "Stats",
        [KVT_OP_DUMP] = "Dump",
        [KVT_OP_HEALTH] = "Health",
        [KVT_OP_MAINTAIN] = "Maintain",
    };

    return (unsigned)kind < KVT_OP_KINDS ? texts[kind] : "?";
}
