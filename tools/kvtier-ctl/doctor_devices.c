/* What a running daemon says of its L3 devices and their indexes, as findings. Pure. */
#include "tools/kvtier-ctl/view.h"

#include "tools/lib/table.h"

#define LIFE_DAYS_LOW 365u
#define INDEX_FULL_PCT 95u

static void check_health(struct kvt_ctl_report *report, const char *path,
                         const struct kvt_api_device_stats *device)
{
    char text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES];
    uint64_t errors = kvt_ctl_device_errors(device);

    if (device->health == KVT_DEVICE_OUT) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 device", "%s is out of service for %s", path,
                      kvt_ctl_duration(text, device->out_ns));
        kvt_ctl_found_remedy(report, "dmesg, smartctl and free space say what is wrong; it is "
                                     "tried again by itself, the other devices serve");
    } else if (device->health != KVT_DEVICE_OK) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 device", "%s is lost, and its blocks with it",
                      path);
        kvt_ctl_found_remedy(report, "replace it, or take it out of tiers.l3.path, and restart; "
                                     "the other devices serve");
    } else if (errors > 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 device", "%s had %s errors since the start",
                      path, kvt_text_count(a, errors));
        kvt_ctl_found_remedy(report, "by kind: kvtier-ctl stats. Bad checksums that come again "
                                     "are a device at its end; each was a miss, never wrong bytes");
    } else {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "L3 device", "%s is well, %llu outages so far",
                      path, (unsigned long long)device->outages);
    }
    if (device->life_left_days < LIFE_DAYS_LOW) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 wear",
                      "%s lasts %llu days more at the "
                      "present rate of writing (%.2f DWPD)",
                      path, (unsigned long long)device->life_left_days,
                      (double)device->dwpd_milli / 1000.0);
        kvt_ctl_found_remedy(report, "set tiers.l3.write_budget, or tiers.l3.write to selective");
    }
}

static void check_index(struct kvt_ctl_report *report, const char *path,
                        const struct kvt_api_index_stats *index)
{
    char text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];

    if (index->state == KVT_DEVICE_INDEX_LOST) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "L3 index", "of %s is lost", path);
        kvt_ctl_found_remedy(report, "the log says why; a restart builds it anew from the data "
                                     "(kvtierd --rebuild-l3 does so in any case)");
    } else if (index->state <= KVT_DEVICE_INDEX_SCANNING) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 index", "of %s: %s", path,
                      kvt_ctl_index_progress(text, index));
        kvt_ctl_found_remedy(report, "what is not loaded yet is a miss; it ends by itself");
    } else if (index->refused > 0 ||
               (index->capacity_bytes > 0 &&
                index->used_bytes / INDEX_FULL_PCT >= index->capacity_bytes / 100)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "L3 index",
                      "of %s is full: %s of %s, %llu rows did not fit", path,
                      kvt_text_bytes(a, index->used_bytes),
                      kvt_text_bytes(b, index->capacity_bytes), (unsigned long long)index->refused);
        kvt_ctl_found_remedy(report, "what is not in it does not survive a restart: raise "
                                     "tiers.l3.index_bytes");
    }
}

void kvt_ctl_check_devices(struct kvt_ctl_report *report, const struct kvt_ans_stats *stats)
{
    for (uint32_t i = 0; i < stats->devices_count; i++) {
        char path[KVT_CTL_TEXT_BYTES];

        (void)kvt_ctl_clean(path, stats->devices[i].path);
        check_health(report, path, &stats->devices[i]);
        check_index(report, path, &stats->devices[i].index);
    }
}
