/* The set of GPUs of L1: which become zones and which are refused, whose transfer it is, what is
 * pinned and exported, and that nothing is left open whatever fails. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tests/common/set_world.h"

static void fill(uint8_t *memory, uint32_t block, uint8_t salt)
{
    uint8_t *at = memory + (uint64_t)block * SET_WORLD_PAYLOAD_BYTES;

    for (uint32_t i = 0; i < SET_WORLD_PAYLOAD_BYTES; i++)
        at[i] = (uint8_t)(salt + block * 3 + i * 7 + i / 253);
}

static const uint8_t *block_of(const struct set_world *world, uint32_t device, uint32_t block)
{
    return world->pools[device].memory + (uint64_t)block * SET_WORLD_PAYLOAD_BYTES;
}

static void test_zones(void **state)
{
    struct set_world *world = set_world_new(3);
    struct kvt_device_gpu gpu;

    (void)state;
    world->config.gpus = "2, 0";
    assert_int_equal(set_world_open(world), 0);
    assert_string_equal(world->report.why, "");
    assert_int_equal(world->report.gpus_count, 2);
    assert_true(world->report.is_host_pinned);
    assert_int_equal(world->tier->zones_count, 2);
    assert_true(world->tier->capacity_bytes == 2 * SET_WORLD_ARENA_BYTES);
    assert_int_equal(world->tier->slot_align_bytes, KVT_GPU_SLOT_ALIGN_BYTES);
    assert_true(world->tier->payload_bytes_max == world->config.staging_bytes / 2);
    assert_true(world->tier->zones[1].base_bytes == SET_WORLD_ARENA_BYTES);
    assert_true(world->tier->zones[1].bytes == SET_WORLD_ARENA_BYTES);
    assert_int_equal(world->tier->zones[0].numa_node, -1);
    assert_memory_equal(world->tier->zones[0].name, "GPU 2 ", 6);
    assert_memory_equal(world->tier->zones[1].name, "GPU 0 ", 6);
    assert_memory_equal(world->tier->detail, "2 of 2 GPUs, the first: GPU 2 ", 30);
    assert_non_null(strstr(world->tier->detail, "arena of 4.00 MiB; L2 is pinned"));
    gpu = set_world_gpu(world, 0);
    assert_int_equal(gpu.index, 2);
    assert_int_equal(gpu.state, KVT_GPU_OK);
    assert_string_equal(gpu.why, "");
    assert_ptr_equal(gpu.tier_counters, world->tier->zones[0].counters);
    assert_non_null(gpu.counters);
    assert_int_equal(gpu.lost_ns, 0);
    assert_false(kvt_device_gpu(world->tier, 2, &gpu));
    assert_false(kvt_device_gpu(NULL, 0, &gpu));
    set_world_free(world);
}

/* Those that work are used. */
static void test_refused(void **state)
{
    struct set_world *world = set_world_new(3);
    struct kvt_device_gpu gpu;
    struct kvt_fake_cuda_open open;

    (void)state;
    kvt_fake_cuda_deinit();
    world->fake.devices[0].is_exclusive = world->fake.devices[0].is_busy = true;
    world->fake.devices[1].bytes = SET_WORLD_ARENA_BYTES + 2 * KVT_MIB;
    kvt_fake_cuda_init(&world->fake);
    assert_int_equal(set_world_open(world), 0);
    assert_int_equal(world->tier->zones_count, 1);
    assert_int_equal(world->report.gpus_count, 3);
    assert_true(world->tier->zones[0].base_bytes == 0);
    assert_int_equal(set_world_gpu(world, 0).index, 2);
    gpu = set_world_gpu(world, 1);
    assert_int_equal(gpu.state, KVT_GPU_REFUSED);
    assert_null(gpu.counters);
    assert_string_equal(gpu.why,
                        "GPU 0 is in exclusive mode: engines could not use it beside kvtierd: "
                        "nvidia-smi -c DEFAULT, or MPS");
    gpu = set_world_gpu(world, 2);
    assert_int_equal(gpu.index, 1);
    assert_non_null(strstr(gpu.why, "GPU 1: 4.00 MiB wanted + 2.00 MiB staging + 1.00 MiB"));
    assert_false(kvt_device_gpu(world->tier, 3, &gpu));
    set_world_close(world);
    /* None. */
    world->config.gpus = "0, 1";
    assert_int_equal(set_world_open(world), KVT_DEVICE_E_NONE);
    assert_string_equal(
        world->report.why,
        "none of 2 GPUs can be used; the first: GPU 0 is in exclusive mode: engines "
        "could not use it beside kvtierd: nvidia-smi -c DEFAULT, or MPS");
    assert_int_equal(world->report.refused_count, 2);
    assert_int_equal(world->report.refused[1].index, 1);
    assert_int_equal(world->report.refused[1].state, KVT_GPU_REFUSED);
    assert_true(world->report.refused[1].info.total_bytes > 0);
    assert_non_null(strstr(world->report.refused[1].why, "GPU 1: 4.00 MiB wanted + 2.00 MiB"));
    /* The context of a GPU that is not used does not stay. */
    kvt_fake_cuda_count(&open);
    assert_int_equal(open.allocations + open.registered + open.pinned, 0);
    /* Memory that somebody took in between. */
    world->config.gpus = "2";
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_ALLOC, 1, KVT_CUDA_NO_MEMORY);
    assert_int_equal(set_world_open(world), KVT_DEVICE_E_NONE);
    assert_string_equal(world->report.why, "GPU 2: its arena cannot be had: out of memory (lower "
                                           "tiers.l1.bytes)");
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_STREAM_NEW, 2, KVT_CUDA_UNKNOWN);
    assert_int_equal(set_world_open(world), KVT_DEVICE_E_NONE);
    assert_non_null(strstr(world->report.why, "GPU 2 cannot be used: "));
    assert_int_equal(set_world_open(world), 0);
    set_world_free(world);
}

