/* Traces and made-up workloads: what is read, what is refused and where, and the figures of a cache
 * without limit (with the published traces in KVTIER_TRACE_DIR: their published figures). */
#include "tests/common/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#include "tools/lib/synth.h"
#include "tools/lib/trace.h"

static char path[64];

static void write_file(const void *data, size_t bytes)
{
    int fd;

    (void)snprintf(path, sizeof(path), "/tmp/kvtier-trace-XXXXXX");
    fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, bytes), (ssize_t)bytes);
    (void)close(fd);
}

static int read_text(const char *text, uint64_t limit, struct kvt_workload *ret, char *why)
{
    struct kvt_trace_options options = {path, limit, 1};
    int r;

    write_file(text, strlen(text));
    r = kvt_trace_read(ret, &options, why, 256);
    (void)unlink(path);
    return r;
}

static const char good[] =
    "{\"timestamp\": 0, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [0, 1]}\n"
    "\n"
    "{\"timestamp\": 27, \"input_length\": 1024, \"output_length\": 5, \"hash_ids\": [0, "
    "4294967295],"
    " \"session\": \"s\"}\n"
    "{\"timestamp\": 30, \"input_length\": 9999, \"output_length\": 5, \"hash_ids\": [0, 1]}";

static void check_good(const struct kvt_workload *workload)
{
    uint32_t a[1024], b[1024], c[100];

    assert_int_equal(workload->requests_count, 3);
    assert_int_equal(workload->requests[1].arrival_ms, 27);
    assert_int_equal(workload->requests[2].input_tokens, 1024); /* no more than its ids */
    assert_int_equal(workload->requests[0].session, KVT_SESSION_NONE);
    assert_int_not_equal(workload->requests[1].session, KVT_SESSION_NONE);
    kvt_workload_tokens(workload, 0, 0, 1024, a);
    kvt_workload_tokens(workload, 1, 0, 1024, b);
    assert_memory_equal(a, b, 512 * sizeof(a[0]));
    assert_int_not_equal(memcmp(a + 512, b + 512, sizeof(a) / 2), 0);
    kvt_workload_tokens(workload, 0, 470, 100, c); /* across two ids */
    assert_memory_equal(a + 470, c, sizeof(c));
    kvt_workload_tokens(workload, 0, 1024, 100, a); /* answers are nobody else's */
    kvt_workload_tokens(workload, 2, 1024, 100, b);
    assert_int_not_equal(memcmp(a, b, sizeof(c)), 0);
    assert_int_equal(kvt_workload_common_tokens(workload, 0, 1), 512);
    assert_int_equal(kvt_workload_common_tokens(workload, 2, 0), 700);
}

static void test_a_good_trace(void **state)
{
    struct kvt_workload workload;
    struct kvt_workload_facts facts;
    char why[256];

    (void)state;
    assert_int_equal(read_text(good, 0, &workload, why), 0);
    check_good(&workload);
    assert_int_equal(kvt_workload_facts(&workload, 64, &facts), 0);
    assert_int_equal(facts.lookup_tokens, 700 + 1024 + 1024);
    assert_int_equal(facts.prompt_blocks, 10 + 16 + 16);
    assert_int_equal(facts.hit_tokens, 512 + 640);
    assert_int_equal(facts.distinct_blocks, 10 + 8 + 6);
    kvt_workload_deinit(&workload);
    kvt_workload_deinit(&workload);
    assert_int_equal(read_text(good, 2, &workload, why), 0);
    assert_int_equal(workload.requests_count, 2);
    kvt_workload_deinit(&workload);
}

static void test_compressed(void **state)
{
    size_t room = ZSTD_compressBound(sizeof(good)), bytes;
    struct kvt_trace_options options = {path, 0, 1};
    struct kvt_workload workload;
    char *packed = malloc(room), why[256];
    ZSTD_CCtx *context = ZSTD_createCCtx();

    (void)state;
    assert_non_null(packed);
    assert_non_null(context);
    (void)ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, 27);
    (void)ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
    bytes = ZSTD_compress2(context, packed, room, good, sizeof(good) - 1);
    assert_false(ZSTD_isError(bytes));
    write_file(packed, bytes);
    assert_int_equal(kvt_trace_read(&workload, &options, why, sizeof(why)), 0);
    (void)unlink(path);
    check_good(&workload);
    kvt_workload_deinit(&workload);
    write_file(packed, bytes - 3);
    assert_int_equal(kvt_trace_read(&workload, &options, why, sizeof(why)), KVT_TRACE_E_BAD);
    (void)unlink(path);
    assert_non_null(strstr(why, "too early"));
    (void)ZSTD_freeCCtx(context);
    free(packed);
}

