/* Lines for people, on standard error: one line a fact, in a sentence that names the object and the
 * number ("disk: slot 417: checksum mismatch").
 *
 * On a terminal a line has the time and the level's name; otherwise it has journald's "<N>" prefix
 * and nothing else (the journal has the time). A line is written by one write(), so lines of
 * threads do not mix. Modules below daemon/ do not log above debug: they return, and the first that
 * decides logs, once. error: someone must act. warn: degraded and going on. info: what an operator
 * wants to see of a healthy start and stop.
 *
 * Each call site lets KVT_LOG_BURST lines through in KVT_LOG_WINDOW_NS; the first line after that
 * says how many were left out. Any thread; set_level and init: init-only. errno is kept. */
#pragma once

#include <stdatomic.h>

#include "daemon/base/clock.h"
#include "daemon/base/def.h"

enum kvt_log_level { KVT_LOG_ERROR, KVT_LOG_WARN, KVT_LOG_INFO, KVT_LOG_DEBUG, KVT_LOG_LEVELS };

#define KVT_LOG_BURST 20u
#define KVT_LOG_WINDOW_NS (5u * KVT_NS_PER_S)
#define KVT_LOG_LINE_BYTES_MAX 1024u /* longer lines are cut */

struct kvt_log_site { /* one a call site, zero at start */
    _Atomic uint64_t window_start_ns;
    _Atomic uint32_t lines;
    _Atomic uint32_t left_out;
};

/* @fd is not owned. Without init: standard error, level info, journald's style. */
void kvt_log_init(int fd, bool is_terminal);
void kvt_log_set_level(enum kvt_log_level level);
enum kvt_log_level kvt_log_get_level(void);
/* "error", "warn", "info", "debug". */
const char *kvt_log_level_text(enum kvt_log_level level);
/* 0, or -EINVAL when @text names no level. */
KVT_MUST_USE int kvt_log_level_parse(const char *text, enum kvt_log_level *ret_level);

/* True when a line may go out at @now_ns; *ret_left_out is how many did not before it. */
bool kvt_log_site_admit(struct kvt_log_site *site, uint64_t now_ns, uint32_t *ret_left_out);

void kvt_log_line(struct kvt_log_site *site, enum kvt_log_level level, const char *format, ...)
    KVT_PRINTF(3, 4);

#define kvt_log(level, ...)                                                                        \
    do {                                                                                           \
        static struct kvt_log_site log_site;                                                       \
                                                                                                   \
        if ((level) <= kvt_log_get_level())                                                        \
            kvt_log_line(&log_site, (level), __VA_ARGS__);                                         \
    } while (0)
#define kvt_log_error(...) kvt_log(KVT_LOG_ERROR, __VA_ARGS__)
#define kvt_log_warn(...) kvt_log(KVT_LOG_WARN, __VA_ARGS__)
#define kvt_log_info(...) kvt_log(KVT_LOG_INFO, __VA_ARGS__)
#define kvt_log_debug(...) kvt_log(KVT_LOG_DEBUG, __VA_ARGS__)
