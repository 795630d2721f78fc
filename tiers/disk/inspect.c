#include "tiers/disk/inspect.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"

#define PLACE_BYTES KVT_DIO_ALIGN_BYTES /* a slot may begin at each multiple */
#define WINDOW_BYTES (4u << 20)
#define HEADER_BYTES_MAX 36864u /* the longest header, in whole places */
static_assert(KVT_SLOT_FIXED_BYTES + 4u * KVT_BLOCK_TOKENS_MAX + KVT_SLOT_HEADER_ALIGN_BYTES <=
                  HEADER_BYTES_MAX,
              "the longest header fits");

struct candidate { /* the slot whose payload passes by */
    bool is_active;
    uint64_t at, payload_at, payload_end; /* in the data area */
    uint64_t payload_hash;                /* as its header says */
    struct kvt_slot_info info;
    struct kvt_hash_stream hash;
    bool is_unreadable; /* in part */
};

struct inspector {
    const struct kvt_disk_inspect_config *config;
    struct kvt_disk_inspection *result;
    struct kvt_disk_io io; /* pread alone: nothing else is there to be called */
    struct kvt_disk_file file;
    uint64_t data_bytes;
    uint8_t *window; /* [window_at, + window_bytes) of the data area */
    uint64_t window_at, window_bytes;
    uint64_t next_bytes; /* of the next read: little behind a slot that was skipped, then more */
    bool is_unreadable[(WINDOW_BYTES + HEADER_BYTES_MAX) / PLACE_BYTES];
    struct candidate candidate;
};

static int64_t pread_real(void *ctx, int fd, void *buffer, uint32_t bytes, uint64_t offset_bytes)
{
    ssize_t n = pread(fd, buffer, bytes, (off_t)offset_bytes);

    (void)ctx;
    return n < 0 ? -errno : n;
}

/* ---- front ---------------------------------------------------------------------------------- */

static int device_open(struct inspector *inspector)
{
    struct kvt_disk_inspection *result = inspector->result;
    const char *path = inspector->config->path;
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT | O_NONBLOCK);

    if (fd < 0 && errno == EINVAL)
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return kvt_trace(-errno);
    inspector->file.fd = fd;
    if (fstat(fd, &st) < 0)
        return kvt_trace(-errno);
    if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
        return KVT_DISK_E_FOREIGN;
    result->is_raw = S_ISBLK(st.st_mode);
    result->there_bytes = (uint64_t)st.st_size;
    if (result->is_raw && ioctl(fd, BLKGETSIZE64, &result->there_bytes) < 0)
        return kvt_trace(-errno);
    return 0;
}

static int super_look(struct inspector *inspector)
{
    struct kvt_disk_inspection *result = inspector->result;
    bool is_found = false, is_other_version = false;
    int error = 0;

    for (uint32_t copy = 0; copy < 2; copy++) {
        struct kvt_disk_super super;
        int64_t n =
            inspector->io.pread(inspector->io.ctx, inspector->file.fd, inspector->file.records,
                                KVT_DISK_SUPER_BYTES, copy * KVT_DISK_SUPER_BYTES);
        int r;

        error = n < 0 ? (int)n : error;
        if (n != KVT_DISK_SUPER_BYTES)
            continue;
        r = kvt_disk_super_decode(inspector->file.records, &super);
        is_other_version |= r == KVT_DISK_SUPER_E_OTHER_VERSION;
        if (r != 0)
            continue;
        result->is_copy_good[copy] = true;
        result->copy_serials[copy] = super.serial;
        if (is_found && super.serial <= result->about.serial)
            continue;
        is_found = true;
        result->about = super;
    }
    if (is_other_version)
        return KVT_DISK_E_OTHER_VERSION;
    if (!is_found)
        return error < 0 ? kvt_trace(error) : KVT_DISK_E_FOREIGN;
    inspector->file.about = result->about;
    return 0;
}

/* ---- data ----------------------------------------------------------------------------------- */

/* Place by place, where a read of all of it failed. */
static void window_read_slowly(struct inspector *inspector, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += PLACE_BYTES) {
        uint64_t from = KVT_DISK_DATA_OFFSET_BYTES + inspector->window_at + at;
        int64_t n = inspector->io.pread(inspector->io.ctx, inspector->file.fd,
                                        inspector->window + at, PLACE_BYTES, from);

        inspector->is_unreadable[at / PLACE_BYTES] = n != PLACE_BYTES;
        if (n != PLACE_BYTES)
            memset(inspector->window + at, 0, PLACE_BYTES);
    }
}

