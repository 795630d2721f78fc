#include "daemon/base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct {
    int fd;
    bool is_terminal;
    _Atomic uint32_t level;
} log_state = {.fd = STDERR_FILENO, .level = KVT_LOG_INFO};

static const struct {
    const char *text;
    const char *journal; /* syslog priorities: 3 error, 4 warning, 6 informational, 7 debug */
} log_levels[KVT_LOG_LEVELS] = {
    [KVT_LOG_ERROR] = {"error", "<3>"},
    [KVT_LOG_WARN] = {"warn", "<4>"},
    [KVT_LOG_INFO] = {"info", "<6>"},
    [KVT_LOG_DEBUG] = {"debug", "<7>"},
};

void kvt_log_init(int fd, bool is_terminal)
{
    log_state.fd = fd;
    log_state.is_terminal = is_terminal;
}

void kvt_log_set_level(enum kvt_log_level level)
{
    KVT_ASSERT(level < KVT_LOG_LEVELS);
    atomic_store_explicit(&log_state.level, level, memory_order_relaxed);
}

enum kvt_log_level kvt_log_get_level(void)
{
    return atomic_load_explicit(&log_state.level, memory_order_relaxed);
}

const char *kvt_log_level_text(enum kvt_log_level level)
{
    return (unsigned)level < KVT_LOG_LEVELS ? log_levels[level].text : "?";
}

int kvt_log_level_parse(const char *text, enum kvt_log_level *ret_level)
{
    for (uint32_t i = 0; i < KVT_LOG_LEVELS; i++) {
        if (strcmp(text, log_levels[i].text) == 0) {
            *ret_level = (enum kvt_log_level)i;
            return 0;
        }
    }
    return -EINVAL;
}

bool kvt_log_site_admit(struct kvt_log_site *site, uint64_t now_ns, uint32_t *ret_left_out)
{
    uint64_t start = atomic_load_explicit(&site->window_start_ns, memory_order_relaxed);

    /* Two threads may both open a window: then a few lines more go out, never fewer. */
    if (start == 0 || now_ns - start >= KVT_LOG_WINDOW_NS) {
        atomic_store_explicit(&site->window_start_ns, now_ns, memory_order_relaxed);
        atomic_store_explicit(&site->lines, 0, memory_order_relaxed);
    }
    if (atomic_fetch_add_explicit(&site->lines, 1, memory_order_relaxed) >= KVT_LOG_BURST) {
        atomic_fetch_add_explicit(&site->left_out, 1, memory_order_relaxed);
        return false;
    }
    *ret_left_out = atomic_exchange_explicit(&site->left_out, 0, memory_order_relaxed);
    return true;
}

/* Appends to a line and never passes its end; returns the new length. */
KVT_PRINTF(4, 0)
static size_t append_args(char *line, size_t bytes_max, size_t at, const char *format, va_list args)
{
    int written = vsnprintf(line + at, bytes_max - at, format, args);

    return written < 0 ? at : KVT_MIN(bytes_max - 1, at + (size_t)written);
}

KVT_PRINTF(4, 5)
static size_t append(char *line, size_t bytes_max, size_t at, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    at = append_args(line, bytes_max, at, format, args);
    va_end(args);
    return at;
}

static size_t append_time(char *line, size_t bytes_max)
{
    uint64_t now_ns = kvt_clock_real_ns();
    time_t now_s = (time_t)(now_ns / KVT_NS_PER_S);
    struct tm tm;

    if (localtime_r(&now_s, &tm) == NULL)
        return 0;
    return append(line, bytes_max, 0, "%02d:%02d:%02d.%03u ", tm.tm_hour, tm.tm_min, tm.tm_sec,
                  (unsigned)(now_ns % KVT_NS_PER_S / KVT_NS_PER_MS));
}

void kvt_log_line(struct kvt_log_site *site, enum kvt_log_level level, const char *format, ...)
{
    char line[KVT_LOG_LINE_BYTES_MAX];
    int saved_errno = errno;
    uint32_t left_out;
    size_t at;
    va_list args;

    KVT_ASSERT(level < KVT_LOG_LEVELS);
    if (!kvt_log_site_admit(site, kvt_clock_mono_ns(), &left_out))
        return;
    if (log_state.is_terminal) {
        at = append_time(line, sizeof(line));
        at = append(line, sizeof(line), at, "%-5s ", log_levels[level].text);
    } else {
        at = append(line, sizeof(line), 0, "%s", log_levels[level].journal);
    }
    errno = saved_errno; /* for %m */
    va_start(args, format);
    at = append_args(line, sizeof(line) - 1, at, format, args);
    va_end(args);
    if (left_out != 0)
        at = append(line, sizeof(line) - 1, at, " (%u such lines before were left out)", left_out);
    line[at++] = '\n';
    (void)!write(log_state.fd, line, at);
    errno = saved_errno;
}
