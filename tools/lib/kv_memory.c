/* The guard is a payload of the oracle too, with keys that no block of a model has but by accident:
 * it is made and compared with the same code. */
#include "tools/lib/kv_memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "tools/lib/oracle.h"
#include "tools/lib/quant_payload.h"

#define PAGE_ALIGN_BYTES 64u
#define STRAY_CHUNK_BYTES 512u

static uint32_t page_bytes_of(const struct kvt_model *model)
{
    uint64_t bytes = 0;

    for (uint32_t c = 0; c < model->components_count; c++)
        bytes = KVT_MAX(bytes, 2ull * model->components[c].piece_bytes);
    return (uint32_t)kvt_round_up(bytes, PAGE_ALIGN_BYTES);
}

uint64_t kvt_kv_memory_block_bytes(const struct kvt_model *model)
{
    return (uint64_t)page_bytes_of(model) * model->layers;
}

static int map_rank(struct kvt_kv_memory *memory, uint32_t rank)
{
    int fd = memfd_create("kvtier-bench", MFD_CLOEXEC | MFD_ALLOW_SEALING), r;
    void *base;

    if (fd < 0)
        return kvt_trace(-errno);
    memory->memfds[rank] = fd;
    r = posix_fallocate(fd, 0, (off_t)memory->bytes);
    if (r != 0)
        return kvt_trace(-r);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        return kvt_trace(-errno);
    base = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return kvt_trace(-errno);
    memory->bases[rank] = base;
    return 0;
}

static void guard_all(struct kvt_kv_memory *memory)
{
    for (uint32_t rank = 0; rank < memory->model->ranks && memory->has_guards; rank++)
        for (uint64_t id = 0; id < memory->blocks_count; id++)
            kvt_kv_memory_guard(memory, rank, id);
}

int kvt_kv_memory_init(struct kvt_kv_memory *memory, const struct kvt_model *model,
                       uint64_t blocks_count, bool has_guards)
{
    return kvt_kv_memory_init_store(memory, model, blocks_count, has_guards, NULL);
}

int kvt_kv_memory_init_store(struct kvt_kv_memory *memory, const struct kvt_model *model,
                             uint64_t blocks_count, bool has_guards, struct kvt_kv_store *store)
{
    int r = 0;

    *memory = (struct kvt_kv_memory){
        .model = model,
        .blocks_count = blocks_count,
        .page_bytes = page_bytes_of(model),
        .bytes = blocks_count * kvt_kv_memory_block_bytes(model),
        .store = store,
        .has_guards = has_guards,
    };
    for (uint32_t rank = 0; rank < KVT_RANKS_MAX; rank++)
        memory->memfds[rank] = -1;
    for (uint32_t rank = 0; store == NULL && rank < model->ranks && r == 0; rank++)
        r = map_rank(memory, rank);
    if (r < 0) {
        kvt_kv_memory_deinit(memory);
        return r;
    }
    if (store == NULL)
        guard_all(memory);
    return 0;
}

int kvt_kv_memory_make(struct kvt_kv_memory *memory)
{
    int r;

    if (memory->store == NULL)
        return 0;
    r = memory->store->make(memory->store, memory->model->ranks, memory->bytes);
    if (r == 0)
        guard_all(memory);
    return r;
}

int kvt_kv_memory_join(const struct kvt_kv_memory *memory)
{
    return memory->store == NULL ? 0 : memory->store->join(memory->store);
}

void kvt_kv_memory_deinit(struct kvt_kv_memory *memory)
{
    if (memory->model == NULL)
        return;
    for (uint32_t rank = 0; rank < memory->model->ranks; rank++) {
        if (memory->bases[rank] != NULL)
            (void)munmap(memory->bases[rank], memory->bytes);
        if (memory->memfds[rank] >= 0)
            (void)close(memory->memfds[rank]);
    }
    *memory = (struct kvt_kv_memory){0};
}

uint64_t kvt_kv_memory_piece_offset(const struct kvt_kv_memory *memory, uint32_t component,
                                    uint32_t piece)
{
    return piece / 2 * memory->blocks_count * memory->page_bytes +
           (uint64_t)(piece % 2) * memory->model->components[component].piece_bytes;
}

