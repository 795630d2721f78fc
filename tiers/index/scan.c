/* The scan: a thread that reads pieces into a ring of buffers, and the look at them.
 *
 *   piece   | lead: tail of the piece before | what was read        |
 *                   ^ places are looked at from here on, at each 4 KiB
 *
 * When a header is cut by the end of a piece, the piece from there on is carried over to the lead
 * of the next one. A payload is hashed as it passes by. */
#include "tiers/index/scan.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tiers/slab.h"

#define PLACE_BYTES ((uint64_t)KVT_DIO_ALIGN_BYTES) /* a slot may begin at a multiple of it */
#define READ_BYTES (4u << 20)
#define READ_BYTES_MIN (64u << 10)
#define PIECES 3u /* one is looked at, one is read, one is ready */
#define HEADER_BYTES_MAX 33280u
#define LEAD_BYTES (9u * KVT_DIO_ALIGN_BYTES)
static_assert(LEAD_BYTES >= HEADER_BYTES_MAX, "the lead holds what a cut header leaves behind");
static_assert(READ_BYTES_MIN >= LEAD_BYTES, "a cut header ends in the next piece");

struct piece {
    uint8_t *memory;              /* the lead, then what was read */
    uint64_t offset;              /* of what was read, in the data area */
    uint64_t wanted_bytes, bytes; /* to be read; what came, whole places only */
};

/* Reads ahead. Pieces go round: the reader fills the next one when `empty` says so, the scan looks
 * at it when `filled` does. */
struct reader {
    const struct kvt_scan_config *config;
    uint64_t read_bytes;
    uint64_t total_bytes; /* of the data area, whole places */
    int fd;
    pthread_t thread;
    bool has_thread, has_sems;
    sem_t filled, empty;
    atomic_bool is_stopped;
    uint8_t *memory;
    struct piece pieces[PIECES];
};

/* The slot whose payload passes by. */
struct candidate {
    bool is_active;
    uint32_t ns;
    struct kvt_slot_info info;
    uint64_t offset, hashed_to, payload_end; /* in the data area */
    uint64_t payload_hash;                   /* as its header says */
    struct kvt_hash_stream hash;
    uint32_t tokens[KVT_BLOCK_TOKENS_MAX];
};

struct scan {
    const struct kvt_scan_config *config;
    const struct kvt_scan_calls *calls;
    struct kvt_scan_report report;
    struct reader reader;
    struct candidate candidate;
};

/* ---- reading -------------------------------------------------------------------------------- */

static ssize_t read_once(const struct reader *reader, void *data, size_t bytes, uint64_t offset)
{
    const struct kvt_scan_config *config = reader->config;
    ssize_t r;

    do {
        if (config->pread != NULL)
            r = config->pread(config->pread_ctx, reader->fd, data, bytes, offset);
        else
            r = pread(reader->fd, data, bytes, (off_t)offset);
    } while (r < 0 && errno == EINTR);
    return r;
}

/* What can be read of a piece, from its begin on; the rest of it is passed over. */
static void piece_read(const struct reader *reader, struct piece *piece)
{
    uint64_t from = reader->config->data_offset_bytes + piece->offset;

    piece->bytes = 0;
    while (piece->bytes < piece->wanted_bytes) {
        ssize_t r = read_once(reader, piece->memory + LEAD_BYTES + piece->bytes,
                              piece->wanted_bytes - piece->bytes, from + piece->bytes);

        if (r < 0 && errno == EINVAL) {
            /* A file system that opens with O_DIRECT and then does not want to read so. */
            int flags = fcntl(reader->fd, F_GETFL);

            if (flags >= 0 && (flags & O_DIRECT) != 0 &&
                fcntl(reader->fd, F_SETFL, flags & ~O_DIRECT) == 0)
                continue;
        }
        if (r < (ssize_t)PLACE_BYTES) /* an error, the end, or too little to go on with */
            return;
        piece->bytes += kvt_round_down((uint64_t)r, PLACE_BYTES);
    }
}

static void sem_wait_through(sem_t *sem)
{
    while (sem_wait(sem) != 0)
        KVT_ASSERT(errno == EINTR);
}

