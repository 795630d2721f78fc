/* The walk: what of the rows holds, parents before children, depth first.
 *
 * Keys are in the order of block ids. One pass reads and checks everything; a parent is found by
 * its id in the rows so far (ids are stamps: parents are made before their children as a rule, and
 * where not they are found when all has been read). A second, over the rows, marks what has a copy
 * in or below it and links children to parents; a third follows the links from the first blocks
 * (and then from those whose parents may be another device's) and visits. Whatever was not visited
 * then does not hold, and is deleted.
 *
 *   rows      one a block    | id | parent | first child | next sibling | first entry | depth |
 *   entries   one a value    | type u8 | address u56 |  the block, its copies, its parts
 *
 * Values stay in LMDB's map (a read transaction holds them): 48 bytes of ours a block with a copy.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tiers/index/db_internal.h"

#define NO_ROW UINT32_MAX
#define ADDRESS_BITS 56u
#define AHEAD 16u /* rows that are on their way into the cache; a power of two */
#define DROPS_FIRST 64u

struct row {
    uint64_t id;
    uint32_t parent, first_child, next_sibling;
    uint32_t first_entry, depth;
    uint8_t entries_count, ns;
    bool is_alive; /* has a copy, or something below has */
    bool is_visited;
};
static_assert(sizeof(struct row) == 32, "two rows a cache line");

struct drop {
    struct kvt_index_key key;
    uint8_t type;
};

struct walk {
    struct kvt_index_db *db;
    struct row *rows;
    uint64_t *entries;
    uint32_t rows_count, entries_count, entries_max;
    struct drop *drops;
    uint64_t drops_count, drops_max;
    const uint8_t *leaf;    /* the page that is read */
    uint32_t waiting_count; /* rows whose parent was not read before them */
    /* The block that is being read. */
    struct kvt_index_key key;
    bool is_open;    /* its row is sound; else what comes of it is dropped */
    bool is_dropped; /* all of it is on the list of drops */
    uint32_t parts_count, parts_seen, tokens_left;
    uint64_t parent_id;
    struct kvt_index_loaded loaded;
};

static bool is_same_block(const struct kvt_index_key *a, const struct kvt_index_key *b)
{
    return a->block_id == b->block_id && a->block_idx == b->block_idx && a->epoch == b->epoch &&
           a->ns == b->ns;
}

static int drop_add(struct walk *walk, const struct kvt_index_key *key, uint8_t type)
{
    if (walk->drops_count == walk->drops_max) {
        uint64_t max = KVT_MAX(2 * walk->drops_max, DROPS_FIRST);
        struct drop *drops = kvt_alloc_zeroed(max, sizeof(*drops));

        if (drops == NULL)
            return kvt_trace(-ENOMEM);
        if (walk->drops_count > 0)
            memcpy(drops, walk->drops, walk->drops_count * sizeof(*drops));
        kvt_free(walk->drops);
        walk->drops = drops;
        walk->drops_max = max;
    }
    walk->drops[walk->drops_count++] = (struct drop){*key, type};
    walk->loaded.dropped++;
    return 0;
}

static const uint8_t *entry_value(uint64_t entry)
{
    return (const uint8_t *)(uintptr_t)(entry & ((1ull << ADDRESS_BITS) - 1));
}

static uint8_t entry_type(uint64_t entry)
{
    return (uint8_t)(entry >> ADDRESS_BITS);
}

static void entry_add(struct walk *walk, uint8_t type, const uint8_t *value)
{
    KVT_ASSERT(walk->entries_count < walk->entries_max);
    walk->entries[walk->entries_count++] = (uint64_t)(uintptr_t)value | (uint64_t)type
                                                                            << ADDRESS_BITS;
    walk->rows[walk->rows_count].entries_count++;
}

/* The row of the parent, or NO_ROW. Ids come from one counter: where a row lies is guessed from its
 * id, and searched from there in growing steps. */
