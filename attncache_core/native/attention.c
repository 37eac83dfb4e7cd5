// Attention over packed sequences of any lengths, and maps @ V straight from a mapped file; rotary positions.
//
// A task is one head of one sequence (or of several that share a record). K and V of that head are laid out
// once for the vector unit and stay in the processor's cache; eight rows of the map at a time are then
// computed, or read from their record, and multiplied by V. Maps are written to memory only where they are
// kept.
//
// Tasks are shared among the threads of the OpenMP pool that PyTorch has anyway: its entry point is given to
// `set_parallel`.

#include <stdatomic.h>
#include <stdlib.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "vectors.h"

typedef struct {
    char *data;                // [tokens, heads, width], the numbers of a head side by side
    int64_t token, head;       // numbers from one token, and from one head, to the next
} tensor;

typedef struct {
    tensor query, key;         // heads of `key_width` numbers; unused where maps are given
    tensor value, context;     // heads of `width` numbers
    const int64_t *offsets;    // [sequences + 1] first token of each sequence
    const char *const *maps;   // [sequences] maps, square or packed; null where they are computed
    char *const *kept;         // [sequences] where computed maps go, of `type`; null where they are not kept
    const int64_t *runs;       // [tasks per head + 1] first sequence of each run that shares its maps
    int32_t run_count, heads, key_width, width;
    int32_t type, map_type;    // number_type of Q, K, V and context; of the maps
    int32_t before, after;     // a token attends to that many tokens on either side of it, and to itself
    int32_t packed;            // maps are lower triangles, row by row
    float scale;
    int32_t threads;
    // The pool's.
    int32_t chunk;
    atomic_int next;
} attention;

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
static parallel_function parallel;

void set_parallel(void *function) { parallel = (parallel_function)function; }

// Memory of a thread, kept from call to call: the layouts of one task.
static _Thread_local char *scratch;
static _Thread_local size_t scratch_bytes;

static char *scratch_of(size_t bytes) {
    if (bytes > scratch_bytes) {
        free(scratch);
        bytes = (bytes + 4095) / 4096 * 4096;
        scratch = aligned_alloc(4096, bytes);
        if (!scratch) abort();
        scratch_bytes = bytes;
    }
    return scratch;
}

// Rows of a map that meet V together: times two vectors of columns, they are sums that registers hold.
#ifdef __AVX512F__
#define ROWS 8
#else
#define ROWS 2
#endif

INLINE int rounded_up(int x, int to) { return (x + to - 1) / to * to; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }

// The first token that a token attends to, and the one behind the last.
INLINE int band_start(const attention *job, int token) { return token - smaller(token, job->before); }
INLINE int band_end(const attention *job, int token, int length) {
    return token + 1 + smaller(length - token - 1, job->after);
}

INLINE char *head_of(tensor x, int64_t token, int head, size_t bytes) {
    return x.data + (token * x.token + head * x.head) * (int64_t)bytes;
}

// Where a row of a map begins: numbers from the first of its sequence.
INLINE size_t map_row(const attention *job, size_t head, size_t row, size_t length) {
    if (job->packed) return (head * length * (length + 1) + row * (row + 1)) / 2;
    return (head * length + row) * length;
}

#define PAIRS 0
#include "head.h"
#undef PAIRS

#ifdef __AVX512BF16__
#define PAIRS 1
#include "head.h"
#undef PAIRS
#endif

static void run_task(const attention *job, int run, int head) {
#ifdef __AVX512BF16__
    if (job->type == BFLOAT16 && job->width % 32 == 0 && job->key_width % 32 == 0 &&
        (!job->maps || job->map_type == BFLOAT16)) {
        head_of_pairs(job, run, head);
        return;
    }
#endif
    head_of_floats(job, run, head);
}

static void work(void *data) {
    attention *job = data;
    const int tasks = job->run_count * job->heads;
    for (int first; (first = atomic_fetch_add(&job->next, job->chunk)) < tasks;)
        for (int task = first; task < smaller(first + job->chunk, tasks); task++)
            run_task(job, task / job->heads, task % job->heads);
}

// Work below this many multiplications is done sooner than a second thread is awake.
static const int64_t worth_a_thread = 2000000;

// Cells on one side of the diagonal, `reach` of them in a row at most.
static int64_t cells_beside(int64_t length, int64_t reach) {
    if (reach >= length) return length * (length - 1) / 2;
    return reach * length - reach * (reach + 1) / 2;
}

void attend(attention *job) {
    const int tasks = job->run_count * job->heads;
    int64_t cells = 0;
    for (int run = 0; run < job->run_count; run++)
        for (int64_t s = job->runs[run]; s < job->runs[run + 1]; s++) {
            const int64_t length = job->offsets[s + 1] - job->offsets[s];
            cells += length + cells_beside(length, job->before) + cells_beside(length, job->after);
        }
    atomic_init(&job->next, 0);
    if (!parallel || job->threads < 2 || cells * job->heads * job->width < worth_a_thread) {
        job->chunk = tasks;
        work(job);
        return;
    }
    // Small enough that the threads end together, large enough that they seldom meet.
    job->chunk = tasks / (job->threads * 8);
    if (job->chunk < 1) job->chunk = 1;
    parallel(work, job, (unsigned)job->threads, 0);
}

#include "rotary.h"
#include "rows.h"
