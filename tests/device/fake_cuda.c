/* The fake itself: it is asynchronous, in order within a stream, it cannot be touched, it ends the
 * process for what is our bug, it shares memory between processes, it counts. What the tests of the
 * device tier rely on to be caught is caught here. */
#include "tests/common/fake_cuda.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define POOL_BYTES 65536u

static const struct kvt_cuda_calls *calls;

static int naive_gather(void *stream, const struct kvt_copy_batch *batch)
{
    const struct kvt_copy_job *jobs = (const struct kvt_copy_job *)(uintptr_t)batch->jobs;

    (void)stream;
    for (uint32_t j = 0; j < batch->jobs_count; j++) {
        const struct kvt_copy_piece *pieces =
            (const struct kvt_copy_piece *)(uintptr_t)jobs[j].pieces;
        const uint64_t *blocks = (const uint64_t *)(uintptr_t)jobs[j].blocks;

        for (uint32_t p = 0; p < jobs[j].pieces_count; p++)
            for (uint32_t b = 0; b < jobs[j].blocks_count; b++)
                memcpy((uint8_t *)(uintptr_t)(jobs[j].payload + pieces[p].payload_offset_bytes) +
                           (uint64_t)b * pieces[p].bytes,
                       (const uint8_t *)(uintptr_t)(pieces[p].base +
                                                    blocks[b] * pieces[p].stride_bytes),
                       pieces[p].bytes);
    }
    return 0;
}

static const struct kvt_kernels kernels = {.name = "naive", .gather = naive_gather};

static void start(uint64_t seed, uint32_t devices)
{
    struct kvt_fake_cuda_config config = {
        .seed = seed, .devices_count = devices, .kernels = &kernels};

    kvt_fake_cuda_init(&config);
    calls = kvt_cuda_calls();
    if (devices > 0)
        assert_int_equal(calls->set_device(0), 0);
}

static void wait_for(void *event)
{
    int r;

    do {
        r = calls->event_query(event);
    } while (r == KVT_CUDA_NOT_READY);
    assert_int_equal(r, 0);
}

/* Two copies on one stream keep their order; another stream's only with a wait. Without one, some
 * seed must show the other order, or the fake proves nothing. */
static uint32_t count_wrong(uint64_t seed, bool has_wait)
{
    uint64_t from, to;
    void *host, *one, *two, *filled, *done;
    uint32_t is_wrong;

    start(seed, 1);
    assert_int_equal(calls->alloc(4096, &from), 0);
    assert_int_equal(calls->alloc(4096, &to), 0);
    assert_int_equal(calls->alloc_pinned(4096, &host), 0);
    assert_int_equal(calls->stream_new(&one), 0);
    assert_int_equal(calls->stream_new(&two), 0);
    assert_int_equal(calls->event_new(&filled), 0);
    assert_int_equal(calls->event_new(&done), 0);
    memset(host, 7, 4096);
    assert_int_equal(calls->copy(from, (uintptr_t)host, 4096, KVT_CUDA_H2D, one), 0);
    assert_int_equal(calls->event_record(filled, one), 0);
    if (has_wait)
        wait_for(filled);
    assert_int_equal(calls->copy(to, from, 4096, KVT_CUDA_D2D, two), 0);
    assert_int_equal(calls->event_record(done, two), 0);
    wait_for(done);
    is_wrong = *kvt_fake_cuda_memory(to, 4096) != 7 || kvt_fake_cuda_memory(to, 4096)[4095] != 7;
    wait_for(filled);
    assert_int_equal(calls->event_free(filled), 0);
    assert_int_equal(calls->event_free(done), 0);
    assert_int_equal(calls->stream_free(one), 0);
    assert_int_equal(calls->stream_free(two), 0);
    assert_int_equal(calls->free(from), 0);
    assert_int_equal(calls->free(to), 0);
    assert_int_equal(calls->free_pinned(host), 0);
    kvt_fake_cuda_deinit();
    return is_wrong;
}

static void test_order(void **state)
{
    uint32_t wrong = 0;

    (void)state;
    for (uint64_t seed = 0; seed < 100; seed++) {
        assert_int_equal(count_wrong(seed, true), 0);
        wrong += count_wrong(seed, false);
    }
    assert_in_range(wrong, 10, 90);
}

struct scene { /* what a process does that has to end badly */
    uint64_t memory, other;
    void *host, *stream, *event;
};

static void scene_open(struct scene *scene)
{
    start(1, 2);
    assert_int_equal(calls->alloc(4096, &scene->memory), 0);
    assert_int_equal(calls->alloc_pinned(4096, &scene->host), 0);
    assert_int_equal(calls->stream_new(&scene->stream), 0);
    assert_int_equal(calls->event_new(&scene->event), 0);
    assert_int_equal(calls->set_device(1), 0);
    assert_int_equal(calls->alloc(4096, &scene->other), 0);
    assert_int_equal(calls->set_device(0), 0);
}

