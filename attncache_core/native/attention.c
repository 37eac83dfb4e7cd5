// Attention over packed sequences of any lengths, maps @ V directly from a mapped file, and rotary positions.
//
// A task is one head of one sequence, or of several sequences that share a record. The task copies K and V of
// the head once into the layout of the vector unit, where they stay in the processor's cache. It then takes
// ROWS rows of the map at a time, computes them or reads them from the record, and multiplies them by V. Maps
// are written to memory only if the caller asks for them.
//
// The tasks run on the threads of PyTorch's OpenMP pool. `set_parallel` receives the pool's entry point.

#define _GNU_SOURCE  // for syscall
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "vectors.h"

INLINE int rounded_up(int x, int to) { return (x + to - 1) / to * to; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }

#include "distances.h"
#ifdef __AMX_TILE__
#include "tiles.h"
#endif

typedef struct {
    char *data;                // [tokens, heads, width], the elements of a head contiguous
    int64_t token, head;       // strides in elements
} tensor;

typedef struct {
    tensor query, key;         // heads of `key_width` elements; unused if maps are given
    tensor value, context;     // heads of `width` elements
    const int64_t *offsets;    // [sequences + 1] first token of each sequence
    const char *const *maps;   // [sequences] reused maps, square or packed; null to compute the maps
    char *const *kept;         // [sequences] destinations of computed maps, of `type`; null to discard them
    const int64_t *runs;       // [tasks per head + 1] first sequence of each run; a run shares its maps
    // [rows] the token that each row of Q belongs to, rising, for rows that attend to given tokens only; or null
    const int64_t *positions;
    // [heads, 2 bias_positions - 1], added to the scaled scores at distance q - p + bias_positions - 1; or null
    const float *bias;
    distance_term query_term, key_term;  // of the products before the scale; for maps of whole sequences
    int32_t run_count, heads, key_width, width;
    int32_t type, map_type;    // number_type of Q, K, V and context, and of reused maps
    int32_t before, after;     // how many tokens before and after itself a token attends to
    int32_t bias_positions;
    int32_t packed;            // whether reused maps are lower triangles, row by row
    float scale;
    int32_t threads;
    // Set by `attend`, for the pool.
    int32_t chunk;
    atomic_int next;
} attention;

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
static parallel_function parallel;

void set_parallel(void *function) { parallel = (parallel_function)function; }

// Memory that grows, and stays from call to call.
typedef struct growing {
    char *data;
    size_t bytes;
    struct growing *next;      // of the same thread, see `thread_memory`
} growing;

static char *grown(growing *memory, size_t bytes) {
    if (bytes > memory->bytes) {
        free(memory->data);
        bytes = (bytes + 4095) / 4096 * 4096;
        memory->data = aligned_alloc(4096, bytes);
        if (!memory->data) abort();
        memory->bytes = bytes;
    }
    return memory->data;
}

static pthread_key_t of_thread;  // the memories of each thread

static void free_memories(void *first) {
    for (growing *memory = first; memory; memory = memory->next) {
        free(memory->data);
        memory->data = 0, memory->bytes = 0;
    }
}

static void make_key(void) {
    if (pthread_key_create(&of_thread, free_memories)) abort();
}

// What `grown` returns, for a _Thread_local memory, which is freed when its thread ends.
static char *thread_memory(growing *memory, size_t bytes) {
    if (bytes && !memory->bytes) {
        static pthread_once_t once = PTHREAD_ONCE_INIT;
        pthread_once(&once, make_key);
        memory->next = pthread_getspecific(of_thread);
        if (pthread_setspecific(of_thread, memory)) abort();
    }
    return grown(memory, bytes);
}

// Memory of a thread for the layouts of one task.
static char *scratch_of(size_t bytes) {
    static _Thread_local growing memory;
    return thread_memory(&memory, bytes);
}

// Memory of a thread for rotated keys of one block of given tokens.
static char *given_space(size_t bytes) {
    static _Thread_local growing memory;
    return thread_memory(&memory, bytes);
}

// The first token that a token attends to, and the end of that range (exclusive).
INLINE int band_start(const attention *job, int token) { return token - smaller(token, job->before); }
INLINE int band_end(const attention *job, int token, int length) {
    return token + 1 + smaller(length - token - 1, job->after);
}

INLINE char *head_of(tensor x, int64_t token, int head, size_t bytes) {
    return x.data + (token * x.token + head * x.head) * (int64_t)bytes;
}

