#include "daemon/base/tsan.h"

#if defined(__SANITIZE_THREAD__)
#define KVT_HAS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVT_HAS_TSAN 1
#endif
#endif

#ifdef KVT_HAS_TSAN
void __tsan_acquire(void *at);
void __tsan_release(void *at);

void kvt_tsan_release(void *at)
{
    __tsan_release(at);
}

void kvt_tsan_acquire(void *at)
{
    __tsan_acquire(at);
}
#else
void kvt_tsan_release(void *at)
{
    (void)at;
}

void kvt_tsan_acquire(void *at)
{
    (void)at;
}
#endif
