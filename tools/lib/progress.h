/* A progress line on a terminal; nothing at all when the stream is not one. One thread. */
#pragma once

#include <stdio.h>

#include "daemon/base/def.h"

struct kvt_progress {
    FILE *out;
    bool is_on;
    uint64_t started_ns, shown_ns;
};

/* @is_quiet: never shows anything. */
void kvt_progress_begin(struct kvt_progress *progress, FILE *out, bool is_quiet, uint64_t now_ns);
/* Shows @done of @total and @note, at most ten times a second. */
void kvt_progress_show(struct kvt_progress *progress, uint64_t done, uint64_t total,
                       const char *note, uint64_t now_ns);
void kvt_progress_end(struct kvt_progress *progress); /* clears the line */
