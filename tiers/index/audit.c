#include "tiers/index/audit.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"

/* LMDB's structures, in the machine's byte order as LMDB has them, by offset.
 *
 *   page   | number u64 | pad u16 | flags u16 | lower u16 | upper u16 | u16 offset of node ... |
 *          free space from lower to upper, then the nodes; of an overflow page a u32 count of pages
 *          is in place of lower and upper
 *   node   | low u16 | high u16 | flags u16 | key bytes u16 | key | data |
 *          leaf: low, high are the data's bytes; branch: low, high, flags are the child's number */
enum {
    PAGE_AT_NUMBER = 0,
    PAGE_AT_FLAGS = 10,
    PAGE_AT_LOWER = 12,
    PAGE_AT_UPPER = 14,
    PAGE_AT_OVERFLOW_COUNT = 12,
    PAGE_HEADER_BYTES = 16,
    NODE_AT_LOW = 0,
    NODE_AT_HIGH = 2,
    NODE_AT_FLAGS = 4,
    NODE_AT_KEY_BYTES = 6,
    NODE_HEADER_BYTES = 8,
    META_AT_MAGIC = 16,
    META_AT_VERSION = 20,
    META_AT_ADDRESS = 24,
    META_AT_MAP_BYTES = 32,
    META_AT_FREE_TREE = 40,
    META_AT_ROW_TREE = 88,
    META_AT_LAST_PAGE = 136,
    META_AT_TXN_ID = 144,
    META_BYTES = 152,
    TREE_AT_PAD = 0, /* of the tree of free pages: the page size */
    TREE_AT_FLAGS = 4,
    TREE_AT_DEPTH = 6,
    TREE_AT_BRANCH_PAGES = 8,
    TREE_AT_LEAF_PAGES = 16,
    TREE_AT_OVERFLOW_PAGES = 24,
    TREE_AT_ENTRIES = 32,
    TREE_AT_ROOT = 40,
    TREE_BYTES = 48,
};
#define META_MAGIC 0xbeefc0deu
#define DATA_VERSION 1u
#define PAGE_IS_BRANCH 0x01u
#define PAGE_IS_LEAF 0x02u
#define PAGE_IS_OVERFLOW 0x04u
#define PAGE_IS_META 0x08u
#define NODE_HAS_OVERFLOW 0x01u
#define TREE_HAS_INTEGER_KEYS 0x08u
#define NO_PAGE UINT64_MAX
#define PAGE_BYTES_MAX 32768u
#define DEPTH_MAX 12u
#define KEY_BYTES_MAX 511u

struct key {
    const uint8_t *at; /* NULL: no bound */
    uint32_t bytes;
};

struct level { /* of a descent: a page, and the range that its keys lie in */
    uint8_t *page;
    uint32_t count, next;
    struct key low, high; /* low <= keys < high */
};

struct tree {
    bool is_free_list;
    uint32_t depth;
    uint64_t branch_pages, leaf_pages, overflow_pages, entries; /* counted */
};

struct audit {
    const struct kvt_index_lmdb *io;
    int fd;
    uint32_t page_bytes;
    uint64_t pages_count, seen_count, txn_id;
    uint64_t *seen;     /* a bit a page */
    uint8_t *pages;     /* one a level, and one for what hangs at a leaf */
    uint64_t *occupied; /* a bit a two bytes of the page that is looked at */
    uint8_t meta[META_BYTES];
    char *why;
    size_t why_bytes;
};

static uint16_t get_u16(const uint8_t *at)
{
    uint16_t value;

    memcpy(&value, at, sizeof(value));
    return value;
}

static uint32_t get_u32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return value;
}

static uint64_t get_u64(const uint8_t *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return value;
}

KVT_PRINTF(2, 3) static int bad(struct audit *audit, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(audit->why, audit->why_bytes, format, args);
    va_end(args);
    return KVT_INDEX_AUDIT_E_BAD;
}

static int read_at(struct audit *audit, uint8_t *at, size_t bytes, uint64_t offset)
{
    ssize_t n;

    do
        n = audit->io->pread(audit->fd, at, bytes, (off_t)offset);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return bad(audit, "cannot be read at byte %llu: %s", (unsigned long long)offset,
                   strerror(errno));
    if ((size_t)n != bytes)
        return bad(audit, "ends at byte %llu", (unsigned long long)offset + (size_t)n);
    return 0;
}

