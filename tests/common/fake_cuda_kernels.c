/* The fake's kernels. When a launch happens, what it reads is read: its jobs, and what they name.
 * Each address is looked up, as a GPU's page tables would, and a copy of the jobs with the
 * addresses of this process is given to the kernels that the test chose. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/common/fake_cuda_internal.h"

struct lists { /* what one launch needs beside its batch */
    void *jobs;
    struct kvt_copy_piece *pieces; /* of all jobs */
    uint8_t *damage;               /* payload of the last job */
    uint64_t damage_bytes;
};

static void *list_of(uint32_t device, uint64_t address, uint64_t count, uint64_t entry_bytes,
                     const char *what)
{
    uint8_t *from = fake_translate(device, address, count * entry_bytes, what);
    void *copy = malloc(count * entry_bytes + 1);

    if (copy == NULL)
        abort();
    if (address % 8 != 0)
        fake_bug("%s: 0x%" PRIx64 " is not aligned", what, address);
    if (from != NULL)
        memcpy(copy, from, count * entry_bytes);
    return copy;
}

static bool check_place(uint32_t device, uint64_t *address)
{
    uint8_t *at;

    if (*address == 0)
        return true;
    if (*address % 8 != 0)
        fake_bug("the place of a check is not aligned");
    at = fake_translate(device, *address, 8, "a check");
    *address = (uintptr_t)at;
    return at != NULL;
}

/* One piece of a copy job: each engine block has to be memory. */
static bool piece_translate(uint32_t device, struct kvt_copy_piece *piece, const uint64_t *blocks,
                            uint32_t blocks_count, bool is_gather)
{
    uint64_t moved = UINT64_MAX;

    if (piece->bytes == 0 || piece->stride_bytes < piece->bytes)
        fake_bug("a piece of %u bytes every %" PRIu64, piece->bytes, piece->stride_bytes);
    for (uint32_t b = 0; b < blocks_count; b++) {
        uint64_t at = piece->base + blocks[b] * piece->stride_bytes;
        uint8_t *pointer;

        if (blocks[b] == KVT_KERNEL_BLOCK_NONE) {
            if (is_gather && !fake_cuda.config.may_gather_none)
                fake_bug("gather of no block");
            continue;
        }
        pointer = fake_translate(device, at, piece->bytes, "a piece");
        if (pointer == NULL)
            return false;
        if (moved != UINT64_MAX && moved != (uintptr_t)pointer - at)
            fake_bug("a piece runs through two allocations");
        moved = (uintptr_t)pointer - at;
    }
    if (moved != UINT64_MAX)
        piece->base += moved;
    return true;
}

static bool copy_job_translate(uint32_t device, const struct kvt_copy_batch *batch,
                               struct kvt_copy_job *job, struct kvt_copy_piece *pieces,
                               bool is_gather, struct lists *lists)
{
    uint8_t *blocks = fake_translate(device, job->blocks, 8ull * job->blocks_count, "ids");
    uint8_t *list = fake_translate(device, job->pieces, sizeof(*pieces) * job->pieces_count,
                                   "a list of pieces");
    uint64_t first = UINT64_MAX, payload_bytes = 0;
    uint8_t *payload;

    if (blocks == NULL || list == NULL)
        return false;
    if (job->pieces_count == 0 || job->blocks_count == 0 || job->pieces_count > batch->pieces_max ||
        job->blocks_count > batch->blocks_max)
        fake_bug("a job of %u pieces and %u blocks in a launch for %u and %u", job->pieces_count,
                 job->blocks_count, batch->pieces_max, batch->blocks_max);
    memcpy(pieces, list, sizeof(*pieces) * job->pieces_count);
    for (uint32_t p = 0; p < job->pieces_count; p++) {
        uint64_t end =
            pieces[p].payload_offset_bytes + (uint64_t)pieces[p].bytes * job->blocks_count;

        if (pieces[p].bytes > batch->piece_bytes_max)
            fake_bug("a piece of %u bytes in a launch for %u", pieces[p].bytes,
                     batch->piece_bytes_max);
        if (job->check != 0 && !kvt_copy_is_checkable(&pieces[p]))
            fake_bug("a check of a piece that is not checkable");
        if (!piece_translate(device, &pieces[p], (const uint64_t *)(void *)blocks,
                             job->blocks_count, is_gather))
            return false;
        first = KVT_MIN(first, pieces[p].payload_offset_bytes);
        payload_bytes = KVT_MAX(payload_bytes, end);
    }
    /* Of a payload of some pieces the first bytes need not be there. */
    payload = fake_translate(device, job->payload + first, payload_bytes - first, "a payload");
    if (payload == NULL || !check_place(device, &job->check))
        return false;
    *job = (struct kvt_copy_job){.payload = (uintptr_t)payload - first,
                                 .pieces = (uintptr_t)pieces,
                                 .blocks = (uintptr_t)blocks,
                                 .check = job->check,
                                 .pieces_count = job->pieces_count,
                                 .blocks_count = job->blocks_count};
    lists->damage = payload;
    lists->damage_bytes = payload_bytes - first;
    return true;
}

