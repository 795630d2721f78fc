/* The rebuild of an index. What the scan finds is kept in one piece of memory until all is known:
 *
 *   row (a block: parent, tokens) -> content -> content     in any order, of any component;
 *                                    slot offsets, a shard each; NONE: not found
 *
 * Rows are found by (namespace, block id) through buckets. The memory is touched as it is used. */
#include "tiers/index/rebuild.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/hash.h"
#include "tiers/slab.h"

#define MEMORY_BYTES_MIN (64u << 20)
#define BYTES_PER_BUCKET 256u /* of memory: about one row */
#define NONE UINT64_MAX
#define PATH_BYTES 4096u
#define ROOT_KEY_OF_DIGEST 0xd1 /* then the digest: the key itself is in no slot */

struct content {
    struct content *next; /* of the same row */
    struct row *row;
    uint64_t generation, slot_bytes;
    uint16_t component, shards_found;
    bool is_chosen;
    uint64_t offsets[]; /* a shard each */
};

struct row {
    struct row *next; /* in the bucket */
    struct content *contents;
    uint64_t block_id, parent_id;
    uint32_t block_idx;
    uint16_t ns;
    uint8_t chosen;  /* bit c: a content of component c is chosen */
    bool is_linked;  /* its parents are all there */
    bool is_wanted;  /* a content is chosen for it or below it */
    bool is_refused; /* there was no room for it, or for a block before it */
    uint8_t extra_key[KVT_EXTRA_KEY_BYTES], root_digest[KVT_FINGERPRINT_BYTES];
    uint32_t tokens[];
};

struct rebuild {
    const struct kvt_index_rebuild_config *config;
    struct kvt_index_rebuild_report *report;
    const struct kvt_index_ns *namespaces;
    struct kvt_index_db *db;
    uint8_t *memory;
    uint64_t memory_bytes, memory_used;
    struct row **buckets;
    uint64_t buckets_count; /* a power of two */
    uint64_t rows_count, contents_count;
    struct row **rows;         /* by namespace, depth, id; when they are put by id */
    struct content **contents; /* newest first */
    struct kvt_slab *slab;
    uint32_t unit_bytes;
};

static const uint8_t no_extra_key[KVT_EXTRA_KEY_BYTES];

/* ---- what the scan finds -------------------------------------------------------------------- */

static void *take(struct rebuild *rebuild, uint64_t bytes)
{
    void *ptr = rebuild->memory + rebuild->memory_used;

    bytes = kvt_round_up(bytes, 8);
    if (bytes > rebuild->memory_bytes - rebuild->memory_used)
        return NULL;
    rebuild->memory_used += bytes;
    return ptr;
}

static struct row **row_bucket(const struct rebuild *rebuild, uint32_t ns, uint64_t block_id)
{
    return &rebuild->buckets[kvt_hash64(&block_id, sizeof(block_id), ns) &
                             (rebuild->buckets_count - 1)];
}

static struct row *row_find(const struct rebuild *rebuild, uint32_t ns, uint64_t block_id)
{
    struct row *row = *row_bucket(rebuild, ns, block_id);

    while (row != NULL && (row->ns != ns || row->block_id != block_id))
        row = row->next;
    return row;
}

static struct row *row_add(struct rebuild *rebuild, const struct kvt_scan_slot *slot)
{
    const struct kvt_slot_info *info = slot->info;
    size_t tokens_bytes = info->block_tokens * sizeof(uint32_t);
    struct row **bucket = row_bucket(rebuild, slot->ns, info->block_id);
    struct row *row = take(rebuild, sizeof(*row) + tokens_bytes);

    if (row == NULL)
        return NULL;
    *row = (struct row){.next = *bucket,
                        .block_id = info->block_id,
                        .parent_id = info->parent_id,
                        .block_idx = (uint32_t)info->block_idx,
                        .ns = (uint16_t)slot->ns};
    memcpy(row->extra_key, info->extra_key, sizeof(row->extra_key));
    memcpy(row->root_digest, info->root_digest, sizeof(row->root_digest));
    memcpy(row->tokens, slot->tokens, tokens_bytes);
    *bucket = row;
    rebuild->rows_count++;
    return row;
}