static uint32_t parent_find(const struct walk *walk, uint64_t id, const struct row *child)
{
    const struct row *rows = walk->rows;
    uint32_t low = 0, high = walk->rows_count, at, step = 1;
    double share;

    if (high == 0 || id < rows[0].id || id > rows[high - 1].id)
        return NO_ROW;
    share = (double)(id - rows[0].id) / (double)(rows[high - 1].id - rows[0].id + 1);
    at = KVT_MIN((uint32_t)(share * high), high - 1);
    /* Rows before low are smaller, those from high on are not. */
    while (at < high && rows[at].id < id) {
        low = at + 1;
        at = step < high - low ? low + step : high;
        step *= 2;
    }
    high = KVT_MIN(high, at);
    for (step = 1; low < high; step *= 2) {
        at = step < high - low ? high - step : low;
        if (rows[at].id < id) {
            low = at + 1;
            break;
        }
        high = at;
    }
    while (low < high) {
        at = low + (high - low) / 2;
        if (rows[at].id < id)
            low = at + 1;
        else
            high = at;
    }
    if (low == walk->rows_count || rows[low].id != id || rows[low].ns != child->ns ||
        rows[low].depth + 1 != child->depth)
        return NO_ROW;
    return low;
}

/* All entries of the block have been seen: is it whole, and where does it hang? */
static int block_close(struct walk *walk)
{
    struct row *row = &walk->rows[walk->rows_count];

    if (!walk->is_open)
        return 0;
    walk->is_open = false;
    if (walk->parts_seen != walk->parts_count || walk->tokens_left != 0) {
        walk->entries_count = row->first_entry;
        return drop_add(walk, &walk->key, KVT_DB_TYPE_ALL);
    }
    if (row->depth > 0) {
        row->parent = parent_find(walk, walk->parent_id, row);
        walk->waiting_count += row->parent == NO_ROW;
    }
    walk->rows_count++;
    return 0;
}

static void row_open(struct walk *walk, const uint8_t *value)
{
    struct kvt_index_row_shape shape;

    walk->rows[walk->rows_count] = (struct row){.id = walk->key.block_id,
                                                .parent = NO_ROW,
                                                .depth = walk->key.block_idx,
                                                .first_child = NO_ROW,
                                                .next_sibling = NO_ROW,
                                                .first_entry = walk->entries_count,
                                                .ns = (uint8_t)walk->key.ns};
    kvt_index_row_shape_of(value, &shape);
    walk->parts_count = shape.parts_count;
    walk->parts_seen = 0;
    walk->tokens_left = kvt_index_row_tokens_count(value) - shape.head_tokens;
    walk->parent_id = kvt_index_row_parent(value);
    walk->is_open = true;
    entry_add(walk, KVT_INDEX_TYPE_ROW, value);
}

/* A part counts only in its turn, with as many tokens as it should have. */
static bool part_take(struct walk *walk, uint8_t type, const uint8_t *value)
{
    uint32_t count = kvt_index_part_tokens_count(value);

    if (type != KVT_INDEX_TYPE_PART + walk->parts_seen || walk->parts_seen == walk->parts_count ||
        count != KVT_MIN(walk->tokens_left, KVT_INDEX_PART_TOKENS_MAX))
        return false;
    walk->parts_seen++;
    walk->tokens_left -= count;
    return true;
}

/* One entry of a block of a namespace and epoch that count. */
static int entry_see(struct walk *walk, uint8_t type, const uint8_t *value, bool is_sound)
{
    if (is_sound && type == KVT_INDEX_TYPE_ROW &&
        kvt_index_row_tokens_count(value) == walk->db->namespaces[walk->key.ns].block_tokens) {
        row_open(walk, value);
        return 0;
    }
    if (!walk->is_open) { /* no row, or a bad one */
        if (walk->is_dropped)
            return 0;
        walk->is_dropped = true;
        return drop_add(walk, &walk->key, KVT_DB_TYPE_ALL);
    }
    if (is_sound && type >= KVT_INDEX_TYPE_PART && part_take(walk, type, value)) {
        entry_add(walk, type, value);
        return 0;
    }
    if (!is_sound || type >= KVT_INDEX_TYPE_PART)
        return drop_add(walk, &walk->key, type);
    if (kvt_index_copy_content(value) == 0) /* room for a copy that never came */
        return 0;
    entry_add(walk, type, value);
    walk->rows[walk->rows_count].is_alive = true;
    return 0;
}

