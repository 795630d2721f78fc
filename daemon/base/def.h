/* The vocabulary of every file: result rules, attributes, assertions, small arithmetic.
 *
 * Results: 0 is done. Negative is -errno: something broke, pass it up unchanged (kvt_trace).
 * Positive is a KVT_<MOD>_E_* that the called header promised: the caller deals with it and never
 * forwards it. Any thread may use anything here; nothing has state. */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVT_MUST_USE __attribute__((warn_unused_result))
#define KVT_PRINTF(fmt_idx, args_idx) __attribute__((format(printf, fmt_idx, args_idx)))
#define KVT_LIKELY(x) __builtin_expect(!!(x), 1)
#define KVT_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define KVT_CACHE_LINE_BYTES 64u

#define KVT_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define KVT_CONTAINER_OF(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))
#define KVT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KVT_MAX(a, b) ((a) > (b) ? (a) : (b))

#define KVT_KIB (1024ull)
#define KVT_MIB (1024ull * 1024ull)
#define KVT_GIB (1024ull * 1024ull * 1024ull)
#define KVT_NS_PER_US (1000ull)
#define KVT_NS_PER_MS (1000ull * 1000ull)
#define KVT_NS_PER_S (1000ull * 1000ull * 1000ull)

/* Ends the process with the broken condition and its place. Never returns. */
__attribute__((noreturn)) void kvt_assert_failed(const char *condition, const char *file, int line);

/* Cheap checks of our own logic, on in every build. Input from disk, wire or a peer is validated,
 * never asserted. */
#define KVT_ASSERT(condition)                                                                      \
    do {                                                                                           \
        if (KVT_UNLIKELY(!(condition)))                                                            \
            kvt_assert_failed(#condition, __FILE__, __LINE__);                                     \
    } while (0)

/* For walks and recounts: on in debug and sanitizer builds only (-Ddebug_checks=true). */
#ifdef KVT_DEBUG_CHECKS
#define KVT_DEBUG_ASSERT(condition) KVT_ASSERT(condition)
#else
#define KVT_DEBUG_ASSERT(condition) ((void)(false && (condition))) /* compiled, never run */
#endif

/* Passes a negative result up; one place to put a breakpoint on every failure in the process. */
static inline int kvt_trace(int r)
{
    KVT_ASSERT(r < 0);
    return r;
}

/* @align is a power of two. The caller has bounded @value: these do not check for overflow. */
static inline uint64_t kvt_round_up(uint64_t value, uint64_t align)
{
    return (value + align - 1) & ~(align - 1);
}

static inline uint64_t kvt_round_down(uint64_t value, uint64_t align)
{
    return value & ~(align - 1);
}

static inline uint64_t kvt_div_up(uint64_t value, uint64_t by)
{
    return value / by + (value % by != 0);
}