/* Two slots of one block say the same of it, or one of them is not what it says. */
static bool row_is_of(const struct row *row, const struct kvt_scan_slot *slot)
{
    const struct kvt_slot_info *info = slot->info;

    return row->parent_id == info->parent_id && row->block_idx == info->block_idx &&
           memcmp(row->extra_key, info->extra_key, sizeof(row->extra_key)) == 0 &&
           memcmp(row->root_digest, info->root_digest, sizeof(row->root_digest)) == 0 &&
           memcmp(row->tokens, slot->tokens, info->block_tokens * sizeof(uint32_t)) == 0;
}

static struct content *content_get(struct rebuild *rebuild, struct row *row,
                                   const struct kvt_scan_slot *slot)
{
    const struct kvt_slot_info *info = slot->info;
    uint32_t shards = rebuild->namespaces[slot->ns].shards[info->component];
    struct content *content = row->contents;

    while (content != NULL &&
           (content->component != info->component || content->generation != info->generation))
        content = content->next;
    if (content != NULL)
        return content;
    content = take(rebuild, sizeof(*content) + shards * sizeof(uint64_t));
    if (content == NULL)
        return NULL;
    *content = (struct content){.next = row->contents,
                                .row = row,
                                .generation = info->generation,
                                .slot_bytes = slot->slot_bytes,
                                .component = info->component};
    for (uint32_t i = 0; i < shards; i++)
        content->offsets[i] = NONE;
    row->contents = content;
    rebuild->contents_count++;
    return content;
}

static int on_found(void *ctx, const struct kvt_scan_slot *slot)
{
    struct rebuild *rebuild = ctx;
    const struct kvt_slot_info *info = slot->info;
    struct row *row = row_find(rebuild, slot->ns, info->block_id);
    struct content *content;

    if ((info->block_idx == 0) != (info->parent_id == 0) || info->block_idx > UINT32_MAX ||
        info->generation == 0 || (row != NULL && !row_is_of(row, slot))) {
        rebuild->report->odd++;
        return 0;
    }
    if (row == NULL)
        row = row_add(rebuild, slot);
    content = row != NULL ? content_get(rebuild, row, slot) : NULL;
    if (content == NULL) {
        rebuild->report->left_out++;
        return 0;
    }
    if (content->slot_bytes != slot->slot_bytes) {
        rebuild->report->odd++;
        return 0;
    }
    /* A shard that is there twice was written twice: either will do. */
    if (content->offsets[info->rank] == NONE)
        content->shards_found++;
    content->offsets[info->rank] = slot->offset_bytes;
    return 0;
}

static int on_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    const struct rebuild *rebuild = ctx;

    if (rebuild->config->progress == NULL)
        return 0;
    return rebuild->config->progress(rebuild->config->ctx, done_bytes, total_bytes);
}

static bool has_anything(const struct rebuild *rebuild)
{
    bool is_any_used = false;

    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++)
        is_any_used |= rebuild->namespaces[i].is_used;
    return is_any_used && rebuild->config->scan->data_bytes > 0;
}

/* What the scan is to say must not be only in the device's cache: a copy that the index names is
 * durable. */
static int data_sync(const char *path)
{
    kvt_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0 || fdatasync(fd) != 0)
        return kvt_trace(-errno);
    return 0;
}

/* ---- choosing ------------------------------------------------------------------------------- */

static int by_depth(const void *a, const void *b)
{
    const struct row *x = *(struct row *const *)a, *y = *(struct row *const *)b;

    if (x->ns != y->ns)
        return x->ns < y->ns ? -1 : 1;
    if (x->block_idx != y->block_idx)
        return x->block_idx < y->block_idx ? -1 : 1;
    return (x->block_id > y->block_id) - (x->block_id < y->block_id);
}

static int by_id(const void *a, const void *b)
{
    const struct row *x = *(struct row *const *)a, *y = *(struct row *const *)b;

    if (x->block_id != y->block_id)
        return x->block_id < y->block_id ? -1 : 1;
    return (x->ns > y->ns) - (x->ns < y->ns);
}

static int by_age(const void *a, const void *b)
{
    const struct content *x = *(struct content *const *)a, *y = *(struct content *const *)b;

    if (x->generation != y->generation)
        return x->generation > y->generation ? -1 : 1;
    return (x->row->block_id > y->row->block_id) - (x->row->block_id < y->row->block_id);
}

