/* Another process on the same GPU: this program again, with --child. It says and hears lines.
 *
 *   child "pool":  -> "pool HANDLE BYTES"          its memory, filled
 *                  <- "check SALT"  -> "wrong N"   bytes that are not what was to be loaded
 *                  <- "read HANDLE" -> "wrong N"   bytes of the slots, in place, that are not what
 *                                                  was stored
 *   child "loss":  -> "lost WHAT" | "kept"         what became of its context
 *                  -> "back" | "gone WHAT"         and whether it could be taken back
 *                  -> "wrong N"                    bytes, before and after
 */
#pragma once

#include <sys/types.h>

#include "tools/kvtier-gpu-check/blocks.h"

#define GPU_CHECK_LINE_BYTES 256u

struct gpu_check_child {
    pid_t pid; /* 0: none */
    int to, from;
    char line[GPU_CHECK_LINE_BYTES];
};

KVT_MUST_USE bool gpu_check_child_start(struct gpu_check *check, const char *part, const char *what,
                                        struct gpu_check_child *ret_child);
/* Its next line, without the end. False: it ended, or says nothing for a minute. */
KVT_MUST_USE bool gpu_check_child_hear(struct gpu_check_child *child);
KVT_MUST_USE bool gpu_check_child_say(struct gpu_check_child *child, const char *line);
/* Kills it if it lives; idempotent. */
void gpu_check_child_kill(struct gpu_check_child *child);

/* In the child: the exit status. */
int gpu_check_child_pool(struct gpu_check *check);
int gpu_check_child_loss(struct gpu_check *check);

/* The pool of a child, the same in both processes. */
static inline struct gpu_check_shape gpu_check_child_shape(const struct gpu_check *check)
{
    return (struct gpu_check_shape){.slots = 16,
                                    .pieces = GPU_CHECK_PIECES_MAX,
                                    .piece_bytes = check->options.is_small ? 512 : 8192,
                                    .parts = 1};
}