static bool run_copy(uint32_t device, const struct fake_op *op, struct lists *lists)
{
    struct kvt_copy_batch batch = op->batch.copy;
    bool is_gather = op->kernel == FAKE_GATHER, is_whole = true;
    uint64_t pieces_count = 0, used = 0;
    struct kvt_copy_job *jobs;
    int r;

    if (batch.jobs_count == 0)
        fake_bug("a launch without jobs");
    jobs = lists->jobs = list_of(device, batch.jobs, batch.jobs_count, sizeof(*jobs), "jobs");
    for (uint32_t i = 0; i < batch.jobs_count; i++)
        pieces_count += jobs[i].pieces_count;
    lists->pieces = calloc(pieces_count + 1, sizeof(*lists->pieces));
    if (lists->pieces == NULL)
        abort();
    for (uint32_t i = 0; i < batch.jobs_count && is_whole; i++) {
        uint32_t count = jobs[i].pieces_count;

        is_whole =
            copy_job_translate(device, &batch, &jobs[i], lists->pieces + used, is_gather, lists);
        used += count;
    }
    if (!is_whole)
        return false;
    batch.jobs = (uintptr_t)jobs;
    r = is_gather ? fake_cuda.config.kernels->gather(NULL, &batch)
                  : fake_cuda.config.kernels->scatter(NULL, &batch);
    if (r != 0)
        fake_bug("%s: %d", is_gather ? "gather" : "scatter", r);
    if (!is_gather) /* what it wrote is the client's: a test knows what to expect there */
        lists->damage = NULL;
    return true;
}

static bool run_check(uint32_t device, const struct fake_op *op, struct lists *lists)
{
    struct kvt_check_batch batch = op->batch.check;
    struct kvt_check_job *jobs;
    int r;

    if (batch.jobs_count == 0)
        fake_bug("a launch without jobs");
    jobs = lists->jobs = list_of(device, batch.jobs, batch.jobs_count, sizeof(*jobs), "jobs");
    for (uint32_t i = 0; i < batch.jobs_count; i++) {
        uint8_t *payload = fake_translate(device, jobs[i].payload, jobs[i].bytes, "a payload");

        if (jobs[i].bytes > batch.bytes_max)
            fake_bug("a check of %" PRIu64 " bytes in a launch for %" PRIu64, jobs[i].bytes,
                     batch.bytes_max);
        if (jobs[i].check == 0)
            fake_bug("a check without a place for it");
        if (payload == NULL || !check_place(device, &jobs[i].check))
            return false;
        jobs[i].payload = (uintptr_t)payload;
    }
    batch.jobs = (uintptr_t)jobs;
    r = fake_cuda.config.kernels->check(NULL, &batch);
    if (r != 0)
        fake_bug("check: %d", r);
    return true;
}

/* As kvt_kernels.h says it, by itself. */
static uint64_t quantised_bytes(const struct kvt_quant_spec *spec, uint64_t plane_bytes,
                                uint32_t planes)
{
    return kvt_round_up(plane_bytes / 2 * planes, 16) +
           kvt_round_up(4ull * planes * spec->heads, 16);
}

