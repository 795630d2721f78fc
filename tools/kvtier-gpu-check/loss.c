/* A context that is lost: in a child, because what a process lost may be gone for good. There a
 * kernel writes where no memory is; after that every call has to fail, and device_reset has to make
 * it work again. Whether it does is a fact about the driver, and a row: where it does not, a daemon
 * that lost a GPU has to be restarted. */
#include <inttypes.h>
#include <string.h>

#include "tools/kvtier-gpu-check/child.h"

/* One piece of 16 bytes into an address that nobody has. */
static int write_nowhere(struct gpu_check *check)
{
    struct lists {
        struct kvt_copy_job job;
        struct kvt_copy_piece piece;
        uint64_t block;
    };
    struct kvt_copy_batch batch = {
        .jobs_count = 1, .pieces_max = 1, .blocks_max = 1, .piece_bytes_max = 16};
    struct gpu_check_memory memory = {0};
    struct lists *lists;
    int error;

    if (!gpu_check_memory_new(check, &memory, 4096, true))
        return KVT_CUDA_OK;
    lists = (void *)memory.host;
    memset(lists, 0, sizeof(*lists));
    lists->job = (struct kvt_copy_job){.payload = 0x1000, /* the first page is never mapped */
                                       .pieces = memory.device + offsetof(struct lists, piece),
                                       .blocks = memory.device + offsetof(struct lists, block),
                                       .pieces_count = 1,
                                       .blocks_count = 1};
    lists->piece =
        (struct kvt_copy_piece){.base = memory.device + 2048, .stride_bytes = 16, .bytes = 16};
    batch.jobs = memory.device;
    if (!gpu_check_upload(check, &memory, 4096))
        return KVT_CUDA_OK;
    error = check->calls->kernels->gather(check->stream, &batch);
    if (error == KVT_CUDA_OK)
        error = check->calls->event_record(check->event, check->stream);
    while (error == KVT_CUDA_OK || error == KVT_CUDA_NOT_READY) {
        error = check->calls->event_query(check->event);
        if (error == KVT_CUDA_OK)
            break; /* it was written somewhere: nothing is lost */
    }
    return error;
}

int gpu_check_child_loss(struct gpu_check *check)
{
    uint64_t wrong;
    int error, again;

    check->part_end_ns = UINT64_MAX;
    check->options.is_small = true;
    gpu_check_correct(check);
    error = check->hooks.lose != NULL ? check->hooks.lose(check) : write_nowhere(check);
    again = check->calls->stream_new(&check->stream);
    if (!kvt_cuda_is_sticky(error) || again == KVT_CUDA_OK) {
        printf("kept\n");
        return 0;
    }
    printf("lost %s\n", check->calls->error_name(error));
    check->stream = check->event = NULL; /* gone with the context */
    (void)check->calls->set_device(check->options.device);
    error = check->calls->device_reset();
    /* Also when the reset says no: what counts is whether a new context works. */
    if (!gpu_check_open(check)) {
        printf("gone reset: %s\n", check->calls->error_name(error));
        return 0;
    }
    gpu_check_correct(check);
    wrong = gpu_check_wrong_bytes(check);
    if (gpu_check_failures(check) > 0) {
        printf("gone what was done afterwards failed\n");
        return 0;
    }
    printf("back\nwrong %" PRIu64 "\n", wrong);
    (void)fflush(stdout);
    return 0;
}

void gpu_check_loss(struct gpu_check *check)
{
    struct gpu_check_child child = {0};
    struct gpu_check_row *row;
    char lost[GPU_CHECK_LINE_BYTES];
    uint64_t wrong = 0;

    if (!gpu_check_child_start(check, "loss", "loss", &child))
        return;
    if (!gpu_check_child_hear(&child)) {
        (void)gpu_check_failed(check, "loss", "the child ended without a word", 0);
        gpu_check_child_kill(&child);
        return;
    }
    memcpy(lost, child.line, sizeof(lost));
    row = gpu_check_row(check, "loss", "a lost context is taken back");
    if (strcmp(lost, "kept") == 0)
        (void)snprintf(row->text, sizeof(row->text), "not tried: nothing could make it fail");
    else if (!gpu_check_child_hear(&child))
        (void)snprintf(row->text, sizeof(row->text),
                       "%.60s: the process died: a daemon would have to be restarted", lost);
    else if (strcmp(child.line, "back") != 0)
        (void)snprintf(row->text, sizeof(row->text), "%.60s: no (%.60s): restart the daemon", lost,
                       child.line);
    else {
        row->is_failed =
            !gpu_check_child_hear(&child) || sscanf(child.line, "wrong %" SCNu64, &wrong) != 1;
        row->cases = 1;
        row->wrong_bytes = wrong;
        (void)snprintf(row->text, sizeof(row->text), "%.60s: works after a reset", lost);
    }
    gpu_check_child_kill(&child);
}
