/* A libnvidia-ml.so.1 without GPUs: it answers from a state file that may be changed at any time.
 *
 *   FAKE_NVML_STATE   the file, as fake.py writes it: every tray of a rack
 *   FAKE_NVML_TRAY    which of them this process runs on; else RACKRUN_TRAY, which agents set; else the first
 *
 * -DNO_NAME leaves the function NAME out, as a driver that is too old does. The layout below is that of fake.py; the
 * sizes in the file's head are compared, so that the two cannot part unnoticed.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15,
       VERSION_MISMATCH = 25, UNKNOWN = 999 };
enum { FIELD_LINK_STATE = 165, FIELD_RECOVERY_ACTION = 230 };
enum { CALL_IDENTITY, CALL_FABRIC, CALL_PLATFORM, CALL_FIELDS, CALL_LINKS, CALL_REMAPPED, CALL_ECC, CALL_CLOCKS,
       CALL_AFFINITY, CALL_EVENTS, CALLS };
#define POLL_MS 5 /* a whole rack of these runs on one machine */
#define ONCE 0x10000u
#define GPUS 16
#define LINKS 36
#define EVENTS 256
#define MASK_WORDS 16
#define USERS 4

typedef struct {
    char uuid[96], serial[32], bus_id[32], name[64];
    uint8_t cluster[16], platform[40]; /* platform: the struct from its fifth byte on */
    uint32_t module_id, fabric_state, fabric_status, clique, fabric_mask, fabric_summary;
    uint32_t links, link_state[LINKS], remapped[4], recovery_action, sram_threshold, error;
    uint32_t compute_mode, mig, user_count, users[USERS]; /* users: the pids that compute on it */
    uint32_t result[CALLS]; /* what these calls return instead of an answer */
    uint64_t ecc_uncorrected, clock_reasons, nodes, cpus[MASK_WORDS];
} gpu_t;

typedef struct {
    uint32_t gpu, unused;
    uint64_t type, data;
} event_t;

typedef struct {
    char name[64], driver[80];
    uint32_t gpus, init_result, hang, fabric_version, event_count, calls, readings, delivered, cuda;
    gpu_t gpu[GPUS];
    event_t event[EVENTS];
} tray_t;

typedef struct {
    uint32_t magic, tray_bytes, trays, unused;
    tray_t tray[];
} state_t;

static volatile tray_t *tray;

static void pause_ms(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, 0);
}

static void hang(void) {
    while (tray && tray->hang) pause_ms(POLL_MS);
}

static volatile gpu_t *of(void *device) { return &tray->gpu[(uintptr_t)device - 1]; }

/* Every call about a device begins with this: it may hang, the GPU may be lost, the call may be refused. */
#define ENTER(device, call)                                          \
    if (!tray) return UNINITIALIZED;                                 \
    hang();                                                          \
    __atomic_add_fetch(&tray->calls, 1, __ATOMIC_RELAXED);           \
    volatile gpu_t *gpu = of(device);                                \
    if (gpu->error) return gpu->error;                               \
    uint32_t result = gpu->result[call];                             \
    if (result & ONCE) gpu->result[call] = 0;                        \
    if (result) return result & ~ONCE;

