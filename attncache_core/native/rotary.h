// Rotary positions: rotate dimensions i and i + half of each head by angle i of the token's position.
// Included by attention.c, whose pool splits the tokens among threads.

typedef struct {
    tensor x;                      // heads of at least 2 `half` dimensions; rotated in place
    const float *cosine, *sine;    // [positions, half]
    const int64_t *positions;      // [tokens]
    int64_t tokens;
    int32_t heads, half;
    int32_t type;                  // number_type of x
    int32_t threads;
    // Set by `rotate`, for the pool.
    atomic_llong next;
} rotation;

static void rotate_head(char *first, const float *cosine, const float *sine, int half, number_type type) {
    const size_t bytes = number_bytes(type);
    char *second = first + (size_t)half * bytes;
    for (int at = 0; at < half; at += LANES, first += LANES * bytes, second += LANES * bytes) {
        const int count = half - at;
        const floats a = load_some(first, type, count), b = load_some(second, type, count);
        const floats c = load_some((const char *)(cosine + at), FLOAT32, count);
        const floats s = load_some((const char *)(sine + at), FLOAT32, count);
        store_some(first, type, a * c - b * s, count);
        store_some(second, type, b * c + a * s, count);
    }
}

static const int64_t tokens_at_once = 8;

static void rotate_some(void *data) {
    rotation *job = data;
    for (int64_t first; (first = atomic_fetch_add(&job->next, tokens_at_once)) < job->tokens;)
        for (int64_t token = first; token < first + tokens_at_once && token < job->tokens; token++) {
            const int64_t angles = job->positions[token] * job->half;
            for (int head = 0; head < job->heads; head++)
                rotate_head(head_of(job->x, token, head, number_bytes(job->type)), job->cosine + angles,
                            job->sine + angles, job->half, job->type);
        }
}

// With fewer elements, waking a second thread costs more than it saves.
static const int64_t turned_alone = 200000;

void rotate(rotation *job) {
    atomic_init(&job->next, 0);
    if (!parallel || job->threads < 2 || job->tokens * job->heads * job->half < turned_alone)
        rotate_some(job);
    else
        parallel(rotate_some, job, (unsigned)job->threads, 0);
}
