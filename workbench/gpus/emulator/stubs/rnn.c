/* libcudnn: recurrent networks, by NVIDIA's API of version 8. Weights and reserve, the activations that backward needs,
   follow from the layer's shape: seen to the byte in 361 and 345 cases on an H200 (cuDNN 9.19,
   data/reference/h200/README.md). The workspace does so for part of them; for others a lower bound is answered, and the
   report says so. */
#include "cudnn.h"

enum { TANH = 1, LSTM = 2, GRU = 3 }; /* 0 is a plain network with ReLU */

typedef struct {
    int cell, directions, data_type, inputs, hidden, projection, layers;
    size_t element; /* bytes of a number */
    const Dropout *dropout;
} Network;

typedef struct {
    int time_steps, batch, is_packed;
    size_t tokens; /* over all sequences, without padding where they are packed */
} Sequences;

int cudnnCreateRNNDescriptor(void **descriptor) { return cudnnCreate(descriptor); }
int cudnnCreateRNNDataDescriptor(void **descriptor) { return cudnnCreate(descriptor); }

int cudnnSetRNNDescriptor_v8(Network *network, int algorithm, int cell, int bias, int direction, int input_mode,
                             int data_type, int math_precision, int math_type, int inputs, int hidden, int projection,
                             int layers, const Dropout *dropout, unsigned flags) {
    (void)algorithm, (void)bias, (void)input_mode, (void)math_precision, (void)math_type, (void)flags;
    if (projection == hidden) projection = 0; /* cuDNN's word for none */
    *network = (Network){cell,       direction + 1, data_type, inputs, hidden, projection, layers,
                         element_bytes(data_type), dropout};
    return SUCCESS;
}

int cudnnSetRNNDataDescriptor(Sequences *sequences, int data_type, int layout, int time_steps, int batch, int width,
                              const int *lengths, void *padding) {
    (void)data_type, (void)width, (void)padding;
    *sequences = (Sequences){time_steps, batch, layout == 1, 0};
    for (int i = 0; i < batch; i++) sequences->tokens += (size_t)(lengths ? lengths[i] : time_steps);
    return SUCCESS;
}

static int gates(const Network *network) { return network->cell == LSTM ? 4 : network->cell == GRU ? 3 : 1; }

/* What a layer hands on, for each token and direction. */
static int outputs(const Network *network) { return network->projection ? network->projection : network->hidden; }

static int inputs_of(const Network *network, int layer) {
    return layer ? outputs(network) * network->directions : network->inputs;
}

/* Numbers of the matrices of one layer in one direction. */
static size_t matrices(const Network *network, int layer) {
    size_t of_gates = (size_t)gates(network) * network->hidden * (inputs_of(network, layer) + outputs(network));
    return of_gates + (size_t)network->projection * network->hidden;
}

/* There are always two biases, also where PyTorch has none. */
static size_t biases(const Network *network) { return (size_t)gates(network) * network->hidden * 2; }

int cudnnGetRNNWeightSpaceSize(void *handle, const Network *network, size_t *bytes) {
    (void)handle;
    size_t numbers = 0;
    for (int layer = 0; layer < network->layers; layer++)
        numbers += network->directions * (matrices(network, layer) + biases(network));
    *bytes = numbers * network->element;
    return SUCCESS;
}

static size_t reserve(const Network *network, const Sequences *sequences) {
    size_t layers = network->layers, directions = network->directions, hidden = network->hidden;
    size_t kept = network->cell == LSTM ? 5 : network->cell == GRU ? 6 : 1; /* numbers for each token and cell */
    size_t between = (layers - 1) * directions * hidden;                    /* what a layer hands to the next */
    size_t numbers = kept * layers * directions * hidden + between;
    if (network->projection) numbers = layers * directions * (6 * hidden + network->projection) + between;
    size_t masks = 0; /* of dropout between layers, a bit for each number */
    if (network->dropout && network->dropout->share > 0)
        masks = (layers - 1) * sequences->batch * sequences->time_steps * hidden * directions * directions / 8;
    return 256 + network->element * sequences->tokens * numbers + masks;
}

