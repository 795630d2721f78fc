/* Maintain: upkeep of L3 that an operator asks for. The store does it (store_save.c,
 * store_scrub.c); here a request starts or stops it, and one that waits for a drain is answered
 * when the drain is over, or in time before its deadline: the answer says how much is left, and the
 * drain goes on. */
#include "daemon/engine/internal.h"

#define ANSWER_MARGIN_NS (100 * KVT_NS_PER_MS)
#define SCRUB_RATE_DEFAULT (64 * KVT_MIB) /* bytes a second: a hundredth of an NVMe's */

static void fill(const struct kvt_engine *engine, struct kvt_op *op)
{
    struct kvt_ans_maintain *ans = &op->ans.maintain;
    struct kvt_store_upkeep now;

    kvt_store_upkeep(engine->store, &now);
    *ans = (struct kvt_ans_maintain){
        .drain = {.is_running = now.save.is_running,
                  .copies_left = now.save.copies_left,
                  .copies_written = now.save.copies_written,
                  .bytes_written = now.save.bytes_written,
                  .copies_failed = now.save.copies_failed},
        .scrub = {.is_running = now.scrub.bytes_per_s != 0,
                  .rate_bytes_per_s = now.scrub.bytes_per_s,
                  .checked_copies = now.scrub.checked_copies,
                  .checked_bytes = now.scrub.checked_bytes,
                  .bad_copies = now.scrub.bad_copies,
                  .skipped_copies = now.scrub.skipped_copies,
                  .rounds = now.scrub.rounds},
    };
}

static void drain(struct kvt_engine *engine, struct kvt_op *op)
{
    uint64_t left_ns = op->deadline_ns > engine->now_ns ? op->deadline_ns - engine->now_ns : 0;

    if (engine->drains_count == KVT_ENGINE_DRAINS_MAX) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%u requests wait for a drain already",
                    KVT_ENGINE_DRAINS_MAX);
        return;
    }
    kvt_store_save_start(engine->store);
    engine->has_submitted = true; /* the store's turn begins with it */
    engine->drains[engine->drains_count++] = (struct eng_drain){
        .op = op, .answer_ns = op->deadline_ns - KVT_MIN(left_ns / 8, ANSWER_MARGIN_NS)};
    op->service = engine; /* not over: eng_maintain_slice answers it */
}

void eng_op_maintain(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_maintain *req = &op->req.maintain;
    uint64_t rate = req->rate_bytes_per_s;

    if (!op->is_admin) {
        kvt_op_fail(op, KVT_CODE_PERMISSION_DENIED, "Maintain is served on the admin socket only");
        return;
    }
    if (engine->config.store.tiers[KVT_TIER_DISK] == NULL) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "there is no L3: tiers.l3.path is not set");
        return;
    }
    switch (req->action) {
    case KVT_MAINTAIN_STATUS:
        break;
    case KVT_MAINTAIN_DRAIN:
        drain(engine, op);
        return;
    case KVT_MAINTAIN_SCRUB_START:
        if (rate == 0)
            rate = engine->config.store.scrub_bytes_per_s;
        kvt_store_scrub_start(engine->store, rate != 0 ? rate : SCRUB_RATE_DEFAULT);
        engine->has_submitted = true;
        break;
    case KVT_MAINTAIN_SCRUB_STOP:
        kvt_store_scrub_start(engine->store, 0);
        break;
    }
    fill(engine, op);
}

/* True: the request of @waiting goes on waiting. */
static bool look(struct kvt_engine *engine, const struct eng_drain *waiting, bool is_draining)
{
    if (engine->is_stopping)
        kvt_op_fail(waiting->op, KVT_CODE_UNAVAILABLE, "the daemon is stopping");
    else if (atomic_load(&waiting->op->is_cancelled))
        kvt_op_fail(waiting->op, KVT_CODE_CANCELLED, "cancelled; the drain goes on");
    else if (is_draining && engine->now_ns < waiting->answer_ns)
        return true;
    else
        fill(engine, waiting->op);
    eng_answer(engine, waiting->op);
    return false;
}

static bool is_draining(const struct kvt_engine *engine)
{
    struct kvt_store_upkeep now;

    kvt_store_upkeep(engine->store, &now);
    return now.save.is_running;
}

void eng_maintain_slice(struct kvt_engine *engine)
{
    uint32_t kept = 0, count = engine->drains_count;
    bool is_running = count > 0 && is_draining(engine);

    for (uint32_t i = 0; i < count; i++) {
        if (look(engine, &engine->drains[i], is_running))
            engine->drains[kept++] = engine->drains[i];
    }
    engine->drains_count = kept;
}

uint64_t eng_maintain_next_ns(const struct kvt_engine *engine)
{
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    if (engine->drains_count > 0 && !is_draining(engine))
        return engine->now_ns;
    for (uint32_t i = 0; i < engine->drains_count; i++)
        next_ns = KVT_MIN(next_ns, engine->drains[i].answer_ns);
    return next_ns;
}
