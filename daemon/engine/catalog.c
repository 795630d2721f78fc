/* What L3's devices keep beside blocks: the namespaces with their epochs, and how far numbers for
 * blocks and contents are reserved. The same records go to every device, so that any that is left
 * brings them back; of several the greatest epoch counts.
 *
 * A Reset takes effect at once and is answered when its epoch is durable on every device that is in
 * service: then no row and no slot of an older epoch comes back, however the daemon ends. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/engine/internal.h"

#define TAGS_MAX 1024u
#define RETRY_NS (5 * KVT_NS_PER_MS)

/* ---- at start ---------------------------------------------------------------------------------
 */

/* False: the record is not what its fingerprint is of. */
static bool read_spec(const struct kvt_disk_ns_record *record,
                      struct kvt_req_open_namespace *ret_req, struct kvt_text *ret_tags)
{
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];

    return kvt_sha256(record->spec, record->spec_bytes, fingerprint) == 0 &&
           memcmp(fingerprint, record->fingerprint, sizeof(fingerprint)) == 0 &&
           eng_spec_decode(record->spec, record->spec_bytes, ret_req, ret_tags, TAGS_MAX);
}

bool kvt_engine_describe_ns(const struct kvt_disk_ns_record *record, struct kvt_index_ns *ret_ns)
{
    struct kvt_text tags[TAGS_MAX];
    struct kvt_req_open_namespace req;
    struct kvt_index_ns ns = {.is_used = true, .epoch = record->epoch};

    if (!read_spec(record, &req, tags))
        return false;
    memcpy(ns.fingerprint, record->fingerprint, sizeof(ns.fingerprint));
    ns.block_tokens = req.block_tokens;
    ns.components_count = req.components_count;
    for (uint32_t i = 0; i < req.components_count; i++)
        ns.shards[i] = (uint16_t)(req.components[i].is_replicated ? 1 : req.ranks);
    *ret_ns = ns;
    return true;
}

/* A record that does not hold is passed over: its rows find no namespace. */
static int restore(struct kvt_engine *engine, uint32_t idx, const struct kvt_disk_ns_record *record,
                   struct kvt_text *tags)
{
    const uint32_t *missing = engine->config.namespaces_missing;
    struct kvt_req_open_namespace req;
    int r;

    if (!read_spec(record, &req, tags))
        return 0;
    r = eng_ns_make(engine, idx, record->epoch, &req, record->fingerprint);
    if (r == 0)
        kvt_store_ns_set_recorded(engine->store, engine->ns[idx].radix_ns,
                                  missing == NULL ? UINT32_MAX : ~missing[idx]);
    return r == -ENOMEM ? r : 0; /* a spec that these tiers cannot hold: as if it were not there */
}

bool eng_catalog_fits(const struct kvt_req_open_namespace *req, size_t spec_bytes)
{
    return spec_bytes <= KVT_DISK_SPEC_BYTES_MAX && req->tags_count <= TAGS_MAX;
}

int eng_catalog_restore(struct kvt_engine *engine)
{
    const struct kvt_disk_ns_record *records = engine->config.namespaces;
    struct kvt_text *tags;
    int r = 0;

    engine->stamp_end = engine->stamp_end_wanted = engine->config.store.stamp_end;
    if (records == NULL)
        return 0;
    tags = kvt_alloc_zeroed(TAGS_MAX, sizeof(tags[0]));
    if (tags == NULL)
        return kvt_trace(-ENOMEM);
    for (uint32_t i = 0; i < engine->config.namespaces_max && r == 0; i++) {
        engine->ns[i].epoch = records[i].epoch; /* the number's next user begins above it */
        if (records[i].is_used)
            r = restore(engine, i, &records[i], tags);
    }
    kvt_free(tags);
    engine->config.namespaces = NULL;
    return r;
}

/* ---- namespaces -------------------------------------------------------------------------------
 */

/* True: nothing is left to put. */
static bool put_ns(struct kvt_engine *engine, const struct eng_ns *ns, uint32_t zones)
{
    uint8_t data[KVT_DISK_NS_BYTES_MAX];
    struct kvt_disk_ns_record record = {
        .is_used = true, .epoch = ns->epoch, .spec_bytes = ns->spec_bytes};
    bool is_put = true;
    uint32_t bytes;

    memcpy(record.fingerprint, ns->fingerprint, sizeof(record.fingerprint));
    memcpy(record.spec, ns->spec, ns->spec_bytes);
    bytes = kvt_disk_catalog_encode_ns(data, &record);
    for (uint32_t i = 0; i < KVT_ZONES_MAX; i++)
        if ((zones & 1u << i) != 0)
            is_put &= kvt_store_ns_record(engine->store, ns->radix_ns, i, data, bytes) == 0;
    return is_put;
}

/* ---- stamps -----------------------------------------------------------------------------------
 */

