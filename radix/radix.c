/* Making and unmaking a tree and its namespaces. Engine thread only. */
#include "daemon/base/alloc.h"

#include "radix/internal.h"

int kvt_radix_new(struct kvt_radix **ret_radix, const struct kvt_radix_config *config)
{
    struct kvt_radix *radix;
    uint64_t buckets = 1024;
    int r;

    if (config->namespaces_max == 0 || config->namespaces_max > KVT_NAMESPACES_MAX ||
        config->roots_max == 0)
        return kvt_trace(-EINVAL);
    radix = kvt_alloc_zeroed(1, sizeof(*radix));
    if (radix == NULL)
        return kvt_trace(-ENOMEM);
    while (buckets * 512 < config->memory_bytes)
        buckets *= 2;
    radix->magic = RADIX_MAGIC;
    radix->mask_evictable = config->mask_evictable == 0
                                ? RADIX_BITS_EVICTABLE
                                : config->mask_evictable & RADIX_BITS_EVICTABLE;
    radix->tag_bytes = config->has_tags ? sizeof(uint64_t) : 0;
    radix->gone = config->gone;
    radix->gone_ctx = config->gone_ctx;
    radix->seed = config->seed;
    radix->buckets_mask = buckets - 1;
    radix->namespaces_max = config->namespaces_max;
    radix->roots_max = config->roots_max;
    radix->clock = 1;
    r = pool_init(&radix->pool, config, buckets, &radix->buckets);
    if (r == 0) {
        radix->namespaces = kvt_alloc_zeroed(config->namespaces_max, sizeof(struct ns));
        if (radix->namespaces == NULL)
            r = kvt_trace(-ENOMEM);
    }
    if (r != 0) {
        (void)kvt_radix_free(radix);
        return r;
    }
    *ret_radix = radix;
    return 0;
}

struct kvt_radix *kvt_radix_free(struct kvt_radix *radix)
{
    if (radix == NULL)
        return NULL;
    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    pool_deinit(&radix->pool);
    kvt_free(radix->namespaces);
    radix->magic = 0;
    kvt_free(radix);
    return NULL;
}

static bool spec_is_valid(const struct kvt_radix_spec *spec)
{
    if (spec->block_tokens == 0 || spec->block_tokens > KVT_BLOCK_TOKENS_MAX ||
        spec->components_count == 0 || spec->components_count > KVT_COMPONENTS_MAX)
        return false;
    for (uint32_t c = 0; c < spec->components_count; c++) {
        switch (spec->components[c].kind) {
        case KVT_COMPONENT_FULL:
        case KVT_COMPONENT_STATE:
            break;
        case KVT_COMPONENT_SLIDING_WINDOW:
            if (spec->components[c].window_tokens == 0)
                return false;
            break;
        default:
            return false;
        }
    }
    return true;
}

int kvt_radix_ns_open(struct kvt_radix *radix, const struct kvt_radix_spec *spec,
                      struct kvt_radix_ns *ret_ns)
{
    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    if (!spec_is_valid(spec))
        return kvt_trace(-EINVAL);
    for (uint32_t i = 0; i < radix->namespaces_max; i++) {
        struct ns *ns = &radix->namespaces[i];

        if (ns->is_open || ns->is_closing)
            continue;
        *ns = (struct ns){.is_open = true,
                          .block_tokens = spec->block_tokens,
                          .components_count = spec->components_count};
        ns->run_blocks_max =
            KVT_MIN(RADIX_RUN_BLOCKS_MAX, KVT_MAX(RADIX_RUN_TOKENS_MAX / spec->block_tokens, 1u));
        ns->block_bytes =
            radix->tag_bytes + 4 * spec->block_tokens + 4 + 5 * spec->components_count;
        for (uint32_t c = 0; c < spec->components_count; c++) {
            ns->kinds[c] = (uint8_t)spec->components[c].kind;
            if (spec->components[c].kind == KVT_COMPONENT_SLIDING_WINDOW)
                ns->windows[c] = spec->components[c].window_tokens;
            if (spec->components[c].kind == KVT_COMPONENT_FULL)
                ns->full_mask |= (uint8_t)(1u << c);
        }
        *ret_ns = (struct kvt_radix_ns){.idx = i};
        return 0;
    }
    return KVT_RADIX_E_NO_ROOM;
}
