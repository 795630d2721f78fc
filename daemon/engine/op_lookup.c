/* Lookup: one walk of the tree, and nothing a block besides. Recency is touched by the tree in the
 * same walk; the lease is counts on the path's nodes; the estimate comes from the breakdown.
 *
 * A lease is bounded by what its engine may lease. Where the whole match would pass that, the
 * answer is a shorter one, which is looked for on the path that was found: its tokens are not
 * compared again. */
#include <string.h>

#include "daemon/engine/internal.h"

uint64_t eng_needed_first(const struct eng_ns *ns, uint32_t component, uint64_t blocks)
{
    const struct kvt_api_component *c = &ns->components[component];
    uint64_t tokens = blocks * ns->block_tokens;

    if (blocks == 0)
        return 0;
    if (c->kind == KVT_COMPONENT_STATE)
        return blocks - 1;
    if (c->kind == KVT_COMPONENT_SLIDING_WINDOW)
        return tokens > c->window_tokens ? (tokens - c->window_tokens) / ns->block_tokens : 0;
    return 0;
}

static enum kvt_why why_absent(const struct kvt_engine *engine, const struct kvt_radix_match *match,
                               uint32_t component, uint64_t block_idx)
{
    struct kvt_radix_cell cell;

    if (match->cursor.generation == 0 ||
        kvt_radix_depth_blocks(engine->radix, match->cursor) <= block_idx ||
        kvt_radix_path(engine->radix, match->cursor, component, block_idx, 1, &cell) != 0)
        return KVT_WHY_EVICTED;
    return kvt_store_why_lost(engine->store, cell.block, component);
}

static enum kvt_why why_of(const struct kvt_engine *engine, const struct kvt_radix_match *match,
                           uint32_t component)
{
    switch (match->components[component].why) {
    case KVT_RADIX_WHY_NONE:
        return KVT_WHY_NONE;
    case KVT_RADIX_WHY_NO_PATH:
        return KVT_WHY_NEVER_STORED;
    case KVT_RADIX_WHY_ABSENT:
        return why_absent(engine, match, component, match->components[component].why_block_idx);
    case KVT_RADIX_WHY_ELSEWHERE:
        return KVT_WHY_OTHER_TIER;
    case KVT_RADIX_WHY_HOLD:
        return KVT_WHY_PENDING;
    }
    return KVT_WHY_NONE;
}

/* What a lease of the match pins. */
static void count_bytes(const struct eng_ns *ns, const struct kvt_radix_match *match,
                        uint64_t ret_bytes[KVT_TIERS_COUNT])
{
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        ret_bytes[tier] = 0;
        for (uint32_t i = 0; i < ns->components_count; i++)
            ret_bytes[tier] += (match->components[i].blocks_at[tier] +
                                match->components[i].blocks_at[tier + KVT_STORE_BITS_DRAINING]) *
                               eng_cell_bytes(ns, i);
    }
}

/* Another boundary on the same path; how far each component would go alone, and why not further,
 * is as it was. */
static void set_boundary(struct kvt_radix_match *match, const struct kvt_radix_match *from)
{
    match->boundary_tokens = from->boundary_tokens;
    match->end = from->end;
    for (uint32_t i = 0; i < KVT_COMPONENTS_MAX; i++) {
        match->components[i].needed_blocks = from->components[i].needed_blocks;
        memcpy(match->components[i].blocks_at, from->components[i].blocks_at,
               sizeof(match->components[i].blocks_at));
    }
}

/* Bisects for the greatest boundary whose lease the engine may have: of a model with full
 * attention more tokens are more bytes; a window's bytes may fall again, where what is found fits,
 * too. False: nothing fits, because of what it leases already. What would not fit either if it
 * leased nothing is a miss. */
