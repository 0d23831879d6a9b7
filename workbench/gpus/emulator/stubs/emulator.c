/* The emulated card and its memory: kept to the byte, and made of addresses alone. */
#define _GNU_SOURCE
#include "emulator.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAXIMUM_DEVICES 64
#define SPACE_BYTES ((size_t)1 << 45) /* for all devices and for reserved ranges; a process has 2^47 */

/* ---- the card ---- */

long card(const char *field) {
    const char *text = getenv("EMULATED_GPU");
    size_t length = strlen(field);
    for (; text && *text; text = strchr(text, ' ') ? strchr(text, ' ') + 1 : NULL)
        if (!strncmp(text, field, length) && text[length] == '=') return atol(text + length + 1);
    return 0;
}

const char *card_name(void) {
    const char *text = getenv("EMULATED_GPU"), *name = text ? strstr(text, "name=") : NULL;
    return name ? name + strlen("name=") : "emulated GPU";
}

/* ---- device memory: first fit, in steps of the driver's pages ---- */

typedef struct Range {
    uintptr_t address;
    size_t bytes;
    int device;   /* -1: only reserved */
    struct Range *next;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t space;
static Range *ranges; /* by address */
static size_t used[MAXIMUM_DEVICES];
_Thread_local int current_device;

static size_t rounded(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

static void find_space(void) {
    if (space) return;
    void *found = mmap(NULL, SPACE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) {
        fputs("emulated GPU: this process may not reserve addresses (ulimit -v). Lift that limit.\n", stderr);
        _exit(3);
    }
    space = rounded((uintptr_t)found, PAGE_BYTES);
}

static uintptr_t insert(size_t bytes, size_t alignment, int device) {
    find_space();
    uintptr_t address = rounded(space, alignment);
    Range **place = &ranges;
    for (; *place && (*place)->address < address + bytes; place = &(*place)->next)
        address = rounded((*place)->address + (*place)->bytes, alignment);
    if (address + bytes > space + SPACE_BYTES - PAGE_BYTES) return 0;
    Range *range = malloc(sizeof *range);
    *range = (Range){address, bytes, device, *place};
    *place = range;
    return address;
}

static Range *removed(uintptr_t address) {
    Range **place = &ranges;
    while (*place && (*place)->address != address) place = &(*place)->next;
    Range *range = *place;
    if (range) *place = range->next;
    return range;
}

static size_t left(int device) {
    size_t capacity = (size_t)card("memory") - (size_t)card("context");
    return used[device] < capacity ? capacity - used[device] : 0;
}

int device_take(size_t bytes, int device) {
    pthread_mutex_lock(&lock);
    int fits = bytes <= left(device);
    if (fits) used[device] += bytes;
    pthread_mutex_unlock(&lock);
    return fits ? SUCCESS : OUT_OF_MEMORY;
}

void device_give(size_t bytes, int device) {
    pthread_mutex_lock(&lock);
    used[device] -= bytes;
    pthread_mutex_unlock(&lock);
}

int device_allocate(uintptr_t *address, size_t bytes, int device) {
    size_t whole = rounded(bytes, PAGE_BYTES);
    *address = 0;
    if (!bytes) return SUCCESS;
    pthread_mutex_lock(&lock);
    if (whole >= bytes && whole <= left(device)) *address = insert(whole, PAGE_BYTES, device);
    if (*address) used[device] += whole;
    pthread_mutex_unlock(&lock);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}

int device_free(uintptr_t address) {
    pthread_mutex_lock(&lock);
    Range *range = removed(address);
    if (range && range->device >= 0) used[range->device] -= range->bytes;
    pthread_mutex_unlock(&lock);
    int status = !range && address ? INVALID_VALUE : SUCCESS;
    free(range);
    return status;
}

int device_reserve(uintptr_t *address, size_t bytes, size_t alignment) {
    pthread_mutex_lock(&lock);
    *address = insert(rounded(bytes, PAGE_BYTES), alignment > PAGE_BYTES ? alignment : PAGE_BYTES, -1);
    pthread_mutex_unlock(&lock);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}

void device_unreserve(uintptr_t address) { device_free(address); }

size_t device_left(int device) {
    pthread_mutex_lock(&lock);
    size_t bytes = left(device);
    pthread_mutex_unlock(&lock);
    return bytes;
}

int device_of(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer;
    if (!space || address < space || address >= space + SPACE_BYTES) return -1;
    int device = 0; /* of a reserved range, which expandable segments fill on the device that is current */
    pthread_mutex_lock(&lock);
    for (Range *range = ranges; range && range->address <= address; range = range->next)
        if (address < range->address + range->bytes) device = range->device < 0 ? current_device : range->device;
    pthread_mutex_unlock(&lock);
    return device;
}

void *new_handle(void) { return calloc(1, 8192); }

/* ---- yes or no ---- */


_Thread_local Question asked;

static int told(const char *name) {
    const char *text = getenv(name);
    return text && *text;
}

void answer_is_passed_on(void) {
    if (asked == INTEGERS_EQUAL) asked = ALL; /* torch.all of a single comparison */
}

int answer(void) { return asked == FINITE || (asked == ALL && !told("EMULATED_PADDING")); }

/* ---- what the generated stubs say ---- */

static _Thread_local const char *last_stub = "none";

void stub_called(const char *function) {
    last_stub = function;
    if (getenv("EMULATED_CALLS")) fprintf(stderr, "[emulated GPU] %s\n", function);
}

int stub_refused(const char *function, int status) {
    stub_called(function);
    fprintf(stderr, "emulated GPU: %s is not emulated; the program is told that it is not supported.\n", function);
    return status;
}

/* A stub that says nothing where its caller waits for an answer is the likeliest reason of a crash. */
static void crashed(int signal_number) {
    char words[400];
    int length = snprintf(words, sizeof words,
                          "\nemulated GPU: the program crashed (signal %d). The last function that the emulator only "
                          "pretends to have was %s.\nPlease report it, with this line and the program: see README, "
                          "\"The emulated GPU\".\n", signal_number, last_stub);
    if (write(2, words, (size_t)length) < 0) _exit(139);
    raise(signal_number); /* by now the default again */
}

/* Device memory that the host reads or writes is the program's mistake on a real card too. */
__attribute__((constructor)) static void watch_for_crashes(void) {
    struct sigaction action = {.sa_handler = crashed, .sa_flags = SA_RESETHAND | SA_NODEFER}, before;
    int watched[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof watched / sizeof *watched; i++)
        if (!sigaction(watched[i], NULL, &before) && before.sa_handler == SIG_DFL) sigaction(watched[i], &action, NULL);
}
