#include "daemon/base/arena.h"

#include <string.h>
#include <sys/mman.h>

int kvt_arena_init(struct kvt_arena *arena, size_t cap_bytes, size_t keep_bytes)
{
    void *base;

    *arena = KVT_ARENA_NULL;
    base = mmap(NULL, cap_bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return kvt_trace(-ENOMEM);
    arena->base = base;
    arena->cap_bytes = cap_bytes;
    arena->keep_bytes = keep_bytes;
    return 0;
}

void kvt_arena_deinit(struct kvt_arena *arena)
{
    if (arena->base != NULL)
        (void)munmap(arena->base, arena->cap_bytes);
    *arena = KVT_ARENA_NULL;
}

void *kvt_arena_alloc(struct kvt_arena *arena, size_t bytes)
{
    uint8_t *ptr;

    if (bytes > arena->cap_bytes - arena->used_bytes)
        return NULL;
    ptr = arena->base + arena->used_bytes;
    arena->used_bytes = KVT_MIN(arena->cap_bytes, kvt_round_up(arena->used_bytes + bytes, 16));
    arena->peak_bytes = KVT_MAX(arena->peak_bytes, arena->used_bytes);
    return ptr;
}

void *kvt_arena_array(struct kvt_arena *arena, size_t count, size_t bytes)
{
    size_t total;
    void *ptr;

    if (__builtin_mul_overflow(count, bytes, &total))
        return NULL;
    ptr = kvt_arena_alloc(arena, total);
    if (ptr != NULL)
        memset(ptr, 0, total);
    return ptr;
}

void kvt_arena_reset(struct kvt_arena *arena)
{
    if (arena->peak_bytes > arena->keep_bytes) {
        size_t keep = kvt_round_up(arena->keep_bytes, 4096);

        if (keep < arena->peak_bytes)
            (void)madvise(arena->base + keep, kvt_round_up(arena->peak_bytes, 4096) - keep,
                          MADV_DONTNEED);
        arena->peak_bytes = 0;
    }
    arena->used_bytes = 0;
}
