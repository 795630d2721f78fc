#include "tools/kvtier-crash/crash.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"

#define GENERATIONS_AT_FIRST 64u

static int make_room(struct crash_space_state *space, uint32_t generation)
{
    uint32_t room = KVT_MAX(space->generations_room, GENERATIONS_AT_FIRST);
    void *larger;

    while (room <= generation)
        room *= 2;
    if (room == space->generations_room)
        return 0;
    larger = kvt_alloc_zeroed(room, sizeof(space->generations[0]));
    if (larger == NULL)
        return kvt_trace(-ENOMEM);
    if (space->generations_room > 0)
        memcpy(larger, space->generations,
               (size_t)space->generations_room * sizeof(space->generations[0]));
    kvt_free(space->generations);
    space->generations = larger;
    space->generations_room = room;
    return 0;
}

static int apply(struct crash_journal *journal, const struct crash_note *note)
{
    struct crash_space_state *space;
    struct crash_talk *talk;
    int r;

    if (note->space >= CRASH_SPACES || note->generation > CRASH_GENERATIONS_MAX ||
        note->talk >= CRASH_TALKS || note->blocks > CRASH_BLOCKS_MAX)
        return CRASH_JOURNAL_E_BAD;
    space = &journal->spaces[note->space];
    r = make_room(space, note->generation);
    if (r < 0)
        return kvt_trace(r);
    talk = &space->generations[note->generation][note->talk];
    switch (note->kind) {
    case 'S':
        talk->tried_blocks = (uint8_t)KVT_MAX(talk->tried_blocks, note->blocks);
        return 0;
    case 'D':
        talk->durable_blocks = (uint8_t)KVT_MAX(talk->durable_blocks, note->blocks);
        return 0;
    case 'E':
        talk->durable_blocks = 0;
        return 0;
    case 'N':
        space->generation = note->generation;
        return 0;
    case 'R':
        space->gone_below = note->generation;
        return 0;
    default:
        return CRASH_JOURNAL_E_BAD;
    }
}

static int take_in(struct crash_journal *journal, FILE *in)
{
    char line[80];

    while (fgets(line, sizeof(line), in) != NULL) {
        struct crash_note note;
        int r;

        if (sscanf(line, "%c %u %u %u %u", &note.kind, &note.space, &note.generation, &note.talk,
                   &note.blocks) != 5)
            return CRASH_JOURNAL_E_BAD;
        r = apply(journal, &note);
        if (r != 0)
            return r;
    }
    return ferror(in) ? kvt_trace(-EIO) : 0;
}

int crash_journal_init(struct crash_journal *journal, const char *path)
{
    FILE *in;
    int r;

    *journal = (struct crash_journal){.fd = -1};
    if (path == NULL)
        return 0;
    journal->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (journal->fd < 0)
        return kvt_trace(-errno);
    in = fopen(path, "re");
    if (in == NULL)
        return kvt_trace(-errno);
    r = take_in(journal, in);
    (void)fclose(in);
    return r;
}

void crash_journal_deinit(struct crash_journal *journal)
{
    for (uint32_t i = 0; i < CRASH_SPACES; i++) {
        kvt_free(journal->spaces[i].generations);
        journal->spaces[i] = (struct crash_space_state){0};
    }
    if (journal->fd >= 0)
        (void)close(journal->fd);
    journal->fd = -1;
}

int crash_journal_note(struct crash_journal *journal, const struct crash_note *note)
{
    char line[80];
    int bytes = snprintf(line, sizeof(line), "%c %u %u %u %u\n", note->kind, note->space,
                         note->generation, note->talk, note->blocks);

    if (journal->fd >= 0 && write(journal->fd, line, (size_t)bytes) != bytes)
        return kvt_trace(-EIO);
    return apply(journal, note);
}

const struct crash_talk *crash_journal_talk(const struct crash_journal *journal, uint32_t space,
                                            uint32_t generation, uint32_t talk)
{
    static const struct crash_talk none;

    if (generation >= journal->spaces[space].generations_room)
        return &none;
    return &journal->spaces[space].generations[generation][talk];
}