static int text(char *out, unsigned size, volatile const char *in) {
    if (strlen((const char *)in) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(out, (const char *)in);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("FAKE_NVML_STATE"), *name = getenv("FAKE_NVML_TRAY");
    if (!name) name = getenv("RACKRUN_TRAY");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    struct stat at;
    if (fd < 0) return 9; /* the driver is not loaded */
    if (fstat(fd, &at) || at.st_size < (long)sizeof(state_t)) return close(fd), UNKNOWN;
    state_t *state = mmap(0, at.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (state == MAP_FAILED || state->magic != 0x6c6d766e || state->tray_bytes != sizeof(tray_t)) return UNKNOWN;
    for (uint32_t i = 0; i < state->trays; i++)
        if (!name || !strcmp(name, state->tray[i].name)) {
            tray = &state->tray[i];
            hang();
            int result = tray->init_result;
            if (result) tray = 0;
            return result;
        }
    return 9;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == SUCCESS ? "Success" : "fake"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    if (!tray) return UNINITIALIZED;
    hang();
    return text(out, size, tray->driver);
}
#ifndef NO_nvmlSystemGetCudaDriverVersion_v2
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    if (!tray) return UNINITIALIZED;
    hang();
    *version = (int)tray->cuda;
    return SUCCESS;
}
#endif
#ifndef NO_nvmlDeviceGetCount_v2
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!tray) return UNINITIALIZED;
    hang();
    *count = tray->gpus;
    __atomic_add_fetch(&tray->readings, 1, __ATOMIC_RELEASE); /* each reading begins with this call */
    return SUCCESS;
}
#endif
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (!tray) return UNINITIALIZED;
    hang();
    if (index >= tray->gpus) return INVALID_ARGUMENT;
    *device = (void *)(uintptr_t)(index + 1);
    return tray->gpu[index].error == GPU_IS_LOST ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    ENTER(device, CALL_IDENTITY)
    return text(out, size, gpu->uuid);
}
int nvmlDeviceGetSerial(void *device, char *out, unsigned size) {
    ENTER(device, CALL_IDENTITY)
    return gpu->serial[0] ? text(out, size, gpu->serial) : NOT_SUPPORTED;
}
int nvmlDeviceGetName(void *device, char *out, unsigned size) {
    ENTER(device, CALL_IDENTITY)
    return text(out, size, gpu->name);
}
int nvmlDeviceGetModuleId(void *device, unsigned *module) {
    ENTER(device, CALL_IDENTITY)
    *module = gpu->module_id;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(void *device, unsigned *mode) {
    ENTER(device, CALL_IDENTITY)
    *mode = gpu->compute_mode;
    return SUCCESS;
}
#ifndef NO_nvmlDeviceGetMigMode
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    ENTER(device, CALL_IDENTITY)
    *current = *pending = gpu->mig;
    return SUCCESS;
}
#endif

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process_t;

#ifndef NO_nvmlDeviceGetComputeRunningProcesses_v3
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
    ENTER(device, CALL_IDENTITY)
    unsigned room = *count;
    *count = gpu->user_count;
    if (room < gpu->user_count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < gpu->user_count && i < USERS; i++)
        out[i] = (process_t){gpu->users[i], 1ull << 30, ~0u, ~0u};
    return SUCCESS;
}
#endif

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_t;

int nvmlDeviceGetPciInfo_v3(void *device, pci_t *pci) {
    ENTER(device, CALL_IDENTITY)
    memset(pci, 0, sizeof *pci);
    return text(pci->bus_id, sizeof pci->bus_id, gpu->bus_id);
}

#ifndef NO_nvmlDeviceGetGpuFabricInfoV
int nvmlDeviceGetGpuFabricInfoV(void *device, uint32_t *info) {
    ENTER(device, CALL_FABRIC)
    unsigned version = info[0] >> 24;
    if (version > tray->fabric_version || info[0] != (version == 3 ? 0x3000028u : version == 2 ? 0x2000024u : 0))
        return VERSION_MISMATCH;
    memcpy(info + 1, (const void *)gpu->cluster, 16);
    info[5] = gpu->fabric_status;
    info[6] = gpu->clique;
    info[7] = 0xabababab; /* what is between the fields is undefined */
    *(uint8_t *)(info + 7) = gpu->fabric_state;
    info[8] = gpu->fabric_mask;
    if (version == 3) info[9] = 0xcdcdcd00u | (gpu->fabric_summary & 0xff);
    return SUCCESS;
}
#endif
#ifndef NO_nvmlDeviceGetPlatformInfo
int nvmlDeviceGetPlatformInfo(void *device, uint32_t *info) {
    ENTER(device, CALL_PLATFORM)
    if (info[0] != 0x200002c) return VERSION_MISMATCH;
    memcpy(info + 1, (const void *)gpu->platform, 40);
    return SUCCESS;
}
#endif

typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency;
    uint32_t type, result;
    uint64_t value;
} field_t;

