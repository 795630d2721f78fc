/* Leases: the right to read a matched path. A lease is a lease of the tree on the path's last
 * block, and bookkeeping. It ends when the scheduler or every rank released it, when it was idle
 * for its time, with its engine, or with a Reset; under a running promote only its handle ends, and
 * the path stays leased until the promote is over. Ending is idempotent. A lease by which blocks
 * are read in place (hold.c) ends by a release, with its engine, or when their GPU is lost.
 *
 *   free -> live -> dying (handle is dead, the tree's lease is not given back yet) -> free
 *
 * Many leases may die in one moment (an engine, a Reset): the dying are worked off in slices. */
#include "daemon/engine/internal.h"

static uint64_t disk_max(const struct kvt_engine *engine)
{
    const struct kvt_tier *disk = engine->config.store.tiers[KVT_TIER_DISK];

    return disk != NULL ? disk->capacity_bytes / 2 : 0;
}

static uint64_t upper(const uint64_t bytes[KVT_TIERS_COUNT])
{
    return bytes[KVT_TIER_DEVICE] + bytes[KVT_TIER_HOST];
}

bool eng_lease_fits(const struct kvt_engine *engine, const struct eng_group *group,
                    const uint64_t bytes[KVT_TIERS_COUNT])
{
    return upper(group->leased_bytes) + upper(bytes) <=
               engine->config.leased_bytes_per_engine_max &&
           group->leased_bytes[KVT_TIER_DISK] + bytes[KVT_TIER_DISK] <= disk_max(engine);
}

bool eng_lease_room(struct kvt_engine *engine, struct kvt_op *op, const struct eng_session *session,
                    const uint64_t bytes[KVT_TIERS_COUNT])
{
    const struct eng_group *group = session->group;

    if (session->leases_count >= engine->config.leases_per_session_max)
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "this session holds %u leases, the most it may: release some",
                    session->leases_count);
    else if (!eng_lease_fits(engine, group, bytes))
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "this engine leases %llu bytes of L1 and L2 (at most %llu) and %llu of L3 (at "
                    "most %llu), which leaves no room for a block of this prefix: release some",
                    (unsigned long long)upper(group->leased_bytes),
                    (unsigned long long)engine->config.leased_bytes_per_engine_max,
                    (unsigned long long)group->leased_bytes[KVT_TIER_DISK],
                    (unsigned long long)disk_max(engine));
    return op->code == KVT_CODE_OK;
}

struct eng_lease *eng_lease_new(struct kvt_engine *engine, struct eng_session *session,
                                struct kvt_radix_block end, uint64_t blocks, uint64_t idle_ns,
                                const uint64_t bytes[KVT_TIERS_COUNT])
{
    struct eng_lease *lease;
    uint32_t generation;

    if (!kvt_list_is_empty(&engine->leases_free)) {
        lease = KVT_CONTAINER_OF(engine->leases_free.next, struct eng_lease, link);
        kvt_list_remove(&lease->link);
    } else if (engine->leases_made < KVT_ENGINE_LEASES_MAX) {
        lease = &engine->leases[engine->leases_made];
        lease->idx = engine->leases_made++;
        kvt_list_init(&lease->link);
    } else {
        return NULL;
    }
    KVT_ASSERT(!lease->is_used);
    generation = lease->generation + 1;
    *lease = (struct eng_lease){.idx = lease->idx,
                                .generation = generation != 0 ? generation : 1,
                                .is_live = true,
                                .is_used = true,
                                .group = session->group,
                                .session_idx = session->idx,
                                .session_generation = session->generation,
                                .end = end,
                                .blocks = blocks,
                                .epoch = session->ns->epoch,
                                .idle_ns = idle_ns,
                                .ranks_mask = (1u << session->ns->ranks) - 1u};
    lease->timer.kind = ENG_TIMER_LEASE;
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        lease->bytes[tier] = bytes[tier];
        lease->group->leased_bytes[tier] += bytes[tier];
    }
    kvt_list_init(&lease->link);
    kvt_list_init(&lease->held_link);
    kvt_list_push_back(&lease->group->leases, &lease->link);
    lease->group->leases_count++;
    lease->group->refs++;
    session->leases_count++;
    engine->leases_count++;
    eng_timer_set(&engine->heap, &lease->timer, kvt_time_add(engine->now_ns, idle_ns));
    eng_count(engine, KVT_COUNTER_LEASES, 1);
    return lease;
}

/* The tree's lease goes back, the record is free. */
static void lease_bury(struct kvt_engine *engine, struct eng_lease *lease)
{
    KVT_ASSERT(!lease->is_live && lease->is_used && lease->runs == 0 && lease->first_hold == 0);
    kvt_list_remove(&lease->link);
    (void)!kvt_radix_release(engine->radix, lease->end); /* stale: its root was reset */
    lease->is_used = false;
    engine->leases_count--;
    kvt_list_push_back(&engine->leases_free, &lease->link);
}