static void test_bad_traces_name_the_line(void **state)
{
    static const struct {
        const char *text, *why;
    } rows[] = {
        {"", "no requests"},
        {"{\"timestamp\": 0}\n", ":1: input_length"},
        {"\n[1]\n", ":2: not a JSON object"},
        {"{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}",
         ":1: timestamp"},
        {"{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1}",
         ":1: hash_ids is missing"},
        {"{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [\"x\"]}",
         ":1: hash_ids holds"},
        {"{\"timestamp\": 1, \"input_length\": 1e300, \"output_length\": 1, \"hash_ids\": [1]}",
         ":1: input_length"},
        {"{\"timestamp\": 1, \"input_length\": 1, ", ":1: not a JSON object"},
    };
    struct kvt_workload workload;
    struct kvt_trace_options missing = {"/nonexistent/trace", 0, 1};
    char why[256];

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        assert_int_equal(read_text(rows[i].text, 0, &workload, why), KVT_TRACE_E_BAD);
        assert_non_null(strstr(why, rows[i].why));
    }
    assert_int_equal(kvt_trace_read(&workload, &missing, why, sizeof(why)), -ENOENT);
    assert_non_null(strstr(why, "/nonexistent/trace"));
}

static void test_made_up_agents(void **state)
{
    struct kvt_synth_options options = kvt_synth_defaults();
    struct kvt_workload one, two;
    struct kvt_workload_facts facts;
    uint64_t follow_ups = 0;

    (void)state;
    options.tenants = 3;
    assert_int_equal(kvt_synth_make(&one, &options), 0);
    assert_int_equal(kvt_synth_make(&two, &options), 0);
    assert_int_equal(one.requests_count, options.requests);
    assert_int_equal(one.ids_count, two.ids_count);
    assert_memory_equal(one.ids, two.ids, one.ids_count * sizeof(one.ids[0]));
    for (uint64_t i = 0; i < one.requests_count; i++) {
        const struct kvt_request *request = &one.requests[i];

        assert_true((uint64_t)request->ids_count * one.id_tokens ==
                    (uint64_t)request->input_tokens + request->output_tokens);
        assert_true(request->input_tokens <= options.prompt_tokens_max);
        assert_in_range(request->tenant, 1, 3);
        for (uint64_t j = i; j > 0 && j + 100 > i; j--)
            if (one.requests[j - 1].session == request->session) {
                follow_ups += kvt_workload_common_tokens(&one, j - 1, i) >= options.system_tokens;
                break;
            }
    }
    assert_true(follow_ups > options.requests / 2);
    assert_int_equal(kvt_workload_facts(&one, 64, &facts), 0);
    assert_true(facts.hit_tokens > facts.lookup_tokens / 2);
    assert_true(facts.distinct_blocks < facts.prompt_blocks / 2);
    kvt_workload_deinit(&one);
    kvt_workload_deinit(&two);
    options.sessions = 0;
    assert_int_equal(kvt_synth_make(&one, &options), -EINVAL);
    options = kvt_synth_defaults();
    options.system_tokens = options.prompt_tokens_max;
    assert_int_equal(kvt_synth_make(&one, &options), -EINVAL);
}

/* The conversation trace is public: with it at hand, the reader and the set must give its published
 * figures exactly. */
static void test_published_figures(void **state)
{
    const char *folder = getenv("KVTIER_TRACE_DIR");
    char file[512], why[256];
    struct kvt_trace_options options = {file, 0, 1};
    struct kvt_workload workload;
    struct kvt_workload_facts facts;

    (void)state;
    if (folder == NULL)
        skip();
    (void)snprintf(file, sizeof(file), "%s/mooncake_conversation.jsonl", folder);
    if (access(file, R_OK) != 0)
        skip();
    assert_int_equal(kvt_trace_read(&workload, &options, why, sizeof(why)), 0);
    assert_int_equal(kvt_workload_facts(&workload, 64, &facts), 0);
    assert_int_equal(facts.requests, 12031);
    assert_int_equal(facts.lookup_tokens, 144793823);
    assert_int_equal(facts.prompt_blocks, 2256643);
    assert_int_equal(facts.hit_tokens, 54093952);
    kvt_workload_deinit(&workload);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_good_trace),
        cmocka_unit_test(test_compressed),
        cmocka_unit_test(test_bad_traces_name_the_line),
        cmocka_unit_test(test_made_up_agents),
        cmocka_unit_test(test_published_figures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
