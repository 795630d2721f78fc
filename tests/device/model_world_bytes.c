/* Where bytes are in the model's world, by loops that know nothing of the device tier. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/device/model_machine.h"
#include "tests/device/model_world_internal.h"

#define QUANT_PLANE                                                                                \
    {                                                                                              \
        .kind = KVT_QUANT_INT8, .elem = KVT_ELEM_BF16, .order = KVT_ORDER_TOKENS_FIRST,            \
        .plane_tokens = 4, .heads = 2, .head_dim = 8                                               \
    }

static const struct world_spec specs[] = {
    {.raw_bytes = 24576, .stored_bytes = 24576, .align_bytes = 8},
    {.raw_bytes = 4662, .stored_bytes = 4662, .align_bytes = 1},
    {.raw_bytes = 98304, .stored_bytes = 98304, .align_bytes = 16},
    {.raw_bytes = 1536, .stored_bytes = 1536, .align_bytes = 64},
    /* 48 planes of 128 bytes: 64 codes each, and 96 scales. */
    {.raw_bytes = 6144, .stored_bytes = 3072 + 384, .align_bytes = 128, .quant = QUANT_PLANE},
};
#define SPECS_PLAIN 4u

const struct world_spec *world_spec(uint32_t idx)
{
    return &specs[idx];
}

/* The bytes of one engine block, cut into pieces. */
static uint32_t cut(struct world *world, struct kvt_layout_piece *pieces, uint32_t block_bytes,
                    uint32_t align_bytes)
{
    uint32_t units = block_bytes / align_bytes;
    uint32_t count = 1 + (uint32_t)world_random(world, KVT_MIN(WORLD_PIECES_MAX, units));

    for (uint32_t p = 0; p < count; p++) {
        uint32_t left = count - p - 1;
        uint32_t part = left == 0 ? units : 1 + (uint32_t)world_random(world, units - left);

        pieces[p] = (struct kvt_layout_piece){.bytes = part * align_bytes};
        units -= part;
    }
    return count;
}

/* Layer first, page first, either with gaps; *ret_bytes: of the pool. */
static void arrange(struct world *world, struct world_client *client, uint32_t blocks_count)
{
    struct kvt_layout *layout = &client->layout;
    uint32_t align = specs[client->spec].align_bytes, block_bytes = 0;
    uint64_t gap = world_random(world, 2) * KVT_MAX(align, 16u), at = 0;
    bool is_page_first = world_random(world, 2) == 0;

    for (uint32_t p = 0; p < layout->pieces_count; p++)
        block_bytes += client->pieces[p].bytes;
    for (uint32_t p = 0; p < layout->pieces_count; p++) {
        struct kvt_layout_piece *piece = &client->pieces[p];

        piece->offset_bytes = at;
        piece->stride_bytes = gap + (is_page_first ? block_bytes : piece->bytes);
        at += is_page_first ? piece->bytes : blocks_count * piece->stride_bytes;
    }
    client->bytes = is_page_first ? blocks_count * (block_bytes + gap) : at;
}

void world_client_init(struct world *world, uint32_t idx)
{
    struct world_client *client = &world->clients[idx];
    uint32_t per_block = 1 + (uint32_t)world_random(world, WORLD_BLOCKS_MAX);
    uint32_t blocks_count = WORLD_GROUPS * per_block + 2, used = 0;
    bool is_mixed = world_random(world, 2) == 0;

    client->device = idx < 3 ? 0 : (idx == 3 ? 1 : KVT_GPU_NONE);
    if (world->is_set && idx < 4)
        client->device = idx % world->zones_count;
    if (world->is_host)
        client->device = KVT_GPU_NONE;
    client->spec = (uint32_t)world_random(world, SPECS_PLAIN);
    if (world->options.has_quant && idx % 2 == 0)
        client->spec = SPECS_PLAIN;
    client->layout = (struct kvt_layout){.pieces = client->pieces,
                                         .engine_blocks_per_block = per_block,
                                         .quant = specs[client->spec].quant,
                                         .payload_bytes = specs[client->spec].raw_bytes};
    client->layout.pieces_count =
        cut(world, client->pieces, specs[client->spec].raw_bytes / per_block,
            specs[client->spec].align_bytes);
    arrange(world, client, blocks_count);
    for (uint32_t g = 0; g < WORLD_GROUPS; g++)
        for (uint32_t b = 0; b < per_block; b++, used++)
            client->groups[g][b] = is_mixed ? (used * 5u + idx) % blocks_count : used;
    if (is_mixed && blocks_count % 5 == 0)
        for (uint32_t g = 0; g < WORLD_GROUPS; g++)
            for (uint32_t b = 0; b < per_block; b++)
                client->groups[g][b] = blocks_count - 1 - (g * per_block + b);
    if (client->device == KVT_GPU_NONE) {
        struct kvt_region region = {.bytes = client->bytes};

        region.base = client->memory = calloc(1, client->bytes);
        if (kvt_layout_resolve(&client->layout, &region, 1, client->layout.payload_bytes) != 0)
            world_fail(world, "a layout of client %u", idx);
    } else {
        client->device = KVT_MIN(client->device, world->devices_count - 1);
        if (world->options.is_by_table)
            world_table_pool_new(world, client);
        else
            world_machine_pool_new(client);
    }
    client->shadow = malloc(client->bytes);
    if (client->shadow == NULL || client->memory == NULL)
        abort();
    memcpy(client->shadow, client->memory, client->bytes);
}

