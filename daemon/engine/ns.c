/* Namespaces: what OpenNamespace declares, and how requests name prefixes inside one.
 *
 * A namespace's fingerprint is SHA-256 over a canonical encoding of the whole spec in which every
 * text carries its length, so that two different specs never encode to the same bytes. The same
 * spec is the same namespace. A root below it is selected by salt and LoRA; each is tagged, so that
 * lora="X" and salt="X" are different roots:
 *
 *   root key:  1 | length (u16 LE) | salt | 2 | length (u16 LE) | LoRA
 *
 * There are at most namespaces_max of them. They live until the daemon ends and, where L3 keeps
 * them, longer. When a new one finds no number, one that has neither sessions nor blocks makes way
 * at once; else the one without sessions for longest does, as soon as its blocks are forgotten. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/log.h"
#include "daemon/engine/internal.h"

uint64_t eng_cell_bytes(const struct eng_ns *ns, uint32_t component)
{
    return ns->stored_bytes[component] * (ns->components[component].is_replicated ? 1u : ns->ranks);
}

uint32_t eng_shards_mask(const struct eng_ns *ns, uint32_t component)
{
    return ns->components[component].is_replicated ? 1u : (1u << ns->ranks) - 1u;
}

void eng_ns_deinit(struct eng_ns *ns)
{
    kvt_free(ns->texts);
    kvt_free(ns->spec);
    /* Whoever gets the number goes on from there. */
    *ns = (struct eng_ns){.epoch = ns->epoch, .generation = ns->generation};
}

void eng_ns_new_epoch(struct kvt_engine *engine, struct eng_ns *ns)
{
    ns->epoch++;
    ns->cursor_secret = eng_secret(engine, ENG_HANDLE_NS, ns->idx, ns->epoch);
}

void eng_ns_forget(struct kvt_engine *engine, struct eng_ns *ns)
{
    eng_ns_new_epoch(engine, ns);
    kvt_radix_detach_ns(engine->radix, ns->radix_ns);
    kvt_store_ns_set_epoch(engine->store, ns->radix_ns, ns->epoch);
}

/* ---- the spec ---------------------------------------------------------------------------------
 */

static bool component_is_valid(struct kvt_op *op, const struct kvt_api_component *c, uint32_t i)
{
    if (c->kind < KVT_COMPONENT_FULL || c->kind > KVT_COMPONENT_STATE) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "component %u: kind %u is unknown (1 full, 2 sliding window, 3 state)", i,
                    c->kind);
        return false;
    }
    if (c->kind == KVT_COMPONENT_SLIDING_WINDOW ? c->window_tokens == 0 : c->window_tokens != 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "component %u: window_tokens is %u; a sliding window needs at least 1, other "
                    "kinds have none",
                    i, c->window_tokens);
        return false;
    }
    if (c->bytes_per_block == 0 || c->bytes_per_block > KVT_SHARD_BYTES_MAX) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "component %u: %llu bytes a block is not within 1..%u", i,
                    (unsigned long long)c->bytes_per_block, KVT_SHARD_BYTES_MAX);
        return false;
    }
    return true;
}

static bool spec_is_valid(struct kvt_op *op, const struct kvt_req_open_namespace *req)
{
    if (req->block_tokens == 0 || req->block_tokens > KVT_BLOCK_TOKENS_MAX) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "block_tokens %u is not within 1..%u",
                    req->block_tokens, KVT_BLOCK_TOKENS_MAX);
        return false;
    }
    if (req->ranks == 0 || req->ranks > KVT_RANKS_MAX) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "%u ranks is not within 1..%u", req->ranks,
                    KVT_RANKS_MAX);
        return false;
    }
    if (req->components_count == 0 || req->components_count > KVT_COMPONENTS_MAX) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "%u components is not within 1..%u",
                    req->components_count, KVT_COMPONENTS_MAX);
        return false;
    }
    for (uint32_t i = 0; i < req->components_count; i++) {
        if (!component_is_valid(op, &req->components[i], i) ||
            !eng_quant_is_valid(op, &req->components[i], i, req->block_tokens))
            return false;
    }
    return true;
}

/* ---- making one -------------------------------------------------------------------------------
 */

static char *keep_text(char *at, const struct kvt_text *text, struct kvt_text *ret_text)
{
    if (text->bytes > 0)
        memcpy(at, text->at, text->bytes);
    *ret_text = (struct kvt_text){at, text->bytes};
    return at + text->bytes;
}

