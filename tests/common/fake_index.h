/* The index of an L3 device for the simulator and directed tests: in memory, in virtual time,
 * without a thread or a process. It outlives the engine that uses it: what was committed is there
 * after a crash, what was not is forgotten.
 *
 *   fake_index_new -> open -> (load, puts, commits) -> close by the engine, or crash -> open -> ...
 *
 * It behaves as the real one may, within the contract of tiers/index/index.h: puts are committed in
 * order, in batches, after the data was synchronised; a batch takes a random time; of a batch that
 * is under way when the engine crashes any first part may have been committed. A catalog record is
 * durable when its put is. COMMITTED never goes past what was committed. What the engine may not do
 * ends the program: a row whose parent was never put, a copy of a row that was never put, a copy in
 * a slot that another one still has, a row dropped that has rows below it.
 *
 * One thread. The test sets the time; commits begin and end inside set_time. */
#pragma once

#include "tiers/index/index.h"

struct fake_index;

struct fake_index_config {
    uint64_t seed;
    uint64_t ring_bytes;    /* of puts that are not yet committed; 0: 4 MiB */
    uint64_t commit_ns;     /* longest wait for company; 0: 100 ms */
    uint64_t delay_ns_max;  /* a commit takes up to this long; 0: no time */
    uint64_t load_event_ns; /* from a row or copy of a load to the next; 0: all at once */
    uint32_t refuse_rate;   /* in 1/1000, of rows and copies */
    bool is_lenient;        /* the engine may do what it may not */
    bool has_siblings;      /* as in struct kvt_index_config */
    /* As in struct kvt_index_config; NULL: works. A record is kept here as well. */
    int (*data_sync)(void *ctx);
    int (*catalog_write)(void *ctx, uint32_t number, const void *data, uint32_t bytes);
    void *ctx;
};

struct fake_index *fake_index_new(const struct fake_index_config *config);
void fake_index_free(struct fake_index *fake); /* closed or crashed, or never opened; NULL-proof */

/* A load of what is committed begins. @namespaces is KVT_NAMESPACES_MAX long, or NULL: all rows are
 * of the present. @was_rebuilt is what LOADED says. */
struct kvt_index *fake_index_open(struct fake_index *fake, const struct kvt_index_ns *namespaces,
                                  bool was_rebuilt);
/* The engine is dead, without close. */
void fake_index_crash(struct fake_index *fake);
/* The index is lost: FAILED comes next, nothing is committed any more. */
void fake_index_fail(struct fake_index *fake, int error, const char *why);

void fake_index_set_time(struct fake_index *fake, uint64_t now_ns);
/* When something happens next without the engine; KVT_TIME_NEVER_NS: nothing will. */
uint64_t fake_index_next_ns(const struct fake_index *fake);
/* While it is held no commit ends. */
void fake_index_hold(struct fake_index *fake, bool is_held);

/* From now on rows and copies are refused at this rate, in 1/1000. */
void fake_index_refuse(struct fake_index *fake, uint32_t rate);
/* Its next load says nothing for so long: its slots are looked through. */
void fake_index_delay_load(struct fake_index *fake, uint64_t delay_ns);

/* A ROW, COPY or CATALOG that is committed already, for a load to find. */
void fake_index_add(struct fake_index *fake, const struct kvt_index_put *put);
/* The index is lost and made anew from the slots (between two lives): rows of blocks without a copy
 * here are gone, and of roots only the digest of their key is known, which @root_key makes into a
 * key (of at most KVT_INDEX_ROOT_KEY_BYTES_MAX; returns its bytes). */
void fake_index_scan(struct fake_index *fake,
                     uint32_t (*root_key)(const struct kvt_index_put *row, uint8_t *ret_key));
/* What is committed. NULL: not there. */
const struct kvt_index_put *fake_index_row(const struct fake_index *fake, uint64_t block_id);
const struct kvt_index_put *fake_index_copy(const struct fake_index *fake, uint64_t block_id,
                                            uint16_t component);
const struct kvt_index_put *fake_index_catalog(const struct fake_index *fake, uint32_t number);
uint64_t fake_index_rows_count(const struct fake_index *fake);