/* Bytes [begin, end) of each page of an engine block: where they lie, or what a store brought. */
struct view {
    const struct kvt_kv_memory *memory;
    struct kvt_kv_pages pages;
    uint8_t *at;
    size_t stride;
};

static struct view view_open(const struct kvt_kv_memory *memory, uint32_t rank, uint64_t id,
                             size_t begin, size_t end)
{
    struct view view = {.memory = memory,
                        .pages = {.rank = rank,
                                  .count = memory->model->layers,
                                  .bytes_each = (uint32_t)(end - begin),
                                  .offset_bytes = id * memory->page_bytes + begin,
                                  .stride_bytes = memory->blocks_count * memory->page_bytes}};

    KVT_ASSERT(rank < memory->model->ranks && id < memory->blocks_count && begin <= end);
    if (memory->store == NULL) {
        view.at = memory->bases[rank] + view.pages.offset_bytes;
        view.stride = view.pages.stride_bytes;
        return view;
    }
    view.pages.bytes = kvt_alloc_aligned(64, (size_t)view.pages.count * (end - begin) + 64);
    KVT_ASSERT(view.pages.bytes != NULL);
    view.at = view.pages.bytes;
    view.stride = end - begin;
    return view;
}

/* What cannot be had is zeros, which are nobody's bytes. */
static struct view view_read(const struct kvt_kv_memory *memory, uint32_t rank, uint64_t id,
                             size_t begin, size_t end)
{
    struct view view = view_open(memory, rank, id, begin, end);

    if (memory->store != NULL && begin < end &&
        memory->store->move(memory->store, &view.pages, false) < 0)
        memset(view.at, 0, view.stride * view.pages.count);
    return view;
}

static void view_close(struct view *view)
{
    kvt_free(view->pages.bytes);
}

/* A write that fails is seen when the block is read. */
static void view_write(struct view *view)
{
    struct kvt_kv_store *store = view->memory->store;

    if (store != NULL)
        (void)store->move(store, &view->pages, true);
    view_close(view);
}

static uint8_t *page_at(const struct view *view, uint32_t layer)
{
    return view->at + layer * view->stride;
}

/* Of a view from the page's begin. */
static uint8_t *piece_at(const struct view *view, const struct kvt_model_component *component,
                         uint32_t piece)
{
    return page_at(view, piece / 2) + (size_t)(piece % 2) * component->piece_bytes;
}

static struct view payload_read(const struct kvt_kv_memory *memory, const struct kvt_kv_part *part)
{
    return view_read(memory, part->rank, part->id, 0,
                     (size_t)2 * memory->model->components[part->component].piece_bytes);
}

static uint64_t guard_key(uint32_t rank, uint64_t id)
{
    struct kvt_oracle_place place = {0x6775617264ull, id, UINT32_MAX, rank}; /* "guard" */

    return kvt_oracle_key(&place);
}

/* Where piece @piece of @part begins in its block's payload. */
static uint64_t payload_at(const struct kvt_model_component *component,
                           const struct kvt_kv_part *part, uint32_t piece)
{
    return ((uint64_t)piece * component->engine_blocks_per_block + part->part) *
           component->piece_bytes;
}

/* As the engine computes it. */
static void fill_piece(const struct kvt_model_component *component, const struct kvt_kv_part *part,
                       uint32_t piece, uint8_t *ret_bytes)
{
    kvt_oracle_fill(part->key, payload_at(component, part, piece), ret_bytes,
                    component->piece_bytes);
    if (component->quant.kind != KVT_QUANT_NONE)
        kvt_quant_payload_shape(ret_bytes, component->piece_bytes);
}

void kvt_kv_memory_fill(const struct kvt_kv_memory *memory, const struct kvt_kv_part *part)
{
    const struct kvt_model_component *component = &memory->model->components[part->component];

    struct view view =
        view_open(memory, part->rank, part->id, 0, (size_t)2 * component->piece_bytes);

    for (uint32_t piece = 0; piece < component->pieces_count; piece++)
        fill_piece(component, part, piece, piece_at(&view, component, piece));
    view_write(&view);
}

