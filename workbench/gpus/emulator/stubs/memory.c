/* libcudart: device memory, host memory, copies. Sizes are true; of values only those on the host exist. */
#define _GNU_SOURCE
#include "cuda.h"
#include "emulator.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- device memory ---- */

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    return device_allocate((uintptr_t *)pointer, bytes, current_device);
}

/* It waits for the card first, as everywhere. */
cudaError_t cudaFree(void *pointer) {
    host_waits();
    return device_free((uintptr_t)pointer);
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    (void)stream;
    return cudaMalloc(pointer, bytes);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    (void)stream;
    return cudaFree(pointer);
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *left = device_left(current_device);
    *total = (size_t)card("memory");
    return SUCCESS;
}

/* ---- host memory: real, since programs write it; which ranges CUDA knows decides how PyTorch copies ---- */

typedef struct Known {
    uintptr_t address;
    size_t bytes;
    int type;
    int ours; /* mapped here, and not the program's own memory that it registered */
    struct Known *next;
} Known;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Known *known;

static void remember(void *address, size_t bytes, int type, int ours) {
    Known *entry = malloc(sizeof *entry);
    pthread_mutex_lock(&lock);
    *entry = (Known){(uintptr_t)address, bytes, type, ours, known};
    known = entry;
    pthread_mutex_unlock(&lock);
}

static size_t forget(const void *address) {
    pthread_mutex_lock(&lock);
    Known **place = &known;
    while (*place && (*place)->address != (uintptr_t)address) place = &(*place)->next;
    Known *entry = *place;
    size_t bytes = entry ? entry->bytes : 0;
    if (entry) *place = entry->next;
    pthread_mutex_unlock(&lock);
    free(entry);
    return bytes;
}

/* The entry of an address; its type is 0 if there is none. */
static Known found_at(const void *pointer) {
    Known found = {0};
    pthread_mutex_lock(&lock);
    for (Known *entry = known; entry && !found.type; entry = entry->next)
        if ((uintptr_t)pointer - entry->address < entry->bytes) found = *entry;
    pthread_mutex_unlock(&lock);
    return found;
}

static cudaError_t map_host(void **pointer, size_t bytes, int type) {
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE; /* more than this machine has: see zero() */
    void *found = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    remember(*pointer = found, bytes ? bytes : 1, type, 1);
    return SUCCESS;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return map_host(pointer, bytes, POINTER_HOST);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return map_host(pointer, bytes, POINTER_HOST); }

cudaError_t cudaFreeHost(void *pointer) {
    size_t bytes = forget(pointer);
    if (bytes) munmap(pointer, bytes);
    return SUCCESS;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    remember(pointer, bytes, POINTER_HOST, 0);
    return SUCCESS;
}

cudaError_t cudaHostUnregister(void *pointer) {
    forget(pointer);
    return SUCCESS;
}

/* Managed memory (paged optimizers) may be used on either side: here on the host, and not counted on the device, from
   which the driver would page it out. */
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return map_host(pointer, bytes, POINTER_MANAGED);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    int device = device_of(pointer), type = device >= 0 ? POINTER_DEVICE : found_at(pointer).type;
    void *same = (void *)(uintptr_t)pointer;
    *out = (struct cudaPointerAttributes){type, device >= 0 ? device : current_device, type ? same : NULL,
                                          type == POINTER_DEVICE ? NULL : same};
    return SUCCESS;
}

/* ---- copies: what comes from the device is zero, but for what the host has sent there itself; a single byte is the
 * answer to a yes/no question ---- */

/* Zeros in host memory. Whole pages of what was handed out here go back to the system, which shows zeros in their place:
   what a program offloads, hundreds of GB perhaps, takes no memory of this machine. */
static void zero(void *to, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)to, end = begin + bytes;
    uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
    if (first >= last || !found_at(to).ours || madvise((void *)first, last - first, MADV_DONTNEED)) first = last = end;
    memset(to, 0, first - begin);
    memset((void *)last, 0, end - last);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, cudaStream_t stream) {
    (void)kind, (void)stream; /* the addresses say it */
    int is_from_host = device_of(from) < 0;
    if (device_of(to) >= 0) {
        if (is_from_host) host_sends(to, from, bytes);
        else card_writes_at(to);
        if (bytes == 1 && !is_from_host) answer_is_passed_on();
        return SUCCESS;
    }
    if (is_from_host) memmove(to, from, bytes);
    else if (bytes == 1) *(char *)to = (char)answer();
    else if (!host_reads(to, from, bytes)) zero(to, bytes);
    return SUCCESS;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    host_waits();
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, int kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream);
    return SUCCESS;
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    if (device_of(pointer) < 0) memset(pointer, value, bytes);
    else card_writes_at(pointer);
    return SUCCESS;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    return cudaMemset(pointer, value, bytes);
}

/* A variable of a kernel's module: nobody reads it, but its address must be the device's. */
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    (void)symbol;
    static uintptr_t variables;
    pthread_mutex_lock(&lock);
    if (!variables) device_reserve(&variables, PAGE_BYTES, PAGE_BYTES);
    pthread_mutex_unlock(&lock);
    *pointer = (void *)variables;
    return SUCCESS;
}
