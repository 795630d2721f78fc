/* Cells are kept in one growing array, row after row; widths are found when printing, in displayed
 * characters (UTF-8 sequences count as one). Nothing here fails loudly: a table that lost cells
 * remembers it and print returns -ENOMEM. */
#include "tools/lib/table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"

struct kvt_table {
    char align[KVT_TABLE_COLUMNS_MAX];
    uint32_t columns_count;
    char **cells;
    size_t cells_count, cells_room;
    bool is_incomplete; /* memory was out */
};

struct kvt_table *kvt_table_new(const char *align)
{
    struct kvt_table *table;
    size_t columns = strlen(align);

    KVT_ASSERT(columns > 0 && columns <= KVT_TABLE_COLUMNS_MAX);
    table = kvt_alloc_zeroed(1, sizeof(*table));
    if (table == NULL)
        return NULL;
    memcpy(table->align, align, columns);
    table->columns_count = (uint32_t)columns;
    return table;
}

struct kvt_table *kvt_table_free(struct kvt_table *table)
{
    if (table == NULL)
        return NULL;
    for (size_t i = 0; i < table->cells_count; i++)
        free(table->cells[i]);
    free(table->cells);
    kvt_free(table);
    return NULL;
}

static bool make_room(struct kvt_table *table)
{
    size_t room = KVT_MAX(table->cells_room * 2, (size_t)64);
    char **cells;

    if (table->cells_count < table->cells_room)
        return true;
    cells = realloc(table->cells, room * sizeof(*cells));
    if (cells == NULL)
        return false;
    table->cells = cells;
    table->cells_room = room;
    return true;
}

void kvt_table_cell(struct kvt_table *table, const char *format, ...)
{
    char *text = NULL;
    va_list args;
    int r;

    if (table == NULL)
        return;
    va_start(args, format);
    r = vasprintf(&text, format, args);
    va_end(args);
    if (r < 0 || !make_room(table)) {
        table->is_incomplete = true;
        if (r >= 0)
            free(text);
        return;
    }
    table->cells[table->cells_count++] = text;
}

void kvt_table_end_row(struct kvt_table *table)
{
    if (table == NULL)
        return;
    while (table->cells_count % table->columns_count != 0 && !table->is_incomplete)
        kvt_table_cell(table, "%s", "");
}

void kvt_table_clear(struct kvt_table *table)
{
    if (table == NULL)
        return;
    while (table->cells_count > table->columns_count)
        free(table->cells[--table->cells_count]);
}

/* Displayed characters: bytes that do not continue a UTF-8 sequence. */
static uint32_t shown_width(const char *text)
{
    uint32_t width = 0;

    for (const char *at = text; *at != '\0'; at++)
        width += ((unsigned char)*at & 0xC0u) != 0x80u;
    return width;
}

static void print_blanks(FILE *out, uint32_t count, char blank)
{
    for (uint32_t i = 0; i < count; i++)
        fputc(blank, out);
}

static void print_cell(FILE *out, const char *text, uint32_t width, bool is_right, bool is_last)
{
    uint32_t pad = width - shown_width(text);

    if (is_right)
        print_blanks(out, pad, ' ');
    fputs(text, out);
    if (!is_right && !is_last)
        print_blanks(out, pad, ' ');
}

static void print_row(const struct kvt_table *table, size_t row, FILE *out,
                      enum kvt_table_style style, const uint32_t *widths)
{
    bool is_markdown = style == KVT_TABLE_MARKDOWN;
    uint32_t columns = table->columns_count;
    /* The header of a right-aligned column is right-aligned too. */
    for (uint32_t c = 0; c < columns; c++) {
        size_t at = row * columns + c;
        bool is_last = c + 1 == columns;

        if (is_markdown)
            fputs(c == 0 ? "| " : " | ", out);
        else if (c > 0)
            fputs("  ", out);
        print_cell(out, at < table->cells_count ? table->cells[at] : "", widths[c],
                   table->align[c] == 'r', is_last && !is_markdown);
    }
    fputs(is_markdown ? " |\n" : "\n", out);
}