/* What a piece of a quantised component may be: as it was computed, and after each conversion. One
 * buffer; a tool without memory for it ends. */
#define FORMS (KVT_QUANT_TIMES_MAX + 1)

struct forms {
    uint8_t *at[FORMS];
};

static struct forms forms_new(uint32_t piece_bytes)
{
    struct forms forms;

    forms.at[0] = kvt_alloc_aligned(16, (size_t)piece_bytes * FORMS);
    KVT_ASSERT(forms.at[0] != NULL);
    for (uint32_t i = 1; i < FORMS; i++)
        forms.at[i] = forms.at[0] + (size_t)i * piece_bytes;
    return forms;
}

static void forms_make(struct forms *forms, const struct kvt_model_component *component,
                       const struct kvt_kv_part *part, uint32_t piece)
{
    int r = 0;

    fill_piece(component, part, piece, forms->at[0]);
    for (uint32_t i = 1; i < FORMS && r == 0; i++) {
        memcpy(forms->at[i], forms->at[i - 1], component->piece_bytes);
        r = kvt_quant_payload_convert(&component->quant, forms->at[i], component->piece_bytes);
    }
    KVT_ASSERT(r == 0);
}

static uint64_t count_different(const uint8_t *a, const uint8_t *b, uint32_t bytes)
{
    uint64_t wrong = 0;

    for (uint32_t i = 0; i < bytes && memcmp(a, b, bytes) != 0; i++)
        wrong += a[i] != b[i];
    return wrong;
}

/* All pieces of an engine block were converted equally often: of the forms, the one that fits best
 * as a whole says what is wrong. */
static uint64_t count_wrong_quantised(const struct kvt_kv_memory *memory,
                                      const struct kvt_kv_part *part)
{
    const struct kvt_model_component *component = &memory->model->components[part->component];
    struct forms forms = forms_new(component->piece_bytes);
    struct view view = payload_read(memory, part);
    uint64_t wrong[FORMS] = {0}, least = UINT64_MAX;

    for (uint32_t piece = 0; piece < component->pieces_count; piece++) {
        forms_make(&forms, component, part, piece);
        for (uint32_t i = 0; i < FORMS; i++)
            wrong[i] += count_different(piece_at(&view, component, piece), forms.at[i],
                                        component->piece_bytes);
    }
    view_close(&view);
    kvt_free(forms.at[0]);
    for (uint32_t i = part->may_be_computed ? 0 : 1; i < FORMS; i++)
        least = KVT_MIN(least, wrong[i]);
    return least;
}

uint64_t kvt_kv_memory_count_wrong(const struct kvt_kv_memory *memory,
                                   const struct kvt_kv_part *part)
{
    const struct kvt_model_component *component = &memory->model->components[part->component];
    uint64_t wrong = 0;
    struct view view;

    if (component->quant.kind != KVT_QUANT_NONE)
        return count_wrong_quantised(memory, part);
    view = payload_read(memory, part);
    for (uint32_t piece = 0; piece < component->pieces_count; piece++)
        wrong += kvt_oracle_count_wrong(part->key, payload_at(component, part, piece),
                                        piece_at(&view, component, piece), component->piece_bytes);
    view_close(&view);
    return wrong;
}

uint64_t kvt_kv_memory_count_spilled(const struct kvt_kv_memory *memory,
                                     const struct kvt_kv_part *part)
{
    size_t used = (size_t)2 * memory->model->components[part->component].piece_bytes;
    uint64_t key = guard_key(part->rank, part->id), spilled = 0;
    struct view view = view_read(memory, part->rank, part->id, used, memory->page_bytes);

    for (uint32_t layer = 0; layer < memory->model->layers; layer++)
        spilled += kvt_oracle_count_wrong(key, (uint64_t)layer * memory->page_bytes + used,
                                          page_at(&view, layer), memory->page_bytes - used);
    view_close(&view);
    return spilled;
}