/* Counts @page as used or free; a second time is damage. */
static int see(struct audit *audit, uint64_t page)
{
    uint64_t bit = 1ull << (page % 64);

    if (page < 2 || page >= audit->pages_count)
        return bad(audit, "page %llu is named and does not exist", (unsigned long long)page);
    if ((audit->seen[page / 64] & bit) != 0)
        return bad(audit, "page %llu is used twice", (unsigned long long)page);
    audit->seen[page / 64] |= bit;
    audit->seen_count++;
    return 0;
}

static int page_read(struct audit *audit, uint64_t page, uint32_t flags, uint8_t *at)
{
    int r = see(audit, page);

    if (r == 0)
        r = read_at(audit, at, audit->page_bytes, page * audit->page_bytes);
    if (r != 0)
        return r;
    if (get_u64(at + PAGE_AT_NUMBER) != page || get_u16(at + PAGE_AT_FLAGS) != flags)
        return bad(audit, "page %llu is another or of another kind", (unsigned long long)page);
    return 0;
}

static const uint8_t *node_of(const uint8_t *page, uint32_t idx)
{
    return page + get_u16(page + PAGE_HEADER_BYTES + 2ul * idx);
}

static struct key key_of(const uint8_t *page, uint32_t idx)
{
    const uint8_t *node = node_of(page, idx);

    return (struct key){node + NODE_HEADER_BYTES, get_u16(node + NODE_AT_KEY_BYTES)};
}

static uint64_t child_of(const uint8_t *page, uint32_t idx)
{
    const uint8_t *node = node_of(page, idx);

    return get_u16(node + NODE_AT_LOW) | (uint64_t)get_u16(node + NODE_AT_HIGH) << 16 |
           (uint64_t)get_u16(node + NODE_AT_FLAGS) << 32;
}

static bool is_less(const struct tree *tree, struct key a, struct key b)
{
    uint32_t both = KVT_MIN(a.bytes, b.bytes);
    int order;

    if (tree->is_free_list)
        return get_u64(a.at) < get_u64(b.at);
    order = memcmp(a.at, b.at, both);
    return order < 0 || (order == 0 && a.bytes < b.bytes);
}

/* Marks the bytes of a node; false: another node has some of them. Both even. */
static bool occupy(uint64_t *occupied, uint32_t from, uint32_t bytes)
{
    uint32_t first = from / 2, end = (from + bytes) / 2;

    while (first < end) {
        uint32_t word = first / 64, shift = first % 64, bits = KVT_MIN(64 - shift, end - first);
        uint64_t mask = (bits == 64 ? ~0ull : (1ull << bits) - 1) << shift;

        if ((occupied[word] & mask) != 0)
            return false;
        occupied[word] |= mask;
        first += bits;
    }
    return true;
}

/* A node's bytes, or 0: it does not lie in its page. */
static uint32_t node_bytes(const struct audit *audit, const struct tree *tree, const uint8_t *page,
                           uint32_t idx, bool is_leaf)
{
    uint32_t at = get_u16(page + PAGE_HEADER_BYTES + 2ul * idx), key_bytes;
    uint64_t bytes, data_bytes = 0;
    const uint8_t *node = page + at;

    if (at % 2 != 0 || at < get_u16(page + PAGE_AT_UPPER) ||
        at + NODE_HEADER_BYTES > audit->page_bytes)
        return 0;
    key_bytes = get_u16(node + NODE_AT_KEY_BYTES);
    if (key_bytes > KEY_BYTES_MAX)
        return 0;
    /* The first key of a branch is never looked at, and empty as a rule. */
    if (tree->is_free_list && key_bytes != 8 && (is_leaf || idx > 0))
        return 0;
    if (is_leaf) {
        uint32_t flags = get_u16(node + NODE_AT_FLAGS);

        if (key_bytes == 0 || (flags & ~(tree->is_free_list ? NODE_HAS_OVERFLOW : 0)) != 0)
            return 0;
        data_bytes = get_u16(node + NODE_AT_LOW) | (uint64_t)get_u16(node + NODE_AT_HIGH) << 16;
        if (flags == NODE_HAS_OVERFLOW)
            data_bytes = 8;
    }
    bytes = kvt_round_up(NODE_HEADER_BYTES + key_bytes + data_bytes, 2);
    return at + bytes <= audit->page_bytes ? (uint32_t)bytes : 0;
}