static void tell(struct kvt_engine *engine, const struct eng_lease *lease,
                 struct eng_session *session)
{
    const struct kvt_notice notice = {
        .kind = KVT_NOTICE_LEASE_ENDED,
        .handle = eng_handle(engine, ENG_HANDLE_LEASE, lease->idx, lease->generation)};

    if (session != NULL)
        eng_notify(engine, session, &notice);
}

static void lease_kill(struct kvt_engine *engine, struct eng_lease *lease, bool is_told)
{
    struct eng_session *session =
        eng_session_at(engine, lease->session_idx, lease->session_generation);

    KVT_ASSERT(lease->is_live);
    if (is_told)
        tell(engine, lease, session);
    lease->is_live = false;
    eng_timer_clear(&engine->heap, &lease->timer);
    eng_holds_abandon(lease);
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
        lease->group->leased_bytes[tier] -= lease->bytes[tier];
    lease->group->leases_count--;
    eng_group_unref(lease->group);
    lease->group = NULL;
    if (session != NULL)
        session->leases_count--;
}

void eng_lease_end(struct kvt_engine *engine, struct eng_lease *lease, bool is_told)
{
    lease_kill(engine, lease, is_told);
    kvt_list_remove(&lease->link);
    if (lease->runs == 0 && lease->first_hold == 0) {
        lease_bury(engine, lease);
        return;
    }
    kvt_list_push_back(&engine->leases_dying, &lease->link);
    engine->has_dying = true;
}

void eng_lease_use(struct kvt_engine *engine, struct eng_lease *lease)
{
    KVT_ASSERT(lease->is_live);
    lease->runs++;
    eng_timer_clear(&engine->heap, &lease->timer);
}

void eng_lease_unuse(struct kvt_engine *engine, struct eng_lease *lease)
{
    KVT_ASSERT(lease->runs > 0);
    if (--lease->runs > 0)
        return;
    if (!lease->is_live && lease->first_hold == 0)
        lease_bury(engine, lease);
    else if (!lease->is_live)
        engine->has_dying = true; /* a slice gives back what it holds */
    else if (lease->first_hold == 0)
        eng_timer_set(&engine->heap, &lease->timer, kvt_time_add(engine->now_ns, lease->idle_ns));
}

void eng_lease_expire(struct kvt_engine *engine, struct eng_lease *lease)
{
    KVT_ASSERT(lease->runs == 0);
    eng_count(engine, KVT_COUNTER_LEASES_EXPIRED, 1);
    eng_lease_end(engine, lease, true);
}

/* Those of a dead engine or an old epoch wait here with is_live still set; those under a run are
 * buried by it. Looked at from the front, so what must wait goes to the back. */
bool eng_leases_slice(struct kvt_engine *engine)
{
    struct kvt_list *list = &engine->leases_dying;
    struct kvt_list *last = list->prev;
    uint32_t budget = KVT_ENGINE_SLICE; /* of leases, and of what they hold in place */
    bool has_holds = false;

    engine->has_dying = false;
    while (budget > 0 && !kvt_list_is_empty(list)) {
        struct kvt_list *link = list->next;
        struct eng_lease *lease = KVT_CONTAINER_OF(link, struct eng_lease, link);

        budget--;
        if (lease->is_live)
            lease_kill(engine, lease, false);
        if (lease->runs == 0 && eng_holds_drop(engine, lease, &budget)) {
            lease_bury(engine, lease);
        } else {
            has_holds |= lease->runs == 0;
            kvt_list_remove(link);
            kvt_list_push_back(list, link);
        }
        if (link == last)
            return has_holds;
    }
    return !kvt_list_is_empty(list);
}

/* ---- Release ----------------------------------------------------------------------------------
 */

/* A session that is scheduler and rank in one ends it: it speaks for the whole engine. */
static void release_lease(struct kvt_engine *engine, const struct eng_session *session,
                          struct eng_lease *lease)
{
    if (!session->is_scheduler) {
        lease->ranks_mask &= ~(1u << session->rank);
        if (lease->ranks_mask != 0)
            return;
    }
    eng_lease_end(engine, lease, false);
}

void eng_op_release(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_release *req = &op->req.release;
    struct eng_session *session = eng_session_of(engine, op, &req->session);
    struct eng_lease *lease;
    struct eng_ticket *ticket;

    if (session == NULL)
        return;
    if (eng_handle_is_none(&req->lease) == eng_handle_is_none(&req->ticket)) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "give a lease or a ticket, one of the two");
        return;
    }
    if (!eng_handle_is_none(&req->lease)) {
        if (eng_lease_to_end(engine, op, session, &req->lease, &lease) && lease != NULL)
            release_lease(engine, session, lease);
    } else if (eng_ticket_of(engine, op, session, &req->ticket, &ticket) && ticket != NULL) {
        eng_ticket_end(engine, ticket);
    }
}
