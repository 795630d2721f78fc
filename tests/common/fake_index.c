#include "tests/common/fake_index.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/common/fake_tier.h"

#define BUCKETS 4096u
#define CATALOG_RECORDS_MAX 128u
#define RING_BYTES_DEFAULT (4 * KVT_MIB)
#define COMMIT_NS_DEFAULT (100 * KVT_NS_PER_MS)

/* A put with what its pointers point to, in one piece of memory. */
struct kept {
    struct kvt_index_put put;
    struct kept *next;
    uint64_t seq, bytes, put_ns;
    _Alignas(8) uint8_t storage[];
};

struct row {
    struct row *next; /* of the bucket */
    struct kept *kept;
    struct kept *copies[KVT_COMPONENTS_MAX];
    /* Of a load. */
    struct row *parent, *child, *sibling;
    bool is_held, is_wanted;
};

struct table {
    struct row *buckets[BUCKETS];
    uint64_t count;
};

enum life { LIFE_NONE, LIFE_LOADING, LIFE_READY, LIFE_FAILED, LIFE_OVER };

struct fake_index {
    struct kvt_index base;
    struct fake_index_config config;
    enum life life;
    uint64_t random, now_ns;
    /* Durable: what a next life finds. */
    struct table rows;
    struct kept *catalog[CATALOG_RECORDS_MAX];
    /* What was put, in order; up to flight_seq a commit is under way until flight_due_ns. */
    struct kept *pending, **pending_tail;
    struct table told; /* rows as they will be when all that was put is committed */
    uint64_t seq, pending_bytes, flight_seq, flight_due_ns, committed_seq, told_seq, refused,
        refused_catalogs;
    bool is_flying, is_held, is_urgent;
    /* Of a load. */
    struct row **order;
    uint64_t order_count, order_at, load_ns, load_delay_ns;
    uint32_t order_component; /* the copy that comes next; 0: the row itself, else component + 1 */
    struct kvt_index_loaded loaded;
    int error;
    char why[160];
    bool is_failure_told;
    struct kept *event; /* what the last event points to */
};

static void *take(size_t bytes)
{
    void *memory = calloc(1, bytes);

    if (memory == NULL)
        abort();
    return memory;
}

static void demand(const struct fake_index *fake, bool is_fine, const struct kvt_index_put *put,
                   const char *what)
{
    if (is_fine || fake->config.is_lenient)
        return;
    fprintf(stderr, "fake index: block %llu of namespace %u: %s\n",
            (unsigned long long)put->key.block_id, put->key.ns, what);
    abort();
}

static const void *keep_bytes(struct kept *kept, uint64_t *at, const void *data, uint64_t bytes)
{
    uint8_t *to = kept->storage + *at;

    if (data == NULL)
        return NULL;
    memcpy(to, data, bytes);
    *at += kvt_round_up(bytes, 8);
    return to;
}

static struct kept *keep(const struct kvt_index_put *put)
{
    uint64_t at = 0, bytes = kvt_index_put_bytes(put);
    struct kept *kept = take(sizeof(*kept) + bytes + 8 * 8);
    struct kvt_index_put *to = &kept->put;

    *to = *put;
    kept->bytes = bytes;
    to->extra_key = keep_bytes(kept, &at, put->extra_key, KVT_EXTRA_KEY_BYTES);
    to->root_key = keep_bytes(kept, &at, put->root_key, put->root_key_bytes);
    to->tokens = keep_bytes(kept, &at, put->tokens, 4ull * put->tokens_count);
    to->slot_offsets = keep_bytes(kept, &at, put->slot_offsets, 8ull * put->shards_count);
    to->run_offsets = keep_bytes(kept, &at, put->run_offsets, 8ull * put->shards_count);
    to->catalog_data = keep_bytes(kept, &at, put->catalog_data, put->catalog_bytes);
    return kept;
}

/* ---- tables of rows ------------------------------------------------------------------------- */

static struct row **row_at(struct table *table, uint64_t block_id)
{
    struct row **at = &table->buckets[block_id % BUCKETS];