/* The shape of a page: all nodes inside, side by side, keys in order and within the range. */
static int page_check(struct audit *audit, const struct tree *tree, struct level *level,
                      bool is_leaf)
{
    const uint8_t *page = level->page;
    unsigned long long number = get_u64(page + PAGE_AT_NUMBER);
    uint32_t lower = get_u16(page + PAGE_AT_LOWER), upper = get_u16(page + PAGE_AT_UPPER);
    uint32_t bytes_all = 0, count_min = is_leaf || tree->is_free_list ? 1 : 2;
    struct key before = level->low;

    if (lower < PAGE_HEADER_BYTES || lower % 2 != 0 || lower > upper || upper > audit->page_bytes)
        return bad(audit, "page %llu: impossible bounds", number);
    level->count = (lower - PAGE_HEADER_BYTES) / 2;
    if (level->count < count_min)
        return bad(audit, "page %llu: too few nodes", number);
    memset(audit->occupied, 0, audit->page_bytes / 16);
    for (uint32_t i = 0; i < level->count; i++) {
        uint32_t bytes = node_bytes(audit, tree, page, i, is_leaf);
        bool is_strict = !is_leaf || i > 0; /* a separator may be the first key right of it */
        struct key key;

        if (bytes == 0 ||
            !occupy(audit->occupied, get_u16(page + PAGE_HEADER_BYTES + 2ul * i), bytes))
            return bad(audit, "page %llu: node %u is out of place", number, i);
        bytes_all += bytes;
        if (i == 0 && !is_leaf)
            continue;
        key = key_of(page, i);
        if (before.at != NULL &&
            (is_strict ? !is_less(tree, before, key) : is_less(tree, key, before)))
            return bad(audit, "page %llu: key %u is out of order", number, i);
        before = key;
    }
    if (level->high.at != NULL && before.at != NULL && !is_less(tree, before, level->high))
        return bad(audit, "page %llu: a key belongs elsewhere", number);
    if (bytes_all != audit->page_bytes - upper)
        return bad(audit, "page %llu: nodes do not fill it", number);
    return 0;
}

/* A record of free pages: a count, then page numbers, falling. */
static int free_pages_see(struct audit *audit, const uint8_t *data, uint64_t data_bytes)
{
    uint64_t count, before = NO_PAGE;
    int r = 0;

    if (data_bytes < 8 || data_bytes % 8 != 0)
        return bad(audit, "a record of free pages has %llu bytes", (unsigned long long)data_bytes);
    count = get_u64(data);
    if (count > data_bytes / 8 - 1)
        return bad(audit, "a record of free pages ends early");
    for (uint64_t i = 1; i <= count && r == 0; i++) {
        uint64_t page = get_u64(data + 8 * i);

        if (page >= before)
            return bad(audit, "a record of free pages is not sorted");
        before = page;
        r = see(audit, page);
    }
    return r;
}

/* A record that has pages of its own. */
static int overflow_check(struct audit *audit, struct tree *tree, uint64_t page, uint64_t bytes)
{
    uint64_t count;
    kvt_autofree uint8_t *data = NULL;
    uint8_t *first = audit->pages + (size_t)DEPTH_MAX * audit->page_bytes;
    int r = page_read(audit, page, PAGE_IS_OVERFLOW, first);

    if (r != 0)
        return r;
    count = get_u32(first + PAGE_AT_OVERFLOW_COUNT);
    if (count == 0 || count > audit->pages_count - page || bytes == 0 ||
        bytes > count * audit->page_bytes - PAGE_HEADER_BYTES)
        return bad(audit, "page %llu: impossible count of pages", (unsigned long long)page);
    for (uint64_t i = 1; i < count && r == 0; i++)
        r = see(audit, page + i);
    tree->overflow_pages += count;
    if (r != 0)
        return r;
    data = kvt_alloc_zeroed(1, bytes);
    if (data == NULL)
        return kvt_trace(-ENOMEM);
    r = read_at(audit, data, bytes, page * audit->page_bytes + PAGE_HEADER_BYTES);
    return r != 0 ? r : free_pages_see(audit, data, bytes);
}