/* What was found before is not asked again; what open does with it is the same. */
static void test_found_before(void **state)
{
    struct set_world *world = set_world_new(3);
    struct kvt_device_found *found = calloc(1, sizeof(*found));
    uint64_t asked;

    (void)state;
    assert_non_null(found);
    world->config.gpus = "2, 0, 7";
    kvt_probe_look(&world->calls, &world->config, found);
    assert_int_equal(found->result, 0);
    asked = kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_DEVICE_COUNT) +
            kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_DEVICE_INFO);
    assert_true(asked > 0);
    world->config.found = found;
    assert_int_equal(set_world_open(world), 0);
    assert_true(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_DEVICE_COUNT) +
                    kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_DEVICE_INFO) ==
                asked);
    free(found); /* it is the caller's */
    world->config.found = NULL;
    assert_int_equal(world->report.gpus_count, 3);
    assert_true(world->report.is_host_pinned);
    assert_int_equal(world->tier->zones_count, 2);
    assert_int_equal(set_world_gpu(world, 0).index, 2);
    assert_non_null(strstr(set_world_gpu(world, 2).why, "no GPU 7"));
    set_world_free(world);
}

static void test_none(void **state)
{
    struct set_world *world = set_world_new(0);
    struct kvt_tier *tier = NULL;

    (void)state;
    assert_int_equal(set_world_open(world), KVT_DEVICE_E_NONE);
    assert_string_equal(world->report.why, "no GPU");
    kvt_fake_cuda_deinit();
    world->fake.has_no_driver = true;
    kvt_fake_cuda_init(&world->fake);
    /* The same by the front door, whose table is the fake's here. */
    assert_int_equal(kvt_device_open(&tier, &world->config, &world->report), KVT_DEVICE_E_NONE);
    assert_string_equal(world->report.why, "no NVIDIA driver");
    assert_true(world->report.has_cuda);
    assert_null(tier);
    set_world_free(world);
}

static void expect_invalid(struct set_world *world, const char *why)
{
    assert_int_equal(set_world_open(world), -EINVAL);
    assert_string_equal(world->report.why, why);
    assert_int_equal(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_MEMORY_INFO), 0);
}