    while (*at != NULL && (*at)->kept->put.key.block_id != block_id)
        at = &(*at)->next;
    return at;
}

static void row_free(struct table *table, struct row **at)
{
    struct row *row = *at;

    *at = row->next;
    for (uint32_t i = 0; i < KVT_COMPONENTS_MAX; i++)
        free(row->copies[i]);
    free(row->kept);
    free(row);
    table->count--;
}

static void table_clear(struct table *table)
{
    for (uint32_t i = 0; i < BUCKETS; i++)
        while (table->buckets[i] != NULL)
            row_free(table, &table->buckets[i]);
}

static void table_drop_old(struct table *table, const struct kvt_index_key *key)
{
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct row **at = &table->buckets[i]; *at != NULL;) {
            const struct kvt_index_key *row = &(*at)->kept->put.key;

            if (row->ns == key->ns && row->epoch < key->epoch)
                row_free(table, at);
            else
                at = &(*at)->next;
        }
}

/* A row without its parent is refused; those that a load found are there already. */
static bool has_parent(struct table *table, const struct kvt_index_put *put)
{
    return put->kind != KVT_INDEX_PUT_ROW || put->parent_id == 0 ||
           *row_at(table, put->parent_id) != NULL;
}

/* False: nothing was done, for want of the row. */
static bool table_apply(struct table *table, const struct kvt_index_put *put)
{
    struct row **at = row_at(table, put->key.block_id);
    struct kept *kept;

    switch (put->kind) {
    case KVT_INDEX_PUT_ROW:
        kept = keep(put); /* it may be what the table has */
        if (*at == NULL) {
            *at = take(sizeof(**at));
            table->count++;
        }
        free((*at)->kept);
        (*at)->kept = kept;
        return true;
    case KVT_INDEX_PUT_COPY:
    case KVT_INDEX_PUT_DROP_COPY:
        if (*at == NULL)
            return false;
        kept = put->kind == KVT_INDEX_PUT_COPY ? keep(put) : NULL;
        free((*at)->copies[put->component]);
        (*at)->copies[put->component] = kept;
        return true;
    case KVT_INDEX_PUT_DROP_ROW:
        if (*at != NULL)
            row_free(table, at);
        return true;
    case KVT_INDEX_PUT_DROP_OLD:
        table_drop_old(table, &put->key);
        return true;
    default:
        return true;
    }
}

static bool has_child(const struct table *table, const struct kvt_index_key *key)
{
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (const struct row *row = table->buckets[i]; row != NULL; row = row->next)
            if (row->kept->put.parent_id == key->block_id && row->kept->put.key.ns == key->ns)
                return true;
    return false;
}

/* ---- commits -------------------------------------------------------------------------------- */

static bool is_refused(struct fake_index *fake, const struct kvt_index_put *put)
{
    bool is_adding = put->kind == KVT_INDEX_PUT_ROW || put->kind == KVT_INDEX_PUT_COPY;

    return is_adding && fake_random(&fake->random) % 1000 < fake->config.refuse_rate;
}

static void commit_first(struct fake_index *fake)
{
    struct kept *kept = fake->pending;
    const struct kvt_index_put *put = &kept->put;

    fake->pending = kept->next;
    if (fake->pending == NULL)
        fake->pending_tail = &fake->pending;
    fake->pending_bytes -= kept->bytes;
    fake->committed_seq = kept->seq;
    if (put->kind == KVT_INDEX_PUT_CATALOG) {
        if (fake->config.catalog_write != NULL &&
            fake->config.catalog_write(fake->config.ctx, put->catalog_number, put->catalog_data,
                                       put->catalog_bytes) != 0) {
            fake->refused++;
            fake->refused_catalogs++;
        } else {
            free(fake->catalog[put->catalog_number]);
            fake->catalog[put->catalog_number] = keep(put);
        }
    } else if (is_refused(fake, put) || !has_parent(&fake->rows, put) ||
               !table_apply(&fake->rows, put)) {
        fake->refused++;
    }
    free(kept);
}

