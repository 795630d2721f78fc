/* Which GPUs L1 may use, and why not the others: questions to CUDA whose answers become words.
 *
 *   parse   `gpus` of the configuration, text alone
 *   find    versions, the GPUs that CUDA shows, those that are meant. Makes no context on a GPU
 *   size    of one GPU: makes its context, asks for free memory, sets the bytes of its arena
 *
 * A GPU that cannot be used is no error: its state is REFUSED, and `why` says why in one line.
 * Nothing here keeps anything. Any thread that may call CUDA (cuda_calls.h). */
#pragma once

#include "tiers/device/device.h"

#define KVT_PROBE_CHOICES_MAX KVT_ZONES_MAX
#define KVT_PROBE_UUID_DIGITS_MIN 8u

struct kvt_probe_choice {
    int index;                                /* -1: by UUID */
    char digits[2 * KVT_CUDA_UUID_BYTES + 1]; /* how it begins: lower case, no dashes */
};

struct kvt_probe_choices {
    bool is_all;
    uint32_t count;
    struct kvt_probe_choice choices[KVT_PROBE_CHOICES_MAX];
};

/* 0; -EINVAL: *ret_why says which word is wrong, and how. */
KVT_MUST_USE int kvt_probe_parse(const char *gpus, struct kvt_probe_choices *ret_choices,
                                 char ret_why[KVT_DEVICE_LINE_BYTES]);

struct kvt_probe {
    struct kvt_device_report report;
    struct kvt_device_gpu gpus[KVT_DEVICE_GPUS_MAX]; /* report.gpus_count of them, in the order of
                                                        the configuration; at most KVT_ZONES_MAX
                                                        are not refused */
};

/* 0: at least one GPU is not refused; KVT_DEVICE_E_NONE, -EINVAL: report.why. *ret_probe is set in
 * every case. @calls: NULL is a build without CUDA. @visible: the value of CUDA_VISIBLE_DEVICES or
 * NULL, for the text alone. */
KVT_MUST_USE int kvt_probe_find(const struct kvt_cuda_calls *calls,
                                const struct kvt_device_config *config, const char *visible,
                                struct kvt_probe *ret_probe);

/* Sets arena_bytes and staging_bytes of @gpu, or refuses it. The calling thread's current device is
 * @gpu's afterwards. */
void kvt_probe_size(const struct kvt_cuda_calls *calls, const struct kvt_device_config *config,
                    struct kvt_device_gpu *gpu);

/* The line of a probe of which no GPU is used; and the report keeps each with its own reason. */
void kvt_probe_tell_none(struct kvt_probe *probe);

/* Why CUDA does not work here at all, in one line. @error is device_count's, 0: it found
 * none. */
void kvt_probe_tell_error(const struct kvt_cuda_calls *calls, int error, int driver_version,
                          int runtime_version, const char *visible,
                          char ret_why[KVT_DEVICE_LINE_BYTES]);

/* The NUMA node of a PCI device ("0000:3b:00.0"), -1: not known. @sysfs: "/sys". */
int kvt_probe_numa_node(const char *sysfs, const char *pci);
/* Whether the machine has more than one NUMA node; one that does not tell has one. */
bool kvt_probe_has_numa(const char *sysfs);
struct kvt_device_found {
    struct kvt_probe probe;
    int result; /* kvt_probe_find's */
    bool has_numa;
};
/* kvt_device_find, with @calls for CUDA. */
void kvt_probe_look(const struct kvt_cuda_calls *calls, const struct kvt_device_config *config,
                    struct kvt_device_found *ret_found);
