/* Start and stop as a table of named steps, each with its undo.
 *
 *   start:  step 0, step 1, ... step n-1        a failure at k undoes k-1 ... 0
 *   stop:   undo n-1 ... undo 0
 *
 * A step that fails has undone what it did itself and has logged why: the table only logs names and
 * durations. start and undo run on the caller's thread. */
#pragma once

#include "daemon/base/def.h"

struct kvt_step {
    const char *name; /* "L2 host memory": "started L2 host memory in 812 ms" */
    int (*start)(void *ctx);
    void (*undo)(void *ctx); /* NULL: nothing to undo */
};

/* 0 and all are started, or the -errno of the step that failed and none is. */
KVT_MUST_USE int kvt_steps_start(const struct kvt_step *steps, uint32_t count, void *ctx);
/* After a start that succeeded: undoes all, last first. */
void kvt_steps_stop(const struct kvt_step *steps, uint32_t count, void *ctx);
