/* What the CPU does with bytes, a member a turn: between two of them the thread looks at its events
 * again, so that the GPU does not run dry behind a long copy.
 *
 * Before a flight: a slot in L2 is verified, and what the copy engine cannot read (memory of a
 * client, L2 that is not pinned) is copied to pinned staging. After it: what came down is checked,
 * and hashed and sealed, or copied on. Memory of clients is touched under the guard only. */
#include <string.h>

#include "kernels/check.h"
#include "tiers/copy.h"
#include "tiers/device/gpu_internal.h"

/* A payload of which only what lies behind @offset is there. */
static uint8_t *payload_before(uint8_t *address, uint64_t offset)
{
    return (uint8_t *)((uintptr_t)address - offset);
}

/* What is checked on the CPU and again on the GPU behind the copy: then that one was whole. */
static void expect(struct kvt_gpu_member *member, const uint8_t *payload)
{
    if (!member->is_check && !member->is_job_checked)
        return;
    member->is_expected = true;
    member->expected = kvt_check64(payload, member->stored_bytes);
}

/* Reads stored bytes once: their hash, their check, and with @dst a copy of them. */
static uint64_t read_stored(struct kvt_gpu_member *member, uint8_t *dst, const uint8_t *src)
{
    struct kvt_hash_stream hash;

    kvt_hash_stream_init(&hash, 0);
    member->summed = 0;
    for (uint64_t at = 0; at < member->stored_bytes; at += KVT_COPY_CHUNK_BYTES) {
        uint64_t bytes = KVT_MIN(KVT_COPY_CHUNK_BYTES, member->stored_bytes - at);

        if (dst != NULL)
            memcpy(dst + at, src + at, bytes);
        kvt_hash_stream_update(&hash, src + at, bytes);
        member->summed += kvt_check64_part(src + at, bytes, at / 8);
    }
    return kvt_hash_stream_digest(&hash);
}

static void work_in(struct kvt_gpu_member *member)
{
    struct kvt_xfer *xfer = member->xfer;
    const uint8_t *payload;

    if (member->is_verify) {
        xfer->verdict = kvt_slot_check(member->slot, &xfer->key);
        if (xfer->verdict != KVT_SLOT_OK) {
            kvt_gpu_member_end(member, KVT_XFER_BAD_SLOT);
            return;
        }
    }
    if (member->slot == NULL) {
        if (kvt_client_gather(member->view, member->host, NULL) < 0) {
            kvt_gpu_member_end(member, KVT_XFER_CLIENT_GONE);
            return;
        }
        payload = member->host;
    } else {
        payload = member->slot + xfer->header_bytes;
        if (member->is_fill)
            memcpy(member->host, payload + member->host_offset, member->host_bytes);
    }
    expect(member, payload);
}

static bool flight_in(struct kvt_gpu_flight *flight)
{
    for (; flight->at_member < flight->members_count; flight->at_member++) {
        struct kvt_gpu_member *member = &flight->members[flight->at_member];

        if (member->is_verify || member->is_fill) {
            work_in(member);
            flight->at_member++;
            break;
        }
    }
    if (flight->at_member == flight->members_count)
        kvt_gpu_queue_begin(flight);
    return true;
}

static void work_out(struct kvt_gpu *gpu, struct kvt_gpu_member *member)
{
    uint8_t *payload;
    uint64_t hash;

    if (member->slot == NULL) {
        if (member->is_summed)
            member->summed = kvt_check64(member->host, member->stored_bytes);
        if (!kvt_gpu_member_is_bad(gpu, member) &&
            kvt_client_scatter(member->view, payload_before(member->host, member->host_offset)) < 0)
            kvt_gpu_member_end(member, KVT_XFER_CLIENT_GONE);
        return;
    }
    payload = member->slot + member->xfer->header_bytes;
    hash = read_stored(member, member->host == payload ? NULL : payload, member->host);
    if (kvt_gpu_member_is_bad(gpu, member))
        return; /* and the slot is not sealed */
    kvt_slot_header_seal(member->slot, hash);
    KVT_DEBUG_ASSERT(kvt_slot_header_check(member->slot, &member->xfer->key) == KVT_SLOT_OK);
}

static bool flight_out(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    for (; flight->at_member < flight->members_count; flight->at_member++) {
        struct kvt_gpu_member *member = &flight->members[flight->at_member];

        if (!member->is_out)
            continue;
        if (!member->is_ended)
            work_out(gpu, member);
        if (member->pinned_run.chunks_count > 0)
            kvt_gpu_staging_give(&gpu->pinned, &member->pinned_run);
        flight->at_member++;
        flight->out_left--;
        return true;
    }
    return false;
}

bool kvt_gpu_cpu_turn(struct kvt_gpu *gpu)
{
    for (uint32_t i = 0; i < gpu->flights_count; i++) {
        struct kvt_gpu_flight *flight = &gpu->flights[(gpu->cpu_next + i) % gpu->flights_count];
        bool is_in = flight->state == KVT_GPU_FLIGHT_CPU_IN;
        bool is_out = flight->state == KVT_GPU_FLIGHT_RUNNING && flight->is_out_ready &&
                      flight->out_left > 0 && (!flight->has_checks || flight->is_checks_read);

        if (!is_in && !is_out)
            continue;
        gpu->cpu_next = (gpu->cpu_next + i + 1) % gpu->flights_count;
        return is_in ? flight_in(flight) : flight_out(gpu, flight);
    }
    return false;
}
