/* The frames between daemon and index helper with arbitrary bytes: as they come, and sealed, so
 * that the parser behind the checksum is reached. What the parser accepts, encode writes again,
 * byte by byte.
 *
 * With libFuzzer (-Dfuzzers=true, clang) this is a fuzzer; else replay_main.c runs it over files.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "tiers/index/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static _Alignas(8) uint8_t frame[KVT_WIRE_BYTES_MAX], again[KVT_WIRE_BYTES_MAX];

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvt_wire_message message;
    uint8_t *exact = malloc(size + 1); /* so that a byte too far is seen */
    uint32_t bytes = 0;
    int r;

    if (exact == NULL)
        abort();
    memcpy(exact, data, size);
    r = kvt_wire_check(exact, size, &bytes);
    free(exact);
    if (r == 0 && (bytes > size || bytes > KVT_WIRE_BYTES_MAX))
        abort();
    if (size < KVT_WIRE_HEADER_BYTES || size > KVT_WIRE_BYTES_MAX)
        return 0;
    bytes = (uint32_t)kvt_round_down(size, 8);
    memcpy(frame, data, bytes);
    kvt_put_u32(frame, 0, bytes);
    kvt_wire_seal(frame);
    if (kvt_wire_check(frame, bytes, &bytes) != 0)
        abort();
    memset(&message, 0, sizeof(message));
    if (kvt_wire_parse(frame, &message) != 0)
        return 0;
    if (kvt_wire_encode(again, &message) != bytes)
        abort();
    kvt_wire_seal(again);
    memcpy(frame, data, bytes);
    kvt_put_u32(frame, 0, bytes);
    kvt_wire_seal(frame);
    if (memcmp(frame, again, bytes) != 0)
        abort();
    return 0;
}
