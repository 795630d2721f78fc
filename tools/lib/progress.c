/* [#########...............] 3,210/12,031  26 %  418/s  eta 21 s  note */
#include "tools/lib/progress.h"

#include <unistd.h>

#include "tools/lib/table.h"

#define BAR_CELLS 24u
#define SHOW_EVERY_NS (100 * KVT_NS_PER_MS)

void kvt_progress_begin(struct kvt_progress *progress, FILE *out, bool is_quiet, uint64_t now_ns)
{
    *progress = (struct kvt_progress){
        .out = out,
        .is_on = !is_quiet && isatty(fileno(out)) == 1,
        .started_ns = now_ns,
    };
}

void kvt_progress_show(struct kvt_progress *progress, uint64_t done, uint64_t total,
                       const char *note, uint64_t now_ns)
{
    char done_text[KVT_TEXT_BYTES], total_text[KVT_TEXT_BYTES], bar[BAR_CELLS + 1];
    double seconds = (double)(now_ns - progress->started_ns) / (double)KVT_NS_PER_S;
    double rate = seconds > 0 ? (double)done / seconds : 0;
    uint64_t cells = total > 0 ? KVT_MIN(done * BAR_CELLS / total, (uint64_t)BAR_CELLS) : 0;

    if (!progress->is_on || now_ns - progress->shown_ns < SHOW_EVERY_NS)
        return;
    progress->shown_ns = now_ns;
    for (uint32_t i = 0; i < BAR_CELLS; i++)
        bar[i] = i < cells ? '#' : '.';
    bar[BAR_CELLS] = '\0';
    fprintf(progress->out, "\r\033[K[%s] %s/%s  %.0f/s", bar, kvt_text_count(done_text, done),
            kvt_text_count(total_text, total), rate);
    if (rate > 0 && total > done)
        fprintf(progress->out, "  eta %.0f s", (double)(total - done) / rate);
    fprintf(progress->out, "  %s", note);
    (void)fflush(progress->out);
}

void kvt_progress_end(struct kvt_progress *progress)
{
    if (!progress->is_on)
        return;
    fputs("\r\033[K", progress->out);
    (void)fflush(progress->out);
}
