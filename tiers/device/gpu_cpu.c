/* What the CPU does with bytes.
 *
 * Before a flight: a slot in L2 is verified where that is wanted, what the copy engine cannot read
 * (memory of a client, L2 that is not pinned) is copied to pinned staging, and all that goes up is
 * summed, so that a copy that was torn is found by the GPU. After it: what came down is checked,
 * and hashed and sealed, or copied on. Memory of clients is touched under the guard only.
 *
 * It is done a piece at a time: the next members of a flight, as many as are worth a hand's while.
 * Flights are served in turn. What is too little for a hand (the rest of a flight, a lone small
 * block), and all where there are no hands, the GPU's thread does itself, one piece a turn: between
 * two of them it looks at its events again, so that the GPU does not run dry.
 *
 * Of a member that a hand has, the hand writes what work_in and work_out write: the checks that the
 * CPU makes, and the end of a member that is bad. All else of it is read by both. */
#include <string.h>

#include "kernels/check.h"
#include "tiers/copy.h"
#include "tiers/device/gpu_internal.h"

/* A payload of which only what lies behind @offset is there. */
static uint8_t *payload_before(uint8_t *address, uint64_t offset)
{
    return (uint8_t *)((uintptr_t)address - offset);
}

/* What goes up is checked on the CPU and again on the GPU behind the copy: then that one was whole.
 * @host: what the copy engine reads, or where that was copied from. */
static void expect(struct kvt_gpu_member *member, const uint8_t *host)
{
    KVT_ASSERT(member->is_check || member->is_job_checked);
    member->is_expected = true;
    member->expected = kvt_check64(host, member->host_bytes);
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
    const uint8_t *host;

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
        host = member->host;
    } else {
        host = member->slot + xfer->header_bytes + member->host_offset;
        if (member->is_fill)
            memcpy(member->host, host, member->host_bytes);
    }
    expect(member, host);
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

void kvt_gpu_cpu_work(void *gpu, const struct kvt_gpu_piece *piece)
{
    for (uint32_t m = piece->first; m < piece->end; m++) {
        struct kvt_gpu_member *member = &piece->flight->members[m];

        if (!piece->is_out)
            work_in(member);
        else if (member->is_out && !member->is_ended)
            work_out(gpu, member);
    }
}

static bool is_in(const struct kvt_gpu_flight *flight)
{
    return flight->state == KVT_GPU_FLIGHT_CPU_IN;
}

/* Nobody has begun some of it, and it may begin. */
static bool has_work(const struct kvt_gpu_flight *flight)
{
    if (is_in(flight))
        return flight->at_member < flight->members_count;
    return flight->state == KVT_GPU_FLIGHT_RUNNING && flight->is_out_ready &&
           flight->out_left > 0 && (!flight->has_checks || flight->is_checks_read);
}

/* The next members that are worth a handover together, or what is left. */
static struct kvt_gpu_piece *piece_of(const struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    struct kvt_gpu_piece *piece = &flight->pieces[flight->at_member];

    *piece = (struct kvt_gpu_piece){.flight = flight,
                                    .first = flight->at_member,
                                    .end = flight->at_member,
                                    .is_out = !is_in(flight)};
    while (piece->end < flight->members_count && piece->bytes < gpu->config.hand_bytes) {
        const struct kvt_gpu_member *member = &flight->members[piece->end++];

        if (!piece->is_out || (member->is_out && !member->is_ended))
            piece->bytes += member->budget_bytes;
    }
    return piece;
}

static void piece_begun(const struct kvt_gpu_piece *piece)
{
    struct kvt_gpu_flight *flight = piece->flight;

    flight->at_member = piece->end;
    for (uint32_t m = piece->first; piece->is_out && m < piece->end; m++)
        flight->out_left -= flight->members[m].is_out;
}

static void piece_over(struct kvt_gpu *gpu, const struct kvt_gpu_piece *piece)
{
    struct kvt_gpu_flight *flight = piece->flight;

    if (!piece->is_out) {
        if (!has_work(flight) && kvt_gpu_is_back(flight->pieces_out, KVT_GPU_WAIT_HANDS_IN))
            kvt_gpu_queue_begin(flight);
        return;
    }
    for (uint32_t m = piece->first; m < piece->end; m++) {
        struct kvt_gpu_member *member = &flight->members[m];

        if (member->is_out && member->pinned_run.chunks_count > 0)
            kvt_gpu_staging_give(&gpu->pinned, &member->pinned_run);
    }
}

bool kvt_gpu_cpu_collect(struct kvt_gpu *gpu)
{
    struct kvt_gpu_piece *piece;
    bool has_moved = false;

    while ((piece = kvt_gpu_hands_take(&gpu->hands)) != NULL) {
        KVT_ASSERT(piece->flight->pieces_out > 0);
        piece->flight->pieces_out--;
        piece_over(gpu, piece);
        has_moved = true;
    }
    return has_moved;
}

bool kvt_gpu_cpu_is_all(const struct kvt_gpu *gpu)
{
    if (gpu->hands.out_count == 0)
        return false;
    for (uint32_t f = 0; f < gpu->flights_count; f++) {
        const struct kvt_gpu_flight *flight = &gpu->flights[f];
        bool is_at_hands = is_in(flight) || (flight->state == KVT_GPU_FLIGHT_RUNNING &&
                                             flight->is_out_ready && flight->pieces_out > 0);

        if (flight->state != KVT_GPU_FLIGHT_FREE && !is_at_hands)
            return false;
    }
    return true;
}

/* The next piece of @flight, given away or done. False: not now. */
static bool flight_work(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, bool *is_done_here)
{
    struct kvt_gpu_piece *piece = piece_of(gpu, flight);

    if (gpu->hands.count > 0 && piece->bytes >= gpu->config.hand_bytes) {
        if (!kvt_gpu_hands_give(&gpu->hands, piece))
            return false;
        flight->pieces_out++;
        piece_begun(piece);
        return true;
    }
    if (*is_done_here)
        return false;
    *is_done_here = true;
    kvt_gpu_cpu_work(gpu, piece);
    piece_begun(piece);
    piece_over(gpu, piece);
    return true;
}

bool kvt_gpu_cpu_turn(struct kvt_gpu *gpu)
{
    bool is_done_here = false, has_moved = false, has_begun;

    do {
        has_begun = false;
        for (uint32_t i = 0; i < gpu->flights_count && !has_begun; i++) {
            struct kvt_gpu_flight *flight = &gpu->flights[(gpu->cpu_next + i) % gpu->flights_count];

            has_begun = has_work(flight) && flight_work(gpu, flight, &is_done_here);
            if (has_begun)
                gpu->cpu_next = (gpu->cpu_next + i + 1) % gpu->flights_count;
        }
        has_moved |= has_begun;
    } while (has_begun);
    return has_moved;
}