static int entry_read(struct walk *walk, const MDB_val *key_at, const MDB_val *value_at)
{
    struct kvt_index_db *db = walk->db;
    struct kvt_index_loaded *loaded = &walk->loaded;
    const uint8_t *value = value_at->mv_data;
    struct kvt_index_key key;
    bool is_sound;
    uint8_t type;
    int r = 0;

    kvt_index_key_read(key_at->mv_data, &key, &type);
    is_sound = kvt_index_value_is_sound(key_at->mv_data, db->seed, value, value_at->mv_size);
    if (is_sound) {
        loaded->block_id_max = KVT_MAX(loaded->block_id_max, key.block_id);
        if (type >= KVT_INDEX_TYPE_COPY && type < KVT_INDEX_TYPE_PART)
            loaded->content_max = KVT_MAX(loaded->content_max, kvt_index_copy_content(value));
    }
    if (!is_same_block(&key, &walk->key)) {
        r = block_close(walk);
        walk->key = key;
        walk->is_dropped = false;
    }
    if (r != 0)
        return r;
    if (key.ns < KVT_NAMESPACES_MAX && db->namespaces[key.ns].is_used) {
        if (key.epoch == db->namespaces[key.ns].epoch)
            return entry_see(walk, type, value, is_sound);
        if (key.epoch < db->namespaces[key.ns].epoch) {
            db_backlog_add(db, key.ns, db->namespaces[key.ns].epoch);
            loaded->dropped++;
            return 0;
        }
    }
    if (walk->is_dropped) /* of no namespace, or of an epoch that never was */
        return 0;
    walk->is_dropped = true;
    return drop_add(walk, &key, KVT_DB_TYPE_ALL);
}

/* Rows were appended, so leaves lie one behind the other more often than not: have the next one
 * brought in when a leaf is entered. */
static void leaf_prefetch(struct walk *walk, const uint8_t *at)
{
    const uint8_t *leaf = at - (uintptr_t)at % walk->db->page_bytes;

    if (leaf == walk->leaf)
        return;
    walk->leaf = leaf;
    for (uint64_t i = 0; i < walk->db->page_bytes; i += KVT_CACHE_LINE_BYTES)
        __builtin_prefetch(leaf + walk->db->page_bytes + i);
}