static bool keep_spec(struct eng_ns *ns, const struct kvt_req_open_namespace *req)
{
    size_t bytes = (size_t)req->model.bytes + req->revision.bytes + req->dtype.bytes + 1;
    size_t spec_bytes = eng_spec_encode(req, NULL);
    char *at;

    for (uint32_t i = 0; i < req->components_count; i++)
        bytes += req->components[i].name.bytes;
    at = ns->texts = kvt_alloc_zeroed(1, bytes);
    ns->spec = kvt_alloc_zeroed(1, spec_bytes);
    if (at == NULL || ns->spec == NULL)
        return false;
    ns->spec_bytes = (uint32_t)eng_spec_encode(req, ns->spec);
    at = keep_text(at, &req->model, &ns->model);
    at = keep_text(at, &req->revision, &ns->revision);
    at = keep_text(at, &req->dtype, &ns->dtype);
    ns->block_tokens = req->block_tokens;
    ns->ranks = req->ranks;
    ns->components_count = req->components_count;
    for (uint32_t i = 0; i < req->components_count; i++) {
        ns->components[i] = req->components[i];
        ns->stored_bytes[i] = eng_stored_bytes(&req->components[i]);
        at = keep_text(at, &req->components[i].name, &ns->components[i].name);
    }
    return true;
}

static int open_below(struct kvt_engine *engine, struct eng_ns *ns)
{
    struct kvt_radix_spec spec = {.block_tokens = ns->block_tokens,
                                  .components_count = ns->components_count};
    struct kvt_store_ns_config config = {.epoch = ns->epoch,
                                         .block_tokens = ns->block_tokens,
                                         .ranks = ns->ranks,
                                         .components_count = ns->components_count};
    int r;

    memcpy(config.fingerprint, ns->fingerprint, sizeof(config.fingerprint));
    for (uint32_t i = 0; i < ns->components_count; i++) {
        spec.components[i].kind = (enum kvt_component_kind)ns->components[i].kind;
        spec.components[i].window_tokens = ns->components[i].window_tokens;
        config.components[i].bytes_per_block = ns->stored_bytes[i];
        config.components[i].is_replicated = ns->components[i].is_replicated;
    }
    r = kvt_radix_ns_open(engine->radix, &spec, &ns->radix_ns);
    if (r != 0)
        return r < 0 ? r : -ENOSPC;
    r = kvt_store_ns_open(engine->store, ns->radix_ns, &config);
    if (r != 0)
        kvt_radix_ns_close(engine->radix, ns->radix_ns);
    else
        kvt_store_ns_set_number(engine->store, ns->radix_ns, ns->idx);
    return r;
}

int eng_ns_make(struct kvt_engine *engine, uint32_t idx, uint64_t epoch,
                const struct kvt_req_open_namespace *req,
                const uint8_t fingerprint[KVT_FINGERPRINT_BYTES])
{
    struct eng_ns *ns = &engine->ns[idx];
    int r;

    KVT_ASSERT(!ns->is_open);
    *ns = (struct eng_ns){.idx = idx, .epoch = epoch - 1, .generation = ns->generation + 1};
    memcpy(ns->fingerprint, fingerprint, sizeof(ns->fingerprint));
    eng_ns_new_epoch(engine, ns);
    r = keep_spec(ns, req) ? open_below(engine, ns) : -ENOMEM;
    if (r != 0) {
        eng_ns_deinit(ns);
        return r;
    }
    if (!eng_catalog_fits(req, ns->spec_bytes))
        kvt_store_ns_set_forgotten(engine->store, ns->radix_ns);
    ns->is_open = true;
    engine->ns_count = KVT_MAX(engine->ns_count, idx + 1);
    return 0;
}

/* Nobody would miss it: it has no sessions and no blocks, and nothing points to it. */
static bool is_idle(const struct kvt_engine *engine, const struct eng_ns *ns)
{
    struct kvt_radix_ns_stats stats;

    if (ns->groups_count > 0 || kvt_store_is_loading(engine->store))
        return false;
    for (uint32_t i = 0; i < engine->resets_count; i++)
        if (engine->resets[i].ns == ns)
            return false;
    kvt_radix_ns_stats(engine->radix, ns->radix_ns, &stats);
    return stats.blocks == 0 && stats.roots == 0 &&
           !kvt_store_ns_has_cells(engine->store, ns->radix_ns);
}