static void commit_begin(struct fake_index *fake)
{
    int r = fake->config.data_sync == NULL ? 0 : fake->config.data_sync(fake->config.ctx);

    if (r < 0) {
        fake_index_fail(fake, r, "data could not be synchronised");
        return;
    }
    fake->is_flying = true;
    fake->is_urgent = false;
    fake->flight_seq = fake->seq;
    fake->flight_due_ns = fake->now_ns;
    if (fake->config.delay_ns_max > 0)
        fake->flight_due_ns += fake_random(&fake->random) % fake->config.delay_ns_max;
}

static void commit_end(struct fake_index *fake)
{
    while (fake->pending != NULL && fake->pending->seq <= fake->flight_seq)
        commit_first(fake);
    fake->is_flying = false;
}

static uint64_t begin_due_ns(const struct fake_index *fake)
{
    bool is_full = fake->pending_bytes >= fake->config.ring_bytes / 4;

    if (fake->pending == NULL || fake->is_flying)
        return KVT_TIME_NEVER_NS;
    if (fake->is_urgent || is_full || fake->life == LIFE_LOADING)
        return fake->now_ns;
    return kvt_time_add(fake->pending->put_ns, fake->config.commit_ns);
}

static void run(struct fake_index *fake)
{
    while (fake->life == LIFE_LOADING || fake->life == LIFE_READY) {
        if (fake->is_flying && !fake->is_held && fake->flight_due_ns <= fake->now_ns)
            commit_end(fake);
        else if (begin_due_ns(fake) <= fake->now_ns)
            commit_begin(fake);
        else
            return;
    }
}

static void forget_pending(struct fake_index *fake)
{
    while (fake->pending != NULL) {
        struct kept *kept = fake->pending;

        fake->pending = kept->next;
        free(kept);
    }
    fake->pending_tail = &fake->pending;
    fake->pending_bytes = 0;
    fake->is_flying = false;
    table_clear(&fake->told);
}

static bool shares_slot(const struct kvt_index_put *a, const struct kvt_index_put *b)
{
    bool is_same = a->key.block_id == b->key.block_id && a->component == b->component;

    for (uint32_t i = 0; !is_same && i < a->shards_count; i++)
        for (uint32_t k = 0; k < b->shards_count; k++)
            if (a->slot_offsets[i] == b->slot_offsets[k])
                return true;
    return false;
}

static bool is_slot_free(const struct table *table, const struct kvt_index_put *copy)
{
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (const struct row *row = table->buckets[i]; row != NULL; row = row->next)
            for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++)
                if (row->copies[c] != NULL && shares_slot(copy, &row->copies[c]->put))
                    return false;
    return true;
}

/* ---- the engine's side ---------------------------------------------------------------------- */

static void check_put(const struct fake_index *fake, const struct kvt_index_put *put)
{
    struct table *told = (struct table *)&fake->told;
    const struct row *row = *row_at(told, put->key.block_id);

    switch (put->kind) {
    case KVT_INDEX_PUT_ROW:
        if (put->parent_id != 0)
            row = *row_at(told, put->parent_id);
        demand(fake, put->parent_id == 0 || row != NULL, put, "its parent was never put");
        demand(fake, put->parent_id == 0 || row->kept->put.key.epoch == put->key.epoch, put,
               "its parent is of another epoch");
        demand(fake, (put->parent_id == 0) == (put->root_key != NULL), put,
               "first blocks have a root key, others do not");
        break;
    case KVT_INDEX_PUT_COPY:
        demand(fake, row != NULL, put, "a copy of a row that was never put");
        demand(fake, put->component < KVT_COMPONENTS_MAX && put->shards_count > 0, put,
               "a copy of no component or without a shard");
        demand(fake, fake->config.is_lenient || is_slot_free(told, put), put,
               "a copy in a slot that another one still has");
        break;
    case KVT_INDEX_PUT_DROP_ROW:
        demand(fake, row == NULL || !has_child(told, &put->key), put, "dropped with rows below it");
        break;
    default:
        break;
    }
}