static void scene_run(struct scene *scene)
{
    (void)calls->event_record(scene->event, scene->stream);
    wait_for(scene->event);
}

static void touch(struct scene *s)
{
    *(volatile uint8_t *)(uintptr_t)s->memory = 1; /* NOLINT: it must fault */
}
static void overrun(struct scene *s)
{
    (void)calls->fill(s->memory + 4000, 0, 97, s->stream);
}
static void use_after_free(struct scene *s)
{
    assert_int_equal(calls->free(s->memory), 0);
    (void)calls->fill(s->memory, 0, 1, s->stream);
}
static void free_twice(struct scene *s)
{
    assert_int_equal(calls->free(s->memory), 0);
    (void)calls->free(s->memory);
}
static void copy_pageable(struct scene *s)
{
    static uint8_t bytes[16];

    (void)calls->copy(s->memory, (uintptr_t)bytes, 16, KVT_CUDA_H2D, s->stream);
}
static void copy_wrong_way(struct scene *s)
{
    (void)calls->copy((uintptr_t)s->host, s->memory, 16, KVT_CUDA_H2D, s->stream);
}
static void event_gone(struct scene *s)
{
    assert_int_equal(calls->event_free(s->event), 0);
    (void)calls->event_query(s->event);
}
static void stream_after_reset(struct scene *s)
{
    assert_int_equal(calls->device_reset(), 0);
    (void)calls->event_record(s->event, s->stream);
}
static void leave_open(struct scene *s)
{
    (void)s;
    kvt_fake_cuda_deinit();
}

/* Lists behind what is copied: one piece of @piece_bytes, one block with @id. */
static void gather(struct scene *s, uint64_t base, uint64_t payload, uint32_t piece_bytes,
                   uint64_t id, uint32_t piece_bytes_max)
{
    struct {
        struct kvt_copy_job job;
        struct kvt_copy_piece piece;
        uint64_t id;
    } *lists = (void *)kvt_fake_cuda_memory(s->memory + 3072, 1024);
    struct kvt_copy_batch batch = {
        .jobs_count = 1, .pieces_max = 1, .blocks_max = 1, .piece_bytes_max = piece_bytes_max};
    const uint64_t at = s->memory + 3072;

    lists->job = (struct kvt_copy_job){.payload = payload,
                                       .pieces = at + offsetof(__typeof__(*lists), piece),
                                       .blocks = at + offsetof(__typeof__(*lists), id),
                                       .pieces_count = 1,
                                       .blocks_count = 1};
    lists->piece =
        (struct kvt_copy_piece){.base = base, .stride_bytes = 1024, .bytes = piece_bytes};
    lists->id = id;
    batch.jobs = at;
    assert_int_equal(calls->kernels->gather(s->stream, &batch), 0);
    scene_run(s);
}
static void gather_outside(struct scene *s)
{
    gather(s, s->memory, s->memory + 2048, 1024, 4, 1024);
}
static void gather_other_gpu(struct scene *s)
{
    gather(s, s->other, s->memory, 1024, 0, 1024);
}
static void gather_small_shape(struct scene *s)
{
    gather(s, s->memory, s->memory + 2048, 1024, 0, 512);
}
static void gather_pointer(struct scene *s)
{
    gather(s, s->memory, (uintptr_t)s->host + 512, 1024, 0, 1024);
}

