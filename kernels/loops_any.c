/* The loops for whatever vectors the build's target has. */
#include "kernels/loops.h"

#include "kernels/loops_body.h"

KVT_LOOPS_DEFINE(plain, );

const struct kvt_loops *kvt_loops(void)
{
    return &loops_plain;
}

uint32_t kvt_loops_list(const struct kvt_loops *list[static 4])
{
    list[0] = &loops_plain;
    return 1;
}
