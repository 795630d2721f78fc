#include "daemon/base/api.h"

#include <stdarg.h>
#include <stdio.h>

void kvt_op_fail(struct kvt_op *op, enum kvt_code code, const char *format, ...)
{
    va_list args;

    KVT_ASSERT(code != KVT_CODE_OK);
    op->code = code;
    va_start(args, format);
    (void)vsnprintf(op->message, sizeof(op->message), format, args);
    va_end(args);
}

const char *kvt_op_kind_text(enum kvt_op_kind kind)
{
    static const char *const texts[KVT_OP_KINDS] = {
        [KVT_OP_OPEN_NAMESPACE] = "OpenNamespace",
        [KVT_OP_ATTACH] = "Attach",
        [KVT_OP_DETACH] = "Detach",
        [KVT_OP_LOOKUP] = "Lookup",
        [KVT_OP_PROMOTE] = "Promote",
        [KVT_OP_RESERVE] = "Reserve",
        [KVT_OP_DEMOTE] = "Demote",
        [KVT_OP_QUIESCE] = "Quiesce",
        [KVT_OP_RELEASE] = "Release",
        [KVT_OP_EVICT] = "Evict",
        [KVT_OP_RESET] = "Reset",
        [KVT_OP_STATS] = "Stats",
        [KVT_OP_DUMP] = "Dump",
        [KVT_OP_HEALTH] = "Health",
    };

    return (unsigned)kind < KVT_OP_KINDS ? texts[kind] : "?";
}