static void test_configuration_without_sense(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_device_config good = world->config;

    (void)state;
    world->config.pct = 10;
    expect_invalid(world, "tiers.l1.bytes is bytes or a share, one of them");
    world->config.bytes = 0;
    world->config.pct = 96;
    expect_invalid(world, "tiers.l1.bytes is more than 95 % of a GPU's memory");
    world->config = good;
    world->config.bytes = KVT_MIB;
    expect_invalid(world, "tiers.l1.bytes is less than 2 MiB");
    world->config = good;
    world->config.staging_bytes = 2 * KVT_MIB + 1;
    expect_invalid(world, "tiers.l1.staging is less than 2 MiB, or not of whole pages");
    world->config = good;
    world->config.streams = 5;
    expect_invalid(world, "tiers.l1.streams is 1 to 4");
    world->config = good;
    world->config.cpu_threads = 17;
    expect_invalid(world, "tiers.l1.cpu_threads is 0 to 16");
    world->config = good;
    world->config.inflight_bytes_max = 0;
    expect_invalid(world, "tiers.l1.inflight is 0");
    world->config = good;
    world->config.retry_min_ns = world->config.retry_max_ns + 1;
    expect_invalid(world, "tiers.l1.retry_min is 0, or more than tiers.l1.retry_max");
    world->config = good;
    world->config.gpus = "nvidia";
    assert_int_equal(set_world_open(world), -EINVAL);
    assert_non_null(strstr(world->report.why, "\"nvidia\" is not a GPU"));
    world->config = good;
    world->config.bytes = 0;
    world->config.pct = 10;
    assert_int_equal(set_world_open(world), 0);
    assert_true(world->tier->capacity_bytes ==
                kvt_round_down(256 * KVT_MIB / 100 * 10, KVT_HUGE_PAGE_BYTES));
    set_world_free(world);
}

/* Each transfer is done by the GPU that it belongs to. */
static void test_whose_transfer(void **state)
{
    struct set_world *world = set_world_new(2);
    struct kvt_xfer xfer = set_world_xfer(world, 3);
    const struct kvt_gpu_counters *counters[2];
    uint64_t done[2];

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    set_world_attach(world, 0);
    set_world_attach(world, 1);
    for (uint32_t i = 0; i < 2; i++)
        counters[i] = set_world_gpu(world, i).counters;
    /* Pool 1 -> L2, without a slot of L1: GPU 1. */
    fill(world->pools[1].memory, 4, 9);
    set_world_header(world, 2, &xfer);
    xfer.src = set_world_pool(world, 1, 4);
    xfer.dst = set_world_host(world, 2);
    assert_int_equal(set_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(kvt_slot_check(world->l2 + 2 * world->slot_bytes, &xfer.key), KVT_SLOT_OK);
    assert_int_equal(atomic_load(&counters[0]->path_transfers[KVT_GPU_FROM_ENGINE_KERNEL]) +
                         atomic_load(&counters[0]->path_transfers[KVT_GPU_FROM_ENGINE_COPY]),
                     0);
    assert_true(atomic_load(&world->tier->zones[1].counters->reads) +
                    atomic_load(&world->tier->zones[1].counters->writes) >
                0);
    /* L2 -> slots of each GPU -> the other's pool. */
    for (uint32_t i = 0; i < 2; i++) {
        xfer.src = set_world_host(world, 2);
        xfer.dst = set_world_slot(world, i, 5);
        done[i] = atomic_load(&world->tier->zones[i].counters->writes);
        assert_int_equal(set_world_run(world, &xfer), KVT_XFER_DONE);
        assert_true(atomic_load(&world->tier->zones[i].counters->writes) == done[i] + 1);
        xfer.src = xfer.dst;
        xfer.dst = set_world_pool(world, 1 - i, 7);
        assert_int_equal(set_world_run(world, &xfer), KVT_XFER_DONE);
        assert_memory_equal(block_of(world, 1 - i, 7), block_of(world, 1, 4),
                            SET_WORLD_PAYLOAD_BYTES);
    }
    assert_true(atomic_load(&world->tier->counters.reads) ==
                atomic_load(&world->tier->zones[0].counters->reads) +
                    atomic_load(&world->tier->zones[1].counters->reads));
    set_world_free(world);
}

/* More than it takes: a prefix; everything comes back once, from both. */
static void test_prefix(void **state)
{
    struct set_world *world = set_world_new(2);
    struct kvt_xfer xfers[64], *given[64], *back[64];
    uint32_t taken = 0, from[2] = {0};

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    assert_int_equal(world->tier->inflight_max, 32);
    set_world_attach(world, 0);
    set_world_attach(world, 1);
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t zone = i < 20 ? 0 : i % 2;

        fill(world->pools[zone].memory, i % SET_WORLD_BLOCKS, 1);
        xfers[i] = set_world_xfer(world, i + 1);
        xfers[i].src = set_world_pool(world, zone, i % SET_WORLD_BLOCKS);
        xfers[i].dst = set_world_slot(world, zone, i % 60);
        given[i] = &xfers[i];
    }
    assert_int_equal(kvt_tier_submit(world->tier, given, 64, &taken), 0);
    assert_int_equal(taken, 32);
    assert_int_equal(kvt_tier_submit(world->tier, given + 32, 1, &taken), KVT_TIER_E_FULL);
    (void)set_world_reap(world, back, 32);
    for (uint32_t i = 0; i < 32; i++) {
        assert_true(back[i] >= xfers && back[i] < xfers + 32);
        assert_int_equal(back[i]->status, KVT_XFER_DONE);
        back[i]->status = 54321; /* once */
        from[back[i]->dst.offset_bytes >= SET_WORLD_ARENA_BYTES]++;
    }
    assert_int_equal(from[0], 26);
    assert_int_equal(from[1], 6);
    assert_int_equal(kvt_tier_submit(world->tier, given + 32, 32, &taken), 0);
    assert_int_equal(taken, 32);
    (void)set_world_reap(world, back, 32);
    set_world_free(world);
}

