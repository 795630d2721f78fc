#include "tests/fuzz/attach_scene.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/kvt_kernels.h"
#include "tests/common/check.h"

#if defined(__SANITIZE_ADDRESS__)
#define HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_ASAN 1
#endif
#endif
#ifdef HAS_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

#define GUARD_BYTES 4096u
#define GUARD 0xa5
#define REGION_BYTES_MAX 16384u
#define PIECE_BYTES_MAX 400u
#define GAP_BYTES_MAX 600u

/* ---- input ------------------------------------------------------------------------------------
 */

uint8_t scene_u8(struct scene_input *input)
{
    if (input->left == 0)
        return 0;
    input->left--;
    return *input->at++;
}

uint64_t scene_below(struct scene_input *input, uint64_t bound)
{
    uint64_t value = scene_u8(input);

    if (bound > 256)
        value = value << 8 | scene_u8(input);
    return bound == 0 ? 0 : value % bound;
}

uint64_t scene_wild(struct scene_input *input, uint64_t bound)
{
    uint8_t how = scene_u8(input);
    uint64_t value = 0;

    if (how < 248)
        return scene_below(input, bound);
    input->was_wild = true;
    if (how < 251)
        return bound + (how - 248u);
    if (how == 251)
        return UINT64_MAX - scene_u8(input);
    for (uint32_t i = 0; i < 8; i++)
        value = value << 8 | scene_u8(input);
    return value >> (how - 252u) * 16u;
}

/* ---- geometry ---------------------------------------------------------------------------------
 */

/* Half of the scenes are on GPUs. Of those, an eighth meets a daemon that has none, and half lose
 * one at some time. */
static void take_gpus(struct scene *scene, struct scene_input *input)
{
    uint8_t how = scene_u8(input), loss;

    scene->is_on_gpus = how >= 0x80 && how < 0xe8;
    scene->has_gpus = scene->is_on_gpus && how % 8 != 0;
    if (!scene->is_on_gpus)
        return;
    scene->gpu = how / 8 % SCENE_GPUS;
    loss = scene_u8(input);
    if (loss % 2 != 0)
        return;
    scene->loss = (enum scene_loss)(loss / 2 % SCENE_LOSSES);
    scene->lost_gpu = loss % 32 < 24 ? scene->gpu : 1 - scene->gpu;
}

static void take_gpu(struct scene *scene, struct scene_region *region, struct scene_input *input)
{
    uint8_t which = scene_u8(input);

    region->kind = KVT_REGION_CUDA_IPC;
    region->gpu = scene->gpu;
    if (which >= 0xf8)
        region->gpu = SCENE_NO_SUCH_GPU;
    else if (which >= 0xe8)
        region->gpu = 1 - scene->gpu;
    else if (which >= 0xe0)
        region->offset_bytes = 1 + scene_wild(input, REGION_BYTES_MAX);
}

static void take_region(struct scene *scene, struct scene_region *region, struct scene_input *input)
{
    uint8_t kind = scene_u8(input);

    region->bytes = 1 + scene_below(input, REGION_BYTES_MAX);
    if (kind >= 0xfc || (scene->is_on_gpus && kind >= 0x10 && kind < 0xf8)) {
        take_gpu(scene, region, input);
    } else if (kind >= 0xf8) {
        region->kind = KVT_REGION_INLINE;
        input->was_wild = true;
    }
    region->block = malloc(region->bytes + 2 * GUARD_BYTES);
    region->expected = malloc(region->bytes);
    region->writers = malloc(region->bytes);
    CHECK(region->block != NULL && region->expected != NULL && region->writers != NULL);
    memset(region->block, GUARD, region->bytes + 2 * GUARD_BYTES);
    region->memory = region->block + GUARD_BYTES;
    ASAN_POISON_MEMORY_REGION(region->block, GUARD_BYTES);
    ASAN_POISON_MEMORY_REGION(region->memory + region->bytes, GUARD_BYTES);
}

