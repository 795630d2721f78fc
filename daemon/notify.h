/* What the service manager is told. systemd.c speaks to systemd; systemd_none.c, chosen by meson
 * where libsystemd is absent, does nothing. Both do nothing when no manager listens
 * ($NOTIFY_SOCKET is unset). Main thread. */
#pragma once

#include "daemon/base/def.h"

/* The daemon serves. @status is one line: "L2 1 GiB (memfd, huge pages), L3 off". */
void kvt_notify_ready(const char *status);
/* It has begun to stop and needs up to @deadline_ns from now. */
void kvt_notify_stopping(uint64_t deadline_ns);
/* Why it failed to start or to go on. */
void kvt_notify_failed(const char *status, int error);
/* "systemd" or "none", for --version. */
const char *kvt_notify_kind(void);