// The offset of a row of a map, in elements from the first element of its sequence's maps.
INLINE size_t map_row(const attention *job, size_t head, size_t row, size_t length) {
    if (job->packed) return (head * length * (length + 1) + row * (row + 1)) / 2;
    return (head * length + row) * length;
}

#ifdef __AMX_TILE__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Return 1 if the processor has all of AMX that this library uses (a virtual machine may hide some) and Linux lets
// this process use it, else 0. See CPUID in the manual of the instructions, and the kernel's arch/x86/xstate.rst.
int32_t allow_tiles(void) {
    const unsigned bfloat16 = 1u << 22, tiles = 1u << 24, bytes = 1u << 25, all = bfloat16 | tiles | bytes;
    const long request_permission = 0x1023, tile_data = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & all) != all) return 0;
    return !syscall(SYS_arch_prctl, request_permission, tile_data);
}
#endif

#include "rotary.h"

// Keys and values of the tokens in front of a tree, which are given in blocks. A token has a slot in each block:
// K of its heads before their rotation, then V of its heads.
typedef struct {
    const char *const *blocks;     // the first slot of each block
    size_t slot;                   // bytes from one slot to the next
    size_t key, value;             // of the head that is computed: bytes from the first slot of a block
    const float *cosine, *sine;    // [positions, half], or null
    int32_t tokens, block_tokens;  // all tokens, and the tokens of one block
    int32_t half;
} given_tokens;

// ROWS: rows of a map that are multiplied by V together. The sums of ROWS x 2 vectors fit into the registers.
#ifdef __AVX512F__
#define ROWS 8
#else
#define ROWS 2
#endif
#define PAIRS 0
#include "head.h"
#undef PAIRS

#ifdef __AVX512BF16__
#define PAIRS 1
#ifdef __AMX_TILE__
#undef ROWS
#define ROWS TILE_ROWS
#endif
#include "head.h"
#undef PAIRS
#endif

// Return whether heads of these widths are multiplied as pairs of bfloat16. The tables of distance terms have the
// layout of the products.
int has_pairs_of(int type, int key_width, int width) {
#ifdef __AVX512BF16__
    return type == BFLOAT16 && width % 32 == 0 && key_width % 32 == 0;
#else
    (void)type, (void)key_width, (void)width;
    return 0;
#endif
}

#ifdef __AVX512BF16__
static int multiplies_pairs(const attention *job) {
    return has_pairs_of(job->type, job->key_width, job->width) && (!job->maps || job->map_type == BFLOAT16);
}
#endif

static void run_task(const attention *job, int run, int head) {
#ifdef __AVX512BF16__
    if (multiplies_pairs(job)) {
        head_of_pairs(job, run, head);
        return;
    }
#endif
    head_of_floats(job, run, head);
}

// The heads of the runs from .. to - 1 of a tree, which all attend to the same keys and values; see heads_of_tree.
// With positions, the tree is one run; see heads_of_scattered.
static void run_tree(const attention *job, const given_tokens *given, const int64_t *starts, int from, int to) {
#ifdef __AVX512BF16__
    if (multiplies_pairs(job)) {
        if (job->positions) heads_of_scattered_of_pairs(job, given, from);
        else heads_of_tree_of_pairs(job, given, starts, from, to);
        return;
    }
#endif
    if (job->positions) heads_of_scattered_of_floats(job, given, from);
    else heads_of_tree_of_floats(job, given, starts, from, to);
}

static void work(void *data) {
    attention *job = data;
    const int tasks = job->run_count * job->heads;
    for (int first; (first = atomic_fetch_add(&job->next, job->chunk)) < tasks;)
        for (int task = first; task < smaller(first + job->chunk, tasks); task++)
            run_task(job, task / job->heads, task % job->heads);
}

// With fewer multiplications, waking a second thread costs more than it saves.
static const int64_t worth_a_thread = 2000000;

// The number of map elements on one side of the diagonal, at most `reach` per row.
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
    // Small chunks let the threads finish together. Large chunks keep contention for `next` low.
    job->chunk = tasks / (job->threads * 8);
    if (job->chunk < 1) job->chunk = 1;
    parallel(work, job, (unsigned)job->threads, 0);
}

#include "rows.h"
#include "products.h"
#include "team.h"
#include "pooling.h"
#include "states.h"
#include "stack.h"
#include "partitioning.h"
#include "normalizers.h"
#include "search.h"
