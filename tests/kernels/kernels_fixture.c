/* Quantisation against payloads that numpy and ml_dtypes converted (make_fixture.py): every case of
 * the file given as argument, through every table, both ways. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/common/check.h"
#include "tests/kernels/naive.h"

#define BYTES_MAX 4096u
#define CASES_LEAST 40u

struct fixture {
    struct kvt_quant_spec spec;
    uint32_t planes_count;
    uint64_t raw_bytes, quantised_bytes;
    _Alignas(16) uint8_t raw[BYTES_MAX];
    uint8_t quantised[BYTES_MAX], back[BYTES_MAX];
};

static uint64_t read_hex(FILE *file, uint8_t *ret_bytes)
{
    static char line[2 * BYTES_MAX + 2];
    uint64_t count = 0;

    CHECK(fgets(line, sizeof(line), file) != NULL);
    for (const char *at = line; *at != '\n'; at += 2) {
        char pair[3] = {at[0], at[1], 0}, *end;

        ret_bytes[count++] = (uint8_t)strtoul(pair, &end, 16);
        CHECK(end == pair + 2 && count <= BYTES_MAX);
    }
    return count;
}

/* False: the end of the file. */
static bool read_case(FILE *file, struct fixture *fixture)
{
    struct kvt_quant_spec *spec = &fixture->spec;
    char kind[8], elem[8], order[8];

    if (fscanf(file, "%7s %7s %7s %u %u %u %u\n", kind, elem, order, &fixture->planes_count,
               &spec->plane_tokens, &spec->heads, &spec->head_dim) != 7)
        return false;
    spec->kind = strcmp(kind, "fp8") == 0 ? KVT_QUANT_FP8_E4M3 : KVT_QUANT_INT8;
    spec->elem = strcmp(elem, "fp16") == 0 ? KVT_ELEM_FP16 : KVT_ELEM_BF16;
    spec->order = strcmp(order, "nhd") == 0 ? KVT_ORDER_TOKENS_FIRST : KVT_ORDER_HEADS_FIRST;
    CHECK(kvt_quant_is_valid(spec));
    fixture->raw_bytes = kvt_quant_plane_bytes(spec) * fixture->planes_count;
    fixture->quantised_bytes = kvt_quant_bytes(spec, fixture->raw_bytes);
    CHECK(read_hex(file, fixture->raw) == fixture->raw_bytes);
    CHECK(read_hex(file, fixture->quantised) == fixture->quantised_bytes);
    CHECK(read_hex(file, fixture->back) == fixture->raw_bytes);
    return true;
}

static void try_case(const struct kvt_kernels *kernels, const struct fixture *fixture)
{
    _Alignas(16) uint8_t quantised[BYTES_MAX], back[BYTES_MAX];
    struct kvt_quant_job job = {.raw = (uintptr_t)fixture->raw,
                                .quantised = (uintptr_t)quantised,
                                .planes_count = fixture->planes_count,
                                .end_plane = fixture->planes_count};
    struct kvt_quant_batch batch = {.spec = fixture->spec,
                                    .jobs = (uintptr_t)&job,
                                    .jobs_count = 1,
                                    .planes_max = fixture->planes_count};

    memset(quantised, 0xa5, sizeof(quantised));
    CHECK(kernels->quantise(NULL, &batch) == 0);
    CHECK(memcmp(quantised, fixture->quantised, fixture->quantised_bytes) == 0);
    job.raw = (uintptr_t)back;
    CHECK(kernels->dequantise(NULL, &batch) == 0);
    CHECK(memcmp(back, fixture->back, fixture->raw_bytes) == 0);
}

int main(int argc, char **argv)
{
    static struct fixture fixture;
    const struct kvt_kernels *tables[4];
    uint32_t tables_count = naive_tables(tables), cases_count = 0;
    FILE *file = argc > 1 ? fopen(argv[1], "r") : NULL;

    CHECK(file != NULL);
    while (read_case(file, &fixture)) {
        for (uint32_t i = 0; i < tables_count; i++)
            try_case(tables[i], &fixture);
        cases_count++;
    }
    CHECK(feof(file) && fclose(file) == 0);
    printf("%u cases\n", cases_count);
    CHECK(cases_count >= CASES_LEAST);
    return 0;
}
