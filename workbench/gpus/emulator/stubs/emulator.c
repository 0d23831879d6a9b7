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

/* The card as the environment last told it: accelerate, and unittest's patch.dict, empty the environment for a moment,
 * in which PyTorch's other threads may ask. glibc keeps the texts. */
static const char *told_card(void) {
    static const char *_Atomic last;
    const char *text = getenv("EMULATED_GPU");
    if (text) last = text;
    return last;
}

long card(const char *field) {
    const char *text = told_card();
    size_t length = strlen(field);
    for (; text && *text; text = strchr(text, ' ') ? strchr(text, ' ') + 1 : NULL)
        if (!strncmp(text, field, length) && text[length] == '=') return atol(text + length + 1);
    return 0;
}

const char *card_name(void) {
    const char *text = told_card(), *name = text ? strstr(text, "name=") : NULL;
    return name ? name + strlen("name=") : "emulated GPU";
}

/* ---- device memory: where NVIDIA's driver puts it ----
 *
 * Up to 2.12 PyTorch's allocator took the lower address of two free blocks of one size, so the order of addresses
 * decided which segments stayed in use. Seen on an H100 (driver 580): addresses are set aside in chunks of 32 MiB, each
 * as high as there is room below the first; a request goes into the newest chunk that has room, there into the
 * smallest gap, the lowest of equal ones; an empty chunk is given back. 254 requests with the driver's answers stand in
 * data/reference/h100/addresses.json. */

#define CHUNK_BYTES (32 * MIB)

typedef struct Range {
    uintptr_t address;
    size_t bytes;
    struct Range *next;
} Range;

typedef struct Chunk {
    uintptr_t address;
    size_t bytes;
    int device;    /* -1: only reserved */
    Range *ranges; /* by address */
    struct Chunk *older, *below;
} Chunk;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t space, space_end;
static Chunk *newest, *highest; /* of all chunks, the beginnings of two lists */
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
    space = rounded((uintptr_t)found, CHUNK_BYTES);
    space_end = ((uintptr_t)found + SPACE_BYTES) / CHUNK_BYTES * CHUNK_BYTES;
}

static Chunk *add_chunk(uintptr_t address, size_t bytes, int device) {
    if (address < space || address + bytes > space_end) return NULL;
    Chunk *chunk = malloc(sizeof *chunk), **place = &highest;
    while (*place && (*place)->address > address) place = &(*place)->below;
    *chunk = (Chunk){address, bytes, device, NULL, newest, *place};
    return newest = *place = chunk;
}

static Chunk *highest_chunk(size_t bytes, int device) {
    find_space();
    uintptr_t end = space_end;
    for (Chunk *other = highest; other && end - (other->address + other->bytes) < bytes; other = other->below)
        end = other->address;
    return add_chunk(end - bytes, bytes, device);
}

/* Ranges for expandable segments, from the bottom up: how the driver orders these is not known. */
static Chunk *lowest_chunk(size_t bytes, size_t alignment) {
    find_space();
    uintptr_t address = rounded(space, alignment);
    for (Chunk *other = highest; other;) {
        int apart = other->address + other->bytes <= address || address + bytes <= other->address;
        if (!apart) address = rounded(other->address + other->bytes, alignment);
        other = apart ? other->below : highest;
    }
    return add_chunk(address, bytes, -1);
}

/* Where in the list the range of the smallest sufficient gap belongs; NULL if there is none. */
static Range **best_gap(Chunk *chunk, size_t bytes, uintptr_t *address) {
    Range **best = NULL;
    size_t smallest = SIZE_MAX;
    uintptr_t start = chunk->address;
    for (Range **place = &chunk->ranges;; place = &(*place)->next) {
        size_t gap = (*place ? (*place)->address : chunk->address + chunk->bytes) - start;
        if (gap >= bytes && gap < smallest) best = place, smallest = gap, *address = start;
        if (!*place) return best;
        start = (*place)->address + (*place)->bytes;
    }
}

static uintptr_t insert(size_t bytes, int device) {
    uintptr_t address;
    Range **place = NULL;
    for (Chunk *chunk = newest; chunk && !place; chunk = chunk->older)
        if (chunk->device == device) place = best_gap(chunk, bytes, &address);
    if (!place) {
        Chunk *chunk = highest_chunk(rounded(bytes, CHUNK_BYTES), device);
        if (!chunk) return 0;
        place = best_gap(chunk, bytes, &address);
    }
    Range *range = malloc(sizeof *range);
    *range = (Range){address, bytes, *place};
    *place = range;
    return address;
}

static Chunk *chunk_of(uintptr_t address) {
    Chunk *chunk = highest;
    while (chunk && chunk->address > address) chunk = chunk->below;
    return chunk && address < chunk->address + chunk->bytes ? chunk : NULL;
}