static bool run_quant(uint32_t device, const struct fake_op *op, struct lists *lists)
{
    struct kvt_quant_batch batch = op->batch.quant;
    bool is_quantise = op->kernel == FAKE_QUANTISE;
    uint64_t plane_bytes = 2ull * batch.spec.plane_tokens * batch.spec.heads * batch.spec.head_dim;
    struct kvt_quant_job *jobs;
    int r;

    if (batch.jobs_count == 0 || plane_bytes == 0)
        fake_bug("a launch without jobs, or of planes without bytes");
    jobs = lists->jobs = list_of(device, batch.jobs, batch.jobs_count, sizeof(*jobs), "jobs");
    for (uint32_t i = 0; i < batch.jobs_count; i++) {
        uint64_t bytes = quantised_bytes(&batch.spec, plane_bytes, jobs[i].planes_count);
        uint32_t planes = jobs[i].end_plane - jobs[i].first_plane;
        uint8_t *raw, *quantised;

        if (jobs[i].end_plane > jobs[i].planes_count || jobs[i].first_plane >= jobs[i].end_plane ||
            planes > batch.planes_max)
            fake_bug("planes %u to %u of %u in a launch for %u", jobs[i].first_plane,
                     jobs[i].end_plane, jobs[i].planes_count, batch.planes_max);
        raw = fake_translate(device, jobs[i].raw, plane_bytes * planes, "raw planes");
        quantised = fake_translate(device, jobs[i].quantised, bytes, "a quantised payload");
        if (raw == NULL || quantised == NULL)
            return false;
        jobs[i].raw = (uintptr_t)raw;
        jobs[i].quantised = (uintptr_t)quantised;
        lists->damage = is_quantise ? quantised : raw;
        lists->damage_bytes = is_quantise ? bytes : plane_bytes * planes;
    }
    batch.jobs = (uintptr_t)jobs;
    r = is_quantise ? fake_cuda.config.kernels->quantise(NULL, &batch)
                    : fake_cuda.config.kernels->dequantise(NULL, &batch);
    if (r != 0)
        fake_bug("%s: %d", is_quantise ? "quantise" : "dequantise", r);
    return true;
}

static bool run_relayout(uint32_t device, const struct fake_op *op)
{
    struct kvt_relayout change = op->batch.relayout;
    uint64_t bytes =
        1ull * change.layers * change.pages * change.tokens * change.heads * change.head_bytes;
    uint8_t *src = fake_translate(device, change.src, bytes, "the source of a relayout");
    uint8_t *dst = fake_translate(device, change.dst, bytes, "the target of a relayout");
    int r;

    if (src == NULL || dst == NULL)
        return false;
    change.src = (uintptr_t)src;
    change.dst = (uintptr_t)dst;
    r = fake_cuda.config.kernels->relayout(NULL, &change);
    if (r != 0)
        fake_bug("relayout: %d", r);
    return true;
}

bool fake_launch_run(uint32_t device, const struct fake_op *op)
{
    struct lists lists = {0};
    bool is_whole = false;

    switch (op->kernel) {
    case FAKE_GATHER:
    case FAKE_SCATTER:
        is_whole = run_copy(device, op, &lists);
        break;
    case FAKE_CHECK:
        is_whole = run_check(device, op, &lists);
        break;
    case FAKE_QUANTISE:
    case FAKE_DEQUANTISE:
        is_whole = run_quant(device, op, &lists);
        break;
    case FAKE_RELAYOUT:
        is_whole = run_relayout(device, op);
        break;
    }
    if (is_whole && lists.damage != NULL && lists.damage_bytes > 0) {
        if (fake_is_damage_due(&fake_cuda.tear_in))
            memset(lists.damage + lists.damage_bytes / 2, KVT_FAKE_CUDA_POISON,
                   lists.damage_bytes - lists.damage_bytes / 2);
        if (fake_is_damage_due(&fake_cuda.flip_in))
            lists.damage[fake_random(lists.damage_bytes)] ^= (uint8_t)(1u << fake_random(8));
    }
    free(lists.jobs);
    free(lists.pieces);
    return is_whole;
}

static int gather(void *stream, const struct kvt_copy_batch *batch)
{
    return fake_launch(stream, FAKE_GATHER, &(union fake_batch){.copy = *batch});
}

static int scatter(void *stream, const struct kvt_copy_batch *batch)
{
    return fake_launch(stream, FAKE_SCATTER, &(union fake_batch){.copy = *batch});
}

static int check(void *stream, const struct kvt_check_batch *batch)
{
    return fake_launch(stream, FAKE_CHECK, &(union fake_batch){.check = *batch});
}

static int quantise(void *stream, const struct kvt_quant_batch *batch)
{
    return fake_launch(stream, FAKE_QUANTISE, &(union fake_batch){.quant = *batch});
}

static int dequantise(void *stream, const struct kvt_quant_batch *batch)
{
    return fake_launch(stream, FAKE_DEQUANTISE, &(union fake_batch){.quant = *batch});
}

static int relayout(void *stream, const struct kvt_relayout *change)
{
    return fake_launch(stream, FAKE_RELAYOUT, &(union fake_batch){.relayout = *change});
}

const struct kvt_kernels fake_kernels = {
    .name = "fake",
    .gather = gather,
    .scatter = scatter,
    .check = check,
    .quantise = quantise,
    .dequantise = dequantise,
    .relayout = relayout,
};