uint8_t *world_host_slot(const struct world *world, const struct world_place *place)
{
    return world->host_memory + place->idx * WORLD_HOST_SLOT_BYTES;
}

uint32_t world_zone_of(const struct world *world, const struct world_place *place)
{
    uint32_t device;

    if (place->kind == KVT_PLACE_DEVICE)
        return place->idx % world->zones_count;
    device = place->kind == KVT_PLACE_CLIENT ? world->clients[place->client].device : KVT_GPU_NONE;
    return device < world->zones_count ? device : KVT_GPU_NONE;
}

/* The device address of a slot; 0: of an arena that is lost, or that nobody sees. */
static uint64_t arena_slot(const struct world *world, const struct world_place *place)
{
    const struct world_zone *zone = &world->zones[place->idx % world->zones_count];
    bool is_seen = !zone->is_lost && !world->options.is_blind && !world->is_host;
    uint64_t arena = is_seen ? kvt_gpu_arena(zone->gpu) : 0;

    return arena == 0 ? 0 : arena + place->idx / world->zones_count * WORLD_SLOT_BYTES;
}

uint8_t *world_bytes(const struct world *world, const struct world_place *place)
{
    uint64_t address;

    if (place->kind == KVT_PLACE_HOST)
        return world_host_slot(world, place) + kvt_slot_header_bytes(KVT_BLOCK_TOKENS_DEFAULT);
    address = arena_slot(world, place);
    if (address == 0)
        return NULL;
    if (!world->options.is_by_table)
        return world_machine_memory(address, WORLD_SLOT_BYTES);
    world_table_fetch(world, world_zone_of(world, place), address, world->table.mirror,
                      WORLD_SLOT_BYTES);
    world_table_wait(world, world_zone_of(world, place));
    return world->table.mirror;
}

static void write_slot(const struct world *world, const struct world_place *place)
{
    uint32_t zone = world_zone_of(world, place);
    uint8_t *bytes;

    if (place->kind == KVT_PLACE_DEVICE && world->options.is_by_table) {
        memcpy(world->table.mirror, place->shadow, WORLD_SLOT_BYTES);
        world_table_push(world, zone, arena_slot(world, place), world->table.mirror,
                         WORLD_SLOT_BYTES);
        world_table_wait(world, zone);
        return;
    }
    bytes = world_bytes(world, place);
    if (bytes != NULL)
        memcpy(bytes, place->shadow, WORLD_SLOT_BYTES);
}

/* Every part of a client's block, in the order of the payload. False: the last was given. */
struct part {
    uint32_t piece, block;
    uint64_t offset, payload_offset, bytes;
};
static bool next_part(const struct world_client *client, uint32_t group, struct part *part)
{
    const struct kvt_layout *layout = &client->layout;
    const struct kvt_layout_piece *piece;

    if (part->bytes > 0) {
        part->payload_offset += part->bytes;
        if (++part->block == layout->engine_blocks_per_block) {
            part->block = 0;
            part->piece++;
        }
    }
    if (part->piece == layout->pieces_count)
        return false;
    piece = &client->pieces[part->piece];
    part->bytes = piece->bytes;
    part->offset = piece->offset_bytes + client->groups[group][part->block] * piece->stride_bytes;
    return true;
}

void world_scribble(struct world *world, struct world_place *place)
{
    uint64_t value = world_random(world, UINT64_MAX) | 1;

    if (place->kind == KVT_PLACE_CLIENT) {
        struct world_client *client = &world->clients[place->client];
        struct part part = {0};

        while (next_part(client, place->idx, &part)) {
            for (uint64_t i = 0; i < part.bytes; i++) {
                value = value * 6364136223846793005ull + 1442695040888963407ull;
                client->shadow[part.offset + i] = (uint8_t)(value >> 56);
            }
            memcpy(client->memory + part.offset, client->shadow + part.offset, part.bytes);
            world_table_push(world, client->device, client->address + part.offset,
                             client->memory + part.offset, part.bytes);
        }
        world_table_wait(world, client->device);
        place->spec = client->spec;
        place->is_full = true;
        return;
    }
    place->is_full = false;
    for (uint32_t i = 0; i < WORLD_SLOT_BYTES / 8; i++)
        memcpy(place->shadow + 8 * i, &(uint64_t){value * (i + 1)}, 8);
    write_slot(world, place);
}

