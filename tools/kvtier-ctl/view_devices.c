/* The devices of L3 on the page of `kvtier-ctl stats`: one row each, one for its index, and a line
 * for what went wrong by kind. */
#include "tools/kvtier-ctl/view.h"

#include "tools/lib/table.h"

const char *kvt_ctl_device_health_text(uint32_t health)
{
    static const char *const texts[] = {
        [KVT_DEVICE_OK] = "ok", [KVT_DEVICE_OUT] = "out of service", [KVT_DEVICE_LOST] = "lost"};

    return health < KVT_COUNT_OF(texts) ? texts[health] : "unknown";
}

const char *kvt_ctl_index_state_text(uint32_t state)
{
    static const char *const texts[] = {[KVT_DEVICE_INDEX_LOADING] = "loading",
                                        [KVT_DEVICE_INDEX_SCANNING] = "rebuilding",
                                        [KVT_DEVICE_INDEX_READY] = "ready",
                                        [KVT_DEVICE_INDEX_LOST] = "lost",
                                        [KVT_DEVICE_INDEX_OFF] = "off"};

    return state < KVT_COUNT_OF(texts) ? texts[state] : "unknown";
}

uint64_t kvt_ctl_device_errors(const struct kvt_api_device_stats *device)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < device->errors_count; i++)
        sum += device->errors[i].value;
    return sum;
}

const char *kvt_ctl_index_progress(char buf[KVT_CTL_TEXT_BYTES],
                                   const struct kvt_api_index_stats *index)
{
    uint64_t done = index->loaded_rows, total = index->load_total_rows;

    if (index->state == KVT_DEVICE_INDEX_SCANNING) {
        done = index->scanned_bytes;
        total = index->scan_total_bytes;
    }
    if (index->state > KVT_DEVICE_INDEX_SCANNING || total == 0)
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "%s", kvt_ctl_index_state_text(index->state));
    else
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "%s %.0f %%",
                       kvt_ctl_index_state_text(index->state),
                       100.0 * (double)KVT_MIN(done, total) / (double)total);
    return buf;
}

/* "412 d", "11 y", "-". */
static const char *life_text(char buf[KVT_TEXT_BYTES], uint64_t days)
{
    if (days == KVT_DEVICE_LIFE_UNKNOWN)
        (void)snprintf(buf, KVT_TEXT_BYTES, "-");
    else if (days < 1000)
        (void)snprintf(buf, KVT_TEXT_BYTES, "%llu d", (unsigned long long)days);
    else
        (void)snprintf(buf, KVT_TEXT_BYTES, "%.0f y", (double)days / 365.25);
    return buf;
}

static void view_data(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"device",  "health", "used",    "capacity", "copies",
                                        "moving",  "read",   "written", "errors",   "outages",
                                        "in life", "DWPD",   "left"};
    struct kvt_table *table = kvt_table_new("llrrrrrrrrrrr");
    char path[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES];

    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->devices_count; i++) {
        const struct kvt_api_device_stats *device = &stats->devices[i];

        kvt_table_cell(table, "%s", kvt_ctl_clean(path, device->path));
        kvt_table_cell(table, "%s", kvt_ctl_device_health_text(device->health));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, device->used_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, device->capacity_bytes));
        kvt_table_cell(table, "%s", kvt_text_count(a, device->copies));
        kvt_table_cell(table, "%s", kvt_text_count(a, device->inflight));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, device->read_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, device->written_bytes));
        kvt_table_cell(table, "%s", kvt_text_count(a, kvt_ctl_device_errors(device)));
        kvt_table_cell(table, "%s", kvt_text_count(a, device->outages));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, device->life_written_bytes));
        kvt_table_cell(table, "%.2f", (double)device->dwpd_milli / 1000.0);
        kvt_table_cell(table, "%s", life_text(a, device->life_left_days));
    }
    kvt_ctl_table_print(view, table);
}

static void view_indexes(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"index of", "state",    "used",   "capacity",
                                        "commits",  "rows put", "copies", "drops",
                                        "refused",  "loaded",   "in"};
    struct kvt_table *table = kvt_table_new("llrrrrrrrrr");
    char text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES];

    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->devices_count; i++) {
        const struct kvt_api_index_stats *index = &stats->devices[i].index;

        kvt_table_cell(table, "%s", kvt_ctl_clean(text, stats->devices[i].path));
        kvt_table_cell(table, "%s", kvt_ctl_index_progress(text, index));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, index->used_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, index->capacity_bytes));
        kvt_table_cell(table, "%s", kvt_text_count(a, index->commits));
        kvt_table_cell(table, "%s", kvt_text_count(a, index->rows_put));
        kvt_table_cell(table, "%s", kvt_text_count(a, index->copies_put));
        kvt_table_cell(table, "%s", kvt_text_count(a, index->drops));
        kvt_table_cell(table, "%s", kvt_text_count(a, index->refused));
        kvt_table_cell(table, "%s", kvt_text_count(a, index->loaded_rows));
        kvt_table_cell(table, "%s", kvt_text_ns(a, index->load_ns));
    }
    kvt_ctl_table_print(view, table);
}

static void view_troubles(const struct kvt_ctl_view *view,
                          const struct kvt_api_device_stats *device)
{
    char text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES];

    if (device->health == KVT_DEVICE_OK && kvt_ctl_device_errors(device) == 0)
        return;
    (void)fprintf(view->out, "  %s: ", kvt_ctl_clean(text, device->path));
    kvt_ctl_paint(view, device->health == KVT_DEVICE_OK ? KVT_CTL_PAINT_WARN : KVT_CTL_PAINT_BAD,
                  "%s", kvt_ctl_device_health_text(device->health));
    if (device->out_ns > 0)
        (void)fprintf(view->out, " for %s", kvt_ctl_duration(text, device->out_ns));
    for (uint32_t i = 0; i < device->errors_count; i++) {
        const struct kvt_api_counter *kind = &device->errors[i];

        if (kind->value > 0)
            (void)fprintf(view->out, ", %s %s", kvt_text_count(a, kind->value), kind->name);
    }
    (void)fputc('\n', view->out);
}

void kvt_ctl_view_devices(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    if (stats->devices_count == 0)
        return;
    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "Devices of L3\n");
    view_data(view, stats);
    view_indexes(view, stats);
    for (uint32_t i = 0; i < stats->devices_count; i++)
        view_troubles(view, &stats->devices[i]);
    (void)fputc('\n', view->out);
}
