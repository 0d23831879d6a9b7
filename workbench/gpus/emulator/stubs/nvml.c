/* libnvidia-ml: PyTorch asks it who else uses the card before it words an out-of-memory message, and which links
   there are between cards before it makes expandable segments. Nobody, and none. */
#include "emulator.h"

enum { NVML_NOT_SUPPORTED = 3 };
extern int cudaGetDeviceCount(int *count);

int nvmlDeviceGetCount_v2(unsigned *count) {
    cudaGetDeviceCount((int *)count);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    unsigned number = 1;
    sscanf(bus, "%*x:%x", &number);
    *device = (void *)(uintptr_t)number;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    (void)device, (void)processes;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012zx", (size_t)device);
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    (void)device;
    snprintf(text, length, "%s", card_name());
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *bytes) { /* total, free, used */
    int index = (int)(uintptr_t)device - 1;
    bytes[0] = (unsigned long long)card("memory");
    bytes[1] = device_left(index);
    bytes[2] = bytes[0] - bytes[1];
    return SUCCESS;
}

/* A card that is not there does nothing, and so stays cold. */
int nvmlDeviceGetUtilizationRates(void *device, unsigned *percent) { /* of the multiprocessors, of memory */
    (void)device;
    percent[0] = percent[1] = 0;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees) {
    (void)device, (void)sensor;
    *degrees = 0;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    (void)device;
    *milliwatts = 0;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(void *device, int of, unsigned *megahertz) {
    (void)device, (void)of;
    *megahertz = 0;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

/* All fields but the version are zero: a card without a fabric. PyTorch takes an error here as fatal. */
int nvmlDeviceGetGpuFabricInfoV(void *device, uint32_t *info) {
    (void)device;
    memset(info + 1, 0, 28);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) {
    (void)device, (void)link, (void)type;
    return NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) {
    (void)device, (void)link, (void)info;
    return NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(void *device, int count, void *values) {
    (void)device, (void)count, (void)values;
    return NVML_NOT_SUPPORTED;
}

const char *nvmlErrorString(int status) { return status ? "not supported by the emulated GPU" : "success"; }
int nvmlInit(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return SUCCESS;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
