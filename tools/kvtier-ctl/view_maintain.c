/* What Maintain answered: how a drain and the scrubber stand. */
#include "tools/kvtier-ctl/view.h"

#include "tools/lib/json.h"
#include "tools/lib/table.h"

void kvt_ctl_view_drain(const struct kvt_ctl_view *view, const struct kvt_ans_maintain *answer)
{
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES], c[KVT_TEXT_BYTES];

    (void)fprintf(view->out, "written   %s copies, %s\n",
                  kvt_text_count(a, answer->drain.copies_written),
                  kvt_text_bytes(b, answer->drain.bytes_written));
    if (answer->drain.copies_failed > 0) {
        (void)fprintf(view->out, "failed    ");
        kvt_ctl_paint(view, KVT_CTL_PAINT_BAD, "%s copies",
                      kvt_text_count(a, answer->drain.copies_failed));
        (void)fputs(": L3 had no room for them, or is out of service (kvtier-ctl stats)\n",
                    view->out);
    }
    (void)fprintf(view->out, "lacking   %s copies now%s\n",
                  kvt_text_count(c, answer->drain.copies_left),
                  answer->drain.is_running ? ": the drain goes on, ask again"
                  : answer->drain.copies_left > answer->drain.copies_failed
                      ? ": some were stored since it began"
                      : "");
}

void kvt_ctl_view_scrub(const struct kvt_ctl_view *view, const struct kvt_ans_maintain *answer)
{
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];

    if (answer->scrub.is_running)
        (void)fprintf(view->out, "scrubber  reads %s a second\n",
                      kvt_text_bytes(a, answer->scrub.rate_bytes_per_s));
    else
        (void)fprintf(view->out, "scrubber  off\n");
    (void)fprintf(view->out, "checked   %s copies, %s, in %llu whole rounds\n",
                  kvt_text_count(a, answer->scrub.checked_copies),
                  kvt_text_bytes(b, answer->scrub.checked_bytes),
                  (unsigned long long)answer->scrub.rounds);
    (void)fprintf(view->out, "bad       ");
    kvt_ctl_paint(view, answer->scrub.bad_copies == 0 ? KVT_CTL_PAINT_GOOD : KVT_CTL_PAINT_BAD,
                  "%s", kvt_text_count(a, answer->scrub.bad_copies));
    (void)fputs(answer->scrub.bad_copies == 0 ? "\n" : ", dropped: each is a miss from now on\n",
                view->out);
    if (answer->scrub.skipped_copies > 0)
        (void)fprintf(view->out,
                      "skipped   %s copies that are too large for its buffers: give L2 "
                      "more\n",
                      kvt_text_count(a, answer->scrub.skipped_copies));
}

void kvt_ctl_json_maintain(FILE *out, const struct kvt_ans_maintain *answer)
{
    struct kvt_json json;

    kvt_json_begin(&json, out, false);
    kvt_json_object(&json, "drain");
    kvt_json_bool(&json, "is_running", answer->drain.is_running);
    kvt_json_u64(&json, "copies_left", answer->drain.copies_left);
    kvt_json_u64(&json, "copies_written", answer->drain.copies_written);
    kvt_json_u64(&json, "bytes_written", answer->drain.bytes_written);
    kvt_json_u64(&json, "copies_failed", answer->drain.copies_failed);
    kvt_json_end(&json);
    kvt_json_object(&json, "scrub");
    kvt_json_bool(&json, "is_running", answer->scrub.is_running);
    kvt_json_u64(&json, "rate_bytes_per_s", answer->scrub.rate_bytes_per_s);
    kvt_json_u64(&json, "checked_copies", answer->scrub.checked_copies);
    kvt_json_u64(&json, "checked_bytes", answer->scrub.checked_bytes);
    kvt_json_u64(&json, "bad_copies", answer->scrub.bad_copies);
    kvt_json_u64(&json, "skipped_copies", answer->scrub.skipped_copies);
    kvt_json_u64(&json, "rounds", answer->scrub.rounds);
    kvt_json_end(&json);
    kvt_json_finish(&json);
}