/* Small planes, and pieces that are whole ones but for now and then. */
static void take_quant(struct scene *scene, uint32_t i, uint8_t kinds, struct scene_input *input)
{
    struct kvt_api_quant *quant = &scene->quant[i];
    uint32_t plane_bytes;

    *quant = (struct kvt_api_quant){.kind = 1u + kinds % 2,
                                    .elem = 1u + kinds / 2 % 2,
                                    .order = 1u + kinds / 4 % 2,
                                    .plane_tokens = 16u >> scene_below(input, 2),
                                    .heads = 1 + (uint32_t)scene_below(input, 3),
                                    .head_dim = 1 + (uint32_t)scene_below(input, 6)};
    plane_bytes = 2 * quant->plane_tokens * quant->heads * quant->head_dim;
    if (scene_u8(input) >= 0xf0) {
        input->was_wild = true;
        return;
    }
    for (uint32_t p = 0; p < scene->layouts[i].pieces_count; p++) {
        struct kvt_api_piece *piece = &scene->pieces[i][p];

        input->was_wild |= piece->bytes < plane_bytes; /* it may not lie in its region any more */
        piece->bytes = KVT_MAX(piece->bytes / plane_bytes, 1u) * plane_bytes;
        piece->offset_bytes -= piece->offset_bytes % 2;
        piece->stride_bytes = KVT_MAX(piece->stride_bytes, (uint64_t)piece->bytes);
        piece->stride_bytes -= piece->stride_bytes % 2;
    }
}

/* Honest pieces lie one behind the other in their regions: @used bytes of each. */
static bool is_full(const struct scene *scene, const uint64_t *used)
{
    for (uint32_t i = 0; i < scene->regions_count; i++)
        if (used[i] >= scene->regions[i].bytes)
            return true;
    return false;
}

static void take_piece(const struct scene *scene, struct kvt_api_piece *piece, uint64_t *used,
                       struct scene_input *input)
{
    uint64_t room = REGION_BYTES_MAX, first = 0;

    piece->region_idx = (uint32_t)scene_wild(input, scene->regions_count);
    if (piece->region_idx < scene->regions_count) {
        first = used[piece->region_idx];
        room = scene->regions[piece->region_idx].bytes - first;
    }
    piece->bytes = 1 + (uint32_t)scene_wild(input, KVT_MIN(room, (uint64_t)PIECE_BYTES_MAX));
    piece->offset_bytes =
        first + scene_wild(input, piece->bytes <= room
                                      ? KVT_MIN(room - piece->bytes + 1, (uint64_t)GAP_BYTES_MAX)
                                      : 1);
    piece->stride_bytes = piece->bytes + scene_wild(input, 200);
    if (piece->region_idx < scene->regions_count)
        used[piece->region_idx] =
            KVT_MIN(KVT_MAX(first, piece->offset_bytes) + piece->bytes, first + room);
}

static void take_layout(struct scene *scene, uint32_t i, struct scene_input *input)
{
    struct kvt_api_layout *layout = &scene->layouts[i];
    uint64_t used[SCENE_REGIONS_MAX] = {0}, payload_bytes = 0;
    uint8_t kinds;

    layout->component = scene_u8(input) < 0xf8 ? i : (uint32_t)scene_wild(input, 3);
    input->was_wild |= layout->component != i;
    layout->engine_blocks_per_block =
        1 + (uint32_t)scene_wild(input, SCENE_ENGINE_BLOCKS_MAX) % KVT_ENGINE_BLOCKS_PER_BLOCK_MAX;
    layout->pieces_count = 1 + (uint32_t)scene_below(input, SCENE_PIECES_MAX);
    layout->pieces = scene->pieces[i];
    for (uint32_t p = 0; p < layout->pieces_count; p++) {
        if (p > 0 && is_full(scene, used))
            layout->pieces_count = p;
        else
            take_piece(scene, &scene->pieces[i][p], used, input);
    }
    kinds = scene_u8(input);
    if (kinds >= 0xc0 && kinds < 0xfa)
        take_quant(scene, i, kinds, input);
    for (uint32_t p = 0; p < layout->pieces_count; p++)
        payload_bytes += scene->pieces[i][p].bytes;
    scene->bytes_per_block[i] = payload_bytes * layout->engine_blocks_per_block;
    if (kinds >= 0xfa) {
        scene->bytes_per_block[i] += scene_wild(input, 3);
        input->was_wild = true;
    }
}

