/* The handler finds its thread's jump target in thread-local storage. A guarded section costs one
 * sigsetjmp that does not save the signal mask: nanoseconds beside a copy of kilobytes. The mask is
 * taken from the interrupted context instead, only when there was a fault (a sanitizer may block
 * every signal while a handler runs, whatever the flags say). */
#include "daemon/base/guard.h"

#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

static _Thread_local sigjmp_buf *volatile guard_target;
static _Thread_local sigset_t guard_mask;

static void guard_on_sigbus(int signal_number, siginfo_t *info, void *context)
{
    sigjmp_buf *target = guard_target;
    struct sigaction dfl;

    /* A positive code: the kernel raised it for an access of this thread, nobody sent it. */
    if (target != NULL && info->si_code > 0) {
        guard_mask = ((const ucontext_t *)context)->uc_sigmask;
        siglongjmp(*target, 1);
    }
    memset(&dfl, 0, sizeof(dfl));
    dfl.sa_handler = SIG_DFL;
    (void)sigaction(signal_number, &dfl, NULL);
    if (info->si_code <= 0)
        (void)raise(signal_number);
    /* Else the access is repeated on return, and ends the process with a core at its place. */
}

int kvt_guard_install(void)
{
    struct sigaction action;

    memset(&action, 0, sizeof(action));
    action.sa_sigaction = guard_on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    (void)sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, NULL) < 0 ? kvt_trace(-errno) : 0;
}

int kvt_guard_run(int (*fn)(void *ctx), void *ctx)
{
    sigjmp_buf target;
    volatile int r = -EFAULT;

    KVT_ASSERT(guard_target == NULL);
    if (sigsetjmp(target, 0) == 0) {
        guard_target = &target;
        r = fn(ctx);
    } else {
        KVT_ASSERT(pthread_sigmask(SIG_SETMASK, &guard_mask, NULL) == 0);
    }
    guard_target = NULL;
    return r;
}