static void *reader_main(void *ctx)
{
    struct reader *reader = ctx;
    uint32_t next = 0;

    for (uint64_t offset = 0; offset < reader->total_bytes; offset += reader->read_bytes) {
        struct piece *piece = &reader->pieces[next++ % PIECES];

        sem_wait_through(&reader->empty);
        if (atomic_load(&reader->is_stopped))
            break;
        piece->offset = offset;
        piece->wanted_bytes = KVT_MIN(reader->read_bytes, reader->total_bytes - offset);
        piece_read(reader, piece);
        (void)sem_post(&reader->filled);
    }
    return NULL;
}

/* Idempotent; of a half-made one too. */
static void reader_deinit(struct reader *reader)
{
    if (reader->has_thread) {
        atomic_store(&reader->is_stopped, true);
        (void)sem_post(&reader->empty);
        (void)pthread_join(reader->thread, NULL);
        reader->has_thread = false;
    }
    if (reader->has_sems) {
        (void)sem_destroy(&reader->filled);
        (void)sem_destroy(&reader->empty);
        reader->has_sems = false;
    }
    if (reader->fd >= 0)
        (void)close(reader->fd);
    reader->fd = -1;
    kvt_free(reader->memory);
    reader->memory = NULL;
}

static int reader_init(struct reader *reader, const struct kvt_scan_config *config)
{
    size_t piece_bytes;
    int r;

    *reader = (struct reader){.config = config, .fd = -1};
    reader->read_bytes = config->read_bytes != 0 ? config->read_bytes : READ_BYTES;
    reader->total_bytes = kvt_round_down(config->data_bytes, PLACE_BYTES);
    if (reader->read_bytes < READ_BYTES_MIN || reader->read_bytes % PLACE_BYTES != 0 ||
        config->data_offset_bytes % PLACE_BYTES != 0)
        return kvt_trace(-EINVAL);
    reader->fd = open(config->path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (reader->fd < 0 && errno == EINVAL)
        reader->fd = open(config->path, O_RDONLY | O_CLOEXEC);
    if (reader->fd < 0)
        return kvt_trace(-errno);
    (void)posix_fadvise(reader->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    piece_bytes = LEAD_BYTES + reader->read_bytes;
    reader->memory = kvt_alloc_aligned(PLACE_BYTES, PIECES * piece_bytes);
    if (reader->memory == NULL)
        return kvt_trace(-ENOMEM);
    for (uint32_t i = 0; i < PIECES; i++)
        reader->pieces[i].memory = reader->memory + i * piece_bytes;
    if (sem_init(&reader->filled, 0, 0) != 0 || sem_init(&reader->empty, 0, PIECES) != 0)
        return kvt_trace(-errno);
    reader->has_sems = true;
    r = pthread_create(&reader->thread, NULL, reader_main, reader);
    if (r != 0)
        return kvt_trace(-r);
    reader->has_thread = true;
    return 0;
}

/* ---- looking -------------------------------------------------------------------------------- */

uint64_t kvt_scan_run_offset(uint64_t offset_bytes, uint64_t slot_bytes, uint64_t unit_bytes)
{
    /* The first slot before it, itself included, that begins with a unit begins the slab: if
     * another slot of one slab did, a slab of as many units as lie before that one would waste
     * nothing, and the allocator would have made the shorter one. A slab has no more slots than
     * this. */
    uint64_t slots_max = 8 + 8 * (unit_bytes / slot_bytes);

    KVT_ASSERT(slot_bytes > 0 && unit_bytes > 0);
    for (uint64_t k = 0; k < slots_max && k * slot_bytes <= offset_bytes; k++)
        if ((offset_bytes - k * slot_bytes) % unit_bytes == 0)
            return offset_bytes - k * slot_bytes;
    return UINT64_MAX;
}

/* The namespace of the present epoch that such a slot belongs to, or KVT_NAMESPACES_MAX. */
static uint32_t ns_find(const struct kvt_scan_config *config, const struct kvt_slot_info *info)
{
    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++) {
        const struct kvt_index_ns *ns = &config->namespaces[i];

        if (ns->is_used && ns->epoch == info->epoch && ns->block_tokens == info->block_tokens &&
            memcmp(ns->fingerprint, info->fingerprint, KVT_FINGERPRINT_BYTES) == 0)
            return info->component < ns->components_count && info->component < KVT_COMPONENTS_MAX &&
                           info->rank < ns->shards[info->component]
                       ? i
                       : KVT_NAMESPACES_MAX;
    }
    return KVT_NAMESPACES_MAX;
}

static void candidate_give_up(struct scan *scan)
{
    if (scan->candidate.is_active)
        scan->report.torn++;
    scan->candidate.is_active = false;
}

/* A whole header begins at @offset: whatever passed by there ends, and this may be the next. */
static void candidate_begin(struct scan *scan, uint64_t offset, const uint8_t *header,
                            const struct kvt_slot_info *info, const uint8_t *tokens_le)
{
    struct candidate *candidate = &scan->candidate;

    candidate_give_up(scan);
    scan->report.block_id_max = KVT_MAX(scan->report.block_id_max, info->block_id);
    scan->report.generation_max = KVT_MAX(scan->report.generation_max, info->generation);
    candidate->ns = ns_find(scan->config, info);
    if (candidate->ns == KVT_NAMESPACES_MAX || info->block_id == 0) {
        scan->report.others++;
        return;
    }
    candidate->is_active = true;
    candidate->info = *info;
    candidate->offset = offset;
    candidate->hashed_to = offset + kvt_slot_header_bytes(info->block_tokens);
    candidate->payload_end = candidate->hashed_to + info->payload_bytes;
    candidate->payload_hash = kvt_slot_payload_hash(header);
    kvt_hash_stream_init(&candidate->hash, 0);
    for (uint32_t i = 0; i < info->block_tokens; i++)
        candidate->tokens[i] = kvt_get_u32(tokens_le, i * 4u);
}

/* All of its payload has passed by. 0 or what found() returned. */
static int candidate_end(struct scan *scan)
{
    struct candidate *candidate = &scan->candidate;
    uint64_t unit_bytes =
        scan->config->unit_bytes != 0 ? scan->config->unit_bytes : KVT_SLAB_UNIT_L3_BYTES;
    struct kvt_scan_slot slot = {
        .ns = candidate->ns,
        .info = &candidate->info,
        .tokens = candidate->tokens,
        .offset_bytes = candidate->offset,
        .slot_bytes = kvt_slot_bytes(candidate->info.block_tokens, candidate->info.payload_bytes),
    };

    if (kvt_hash_stream_digest(&candidate->hash) != candidate->payload_hash) {
        candidate_give_up(scan);
        return 0;
    }
    candidate->is_active = false;
    slot.run_offset_bytes = kvt_scan_run_offset(slot.offset_bytes, slot.slot_bytes, unit_bytes);
    if (slot.run_offset_bytes == UINT64_MAX) {
        scan->report.others++;
        return 0;
    }
    scan->report.slots++;
    return scan->calls->found(scan->calls->ctx, &slot);
}

/* Hashes what belongs to the candidate of @data, which lies at @offset, up to @bytes of it. */
static int candidate_pass(struct scan *scan, const uint8_t *data, uint64_t offset, uint64_t bytes)
{
    struct candidate *candidate = &scan->candidate;
    uint64_t to = KVT_MIN(offset + bytes, candidate->payload_end);

    KVT_ASSERT(candidate->is_active && candidate->hashed_to >= offset);
    if (to > candidate->hashed_to) {
        kvt_hash_stream_update(&candidate->hash, data + (candidate->hashed_to - offset),
                               to - candidate->hashed_to);
        candidate->hashed_to = to;
    }
    return candidate->hashed_to == candidate->payload_end ? candidate_end(scan) : 0;
}

/* The next place in [from, to) where a slot may begin, or @to. */
static uint64_t place_next(const struct scan *scan, const uint8_t *data, uint64_t from, uint64_t to,
                           uint32_t *ret_header_bytes)
{
    while (from < to &&
           !kvt_slot_header_guess(data + from, scan->config->store_id, ret_header_bytes))
        from += PLACE_BYTES;
    return from;
}

/* Looks at @bytes of @data, whole places, which lie at @offset. 0 and how many are done with: all,
 * or up to a header that is cut by the end of @data (not if @is_last). Or what found() returned. */
static int look(struct scan *scan, const uint8_t *data, uint64_t offset, uint64_t bytes,
                bool is_last, uint64_t *ret_done)
{
    struct candidate *candidate = &scan->candidate;
    uint64_t at = 0;

    while (at < bytes) {
        uint64_t end = bytes, place;
        uint32_t header_bytes = 0;
        struct kvt_slot_info info;
        const uint8_t *tokens_le;
        int r = 0;

        if (candidate->is_active)
            end = KVT_MIN(bytes, kvt_round_up(candidate->payload_end, PLACE_BYTES) - offset);
        place = place_next(scan, data, at, end, &header_bytes);
        at = place;
        if (candidate->is_active)
            r = candidate_pass(scan, data, offset, at);
        if (r != 0)
            return r;
        if (place == end)
            continue;
        if (header_bytes > bytes - place && !is_last)
            break;
        if (header_bytes <= bytes - place &&
            kvt_slot_header_read(data + place, scan->reader.total_bytes - offset - place, &info,
                                 &tokens_le) == KVT_SLOT_OK) {
            candidate_begin(scan, offset + place, data + place, &info, tokens_le);
            at += kvt_round_up(header_bytes, PLACE_BYTES);
        } else {
            scan->report.bad_headers++;
            at += PLACE_BYTES;
        }
        if (candidate->is_active) /* that place too is behind us, and may have been the last */
            r = candidate_pass(scan, data, offset, at);
        if (r != 0)
            return r;
    }
    *ret_done = at;
    return 0;
}

static int pieces_look(struct scan *scan)
{
    struct reader *reader = &scan->reader;
    uint64_t carried = 0, offset = 0;
    uint32_t next = 0;
    const uint8_t *tail = NULL;
    int r = 0;

    while (r == 0 && offset < reader->total_bytes) {
        struct piece *piece = &reader->pieces[next++ % PIECES];
        uint8_t *data = piece->memory + LEAD_BYTES - carried;
        uint64_t done = 0, bytes;
        bool is_cut;

        sem_wait_through(&reader->filled);
        if (carried > 0) {
            memcpy(data, tail, carried);
            (void)sem_post(&reader->empty);
        }
        bytes = carried + piece->bytes;
        offset = piece->offset + piece->wanted_bytes;
        is_cut = piece->bytes < piece->wanted_bytes || offset == reader->total_bytes;
        r = look(scan, data, piece->offset - carried, bytes, is_cut, &done);
        if (is_cut)
            candidate_give_up(scan);
        scan->report.read_bytes += piece->bytes;
        scan->report.skipped_bytes += piece->wanted_bytes - piece->bytes;
        if (r == 0 && scan->calls->progress != NULL)
            r = scan->calls->progress(scan->calls->ctx, offset, reader->total_bytes);
        carried = r == 0 ? bytes - done : 0;
        KVT_ASSERT(carried <= LEAD_BYTES);
        tail = data + done;
        if (carried == 0) /* else when its tail has been copied */
            (void)sem_post(&reader->empty);
    }
    return r;
}

int kvt_scan_run(const struct kvt_scan_config *config, const struct kvt_scan_calls *calls,
                 struct kvt_scan_report *ret_report)
{
    struct scan *scan = kvt_alloc_aligned(_Alignof(struct scan), sizeof(*scan));
    int r;

    *ret_report = (struct kvt_scan_report){0};
    if (scan == NULL)
        return kvt_trace(-ENOMEM);
    scan->config = config;
    scan->calls = calls;
    r = reader_init(&scan->reader, config);
    if (r == 0)
        r = pieces_look(scan);
    reader_deinit(&scan->reader);
    *ret_report = scan->report;
    kvt_free(scan);
    return r;
}