/* Makes [at, at + bytes) of the data area lie in the window; less at the end of the data. */
static const uint8_t *window_at(struct inspector *inspector, uint64_t at, uint64_t bytes)
{
    uint64_t want = KVT_MIN(inspector->next_bytes, inspector->data_bytes - at);
    int64_t n;

    bytes = KVT_MIN(bytes, inspector->data_bytes - at);
    if (at >= inspector->window_at && at + bytes <= inspector->window_at + inspector->window_bytes)
        return inspector->window + (at - inspector->window_at);
    inspector->next_bytes = KVT_MIN(2 * inspector->next_bytes, WINDOW_BYTES + HEADER_BYTES_MAX);
    inspector->window_at = at;
    inspector->window_bytes = want;
    memset(inspector->is_unreadable, 0, sizeof(inspector->is_unreadable));
    n = inspector->io.pread(inspector->io.ctx, inspector->file.fd, inspector->window,
                            (uint32_t)want, KVT_DISK_DATA_OFFSET_BYTES + at);
    if (n != (int64_t)want)
        window_read_slowly(inspector, want);
    inspector->result->read_bytes += want;
    return inspector->window;
}

static bool is_unreadable(const struct inspector *inspector, uint64_t at)
{
    return inspector->is_unreadable[(at - inspector->window_at) / PLACE_BYTES];
}

static void group_count(struct kvt_disk_inspection *result, uint32_t ns, uint64_t slot_bytes)
{
    uint32_t i = 0;

    result->slots++;
    while (i < result->groups_count &&
           (result->groups[i].ns != ns || result->groups[i].slot_bytes != slot_bytes))
        i++;
    if (i == KVT_DISK_SLOT_GROUPS_MAX)
        return;
    if (i == result->groups_count)
        result->groups[result->groups_count++] =
            (struct kvt_disk_slot_group){.ns = ns, .slot_bytes = slot_bytes};
    result->groups[i].slots++;
}

/* A slot that is whole, as far as it was looked at. */
static void slot_count(struct kvt_disk_inspection *result, const struct kvt_slot_info *info)
{
    for (uint32_t ns = 0; ns < KVT_NAMESPACES_MAX; ns++) {
        const struct kvt_disk_ns_record *record = &result->catalog.namespaces[ns];

        if (!record->is_used || record->epoch != info->epoch ||
            memcmp(record->fingerprint, info->fingerprint, KVT_FINGERPRINT_BYTES) != 0)
            continue;
        group_count(result, ns, kvt_slot_bytes(info->block_tokens, info->payload_bytes));
        return;
    }
    result->slots_stale++;
}

static void bad_count(struct inspector *inspector, uint64_t at, enum kvt_slot_verdict verdict,
                      const struct kvt_slot_info *info)
{
    struct kvt_disk_bad_slot bad = {.offset_bytes = KVT_DISK_DATA_OFFSET_BYTES + at,
                                    .verdict = verdict,
                                    .has_info = info != NULL};

    inspector->result->slots_bad++;
    if (info != NULL)
        bad.info = *info;
    if (inspector->config->bad != NULL)
        inspector->config->bad(inspector->config->ctx, &bad);
}

static void candidate_begin(struct inspector *inspector, uint64_t at, const uint8_t *slot,
                            const struct kvt_slot_info *info)
{
    struct candidate *candidate = &inspector->candidate;

    inspector->result->slots_replaced += candidate->is_active;
    candidate->is_active = true;
    candidate->is_unreadable = false;
    candidate->at = at;
    candidate->payload_at = at + kvt_slot_header_bytes(info->block_tokens);
    candidate->payload_end = candidate->payload_at + info->payload_bytes;
    candidate->payload_hash = kvt_slot_payload_hash(slot);
    candidate->info = *info;
    kvt_hash_stream_init(&candidate->hash, 0);
}

/* The bytes at place @at are the candidate's as well; with its last ones it is judged. */
static void candidate_feed(struct inspector *inspector, uint64_t at, const uint8_t *bytes)
{
    struct candidate *candidate = &inspector->candidate;
    uint64_t from = KVT_MAX(at, candidate->payload_at);
    uint64_t to = KVT_MIN(at + PLACE_BYTES, candidate->payload_end);

    candidate->is_unreadable |= is_unreadable(inspector, at);
    if (from < to)
        kvt_hash_stream_update(&candidate->hash, bytes + (from - at), to - from);
    if (at + PLACE_BYTES < candidate->payload_end)
        return;
    candidate->is_active = false;
    if (candidate->is_unreadable ||
        kvt_hash_stream_digest(&candidate->hash) != candidate->payload_hash)
        bad_count(inspector, candidate->at, KVT_SLOT_BAD_PAYLOAD, &candidate->info);
    else
        slot_count(inspector->result, &candidate->info);
}