static void print_rule(const struct kvt_table *table, FILE *out, const uint32_t *widths)
{
    for (uint32_t c = 0; c < table->columns_count; c++) {
        bool is_right = table->align[c] == 'r';

        fputs(c == 0 ? "|" : "", out);
        print_blanks(out, widths[c] + (is_right ? 1 : 2), '-');
        fputs(is_right ? ":|" : "|", out);
    }
    fputc('\n', out);
}

int kvt_table_print(const struct kvt_table *table, FILE *out, enum kvt_table_style style,
                    uint32_t indent)
{
    uint32_t widths[KVT_TABLE_COLUMNS_MAX] = {0};
    size_t rows;

    if (table == NULL)
        return kvt_trace(-ENOMEM);
    for (size_t i = 0; i < table->cells_count; i++) {
        uint32_t c = (uint32_t)(i % table->columns_count);
        uint32_t width = shown_width(table->cells[i]);

        widths[c] = KVT_MAX(widths[c], width);
    }
    rows = kvt_div_up(table->cells_count, table->columns_count);
    for (size_t row = 0; row < rows; row++) {
        print_blanks(out, indent, ' ');
        print_row(table, row, out, style, widths);
        if (row == 0 && style == KVT_TABLE_MARKDOWN) {
            print_blanks(out, indent, ' ');
            print_rule(table, out, widths);
        }
    }
    return table->is_incomplete ? kvt_trace(-ENOMEM) : 0;
}

const char *kvt_text_bytes(char buf[KVT_TEXT_BYTES], uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    size_t unit = 0;

    while (value >= 1024.0 && unit + 1 < KVT_COUNT_OF(units)) {
        value /= 1024.0;
        unit++;
    }
    (void)snprintf(buf, KVT_TEXT_BYTES, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return buf;
}

const char *kvt_text_count(char buf[KVT_TEXT_BYTES], uint64_t count)
{
    char digits[24];
    int length = snprintf(digits, sizeof(digits), "%llu", (unsigned long long)count);
    size_t at = 0;

    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0)
            buf[at++] = ',';
        buf[at++] = digits[i];
    }
    buf[at] = '\0';
    return buf;
}

const char *kvt_text_ns(char buf[KVT_TEXT_BYTES], uint64_t ns)
{
    static const struct {
        uint64_t ns;
        const char *unit;
    } scales[] = {{KVT_NS_PER_S, "s"}, {KVT_NS_PER_MS, "ms"}, {KVT_NS_PER_US, "µs"}};

    for (size_t i = 0; i < KVT_COUNT_OF(scales); i++) {
        double value = (double)ns / (double)scales[i].ns;

        if (ns >= scales[i].ns) {
            (void)snprintf(buf, KVT_TEXT_BYTES,
                           value < 10    ? "%.2f %s"
                           : value < 100 ? "%.1f %s"
                                         : "%.0f %s",
                           value, scales[i].unit);
            return buf;
        }
    }
    (void)snprintf(buf, KVT_TEXT_BYTES, "%llu ns", (unsigned long long)ns);
    return buf;
}

const char *kvt_text_share(char buf[KVT_TEXT_BYTES], uint64_t part, uint64_t whole)
{
    if (whole == 0)
        (void)snprintf(buf, KVT_TEXT_BYTES, "-");
    else
        (void)snprintf(buf, KVT_TEXT_BYTES, "%.1f %%", 100.0 * (double)part / (double)whole);
    return buf;
}

const char *kvt_text_rate(char buf[KVT_TEXT_BYTES], uint64_t bytes, uint64_t ns)
{
    if (ns == 0)
        (void)snprintf(buf, KVT_TEXT_BYTES, "-");
    else
        (void)snprintf(buf, KVT_TEXT_BYTES, "%.2f GB/s", (double)bytes / (double)ns);
    return buf;
}

const char *kvt_text_hex(char *buf, const uint8_t *data, uint32_t bytes)
{
    static const char digits[] = "0123456789abcdef";

    for (uint32_t i = 0; i < bytes; i++) {
        buf[2 * i] = digits[data[i] >> 4];
        buf[2 * i + 1] = digits[data[i] & 15];
    }
    buf[2 * bytes] = '\0';
    return buf;
}
