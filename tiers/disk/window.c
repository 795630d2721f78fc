#include "tiers/disk/window.h"

#define WINDOW_BYTES_FIRST (4u * KVT_MIB)
#define WINDOW_BYTES_MIN (1u * KVT_MIB)
#define WINDOW_BYTES_MAX (64u * KVT_MIB)
#define ROUND_WINDOWS 16u /* a round is this many windows of bytes, and at least ROUND_NS */
#define ROUND_NS (20u * KVT_NS_PER_MS)
#define REST_ROUNDS 16u

void kvt_disk_window_init(struct kvt_disk_window *window, uint64_t fixed_bytes)
{
    *window = (struct kvt_disk_window){
        .bytes = fixed_bytes != 0 ? fixed_bytes : WINDOW_BYTES_FIRST,
        .is_fixed = fixed_bytes != 0,
    };
}

bool kvt_disk_window_has_room(struct kvt_disk_window *window, uint64_t bytes)
{
    if (window->inflight_bytes == 0 || window->inflight_bytes + bytes <= window->bytes)
        return true;
    window->was_limit = true;
    return false;
}

uint64_t kvt_disk_window_room(const struct kvt_disk_window *window)
{
    return window->bytes - KVT_MIN(window->inflight_bytes, window->bytes);
}

void kvt_disk_window_start(struct kvt_disk_window *window, uint64_t bytes, uint64_t now_ns)
{
    /* A pause is not slowness of the device: the round begins anew. */
    if (window->inflight_bytes == 0) {
        window->round_bytes = 0;
        window->round_started_ns = now_ns;
        window->was_limit = false;
    }
    window->inflight_bytes += bytes;
}

static void trial_begin(struct kvt_disk_window *window, uint64_t rate)
{
    uint64_t step = KVT_MAX(window->bytes / 4, WINDOW_BYTES_MIN);

    window->kept_bytes = window->bytes;
    window->kept_rate = rate;
    window->is_trial = true;
    if (window->is_next_smaller)
        window->bytes = KVT_MAX(window->bytes - KVT_MIN(step, window->bytes), WINDOW_BYTES_MIN);
    else
        window->bytes = KVT_MIN(window->bytes + step, WINDOW_BYTES_MAX);
}

static void trial_end(struct kvt_disk_window *window, uint64_t rate)
{
    bool is_good = window->is_next_smaller ? rate * 100 >= window->kept_rate * 98
                                           : rate * 100 >= window->kept_rate * 104;

    window->is_trial = false;
    if (is_good)
        return;
    window->bytes = window->kept_bytes;
    window->is_next_smaller = !window->is_next_smaller;
    window->rest_rounds = REST_ROUNDS;
}

void kvt_disk_window_done(struct kvt_disk_window *window, uint64_t bytes, uint64_t now_ns)
{
    uint64_t elapsed_ns = now_ns - window->round_started_ns, rate;

    KVT_ASSERT(bytes <= window->inflight_bytes);
    window->inflight_bytes -= bytes;
    window->round_bytes += bytes;
    if (window->is_fixed || window->round_bytes < ROUND_WINDOWS * window->bytes ||
        elapsed_ns < ROUND_NS)
        return;
    /* KiB a second: fits, whatever the device. */
    rate = window->round_bytes / KVT_KIB * KVT_NS_PER_S / elapsed_ns;
    if (window->was_limit) {
        if (window->is_trial)
            trial_end(window, rate);
        else if (window->rest_rounds > 0)
            window->rest_rounds--;
        else
            trial_begin(window, rate);
    }
    window->round_bytes = 0;
    window->round_started_ns = now_ns;
    window->was_limit = false;
}