/* Looks for a header at @at; how far to go on. */
static uint64_t place_look(struct inspector *inspector, uint64_t at)
{
    struct kvt_disk_inspection *result = inspector->result;
    uint64_t rest_bytes = inspector->data_bytes - at;
    const uint8_t *slot = window_at(inspector, at, HEADER_BYTES_MAX), *tokens;
    struct kvt_slot_info info;
    enum kvt_slot_verdict verdict = kvt_slot_header_read(
        slot, rest_bytes < HEADER_BYTES_MAX ? rest_bytes : UINT64_MAX, &info, &tokens);
    bool is_ours = verdict == KVT_SLOT_OK &&
                   memcmp(info.store_id, result->about.store_id, KVT_STORE_ID_BYTES) == 0 &&
                   /* else it was cut off: the device was larger once */
                   kvt_slot_bytes(info.block_tokens, info.payload_bytes) <= rest_bytes;

    result->unreadable_bytes += is_unreadable(inspector, at) ? PLACE_BYTES : 0;
    if (is_ours && !inspector->config->is_verify) {
        slot_count(result, &info);
        inspector->next_bytes = HEADER_BYTES_MAX;
        return kvt_slot_bytes(info.block_tokens, info.payload_bytes);
    }
    if (is_ours)
        candidate_begin(inspector, at, slot, &info);
    if (inspector->candidate.is_active)
        candidate_feed(inspector, at, slot);
    else if (verdict == KVT_SLOT_BAD_HEADER)
        bad_count(inspector, at, verdict, NULL);
    else if (verdict != KVT_SLOT_BAD_MAGIC)
        result->slots_other++;
    return PLACE_BYTES;
}

static int data_look(struct inspector *inspector)
{
    const struct kvt_disk_inspection *result = inspector->result;
    uint64_t end_bytes = KVT_MIN(result->there_bytes, result->about.device_bytes);

    inspector->window = kvt_alloc_aligned(PLACE_BYTES, WINDOW_BYTES + 2 * HEADER_BYTES_MAX);
    if (inspector->window == NULL)
        return kvt_trace(-ENOMEM);
    if (end_bytes > KVT_DISK_DATA_OFFSET_BYTES)
        inspector->data_bytes = kvt_round_down(end_bytes - KVT_DISK_DATA_OFFSET_BYTES, PLACE_BYTES);
    inspector->next_bytes = WINDOW_BYTES + HEADER_BYTES_MAX;
    for (uint64_t at = 0; at < inspector->data_bytes;)
        at += place_look(inspector, at);
    return 0;
}

static int inspector_run(struct inspector *inspector)
{
    const struct kvt_disk_inspect_config *config = inspector->config;
    int r = device_open(inspector);

    if (r == 0)
        r = super_look(inspector);
    /* Nothing behind a superblock of version 1 can be named. */
    if (r != 0 || inspector->result->about.version < KVT_DISK_SUPER_VERSION)
        return r;
    r = kvt_disk_catalog_read(&inspector->file, &inspector->io, &inspector->result->catalog);
    if (r < 0 || config->is_front_only)
        return r;
    return data_look(inspector);
}

int kvt_disk_inspect(const struct kvt_disk_inspect_config *config,
                     struct kvt_disk_inspection *ret_inspection)
{
    kvt_autofree struct inspector *inspector =
        kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*inspector));
    int r;

    memset(ret_inspection, 0, sizeof(*ret_inspection));
    if (inspector == NULL)
        return kvt_trace(-ENOMEM);
    inspector->config = config;
    inspector->result = ret_inspection;
    inspector->io.pread = config->pread != NULL ? config->pread : pread_real;
    inspector->io.ctx = config->pread_ctx;
    inspector->file.fd = -1;
    inspector->file.records = kvt_alloc_aligned(PLACE_BYTES, 2 * KVT_DISK_RECORD_BYTES_MAX);
    r = inspector->file.records == NULL ? kvt_trace(-ENOMEM) : inspector_run(inspector);
    if (inspector->file.fd >= 0)
        (void)close(inspector->file.fd);
    kvt_free(inspector->file.records);
    kvt_free(inspector->window);
    return r;
}