static int lists_make(struct rebuild *rebuild)
{
    uint64_t rows = 0, contents = 0;

    rebuild->rows = kvt_alloc_zeroed(rebuild->rows_count, sizeof(*rebuild->rows));
    rebuild->contents = kvt_alloc_zeroed(rebuild->contents_count, sizeof(*rebuild->contents));
    if (rebuild->rows == NULL || rebuild->contents == NULL)
        return kvt_trace(-ENOMEM);
    for (uint64_t b = 0; b < rebuild->buckets_count; b++) {
        for (struct row *row = rebuild->buckets[b]; row != NULL; row = row->next) {
            rebuild->rows[rows++] = row;
            for (struct content *c = row->contents; c != NULL; c = c->next)
                rebuild->contents[contents++] = c;
        }
    }
    KVT_ASSERT(rows == rebuild->rows_count && contents == rebuild->contents_count);
    qsort(rebuild->rows, rows, sizeof(*rebuild->rows), by_depth);
    qsort(rebuild->contents, contents, sizeof(*rebuild->contents), by_age);
    return 0;
}

static struct row *row_parent(const struct rebuild *rebuild, const struct row *row)
{
    struct row *parent = row->parent_id != 0 ? row_find(rebuild, row->ns, row->parent_id) : NULL;

    if (parent == NULL || (uint64_t)parent->block_idx + 1 != row->block_idx ||
        memcmp(parent->root_digest, row->root_digest, sizeof(row->root_digest)) != 0)
        return NULL;
    return parent;
}

static uint64_t run_offset(const struct rebuild *rebuild, const struct content *content,
                           uint32_t shard)
{
    return kvt_scan_run_offset(content->offsets[shard], content->slot_bytes, rebuild->unit_bytes);
}

/* Takes the places of all its shards, or of none. */
static bool content_fits(struct rebuild *rebuild, const struct content *content)
{
    uint32_t shards = rebuild->namespaces[content->row->ns].shards[content->component];
    struct kvt_slot slots[KVT_RANKS_MAX];
    uint32_t class_idx, taken = 0;

    if (kvt_slab_class(rebuild->slab, content->slot_bytes, &class_idx) != 0)
        return false;
    while (taken < shards &&
           kvt_slab_adopt(rebuild->slab, class_idx, content->offsets[taken],
                          run_offset(rebuild, content, taken), 0, &slots[taken]) == 0)
        taken++;
    if (taken == shards)
        return true;
    while (taken > 0)
        kvt_slab_give(rebuild->slab, slots[--taken]);
    return false;
}

/* Which rows lead to what: parents before children down, children before parents up. */
static void choose(struct rebuild *rebuild)
{
    struct kvt_index_rebuild_report *report = rebuild->report;

    for (uint64_t i = 0; i < rebuild->rows_count; i++) {
        struct row *row = rebuild->rows[i], *parent = row_parent(rebuild, row);

        /* A parent of which there is no trace may be on another device. */
        row->is_linked = row->block_idx == 0 || (parent != NULL && parent->is_linked) ||
                         (rebuild->config->db->has_siblings &&
                          row_find(rebuild, row->ns, row->parent_id) == NULL);
        report->orphans += !row->is_linked;
    }
    for (uint64_t i = 0; i < rebuild->contents_count; i++) {
        struct content *content = rebuild->contents[i];
        struct row *row = content->row;
        uint8_t bit = (uint8_t)(1u << content->component);

        if (content->shards_found < rebuild->namespaces[row->ns].shards[content->component]) {
            report->partial++;
        } else if ((row->chosen & bit) != 0) {
            report->superseded++;
        } else if (row->is_linked && content_fits(rebuild, content)) {
            content->is_chosen = true;
            row->chosen |= bit;
        } else {
            report->misfits += row->is_linked;
        }
    }
    for (uint64_t i = rebuild->rows_count; i > 0; i--) {
        struct row *row = rebuild->rows[i - 1];
        struct row *parent = row->is_linked ? row_parent(rebuild, row) : NULL;

        row->is_wanted |= row->chosen != 0;
        if (parent != NULL)
            parent->is_wanted |= row->is_wanted;
    }
}

/* ---- putting -------------------------------------------------------------------------------- */

