/* Writes the seeds of fuzz_index: rows, parts and copies without their checksums, and two small
 * LMDB files. make-index-corpus DIRECTORY */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/common/check.h"
#include "tests/common/index_world.h"
#include "tiers/index/audit.h"
#include "tiers/index/row.h"

static struct index_world_bytes bytes;
static uint8_t seed[64u << 10];

static void write_seed(const char *directory, const char *name, size_t count)
{
    char path[4096];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", directory, name);
    file = fopen(path, "wb");
    if (file == NULL || fwrite(seed, 1, count, file) != count || fclose(file) != 0) {
        perror(path);
        exit(1);
    }
}

static void write_rows(const char *directory)
{
    const struct kvt_index_key first = {.epoch = 2, .block_id = 33};
    const struct kvt_index_key later = {.ns = 1, .epoch = 2, .block_idx = 3, .block_id = 35};
    uint8_t *key = seed + 1, *value = key + KVT_INDEX_KEY_BYTES;
    struct kvt_index_put put;

    seed[0] = 1;
    index_world_row(&put, &first, 0, 16, &bytes);
    kvt_index_key_write(key, &first, KVT_INDEX_TYPE_ROW);
    write_seed(directory, "row-first",
               (size_t)(value - seed) + kvt_index_row_write(value, key, 0, &put));
    index_world_row(&put, &later, 34, 700, &bytes);
    kvt_index_key_write(key, &later, KVT_INDEX_TYPE_ROW);
    write_seed(directory, "row-later",
               (size_t)(value - seed) + kvt_index_row_write(value, key, 0, &put));
    kvt_index_key_write(key, &later, KVT_INDEX_TYPE_PART + 1);
    write_seed(directory, "part",
               (size_t)(value - seed) + kvt_index_part_write(value, key, 0, &put, 1));
    index_world_copy(&put, &later, 1, 19, &bytes);
    kvt_index_key_write(key, &later, KVT_INDEX_TYPE_COPY + 1);
    write_seed(directory, "copy",
               (size_t)(value - seed) + kvt_index_copy_write(value, key, 0, &put));
}

/* A file of @blocks, of which some are dropped again. */
static void write_file(const char *directory, const char *name, uint32_t blocks)
{
    struct kvt_index_db_config config = {.path = "index-corpus", .bytes = KVT_INDEX_DB_BYTES_MIN};
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_db *db = NULL;
    struct kvt_index_audit audit;
    struct kvt_index_put put;
    FILE *file;

    CHECK(kvt_index_db_open(&db, &config, why) == KVT_INDEX_DB_E_FRESH);
    for (uint32_t id = 1; id <= blocks; id++) {
        const struct kvt_index_key key = {.block_id = id};

        index_world_row(&put, &key, 0, 32, &bytes);
        CHECK(kvt_index_db_apply(db, &put) == 0);
        if (id % 8 == 0)
            CHECK(kvt_index_db_commit(db) == 0);
    }
    for (uint32_t id = 1; id <= blocks; id += 2) {
        put = (struct kvt_index_put){.kind = KVT_INDEX_PUT_DROP_ROW, .key.block_id = id};
        CHECK(kvt_index_db_apply(db, &put) == 0);
    }
    CHECK(kvt_index_db_commit(db) == 0);
    db = kvt_index_db_close(db);
    file = fopen(config.path, "rb");
    CHECK(file != NULL);
    CHECK(kvt_index_audit(&kvt_index_lmdb_real, fileno(file), config.bytes, &audit, why,
                          sizeof(why)) == 0);
    CHECK(audit.pages_count * audit.page_bytes < sizeof(seed));
    seed[0] = 2;
    CHECK(fread(seed + 1, audit.page_bytes, audit.pages_count, file) == audit.pages_count);
    CHECK(fclose(file) == 0 && unlink(config.path) == 0);
    write_seed(directory, name, 1 + audit.pages_count * audit.page_bytes);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    write_rows(argv[1]);
    write_file(argv[1], "file-small", 3);
    write_file(argv[1], "file-large", 14);
    return 0;
}