/* A number that is free, or that an idle namespace gives back. */
static uint32_t number_for_new(struct kvt_engine *engine)
{
    uint32_t max = engine->config.namespaces_max;

    for (uint32_t i = 0; i < max; i++)
        if (!engine->ns[i].is_open)
            return i;
    for (uint32_t i = 0; i < max; i++) {
        if (!is_idle(engine, &engine->ns[i]))
            continue;
        kvt_radix_ns_close(engine->radix, engine->ns[i].radix_ns);
        kvt_store_ns_close(engine->store, engine->ns[i].radix_ns);
        eng_ns_deinit(&engine->ns[i]);
        return i;
    }
    return max;
}

/* All numbers are taken by namespaces that have something. The one that no engine has been in for
 * longest forgets it, and its number is free when that is worked off: models come and go over the
 * life of an L3, and a new one would never be cached. One at a time, however often it is asked.
 * NULL: every namespace has engines. */
static struct eng_ns *make_way(struct kvt_engine *engine)
{
    struct eng_ns *oldest = NULL;

    if (kvt_store_is_loading(engine->store))
        return NULL;
    for (uint32_t i = 0; i < engine->config.namespaces_max; i++) {
        struct eng_ns *ns = &engine->ns[i];

        if (ns->is_making_way)
            return ns;
        if (ns->groups_count == 0 && (oldest == NULL || ns->last_used_ns < oldest->last_used_ns))
            oldest = ns;
    }
    if (oldest != NULL) {
        kvt_log_info("namespace of model %.*s, the longest without engines, makes way for another",
                     (int)oldest->model.bytes, oldest->model.at);
        eng_ns_forget(engine, oldest);
        oldest->is_making_way = true;
    }
    return oldest;
}

static struct eng_ns *make(struct kvt_engine *engine, struct kvt_op *op,
                           const uint8_t fingerprint[KVT_FINGERPRINT_BYTES])
{
    uint32_t idx = number_for_new(engine);
    int r;

    if (idx == engine->config.namespaces_max) {
        if (make_way(engine) != NULL)
            kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                        "all %u namespaces have blocks; one without engines makes way: try again",
                        idx);
        else
            kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                        "%u namespaces are in use, the most there can be", idx);
        return NULL;
    }
    /* Above every epoch that it may have had under another number, or whose record is lost: what
     * lies on L3 from then was forgotten. Stamps rise over starts, and faster than epochs. */
    r = eng_ns_make(engine, idx,
                    KVT_MAX(engine->ns[idx].epoch + 1, engine->config.store.stamp_first),
                    &op->req.open_namespace, fingerprint);
    if (r == 0) {
        /* What L3 has of the number's earlier users is over. */
        kvt_store_ns_set_epoch(engine->store, engine->ns[idx].radix_ns, engine->ns[idx].epoch);
        return &engine->ns[idx];
    }
    if (r == KVT_STORE_E_TOO_BIG)
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "a block of this model does not fit a tier: make the tiers larger or "
                    "block_tokens smaller");
    else if (r == -EINVAL)
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "this spec is not one that can be served");
    else
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "no room for another namespace");
    return NULL;
}

uint32_t eng_ns_position(const struct kvt_engine *engine, const struct eng_ns *ns)
{
    uint32_t position = 0;

    KVT_ASSERT(ns->is_open);
    for (uint32_t i = 0; i < ns->idx; i++)
        position += engine->ns[i].is_open;
    return position;
}

static struct eng_ns *find(struct kvt_engine *engine,
                           const uint8_t fingerprint[KVT_FINGERPRINT_BYTES])
{
    for (uint32_t i = 0; i < engine->ns_count; i++) {
        if (engine->ns[i].is_open &&
            memcmp(engine->ns[i].fingerprint, fingerprint, KVT_FINGERPRINT_BYTES) == 0)
            return &engine->ns[i];
    }
    return NULL;
}

static bool fingerprint_of(struct kvt_op *op, uint8_t ret_digest[KVT_FINGERPRINT_BYTES])
{
    size_t bytes = eng_spec_encode(&op->req.open_namespace, NULL);
    uint8_t *spec = kvt_arena_alloc(op->arena, bytes);

    if (spec == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the spec is too large");
        return false;
    }
    (void)eng_spec_encode(&op->req.open_namespace, spec);
    if (kvt_sha256(spec, bytes, ret_digest) != 0) {
        kvt_op_fail(op, KVT_CODE_INTERNAL, "SHA-256 failed");
        return false;
    }
    return true;
}