void scene_init(struct scene *scene, struct scene_input *input)
{
    memset(scene, 0, sizeof(*scene));
    take_gpus(scene, input);
    scene->regions_count = 1 + (uint32_t)scene_below(input, SCENE_REGIONS_MAX);
    scene->components_count = 1 + (uint32_t)scene_below(input, SCENE_COMPONENTS_MAX);
    scene->blocks = 1 + (uint32_t)scene_below(input, SCENE_BLOCKS_MAX);
    scene->layouts_count = scene->components_count;
    for (uint32_t i = 0; i < scene->regions_count; i++)
        take_region(scene, &scene->regions[i], input);
    for (uint32_t i = 0; i < scene->components_count; i++)
        take_layout(scene, i, input);
}

void scene_deinit(struct scene *scene)
{
    for (uint32_t i = 0; i < scene->regions_count; i++) {
        struct scene_region *region = &scene->regions[i];

        ASAN_UNPOISON_MEMORY_REGION(region->block, region->bytes + 2 * GUARD_BYTES);
        free(region->block);
        free(region->expected);
        free(region->writers);
    }
    for (uint32_t c = 0; c < SCENE_COMPONENTS_MAX; c++)
        for (uint32_t b = 0; b < SCENE_BLOCKS_MAX; b++)
            free(scene->payload[c][b]);
}

/* Where byte 0 of piece @piece of engine block @id is, in its region; may lie anywhere. */
static unsigned __int128 place_of(const struct kvt_api_piece *piece, uint64_t id)
{
    return piece->offset_bytes + (unsigned __int128)id * piece->stride_bytes;
}

/* In the order of the regions, as they are opened: the first one that cannot be is told of. */
enum kvt_code scene_gpu_code(const struct scene *scene)
{
    bool is_lost = scene->loss == SCENE_LOSS_BEFORE, was_opened = false;

    for (uint32_t i = 0; i < scene->regions_count; i++) {
        const struct scene_region *region = &scene->regions[i];

        if (region->kind != KVT_REGION_CUDA_IPC)
            continue;
        if (!scene->has_gpus || region->gpu == SCENE_NO_SUCH_GPU)
            return KVT_CODE_FAILED_PRECONDITION;
        if (is_lost && region->gpu == scene->lost_gpu)
            return KVT_CODE_UNAVAILABLE;
        if (region->offset_bytes != 0)
            return KVT_CODE_INVALID_ARGUMENT;
        if (scene->loss == SCENE_LOSS_WHILE_OPENING && region->gpu == scene->lost_gpu)
            was_opened = is_lost = true;
    }
    return was_opened ? KVT_CODE_UNAVAILABLE : KVT_CODE_OK;
}

static bool do_pieces_meet(const struct kvt_api_piece *a, const struct kvt_api_piece *b)
{
    return a->region_idx == b->region_idx && a->offset_bytes < place_of(b, 0) + b->bytes &&
           b->offset_bytes < place_of(a, 0) + a->bytes;
}

bool scene_has_overlap(const struct scene *scene)
{
    for (uint32_t i = 0; i < scene->layouts_count; i++) {
        const struct kvt_api_layout *layout = &scene->layouts[i];

        for (uint32_t p = 0; p < layout->pieces_count; p++) {
            const struct kvt_api_piece *piece = &layout->pieces[p];

            if (piece->region_idx >= scene->regions_count ||
                scene->regions[piece->region_idx].kind == KVT_REGION_INLINE)
                continue;
            for (uint32_t other = 0; other < p; other++)
                if (do_pieces_meet(piece, &layout->pieces[other]))
                    return true;
        }
    }
    return false;
}