static uint64_t count_neither(const uint8_t *at, size_t bytes, uint64_t keys[2],
                              const uint64_t offset_bytes[2])
{
    uint8_t wanted[2][STRAY_CHUNK_BYTES];
    uint64_t stray = 0;

    for (size_t done = 0; done < bytes; done += STRAY_CHUNK_BYTES) {
        size_t part = KVT_MIN(bytes - done, (size_t)STRAY_CHUNK_BYTES);

        for (uint32_t i = 0; i < 2; i++)
            kvt_oracle_fill(keys[i], offset_bytes[i] + done, wanted[i], part);
        for (size_t i = 0; i < part; i++)
            stray += at[done + i] != wanted[0][i] && at[done + i] != wanted[1][i];
    }
    return stray;
}

/* Neither the guard's nor any form of the payload. */
static uint64_t count_stray_quantised(const struct kvt_kv_memory *memory,
                                      const struct kvt_kv_part *part)
{
    const struct kvt_model_component *component = &memory->model->components[part->component];
    struct forms forms = forms_new(component->piece_bytes);
    uint8_t *guard = kvt_alloc_aligned(16, component->piece_bytes);
    struct view view = payload_read(memory, part);
    uint64_t stray = 0;

    KVT_ASSERT(guard != NULL);
    for (uint32_t piece = 0; piece < component->pieces_count; piece++) {
        const uint8_t *at = piece_at(&view, component, piece);

        forms_make(&forms, component, part, piece);
        kvt_oracle_fill(guard_key(part->rank, part->id),
                        (uint64_t)(piece / 2) * memory->page_bytes +
                            (size_t)(piece % 2) * component->piece_bytes,
                        guard, component->piece_bytes);
        for (uint32_t i = 0; i < component->piece_bytes; i++) {
            bool is_known = at[i] == guard[i];

            for (uint32_t form = 0; form < FORMS; form++)
                is_known |= at[i] == forms.at[form][i];
            stray += !is_known;
        }
    }
    view_close(&view);
    kvt_free(guard);
    kvt_free(forms.at[0]);
    return stray;
}

uint64_t kvt_kv_memory_count_stray(const struct kvt_kv_memory *memory,
                                   const struct kvt_kv_part *part)
{
    const struct kvt_model_component *component = &memory->model->components[part->component];
    uint64_t keys[2] = {part->key, guard_key(part->rank, part->id)};
    uint64_t stray = kvt_kv_memory_count_spilled(memory, part);
    struct view view;

    if (component->quant.kind != KVT_QUANT_NONE)
        return stray + count_stray_quantised(memory, part);
    view = payload_read(memory, part);
    for (uint32_t piece = 0; piece < component->pieces_count; piece++) {
        size_t in_page = (size_t)(piece % 2) * component->piece_bytes;
        uint64_t offset_bytes[2] = {payload_at(component, part, piece),
                                    (uint64_t)(piece / 2) * memory->page_bytes + in_page};

        stray += count_neither(piece_at(&view, component, piece), component->piece_bytes, keys,
                               offset_bytes);
    }
    view_close(&view);
    return stray;
}

void kvt_kv_memory_guard(const struct kvt_kv_memory *memory, uint32_t rank, uint64_t id)
{
    struct view view = view_open(memory, rank, id, 0, memory->page_bytes);

    for (uint32_t layer = 0; layer < memory->model->layers; layer++)
        kvt_oracle_fill(guard_key(rank, id), (uint64_t)layer * memory->page_bytes,
                        page_at(&view, layer), memory->page_bytes);
    view_write(&view);
}

uint64_t kvt_kv_memory_count_unguarded(const struct kvt_kv_memory *memory, uint32_t rank,
                                       uint64_t id)
{
    struct view view = view_read(memory, rank, id, 0, memory->page_bytes);
    uint64_t wrong = 0;

    for (uint32_t layer = 0; layer < memory->model->layers; layer++)
        wrong += kvt_oracle_count_wrong(guard_key(rank, id), (uint64_t)layer * memory->page_bytes,
                                        page_at(&view, layer), memory->page_bytes);
    view_close(&view);
    return wrong;
}
