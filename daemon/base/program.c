#include "daemon/base/program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A directory can be "executed" too. */
static int check_program(const char *path)
{
    struct stat status;

    if (stat(path, &status) != 0 || access(path, X_OK) != 0)
        return -errno;
    return S_ISREG(status.st_mode) ? 0 : -EACCES;
}

static bool try(char ret_path[KVT_PROGRAM_PATH_BYTES], const char *folder, size_t folder_bytes,
                const char *below, const char *name)
{
    char path[KVT_PROGRAM_PATH_BYTES];
    int bytes = snprintf(path, sizeof(path), "%.*s%s/%s", (int)folder_bytes, folder, below, name);

    if (bytes < 0 || (size_t)bytes >= sizeof(path) || check_program(path) != 0)
        return false;
    memcpy(ret_path, path, (size_t)bytes + 1);
    return true;
}

int kvt_program_find_near(const char *name, const char *exe_path, const char *libexec,
                          char ret_path[KVT_PROGRAM_PATH_BYTES])
{
    static const char *const beside[] = {"", "/../libexec/kvtierd", "/../tiers/index",
                                         "/../../tiers/index"};
    const char *slash = strrchr(exe_path, '/');

    for (size_t i = 0; slash != NULL && i < KVT_COUNT_OF(beside); i++)
        if (try(ret_path, exe_path, (size_t)(slash - exe_path), beside[i], name))
            return 0;
    return try(ret_path, libexec, strlen(libexec), "", name) ? 0 : kvt_trace(-ENOENT);
}

int kvt_program_find(const char *name, char ret_path[KVT_PROGRAM_PATH_BYTES])
{
    const char *said = getenv("KVTIER_HELPER");
    char exe_path[KVT_PROGRAM_PATH_BYTES];
    ssize_t bytes;
    int r;

    if (said != NULL && said[0] != '\0') {
        r = strlen(said) < KVT_PROGRAM_PATH_BYTES ? check_program(said) : -ENAMETOOLONG;
        if (r < 0)
            return kvt_trace(r);
        memcpy(ret_path, said, strlen(said) + 1);
        return 0;
    }
    bytes = readlink("/proc/self/exe", exe_path, sizeof(exe_path) - 1);
    exe_path[bytes < 0 ? 0 : bytes] = '\0';
    return kvt_program_find_near(name, exe_path, KVT_LIBEXEC_DIR, ret_path);
}
