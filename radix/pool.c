/* Memory of the tree: one mapping, cut into pages, each page into objects of one class.
 *
 * A page knows its free objects itself, an empty page goes back to the region, and the region
 * never grows: NULL is the answer of a full one. Block records need one thing more: a handle must
 * stay stale for ever, so a page of them remembers a number above every generation that it gave
 * out, through any other use of the page.
 *
 * Engine thread only. Page 0 of the numbering holds the tables, so reference 0 names nothing. */
#include <sys/mman.h>

#include "radix/internal.h"

#define PAGE_NONE 0u
#define CLASS_FREE UINT32_MAX
#define PAGES_MIN 12u

static void classes_init(struct pool *pool)
{
    const uint32_t page_bytes = 1u << pool->page_shift;
    const uint32_t fixed[CLASS_DATA] = {sizeof(struct block), sizeof(struct place),
                                        sizeof(struct node)};
    uint32_t n = 0, bytes = 16;

    for (uint32_t i = 0; i < CLASS_DATA; i++)
        pool->classes[n++].bytes = fixed[i];
    while (bytes <= page_bytes / 64) {
        pool->classes[n++].bytes = bytes;
        bytes = bytes < 512 ? bytes + 16 : (bytes + bytes / 16 + 15) & ~15u;
    }
    for (uint32_t k = 63; k > 0; k--) {
        KVT_ASSERT(n < RADIX_CLASSES_MAX);
        bytes = (page_bytes / k) & ~15u;
        if (bytes > pool->classes[n - 1].bytes)
            pool->classes[n++].bytes = bytes;
    }
    pool->classes_count = n;
    for (uint32_t i = 0; i < n; i++)
        pool->classes[i].per_page = page_bytes / pool->classes[i].bytes;
}

int pool_init(struct pool *pool, const struct kvt_radix_config *config, uint64_t buckets_count,
              uint32_t **ret_buckets)
{
    const size_t memory_bytes = config->memory_bytes;
    size_t page_bytes, tables_bytes;
    uint32_t fixed_pages;

    *pool = (struct pool){.page_shift = memory_bytes >= 64 * KVT_MIB ? 18 : 16};
    page_bytes = (size_t)1 << pool->page_shift;
    if (memory_bytes < PAGES_MIN * page_bytes || memory_bytes > 64 * KVT_GIB)
        return kvt_trace(-EINVAL);
    pool->pages_count = (uint32_t)(memory_bytes >> pool->page_shift);
    pool->region_bytes = (size_t)pool->pages_count << pool->page_shift;
    pool->map_bytes = pool->region_bytes + page_bytes; /* to align it; that part is given back */
    pool->map =
        mmap(NULL, pool->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pool->map == MAP_FAILED) {
        *pool = (struct pool){0};
        return kvt_trace(-ENOMEM);
    }
    pool->region = (uint8_t *)(uintptr_t)kvt_round_up((uintptr_t)pool->map, page_bytes);
    if (memory_bytes >= 64 * KVT_MIB)
        (void)madvise(pool->region, pool->region_bytes, MADV_HUGEPAGE); /* advice only */
    (void)madvise(pool->region, pool->region_bytes, MADV_DONTDUMP);     /* prompts, in clear */
    for (size_t at = 0; config->is_populated && at < pool->region_bytes; at += 4096)
        ((volatile uint8_t *)pool->region)[at] = 0;
    pool->pages = (struct page *)(void *)pool->region;
    tables_bytes = kvt_round_up(pool->pages_count * sizeof(struct page), KVT_CACHE_LINE_BYTES);
    *ret_buckets = (uint32_t *)(void *)(pool->region + tables_bytes);
    tables_bytes += buckets_count * sizeof(uint32_t);
    fixed_pages = (uint32_t)(kvt_round_up(tables_bytes, page_bytes) >> pool->page_shift);
    KVT_ASSERT(fixed_pages + 8 <= pool->pages_count);
    classes_init(pool);
    pool->pages_first = fixed_pages;
    pool->fixed_bytes = (size_t)fixed_pages << pool->page_shift;
    for (uint32_t i = pool->pages_count - 1; i >= fixed_pages; i--) {
        pool->pages[i] = (struct page){.next = pool->free_head, .generation = 1, .cls = CLASS_FREE};
        pool->free_head = i;
        pool->free_count++;
    }
    return 0;
}