static bool put_stamps(struct kvt_engine *engine)
{
    for (uint32_t i = 0; i < KVT_ZONES_MAX; i++) {
        struct kvt_disk_state state = engine->config.devices[i].state;
        uint8_t data[KVT_DISK_STATE_BYTES];

        if ((engine->stamps_todo & 1u << i) == 0)
            continue;
        state.stamps_end = engine->stamp_end_wanted;
        kvt_disk_catalog_encode_state(data, &state);
        if (kvt_store_catalog_put(engine->store, i, KVT_DISK_CATALOG_STATE, data, sizeof(data),
                                  &engine->stamps_seq[i]) != 0)
            return false;
        engine->stamps_todo &= ~(1u << i);
    }
    return true;
}

/* Well before the reserved numbers are used up, more are reserved. */
static void reserve_stamps(struct kvt_engine *engine)
{
    if (engine->stamp_end == 0)
        return;
    if (engine->stamp_end_wanted == engine->stamp_end) {
        /* An index that is newer than every catalog has numbers above all that are reserved. */
        uint64_t next = kvt_store_stamp_next(engine->store);

        if (next < engine->stamp_end && engine->stamp_end - next > KVT_DISK_STAMPS_RESERVE / 2)
            return;
        engine->stamp_end_wanted = KVT_MIN(
            KVT_MAX(engine->stamp_end, next) + KVT_DISK_STAMPS_RESERVE, KVT_DISK_STAMPS_MAX - 1);
        if (engine->stamp_end_wanted == engine->stamp_end)
            return; /* there are no others */
        for (uint32_t i = 0; i < kvt_store_zones(engine->store); i++)
            if (kvt_store_zone_is_kept(engine->store, i))
                engine->stamps_todo |= 1u << i;
    }
    if (!put_stamps(engine))
        return;
    for (uint32_t i = 0; i < kvt_store_zones(engine->store); i++)
        if (!kvt_store_is_committed(engine->store, i, engine->stamps_seq[i]))
            return;
    engine->stamp_end = engine->stamp_end_wanted;
    kvt_store_set_stamp_end(engine->store, engine->stamp_end);
}

/* ---- resets -----------------------------------------------------------------------------------
 */

void eng_reset_wait(struct kvt_engine *engine, struct kvt_op *op, struct eng_ns *ns)
{
    if (engine->config.store.stamp_end == 0)
        return; /* nothing outlives this daemon, so nothing can come back */
    if (engine->resets_count == KVT_ENGINE_RESETS_MAX) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "epoch %llu is in effect, but %u resets wait for the disk: reset again to know "
                    "that it is durable",
                    (unsigned long long)ns->epoch, engine->resets_count);
        return;
    }
    op->service = engine; /* taken: not answered by the caller */
    engine->resets[engine->resets_count++] =
        (struct eng_reset){.op = op, .ns = ns, .epoch = ns->epoch};
}

static void reset_answer(struct kvt_engine *engine, uint32_t at, enum kvt_code code,
                         const char *text)
{
    struct eng_reset reset = engine->resets[at];

    engine->resets[at] = engine->resets[--engine->resets_count];
    reset.op->service = NULL;
    if (code != KVT_CODE_OK)
        kvt_op_fail(reset.op, code, "epoch %llu is in effect, but not known to be durable: %s",
                    (unsigned long long)reset.epoch, text);
    eng_answer(engine, reset.op);
}

void eng_resets_end(struct kvt_engine *engine, enum kvt_code code, const char *text)
{
    while (engine->resets_count > 0)
        reset_answer(engine, 0, code, text);
}

static void answer_resets(struct kvt_engine *engine)
{
    for (uint32_t i = engine->resets_count; i > 0; i--) {
        const struct eng_reset *reset = &engine->resets[i - 1];

        if (!kvt_store_has_index(engine->store))
            reset_answer(engine, i - 1, KVT_CODE_UNAVAILABLE,
                         "no device of L3 could record it: reset again after a restart");
        else if (kvt_store_ns_is_durable(engine->store, reset->ns->radix_ns))
            reset_answer(engine, i - 1, KVT_CODE_OK, "");
        else if (atomic_load(&reset->op->is_cancelled))
            reset_answer(engine, i - 1, KVT_CODE_CANCELLED, "cancelled");
        else if (reset->op->deadline_ns <= engine->now_ns)
            reset_answer(engine, i - 1, KVT_CODE_DEADLINE_EXCEEDED, "L3 is slow: reset again");
    }
}

uint64_t eng_resets_next_ns(const struct kvt_engine *engine)
{
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    for (uint32_t i = 0; i < engine->resets_count; i++)
        next_ns = KVT_MIN(next_ns, engine->resets[i].op->deadline_ns);
    if (engine->is_unrecorded) /* its ring was full: that rings no bell */
        next_ns = KVT_MIN(next_ns, kvt_time_add(engine->now_ns, RETRY_NS));
    return next_ns;
}

void eng_catalog_slice(struct kvt_engine *engine)
{
    engine->is_unrecorded = false;
    for (uint32_t i = 0; i < engine->ns_count; i++) {
        const struct eng_ns *ns = &engine->ns[i];
        uint32_t zones = ns->is_open ? kvt_store_ns_unrecorded(engine->store, ns->radix_ns) : 0;

        if (zones != 0)
            engine->is_unrecorded |= !put_ns(engine, ns, zones);
    }
    reserve_stamps(engine);
    if (engine->resets_count > 0) {
        kvt_store_hasten(engine->store);
        answer_resets(engine);
    }
}
