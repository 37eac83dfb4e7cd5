// The search of records: the strangeness of sequences, their nearest records, and which record serves.
//
// hidden -> first layer of the projector -> second layer: features -> nearest record of each kind -> choice
//
// reuse/maps/ has the plain executor of each step. Every sum adds its numbers in the same order, whatever else is in
// the batch, so a sequence in a batch finds what it finds alone.
#pragma once

#define RECORD_KINDS 3  // stored, prototype and mean, in this order

// Neighbouring sequences of one length.
typedef struct {
    int64_t first, count;      // packed sequences
    int64_t first_token, length;
} search_group;

// The feature vectors of the records of one length, each contiguous.
typedef struct {
    const float *stored;       // [stored_count, dimensions], of record 0, 1, 2, ...
    const float *synthetic;    // [synthetic_count, dimensions]
    const int64_t *kinds, *records;  // [synthetic_count] kind and number of each synthetic record
    int64_t stored_count, synthetic_count;
} record_vectors;

// The sequences of all groups follow each other in the results.
typedef struct {
    const matrix *first_layer;   // hidden state -> features of a token
    const matrix *second_layer;  // features of all tokens, one after another -> features of a sequence
    const record_vectors *vectors;  // [lengths]
    const char *hidden;        // [tokens, inputs of the first layer] of `type`
    const search_group *groups;
    float *features;           // [sequences, dimensions]
    int64_t *records;          // [RECORD_KINDS, sequences] the nearest record, or -1
    float *similarities;       // [RECORD_KINDS, sequences] 1 - distance; -infinity without a record
    int64_t group_count, sequences, lengths;
    int32_t type;
} search_job;

typedef struct {
    float distance;            // squared
    int64_t record;
} nearest_record;

// Vectors that are compared together, so that the sums of one do not wait for each other.
#define COMPARED 4

// Return the squared distances of x to `count` vectors, one in each lane.
INLINE floats squared_distances(const float *x, const float *vectors, int count, int dimensions) {
    words sums[LANES];
    for (int first = 0; first < LANES; first += COMPARED) {
        const float *others[COMPARED];
        floats sum[COMPARED];
        UNROLLED for (int v = 0; v < COMPARED; v++) {
            others[v] = vectors + (size_t)(first + v < count ? first + v : 0) * (size_t)dimensions;
            sum[v] = every(0);
        }
        int i = 0;
        for (; i + LANES <= dimensions; i += LANES)
            UNROLLED for (int v = 0; v < COMPARED; v++) {
                const floats off = *(const floats_unaligned *)(x + i) - *(const floats_unaligned *)(others[v] + i);
                sum[v] += off * off;
            }
        if (i < dimensions)
            UNROLLED for (int v = 0; v < COMPARED; v++) {
                const floats off = load_some((const char *)(x + i), FLOAT32, dimensions - i) -
                                   load_some((const char *)(others[v] + i), FLOAT32, dimensions - i);
                sum[v] += off * off;
            }
        UNROLLED for (int v = 0; v < COMPARED; v++) sums[first + v] = (words)sum[v];
    }
    transpose(sums);
    floats total = (floats)sums[0];
    for (int lane = 1; lane < LANES; lane++) total += (floats)sums[lane];
    return total;
}

// Compare `rows` features with vectors, and note the nearest of each kind. kinds, records: null for stored records.
static void compare(const float *features, int rows, const float *vectors, int64_t count, int dimensions,
                    const int64_t *kinds, const int64_t *records, nearest_record (*found)[RECORD_KINDS]) {
    for (int64_t first = 0; first < count; first += LANES) {
        const int some = count - first < LANES ? (int)(count - first) : LANES;
        for (int r = 0; r < rows; r++) {
            const floats distances = squared_distances(features + (size_t)r * (size_t)dimensions,
                                                       vectors + (size_t)first * (size_t)dimensions, some, dimensions);
            for (int v = 0; v < some; v++) {
                nearest_record *nearest = found[r] + (kinds ? kinds[first + v] : 0);
                if (!(distances[v] < nearest->distance)) continue;
                *nearest = (nearest_record){distances[v], records ? records[first + v] : first + v};
            }
        }
    }
}