static int fake_put(struct kvt_index *base, const struct kvt_index_put *put, uint64_t *ret_seq)
{
    struct fake_index *fake = (struct fake_index *)base;
    uint64_t bytes = kvt_index_put_bytes(put);
    struct kept *kept;

    KVT_ASSERT(fake->life != LIFE_NONE && fake->life != LIFE_OVER);
    if (fake->life == LIFE_LOADING && put->kind != KVT_INDEX_PUT_CATALOG)
        return KVT_INDEX_E_FULL;
    if (fake->life != LIFE_FAILED) {
        if (fake->pending_bytes + bytes > fake->config.ring_bytes)
            return KVT_INDEX_E_FULL;
        KVT_ASSERT(put->kind != KVT_INDEX_PUT_CATALOG || put->catalog_number < CATALOG_RECORDS_MAX);
        check_put(fake, put);
        (void)table_apply(&fake->told, put);
        kept = keep(put);
        kept->seq = fake->seq + 1;
        kept->put_ns = fake->now_ns;
        *fake->pending_tail = kept;
        fake->pending_tail = &kept->next;
        fake->pending_bytes += bytes;
        fake->is_urgent |= put->kind == KVT_INDEX_PUT_SYNC;
    }
    fake->seq++;
    if (ret_seq != NULL)
        *ret_seq = fake->seq;
    return 0;
}

static void tell(struct fake_index *fake, const struct kvt_index_put *put,
                 struct kvt_index_event *ret_event)
{
    free(fake->event);
    fake->event = keep(put);
    ret_event->put = fake->event->put;
    ret_event->kind = put->kind == KVT_INDEX_PUT_ROW ? KVT_INDEX_EVENT_ROW : KVT_INDEX_EVENT_COPY;
    fake->load_ns += fake->config.load_event_ns;
}

/* The next event of a load; false: not yet. */
static bool load_next(struct fake_index *fake, struct kvt_index_event *ret_event)
{
    if (fake->now_ns < fake->load_ns)
        return false;
    while (fake->order_at < fake->order_count) {
        struct row *row = fake->order[fake->order_at];
        uint32_t at = fake->order_component++;

        if (at == 0) {
            tell(fake, &row->kept->put, ret_event);
            return true;
        }
        if (at > KVT_COMPONENTS_MAX) {
            fake->order_component = 0;
            fake->order_at++;
        } else if (row->copies[at - 1] != NULL) {
            tell(fake, &row->copies[at - 1]->put, ret_event);
            return true;
        }
    }
    fake->life = LIFE_READY;
    atomic_store(&fake->base.counters.state, KVT_INDEX_READY);
    ret_event->kind = KVT_INDEX_EVENT_LOADED;
    ret_event->loaded = fake->loaded;
    return true;
}

static bool fake_next(struct kvt_index *base, struct kvt_index_event *ret_event)
{
    struct fake_index *fake = (struct fake_index *)base;
    struct kvt_index_event event = {0};
    bool is_there = false;

    run(fake);
    if (fake->told_seq < fake->committed_seq) {
        event.kind = KVT_INDEX_EVENT_COMMITTED;
        event.seq = fake->told_seq = fake->committed_seq;
        event.refused = fake->refused;
        event.refused_catalogs = fake->refused_catalogs;
        is_there = true;
    } else if (fake->life == LIFE_FAILED && !fake->is_failure_told) {
        event.kind = KVT_INDEX_EVENT_FAILED;
        event.error = fake->error;
        memcpy(event.why, fake->why, sizeof(event.why));
        fake->is_failure_told = is_there = true;
    } else if (fake->life == LIFE_LOADING) {
        is_there = load_next(fake, &event);
    }
    if (is_there)
        *ret_event = event;
    return is_there;
}

static uint64_t fake_room_bytes(const struct kvt_index *base)
{
    const struct fake_index *fake = (const struct fake_index *)base;

    return fake->life == LIFE_FAILED ? fake->config.ring_bytes
                                     : fake->config.ring_bytes - fake->pending_bytes;
}

