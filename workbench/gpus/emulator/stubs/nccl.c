/* libnccl: one process a rank. Ranks meet through PyTorch's own store; nothing is sent from one to another. */
#include "emulator.h"

typedef struct { char bytes[128]; } UniqueId;
typedef struct { int rank, ranks, device; } Communicator;

extern int cudaMalloc(void **pointer, size_t bytes);
extern int cudaFree(void *pointer);

static int make(Communicator **out, int ranks, int rank) {
    *out = malloc(sizeof **out);
    **out = (Communicator){rank, ranks, current_device};
    return SUCCESS;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return SUCCESS;
}

int ncclGetUniqueId(UniqueId *id) {
    memset(id, 1, sizeof *id);
    return SUCCESS;
}

int ncclCommInitRank(Communicator **out, int ranks, UniqueId id, int rank) {
    (void)id;
    return make(out, ranks, rank);
}

int ncclCommInitRankConfig(Communicator **out, int ranks, UniqueId id, int rank, void *settings) {
    (void)id, (void)settings;
    return make(out, ranks, rank);
}

int ncclCommInitRankScalable(Communicator **out, int ranks, int rank, int ids, UniqueId *id, void *settings) {
    (void)ids, (void)id, (void)settings;
    return make(out, ranks, rank);
}

int ncclCommInitAll(Communicator **out, int ranks, const int *devices) {
    (void)devices;
    for (int rank = 0; rank < ranks; rank++) make(&out[rank], ranks, rank);
    return SUCCESS;
}

int ncclCommSplit(Communicator *whole, int color, int key, Communicator **out, void *settings) {
    (void)color, (void)settings;
    return make(out, whole->ranks, key);
}

int ncclCommCount(const Communicator *whole, int *ranks) {
    *ranks = whole->ranks;
    return SUCCESS;
}

int ncclCommUserRank(const Communicator *whole, int *rank) {
    *rank = whole->rank;
    return SUCCESS;
}

int ncclCommCuDevice(const Communicator *whole, int *device) {
    *device = whole->device;
    return SUCCESS;
}

int ncclCommGetAsyncError(Communicator *whole, int *status) {
    (void)whole;
    *status = SUCCESS;
    return SUCCESS;
}

/* In place, a rank's own share stands for the sum of all. */
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *all, void *stream) {
    (void)count, (void)type, (void)operation, (void)all, (void)stream;
    if (from != to) card_writes_at(to);
    return SUCCESS;
}

int ncclMemAlloc(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes) ? 1 : SUCCESS; }
int ncclMemFree(void *pointer) { return cudaFree(pointer); }

const char *ncclGetErrorString(int status) { return status ? "error of the emulated NCCL" : "no error"; }
const char *ncclGetLastError(void *whole) {
    (void)whole;
    return "";
}

int ncclRedOpCreatePreMulSum(int *operation, void *factor, int type, int lies, Communicator *all) {
    (void)factor, (void)type, (void)lies, (void)all;
    *operation = 5; /* the first that is not built in */
    return SUCCESS;
}

int ncclCommRegister(const Communicator *all, void *buffer, size_t bytes, void **handle) {
    (void)all, (void)buffer, (void)bytes;
    *handle = new_handle();
    return SUCCESS;
}
