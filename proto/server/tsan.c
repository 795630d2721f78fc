#include "proto/server/internal.h"

/* libgrpc is not instrumented, so that a thread sanitizer misses that what was written before a
 * batch was started is visible where its completion is taken. In other builds these do nothing. */
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

void kvt_tag_release(struct kvt_tag *tag)
{
    __tsan_release(tag);
}

void kvt_tag_acquire(struct kvt_tag *tag)
{
    __tsan_acquire(tag);
}
#else
void kvt_tag_release(struct kvt_tag *tag)
{
    (void)tag;
}

void kvt_tag_acquire(struct kvt_tag *tag)
{
    (void)tag;
}
#endif
