#include "tiers/index/offline.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/size.h"
#include "tiers/disk/inspect.h"

#define BAD_LISTED_MAX 1000u

enum { EXIT_GOOD = 0, EXIT_DAMAGED = 1, EXIT_WRONG_USAGE = 2, EXIT_UNREADABLE = 4 };

struct offline {
    const char *path;
    bool is_verify, is_json;
    struct kvt_disk_inspection *found;
    struct kvt_disk_bad_slot bad[BAD_LISTED_MAX];
    uint32_t bad_count; /* of bad; more are only counted */
};

static void bad_note(void *ctx, const struct kvt_disk_bad_slot *bad)
{
    struct offline *offline = ctx;

    if (offline->bad_count < BAD_LISTED_MAX)
        offline->bad[offline->bad_count++] = *bad;
}

static void hex_print(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        printf("%02x", bytes[i]);
}

static void json_text(const char *text)
{
    putchar('"');
    for (const unsigned char *c = (const unsigned char *)text; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\')
            printf("\\%c", *c);
        else if (*c < 0x20)
            printf("\\u%04x", *c);
        else
            putchar(*c);
    }
    putchar('"');
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static void json_super(const struct kvt_disk_inspection *found)
{
    printf("\"version\": %u, \"device_uuid\": \"", found->about.version);
    hex_print(found->about.device_uuid, KVT_DISK_ID_BYTES);
    printf("\", \"store_id\": \"");
    hex_print(found->about.store_id, KVT_DISK_ID_BYTES);
    printf("\", \"is_raw\": %s, \"there_bytes\": %" PRIu64 ", \"device_bytes\": %" PRIu64
           ", \"data_offset_bytes\": %" PRIu64 ", \"created_real_ns\": %" PRIu64
           ", \"superblock_copies\": [",
           found->is_raw ? "true" : "false", found->there_bytes, found->about.device_bytes,
           found->about.data_offset_bytes, found->about.created_real_ns);
    for (uint32_t copy = 0; copy < 2; copy++)
        printf("%s{\"is_good\": %s, \"serial\": %" PRIu64 "}", copy > 0 ? ", " : "",
               found->is_copy_good[copy] ? "true" : "false", found->copy_serials[copy]);
    printf("]");
}

static void json_catalog(const struct kvt_disk_inspection *found)
{
    const struct kvt_disk_state *state = &found->catalog.state;
    const char *comma = "";

    if (found->catalog.has_state)
        printf("\"state\": {\"stamps_end\": %" PRIu64 ", \"starts\": %" PRIu64
               ", \"written_bytes\": %" PRIu64 "}",
               state->stamps_end, state->starts, state->written_bytes);
    else
        printf("\"state\": null");
    printf(", \"record_copies_bad\": %u, \"records_lost\": %u, \"namespaces\": [",
           found->catalog.copies_bad, found->catalog.records_lost);
    for (uint32_t ns = 0; ns < KVT_NAMESPACES_MAX; ns++) {
        const struct kvt_disk_ns_record *record = &found->catalog.namespaces[ns];
        const char *inner = "";

        if (!record->is_used)
            continue;
        printf("%s{\"number\": %u, \"fingerprint\": \"", comma, ns);
        hex_print(record->fingerprint, KVT_FINGERPRINT_BYTES);
        printf("\", \"epoch\": %" PRIu64 ", \"spec_bytes\": %u, \"slots\": [", record->epoch,
               record->spec_bytes);
        for (uint32_t i = 0; i < found->groups_count; i++) {
            if (found->groups[i].ns != ns)
                continue;
            printf("%s{\"slot_bytes\": %" PRIu64 ", \"count\": %" PRIu64 "}", inner,
                   found->groups[i].slot_bytes, found->groups[i].slots);
            inner = ", ";
        }
        printf("]}");
        comma = ", ";
    }
    printf("]");
}

static void json_slots(const struct offline *offline)
{
    const struct kvt_disk_inspection *found = offline->found;

    printf("\"slots\": {\"good\": %" PRIu64 ", \"bad\": %" PRIu64 ", \"stale\": %" PRIu64
           ", \"replaced\": %" PRIu64 ", \"other\": %" PRIu64 "}, \"unreadable_bytes\": %" PRIu64
           ", \"read_bytes\": %" PRIu64 ", \"bad\": [",
           found->slots, found->slots_bad, found->slots_stale, found->slots_replaced,
           found->slots_other, found->unreadable_bytes, found->read_bytes);
    for (uint32_t i = 0; i < offline->bad_count; i++) {
        const struct kvt_disk_bad_slot *bad = &offline->bad[i];

        printf("%s{\"offset_bytes\": %" PRIu64 ", \"why\": \"%s\"", i > 0 ? ", " : "",
               bad->offset_bytes, kvt_slot_verdict_text(bad->verdict));
        if (bad->has_info)
            printf(", \"block_id\": %" PRIu64 ", \"component\": %u, \"rank\": %u",
                   bad->info.block_id, bad->info.component, bad->info.rank);
        printf("}");
    }
    printf("]");
}

static void json_print(const struct offline *offline)
{
    printf("{\"path\": ");
    json_text(offline->path);
    printf(", \"is_verified\": %s, ", offline->is_verify ? "true" : "false");
    json_super(offline->found);
    if (offline->found->about.version >= KVT_DISK_SUPER_VERSION) {
        printf(", ");
        json_catalog(offline->found);
        printf(", ");
        json_slots(offline);
    }
    printf("}\n");
}

/* ---- for people ----------------------------------------------------------------------------- */

static void view_super(const struct offline *offline)
{
    const struct kvt_disk_inspection *found = offline->found;
    time_t seconds = (time_t)(found->about.created_real_ns / KVT_NS_PER_S);
    char used[KVT_SIZE_TEXT_BYTES], there[KVT_SIZE_TEXT_BYTES], made[32] = "?";
    struct tm tm;

    kvt_size_format_short(found->about.device_bytes, used);
    kvt_size_format_short(found->there_bytes, there);
    if (gmtime_r(&seconds, &tm) != NULL)
        (void)strftime(made, sizeof(made), "%Y-%m-%d %H:%M:%S UTC", &tm);
    printf("%s: %s of L3, format version %u, made %s\n", offline->path,
           found->is_raw ? "raw device" : "file", found->about.version, made);
    printf("  size        %s in use, %s there%s\n", used, there,
           found->there_bytes < found->about.device_bytes ? ": IT WAS CUT OFF" : "");
    printf("  device      ");
    hex_print(found->about.device_uuid, KVT_DISK_ID_BYTES);
    printf("\n  store       ");
    hex_print(found->about.store_id, KVT_DISK_ID_BYTES);
    printf("\n  superblock ");
    for (uint32_t copy = 0; copy < 2; copy++) {
        if (found->is_copy_good[copy])
            printf(" %c serial %" PRIu64, 'A' + (int)copy, found->copy_serials[copy]);
        else
            printf(" %c DAMAGED", 'A' + (int)copy);
    }
    printf("\n");
}

static void view_catalog(const struct kvt_disk_inspection *found)
{
    const struct kvt_disk_state *state = &found->catalog.state;
    char size[KVT_SIZE_TEXT_BYTES];

    kvt_size_format_short(state->written_bytes, size);
    if (found->catalog.has_state)
        printf("  state       stamps below %" PRIu64 ", %" PRIu64 " starts, %s written\n",
               state->stamps_end, state->starts, size);
    else
        printf("  state       none\n");
    if (found->catalog.copies_bad > 0)
        printf("  records     %u DAMAGED, the other copy serves\n", found->catalog.copies_bad);
    if (found->catalog.records_lost > 0)
        printf("  records     %u LOST\n", found->catalog.records_lost);
    for (uint32_t ns = 0; ns < KVT_NAMESPACES_MAX; ns++) {
        const struct kvt_disk_ns_record *record = &found->catalog.namespaces[ns];

        if (!record->is_used)
            continue;
        printf("  namespace %u ", ns);
        hex_print(record->fingerprint, 8);
        printf(", epoch %" PRIu64 "\n", record->epoch);
        for (uint32_t i = 0; i < found->groups_count; i++) {
            if (found->groups[i].ns != ns)
                continue;
            kvt_size_format_short(found->groups[i].slot_bytes, size);
            printf("    %10" PRIu64 " slots of %s\n", found->groups[i].slots, size);
        }
    }
}

static void view_slots(const struct offline *offline)
{
    const struct kvt_disk_inspection *found = offline->found;

    printf("  slots       %" PRIu64 " %s, %" PRIu64 " BAD, %" PRIu64 " stale, ", found->slots,
           offline->is_verify ? "good" : "with a whole header", found->slots_bad,
           found->slots_stale);
    if (offline->is_verify)
        printf("%" PRIu64 " replaced, ", found->slots_replaced);
    printf("%" PRIu64 " of other stores or versions\n", found->slots_other);
    if (found->unreadable_bytes > 0)
        printf("  UNREADABLE  %" PRIu64 " bytes\n", found->unreadable_bytes);
    for (uint32_t i = 0; i < offline->bad_count; i++) {
        const struct kvt_disk_bad_slot *bad = &offline->bad[i];

        printf("  bad         offset %" PRIu64 ": %s", bad->offset_bytes,
               kvt_slot_verdict_text(bad->verdict));
        if (bad->has_info)
            printf(" (block %" PRIu64 ", component %u, rank %u)", bad->info.block_id,
                   bad->info.component, bad->info.rank);
        printf("\n");
    }
    if (found->slots_bad > offline->bad_count)
        printf("  bad         and %" PRIu64 " more\n", found->slots_bad - offline->bad_count);
}

static void view_print(const struct offline *offline)
{
    view_super(offline);
    if (offline->found->about.version < KVT_DISK_SUPER_VERSION) {
        printf("  contents of this version cannot be found again: a daemon makes it anew\n");
        return;
    }
    view_catalog(offline->found);
    view_slots(offline);
}

/* ---- run ------------------------------------------------------------------------------------ */

static bool is_damaged(const struct kvt_disk_inspection *found)
{
    return found->slots_bad > 0 || found->unreadable_bytes > 0 || !found->is_copy_good[0] ||
           !found->is_copy_good[1] || found->catalog.copies_bad > 0 ||
           found->catalog.records_lost > 0 || found->there_bytes < found->about.device_bytes;
}

static int offline_run(struct offline *offline)
{
    const struct kvt_disk_inspect_config config = {
        .path = offline->path, .is_verify = offline->is_verify, .bad = bad_note, .ctx = offline};
    int r = kvt_disk_inspect(&config, offline->found);

    if (r != 0) {
        fprintf(stderr, "%s %s%s\n", offline->path, r < 0 ? "cannot be read: " : "",
                kvt_disk_result_text(r));
        return EXIT_UNREADABLE;
    }
    if (offline->is_json)
        json_print(offline);
    else
        view_print(offline);
    if (fflush(stdout) != 0)
        return EXIT_UNREADABLE;
    return offline->is_verify && is_damaged(offline->found) ? EXIT_DAMAGED : EXIT_GOOD;
}

int kvt_index_offline(int argc, char **argv)
{
    kvt_autofree struct offline *offline = kvt_alloc_zeroed(1, sizeof(*offline));
    kvt_autofree struct kvt_disk_inspection *found = kvt_alloc_zeroed(1, sizeof(*found));

    if (offline == NULL || found == NULL) {
        fprintf(stderr, "no memory\n");
        return EXIT_UNREADABLE;
    }
    offline->found = found;
    offline->is_verify = strcmp(argv[0], "verify") == 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            offline->is_json = true;
        else if (offline->path == NULL && argv[i][0] != '-')
            offline->path = argv[i];
        else
            argc = 0; /* too much: below */
    }
    if (argc == 0 || offline->path == NULL) {
        fprintf(stderr, "usage: kvtierd-index inspect|verify PATH [--json]\n");
        return EXIT_WRONG_USAGE;
    }
    return offline_run(offline);
}
