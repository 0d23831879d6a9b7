/* libcuda: the driver. PyTorch asks it for virtual memory (expandable segments) and for its context. */
#include "cuda.h"
#include "emulator.h"

/* ---- virtual memory: addresses and memory apart ---- */

typedef struct { size_t bytes; int device; } Memory; /* what a CUmemGenericAllocationHandle points to */

int cuMemAddressReserve(uintptr_t *address, size_t bytes, size_t alignment, uintptr_t wanted,
                        unsigned long long flags) {
    (void)wanted, (void)flags;
    return device_reserve(address, bytes, alignment);
}

int cuMemAddressFree(uintptr_t address, size_t bytes) {
    (void)bytes;
    device_unreserve(address);
    return SUCCESS;
}

int cuMemCreate(Memory **handle, size_t bytes, const struct CUmemAllocationProp *properties, unsigned long long flags) {
    (void)flags;
    int status = device_take(bytes, properties->location_id);
    if (status != SUCCESS) return status;
    *handle = malloc(sizeof **handle);
    **handle = (Memory){bytes, properties->location_id};
    return SUCCESS;
}

int cuMemRelease(Memory *handle) {
    device_give(handle->bytes, handle->device);
    free(handle);
    return SUCCESS;
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    (void)properties, (void)option;
    *bytes = PAGE_BYTES;
    return SUCCESS;
}

/* ---- device and context ---- */

extern int cudaDeviceGetAttribute(int *value, int attribute, int device); /* the numbers are the runtime's */
extern int cudaMemGetInfo(size_t *left, size_t *total);
extern int cudaGetDeviceCount(int *count);

int cuInit(unsigned flags) {
    (void)flags;
    return SUCCESS;
}

int cuDriverGetVersion(int *version) {
    *version = CUDA_MAJOR * 1000 + (CUDA_MAJOR < 13 ? 90 : 0);
    return SUCCESS;
}

int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }

int cuDeviceGet(int *device, int index) {
    *device = index;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "%s", card_name());
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)card("memory");
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t *left, size_t *total) { return cudaMemGetInfo(left, total); }

/* The numbers are the runtime's too; features that PyTorch would only use across machines are not there. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}

static void *context(void) {
    static void *only;
    return only ? only : (only = new_handle());
}

int cuCtxGetCurrent(void **out) {
    *out = context();
    return SUCCESS;
}

int cuCtxGetDevice(int *device) {
    *device = current_device;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **out, int device) {
    (void)device;
    return cuCtxGetCurrent(out);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    if (flags) *flags = 0;
    if (active) *active = 1;
    return SUCCESS;
}

int cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer) {
    int device = device_of((void *)pointer);
    if (device < 0) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)value = context(); break;
    case 2: *(unsigned *)value = 2; break; /* CU_MEMORYTYPE_DEVICE */
    case 3: *(uintptr_t *)value = pointer; break;
    case 9: *(int *)value = device; break;
    default: return NOT_SUPPORTED;
    }
    return SUCCESS;
}

int cuGetErrorString(int error, const char **words) {
    *words = error == OUT_OF_MEMORY ? "out of memory" : "error of the emulated driver";
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) { return cuGetErrorString(error, name); }

/* ---- kernels that are compiled while the program runs (Triton, and with it torch.compile) ---- */

int cuModuleLoadData(void **module, const void *image) {
    (void)image;
    *module = new_handle();
    return SUCCESS;
}

int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module, (void)name;
    *function = new_handle();
    return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == 4 ? 32 : attribute == 0 ? 1024 : 0; /* registers; most threads of a block */
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    (void)function, (void)shared;
    *blocks = (int)(card("threads") / (threads > 0 ? threads : 1));
    return SUCCESS;
}

int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *configuration) {
    (void)function, (void)configuration;
    *clusters = 1;
    return SUCCESS;
}

int cuModuleLoad(void **module, const char *path) {
    (void)path;
    return cuModuleLoadData(module, NULL);
}

int cuCtxPopCurrent_v2(void **out) { return cuCtxGetCurrent(out); }

int cuCtxGetLimit(size_t *bytes, int limit) {
    (void)limit;
    *bytes = 1024; /* of stack, for each thread */
    return SUCCESS;
}

/* Of Triton's tensor descriptors only kernels read the 128 bytes. */
int cuTensorMapEncodeTiled(void *map) {
    memset(map, 0, 128);
    return SUCCESS;
}

int cuTensorMapEncodeIm2col(void *map) { return cuTensorMapEncodeTiled(map); }