static bool shorten(struct kvt_engine *engine, const struct eng_session *session,
                    const struct kvt_radix_lookup *lookup, struct kvt_radix_match *match)
{
    const struct eng_ns *ns = session->ns;
    struct kvt_radix_lookup on_path = {.prefix = {.ns = lookup->prefix.ns, .after = match->cursor},
                                       .mask_allowed = lookup->mask_allowed};
    uint64_t low = 0, high = match->boundary_tokens / ns->block_tokens;
    struct kvt_radix_match best = {0}, next;
    uint64_t bytes[KVT_TIERS_COUNT];
    bool is_alone = session->group->leases_count == 0;

    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;

        on_path.limit_tokens = middle * ns->block_tokens;
        if (kvt_radix_lookup(engine->radix, &on_path, &next) != 0)
            return false; /* it was there a moment ago */
        count_bytes(ns, &next, bytes);
        if (!eng_lease_fits(engine, session->group, bytes)) {
            high = next.boundary_tokens / ns->block_tokens;
            continue;
        }
        low = middle;
        if (next.boundary_tokens > best.boundary_tokens)
            best = next;
    }
    if (best.boundary_tokens == 0 && !is_alone)
        return false;
    set_boundary(match, &best);
    return true;
}

static void fill_answer(struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns,
                        const struct kvt_radix_match *match)
{
    struct kvt_ans_lookup *ans = &op->ans.lookup;
    bool wants_why = op->req.lookup.wants_why;

    *ans = (struct kvt_ans_lookup){.boundary_tokens = match->boundary_tokens,
                                   .path_tokens = match->path_tokens,
                                   .branch_tokens = match->full_tokens,
                                   .epoch = ns->epoch,
                                   .components_count = ns->components_count,
                                   .cursor = eng_cursor(engine, ns, match->cursor)};
    if (match->cursor.generation != 0)
        ans->cursor_tokens = match->path_tokens;
    for (uint32_t i = 0; i < ns->components_count; i++) {
        ans->components[i].alone_tokens = match->components[i].alone_tokens;
        ans->components[i].needed_blocks = match->components[i].needed_blocks;
        for (uint32_t tier = 0; tier < KVT_API_TIERS; tier++) {
            uint64_t blocks = match->components[i].blocks_at[tier] +
                              match->components[i].blocks_at[tier + KVT_STORE_BITS_DRAINING];

            ans->components[i].blocks_at[tier] = blocks;
            ans->components[i].tokens_at[tier] = blocks * ns->block_tokens;
        }
        if (wants_why) {
            ans->components[i].why = why_of(engine, match, i);
            ans->components[i].why_block_idx = match->components[i].why_block_idx;
        }
    }
}

static void count(struct kvt_engine *engine, struct eng_session *session, uint64_t asked_tokens,
                  const struct kvt_ans_lookup *ans)
{
    struct eng_ns *ns = session->ns;

    eng_count(engine, KVT_COUNTER_LOOKUPS, 1);
    eng_count(engine, KVT_COUNTER_LOOKUP_TOKENS, asked_tokens);
    eng_count(engine, KVT_COUNTER_HIT_TOKENS, ans->boundary_tokens);
    ns->lookup_tokens += asked_tokens;
    ns->hit_tokens += ans->boundary_tokens;
    session->group->lookups++;
    session->group->lookup_tokens += asked_tokens;
    session->group->hit_tokens += ans->boundary_tokens;
    for (uint32_t i = 0; i < ns->components_count; i++) {
        uint32_t first = KVT_COUNTER_HIT_FULL_L1 + (ns->components[i].kind - 1) * KVT_API_TIERS;

        for (uint32_t tier = 0; tier < KVT_API_TIERS; tier++)
            eng_count(engine, (enum kvt_counter)(first + tier), ans->components[i].tokens_at[tier]);
    }
}