/* Both kinds of end are good: a fault, or the fake's own. */
static void assert_dies(void (*what)(struct scene *), const char *name)
{
    int status = 0;
    pid_t child = fork();

    if (child == 0) {
        struct scene scene;

        (void)signal(SIGSEGV, SIG_DFL);
        (void)signal(SIGABRT, SIG_DFL);
        (void)close(2);
        scene_open(&scene);
        what(&scene);
        _exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        fail_msg("nobody saw: %s", name);
}

static void gather_good(struct scene *s)
{
    gather(s, s->memory, s->memory + 2048, 1024, 1, 1024);
}

static void test_bugs_are_seen(void **state)
{
    struct scene scene;

    (void)state;
    assert_dies(touch, "a touch of device memory");
    assert_dies(overrun, "an overrun");
    assert_dies(use_after_free, "use after free");
    assert_dies(free_twice, "a second free");
    assert_dies(copy_pageable, "a copy from memory that is not pinned");
    assert_dies(copy_wrong_way, "a copy in the wrong direction");
    assert_dies(event_gone, "an event that is gone");
    assert_dies(stream_after_reset, "a stream of a context that is gone");
    assert_dies(leave_open, "things left open");
    assert_dies(gather_outside, "a block outside its pool");
    assert_dies(gather_other_gpu, "a kernel on another GPU's memory");
    assert_dies(gather_small_shape, "a launch that is too small");
    assert_dies(gather_pointer, "a pointer in place of an address");
    /* And what is right is not. */
    scene_open(&scene);
    memset(kvt_fake_cuda_memory(scene.memory + 1024, 1024), 9, 1024);
    gather_good(&scene);
    assert_int_equal(kvt_fake_cuda_memory(scene.memory + 2048, 1024)[1023], 9);
    assert_int_equal(calls->device_reset(), 0);
    assert_int_equal(calls->set_device(1), 0);
    assert_int_equal(calls->free(scene.other), 0);
    kvt_fake_cuda_deinit();
}

static void test_loss_and_reset(void **state)
{
    struct scene scene;
    struct kvt_fake_cuda_open open;
    uint64_t free_bytes, total_bytes, address;

    (void)state;
    scene_open(&scene);
    kvt_fake_cuda_set_reset_works(0, false);
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_COPY, 2, KVT_CUDA_ILLEGAL_ADDRESS);
    assert_int_equal(
        calls->copy(scene.memory, (uintptr_t)scene.host, 64, KVT_CUDA_H2D, scene.stream), 0);
    assert_false(kvt_fake_cuda_has_failed());
    assert_int_equal(
        calls->copy(scene.memory, (uintptr_t)scene.host, 64, KVT_CUDA_H2D, scene.stream),
        KVT_CUDA_ILLEGAL_ADDRESS);
    assert_true(kvt_fake_cuda_has_failed());
    assert_int_equal(calls->event_query(scene.event), KVT_CUDA_ILLEGAL_ADDRESS);
    assert_int_equal(calls->memory_info(&free_bytes, &total_bytes), KVT_CUDA_ILLEGAL_ADDRESS);
    assert_int_equal(calls->device_reset(), KVT_CUDA_ILLEGAL_ADDRESS);
    assert_int_equal(calls->set_device(0), KVT_CUDA_ILLEGAL_ADDRESS);
    kvt_fake_cuda_set_reset_works(0, true);
    assert_int_equal(calls->device_reset(), 0);
    assert_int_equal(calls->set_device(0), 0);
    assert_int_equal(calls->memory_info(&free_bytes, &total_bytes), 0);
    assert_int_equal(free_bytes, 255 * KVT_MIB);
    /* The other device never noticed. */
    assert_int_equal(calls->set_device(1), 0);
    assert_int_equal(calls->range_of(scene.other + 5, &address, &total_bytes), 0);
    assert_int_equal(address, scene.other);
    assert_int_equal(calls->alloc(256 * KVT_MIB, &address), KVT_CUDA_NO_MEMORY);
    assert_int_equal(calls->free(scene.other), 0);
    kvt_fake_cuda_count(&open);
    assert_int_equal(open.allocations + open.streams + open.events + open.pinned, 0);
    kvt_fake_cuda_deinit();
}

static void test_damage(void **state)
{
    struct scene scene;
    uint8_t *bytes;
    uint32_t bits = 0;

    (void)state;
    scene_open(&scene);
    bytes = kvt_fake_cuda_memory(scene.memory, 4096);
    memset(bytes, 0, 4096);
    memset(scene.host, 0, 4096);
    kvt_fake_cuda_flip(1);
    assert_int_equal(
        calls->copy(scene.memory, (uintptr_t)scene.host, 4096, KVT_CUDA_H2D, scene.stream), 0);
    scene_run(&scene);
    for (uint32_t i = 0; i < 4096; i++)
        bits += (uint32_t)__builtin_popcount(bytes[i]);
    assert_int_equal(bits, 1);
    assert_int_equal(kvt_fake_cuda_damaged(), 1);
    assert_int_equal(calls->device_reset(), 0);
    assert_int_equal(calls->set_device(1), 0);
    assert_int_equal(calls->free(scene.other), 0);
    kvt_fake_cuda_deinit();
}

/* ---- memory of others ------------------------------------------------------------------------ */

