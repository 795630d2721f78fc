#include "daemon/notify.h"

void kvt_notify_ready(const char *status)
{
    (void)status;
}

void kvt_notify_stopping(uint64_t deadline_ns)
{
    (void)deadline_ns;
}

void kvt_notify_failed(const char *status, int error)
{
    (void)status;
    (void)error;
}

const char *kvt_notify_kind(void)
{
    return "none";
}