static void life_end(struct fake_index *fake)
{
    forget_pending(fake);
    free(fake->event);
    free(fake->order);
    fake->event = NULL;
    fake->order = NULL;
    fake->order_count = 0;
    fake->life = LIFE_OVER;
}

static void fake_close(struct kvt_index *base)
{
    struct fake_index *fake = (struct fake_index *)base;
    bool is_up = fake->life == LIFE_READY || fake->life == LIFE_LOADING;

    if (is_up && fake->is_flying)
        commit_end(fake);
    if (is_up && fake->pending != NULL) {
        commit_begin(fake);
        if (fake->is_flying)
            commit_end(fake);
    }
    life_end(fake);
}

static const struct kvt_index_ops fake_ops = {
    .put = fake_put, .next = fake_next, .room_bytes = fake_room_bytes, .close = fake_close};

void fake_index_refuse(struct fake_index *fake, uint32_t rate)
{
    fake->config.refuse_rate = rate;
}

void fake_index_delay_load(struct fake_index *fake, uint64_t delay_ns)
{
    fake->load_delay_ns = delay_ns;
}

/* ---- a load --------------------------------------------------------------------------------- */

static int by_key(const void *left, const void *right)
{
    const struct kvt_index_key *a = &(*(struct row *const *)left)->kept->put.key;
    const struct kvt_index_key *b = &(*(struct row *const *)right)->kept->put.key;

    if (a->ns != b->ns)
        return a->ns < b->ns ? -1 : 1;
    if (a->epoch != b->epoch)
        return a->epoch < b->epoch ? -1 : 1;
    if (a->block_idx != b->block_idx)
        return a->block_idx < b->block_idx ? -1 : 1;
    return a->block_id < b->block_id ? -1 : a->block_id > b->block_id;
}

static bool is_present(const struct kvt_index_ns *namespaces, const struct kvt_index_key *key)
{
    return namespaces == NULL ||
           (namespaces[key->ns].is_used && namespaces[key->ns].epoch == key->epoch);
}

/* Whether the row's parent is there; links them. Parents come first. */
static bool link_parent(struct fake_index *fake, struct row *row)
{
    const struct kvt_index_put *put = &row->kept->put;
    const struct kvt_index_key *key;

    row->parent = NULL;
    if (put->parent_id == 0)
        return put->key.block_idx == 0;
    row->parent = *row_at(&fake->rows, put->parent_id);
    if (row->parent == NULL && fake->config.has_siblings && put->key.block_idx > 0)
        return true;
    if (row->parent == NULL || !row->parent->is_held)
        return false;
    key = &row->parent->kept->put.key;
    return key->ns == put->key.ns && key->epoch == put->key.epoch &&
           key->block_idx + 1 == put->key.block_idx;
}

static void judge_row(struct fake_index *fake, struct row *row, const struct kvt_index_ns *spaces)
{
    const struct kvt_index_key *key = &row->kept->put.key;

    row->child = row->sibling = NULL;
    row->is_held = is_present(spaces, key) && link_parent(fake, row);
    row->is_wanted = false;
    fake->loaded.block_id_max = KVT_MAX(fake->loaded.block_id_max, key->block_id);
    for (uint32_t i = 0; i < KVT_COMPONENTS_MAX; i++)
        if (row->copies[i] != NULL) {
            row->is_wanted = true;
            fake->loaded.content_max =
                KVT_MAX(fake->loaded.content_max, row->copies[i]->put.content);
        }
}

/* Depth first, each before what is below it. */
static void put_in_order(struct fake_index *fake, struct row *roots, uint64_t count)
{
    struct row **stack = take((count + 1) * sizeof(struct row *));
    uint64_t depth = 0;

    for (struct row *root = roots; root != NULL; root = root->sibling)
        stack[depth++] = root;
    while (depth > 0) {
        struct row *row = stack[--depth];

        fake->order[fake->order_count++] = row;
        fake->loaded.rows++;
        for (uint32_t i = 0; i < KVT_COMPONENTS_MAX; i++)
            fake->loaded.copies += row->copies[i] != NULL;
        for (struct row *child = row->child; child != NULL; child = child->sibling)
            stack[depth++] = child;
    }
    free(stack);
}