/* The fits of data/reference/h200/README.md, for what was tried there: trainings of one direction, with as many inputs
   as cells, without dropout, projection or packed sequences. From some size on cuDNN uses scratch again from step to step;
   below it, one layer keeps more for each of them. Of other cases the fixed part alone is sure. */
static size_t workspace(const Network *network, const Sequences *sequences, int is_training, int *is_known) {
    size_t layers = network->layers, hidden = network->hidden, batch = sequences->batch, steps = sequences->time_steps;
    int is_lstm = network->cell == LSTM, is_gru = network->cell == GRU, is_bf16 = network->data_type == BFLOAT16;
    int is_plain = network->inputs == network->hidden && network->directions == 1 && !network->projection &&
                   !sequences->is_packed && !(network->dropout && network->dropout->share > 0) && is_training;
    /* one layer of these in fp16 follows no rule that was found */
    int has_no_rule = network->data_type == HALF && !is_gru && layers == 1 && hidden >= 256;
    size_t large = is_lstm || is_gru ? 256 : 512;
    int is_reused = is_bf16 || hidden >= large;
    size_t sure = 256 + 8 * MIB * layers;
    *is_known = is_plain && !has_no_rule && (is_reused || layers == 1) && device_is_an_h200();
    if (!*is_known) return sure;

    size_t of_steps = 6 * steps, constant = (is_lstm ? 11 : 5) * layers;
    if (layers == 2) constant = is_lstm ? 20 : 2;
    if (!is_reused) {
        of_steps = (is_lstm ? 22 : is_gru ? 20 : 15) * steps;
        constant = is_lstm ? 8 : 6;
    }
    size_t numbers = gates(network) * 2 * hidden * hidden * layers + batch * hidden * (of_steps + constant);
    return (sure + network->element * numbers + 8 * batch + 31) / 32 * 32;
}

int cudnnGetRNNTempSpaceSizes(void *handle, const Network *network, int is_training, const Sequences *sequences,
                              size_t *workspace_bytes, size_t *reserve_bytes) {
    (void)handle;
    int is_known;
    size_t bytes = workspace(network, sequences, is_training, &is_known);
    if (!is_known) not_measured("cuDNN's workspace of recurrent networks");
    if (workspace_bytes) *workspace_bytes = bytes;
    if (reserve_bytes) *reserve_bytes = is_training ? reserve(network, sequences) : 0;
    return SUCCESS;
}

static void describe(Tensor *tensor, int data_type, int rows, int columns) {
    *tensor = (Tensor){data_type, 3, {1, rows, columns}, {rows * columns, columns, 1}};
}

/* Where a matrix and its bias lie: first all matrices, layer by layer, then all biases. Of a layer come the matrices of
   the inputs, then those of the state before, then the projection. */
int cudnnGetRNNWeightParams(void *handle, const Network *network, int of_layer, size_t space_bytes, char *space,
                            int which, Tensor *matrix, char **matrix_at, Tensor *bias, char **bias_at) {
    (void)handle, (void)space_bytes;
    int layer = of_layer / network->directions, count = gates(network);
    size_t before = 0, all = 0;
    for (int i = 0; i < network->layers * network->directions; i++) {
        size_t numbers = matrices(network, i / network->directions);
        if (i < of_layer) before += numbers;
        all += numbers;
    }
    int is_projection = which == 2 * count, is_recurrent = which >= count && !is_projection;
    int rows = is_projection ? network->projection : network->hidden;
    int columns = is_projection ? network->hidden : is_recurrent ? outputs(network) : inputs_of(network, layer);
    size_t hidden = network->hidden, of_inputs = count * hidden * inputs_of(network, layer);
    size_t at = is_projection  ? of_inputs + count * hidden * outputs(network)
                : is_recurrent ? of_inputs + (which - count) * hidden * outputs(network)
                               : which * hidden * inputs_of(network, layer);
    if (matrix) describe(matrix, network->data_type, rows, columns); /* NULL where the caller wants the bias alone */
    if (matrix_at) *matrix_at = space + (before + at) * network->element;
    if (bias) describe(bias, network->data_type, is_projection ? 0 : network->hidden, 1);
    size_t bias_number = all + of_layer * biases(network) + which * hidden;
    if (bias_at) *bias_at = is_projection ? NULL : space + bias_number * network->element;
    return SUCCESS;
}
