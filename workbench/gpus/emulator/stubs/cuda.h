/* The types of CUDA 12 and 13 that the stubs touch. Facts of NVIDIA's headers (cuda_runtime_api.h, driver_types.h, */
/* cuda.h), declared here because a machine without CUDA has no such headers. CUDA_MAJOR comes from the compiler's   */
/* command line; a test compares sizes and offsets with NVIDIA's headers where they are installed.                  */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifndef CUDA_MAJOR
#define CUDA_MAJOR 13
#endif

typedef int cudaError_t;
typedef void *cudaStream_t;
typedef void *cudaEvent_t;
typedef struct { unsigned x, y, z; } dim3;

struct cudaDeviceProp {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if CUDA_MAJOR < 13
    int clockRate;
#endif
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
#if CUDA_MAJOR < 13
    int deviceOverlap;
#endif
    int multiProcessorCount;
#if CUDA_MAJOR < 13
    int kernelExecTimeoutEnabled;
#endif
    int integrated, canMapHostMemory;
#if CUDA_MAJOR < 13
    int computeMode;
    int texturesAndSurfaces[40];
#else
    int texturesAndSurfaces[39];
#endif
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount;
    int unifiedAddressing;
#if CUDA_MAJOR < 13
    int memoryClockRate;
#endif
    int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor;
    int streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
#if CUDA_MAJOR < 13
    int singleToDoublePrecisionPerfRatio;
#endif
    int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem;
    int cooperativeLaunch;
#if CUDA_MAJOR < 13
    int cooperativeMultiDeviceLaunch;
#endif
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
    int accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int rest[76]; /* newer fields and NVIDIA's reserve; a program reads zeros there */
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
    int rest[23];
};

struct cudaPointerAttributes {
    int type; /* 0 unregistered, 1 host, 2 device, 3 managed */
    int device;
    void *devicePointer, *hostPointer;
};
enum { POINTER_HOST = 1, POINTER_DEVICE = 2, POINTER_MANAGED = 3 };

struct CUmemAllocationProp { /* cuMemCreate reads the device from it */
    int type, requestedHandleTypes, location_type, location_id;
};
