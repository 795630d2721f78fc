/* The journal of the crash harness: what it says was promised decides what is a fault, so a promise
 * that is forgotten would hide one, and one that was never made would invent one. */
#include "tests/common/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/kvtier-crash/crash.h"

struct place {
    char path[64];
};

static int make_place(void **state)
{
    static struct place place;
    int fd;

    (void)snprintf(place.path, sizeof(place.path), "/tmp/kvt-journal-XXXXXX");
    fd = mkstemp(place.path);
    assert_true(fd >= 0);
    (void)close(fd);
    *state = &place;
    return 0;
}

static int remove_place(void **state)
{
    return unlink(((struct place *)*state)->path);
}

static void note(struct crash_journal *journal, char kind, uint32_t generation, uint32_t talk,
                 uint32_t blocks)
{
    struct crash_note line = {kind, 1, generation, talk, blocks};

    assert_int_equal(crash_journal_note(journal, &line), 0);
}

static void expect_talk(const struct crash_journal *journal, uint32_t generation, uint32_t talk,
                        uint32_t tried, uint32_t durable)
{
    const struct crash_talk *got = crash_journal_talk(journal, 1, generation, talk);

    assert_int_equal(got->tried_blocks, tried);
    assert_int_equal(got->durable_blocks, durable);
}

static void expect_all(const struct crash_journal *journal)
{
    expect_talk(journal, 0, 3, 9, 7);
    expect_talk(journal, 0, 4, 5, 0); /* evicted: may come back, must not */
    expect_talk(journal, 0, 5, 0, 0);
    expect_talk(journal, 200, 3, 2, 2);
    expect_talk(journal, 60000, 3, 0, 0); /* of nothing that was ever noted */
    assert_int_equal(journal->spaces[1].generation, 201);
    assert_int_equal(journal->spaces[1].gone_below, 200);
    assert_int_equal(journal->spaces[0].generation, 0);
}

static void test_what_was_noted_is_there_again(void **state)
{
    const struct place *place = *state;
    struct crash_journal journal;

    assert_int_equal(crash_journal_init(&journal, place->path), 0);
    note(&journal, 'S', 0, 3, 7);
    note(&journal, 'D', 0, 3, 7);
    note(&journal, 'S', 0, 3, 9);
    note(&journal, 'D', 0, 3, 4); /* a smaller promise takes nothing back */
    note(&journal, 'S', 0, 4, 5);
    note(&journal, 'D', 0, 4, 5);
    note(&journal, 'E', 0, 4, 0);
    note(&journal, 'N', 200, 0, 0); /* beyond the room of the beginning */
    note(&journal, 'R', 200, 0, 0);
    note(&journal, 'S', 200, 3, 2);
    note(&journal, 'D', 200, 3, 2);
    note(&journal, 'N', 201, 0, 0); /* never answered */
    expect_all(&journal);
    crash_journal_deinit(&journal);
    crash_journal_deinit(&journal);

    assert_int_equal(crash_journal_init(&journal, place->path), 0);
    expect_all(&journal);
    crash_journal_deinit(&journal);
}

static void expect_bad(const char *path, const char *text)
{
    struct crash_journal journal;
    FILE *out = fopen(path, "w");

    assert_non_null(out);
    assert_true(fputs(text, out) >= 0);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(crash_journal_init(&journal, path), CRASH_JOURNAL_E_BAD);
    crash_journal_deinit(&journal);
}

static void test_other_lines_are_refused(void **state)
{
    const struct place *place = *state;

    expect_bad(place->path, "D 0 0 1\n");
    expect_bad(place->path, "X 0 0 1 1\n");
    expect_bad(place->path, "D 2 0 1 1\n");     /* no such namespace */
    expect_bad(place->path, "D 0 65536 1 1\n"); /* nor generation */
    expect_bad(place->path, "D 0 0 24 1\n");    /* nor talk */
    expect_bad(place->path, "D 0 0 1 17\n");    /* longer than any */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_was_noted_is_there_again, make_place,
                                        remove_place),
        cmocka_unit_test_setup_teardown(test_other_lines_are_refused, make_place, remove_place),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