static void load_begin(struct fake_index *fake, const struct kvt_index_ns *namespaces)
{
    struct row **all = take((fake->rows.count + 1) * sizeof(struct row *)), *roots = NULL;
    struct row *strays = NULL;
    uint64_t count = 0;

    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct row *row = fake->rows.buckets[i]; row != NULL; row = row->next)
            all[count++] = row;
    qsort(all, count, sizeof(struct row *), by_key);
    for (uint64_t i = 0; i < count; i++)
        judge_row(fake, all[i], namespaces);
    for (uint64_t i = count; i-- > 0;) {
        struct row *row = all[i], **list;

        if (!row->is_held || !row->is_wanted) {
            struct row **at = row_at(&fake->rows, row->kept->put.key.block_id);

            row_free(&fake->rows, at);
            fake->loaded.dropped++;
            continue;
        }
        list = row->parent != NULL                 ? &row->parent->child
               : row->kept->put.key.block_idx == 0 ? &roots
                                                   : &strays;
        row->sibling = *list;
        *list = row;
        if (row->parent != NULL)
            row->parent->is_wanted = true;
    }
    free(all);
    fake->order = take((fake->rows.count + 1) * sizeof(struct row *));
    fake->order_count = 0;
    put_in_order(fake, roots, fake->rows.count);
    while (strays != NULL) { /* the least deep first: as they were sorted */
        struct row *stray = strays;

        strays = stray->sibling;
        stray->sibling = NULL;
        put_in_order(fake, stray, fake->rows.count);
    }
    for (uint64_t i = 0; i < fake->order_count; i++)
        (void)table_apply(&fake->told, &fake->order[i]->kept->put);
}

/* ---- the test's side ------------------------------------------------------------------------ */

struct fake_index *fake_index_new(const struct fake_index_config *config)
{
    struct fake_index *fake = take(sizeof(*fake));

    fake->config = *config;
    if (fake->config.ring_bytes == 0)
        fake->config.ring_bytes = RING_BYTES_DEFAULT;
    if (fake->config.commit_ns == 0)
        fake->config.commit_ns = COMMIT_NS_DEFAULT;
    fake->random = config->seed;
    fake->base.ops = &fake_ops;
    fake->pending_tail = &fake->pending;
    return fake;
}

void fake_index_free(struct fake_index *fake)
{
    if (fake == NULL)
        return;
    KVT_ASSERT(fake->life == LIFE_NONE || fake->life == LIFE_OVER);
    table_clear(&fake->rows);
    for (uint32_t i = 0; i < CATALOG_RECORDS_MAX; i++)
        free(fake->catalog[i]);
    free(fake);
}

struct kvt_index *fake_index_open(struct fake_index *fake, const struct kvt_index_ns *namespaces,
                                  bool was_rebuilt)
{
    KVT_ASSERT(fake->life == LIFE_NONE || fake->life == LIFE_OVER);
    fake->life = LIFE_LOADING;
    fake->seq = fake->committed_seq = fake->told_seq = fake->flight_seq = fake->refused = 0;
    fake->refused_catalogs = 0;
    fake->is_urgent = fake->is_failure_told = false;
    fake->order_at = fake->order_component = 0;
    fake->load_ns = fake->now_ns + fake->load_delay_ns;
    fake->load_delay_ns = 0;
    fake->loaded = (struct kvt_index_loaded){.was_rebuilt = was_rebuilt};
    atomic_store(&fake->base.counters.state, KVT_INDEX_LOADING);
    load_begin(fake, namespaces);
    return &fake->base;
}

void fake_index_crash(struct fake_index *fake)
{
    uint64_t survive = 0;

    KVT_ASSERT(fake->life != LIFE_NONE && fake->life != LIFE_OVER);
    if (fake->is_flying && fake->life != LIFE_FAILED) {
        uint64_t first = fake->pending->seq;

        survive = first + fake_random(&fake->random) % (fake->flight_seq - first + 2);
    }
    while (fake->pending != NULL && fake->pending->seq < survive)
        commit_first(fake);
    life_end(fake);
}

