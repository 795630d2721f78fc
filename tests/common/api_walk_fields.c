#include "tests/common/api_walk_fields.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/base/hash.h"

uint64_t api_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void walk_note(struct api_walk *walk, const char *name, const void *at, size_t bytes)
{
    if (walk->fields_count == walk->fields_room) { /* most have few: no large block for each */
        walk->fields_room = KVT_MAX(256u, 2 * walk->fields_room);
        walk->fields = realloc(walk->fields, walk->fields_room * sizeof(*walk->fields));
        KVT_ASSERT(walk->fields != NULL);
    }
    walk->fields[walk->fields_count++] =
        (struct api_field){.name = name, .hash = kvt_hash64(at, bytes, bytes)};
}

uint64_t walk_pick(struct api_walk *walk, uint64_t least, uint64_t most)
{
    uint64_t span = most - least;
    uint64_t value = api_random(&walk->random);

    if ((value & 7) == 0) /* limits come often */
        return (value & 8) != 0 ? least : most;
    return span == UINT64_MAX ? api_random(&walk->random)
                              : least + api_random(&walk->random) % (span + 1);
}

void walk_u64(struct api_walk *walk, const char *name, uint64_t *at, uint64_t least, uint64_t most)
{
    if (walk->is_filling)
        *at = walk_pick(walk, least, most);
    else
        walk_note(walk, name, at, sizeof(*at));
}

void walk_u32(struct api_walk *walk, const char *name, uint32_t *at, uint64_t least, uint64_t most)
{
    if (walk->is_filling)
        *at = (uint32_t)walk_pick(walk, least, KVT_MIN(most, (uint64_t)UINT32_MAX));
    else
        walk_note(walk, name, at, sizeof(*at));
}

void walk_bool(struct api_walk *walk, const char *name, bool *at)
{
    if (walk->is_filling)
        *at = (api_random(&walk->random) & 1) != 0;
    else
        walk_note(walk, name, at, sizeof(*at));
}

void walk_enum(struct api_walk *walk, const char *name, void *at, uint32_t most)
{
    walk_u32(walk, name, at, 0, most);
}

/* @bytes of memory. */
void walk_raw(struct api_walk *walk, const char *name, void *at, size_t bytes)
{
    uint8_t *to = at;

    if (!walk->is_filling) {
        walk_note(walk, name, at, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)api_random(&walk->random);
}

void *walk_take(struct api_walk *walk, size_t count, size_t bytes)
{
    void *at = kvt_arena_array(walk->arena, count, bytes);

    KVT_ASSERT(at != NULL);
    return at;
}

void walk_blob(struct api_walk *walk, const char *name, struct kvt_text *text, uint32_t bytes_max)
{
    if (walk->is_filling) {
        text->bytes =
            (uint32_t)walk_pick(walk, 0, walk->size == 0 ? KVT_MIN(bytes_max, 40u) : bytes_max);
        text->at = walk_take(walk, text->bytes + 1u, 1);
    }
    walk_raw(walk, name, (char *)(uintptr_t)text->at, text->bytes);
}

/* UTF-8: some of two and three bytes. */
void walk_text(struct api_walk *walk, const char *name, struct kvt_text *text, uint32_t bytes_max)
{
    static const char *const characters[] = {"a", "Z", " ", "=", "é", "Ж", "漢", "0"};
    uint32_t bytes_wanted;
    char *at;

    if (!walk->is_filling) {
        walk_note(walk, name, text->at, text->bytes);
        return;
    }
    bytes_wanted =
        (uint32_t)walk_pick(walk, 0, walk->size == 0 ? KVT_MIN(bytes_max, 40u) : bytes_max);
    at = walk_take(walk, bytes_wanted + 8u, 1);
    *text = (struct kvt_text){.at = at};
    for (;;) {
        const char *c = characters[api_random(&walk->random) % KVT_COUNT_OF(characters)];
        uint32_t bytes = (uint32_t)strlen(c);

        if (text->bytes + bytes > bytes_wanted)
            return;
        memcpy(at + text->bytes, c, bytes);
        text->bytes += bytes;
    }
}

void walk_handle(struct api_walk *walk, const char *name, struct kvt_handle *handle)
{
    if (walk->is_filling && (api_random(&walk->random) & 3) == 0) {
        *handle = KVT_HANDLE_NONE;
        return;
    }
    U64(name, &handle->boot_id);
    U64(name, &handle->id);
    U64(name, &handle->secret);
}