static int leaf_check(struct audit *audit, struct tree *tree, const struct level *level)
{
    int r = 0;

    tree->leaf_pages++;
    tree->entries += level->count;
    for (uint32_t i = 0; tree->is_free_list && i < level->count && r == 0; i++) {
        const uint8_t *node = node_of(level->page, i);
        const uint8_t *data = node + NODE_HEADER_BYTES + 8;
        uint64_t bytes = get_u16(node + NODE_AT_LOW) | (uint64_t)get_u16(node + NODE_AT_HIGH) << 16;
        uint64_t txn_id = get_u64(node + NODE_HEADER_BYTES);

        if (txn_id == 0 || txn_id > audit->txn_id)
            return bad(audit, "pages were freed by a transaction that never was");
        if (get_u16(node + NODE_AT_FLAGS) == NODE_HAS_OVERFLOW)
            r = overflow_check(audit, tree, get_u64(data), bytes);
        else
            r = free_pages_see(audit, data, bytes);
    }
    return r;
}

/* Reads and checks the page for the level @top; the range is set. */
static int level_enter(struct audit *audit, struct tree *tree, struct level *level, uint64_t page,
                       bool is_leaf)
{
    int r = page_read(audit, page, is_leaf ? PAGE_IS_LEAF : PAGE_IS_BRANCH, level->page);

    level->next = 0;
    if (r == 0)
        r = page_check(audit, tree, level, is_leaf);
    if (r == 0 && is_leaf)
        r = leaf_check(audit, tree, level);
    else if (r == 0)
        tree->branch_pages++;
    return r;
}

static int tree_descend(struct audit *audit, struct tree *tree, uint64_t root)
{
    struct level levels[DEPTH_MAX];
    uint32_t top = 0;
    int r;

    for (uint32_t i = 0; i < DEPTH_MAX; i++)
        levels[i] = (struct level){.page = audit->pages + (size_t)i * audit->page_bytes};
    r = level_enter(audit, tree, &levels[0], root, tree->depth == 1);
    while (r == 0) {
        struct level *level = &levels[top], *below;
        bool is_leaf = top + 1 == tree->depth;

        if (is_leaf || level->next == level->count) {
            if (top == 0)
                break;
            top--;
            continue;
        }
        below = &levels[top + 1];
        below->low = level->next == 0 ? level->low : key_of(level->page, level->next);
        below->high =
            level->next + 1 == level->count ? level->high : key_of(level->page, level->next + 1);
        r = level_enter(audit, tree, below, child_of(level->page, level->next),
                        top + 2 == tree->depth);
        level->next++;
        top++;
    }
    return r;
}

static int tree_check(struct audit *audit, const uint8_t *record, bool is_free_list,
                      uint64_t *ret_entries)
{
    struct tree tree = {.is_free_list = is_free_list, .depth = get_u16(record + TREE_AT_DEPTH)};
    const char *name = is_free_list ? "of free pages" : "of rows";
    uint64_t root = get_u64(record + TREE_AT_ROOT);
    int r = 0;

    if (tree.depth > DEPTH_MAX || (root == NO_PAGE) != (tree.depth == 0))
        return bad(audit, "the tree %s has depth %u", name, tree.depth);
    if (root != NO_PAGE)
        r = tree_descend(audit, &tree, root);
    if (r != 0)
        return r;
    if (tree.branch_pages != get_u64(record + TREE_AT_BRANCH_PAGES) ||
        tree.leaf_pages != get_u64(record + TREE_AT_LEAF_PAGES) ||
        tree.overflow_pages != get_u64(record + TREE_AT_OVERFLOW_PAGES) ||
        tree.entries != get_u64(record + TREE_AT_ENTRIES))
        return bad(audit, "the tree %s has not the size that it should have", name);
    *ret_entries = tree.entries;
    return 0;
}

/* One meta page: 0 and its bytes. */
static int meta_read(struct audit *audit, uint32_t number, uint8_t ret_meta[META_BYTES])
{
    int r = read_at(audit, ret_meta, META_BYTES, (uint64_t)number * audit->page_bytes);

    if (r != 0)
        return r;
    if (get_u32(ret_meta + META_AT_MAGIC) != META_MAGIC)
        return bad(audit, "is not an LMDB file");
    if (get_u32(ret_meta + META_AT_VERSION) != DATA_VERSION)
        return bad(audit, "is of LMDB's data format %u, known is %u",
                   get_u32(ret_meta + META_AT_VERSION), DATA_VERSION);
    if (get_u64(ret_meta + PAGE_AT_NUMBER) != number ||
        get_u16(ret_meta + PAGE_AT_FLAGS) != PAGE_IS_META ||
        get_u32(ret_meta + META_AT_FREE_TREE + TREE_AT_PAD) != audit->page_bytes ||
        get_u64(ret_meta + META_AT_ADDRESS) != 0 ||
        get_u16(ret_meta + META_AT_FREE_TREE + TREE_AT_FLAGS) !=
            (TREE_HAS_INTEGER_KEYS | (MDB_NOSUBDIR & 0xffff)) ||
        get_u16(ret_meta + META_AT_ROW_TREE + TREE_AT_FLAGS) != 0 ||
        get_u32(ret_meta + META_AT_ROW_TREE + TREE_AT_PAD) != 0)
        return bad(audit, "meta page %u is damaged", number);
    return 0;
}

