/* The helper process of an index and the socket to it: start it, end it, say how it ended.
 *
 * It is started with posix_spawn (a fork would copy the page tables of the daemon's pools), gets
 * one end of a socket pair as descriptor 3 and nothing else of the daemon but standard error. It
 * asks the kernel to be killed when the thread that started it ends: that thread calls end first.
 * One thread. */
#pragma once

#include <sys/types.h>

#include "daemon/base/def.h"

#define KVT_PROCESS_TEXT_BYTES 64u
#define KVT_PROCESS_FD 3 /* of the socket, in the helper */

struct kvt_process {
    pid_t pid; /* 0: none */
    int fd;    /* our end: does not block, is closed on exec; -1: none */
};
#define KVT_PROCESS_NULL ((struct kvt_process){.pid = 0, .fd = -1})

/* `PROGRAM serve 3`. 0 or -errno, and nothing is left over. */
KVT_MUST_USE int kvt_process_start(struct kvt_process *process, const char *program);

/* Closes the socket, gives the process @grace_ns to end by itself, else kills it; it is reaped. How
 * it ended is in @text: "ended by SIGBUS", "ended with status 1", "did not end and was killed".
 * The signal that ended it, 0 for none. Nothing to do when there is no process. */
int kvt_process_end(struct kvt_process *process, uint64_t grace_ns,
                    char text[KVT_PROCESS_TEXT_BYTES]);