void pool_deinit(struct pool *pool)
{
    if (pool->map != NULL)
        (void)munmap(pool->map, pool->map_bytes);
    *pool = (struct pool){0};
}

static void page_list(struct pool *pool, uint32_t idx, bool is_at_tail)
{
    struct page *page = &pool->pages[idx];
    struct page_class *cls = &pool->classes[page->cls];

    KVT_ASSERT(!page->is_listed);
    page->is_listed = 1;
    page->prev = is_at_tail ? cls->tail : PAGE_NONE;
    page->next = is_at_tail ? PAGE_NONE : cls->head;
    if (page->prev != PAGE_NONE)
        pool->pages[page->prev].next = idx;
    else
        cls->head = idx;
    if (page->next != PAGE_NONE)
        pool->pages[page->next].prev = idx;
    else
        cls->tail = idx;
}

static void page_unlist(struct pool *pool, uint32_t idx)
{
    struct page *page = &pool->pages[idx];
    struct page_class *cls = &pool->classes[page->cls];

    KVT_ASSERT(page->is_listed);
    page->is_listed = 0;
    if (page->prev != PAGE_NONE)
        pool->pages[page->prev].next = page->next;
    else
        cls->head = page->next;
    if (page->next != PAGE_NONE)
        pool->pages[page->next].prev = page->prev;
    else
        cls->tail = page->prev;
}

static bool page_take(struct pool *pool, uint32_t cls_idx)
{
    uint32_t idx = pool->free_head;
    struct page *page = &pool->pages[idx];

    if (idx == PAGE_NONE)
        return false;
    KVT_ASSERT(page->cls == CLASS_FREE);
    pool->free_head = page->next;
    pool->free_count--;
    *page = (struct page){.generation = page->generation, .cls = cls_idx};
    pool->classes[cls_idx].pages++;
    page_list(pool, idx, true);
    return true;
}

static void page_give(struct pool *pool, uint32_t idx)
{
    struct page *page = &pool->pages[idx];

    KVT_ASSERT(page->used == 0);
    page_unlist(pool, idx);
    pool->classes[page->cls].pages--;
    page->cls = CLASS_FREE;
    page->next = pool->free_head;
    pool->free_head = idx;
    pool->free_count++;
}

static uint8_t *page_base(const struct pool *pool, uint32_t idx)
{
    return pool->region + ((size_t)idx << pool->page_shift);
}

void *pool_take(struct pool *pool, uint32_t cls_idx)
{
    struct page_class *cls = &pool->classes[cls_idx];
    struct page *page;
    uint32_t idx;
    uint8_t *object;

    KVT_ASSERT(cls_idx < pool->classes_count);
    if (cls->head == PAGE_NONE && !page_take(pool, cls_idx))
        return NULL;
    idx = cls->head;
    page = &pool->pages[idx];
    if (page->free != 0) {
        object = pool->region + ((size_t)page->free << 4);
        memcpy(&page->free, object, sizeof(page->free));
    } else {
        object = page_base(pool, idx) + (size_t)page->bump * cls->bytes;
        page->bump++;
        if (cls_idx == CLASS_BLOCK)
            ((struct block *)(void *)object)->generation = page->generation;
    }
    page->used++;
    pool->used_bytes += cls->bytes;
    if (page->free == 0 && page->bump == cls->per_page)
        page_unlist(pool, idx);
    return object;
}

static bool page_is_spare(const struct pool *pool, uint32_t cls_idx)
{
    const struct page_class *cls = &pool->classes[cls_idx];

    return cls_idx != CLASS_PLACE || (cls->pages - 1) * cls->per_page >= pool->places_reserved;
}