int nvmlDeviceGetFieldValues(void *device, int count, field_t *fields) {
    ENTER(device, CALL_FIELDS)
    for (field_t *f = fields; f < fields + count; f++) {
        f->type = 1;
        f->result = SUCCESS;
        f->value = 0xfefefefe00000000u; /* only the low half is the answer */
        if (f->field == FIELD_RECOVERY_ACTION)
            f->value |= gpu->recovery_action;
        else if (f->field == FIELD_LINK_STATE && f->scope < gpu->links && !gpu->result[CALL_LINKS])
            f->value |= gpu->link_state[f->scope];
        else
            f->result = f->field == FIELD_LINK_STATE && gpu->links ? INVALID_ARGUMENT : NOT_SUPPORTED;
    }
    return SUCCESS;
}
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
    ENTER(device, CALL_IDENTITY)
    if (link >= gpu->links) return gpu->links ? INVALID_ARGUMENT : NOT_SUPPORTED;
    *active = gpu->link_state[link] == 1 || gpu->link_state[link] == 2;
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failure) {
    ENTER(device, CALL_REMAPPED)
    *cor = gpu->remapped[0], *unc = gpu->remapped[1], *pending = gpu->remapped[2], *failure = gpu->remapped[3];
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(void *device, unsigned kind, unsigned counter, unsigned long long *count) {
    ENTER(device, CALL_ECC)
    *count = kind == 1 && counter == 0 ? gpu->ecc_uncorrected : 0;
    return SUCCESS;
}
int nvmlDeviceGetSramEccErrorStatus(void *device, uint32_t *status) {
    ENTER(device, CALL_ECC)
    if (status[0] != 0x1000068) return VERSION_MISMATCH;
    memset(status + 1, 0, 0x68 - 4);
    status[24] = gpu->sram_threshold;
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    ENTER(device, CALL_CLOCKS)
    *reasons = gpu->clock_reasons;
    return SUCCESS;
}
static int affinity(volatile const uint64_t *from, unsigned have, unsigned words, unsigned long *out) {
    for (unsigned i = 0; i < words; i++) out[i] = i < have ? from[i] : 0;
    return SUCCESS;
}
int nvmlDeviceGetCpuAffinityWithinScope(void *device, unsigned words, unsigned long *out, unsigned scope) {
    ENTER(device, CALL_AFFINITY)
    return scope > 1 ? INVALID_ARGUMENT : affinity(gpu->cpus, MASK_WORDS, words, out);
}
int nvmlDeviceGetMemoryAffinity(void *device, unsigned words, unsigned long *out, unsigned scope) {
    ENTER(device, CALL_AFFINITY)
    return scope > 1 ? INVALID_ARGUMENT : affinity(&gpu->nodes, 1, words, out);
}

/* -- events: a set sees what is reported after it was made, of the devices and kinds it is registered for */
typedef struct {
    uint32_t seen;
    uint64_t kinds[GPUS];
} set_t;

typedef struct {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} event_data_t;

int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
    ENTER(device, CALL_EVENTS)
    *types = 0xf;
    return SUCCESS;
}
int nvmlEventSetCreate(set_t **set) {
    if (!tray) return UNINITIALIZED;
    *set = calloc(1, sizeof **set);
    (*set)->seen = __atomic_load_n(&tray->event_count, __ATOMIC_ACQUIRE);
    return SUCCESS;
}
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, set_t *set) {
    ENTER(device, CALL_EVENTS)
    if (types & ~0xfull) return NOT_SUPPORTED;
    set->kinds[(uintptr_t)device - 1] |= types;
    return SUCCESS;
}
int nvmlEventSetWait_v2(set_t *set, event_data_t *data, unsigned timeout_ms) {
    for (unsigned waited = 0;; waited += POLL_MS) {
        hang();
        while (set->seen < __atomic_load_n(&tray->event_count, __ATOMIC_ACQUIRE)) {
            volatile event_t *event = &tray->event[set->seen++ % EVENTS];
            if (!(set->kinds[event->gpu % GPUS] & event->type)) continue;
            memset(data, 0xff, sizeof *data);
            data->device = (void *)(uintptr_t)(event->gpu + 1);
            data->type = event->type;
            data->data = event->data;
            __atomic_store_n(&tray->delivered, set->seen, __ATOMIC_RELEASE);
            return SUCCESS;
        }
        for (unsigned i = 0; i < tray->gpus; i++)
            if (set->kinds[i] && tray->gpu[i].error == GPU_IS_LOST) return GPU_IS_LOST;
        if (waited >= timeout_ms) return TIMEOUT;
        pause_ms(POLL_MS);
    }
}
int nvmlEventSetFree(set_t *set) {
    free(set);
    return SUCCESS;
}
