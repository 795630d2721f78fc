/* Every kernel against the CPU reference. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tools/kvtier-gpu-check/cases.h"

#define DATA_BYTES (8u << 20)
#define DATA_BYTES_SMALL (1u << 20)
#define LISTS_BYTES (64u << 10)
#define TWIN_ALIGN_BYTES 4096u

struct scene {
    struct gpu_check *check;
    struct gpu_check_memory data, lists;
    uint8_t *twin, *twin_lists;
    uint64_t data_bytes;
};

static bool scene_open(struct scene *scene, struct gpu_check *check)
{
    *scene = (struct scene){.check = check,
                            .data_bytes = check->options.is_small ? DATA_BYTES_SMALL : DATA_BYTES};
    scene->twin = aligned_alloc(TWIN_ALIGN_BYTES, scene->data_bytes);
    scene->twin_lists = aligned_alloc(TWIN_ALIGN_BYTES, LISTS_BYTES);
    if (scene->twin == NULL || scene->twin_lists == NULL)
        return gpu_check_failed(check, "correct", "memory of this process", 0);
    return gpu_check_memory_new(check, &scene->data, scene->data_bytes, true) &&
           gpu_check_memory_new(check, &scene->lists, LISTS_BYTES, true);
}

static void scene_close(struct scene *scene)
{
    gpu_check_memory_free(scene->check, &scene->data);
    gpu_check_memory_free(scene->check, &scene->lists);
    free(scene->twin);
    free(scene->twin_lists);
}

static void fill(uint8_t *memory, uint64_t bytes, uint64_t *random)
{
    for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = gpu_check_random(random);

        memcpy(memory + at, &word, sizeof(word));
    }
}

static uint64_t count_wrong(const uint8_t *a, const uint8_t *b, uint64_t bytes)
{
    uint64_t wrong = 0;

    if (memcmp(a, b, bytes) == 0)
        return 0;
    for (uint64_t i = 0; i < bytes; i++)
        wrong += a[i] != b[i];
    return wrong;
}

/* 1: compared. 0: it had no room. -1: broken. */
static int run_case(struct scene *scene, const struct gpu_check_kind *kind, uint32_t number,
                    uint64_t *ret_wrong)
{
    struct gpu_check *check = scene->check;
    struct gpu_check_side twin = {.data = (uintptr_t)scene->twin,
                                  .data_bytes = scene->data_bytes,
                                  .lists_memory = scene->twin_lists,
                                  .lists = (uintptr_t)scene->twin_lists,
                                  .lists_bytes = LISTS_BYTES,
                                  .random = gpu_check_random(&check->random),
                                  .number = number};
    struct gpu_check_side real = twin;
    union gpu_check_batch batch = {0}, twin_batch = {0};

    real.data = scene->data.device;
    real.lists_memory = scene->lists.host;
    real.lists = scene->lists.device;
    memset(scene->lists.host, 0, LISTS_BYTES);
    memset(scene->twin_lists, 0, LISTS_BYTES);
    kind->make(&twin, &twin_batch);
    kind->make(&real, &batch);
    if (twin.is_full)
        return 0;
    fill(scene->twin, scene->data_bytes, &twin.random);
    if (kind->prepare != NULL)
        kind->prepare(&twin, &twin_batch);
    memcpy(scene->data.host, scene->twin, scene->data_bytes);
    if (kind->launch(kvt_kernels_host(), NULL, &twin_batch) != 0) {
        (void)gpu_check_failed(check, "correct", "the reference refuses a case", 0);
        return -1;
    }
    if (!gpu_check_upload(check, &scene->lists, LISTS_BYTES) ||
        !gpu_check_upload(check, &scene->data, scene->data_bytes) ||
        !gpu_check_ok(check, kind->launch(check->calls->kernels, check->stream, &batch),
                      kind->name) ||
        !gpu_check_wait(check) || !gpu_check_download(check, &scene->data, scene->data_bytes))
        return -1;
    *ret_wrong += count_wrong(scene->data.host, scene->twin, scene->data_bytes);
    return 1;
}

/* Until @end_ns, but not fewer cases than the kind wants, unless the part is late. */
static void run_kind(struct scene *scene, const struct gpu_check_kind *kind, uint64_t end_ns)
{
    struct gpu_check *check = scene->check;
    uint64_t wrong = 0, cases = 0;
    struct gpu_check_row *row;
    int ran = 0;

    for (uint32_t number = 0; ran >= 0 && !gpu_check_is_late(check); number++) {
        bool is_enough = number >= kind->cases_min;

        if (is_enough && (check->options.is_small || kvt_clock_mono_ns() > end_ns))
            break;
        ran = run_case(scene, kind, number, &wrong);
        cases += ran > 0;
    }
    row = gpu_check_row(check, "correct", kind->name);
    row->cases = cases;
    row->wrong_bytes = wrong;
    if (cases == 0) {
        row->is_failed = true;
        (void)snprintf(row->text, sizeof(row->text), "not one case was compared");
    }
}

static void run_kinds(struct scene *scene, const struct gpu_check_kind *kinds, uint64_t share_ns)
{
    for (; kinds->name != NULL && !scene->check->is_broken; kinds++)
        run_kind(scene, kinds, kvt_clock_mono_ns() + share_ns);
}

void gpu_check_correct(struct gpu_check *check)
{
    uint64_t now_ns = kvt_clock_mono_ns();
    uint64_t share_ns = check->part_end_ns > now_ns ? (check->part_end_ns - now_ns) / 6 : 0;
    struct scene scene;

    if (scene_open(&scene, check)) {
        run_kinds(&scene, gpu_check_copy_kinds, share_ns);
        run_kinds(&scene, gpu_check_quant_kinds, share_ns);
    }
    scene_close(&scene);
}
