#include "tools/kvtier-ctl/view.h"

#include <stdarg.h>
#include <string.h>

#include "tools/lib/table.h"

bool kvt_ctl_wants_color(enum kvt_ctl_color choice, bool is_terminal, const char *env_no_color)
{
    if (choice != KVT_CTL_COLOR_AUTO)
        return choice == KVT_CTL_COLOR_ALWAYS;
    return is_terminal && (env_no_color == NULL || env_no_color[0] == '\0');
}

void kvt_ctl_paint(const struct kvt_ctl_view *view, enum kvt_ctl_paint paint, const char *format,
                   ...)
{
    static const char *const codes[] = {
        [KVT_CTL_PAINT_GOOD] = "\033[32m",
        [KVT_CTL_PAINT_WARN] = "\033[33m",
        [KVT_CTL_PAINT_BAD] = "\033[31m",
        [KVT_CTL_PAINT_HEAD] = "\033[1m",
    };
    va_list args;

    if (view->is_color)
        (void)fputs(codes[paint], view->out);
    va_start(args, format);
    (void)vfprintf(view->out, format, args);
    va_end(args);
    if (view->is_color)
        (void)fputs("\033[0m", view->out);
}

/* Bytes of the well-formed UTF-8 sequence at @at that a terminal may see; 0: none. */
static uint32_t shown_sequence(const uint8_t *at, uint32_t bytes)
{
    uint32_t length, code;

    if (at[0] >= 0x20 && at[0] < 0x7f)
        return 1;
    if (at[0] < 0xc2 || at[0] > 0xf4)
        return 0;
    length = at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    if (length > bytes)
        return 0;
    code = at[0] & (0x7fu >> length);
    for (uint32_t i = 1; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (at[i] & 0x3fu);
    }
    if ((length == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) ||
        (length == 4 && (code < 0x10000 || code > 0x10ffff)))
        return 0;
    /* C1 controls, and marks that turn the direction of what follows. */
    if (code < 0xa0 || (code >= 0x200e && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
        (code >= 0x2066 && code <= 0x2069))
        return 0;
    return length;
}

const char *kvt_ctl_clean(char buf[KVT_CTL_TEXT_BYTES], struct kvt_text text)
{
    const uint32_t room = KVT_CTL_TEXT_BYTES - 3; /* "..", end */
    uint32_t used = 0, i = 0;

    while (i < text.bytes) {
        const uint8_t *at = (const uint8_t *)text.at + i;
        uint32_t length = shown_sequence(at, text.bytes - i);

        if (used + KVT_MAX(length, 4u) > room)
            break;
        if (length > 0) {
            memcpy(buf + used, at, length);
            used += length;
            i += length;
        } else {
            used += (uint32_t)snprintf(buf + used, 5, "\\x%02x", at[0]);
            i++;
        }
    }
    if (i < text.bytes)
        used += (uint32_t)snprintf(buf + used, 3, "..");
    buf[used] = '\0';
    return buf;
}

const char *kvt_ctl_duration(char buf[KVT_CTL_TEXT_BYTES], uint64_t ns)
{
    unsigned long long s = ns / KVT_NS_PER_S;

    if (s < 60)
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "%llu s", s);
    else if (s < 3600)
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "%llu min %02llu s", s / 60, s % 60);
    else if (s < 86400)
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "%llu h %02llu min", s / 3600, s / 60 % 60);
    else
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "%llu d %llu h", s / 86400, s / 3600 % 24);
    return buf;
}

const char *kvt_ctl_quant_text(uint32_t quant_kind)
{
    static const char *const names[] = {"none", "fp8_e4m3", "int8"};

    return quant_kind < KVT_COUNT_OF(names) ? names[quant_kind] : "unknown";
}

const char *kvt_ctl_kind_text(uint32_t component_kind)
{
    switch (component_kind) {
    case KVT_CTL_KIND_FULL:
        return "full";
    case KVT_CTL_KIND_WINDOW:
        return "window";
    case KVT_CTL_KIND_STATE:
        return "state";
    default:
        return "unknown";
    }
}

const char *kvt_ctl_tier_health_text(uint32_t health)
{
    static const char *const texts[] = {"ok", "out of service", "off"};

    return health < KVT_COUNT_OF(texts) ? texts[health] : "unknown";
}

const char *kvt_ctl_why_text(enum kvt_why why)
{
    switch (why) {
    case KVT_WHY_NONE:
        return "none";
    case KVT_WHY_NEVER_STORED:
        return "never_stored";
    case KVT_WHY_EVICTED:
        return "evicted";
    case KVT_WHY_OTHER_TIER:
        return "other_tier";
    case KVT_WHY_PENDING:
        return "pending";
    case KVT_WHY_CHECK_FAILED:
        return "check_failed";
    case KVT_WHY_INDEX_FULL:
        return "index_full";
    case KVT_WHY_OTHER_EPOCH:
        return "other_epoch";
    }
    return "unknown";
}

const char *kvt_ctl_component_name(char buf[KVT_CTL_TEXT_BYTES],
                                   const struct kvt_api_component *component)
{
    if (component->name.bytes > 0)
        return kvt_ctl_clean(buf, component->name);
    (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "%s", kvt_ctl_kind_text(component->kind));
    return buf;
}

void kvt_ctl_table_header(struct kvt_table *table, const char *const names[], size_t names_count)
{
    for (size_t i = 0; i < names_count; i++)
        kvt_table_cell(table, "%s", names[i]);
}

void kvt_ctl_table_print(const struct kvt_ctl_view *view, struct kvt_table *table)
{
    if (kvt_table_print(table, view->out, KVT_TABLE_PLAIN, 2) < 0)
        (void)fputs("  (out of memory: this table is not complete)\n", view->out);
    (void)kvt_table_free(table);
}