static void test_not_pinned(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_xfer xfer = set_world_xfer(world, 3);
    struct kvt_device_host_pin pin;

    (void)state;
    assert_false(kvt_device_host_pin(NULL, &pin));
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_PIN, 1, KVT_CUDA_NO_MEMORY);
    assert_int_equal(set_world_open(world), 0);
    assert_false(world->report.is_host_pinned);
    assert_non_null(strstr(world->report.pin_why, "(2): is LimitMEMLOCK=infinity set?"));
    assert_true(kvt_device_host_pin(world->tier, &pin));
    assert_false(pin.is_pinned);
    assert_string_equal(pin.why, world->report.pin_why);
    assert_false(set_world_gpu(world, 0).is_host_pinned);
    assert_non_null(strstr(world->tier->detail, "L2 is not pinned ("));
    set_world_attach(world, 0);
    fill(world->pools[0].memory, 1, 5);
    set_world_header(world, 1, &xfer);
    xfer.src = set_world_pool(world, 0, 1);
    xfer.dst = set_world_host(world, 1);
    assert_int_equal(set_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(kvt_slot_check(world->l2 + world->slot_bytes, &xfer.key), KVT_SLOT_OK);
    set_world_close(world);
    world->config.host_memory = NULL;
    world->config.host_memory_bytes = 0;
    assert_int_equal(set_world_open(world), 0);
    assert_string_equal(world->report.pin_why, "there is no L2");
    assert_true(kvt_device_host_pin(world->tier, &pin));
    assert_false(pin.is_pinned);
    assert_string_equal(pin.why, "there is no L2");
    set_world_free(world);
}

