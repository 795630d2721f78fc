/* Token ids from a text or a file. Whoever has a prompt has it as a Python list, a column of
 * numbers or a numpy array written with tofile(): all three are taken as they are. */
#include "tools/kvtier-ctl/ctl.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"

/* Text of a million ten-digit numbers with separators, and slack. */
#define FILE_BYTES_MAX ((size_t)KVT_REQUEST_TOKENS_MAX * 16u)

static bool is_separator(char c)
{
    return c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == ';';
}

static size_t skip_separators(const char *text, size_t at, size_t bytes)
{
    while (at < bytes && is_separator(text[at]))
        at++;
    return at;
}

/* One number at text[*at]; moves *at behind it. */
static int parse_one(const char *text, size_t *at, size_t bytes, uint32_t *ret_token)
{
    uint64_t value = 0;
    size_t i = *at;

    for (; i < bytes && text[i] >= '0' && text[i] <= '9'; i++) {
        value = value * 10 + (uint64_t)(text[i] - '0');
        if (value > UINT32_MAX)
            return -ERANGE;
    }
    if (i == *at || (i < bytes && !is_separator(text[i]) && text[i] != ']'))
        return -EINVAL;
    *at = i;
    *ret_token = (uint32_t)value;
    return 0;
}

/* With @at NULL only counts. */
static int parse_all(const char *text, size_t bytes, uint32_t *at, uint64_t *ret_count,
                     char *ret_why, size_t why_bytes)
{
    uint64_t count = 0;
    size_t pos = skip_separators(text, 0, bytes);
    bool is_list = pos < bytes && text[pos] == '[';

    pos = skip_separators(text, pos + (is_list ? 1 : 0), bytes);
    while (pos < bytes && text[pos] != ']') {
        uint32_t token;
        int r = parse_one(text, &pos, bytes, &token);

        if (r < 0) {
            (void)snprintf(ret_why, why_bytes, "%s at byte %zu (number %llu)",
                           r == -ERANGE ? "a number above 4294967295" : "not a token id", pos,
                           (unsigned long long)count + 1);
            return -EINVAL;
        }
        if (at != NULL)
            at[count] = token;
        count++;
        pos = skip_separators(text, pos, bytes);
    }
    if (is_list != (pos < bytes && text[pos] == ']')) {
        (void)snprintf(ret_why, why_bytes, "a bracket without its partner");
        return -EINVAL;
    }
    pos = skip_separators(text, pos + (is_list ? 1 : 0), bytes);
    if (pos < bytes) {
        (void)snprintf(ret_why, why_bytes, "something follows the list, at byte %zu", pos);
        return -EINVAL;
    }
    *ret_count = count;
    return 0;
}

static int too_many(uint64_t count, char *ret_why, size_t why_bytes)
{
    (void)snprintf(ret_why, why_bytes, "%llu tokens; one request takes at most %u",
                   (unsigned long long)count, KVT_REQUEST_TOKENS_MAX);
    return -E2BIG;
}

int kvt_ctl_tokens_parse(struct kvt_ctl_tokens *ret_tokens, const char *text, size_t bytes,
                         char *ret_why, size_t why_bytes)
{
    struct kvt_ctl_tokens tokens = {NULL, 0};
    int r;

    r = parse_all(text, bytes, NULL, &tokens.count, ret_why, why_bytes);
    if (r < 0)
        return r;
    if (tokens.count > KVT_REQUEST_TOKENS_MAX)
        return too_many(tokens.count, ret_why, why_bytes);
    tokens.at = kvt_alloc_zeroed(tokens.count + 1, sizeof(uint32_t));
    if (tokens.at == NULL)
        return -ENOMEM;
    r = parse_all(text, bytes, tokens.at, &tokens.count, ret_why, why_bytes);
    KVT_ASSERT(r == 0);
    *ret_tokens = tokens;
    return 0;
}

static int parse_binary(struct kvt_ctl_tokens *ret_tokens, const uint8_t *data, size_t bytes,
                        char *ret_why, size_t why_bytes)
{
    struct kvt_ctl_tokens tokens = {NULL, bytes / 4};

    if (bytes % 4 != 0) {
        (void)snprintf(ret_why, why_bytes,
                       "it is not text, and %zu bytes are not whole 32-bit numbers", bytes);
        return -EINVAL;
    }
    if (tokens.count > KVT_REQUEST_TOKENS_MAX)
        return too_many(tokens.count, ret_why, why_bytes);
    tokens.at = kvt_alloc_zeroed(tokens.count + 1, sizeof(uint32_t));
    if (tokens.at == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < tokens.count; i++)
        tokens.at[i] = (uint32_t)data[i * 4] | (uint32_t)data[i * 4 + 1] << 8 |
                       (uint32_t)data[i * 4 + 2] << 16 | (uint32_t)data[i * 4 + 3] << 24;
    *ret_tokens = tokens;
    return 0;
}

static bool is_text(const uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (data[i] >= 0x7f || (data[i] < 0x20 && !is_separator((char)data[i])))
            return false;
    return true;
}

static int read_all(int fd, uint8_t *buffer, size_t *ret_bytes)
{
    size_t used = 0;

    while (used < FILE_BYTES_MAX) {
        ssize_t got = read(fd, buffer + used, FILE_BYTES_MAX - used);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0) {
            *ret_bytes = used;
            return 0;
        }
        used += (size_t)got;
    }
    return -E2BIG;
}

int kvt_ctl_tokens_load(struct kvt_ctl_tokens *ret_tokens, const char *path, char *ret_why,
                        size_t why_bytes)
{
    kvt_autofree uint8_t *buffer = kvt_alloc_zeroed(FILE_BYTES_MAX, 1);
    kvt_autoclose int owned_fd = -1;
    int fd = STDIN_FILENO, r;
    size_t bytes = 0;

    ret_why[0] = '\0';
    if (buffer == NULL)
        return -ENOMEM;
    if (strcmp(path, "-") != 0) {
        owned_fd = open(path, O_RDONLY | O_CLOEXEC);
        if (owned_fd < 0)
            return -errno;
        fd = owned_fd;
    }
    r = read_all(fd, buffer, &bytes);
    if (r < 0)
        return r;
    if (is_text(buffer, bytes))
        return kvt_ctl_tokens_parse(ret_tokens, (const char *)buffer, bytes, ret_why, why_bytes);
    return parse_binary(ret_tokens, buffer, bytes, ret_why, why_bytes);
}
