/* libcudart: kernels are registered and launched, and none of them runs. */
#include "cuda.h"
#include "emulator.h"

/* ---- which kernel it is: only these matter ----
 *
 * "Is everything true?" (torch.all, torch.equal, a mask without padding) and torch.isfinite are read as yes, and every
 * other yes/no question ("is any of them infinite?") as no, so that a healthy program goes the way it goes on a card.
 * Where there is padding, the first is read as no. The last kernel that was launched before the byte is copied tells
 * which question it was. Their names: the reduction by `and`; the product of two truths, with which isfinite ends; and
 * filling, which like a copy passes an answer on. torch.all copies the answer where there is only one: if it comes from
 * comparing whole numbers, it was the question whether all are equal (torch.isnan compares too, but not whole numbers).
 * transformers asks `mask.sum() == mask.numel()`: a sum that is compared is the question whether all are true. */

enum { PASSES_ON = INTEGERS_EQUAL + 1, FILLS, SLOTS = 4096 };
static struct { const void *function; int kind; } kinds[SLOTS]; /* torch has about a hundred of them */

static size_t slot_of(const void *function) {
    size_t slot = (uintptr_t)function / 16 % SLOTS;
    while (kinds[slot].function && kinds[slot].function != function) slot = (slot + 1) % SLOTS;
    return slot;
}

static void note_kernel(const void *function, const char *name) {
    int kind = OTHER;
    if (!name) return;
    if (strstr(name, "and_kernel_cuda") && strstr(name, "reduce_kernel")) kind = ALL;
    else if (strstr(name, "MulFunctorIb")) kind = FINITE;
    else if (strstr(name, "sum_functor") && strstr(name, "reduce_kernel")) kind = SUM;
    else if (strstr(name, "CompareEqFunctorIl")) kind = INTEGERS_EQUAL;
    else if (strstr(name, "FillFunctorIb")) kind = PASSES_ON;
    else if (strstr(name, "vectorized_elementwise_kernel") && strstr(name, "FillFunctor")) kind = FILLS;
    if (kind == OTHER) return;
    size_t slot = slot_of(function);
    kinds[slot].function = function;
    kinds[slot].kind = kind;
}

/* Of its arguments only one is looked at: where a kernel that fills writes to. */
static cudaError_t launched(const void *function, void **arguments) {
    int kind = kinds[slot_of(function)].kind;
    if (kind == FILLS) card_writes_at(*(void **)arguments[2]);
    else card_writes();
    if (kind == FILLS) kind = OTHER;
    if (kind == PASSES_ON) answer_is_passed_on();
    else asked = asked == SUM && kind == INTEGERS_EQUAL ? ALL : (Question)kind;
    return SUCCESS;
}

void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    return new_handle();
}

void __cudaRegisterFunction(void **module, const void *function, char *device_function, const char *name) {
    (void)module, (void)device_function;
    note_kernel(function, name);
}

void __cudaRegisterVar(void) {}
void __cudaRegisterFatBinaryEnd(void **module) { (void)module; }
void __cudaUnregisterFatBinary(void **module) { (void)module; }
char __cudaInitModule(void **module) { return module != NULL; }

/* ---- launching; the shape of a launch waits between two calls, as the compiler of CUDA programs has it ---- */

static _Thread_local struct { dim3 grid, block; size_t shared; void *stream; } waiting;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    waiting.grid = grid, waiting.block = block, waiting.shared = shared, waiting.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = waiting.grid, *block = waiting.block, *shared = waiting.shared, *(void **)stream = waiting.stream;
    return SUCCESS;
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)(uintptr_t)function;
    return SUCCESS;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    (void)grid, (void)block, (void)shared, (void)stream;
    return launched(function, arguments);
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    (void)grid, (void)block, (void)shared, (void)stream;
    return launched(kernel, arguments);
}

cudaError_t cudaLaunchKernelExC(const void *configuration, const void *function, void **arguments) {
    (void)configuration;
    return launched(function, arguments);
}

/* ---- what a kernel would need of the card ---- */

/* Of the architectures that PyTorch's kernels are compiled for, the one that this card loads. */
static int architecture(void) {
    int capability = (int)(card("major") * 10 + card("minor"));
    switch (capability) {
    case 87: case 89: return 86;
    case 103: return 100;
    case 121: return 120;
    default: return capability;
    }
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    (void)function;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32; /* so few that threads alone limit how many blocks run at once: see below */
    out->ptxVersion = out->binaryVersion = architecture();
    out->maxDynamicSharedSizeBytes = 48 << 10;
    return SUCCESS;
}

/* An estimate on the high side: a real kernel may need so many registers that fewer of its blocks run at once. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    (void)function, (void)flags;
    long fit = card("threads") / (threads > 0 ? threads : 1), most = card("blocks");
    if (shared && card("shared_bytes") / (long)shared < fit) fit = card("shared_bytes") / (long)shared;
    *blocks = (int)(fit < most ? fit : most);
    return SUCCESS;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
