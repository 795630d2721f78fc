/* The handler finds its thread's jump target in thread-local storage. SA_NODEFER keeps SIGBUS
 * deliverable after the jump without a system call to restore the mask, so a guarded section costs
 * one sigsetjmp: tens of nanoseconds beside a copy of kilobytes. */
#include "daemon/base/guard.h"

#include <setjmp.h>
#include <signal.h>
#include <string.h>

static _Thread_local sigjmp_buf *volatile guard_target;

static void guard_on_sigbus(int signal_number, siginfo_t *info, void *context)
{
    sigjmp_buf *target = guard_target;
    struct sigaction dfl;

    (void)context;
    /* A positive code: the kernel raised it for an access of this thread, nobody sent it. */
    if (target != NULL && info->si_code > 0)
        siglongjmp(*target, 1);
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
    }
    guard_target = NULL;
    return r;
}
