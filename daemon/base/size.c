#include "daemon/base/size.h"

#include <stdio.h>
#include <string.h>

struct unit {
    const char *text;
    uint64_t factor;
};

/* Rising, so that formatting finds the largest from the end. */
static const struct unit size_units[] = {
    {"B", 1}, {"KiB", KVT_KIB}, {"MiB", KVT_MIB}, {"GiB", KVT_GIB}, {"TiB", 1024 * KVT_GIB},
};
static const struct unit duration_units[] = {
    {"ns", 1},           {"us", KVT_NS_PER_US},      {"ms", KVT_NS_PER_MS},
    {"s", KVT_NS_PER_S}, {"min", 60 * KVT_NS_PER_S}, {"h", 3600 * KVT_NS_PER_S},
};

#define FRACTION_DIGITS_MAX 6u

struct number {
    uint64_t whole;
    uint64_t fraction; /* over fraction_of */
    uint64_t fraction_of;
    const char *unit; /* what follows the digits and blanks */
};

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static int parse_number(const char *text, struct number *ret_number)
{
    struct number number = {.fraction_of = 1};
    const char *at = text;
    uint32_t digits = 0;

    if (!is_digit(*at))
        return KVT_SIZE_E_SYNTAX;
    for (; is_digit(*at); at++) {
        if (__builtin_mul_overflow(number.whole, 10u, &number.whole) ||
            __builtin_add_overflow(number.whole, (uint64_t)(*at - '0'), &number.whole))
            return KVT_SIZE_E_RANGE;
    }
    if (*at == '.') {
        for (at++; is_digit(*at); at++, digits++) {
            if (digits == FRACTION_DIGITS_MAX)
                return KVT_SIZE_E_SYNTAX;
            number.fraction = number.fraction * 10 + (uint64_t)(*at - '0');
            number.fraction_of *= 10;
        }
        if (digits == 0)
            return KVT_SIZE_E_SYNTAX;
    }
    while (*at == ' ')
        at++;
    number.unit = at;
    *ret_number = number;
    return 0;
}

/* whole.fraction * factor, rounded down; false when it does not fit. */
static bool scale(const struct number *number, uint64_t factor, uint64_t *ret_value)
{
    uint64_t whole, part = 0;

    if (number->fraction != 0) {
        unsigned __int128 wide = (unsigned __int128)number->fraction * factor;

        part = (uint64_t)(wide / number->fraction_of);
    }
    if (__builtin_mul_overflow(number->whole, factor, &whole) ||
        __builtin_add_overflow(whole, part, &whole))
        return false;
    *ret_value = whole;
    return true;
}

static int parse(const char *text, const struct unit *units, uint32_t units_count,
                 uint64_t *ret_value)
{
    struct number number;
    int r = parse_number(text, &number);

    if (r != 0)
        return r;
    if (*number.unit == '\0' && number.whole == 0 && number.fraction == 0) {
        *ret_value = 0;
        return 0;
    }
    for (uint32_t i = 0; i < units_count; i++) {
        if (strcmp(number.unit, units[i].text) == 0)
            return scale(&number, units[i].factor, ret_value) ? 0 : KVT_SIZE_E_RANGE;
    }
    return KVT_SIZE_E_UNIT;
}

int kvt_size_parse(const char *text, uint64_t *ret_bytes)
{
    return parse(text, size_units, KVT_COUNT_OF(size_units), ret_bytes);
}

int kvt_duration_parse(const char *text, uint64_t *ret_ns)
{
    return parse(text, duration_units, KVT_COUNT_OF(duration_units), ret_ns);
}

int kvt_size_parse_share(const char *text, uint64_t whole_bytes, uint64_t *ret_bytes)
{
    struct number number;
    int r = parse_number(text, &number);
    unsigned __int128 share;

    if (r != 0)
        return r;
    if (strcmp(number.unit, "%") != 0)
        return kvt_size_parse(text, ret_bytes);
    if (number.whole > 100 || (number.whole == 100 && number.fraction != 0))
        return KVT_SIZE_E_RANGE;
    share = (unsigned __int128)(number.whole * number.fraction_of + number.fraction) * whole_bytes;
    *ret_bytes = (uint64_t)(share / number.fraction_of / 100);
    return 0;
}

const char *kvt_size_error_text(int result)
{
    switch (result) {
    case KVT_SIZE_E_SYNTAX:
        return "is not a number with a unit";
    case KVT_SIZE_E_UNIT:
        return "has no unit or an unknown one";
    case KVT_SIZE_E_RANGE:
        return "is too large";
    default:
        return "is valid";
    }
}

static void format(uint64_t value, const struct unit *units, uint32_t units_count, char *ret_text)
{
    uint32_t i = units_count - 1;

    while (i > 0 && (value == 0 || value % units[i].factor != 0))
        i--;
    (void)snprintf(ret_text, KVT_SIZE_TEXT_BYTES, "%llu%s",
                   (unsigned long long)(value / units[i].factor), units[i].text);
}

void kvt_size_format(uint64_t bytes, char ret_text[KVT_SIZE_TEXT_BYTES])
{
    format(bytes, size_units, KVT_COUNT_OF(size_units), ret_text);
}

void kvt_duration_format(uint64_t ns, char ret_text[KVT_SIZE_TEXT_BYTES])
{
    format(ns, duration_units, KVT_COUNT_OF(duration_units), ret_text);
}

void kvt_size_format_short(uint64_t bytes, char ret_text[KVT_SIZE_TEXT_BYTES])
{
    uint32_t i = KVT_COUNT_OF(size_units) - 1;
    double value;

    while (i > 0 && bytes < size_units[i].factor)
        i--;
    value = (double)bytes / (double)size_units[i].factor;
    (void)snprintf(ret_text, KVT_SIZE_TEXT_BYTES, "%.*f %s", i == 0 || value >= 100 ? 0 : 2, value,
                   size_units[i].text);
}
