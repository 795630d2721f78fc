/* How many bytes of one direction may be in flight. Pure; the tier's thread.
 *
 * Too few starve the device, more than it can use only adds latency. The window is measured in
 * rounds of completed bytes during which it was the limit. Each round is compared with the one
 * before a trial: a larger window is kept when it raised throughput by 4 %, a smaller one when it
 * lost less than 2 %; after a trial that failed the window rests for some rounds. */
#pragma once

#include "daemon/base/def.h"

struct kvt_disk_window {
    uint64_t bytes, inflight_bytes;
    bool is_fixed;
    /* The round. */
    uint64_t round_bytes, round_started_ns;
    bool was_limit;
    /* The trial. */
    uint64_t kept_bytes, kept_rate; /* window and bytes/s before it */
    bool is_trial, is_next_smaller;
    uint32_t rest_rounds;
};

/* @fixed_bytes 0: tuned, from 4 MiB. */
void kvt_disk_window_init(struct kvt_disk_window *window, uint64_t fixed_bytes);
/* Whether @bytes more may start; one transfer always may. Notes when the window was the limit. */
bool kvt_disk_window_has_room(struct kvt_disk_window *window, uint64_t bytes);
/* How many bytes have room now. */
uint64_t kvt_disk_window_room(const struct kvt_disk_window *window);
void kvt_disk_window_start(struct kvt_disk_window *window, uint64_t bytes, uint64_t now_ns);
void kvt_disk_window_done(struct kvt_disk_window *window, uint64_t bytes, uint64_t now_ns);