void eng_op_open_namespace(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_open_namespace *req = &op->req.open_namespace;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    bool was_known;
    struct eng_ns *ns;

    if (req->is_by_fingerprint) {
        memcpy(fingerprint, req->fingerprint, sizeof(fingerprint));
    } else if (!spec_is_valid(op, req) || !fingerprint_of(op, fingerprint)) {
        return;
    }
    ns = find(engine, fingerprint);
    was_known = ns != NULL;
    if (ns == NULL && req->is_by_fingerprint) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "no namespace has this fingerprint");
        return;
    }
    if (ns == NULL)
        ns = make(engine, op, fingerprint);
    if (ns == NULL)
        return;
    op->ans.open_namespace = (struct kvt_ans_open_namespace){
        .ns = eng_handle(engine, ENG_HANDLE_NS, ns->idx, ns->generation),
        .epoch = ns->epoch,
        .was_known = was_known,
        .components_count = ns->components_count};
    memcpy(op->ans.open_namespace.stored_bytes, ns->stored_bytes, sizeof(ns->stored_bytes));
    memcpy(op->ans.open_namespace.fingerprint, ns->fingerprint, KVT_FINGERPRINT_BYTES);
}

struct eng_ns *eng_ns_by(struct kvt_engine *engine, struct kvt_op *op,
                         const struct kvt_handle *handle,
                         const uint8_t fingerprint[KVT_FINGERPRINT_BYTES])
{
    struct eng_ns *ns;

    if (!eng_handle_is_none(handle))
        return eng_ns_of(engine, op, handle);
    ns = find(engine, fingerprint);
    if (ns == NULL)
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "no namespace has this fingerprint");
    return ns;
}

/* ---- prefixes ---------------------------------------------------------------------------------
 */

static uint8_t *put_tag(uint8_t *at, uint8_t tag, const struct kvt_text *text)
{
    *at++ = tag;
    *at++ = (uint8_t)text->bytes;
    *at++ = (uint8_t)(text->bytes >> 8);
    if (text->bytes > 0)
        memcpy(at, text->at, text->bytes);
    return at + text->bytes;
}

uint32_t eng_root_key(const struct kvt_text *salt, const struct kvt_text *lora,
                      uint8_t ret_key[KVT_ENGINE_ROOT_KEY_BYTES])
{
    uint8_t *at = put_tag(ret_key, 1, salt);

    at = put_tag(at, 2, lora);
    KVT_ASSERT((size_t)(at - ret_key) <= KVT_ENGINE_ROOT_KEY_BYTES);
    return (uint32_t)(at - ret_key);
}

static const uint8_t *take_tag(const uint8_t *at, const uint8_t *end, uint8_t tag,
                               struct kvt_text *ret_text)
{
    uint32_t bytes;

    if (end - at < 3 || at[0] != tag)
        return NULL;
    bytes = (uint32_t)at[1] | (uint32_t)at[2] << 8;
    if ((size_t)(end - at) < 3u + bytes)
        return NULL;
    *ret_text = (struct kvt_text){(const char *)at + 3, bytes};
    return at + 3 + bytes;
}

bool eng_root_key_split(const uint8_t *key, uint32_t key_bytes, struct kvt_text *ret_salt,
                        struct kvt_text *ret_lora)
{
    const uint8_t *end = key + key_bytes;
    const uint8_t *at = take_tag(key, end, 1, ret_salt);

    return at != NULL && take_tag(at, end, 2, ret_lora) == end;
}

static int root_digest(struct kvt_engine *engine, const void *key, uint32_t key_bytes,
                       uint8_t ret_digest[KVT_FINGERPRINT_BYTES])
{
    uint64_t hash = kvt_hash64(key, key_bytes, engine->config.seed);
    struct eng_digest *slot = &engine->digests[hash % KVT_ENGINE_DIGESTS];
    int r;

    if (slot->key_bytes != key_bytes || memcmp(slot->key, key, key_bytes) != 0) {
        slot->key_bytes = 0;
        r = kvt_sha256(key, key_bytes, slot->digest);
        if (r < 0)
            return kvt_trace(r);
        memcpy(slot->key, key, key_bytes);
        slot->key_bytes = key_bytes;
    }
    memcpy(ret_digest, slot->digest, KVT_FINGERPRINT_BYTES);
    return 0;
}