bool scene_is_mixed(const struct scene *scene)
{
    for (uint32_t i = 0; i < scene->layouts_count; i++) {
        const struct kvt_api_layout *layout = &scene->layouts[i];
        const struct scene_region *first = NULL;

        for (uint32_t p = 0; p < layout->pieces_count; p++) {
            uint32_t idx = layout->pieces[p].region_idx;
            const struct scene_region *region =
                idx < scene->regions_count ? &scene->regions[idx] : NULL;

            first = first != NULL ? first : region;
            if (region != NULL && (region->kind != first->kind || region->gpu != first->gpu))
                return true;
        }
    }
    return false;
}

const struct kvt_api_layout *scene_layout(const struct scene *scene, uint32_t component)
{
    for (uint32_t i = 0; i < scene->layouts_count; i++) {
        const struct kvt_api_layout *layout = &scene->layouts[i];

        if (layout->component == component &&
            scene->regions[layout->pieces[0].region_idx].kind != KVT_REGION_INLINE)
            return layout;
    }
    return NULL;
}

static bool is_inside(const struct scene *scene, const struct kvt_api_layout *layout, uint64_t id)
{
    for (uint32_t p = 0; p < layout->pieces_count; p++) {
        const struct kvt_api_piece *piece = &layout->pieces[p];

        if (place_of(piece, id) + piece->bytes > scene->regions[piece->region_idx].bytes)
            return false;
    }
    return true;
}

uint64_t scene_ids(const struct scene *scene, const struct kvt_api_layout *layout)
{
    uint64_t count = 0;

    while (is_inside(scene, layout, count))
        count++;
    return count;
}

/* ---- bytes ------------------------------------------------------------------------------------
 */

void scene_fill(struct scene *scene, uint8_t seed)
{
    for (uint32_t i = 0; i < scene->regions_count; i++)
        for (uint64_t at = 0; at < scene->regions[i].bytes; at++)
            scene->regions[i].memory[at] = (uint8_t)(at * 7 + (at >> 8) * 13 + i * 59 + seed);
}

void scene_scribble(struct scene *scene, uint8_t byte)
{
    for (uint32_t i = 0; i < scene->regions_count; i++) {
        memset(scene->regions[i].memory, byte, scene->regions[i].bytes);
        memset(scene->regions[i].expected, byte, scene->regions[i].bytes);
        memset(scene->regions[i].writers, 0, scene->regions[i].bytes);
    }
}

void scene_check_guards(const struct scene *scene)
{
    for (uint32_t i = 0; i < scene->regions_count; i++) {
        const struct scene_region *region = &scene->regions[i];
        uint8_t *behind = region->memory + region->bytes;

        ASAN_UNPOISON_MEMORY_REGION(region->block, GUARD_BYTES);
        ASAN_UNPOISON_MEMORY_REGION(behind, GUARD_BYTES);
        for (uint32_t at = 0; at < GUARD_BYTES; at++)
            CHECK(region->block[at] == GUARD && behind[at] == GUARD);
        ASAN_POISON_MEMORY_REGION(region->block, GUARD_BYTES);
        ASAN_POISON_MEMORY_REGION(behind, GUARD_BYTES);
    }
}

typedef void (*walk_fn)(struct scene *scene, struct scene_region *region, uint64_t at,
                        uint8_t *payload_byte, bool is_done);

/* Every byte of a block's payload with its place, in the order of the payload. */
static void walk(struct scene *scene, const struct kvt_api_layout *layout, const uint64_t *ids,
                 uint8_t *payload, bool is_done, walk_fn fn)
{
    for (uint32_t p = 0; p < layout->pieces_count; p++) {
        const struct kvt_api_piece *piece = &layout->pieces[p];
        struct scene_region *region = &scene->regions[piece->region_idx];

        for (uint32_t b = 0; b < layout->engine_blocks_per_block; b++, payload += piece->bytes) {
            if (ids[b] == KVT_ENGINE_BLOCK_NONE)
                continue;
            CHECK(place_of(piece, ids[b]) + piece->bytes <= region->bytes);
            for (uint32_t i = 0; i < piece->bytes; i++)
                fn(scene, region, (uint64_t)place_of(piece, ids[b]) + i, payload + i, is_done);
        }
    }
}