static void drop_if_empty(Chunk *chunk) {
    if (chunk->ranges) return;
    Chunk **place = &newest;
    while (*place != chunk) place = &(*place)->older;
    *place = chunk->older;
    for (place = &highest; *place != chunk;) place = &(*place)->below;
    *place = chunk->below;
    free(chunk);
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
    if (bytes >> 46) /* more than any card, or program, has */
        fprintf(stderr,
                "emulated GPU: a request for %zu GiB is most likely a size that an emulated function should have told, "
                "and has not. Please report it, with the program: see README, \"The emulated GPU\".\n",
                bytes >> 30);
    pthread_mutex_lock(&lock);
    if (whole >= bytes && whole <= left(device)) *address = insert(whole, device);
    if (*address) used[device] += whole;
    pthread_mutex_unlock(&lock);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}

static int given_back(uintptr_t address) {
    Chunk *chunk = chunk_of(address);
    Range **place = chunk ? &chunk->ranges : NULL;
    while (place && *place && (*place)->address != address) place = &(*place)->next;
    if (!place || !*place) return INVALID_VALUE;
    Range *range = *place;
    used[chunk->device] -= range->bytes;
    *place = range->next;
    free(range);
    drop_if_empty(chunk);
    return SUCCESS;
}

int device_free(uintptr_t address) {
    pthread_mutex_lock(&lock);
    int status = address ? given_back(address) : SUCCESS;
    pthread_mutex_unlock(&lock);
    return status;
}

int device_reserve(uintptr_t *address, size_t bytes, size_t alignment) {
    pthread_mutex_lock(&lock);
    Chunk *chunk = lowest_chunk(rounded(bytes, PAGE_BYTES), alignment > PAGE_BYTES ? alignment : PAGE_BYTES);
    *address = chunk ? chunk->address : 0;
    pthread_mutex_unlock(&lock);
    return chunk ? SUCCESS : OUT_OF_MEMORY;
}

void device_unreserve(uintptr_t address) {
    pthread_mutex_lock(&lock);
    Chunk *chunk = chunk_of(address);
    if (chunk) drop_if_empty(chunk);
    pthread_mutex_unlock(&lock);
}

size_t device_left(int device) {
    pthread_mutex_lock(&lock);
    size_t bytes = left(device);
    pthread_mutex_unlock(&lock);
    return bytes;
}

int device_of(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer;
    if (!space || address < space || address >= space_end) return -1;
    pthread_mutex_lock(&lock);
    Chunk *chunk = chunk_of(address);
    /* expandable segments fill a reserved range on the device that is current */
    int device = !chunk ? 0 : chunk->device < 0 ? current_device : chunk->device;
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

/* ---- what the host has sent ----
 *
 * Many programs send two counts to the card, add them up over the ranks, read them, and divide by one of them. */

enum { SENT = 16, SMALL = 256 };
static struct { uintptr_t address; size_t bytes; char value[SMALL]; } sent[SENT]; /* the oldest gives way */
static int oldest;

static unsigned long long writes;

unsigned long long writes_of_card(void) { return writes; }

void card_writes(void) {
    pthread_mutex_lock(&lock);
    writes++;
    memset(sent, 0, sizeof sent);
    pthread_mutex_unlock(&lock);
}

void card_writes_at(const void *address) {
    pthread_mutex_lock(&lock);
    writes++;
    for (int i = 0; i < SENT; i++)
        if ((uintptr_t)address - sent[i].address < sent[i].bytes) sent[i].bytes = 0;
    pthread_mutex_unlock(&lock);
}

void host_sends(const void *to, const void *from, size_t bytes) {
    card_writes_at(to);
    if (bytes > SMALL) return;
    pthread_mutex_lock(&lock);
    sent[oldest].address = (uintptr_t)to;
    sent[oldest].bytes = bytes;
    memcpy(sent[oldest].value, from, bytes);
    oldest = (oldest + 1) % SENT;
    pthread_mutex_unlock(&lock);
}

int host_reads(void *to, const void *from, size_t bytes) {
    int known = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SENT && !known; i++) {
        known = sent[i].address == (uintptr_t)from && bytes && bytes <= sent[i].bytes;
        if (known) memcpy(to, sent[i].value, bytes);
    }
    pthread_mutex_unlock(&lock);
    return known;
}

/* ---- what nobody has measured ---- */

static char unmeasured[4096]; /* names, each with a line feed after it */

void not_measured(const char *what) {
    pthread_mutex_lock(&lock);
    char line[256];
    int length = snprintf(line, sizeof line, "%s\n", what);
    size_t there = strlen(unmeasured);
    if (!strstr(unmeasured, line) && there + (size_t)length < sizeof unmeasured) strcpy(unmeasured + there, line);
    pthread_mutex_unlock(&lock);
}

const char *what_was_not_measured(void) { return unmeasured; }

/* ---- what the generated stubs say ---- */

static _Thread_local const char *last_stub = "none";

/* Of the runtime, what copies or sets memory; a thread of PyTorch's asks it for the state of events all the time. */
static int may_write(const char *function) {
    if (!strncmp(function, "ncclGroup", 9)) return 0;
    return strncmp(function, "cuda", 4) || strstr(function, "Mem");
}

void stub_called(const char *function) {
    last_stub = function;
    if (may_write(function)) card_writes();
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
