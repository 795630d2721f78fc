#include "tools/kvtier-ctl/view.h"

void kvt_ctl_view_doctor(const struct kvt_ctl_view *view, const struct kvt_ctl_report *report)
{
    static const struct {
        const char *text;
        enum kvt_ctl_paint paint;
    } levels[] = {
        [KVT_CTL_LEVEL_OK] = {"ok  ", KVT_CTL_PAINT_GOOD},
        [KVT_CTL_LEVEL_WARN] = {"warn", KVT_CTL_PAINT_WARN},
        [KVT_CTL_LEVEL_BAD] = {"bad ", KVT_CTL_PAINT_BAD},
    };
    uint32_t counts[3] = {0};

    for (uint32_t i = 0; i < report->count; i++) {
        const struct kvt_ctl_finding *finding = &report->findings[i];

        kvt_ctl_paint(view, levels[finding->level].paint, "%s", levels[finding->level].text);
        (void)fprintf(view->out, "  %-15s %s\n", finding->what, finding->text);
        if (finding->remedy[0] != '\0')
            (void)fprintf(view->out, "                      -> %s\n", finding->remedy);
        counts[finding->level]++;
    }
    (void)fprintf(view->out, "\n%u ok, %u to look at, %u bad\n", counts[KVT_CTL_LEVEL_OK],
                  counts[KVT_CTL_LEVEL_WARN], counts[KVT_CTL_LEVEL_BAD]);
}

bool kvt_ctl_is_degraded(const struct kvt_ans_stats *stats)
{
    for (uint32_t i = 0; i < stats->tiers_count; i++)
        if (stats->tiers[i].health == 1)
            return true;
    for (uint32_t i = 0; i < stats->devices_count; i++)
        if (stats->devices[i].health != KVT_DEVICE_OK ||
            stats->devices[i].index.state == KVT_DEVICE_INDEX_LOST)
            return true;
    for (uint32_t i = 0; i < stats->gpus_count; i++)
        if (stats->gpus[i].state != KVT_API_GPU_OK)
            return true;
    return stats->l1.why.bytes > 0;
}

void kvt_ctl_view_health(const struct kvt_ctl_view *view, const struct kvt_ctl_health *health)
{
    const struct kvt_ans_stats *stats = health->stats;
    char text[KVT_CTL_TEXT_BYTES];

    if (!health->is_serving)
        kvt_ctl_paint(view, KVT_CTL_PAINT_BAD, "not serving\n");
    else if (kvt_ctl_is_degraded(stats))
        kvt_ctl_paint(view, KVT_CTL_PAINT_WARN, "serving, degraded\n");
    else
        kvt_ctl_paint(view, KVT_CTL_PAINT_GOOD, "serving\n");
    for (uint32_t i = 0; i < stats->tiers_count; i++)
        if (stats->tiers[i].health == 1)
            (void)fprintf(view->out, "  L%u out of service: %s\n", stats->tiers[i].tier,
                          kvt_ctl_clean(text, stats->tiers[i].detail));
    if (stats->l1.why.bytes > 0)
        (void)fprintf(view->out, "  L1 is off: %s\n", kvt_ctl_clean(text, stats->l1.why));
    for (uint32_t i = 0; i < stats->gpus_count; i++)
        kvt_ctl_view_gpu_trouble(view, &stats->gpus[i]);
    for (uint32_t i = 0; i < stats->devices_count; i++) {
        const struct kvt_api_device_stats *device = &stats->devices[i];

        if (device->health != KVT_DEVICE_OK)
            (void)fprintf(view->out, "  %s %s\n", kvt_ctl_clean(text, device->path),
                          kvt_ctl_device_health_text(device->health));
        if (device->index.state == KVT_DEVICE_INDEX_LOST)
            (void)fprintf(view->out, "  the index of %s is lost\n",
                          kvt_ctl_clean(text, device->path));
    }
}