static void take_byte(struct scene *scene, struct scene_region *region, uint64_t at,
                      uint8_t *payload_byte, bool is_done)
{
    (void)scene;
    (void)is_done;
    *payload_byte = region->memory[at];
}

static uint8_t *payload_new(struct scene *scene, uint32_t component, uint64_t block_idx)
{
    CHECK(component < scene->components_count && block_idx < SCENE_BLOCKS_MAX);
    CHECK(scene->payload[component][block_idx] == NULL);
    scene->payload[component][block_idx] = malloc(scene->bytes_per_block[component]);
    CHECK(scene->payload[component][block_idx] != NULL);
    return scene->payload[component][block_idx];
}

/* What is kept of a quantised component comes back as its codes. */
static void convert(const struct scene *scene, uint32_t component, uint8_t *payload)
{
    const struct kvt_api_quant *quant = &scene->quant[component];
    uint64_t bytes = scene->bytes_per_block[component];
    struct kvt_quant_batch batch = {.spec = {.kind = (uint8_t)quant->kind,
                                             .elem = (uint8_t)quant->elem,
                                             .order = (uint8_t)quant->order,
                                             .plane_tokens = quant->plane_tokens,
                                             .heads = quant->heads,
                                             .head_dim = quant->head_dim},
                                    .jobs_count = 1};
    struct kvt_quant_job job = {.raw = (uintptr_t)payload};
    uint8_t *stored;

    if (quant->kind == 0)
        return;
    stored = malloc(kvt_quant_bytes(&batch.spec, bytes));
    CHECK(stored != NULL);
    job.quantised = (uintptr_t)stored;
    job.planes_count = job.end_plane = batch.planes_max =
        (uint32_t)(bytes / kvt_quant_plane_bytes(&batch.spec));
    batch.jobs = (uintptr_t)&job;
    CHECK(kvt_kernels_host()->quantise(NULL, &batch) == 0);
    CHECK(kvt_kernels_host()->dequantise(NULL, &batch) == 0);
    free(stored);
}

void scene_store(struct scene *scene, const struct kvt_api_layout *layout, uint64_t block_idx,
                 const uint64_t *ids)
{
    for (uint32_t b = 0; b < layout->engine_blocks_per_block; b++)
        CHECK(ids[b] != KVT_ENGINE_BLOCK_NONE);
    walk(scene, layout, ids, payload_new(scene, layout->component, block_idx), true, take_byte);
    convert(scene, layout->component, scene->payload[layout->component][block_idx]);
}

void scene_store_inline(struct scene *scene, uint32_t component, uint64_t block_idx,
                        const uint8_t *payload)
{
    memcpy(payload_new(scene, component, block_idx), payload, scene->bytes_per_block[component]);
    convert(scene, component, scene->payload[component][block_idx]);
}

static void expect_byte(struct scene *scene, struct scene_region *region, uint64_t at,
                        uint8_t *payload_byte, bool is_done)
{
    (void)scene;
    region->expected[at] = *payload_byte;
    region->writers[at] = is_done && region->writers[at] == 0 ? 1 : 2;
}

void scene_expect(struct scene *scene, const struct kvt_api_layout *layout, uint64_t block_idx,
                  const uint64_t *ids, bool is_done)
{
    uint8_t *payload = scene->payload[layout->component][block_idx];

    CHECK(payload != NULL || !is_done); /* what was never stored is not served */
    if (payload != NULL)
        walk(scene, layout, ids, payload, is_done, expect_byte);
}

void scene_check(const struct scene *scene)
{
    for (uint32_t i = 0; i < scene->regions_count; i++) {
        const struct scene_region *region = &scene->regions[i];

        for (uint64_t at = 0; at < region->bytes; at++)
            CHECK(region->writers[at] > 1 || region->memory[at] == region->expected[at]);
    }
}
