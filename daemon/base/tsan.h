/* Order that a thread sanitizer cannot see, because it is made inside a library that is not
 * instrumented (gRPC, io_uring's kernel side): what was written before release(@at) is visible
 * after acquire(@at). In other builds these do nothing. Any thread. */
#pragma once

void kvt_tsan_release(void *at);
void kvt_tsan_acquire(void *at);