/* The pass in key order. 0, E_BAD, -errno. */
static int entries_read(struct walk *walk, MDB_txn *txn)
{
    const struct kvt_index_lmdb *lmdb = walk->db->lmdb;
    MDB_cursor *cursor = NULL;
    MDB_val key, value;
    int r = lmdb->cursor_open(txn, walk->db->dbi, &cursor), r_read = 0;
    bool is_first = true;

    while (r == 0 && r_read == 0 && (r = lmdb->cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
        leaf_prefetch(walk, key.mv_data);
        if (key.mv_size == KVT_INDEX_KEY_BYTES)
            r_read = walk->entries_count < walk->entries_max ? entry_read(walk, &key, &value)
                                                             : KVT_INDEX_DB_E_BAD;
        else if (!is_first || key.mv_size != KVT_INDEX_META_KEY_BYTES)
            r_read = KVT_INDEX_DB_E_BAD;
        is_first = false;
    }
    if (cursor != NULL)
        lmdb->cursor_close(cursor);
    if (r == MDB_NOTFOUND)
        r = 0;
    if (r == 0 && r_read == 0)
        r_read = block_close(walk);
    if (r_read == KVT_INDEX_DB_E_BAD)
        r = MDB_CORRUPTED;
    if (r == 0)
        return r_read < 0 ? db_dead(walk->db, "walk", r_read) : 0;
    r = db_dead(walk->db, "walk", r);
    return r == -EUCLEAN ? KVT_INDEX_DB_E_BAD : r;
}

/* Marks what is alive and links it. A chain of parents ends: each is one block less deep. */
static void rows_link(struct walk *walk)
{
    struct row *rows = walk->rows;

    for (uint32_t i = 0; walk->waiting_count > 0 && i < walk->rows_count; i++) {
        const uint8_t *value = entry_value(walk->entries[rows[i].first_entry]);

        if (rows[i].depth == 0 || rows[i].parent != NO_ROW)
            continue;
        rows[i].parent = parent_find(walk, kvt_index_row_parent(value), &rows[i]);
        walk->waiting_count--;
    }
    for (uint32_t i = 0; i < walk->rows_count; i++) {
        uint32_t at = rows[i].is_alive ? rows[i].parent : NO_ROW;

        for (; at != NO_ROW && !rows[at].is_alive; at = rows[at].parent)
            rows[at].is_alive = true;
    }
    /* Backwards: children end up in the order of their ids. */
    for (uint32_t i = walk->rows_count; i-- > 0;) {
        if (!rows[i].is_alive || rows[i].parent == NO_ROW)
            continue;
        rows[i].next_sibling = rows[rows[i].parent].first_child;
        rows[rows[i].parent].first_child = i;
    }
}

struct order { /* depth first over the rows, a row at a time */
    struct walk *walk;
    uint32_t root, row;
    uint32_t *strays; /* rows whose parent is not here, the least deep first; NULL: not asked for */
    uint32_t strays_count, stray;
};

static int by_depth(const void *a, const void *b, void *ctx)
{
    const struct row *x = (const struct row *)ctx + *(const uint32_t *)a;
    const struct row *y = (const struct row *)ctx + *(const uint32_t *)b;

    if (x->depth != y->depth)
        return x->depth < y->depth ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

static bool is_stray(const struct row *row)
{
    return row->depth > 0 && row->parent == NO_ROW && row->is_alive;
}

static int strays_find(struct order *order)
{
    struct walk *walk = order->walk;

    for (uint32_t i = 0; i < walk->rows_count; i++)
        order->strays_count += is_stray(&walk->rows[i]);
    if (order->strays_count == 0)
        return 0;
    order->strays = kvt_alloc_zeroed(order->strays_count, sizeof(*order->strays));
    if (order->strays == NULL)
        return kvt_trace(-ENOMEM);
    order->strays_count = 0;
    for (uint32_t i = 0; i < walk->rows_count; i++)
        if (is_stray(&walk->rows[i]))
            order->strays[order->strays_count++] = i;
    qsort_r(order->strays, order->strays_count, sizeof(*order->strays), by_depth, walk->rows);
    return 0;
}

/* Where the next subtree begins. */
static uint32_t order_next_root(struct order *order)
{
    const struct row *rows = order->walk->rows;

    while (order->root < order->walk->rows_count &&
           (rows[order->root].depth != 0 || !rows[order->root].is_alive))
        order->root++;
    if (order->root < order->walk->rows_count)
        return order->root++;
    return order->stray < order->strays_count ? order->strays[order->stray++] : NO_ROW;
}

/* The next row; NO_ROW: that was all. */
static uint32_t order_next(struct order *order)
{
    struct row *rows = order->walk->rows;
    uint32_t row = order->row;

    if (row != NO_ROW && rows[row].first_child != NO_ROW) {
        row = rows[row].first_child;
    } else {
        while (row != NO_ROW && rows[row].next_sibling == NO_ROW)
            row = rows[row].parent;
        if (row != NO_ROW)
            row = rows[row].next_sibling;
    }
    if (row == NO_ROW)
        row = order_next_root(order);
    if (row != NO_ROW)
        rows[row].is_visited = true;
    order->row = row;
    return row;
}

static void value_prefetch(uint64_t entry, uint32_t bytes)
{
    const uint8_t *value = entry_value(entry);

    for (uint32_t at = 0; at < bytes; at += KVT_CACHE_LINE_BYTES)
        __builtin_prefetch(value + at);
}

static int row_visit(struct walk *walk, const struct row *row, uint32_t *tokens,
                     int (*visit)(void *ctx, const struct kvt_index_put *put), void *ctx)
{
    const uint64_t *entries = walk->entries + row->first_entry;
    struct kvt_index_row_shape shape;
    uint64_t slots[KVT_RANKS_MAX], runs[KVT_RANKS_MAX];
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_ROW};
    uint32_t filled;
    int r;

    put.key = (struct kvt_index_key){.ns = row->ns,
                                     .epoch = walk->db->namespaces[row->ns].epoch,
                                     .block_idx = row->depth,
                                     .block_id = row->id};
    kvt_index_row_read(entry_value(entries[0]), &put, tokens);
    kvt_index_row_shape_of(entry_value(entries[0]), &shape);
    filled = shape.head_tokens;
    for (uint32_t i = 1; shape.parts_count > 0 && i < row->entries_count; i++) {
        if (entry_type(entries[i]) < KVT_INDEX_TYPE_PART)
            continue;
        kvt_index_part_read(entry_value(entries[i]), tokens + filled);
        filled += kvt_index_part_tokens_count(entry_value(entries[i]));
    }
    KVT_ASSERT(filled == put.tokens_count);
    r = visit(ctx, &put);
    walk->loaded.rows++;
    for (uint32_t i = 1; i < row->entries_count && r == 0; i++) {
        struct kvt_index_put copy = {.kind = KVT_INDEX_PUT_COPY, .key = put.key};

        if (entry_type(entries[i]) >= KVT_INDEX_TYPE_PART)
            break;
        copy.component = (uint16_t)(entry_type(entries[i]) - KVT_INDEX_TYPE_COPY);
        kvt_index_copy_read(entry_value(entries[i]), &copy, slots, runs);
        r = visit(ctx, &copy);
        walk->loaded.copies++;
    }
    return r;
}

/* Three steps a row, some rows apart, so that memory is there when it is used: the order (rows),
 * where the values are (entries), the visit (values). */
static int rows_visit(struct walk *walk, int (*visit)(void *ctx, const struct kvt_index_put *put),
                      void *ctx)
{
    uint32_t tokens[KVT_BLOCK_TOKENS_MAX];
    struct order order = {.walk = walk, .row = NO_ROW};
    const struct row *ahead[AHEAD];
    uint64_t begun = 0, end = UINT64_MAX;
    int r = walk->db->has_siblings ? strays_find(&order) : 0;

    for (uint64_t i = 0; i < end && r == 0; i++) {
        while (begun < i + AHEAD && begun < end) {
            uint32_t row = order_next(&order);

            if (row == NO_ROW) {
                end = begun;
                break;
            }
            ahead[begun % AHEAD] = &walk->rows[row];
            __builtin_prefetch(&walk->entries[walk->rows[row].first_entry]);
            begun++;
        }
        if (i >= end)
            break;
        if (i + AHEAD / 2 < begun) {
            const struct row *row = ahead[(i + AHEAD / 2) % AHEAD];

            value_prefetch(walk->entries[row->first_entry], 320);
            if (row->entries_count > 1)
                value_prefetch(walk->entries[row->first_entry + 1], 64);
        }
        r = row_visit(walk, ahead[i % AHEAD], tokens, visit, ctx);
    }
    kvt_free(order.strays);
    return r;
}

static int drops_work(struct walk *walk)
{
    struct kvt_index_db *db = walk->db;
    int r = 0;

    for (uint64_t i = 0; i < walk->drops_count && r == 0; i++)
        r = db_drop(db, &walk->drops[i].key, walk->drops[i].type);
    for (uint32_t i = 0; i < walk->rows_count && r == 0; i++) {
        const struct row *row = &walk->rows[i];
        struct kvt_index_key key = {.ns = row->ns,
                                    .epoch = db->namespaces[row->ns].epoch,
                                    .block_idx = row->depth,
                                    .block_id = row->id};

        if (row->is_visited)
            continue;
        walk->loaded.dropped++;
        r = db_drop(db, &key, KVT_DB_TYPE_ALL);
    }
    return r == 0 ? db_txn_commit(db) : r;
}

/* Everything but the deletions. */
static int walk_read(struct walk *walk, int (*visit)(void *ctx, const struct kvt_index_put *put),
                     void *ctx)
{
    struct kvt_index_db *db = walk->db;
    MDB_txn *txn = NULL;
    int r;

    /* Never touched, never there: pages of these come when they are written. */
    walk->entries = kvt_alloc_zeroed(db->entries + 1, sizeof(*walk->entries));
    walk->rows = kvt_alloc_zeroed(db->entries + 1, sizeof(*walk->rows));
    if (walk->entries == NULL || walk->rows == NULL)
        return kvt_trace(-ENOMEM);
    r = db->lmdb->txn_begin(db->env, NULL, MDB_RDONLY, &txn);
    if (r != 0)
        return db_dead(db, "walk", r);
    r = entries_read(walk, txn);
    if (r == 0) {
        rows_link(walk);
        r = rows_visit(walk, visit, ctx);
    }
    db->lmdb->txn_abort(txn);
    return r;
}

int kvt_index_db_walk(struct kvt_index_db *db,
                      int (*visit)(void *ctx, const struct kvt_index_put *put), void *ctx,
                      struct kvt_index_loaded *ret_loaded)
{
    struct walk walk = {.db = db, .key.ns = UINT16_MAX};
    uint64_t start_ns = kvt_clock_mono_ns();
    int r;

    KVT_ASSERT(db->txn == NULL);
    if (db->error != 0)
        return db->error;
    if (db->entries >= NO_ROW)
        return kvt_trace(-EFBIG);
    walk.entries_max = (uint32_t)db->entries + 1;
    r = walk_read(&walk, visit, ctx);
    if (r == 0)
        r = drops_work(&walk);
    kvt_free(walk.rows);
    kvt_free(walk.entries);
    kvt_free(walk.drops);
    if (r != 0)
        return r;
    walk.loaded.took_ns = kvt_clock_mono_ns() - start_ns;
    *ret_loaded = walk.loaded;
    return 0;
}