/* The lease, or op->code says why there is none. */
static void give_lease(struct kvt_engine *engine, struct kvt_op *op, struct eng_session *session,
                       const struct kvt_radix_match *match, const uint64_t bytes[KVT_TIERS_COUNT])
{
    uint64_t idle_ns = op->req.lookup.lease_ns;
    struct eng_lease *lease;

    if (idle_ns == 0)
        idle_ns = engine->config.lease_ns_default;
    idle_ns = KVT_MIN(idle_ns, engine->config.lease_ns_max);
    if (!eng_lease_room(engine, op, session, bytes))
        return;
    if (kvt_radix_lease(engine->radix, match->end) != 0) {
        kvt_op_fail(op, KVT_CODE_ABORTED, "the path went away: look up again");
        return;
    }
    lease = eng_lease_new(engine, session, match->end,
                          match->boundary_tokens / session->ns->block_tokens, idle_ns, bytes);
    if (lease == NULL) {
        (void)!kvt_radix_release(engine->radix, match->end);
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%u leases are out, the most there can be",
                    engine->leases_count);
        return;
    }
    op->ans.lookup.lease = eng_handle(engine, ENG_HANDLE_LEASE, lease->idx, lease->generation);
    op->ans.lookup.lease_ns = idle_ns;
}

static void prefetch(struct kvt_engine *engine, const struct eng_session *session,
                     const struct kvt_radix_match *match)
{
    const struct eng_ns *ns = session->ns;
    uint64_t blocks = match->boundary_tokens / ns->block_tokens;

    for (uint32_t i = 0; i < ns->components_count; i++) {
        if (match->components[i].blocks_at[KVT_TIER_DISK] +
                match->components[i].blocks_at[KVT_TIER_DISK + KVT_STORE_BITS_DRAINING] >
            0)
            eng_prefetch_add(engine, session, match->end, i, eng_needed_first(ns, i, blocks),
                             blocks);
    }
}

void eng_op_lookup(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_lookup *req = &op->req.lookup;
    struct eng_session *session = eng_session_of(engine, op, &req->session);
    struct kvt_radix_lookup lookup = {.limit_tokens = req->limit_tokens, .is_touch = true};
    uint64_t bytes[KVT_TIERS_COUNT], estimate_ns = 0;
    bool is_limited = false;
    struct kvt_radix_match match;
    struct eng_prefix where;

    if (session == NULL || !eng_prefix(engine, op, session->ns, &req->prefix, &where))
        return;
    if ((req->tiers & ~KVT_TIER_BITS_ALL) != 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "tiers 0x%x: only L1, L2 and L3 exist",
                    req->tiers);
        return;
    }
    lookup.mask_allowed =
        kvt_store_mask_allowed((uint8_t)(req->tiers != 0 ? req->tiers : KVT_TIER_BITS_ALL));
    lookup.prefix = where.radix;
    if (kvt_radix_lookup(engine->radix, &lookup, &match) != 0) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "cursor stale: send the whole prefix");
        return;
    }
    if (match.boundary_tokens <
            KVT_MIN(req->limit_tokens, where.blocks * session->ns->block_tokens) /
                session->ns->block_tokens * session->ns->block_tokens &&
        eng_park(engine, op))
        return;
    count_bytes(session->ns, &match, bytes);
    if (req->wants_lease && !eng_lease_fits(engine, session->group, bytes) &&
        shorten(engine, session, &lookup, &match)) {
        is_limited = true;
        count_bytes(session->ns, &match, bytes);
        eng_count(engine, KVT_COUNTER_LEASES_LIMITED, 1);
    }
    fill_answer(engine, op, session->ns, &match);
    op->ans.lookup.is_lease_limited = is_limited;
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        if (bytes[tier] > 0)
            estimate_ns = kvt_time_add(estimate_ns,
                                       kvt_store_estimate_ns(engine->store, (enum kvt_tier_id)tier,
                                                             session->group->is_gpu, bytes[tier]));
    }
    op->ans.lookup.estimate_us = estimate_ns / KVT_NS_PER_US;
    count(engine, session, where.blocks * session->ns->block_tokens, &op->ans.lookup);
    if (match.boundary_tokens == 0)
        return;
    if (req->wants_lease)
        give_lease(engine, op, session, &match, bytes);
    if (req->wants_prefetch && op->code == KVT_CODE_OK)
        prefetch(engine, session, &match);
}
