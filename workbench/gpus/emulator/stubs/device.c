/* libcudart: what the card answers when it is asked what it is. PyTorch chooses kernels and their scratch by it. */
#include "cuda.h"
#include "emulator.h"

#include <dlfcn.h>

/* ---- how many there are, and which one is meant ---- */

/* CUDA_VISIBLE_DEVICES hides cards as it does on a real machine: by how many numbers it names. */
static int device_count(void) {
    int there = (int)card("count"), named = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return there;
    for (const char *at = visible; *at && *at != '-'; at++) named += at == visible || at[-1] == ',';
    return named < there ? named : there;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = device_count();
    return *count ? SUCCESS : NO_DEVICE;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return SUCCESS;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    current_device = device;
    return SUCCESS;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return SUCCESS;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_MAJOR * 1000 + (CUDA_MAJOR < 13 ? 90 : 0); /* the last of its kind: no program is too new for it */
    return SUCCESS;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* ---- properties ---- */

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", card_name());
    out->uuid[15] = (unsigned char)(device + 1);
    out->totalGlobalMem = (size_t)card("memory");
    out->sharedMemPerBlock = 48 << 10;
    out->regsPerBlock = out->regsPerMultiprocessor = 1 << 16;
    out->warpSize = 32;
    out->memPitch = 0x7fffffff;
    out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 0x7fffffff;
    out->maxGridSize[1] = out->maxGridSize[2] = 0xffff;
    out->totalConstMem = 1 << 16;
    out->major = (int)card("major");
    out->minor = (int)card("minor");
    out->textureAlignment = 512;
    out->texturePitchAlignment = 32;
    out->multiProcessorCount = (int)card("sms");
    out->l2CacheSize = (int)card("l2");
    out->canMapHostMemory = out->concurrentKernels = out->unifiedAddressing = out->managedMemory = 1;
    out->concurrentManagedAccess = out->pageableMemoryAccess = out->cooperativeLaunch = 1;
    out->pciBusID = device + 1;
    out->asyncEngineCount = 3;
    out->maxThreadsPerMultiProcessor = (int)card("threads");
    out->sharedMemPerMultiprocessor = (size_t)card("shared_bytes");
    out->sharedMemPerBlockOptin = (size_t)card("shared_bytes_of_a_block");
    out->reservedSharedMemPerBlock = out->major >= 8 ? 1024 : 0;
    out->maxBlocksPerMultiProcessor = (int)card("blocks");
    return SUCCESS;
}

cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *out, int device) {
    return cudaGetDeviceProperties(out, device); /* the name that CUDA 12 gives it */
}

/* The numbers are those of the enumeration cudaDeviceAttr. Whatever is not listed is zero: the card has it not. */
cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    struct cudaDeviceProp card_;
    int status = cudaGetDeviceProperties(&card_, device);
    *value = 0;
    if (status != SUCCESS) return status;
    switch (attribute) {
    case 1: *value = card_.maxThreadsPerBlock; break;
    case 2: case 3: *value = card_.maxThreadsDim[0]; break;
    case 4: *value = card_.maxThreadsDim[2]; break;
    case 5: *value = card_.maxGridSize[0]; break;
    case 6: case 7: *value = card_.maxGridSize[1]; break;
    case 8: *value = (int)card_.sharedMemPerBlock; break;
    case 9: *value = (int)card_.totalConstMem; break;
    case 10: *value = card_.warpSize; break;
    case 12: case 82: *value = card_.regsPerBlock; break;
    case 16: *value = card_.multiProcessorCount; break;
    case 19: case 41: case 83: *value = 1; break; /* mapped host memory, unified addresses, managed memory */
    case 39: *value = card_.maxThreadsPerMultiProcessor; break;
    case 75: *value = card_.major; break;
    case 76: *value = card_.minor; break;
    case 81: *value = (int)card_.sharedMemPerMultiprocessor; break;
    case 97: *value = (int)card_.sharedMemPerBlockOptin; break;
    case 106: *value = card_.maxBlocksPerMultiProcessor; break;
    case 111: *value = (int)card_.reservedSharedMemPerBlock; break;
    }
    return SUCCESS;
}

/* ---- words ---- */

const char *cudaGetErrorName(cudaError_t error) {
    return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaErrorOfAnEmulatedGpu";
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case 900: return "operation not permitted when stream is capturing";
    case NOT_SUPPORTED: return "operation not supported by the emulated GPU";
    default: return "invalid argument";
    }
}

/* ---- the driver's functions, which PyTorch asks for by name ---- */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, int *found) {
    (void)version, (void)flags;
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : NULL;
    if (found) *found = *function ? 0 : 1; /* cudaDriverEntryPointSymbolNotFound */
    return SUCCESS;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, found);
}