/* 0; or -errno: the database is dead. A put for which there is no room is counted. */
static int put(struct rebuild *rebuild, const struct kvt_index_put *put, bool *ret_is_put)
{
    int r = kvt_index_db_apply(rebuild->db, put);

    *ret_is_put = r == 0;
    if (r == KVT_INDEX_DB_E_FULL)
        rebuild->report->left_out++;
    else if (r == -EINVAL)
        rebuild->report->odd++;
    else if (r != 0)
        return kvt_trace(r);
    return 0;
}

static int content_put(struct rebuild *rebuild, const struct content *content,
                       const struct kvt_index_key *key)
{
    uint64_t runs[KVT_RANKS_MAX];
    struct kvt_index_put copy = {
        .kind = KVT_INDEX_PUT_COPY,
        .key = *key,
        .component = content->component,
        .shards_count = rebuild->namespaces[content->row->ns].shards[content->component],
        .content = content->generation,
        .slot_bytes = content->slot_bytes,
        .slot_offsets = content->offsets,
        .run_offsets = runs,
    };
    bool is_put = false;
    int r;

    for (uint32_t i = 0; i < copy.shards_count; i++)
        runs[i] = run_offset(rebuild, content, i);
    r = put(rebuild, &copy, &is_put);
    rebuild->report->copies += is_put;
    return r;
}

static int row_put(struct rebuild *rebuild, struct row *row)
{
    const struct kvt_index_ns *ns = &rebuild->namespaces[row->ns];
    uint8_t root_key[1 + KVT_FINGERPRINT_BYTES] = {ROOT_KEY_OF_DIGEST};
    struct kvt_index_put block = {
        .kind = KVT_INDEX_PUT_ROW,
        .key = {.ns = row->ns,
                .epoch = ns->epoch,
                .block_idx = row->block_idx,
                .block_id = row->block_id},
        .parent_id = row->parent_id,
        .tokens_count = ns->block_tokens,
        .tokens = row->tokens,
    };
    bool is_put = false;
    int r;

    if (memcmp(row->extra_key, no_extra_key, sizeof(no_extra_key)) != 0)
        block.extra_key = row->extra_key;
    if (row->block_idx == 0) {
        memcpy(root_key + 1, row->root_digest, sizeof(row->root_digest));
        block.root_key = root_key;
        block.root_key_bytes = sizeof(root_key);
    }
    r = put(rebuild, &block, &is_put);
    row->is_refused = !is_put;
    rebuild->report->rows += is_put;
    for (const struct content *c = row->contents; c != NULL && r == 0 && is_put; c = c->next)
        if (c->is_chosen)
            r = content_put(rebuild, c, &block.key);
    return r;
}

/* In the order in which the daemon put them, so that the file's pages are full (row.h): with the
 * parents first they take half as much again. Parents have lower ids as a rule; should one come
 * behind a child and be refused, the next walk drops the child. */
static int rows_put(struct rebuild *rebuild)
{
    qsort(rebuild->rows, rebuild->rows_count, sizeof(*rebuild->rows), by_id);
    for (uint64_t i = 0; i < rebuild->rows_count; i++) {
        struct row *row = rebuild->rows[i];
        const struct row *parent = row->is_wanted ? row_parent(rebuild, row) : NULL;
        int r;

        if (!row->is_linked || !row->is_wanted)
            continue;
        row->is_refused = parent != NULL && parent->is_refused;
        if (row->is_refused)
            continue;
        r = row_put(rebuild, row);
        if (r != 0)
            return r;
    }
    return kvt_index_db_commit(rebuild->db);
}

/* ---- the mark ------------------------------------------------------------------------------- */

static int mark_path(char out[PATH_BYTES], const char *path)
{
    int bytes = snprintf(out, PATH_BYTES, "%s.rebuild", path);

    return bytes < 0 || (size_t)bytes >= PATH_BYTES ? kvt_trace(-ENAMETOOLONG) : 0;
}

bool kvt_index_rebuild_is_due(const char *path)
{
    char mark[PATH_BYTES];

    return mark_path(mark, path) == 0 && access(mark, F_OK) == 0;
}