static void test_export(void **state)
{
    struct set_world *world = set_world_new(2);
    struct kvt_device_export export;

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    assert_false(kvt_device_export(world->tier, 0, &export));
    assert_int_equal(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_IPC_EXPORT), 0);
    set_world_close(world);
    world->config.is_export_allowed = true;
    assert_int_equal(set_world_open(world), 0);
    assert_true(kvt_device_export(world->tier, 1, &export));
    assert_true(export.bytes == SET_WORLD_ARENA_BYTES);
    assert_int_equal(export.incarnation, 0);
    assert_memory_equal(export.uuid, set_world_gpu(world, 1).info.uuid, sizeof(export.uuid));
    assert_false(kvt_device_export(world->tier, 2, &export));
    assert_false(kvt_device_export(NULL, 0, &export));
    set_world_close(world);
    /* A GPU that gives no handle is used without. */
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_IPC_EXPORT, 1, KVT_CUDA_INVALID_VALUE);
    assert_int_equal(set_world_open(world), 0);
    assert_false(kvt_device_export(world->tier, 0, &export));
    assert_true(kvt_device_export(world->tier, 1, &export));
    /* And both are told as it is. */
    assert_false(set_world_gpu(world, 0).is_exported);
    assert_true(set_world_gpu(world, 1).is_exported);
    assert_true(set_world_gpu(world, 1).is_host_pinned);
    set_world_free(world);
}

/* Without IPC nothing is exported, whatever is allowed. */
static void test_no_ipc(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_device_gpu gpu;

    (void)state;
    kvt_fake_cuda_deinit();
    world->fake.devices[0].has_no_ipc = true;
    kvt_fake_cuda_init(&world->fake);
    world->config.is_export_allowed = true;
    assert_int_equal(set_world_open(world), 0);
    gpu = set_world_gpu(world, 0);
    assert_int_equal(gpu.state, KVT_GPU_OK);
    assert_false(gpu.info.has_ipc);
    assert_false(gpu.is_exported);
    set_world_free(world);
}

/* Whatever call fails while it is opened: it is open, or it is not, and nothing is left. */
static void test_each_call_fails(void **state)
{
    static const int errors[] = {KVT_CUDA_INVALID_VALUE, KVT_CUDA_NO_MEMORY, KVT_CUDA_ECC};
    uint32_t opened = 0, refused = 0, none = 0;

    (void)state;
    for (size_t e = 0; e < KVT_COUNT_OF(errors); e++) {
        bool has_failed = true;

        for (uint64_t nth = 1; has_failed; nth += 1 + nth / 12) {
            struct set_world *world = set_world_new(2);
            int r;

            world->config.is_export_allowed = true;
            world->config.retry_min_ns = world->config.retry_max_ns = KVT_NS_PER_S;
            kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, nth, errors[e]);
            r = set_world_open(world);
            has_failed = kvt_fake_cuda_has_failed();
            kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, 0, 0);
            assert_true(r == 0 || r == KVT_DEVICE_E_NONE);
            none += r == KVT_DEVICE_E_NONE;
            assert_true((r == 0) == (world->report.why[0] == '\0'));
            if (r == 0) {
                opened += world->tier->zones_count == 2;
                refused += world->tier->zones_count == 1;
            }
            set_world_free(world);
        }
    }
    assert_true(opened > 0 && refused > 0 && none > 0);
}

static void test_no_memory_of_ours(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth < 100; nth++) {
        struct alloc_fault fault = {.fail_at = nth};
        struct set_world *world = set_world_new(2);
        int r;

        kvt_alloc_set_fault(alloc_fault_nth, &fault);
        r = set_world_open(world);
        kvt_alloc_set_fault(NULL, NULL);
        assert_true(r == 0 || r == -ENOMEM || r == KVT_DEVICE_E_NONE);
        set_world_free(world);
        if (fault.seen < nth) {
            assert_true(nth > 3);
            return;
        }
    }
    fail_msg("allocations without end");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zones),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_found_before),
        cmocka_unit_test(test_none),
        cmocka_unit_test(test_configuration_without_sense),
        cmocka_unit_test(test_whose_transfer),
        cmocka_unit_test(test_prefix),
        cmocka_unit_test(test_not_pinned),
        cmocka_unit_test(test_export),
        cmocka_unit_test(test_no_ipc),
        cmocka_unit_test(test_each_call_fails),
        cmocka_unit_test(test_no_memory_of_ours),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