static void test_ipc_foreign(void **state)
{
    struct scene scene;
    struct kvt_fake_cuda_foreign foreign;
    struct kvt_fake_cuda_open open;
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    uint64_t address, again;

    (void)state;
    scene_open(&scene);
    memset(handle, 0x5a, sizeof(handle));
    assert_int_not_equal(calls->ipc_open(handle, &address), 0);
    assert_int_equal(calls->ipc_export(scene.memory, handle), 0);
    assert_int_equal(calls->ipc_open(handle, &address), KVT_CUDA_INVALID_CONTEXT);
    kvt_fake_cuda_foreign_new(&foreign, 0, POOL_BYTES);
    assert_int_equal(calls->ipc_open(foreign.handle, &address), 0);
    assert_int_equal(calls->ipc_open(foreign.handle, &again), 0);
    assert_int_equal(address, again);
    assert_int_equal(calls->fill(address + 100, 3, 50, scene.stream), 0);
    scene_run(&scene);
    assert_int_equal(foreign.memory[149], 3);
    assert_int_equal(foreign.memory[150], KVT_FAKE_CUDA_POISON);
    kvt_fake_cuda_count(&open);
    assert_int_equal(open.ipc_maps, 2);
    assert_int_equal(calls->ipc_close(address), 0);
    kvt_fake_cuda_foreign_free(&foreign);
    assert_int_equal(calls->fill(address, 3, 50, scene.stream), 0);
    (void)calls->event_record(scene.event, scene.stream);
    for (int i = 0; i < 1000 && calls->event_query(scene.event) == KVT_CUDA_NOT_READY; i++)
        continue;
    assert_int_equal(calls->event_query(scene.event), KVT_CUDA_ILLEGAL_ADDRESS);
    assert_int_equal(calls->device_reset(), 0);
    assert_int_equal(calls->set_device(1), 0);
    assert_int_equal(calls->free(scene.other), 0);
    kvt_fake_cuda_deinit();
}

/* A child makes memory, the parent writes to it, the child sees it; a dead child's is gone. */
static void test_ipc_processes(void **state)
{
    int up[2], down[2], status;
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES], byte = 0;
    uint64_t address;
    pid_t child;

    (void)state;
    assert_int_equal(pipe(up) | pipe(down), 0);
    child = fork();
    if (child == 0) {
        bool is_good;

        start(3, 1);
        is_good = calls->alloc(POOL_BYTES, &address) == 0 &&
                  calls->ipc_export(address, handle) == 0 &&
                  write(up[1], handle, sizeof(handle)) == (ssize_t)sizeof(handle) &&
                  read(down[0], &byte, 1) == 1 &&
                  kvt_fake_cuda_memory(address, POOL_BYTES)[POOL_BYTES - 1] == 0x42;
        _exit(is_good ? 0 : 1);
    }
    start(4, 1);
    assert_int_equal(read(up[0], handle, sizeof(handle)), sizeof(handle));
    assert_int_equal(calls->ipc_open(handle, &address), 0);
    kvt_fake_cuda_memory(address, POOL_BYTES)[POOL_BYTES - 1] = 0x42;
    assert_int_equal(write(down[1], &byte, 1), 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(calls->ipc_close(address), 0);
    assert_int_equal(calls->ipc_open(handle, &address), KVT_CUDA_INVALID_VALUE);
    kvt_fake_cuda_deinit();
    for (int i = 0; i < 2; i++) {
        (void)close(up[i]);
        (void)close(down[i]);
    }
}

static void test_what_is_there(void **state)
{
    struct kvt_fake_cuda_config config;
    struct kvt_cuda_info info;
    bool is_broken;
    int number;

    (void)state;
    assert_true(kvt_fake_cuda_parse("devices=2,bytes=64MiB,busy=1,seed=5", &config, &is_broken));
    assert_false(is_broken);
    config.kernels = &kernels;
    kvt_fake_cuda_init(&config);
    assert_int_equal(calls->device_count(&number), 0);
    assert_int_equal(number, 2);
    assert_int_equal(calls->device_info(1, &info), 0);
    assert_int_equal(info.total_bytes, 64 * KVT_MIB);
    assert_true(info.is_exclusive);
    assert_int_equal(calls->set_device(1), KVT_CUDA_DEVICES_UNAVAILABLE);
    kvt_fake_cuda_deinit();
    assert_true(kvt_fake_cuda_parse("driver=12020,devices=1", &config, &is_broken));
    kvt_fake_cuda_init(&config);
    assert_int_equal(calls->device_count(&number), KVT_CUDA_OLD_DRIVER);
    assert_int_equal(calls->driver_version(&number), 0);
    assert_int_equal(number, 12020);
    kvt_fake_cuda_deinit();
    start(1, 0);
    assert_int_equal(calls->device_count(&number), KVT_CUDA_NO_DEVICE);
    kvt_fake_cuda_deinit();
    assert_false(kvt_fake_cuda_parse("devicse=1", &config, &is_broken));
    assert_false(kvt_fake_cuda_parse("devices=x", &config, &is_broken));
    assert_false(kvt_fake_cuda_parse("devices=99", &config, &is_broken));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),          cmocka_unit_test(test_bugs_are_seen),
        cmocka_unit_test(test_loss_and_reset), cmocka_unit_test(test_damage),
        cmocka_unit_test(test_ipc_foreign),    cmocka_unit_test(test_ipc_processes),
        cmocka_unit_test(test_what_is_there),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