/* The mark is there, or gone, after a power cut, too. */
static int mark_sync(const char *mark)
{
    char folder[PATH_BYTES];
    const char *slash = strrchr(mark, '/');
    size_t bytes = slash == NULL ? 0 : (size_t)(slash - mark) + 1;
    kvt_autoclose int fd = -1;

    memcpy(folder, mark, bytes);
    folder[bytes] = '\0';
    fd = open(bytes == 0 ? "." : folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 || fsync(fd) != 0 ? kvt_trace(-errno) : 0;
}

/* Durable before anything of the index is lost. */
static int mark_make(const char *mark)
{
    kvt_autoclose int fd = open(mark, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);

    if (fd < 0 || fsync(fd) != 0)
        return kvt_trace(-errno);
    return mark_sync(mark);
}

/* Durable before anything is put: a mark that came back would throw a good index away. */
static int mark_remove(const char *mark)
{
    if (unlink(mark) != 0)
        return kvt_trace(-errno);
    return mark_sync(mark);
}

uint64_t kvt_index_rebuild_memory_bytes(uint64_t index_bytes, uint64_t ram_bytes)
{
    return KVT_MAX(KVT_MIN(index_bytes, ram_bytes / 4), (uint64_t)MEMORY_BYTES_MIN);
}

/* ---- all of it ------------------------------------------------------------------------------ */

static int memory_init(struct rebuild *rebuild)
{
    const struct kvt_index_rebuild_config *config = rebuild->config;
    struct kvt_slab_config slab = {.capacity_bytes = config->scan->data_bytes,
                                   .unit_bytes = rebuild->unit_bytes,
                                   .align_bytes = KVT_DIO_ALIGN_BYTES};
    uint64_t ram_bytes;

    ram_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    rebuild->memory_bytes = config->memory_bytes != 0
                                ? config->memory_bytes
                                : kvt_index_rebuild_memory_bytes(config->db->bytes, ram_bytes);
    rebuild->buckets_count = 1;
    while (rebuild->buckets_count < rebuild->memory_bytes / BYTES_PER_BUCKET)
        rebuild->buckets_count *= 2;
    rebuild->memory = kvt_alloc_zeroed(1, rebuild->memory_bytes);
    rebuild->buckets = kvt_alloc_zeroed(rebuild->buckets_count, sizeof(*rebuild->buckets));
    if (rebuild->memory == NULL || rebuild->buckets == NULL)
        return kvt_trace(-ENOMEM);
    return kvt_slab_new(&rebuild->slab, &slab);
}

static void memory_deinit(struct rebuild *rebuild)
{
    rebuild->slab = kvt_slab_free(rebuild->slab);
    kvt_free(rebuild->contents);
    kvt_free(rebuild->rows);
    kvt_free(rebuild->buckets);
    kvt_free(rebuild->memory);
}

static int fill(struct rebuild *rebuild)
{
    const struct kvt_scan_calls calls = {
        .found = on_found, .progress = on_progress, .ctx = rebuild};
    int r;

    if (!has_anything(rebuild))
        return 0;
    r = memory_init(rebuild);
    if (r == 0)
        r = data_sync(rebuild->config->scan->path);
    if (r == 0)
        r = kvt_scan_run(rebuild->config->scan, &calls, &rebuild->report->scan);
    if (r == 0)
        r = lists_make(rebuild);
    if (r != 0)
        return r;
    choose(rebuild);
    return rows_put(rebuild);
}

int kvt_index_rebuild(struct kvt_index_db **ret_db, const struct kvt_index_rebuild_config *config,
                      struct kvt_index_rebuild_report *ret_report, char why[KVT_INDEX_DB_WHY_BYTES])
{
    struct rebuild rebuild = {
        .config = config,
        .report = ret_report,
        .namespaces = config->db->namespaces,
        .unit_bytes =
            config->scan->unit_bytes != 0 ? config->scan->unit_bytes : KVT_SLAB_UNIT_L3_BYTES,
    };
    char mark[PATH_BYTES];
    int r = mark_path(mark, config->db->path);

    *ret_report = (struct kvt_index_rebuild_report){0};
    why[0] = '\0';
    if (r == 0)
        r = mark_make(mark);
    if (r == 0)
        r = kvt_index_db_replace(config->db);
    if (r == 0)
        r = kvt_index_db_open(&rebuild.db, config->db, why);
    if (r == KVT_INDEX_DB_E_BAD) /* what was made a moment ago */
        r = -EUCLEAN;
    if (r >= 0)
        r = fill(&rebuild);
    memory_deinit(&rebuild);
    if (r == 0)
        r = mark_remove(mark);
    if (r != 0) {
        (void)kvt_index_db_close(rebuild.db);
        return r;
    }
    *ret_db = rebuild.db;
    return 0;
}
