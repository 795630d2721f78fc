#include "daemon/notify.h"

#include <systemd/sd-daemon.h>

void kvt_notify_ready(const char *status)
{
    (void)sd_notifyf(0, "READY=1\nSTATUS=%s", status);
}

void kvt_notify_stopping(uint64_t deadline_ns)
{
    (void)sd_notifyf(0, "STOPPING=1\nSTATUS=stopping\nEXTEND_TIMEOUT_USEC=%llu",
                     (unsigned long long)(deadline_ns / KVT_NS_PER_US + 5000000));
}

void kvt_notify_failed(const char *status, int error)
{
    (void)sd_notifyf(0, "STATUS=%s\nERRNO=%d", status, error < 0 ? -error : error);
}

const char *kvt_notify_kind(void)
{
    return "systemd";
}