void fake_index_fail(struct fake_index *fake, int error, const char *why)
{
    if (fake->life == LIFE_FAILED)
        return;
    KVT_ASSERT(fake->life == LIFE_LOADING || fake->life == LIFE_READY);
    forget_pending(fake);
    fake->life = LIFE_FAILED;
    fake->error = error;
    (void)snprintf(fake->why, sizeof(fake->why), "%s", why);
    atomic_store(&fake->base.counters.state, KVT_INDEX_LOST);
}

void fake_index_set_time(struct fake_index *fake, uint64_t now_ns)
{
    KVT_ASSERT(now_ns >= fake->now_ns);
    fake->now_ns = now_ns;
    run(fake);
}

uint64_t fake_index_next_ns(const struct fake_index *fake)
{
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    if (fake->life == LIFE_FAILED)
        return fake->is_failure_told ? next_ns : fake->now_ns;
    if (fake->life != LIFE_LOADING && fake->life != LIFE_READY)
        return next_ns;
    if (fake->told_seq < fake->committed_seq)
        return fake->now_ns;
    if (fake->life == LIFE_LOADING)
        next_ns = KVT_MAX(fake->load_ns, fake->now_ns);
    if (fake->is_flying && !fake->is_held)
        next_ns = KVT_MIN(next_ns, KVT_MAX(fake->flight_due_ns, fake->now_ns));
    return KVT_MIN(next_ns, begin_due_ns(fake));
}

void fake_index_hold(struct fake_index *fake, bool is_held)
{
    fake->is_held = is_held;
}

void fake_index_add(struct fake_index *fake, const struct kvt_index_put *put)
{
    KVT_ASSERT(fake->life == LIFE_NONE || fake->life == LIFE_OVER);
    if (put->kind == KVT_INDEX_PUT_CATALOG) {
        free(fake->catalog[put->catalog_number]);
        fake->catalog[put->catalog_number] = keep(put);
        return;
    }
    KVT_ASSERT(table_apply(&fake->rows, put));
}

static bool has_copy(const struct row *row)
{
    for (uint32_t i = 0; i < KVT_COMPONENTS_MAX; i++)
        if (row->copies[i] != NULL)
            return true;
    return false;
}

void fake_index_scan(struct fake_index *fake,
                     uint32_t (*root_key)(const struct kvt_index_put *row, uint8_t *ret_key))
{
    KVT_ASSERT(fake->life == LIFE_NONE || fake->life == LIFE_OVER);
    for (uint32_t i = 0; i < BUCKETS; i++) {
        for (struct row **at = &fake->rows.buckets[i]; *at != NULL;) {
            struct kvt_index_put put = (*at)->kept->put;
            uint8_t key[KVT_INDEX_ROOT_KEY_BYTES_MAX];

            if (!has_copy(*at)) {
                row_free(&fake->rows, at);
                continue;
            }
            if (put.root_key != NULL) {
                struct kept *old = (*at)->kept;

                put.root_key_bytes = root_key(&put, key);
                put.root_key = key;
                (*at)->kept = keep(&put);
                free(old);
            }
            at = &(*at)->next;
        }
    }
}

const struct kvt_index_put *fake_index_row(const struct fake_index *fake, uint64_t block_id)
{
    const struct row *row = *row_at((struct table *)&fake->rows, block_id);

    return row == NULL ? NULL : &row->kept->put;
}

const struct kvt_index_put *fake_index_copy(const struct fake_index *fake, uint64_t block_id,
                                            uint16_t component)
{
    const struct row *row = *row_at((struct table *)&fake->rows, block_id);

    return row == NULL || row->copies[component] == NULL ? NULL : &row->copies[component]->put;
}

const struct kvt_index_put *fake_index_catalog(const struct fake_index *fake, uint32_t number)
{
    return fake->catalog[number] == NULL ? NULL : &fake->catalog[number]->put;
}

uint64_t fake_index_rows_count(const struct fake_index *fake)
{
    return fake->rows.count;
}