// Write the features of up to TILE sequences of one length. tokens: the features of their tokens.
static void project_sequences(const matrix *layer, const float *tokens, size_t sequence, int rows, float *features) {
    const int dimensions = layer->outputs;
    float sums[TILE * PANEL] __attribute__((aligned(64)));
    for (int panel = 0; panel < panels_of(layer); panel++) {
        const char *weights = layer->weights + (size_t)panel * (size_t)layer->inputs * PANEL * 4;
        tile_of((const char *)tokens, sequence * 4, weights, (int)sequence, sums, weights, 0,
                &(unfinished){.rows = 0}, rows, WHOLE);
        const int count = smaller(PANEL, dimensions - panel * PANEL);
        for (int r = 0; r < rows; r++)
            memcpy(features + (size_t)r * (size_t)dimensions + panel * PANEL, sums + r * PANEL, (size_t)count * 4);
    }
}

// Only a record of the same tokens has similarity 1, so the similarity of a synthetic record stays below 1.
static const float most_similar_other = 0x1.fffffep-1f;

// A similarity is NaN if the features are not finite.
static void write_nearest(const search_job *job, int64_t sequence, const float *features,
                          const nearest_record found[RECORD_KINDS]) {
    float check = 0;
    for (int i = 0; i < job->second_layer->outputs; i++) check += features[i] - features[i];
    for (int kind = 0; kind < RECORD_KINDS; kind++) {
        const int64_t at = kind * job->sequences + sequence;
        job->records[at] = found[kind].record;
        const float similarity = 1.0f - __builtin_sqrtf(found[kind].distance) + check;
        job->similarities[at] = kind != 0 && similarity > most_similar_other ? most_similar_other : similarity;
    }
}

static void search_group_of(const search_job *job, const search_group *group, int64_t sequence, const float *tokens) {
    const int dimensions = job->second_layer->outputs;
    const size_t numbers = (size_t)group->length * (size_t)job->first_layer->outputs;
    const record_vectors *vectors = job->vectors + group->length;
    for (int64_t first = 0; first < group->count; first += TILE) {
        const int rows = group->count - first < TILE ? (int)(group->count - first) : TILE;
        float *features = job->features + (size_t)(sequence + first) * (size_t)dimensions;
        project_sequences(job->second_layer, tokens + (size_t)first * numbers, numbers, rows, features);
        nearest_record found[TILE][RECORD_KINDS];
        for (int r = 0; r < rows; r++)
            for (int kind = 0; kind < RECORD_KINDS; kind++)
                found[r][kind] = (nearest_record){__builtin_inff(), -1};
        compare(features, rows, vectors->stored, vectors->stored_count, dimensions, 0, 0, found);
        compare(features, rows, vectors->synthetic, vectors->synthetic_count, dimensions, vectors->kinds,
                vectors->records, found);
        for (int r = 0; r < rows; r++)
            write_nearest(job, sequence + first + r, features + (size_t)r * (size_t)dimensions, found[r]);
    }
}

// Find the nearest records of the sequences of some groups, on one thread. Return -1 if a sequence is too long.
int find_nearest(const search_job *job) {
    static _Thread_local growing memory;
    const matrix *layer = job->first_layer;
    const size_t row_bytes = (size_t)layer->inputs * number_bytes(job->type);
    int64_t sequence = 0;
    for (int64_t g = 0; g < job->group_count; g++) {
        const search_group *group = job->groups + g;
        if (group->length >= job->lengths) return -1;
        const int64_t rows = group->count * group->length;
        float *tokens = (float *)thread_memory(&memory, (size_t)rows * (size_t)layer->outputs * 4);
        product_job product = {
            .weights = layer, .x = job->hidden + (size_t)group->first_token * row_bytes, .x_row = layer->inputs,
            .rows = rows, .type = job->type, .threads = 1,
            .end = {.out = (char *)tokens, .out_row = (size_t)layer->outputs, .activation = GELU},
        };
        run_product(&product);
        search_group_of(job, group, sequence, tokens);
        sequence += group->count;
    }
    return 0;
}

// When records of one kind may serve.
typedef struct {
    const double *similarities, *damages;  // [points] of the curve of expected damage
    int64_t points;
    double threshold;
} kind_policy;

typedef struct {
    const kind_policy *policies;    // [length groups, RECORD_KINDS]
    const int64_t *bounds;          // [length groups - 1] the longest sequence of each length group but the last
    const search_group *groups;
    const int64_t *records;         // as in search_job
    const float *similarities;
    int64_t *served, *kinds;        // [packed sequences] the record that serves, or -1, and the kind that was chosen
    float *reached;                 // [packed sequences] the similarity of the chosen kind
    int64_t group_count, sequences, policy_count;
} choice_job;

