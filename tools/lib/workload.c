/* Arrays that double. Facts are found with a set of chain hashes (oracle.h): 64 bits among a few
 * million blocks are exact enough to be equal to the published figures of the traces. */
#include "tools/lib/workload.h"

#include <stdlib.h>
#include <string.h>

#include "tools/lib/oracle.h"

#define VOCABULARY (1u << 17)

void kvt_workload_deinit(struct kvt_workload *workload)
{
    if (workload == NULL)
        return;
    free(workload->requests);
    free(workload->ids);
    *workload = KVT_WORKLOAD_NULL;
}

/* Makes room for @more elements of @bytes in an array of @count. -ENOMEM, or 0. */
static int make_room(void **array, uint64_t count, uint64_t more, uint64_t *room, size_t bytes)
{
    uint64_t wanted = *room;
    void *grown;

    if (count + more <= *room)
        return 0;
    while (wanted < count + more)
        wanted = KVT_MAX(wanted * 2, (uint64_t)1024);
    grown = reallocarray(*array, wanted, bytes);
    if (grown == NULL)
        return kvt_trace(-ENOMEM);
    *array = grown;
    *room = wanted;
    return 0;
}

int kvt_workload_add(struct kvt_workload *workload, const struct kvt_request *request,
                     const uint32_t *ids)
{
    struct kvt_request *added;
    void *array = workload->requests;
    int r;

    r = make_room(&array, workload->requests_count, 1, &workload->requests_room, sizeof(*added));
    workload->requests = array;
    if (r < 0)
        return kvt_trace(r);
    array = workload->ids;
    r = make_room(&array, workload->ids_count, request->ids_count, &workload->ids_room,
                  sizeof(*ids));
    workload->ids = array;
    if (r < 0)
        return kvt_trace(r);
    added = &workload->requests[workload->requests_count++];
    *added = *request;
    added->ids_at = workload->ids_count;
    if (request->ids_count > 0)
        memcpy(workload->ids + workload->ids_count, ids, request->ids_count * sizeof(*ids));
    workload->ids_count += request->ids_count;
    workload->input_tokens_max = KVT_MAX(workload->input_tokens_max, request->input_tokens);
    workload->output_tokens_max = KVT_MAX(workload->output_tokens_max, request->output_tokens);
    return 0;
}

static uint32_t token_of(uint64_t seed, uint64_t id, uint32_t offset)
{
    uint64_t x = seed + id * 0x9E3779B97F4A7C15ull + offset * 0xC2B2AE3D27D4EB4Full;

    x ^= x >> 31;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBull;
    return (uint32_t)(x >> 40) % VOCABULARY;
}

void kvt_workload_tokens(const struct kvt_workload *workload, uint64_t request_idx, uint64_t first,
                         uint64_t count, uint32_t *ret_tokens)
{
    const struct kvt_request *request = &workload->requests[request_idx];
    const uint32_t *ids = workload->ids + request->ids_at;

    for (uint64_t at = first; at < first + count;) {
        uint64_t slot = at / workload->id_tokens;
        uint32_t offset = (uint32_t)(at % workload->id_tokens);
        uint64_t id =
            slot < request->ids_count ? ids[slot] : (request_idx + 1) << 32 | (uint32_t)slot;
        uint64_t end = KVT_MIN(at + workload->id_tokens - offset, first + count);

        for (; at < end; at++, offset++)
            ret_tokens[at - first] = token_of(workload->seed, id, offset);
    }
}

uint64_t kvt_workload_common_tokens(const struct kvt_workload *workload, uint64_t earlier_idx,
                                    uint64_t later_idx)
{
    const struct kvt_request *a = &workload->requests[earlier_idx];
    const struct kvt_request *b = &workload->requests[later_idx];
    uint32_t ids_count = KVT_MIN(a->ids_count, b->ids_count), same = 0;
    uint64_t tokens;

    if (a->tenant != b->tenant)
        return 0;
    while (same < ids_count && workload->ids[a->ids_at + same] == workload->ids[b->ids_at + same])
        same++;
    tokens = (uint64_t)same * workload->id_tokens;
    return KVT_MIN(tokens, (uint64_t)b->input_tokens);
}

/* An open-addressing set of non-zero 64-bit hashes. */
struct hash_set {
    uint64_t *slots;
    uint64_t slots_count; /* a power of two */
    uint64_t used;
};

/* True when @hash was not there before. */
static bool set_add(struct hash_set *set, uint64_t hash)
{
    uint64_t at = hash & (set->slots_count - 1);

    while (set->slots[at] != 0 && set->slots[at] != hash)
        at = (at + 1) & (set->slots_count - 1);
    if (set->slots[at] == hash)
        return false;
    set->slots[at] = hash;
    set->used++;
    return true;
}

static int set_grow(struct hash_set *set, uint64_t more)
{
    struct hash_set grown = {.slots_count = KVT_MAX(set->slots_count, (uint64_t)4096)};

    while ((set->used + more) * 2 > grown.slots_count)
        grown.slots_count *= 2;
    if (grown.slots_count == set->slots_count)
        return 0;
    grown.slots = calloc(grown.slots_count, sizeof(*grown.slots));
    if (grown.slots == NULL)
        return kvt_trace(-ENOMEM);
    for (uint64_t i = 0; i < set->slots_count; i++)
        if (set->slots[i] != 0)
            (void)set_add(&grown, set->slots[i]);
    free(set->slots);
    *set = grown;
    return 0;
}

static int add_request_facts(const struct kvt_workload *workload, uint64_t idx,
                             uint32_t block_tokens, uint32_t *tokens, struct hash_set *set,
                             struct kvt_workload_facts *facts)
{
    const struct kvt_request *request = &workload->requests[idx];
    uint64_t blocks = request->input_tokens / block_tokens, chain = request->tenant + 1, hits = 0;
    int r = set_grow(set, blocks);

    if (r < 0)
        return kvt_trace(r);
    kvt_workload_tokens(workload, idx, 0, blocks * block_tokens, tokens);
    for (uint64_t i = 0; i < blocks; i++) {
        chain = kvt_oracle_chain_next(chain, tokens + i * block_tokens, block_tokens, NULL);
        hits += !set_add(set, KVT_MAX(chain, (uint64_t)1));
    }
    facts->requests++;
    facts->lookup_tokens += request->input_tokens;
    facts->prompt_blocks += blocks;
    facts->hit_tokens += hits * block_tokens;
    return 0;
}

int kvt_workload_facts(const struct kvt_workload *workload, uint32_t block_tokens,
                       struct kvt_workload_facts *ret_facts)
{
    struct kvt_workload_facts facts = {0};
    struct hash_set set = {0};
    uint32_t *tokens;
    int r = 0;

    tokens = calloc((size_t)workload->input_tokens_max + 1, sizeof(*tokens));
    if (tokens == NULL)
        return kvt_trace(-ENOMEM);
    for (uint64_t i = 0; i < workload->requests_count && r == 0; i++)
        r = add_request_facts(workload, i, block_tokens, tokens, &set, &facts);
    facts.distinct_blocks = set.used;
    free(set.slots);
    free(tokens);
    if (r < 0)
        return kvt_trace(r);
    *ret_facts = facts;
    return 0;
}