/* The tree wants one key a block; the request names the few blocks that have one. */
static bool spread_extra_keys(struct kvt_op *op, const struct kvt_api_prefix *prefix,
                              uint64_t blocks, const uint8_t (**ret_keys)[KVT_EXTRA_KEY_BYTES])
{
    uint8_t(*keys)[KVT_EXTRA_KEY_BYTES];

    *ret_keys = NULL;
    if (prefix->extra_keys_count == 0 || blocks == 0)
        return true;
    keys = kvt_arena_array(op->arena, blocks, sizeof(keys[0]));
    if (keys == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "extra keys of a prefix of %llu blocks do not fit a request",
                    (unsigned long long)blocks);
        return false;
    }
    for (uint32_t i = 0; i < prefix->extra_keys_count; i++) {
        if (prefix->extra_keys[i].block_idx < blocks)
            memcpy(keys[prefix->extra_keys[i].block_idx], prefix->extra_keys[i].key,
                   KVT_EXTRA_KEY_BYTES);
    }
    *ret_keys = (const uint8_t(*)[KVT_EXTRA_KEY_BYTES])keys;
    return true;
}

/* A root that came back without its key gets it, now that somebody names it. */
static void name_root(struct kvt_engine *engine, const struct eng_ns *ns, const void *key,
                      uint32_t key_bytes)
{
    uint8_t digest_key[KVT_STORE_DIGEST_KEY_BYTES] = {KVT_STORE_DIGEST_KEY_TAG};

    if (kvt_store_has_digest_roots(engine->store) && !kvt_store_is_loading(engine->store) &&
        root_digest(engine, key, key_bytes, digest_key + 1) == 0)
        /* Not there, or there under both names: then what was scanned stays unused. */
        (void)!kvt_radix_root_rename(engine->radix, ns->radix_ns, digest_key, sizeof(digest_key),
                                     key, key_bytes);
}

bool eng_prefix(struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns,
                const struct kvt_api_prefix *prefix, struct eng_prefix *ret_prefix)
{
    struct eng_prefix result = {0};
    uint64_t blocks = prefix->tokens_count / ns->block_tokens;
    uint8_t *key;

    if (prefix->salt.bytes > KVT_ROOT_TAG_BYTES_MAX ||
        prefix->lora.bytes > KVT_ROOT_TAG_BYTES_MAX) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "salt and LoRA are at most %u bytes each",
                    KVT_ROOT_TAG_BYTES_MAX);
        return false;
    }
    if (!eng_cursor_of(engine, op, ns, &prefix->cursor, &result.radix.after) ||
        !spread_extra_keys(op, prefix, blocks, &result.radix.extra_keys))
        return false;
    key = kvt_arena_alloc(op->arena, KVT_ENGINE_ROOT_KEY_BYTES);
    if (key == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the request is too large");
        return false;
    }
    result.radix.ns = ns->radix_ns;
    result.radix.root_key = key;
    result.radix.root_key_bytes = eng_root_key(&prefix->salt, &prefix->lora, key);
    name_root(engine, ns, key, result.radix.root_key_bytes);
    result.radix.tokens = prefix->tokens;
    result.radix.tokens_count = prefix->tokens_count;
    if (result.radix.after.generation != 0)
        result.first_blocks = kvt_radix_depth_blocks(engine->radix, result.radix.after);
    result.blocks = result.first_blocks + blocks;
    if (result.blocks * ns->block_tokens > KVT_PREFIX_TOKENS_MAX) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "a prefix of %llu tokens is longer than %u, the most the tree keeps",
                    (unsigned long long)(result.blocks * ns->block_tokens), KVT_PREFIX_TOKENS_MAX);
        return false;
    }
    *ret_prefix = result;
    return true;
}

bool eng_prefix_digest(struct kvt_engine *engine, struct kvt_op *op,
                       const struct eng_prefix *prefix, uint8_t ret_digest[KVT_FINGERPRINT_BYTES])
{
    const void *key = prefix->radix.root_key;
    uint32_t key_bytes = prefix->radix.root_key_bytes;

    if (prefix->radix.after.generation != 0)
        key = kvt_radix_root_key(engine->radix, prefix->radix.after, &key_bytes);
    if (key == NULL) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "cursor stale: send the whole prefix");
        return false;
    }
    if (root_digest(engine, key, key_bytes, ret_digest) < 0) {
        kvt_op_fail(op, KVT_CODE_INTERNAL, "SHA-256 failed");
        return false;
    }
    return true;
}
