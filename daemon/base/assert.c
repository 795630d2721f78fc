#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/def.h"

void kvt_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "<2>kvtierd: bug: %s:%d: %s does not hold\n", file, line, condition);
    fflush(stderr);
    abort();
}
