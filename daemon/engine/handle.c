/* Handles: what a client holds of the engine's objects. (boot id, index and generation, secret).
 *
 * The secret is derived from a key of this boot, so that also the handle of an object that has
 * ended is told from an invented one without remembering it:
 *   other boot id            FAILED_PRECONDITION  the daemon restarted: attach again
 *   wrong secret             NOT_FOUND            never given out
 *   right, object has ended  a lease or ticket: its moves are ABORTED; a session: NOT_FOUND
 *   another engine's         PERMISSION_DENIED
 *   cursor that is stale     NOT_FOUND            send the whole prefix */
#include <string.h>

#include "daemon/engine/internal.h"

uint64_t eng_secret(const struct kvt_engine *engine, enum eng_handle kind, uint64_t a, uint64_t b)
{
    const uint64_t words[5] = {engine->secret_key[0], engine->secret_key[1], (uint64_t)kind, a, b};
    uint8_t digest[KVT_FINGERPRINT_BYTES];
    uint64_t secret;

    KVT_ASSERT(kvt_sha256(words, sizeof(words), digest) == 0);
    memcpy(&secret, digest, sizeof(secret));
    return secret | 1u; /* never KVT_HANDLE_NONE's */
}

struct kvt_handle eng_handle(const struct kvt_engine *engine, enum eng_handle kind, uint32_t idx,
                             uint32_t generation)
{
    uint64_t id = (uint64_t)generation << 32 | idx;

    return (struct kvt_handle){engine->config.boot_id, id, eng_secret(engine, kind, id, 0)};
}

bool eng_handle_is_none(const struct kvt_handle *handle)
{
    return handle->boot_id == 0 && handle->id == 0 && handle->secret == 0;
}

static uint32_t handle_idx(const struct kvt_handle *handle)
{
    return (uint32_t)handle->id;
}

static uint32_t handle_generation(const struct kvt_handle *handle)
{
    return (uint32_t)(handle->id >> 32);
}

bool eng_handle_is_ours(const struct kvt_engine *engine, struct kvt_op *op, enum eng_handle kind,
                        const struct kvt_handle *handle, const char *what)
{
    if (eng_handle_is_none(handle)) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "no %s handle given", what);
        return false;
    }
    if (handle->boot_id != engine->config.boot_id) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                    "this %s is of an earlier daemon: it restarted, attach again", what);
        return false;
    }
    if (handle->secret != eng_secret(engine, kind, handle->id, 0)) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "unknown %s", what);
        return false;
    }
    return true;
}

struct eng_ns *eng_ns_of(struct kvt_engine *engine, struct kvt_op *op,
                         const struct kvt_handle *handle)
{
    uint32_t idx = handle_idx(handle);

    if (!eng_handle_is_ours(engine, op, ENG_HANDLE_NS, handle, "namespace"))
        return NULL;
    if (idx >= engine->ns_count || !engine->ns[idx].is_open ||
        engine->ns[idx].generation != handle_generation(handle)) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "this namespace was closed: open it again");
        return NULL;
    }
    return &engine->ns[idx];
}

struct eng_session *eng_session_of(struct kvt_engine *engine, struct kvt_op *op,
                                   const struct kvt_handle *handle)
{
    struct eng_session *session;

    if (!eng_handle_is_ours(engine, op, ENG_HANDLE_SESSION, handle, "session"))
        return NULL;
    session = eng_session_at(engine, handle_idx(handle), handle_generation(handle));
    if (session == NULL) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "this session has ended: attach again");
        return NULL;
    }
    KVT_ASSERT(session->magic == KVT_SESSION_MAGIC && session->is_alive);
    if (session->peer_uid != op->peer_uid) {
        kvt_op_fail(op, KVT_CODE_PERMISSION_DENIED, "this session belongs to uid %llu",
                    (unsigned long long)session->peer_uid);
        return NULL;
    }
    return session;
}

bool eng_lease_to_end(struct kvt_engine *engine, struct kvt_op *op,
                      const struct eng_session *session, const struct kvt_handle *handle,
                      struct eng_lease **ret_lease)
{
    uint32_t idx = handle_idx(handle);
    struct eng_lease *lease;

    if (!eng_handle_is_ours(engine, op, ENG_HANDLE_LEASE, handle, "lease"))
        return false;
    *ret_lease = NULL;
    if (idx >= engine->leases_made)
        return true;
    lease = &engine->leases[idx];
    if (!lease->is_live || lease->generation != handle_generation(handle))
        return true;
    if (lease->group != session->group) {
        kvt_op_fail(op, KVT_CODE_PERMISSION_DENIED, "this lease belongs to another engine");
        return false;
    }
    *ret_lease = lease;
    return true;
}

bool eng_lease_of(struct kvt_engine *engine, struct kvt_op *op, const struct eng_session *session,
                  const struct kvt_handle *handle, struct eng_lease **ret_lease)
{
    if (!eng_lease_to_end(engine, op, session, handle, ret_lease))
        return false;
    if (*ret_lease != NULL && (*ret_lease)->epoch != session->ns->epoch)
        *ret_lease = NULL;
    return true;
}

bool eng_ticket_of(struct kvt_engine *engine, struct kvt_op *op, const struct eng_session *session,
                   const struct kvt_handle *handle, struct eng_ticket **ret_ticket)
{
    uint32_t idx = handle_idx(handle);
    struct eng_ticket *ticket;

    if (!eng_handle_is_ours(engine, op, ENG_HANDLE_TICKET, handle, "ticket"))
        return false;
    *ret_ticket = NULL;
    if (idx >= engine->tickets_made)
        return true;
    ticket = &engine->tickets[idx];
    if (!ticket->is_live || ticket->generation != handle_generation(handle))
        return true;
    if (ticket->group != session->group) {
        kvt_op_fail(op, KVT_CODE_PERMISSION_DENIED, "this ticket belongs to another engine");
        return false;
    }
    if (ticket->epoch == session->ns->epoch)
        *ret_ticket = ticket;
    return true;
}

/* Cheap enough for each lookup: nothing cryptographic, the key is not known outside. */
static uint64_t cursor_secret(const struct kvt_engine *engine, const struct eng_ns *ns, uint64_t id)
{
    const uint64_t words[3] = {ns->cursor_secret, id, engine->secret_key[1]};

    return kvt_hash64(words, sizeof(words), engine->secret_key[0]) | 1u;
}

struct kvt_handle eng_cursor(const struct kvt_engine *engine, const struct eng_ns *ns,
                             struct kvt_radix_block block)
{
    uint64_t id = kvt_radix_block_id(block);

    if (block.generation == 0)
        return KVT_HANDLE_NONE;
    return (struct kvt_handle){engine->config.boot_id, id, cursor_secret(engine, ns, id)};
}

bool eng_cursor_of(struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns,
                   const struct kvt_handle *handle, struct kvt_radix_block *ret_block)
{
    struct kvt_radix_block block = {handle_idx(handle), handle_generation(handle)};

    if (eng_handle_is_none(handle)) {
        *ret_block = KVT_RADIX_BLOCK_NONE;
        return true;
    }
    if (handle->boot_id != engine->config.boot_id) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                    "this cursor is of an earlier daemon: it restarted, attach again");
        return false;
    }
    if (handle->secret != cursor_secret(engine, ns, handle->id) ||
        !kvt_radix_is_live(engine->radix, block)) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "cursor stale: send the whole prefix");
        return false;
    }
    *ret_block = block;
    return true;
}