void world_forget(struct world *world, struct world_place *place)
{
    const uint8_t *bytes = world_bytes(world, place);

    place->is_full = false;
    if (bytes != NULL)
        memcpy(place->shadow, bytes, WORLD_SLOT_BYTES);
}

static void check_same(const struct world *world, const struct world_place *place,
                       const uint8_t *is, const uint8_t *should, uint64_t bytes, const char *when)
{
    if (memcmp(is, should, bytes) == 0)
        return;
    for (uint64_t i = 0; i < bytes; i++)
        if (is[i] != should[i])
            world_fail(world,
                       "%s: place %d/%u/%u (content %" PRIu64 ") byte %" PRIu64 " of %" PRIu64
                       ": 0x%02x, not 0x%02x",
                       when, (int)place->kind, place->client, place->idx, place->id, i, bytes,
                       is[i], should[i]);
}

void world_check(const struct world *world, const struct world_place *place, const char *when)
{
    const uint8_t *bytes;

    if (place->kind == KVT_PLACE_CLIENT) {
        const struct world_client *client = &world->clients[place->client];
        struct part part = {0};

        while (next_part(client, place->idx, &part))
            world_table_fetch(world, client->device, client->address + part.offset,
                              client->memory + part.offset, part.bytes);
        world_table_wait(world, client->device);
        part = (struct part){0};
        while (next_part(client, place->idx, &part))
            check_same(world, place, client->memory + part.offset, client->shadow + part.offset,
                       part.bytes, when);
        return;
    }
    bytes = world_bytes(world, place); /* once: a loss may be seen meanwhile */
    if (bytes != NULL)
        check_same(world, place, bytes, place->shadow, WORLD_SLOT_BYTES, when);
}

void world_verify(struct world *world)
{
    bool is_quiet = world->inflight == 0;

    for (uint32_t i = 0; i < WORLD_PLACES; i++)
        if (!world->places[i].is_writing)
            world_check(world, &world->places[i], "nobody writes");
    /* What lies between the blocks is nobody's business either. */
    for (uint32_t c = 0; is_quiet && c < WORLD_CLIENTS; c++) {
        const struct world_client *client = &world->clients[c];

        world_table_fetch(world, client->device, client->address, client->memory, client->bytes);
        world_table_wait(world, client->device);
        if (memcmp(client->memory, client->shadow, client->bytes) != 0)
            world_fail(world, "the gaps of client %u were written", c);
    }
}

static void convert(const struct world *world, const struct world_spec *spec, uint8_t *raw,
                    uint8_t *stored, bool is_quantise)
{
    uint32_t planes = spec->raw_bytes / spec->align_bytes;
    struct kvt_quant_job job = {.raw = (uintptr_t)raw,
                                .quantised = (uintptr_t)stored,
                                .planes_count = planes,
                                .end_plane = planes};
    struct kvt_quant_batch batch = {
        .spec = spec->quant, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = planes};
    const struct kvt_kernels *kernels = kvt_kernels_host();

    if ((is_quantise ? kernels->quantise : kernels->dequantise)(NULL, &batch) != 0)
        world_fail(world, "the oracle does not quantise");
}

void world_shadow_read(const struct world *world, const struct world_place *place,
                       uint8_t *ret_stored)
{
    const struct world_spec *spec = &specs[place->spec];
    const struct world_client *client = &world->clients[place->client];
    struct part part = {0};
    uint8_t *raw = ret_stored;

    if (place->kind != KVT_PLACE_CLIENT) {
        memcpy(ret_stored, place->shadow, spec->stored_bytes);
        return;
    }
    if (spec->quant.kind != KVT_QUANT_NONE)
        raw = aligned_alloc(64, spec->raw_bytes);
    while (next_part(client, place->idx, &part))
        memcpy(raw + part.payload_offset, client->shadow + part.offset, part.bytes);
    if (raw != ret_stored) {
        convert(world, spec, raw, ret_stored, true);
        free(raw);
    }
}

void world_shadow_write(struct world *world, struct world_place *place, const uint8_t *stored,
                        const struct kvt_client_view *view)
{
    struct world_client *client = &world->clients[place->client];
    const struct world_spec *spec = &specs[place->spec];
    struct part part = {0};
    uint8_t *raw;

    if (place->kind != KVT_PLACE_CLIENT) {
        memcpy(place->shadow, stored, spec->stored_bytes);
        return;
    }
    raw = aligned_alloc(64, kvt_round_up(spec->raw_bytes, 64));
    if (raw == NULL)
        abort();
    if (spec->quant.kind != KVT_QUANT_NONE)
        convert(world, spec, raw, (uint8_t *)(uintptr_t)stored, false);
    else
        memcpy(raw, stored, spec->raw_bytes);
    while (next_part(client, place->idx, &part))
        if (part.piece >= view->first_piece && part.piece < view->end_piece &&
            view->engine_blocks[part.block] != KVT_ENGINE_BLOCK_NONE)
            memcpy(client->shadow + part.offset, raw + part.payload_offset, part.bytes);
    free(raw);
}