static double expected_damage(const kind_policy *policy, float similarity) {
    const int64_t last = policy->points - 1;
    const double at = similarity, *x = policy->similarities, *y = policy->damages;
    if (last < 0) return 1.0f - similarity;
    if (similarity >= 1.0f) return 0;
    if (!(at >= x[0])) return y[0];
    if (at >= x[last]) return y[last];
    int64_t below = 0;
    for (int64_t above = last; above - below > 1;) {
        const int64_t middle = (below + above) / 2;
        if (x[middle] <= at) below = middle;
        else above = middle;
    }
    return y[below] + (y[below + 1] - y[below]) / (x[below + 1] - x[below]) * (at - x[below]);
}

// Choose the kind with the least expected damage among the kinds that reach their threshold, or among all kinds.
static void choose_record(const choice_job *job, const kind_policy *policies, int64_t sequence, int64_t packed) {
    int chosen = 0, serves = 0;
    double least = __builtin_inf();
    for (int kind = 0; kind < RECORD_KINDS; kind++) {
        const float similarity = job->similarities[kind * job->sequences + sequence];
        const int reaches = similarity >= policies[kind].threshold;
        const double damage =
            similarity == -__builtin_inff() ? __builtin_inf() : expected_damage(policies + kind, similarity);
        if ((serves && !reaches) || (serves == reaches && !(damage < least))) continue;
        chosen = kind;
        least = damage;
        serves = reaches;
    }
    const int64_t at = chosen * job->sequences + sequence;
    job->served[packed] = serves ? job->records[at] : -1;
    job->kinds[packed] = chosen;
    job->reached[packed] = job->similarities[at];
}

void choose_records(const choice_job *job) {
    int64_t sequence = 0;
    for (const search_group *group = job->groups; group < job->groups + job->group_count; group++) {
        int64_t policy = 0;
        while (policy < job->policy_count - 1 && job->bounds[policy] < group->length) policy++;
        for (int64_t i = 0; i < group->count; i++)
            choose_record(job, job->policies + policy * RECORD_KINDS, sequence++, group->first + i);
    }
}

#define STATISTICS 8

// The strangeness of sequences; see reuse/maps/familiarity.py.
typedef struct {
    const float *weights;       // [vocabulary] the weight of each token
    const float *coefficients;  // [STATISTICS]
    const int64_t *ids;         // [tokens]
    const int64_t *lengths;     // [sequences]
    float *sums;                // [sequences] coefficients @ statistics, without the logarithm of the length
    int64_t sequences, vocabulary;
} strangeness_job;

// Note a key in a table of zeros. Return whether the key was there. mask: places - 1, a power of two minus one.
static int64_t was_noted(uint64_t *table, uint64_t mask, uint64_t key) {
    uint64_t place = (key * 0x9e3779b97f4a7c15u) >> 20 & mask;
    for (; table[place]; place = (place + 1) & mask)
        if (table[place] == key + 1) return 1;
    table[place] = key + 1;
    return 0;
}

static double strangeness_of(const strangeness_job *job, const int64_t *ids, int64_t length) {
    uint64_t places = 16;
    while (places < 2 * (uint64_t)length) places *= 2;
    uint64_t *tokens = (uint64_t *)scratch_of(2 * places * sizeof(uint64_t)), *pairs = tokens + places;
    memset(tokens, 0, 2 * places * sizeof(uint64_t));
    double sum = 0, squares = 0, largest = -__builtin_inf();
    int64_t old_tokens = 0, old_pairs = 0, same = 0;
    for (int64_t i = 0; i < length; i++) {
        // The first token has no predecessor, so it counts as its own predecessor.
        const uint64_t id = (uint64_t)ids[i], before = (uint64_t)ids[i ? i - 1 : 0];
        const double weight = job->weights[id];
        sum += weight;
        squares += weight * weight;
        largest = weight > largest ? weight : largest;
        old_tokens += was_noted(tokens, places - 1, id);
        old_pairs += was_noted(pairs, places - 1, id << 32 | before);
        same += id == before;
    }
    const double count = (double)length, mean = sum / count, spread = squares / count - mean * mean;
    const float *by = job->coefficients;
    return by[0] * mean + by[1] * __builtin_sqrt(spread > 0 ? spread : 0) + by[2] * (double)old_tokens / count +
           by[3] * (double)old_pairs / count + by[4] * (double)same / count + by[5] * largest + by[7] * mean / count;
}

// Return -1 if a token is not in the vocabulary.
int measure_strangeness(const strangeness_job *job) {
    const int64_t *ids = job->ids;
    for (int64_t s = 0; s < job->sequences; ids += job->lengths[s], s++) {
        for (int64_t i = 0; i < job->lengths[s]; i++)
            if ((uint64_t)ids[i] >= (uint64_t)job->vocabulary) return -1;
        job->sums[s] = (float)strangeness_of(job, ids, job->lengths[s]);
    }
    return 0;
}