void pool_give(struct pool *pool, void *object)
{
    size_t offset = (size_t)((uint8_t *)object - pool->region);
    uint32_t idx = (uint32_t)(offset >> pool->page_shift);
    struct page *page = &pool->pages[idx];
    uint32_t cls_idx = page->cls;

    KVT_ASSERT(cls_idx < pool->classes_count && page->used > 0);
    pool->used_bytes -= pool->classes[cls_idx].bytes;
    if (cls_idx == CLASS_BLOCK) {
        struct block *block = object;

        block->pos = UINT32_MAX;
        if (block->generation >= UINT32_MAX - 1) {
            block->generation = 0; /* used up: this record is never given out again */
            return;
        }
        block->generation++;
        page->generation = KVT_MAX(page->generation, block->generation);
    }
    memcpy(object, &page->free, sizeof(page->free));
    page->free = (uint32_t)(offset >> 4);
    page->used--;
    if (!page->is_listed)
        page_list(pool, idx, false);
    if (page->used > 0)
        return;
    if (page_is_spare(pool, cls_idx)) {
        page_give(pool, idx);
    } else {
        page_unlist(pool, idx);
        page_list(pool, idx, true);
    }
}

uint32_t pool_class_of(const struct pool *pool, size_t bytes)
{
    uint32_t low = CLASS_DATA, high = pool->classes_count;

    if (bytes > pool->classes[high - 1].bytes)
        return UINT32_MAX;
    if (bytes <= KVT_MIN(512u, (1u << pool->page_shift) / 64))
        return CLASS_DATA + (uint32_t)(bytes == 0 ? 0 : (bytes - 1) / 16);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (pool->classes[middle].bytes < bytes)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool pool_reserve_places(struct pool *pool, uint32_t count)
{
    struct page_class *cls = &pool->classes[CLASS_PLACE];

    while (cls->pages * cls->per_page < pool->places_reserved + count) {
        if (!page_take(pool, CLASS_PLACE))
            return false;
    }
    pool->places_reserved += count;
    return true;
}

void pool_unreserve_places(struct pool *pool, uint32_t count)
{
    struct page_class *cls = &pool->classes[CLASS_PLACE];

    KVT_ASSERT(pool->places_reserved >= count);
    pool->places_reserved -= count;
    while (cls->tail != PAGE_NONE && pool->pages[cls->tail].used == 0 &&
           page_is_spare(pool, CLASS_PLACE))
        page_give(pool, cls->tail);
}

void *pool_object(const struct pool *pool, uint32_t cls_idx, uint32_t ref)
{
    const size_t offset = (size_t)ref << 4;
    const size_t page_idx = offset >> pool->page_shift;
    const size_t in_page = offset & (((size_t)1 << pool->page_shift) - 1);
    const uint32_t bytes = pool->classes[cls_idx].bytes;

    if (page_idx < pool->pages_first || page_idx >= pool->pages_count ||
        pool->pages[page_idx].cls != cls_idx || in_page % bytes != 0 ||
        in_page / bytes >= pool->pages[page_idx].bump)
        return NULL;
    return pool->region + offset;
}

struct block *pool_block_in_use(const struct pool *pool, uint32_t idx)
{
    uint32_t page_idx = (uint32_t)(((uint64_t)idx << 4) >> pool->page_shift);
    const struct page *page = &pool->pages[page_idx];
    struct block *block;
    uint32_t slot;

    if (page_idx < pool->pages_first || page_idx >= pool->pages_count || page->cls != CLASS_BLOCK)
        return NULL;
    slot = idx & ((1u << (pool->page_shift - 4)) - 1);
    if (slot >= page->bump)
        return NULL;
    block = (struct block *)(void *)(pool->region + ((size_t)idx << 4));
    return block->pos == UINT32_MAX ? NULL : block;
}