/* Finds the newer meta page as LMDB does. */
static int metas_read(struct audit *audit, uint64_t file_bytes)
{
    uint8_t metas[2][META_BYTES];
    uint64_t ids[2];
    uint32_t newer;
    int r = 0;

    for (uint32_t i = 0; i < 2 && r == 0; i++) {
        r = meta_read(audit, i, metas[i]);
        ids[i] = r == 0 ? get_u64(metas[i] + META_AT_TXN_ID) : 0;
    }
    if (r != 0)
        return r;
    newer = ids[0] < ids[1];
    /* Transaction n is written to page n mod 2; both are 0 in a file that is new. */
    if ((ids[newer] != ids[!newer] + 1 || (ids[newer] & 1) != newer) && (ids[0] | ids[1]) != 0)
        return bad(audit, "the meta pages are of transactions %llu and %llu",
                   (unsigned long long)ids[0], (unsigned long long)ids[1]);
    memcpy(audit->meta, metas[newer], META_BYTES);
    audit->txn_id = ids[newer];
    audit->pages_count = get_u64(audit->meta + META_AT_LAST_PAGE);
    if (audit->pages_count < 1 || audit->pages_count >= file_bytes / audit->page_bytes)
        return bad(audit, "has %llu bytes, its last page is %llu", (unsigned long long)file_bytes,
                   (unsigned long long)audit->pages_count);
    audit->pages_count++;
    return 0;
}

static int trees_check(struct audit *audit, struct kvt_index_audit *ret_audit)
{
    uint64_t entries = 0, records = 0;
    int r = tree_check(audit, audit->meta + META_AT_ROW_TREE, false, &entries);

    if (r == 0)
        r = tree_check(audit, audit->meta + META_AT_FREE_TREE, true, &records);
    if (r != 0)
        return r;
    if (audit->seen_count + 2 != audit->pages_count)
        return bad(audit, "%llu pages are neither used nor free",
                   (unsigned long long)(audit->pages_count - 2 - audit->seen_count));
    *ret_audit = (struct kvt_index_audit){.page_bytes = audit->page_bytes,
                                          .pages_count = audit->pages_count,
                                          .entries = entries,
                                          .txn_id = audit->txn_id};
    return 0;
}

int kvt_index_audit(const struct kvt_index_lmdb *io, int fd, uint64_t file_bytes,
                    struct kvt_index_audit *ret_audit, char *why, size_t why_bytes)
{
    struct audit audit = {.io = io, .fd = fd, .why = why, .why_bytes = why_bytes};
    kvt_autofree uint64_t *seen = NULL, *occupied = NULL;
    kvt_autofree uint8_t *pages = NULL;
    int r;

    audit.page_bytes = KVT_MIN((uint32_t)sysconf(_SC_PAGESIZE), PAGE_BYTES_MAX);
    r = metas_read(&audit, file_bytes);
    if (r != 0)
        return r;
    seen = kvt_alloc_zeroed(kvt_div_up(audit.pages_count, 64), sizeof(*seen));
    occupied = kvt_alloc_zeroed(audit.page_bytes / 128 + 1, sizeof(*occupied));
    pages = kvt_alloc_zeroed(DEPTH_MAX + 1, audit.page_bytes);
    if (seen == NULL || occupied == NULL || pages == NULL)
        return kvt_trace(-ENOMEM);
    audit.seen = seen;
    audit.occupied = occupied;
    audit.pages = pages;
    /* The tree leads all over the file: have it read in one sweep. Only speed depends on it. */
    (void)posix_fadvise(fd, 0, (off_t)(audit.pages_count * audit.page_bytes), POSIX_FADV_WILLNEED);
    return trees_check(&audit, ret_audit);
}
