/* Copies from and to memory that another process can take away.
 *
 * A shared mapping raises SIGBUS when its file shrinks or a hole is punched where no page can be
 * had. One handler for the process: inside a guarded section of the thread that faulted it jumps
 * back and the section answers -EFAULT; anywhere else the signal does what it does by default.
 * install: init-only. run: tier threads; sections do not nest. */
#pragma once

#include "daemon/base/def.h"

KVT_MUST_USE int kvt_guard_install(void);

/* Runs @fn(@ctx) guarded. What fn returned, or -EFAULT when it was cut short: fn must hold no lock
 * and own nothing that needs undoing. */
KVT_MUST_USE int kvt_guard_run(int (*fn)(void *ctx), void *ctx);
