#include "daemon/base/doorbell.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/base/clock.h"

int kvt_doorbell_init(struct kvt_doorbell *bell)
{
    atomic_init(&bell->is_armed, false);
    bell->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return bell->fd < 0 ? kvt_trace(-errno) : 0;
}

void kvt_doorbell_deinit(struct kvt_doorbell *bell)
{
    if (bell->fd >= 0)
        (void)close(bell->fd);
    bell->fd = -1;
}

void kvt_doorbell_ring(struct kvt_doorbell *bell)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&bell->is_armed, memory_order_seq_cst) &&
        atomic_exchange_explicit(&bell->is_armed, false, memory_order_seq_cst)) {
        uint64_t one = 1;

        /* EAGAIN would mean a full counter: then the sleeper is woken already. */
        (void)!write(bell->fd, &one, sizeof(one));
    }
}

void kvt_doorbell_arm(struct kvt_doorbell *bell)
{
    atomic_store_explicit(&bell->is_armed, true, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
}

void kvt_doorbell_disarm(struct kvt_doorbell *bell)
{
    uint64_t count;

    if (!atomic_exchange_explicit(&bell->is_armed, false, memory_order_seq_cst))
        (void)!read(bell->fd, &count, sizeof(count));
}

void kvt_doorbell_wait(struct kvt_doorbell *bell, uint64_t timeout_ns)
{
    struct pollfd pfd = {.fd = bell->fd, .events = POLLIN};
    struct timespec ts = {
        .tv_sec = (time_t)(timeout_ns / KVT_NS_PER_S),
        .tv_nsec = (long)(timeout_ns % KVT_NS_PER_S),
    };

    (void)ppoll(&pfd, 1, timeout_ns == KVT_TIME_NEVER_NS ? NULL : &ts, NULL);
    kvt_doorbell_disarm(bell);
}
