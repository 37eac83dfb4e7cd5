// A team of threads for one job: its leader, which is the caller, and helpers that join if they are free.
//
// A job is a list of phases, and a phase is a number of units. Threads take units from a counter; a phase
// begins when every unit of the phase before it is done. Nobody waits for a helper to join: a helper that comes
// late finds the finished phases empty, and a helper that never comes leaves all units to the leader.
//
// All leaders and helpers together are at most as many as a job may use threads: a helper leaves its job after a
// unit when another leader has begun, and is called back later. A thread that waits for the last units of a
// phase looks for a moment, and then sleeps on a futex until the phase is done.
//
// A helper can lose its processor in the middle of a unit. If the units of a job are repeatable, the leader
// waits for such a helper only a moment and computes the unit itself. Both then write the same numbers, so a
// repeatable unit must write only to memory that nobody else writes to, and that stays valid until the helper
// has left, which may be after the leader. Such memory belongs to the job: jobs are never freed, and a
// job is used again only when its last user has gone.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_PHASES 1024
#define TEAM_JOBS 256

typedef void (*unit_function)(void *data, int phase, int unit);

typedef struct {
    atomic_int next, done;
    int32_t units, first;     // number of units, and the index of the first one among the units of all phases
} phase;

typedef struct {
    phase phases[MAX_PHASES];
    int32_t count;            // of phases
    int32_t is_repeatable;
    atomic_char *finished;    // for repeatable jobs: whether each unit of all phases is done
    size_t finished_bytes;
    unit_function run;
    void *data;
    growing memory;           // of the job
    atomic_int sleeping;      // threads that sleep until a phase is done
    int32_t threads;          // that may compute while a helper of this job does
    int32_t users, room;      // threads inside; helpers that may still join. Both under `lock`
    int32_t open;             // whether helpers may join
} team_job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sem_t wake;                       // posted once for each sleeping helper that is called
static team_job *jobs[TEAM_JOBS];
static int helpers, sleepers;            // under `lock`
static int allowed;                      // threads of the last job, under `lock`
static atomic_int posts;                 // counts calls of helpers, so that helpers notice one without the lock
static atomic_int busy;                  // leaders and helpers that compute

// How long a helper looks for the next job before it sleeps, and how often a waiting thread looks before it
// sleeps.
static const int64_t nanoseconds_awake = 100000;
static const int looks = 2000;

INLINE void pause_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INLINE int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int is_done(phase *now) { return atomic_load(&now->done) >= now->units; }

static void run_unit(team_job *job, int p, int unit) {
    phase *now = job->phases + p;
    job->run(job->data, p, unit);
    if (job->is_repeatable && atomic_exchange(&job->finished[now->first + unit], 1)) return;
    if (atomic_fetch_add(&now->done, 1) + 1 >= now->units && atomic_load(&job->sleeping))
        syscall(SYS_futex, &now->done, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
}

// Sleep until the phase is done, at most for so many nanoseconds; 0: without a limit.
static void sleep_until_done(team_job *job, phase *now, int64_t limit) {
    atomic_fetch_add(&job->sleeping, 1);
    const int done = atomic_load(&now->done);
    struct timespec time = {limit / 1000000000, limit % 1000000000};
    if (done < now->units) syscall(SYS_futex, &now->done, FUTEX_WAIT_PRIVATE, done, limit ? &time : 0, 0, 0);
    atomic_fetch_sub(&job->sleeping, 1);
}

// Compute the units that other threads have begun and not finished.
static void repeat_units(team_job *job, int p) {
    phase *now = job->phases + p;
    for (int unit = 0; unit < now->units && !is_done(now); unit++)
        if (!atomic_load(&job->finished[now->first + unit])) run_unit(job, p, unit);
}

// The shortest time after which a unit of another thread is repeated.
static const int64_t patience = 30000;

// Wait for the units of other threads. Repeat their units after `limit` nanoseconds, unless it is 0.
static void finish_phase(team_job *job, int p, int64_t limit) {
    phase *now = job->phases + p;
    const int64_t until = limit && !is_done(now) ? nanoseconds() + limit : 0;
    for (int look = 0; look < looks && !is_done(now); look++) pause_a_moment();
    while (!is_done(now)) {
        const int64_t left = until ? until - nanoseconds() : 0;
        if (until && left <= 0) repeat_units(job, p);
        else if (until && left < patience) pause_a_moment();  // too short for a sleep
        else sleep_until_done(job, now, left);
    }
}

// Call so many sleeping helpers. The caller holds `lock`.
static void call_helpers(int count) {
    atomic_fetch_add(&posts, 1);
    for (; count > 0 && sleepers; count--, sleepers--) sem_post(&wake);
}

// Compute units of the job until its last phase is done. A helper leaves earlier when another leader has begun,
// and the leader calls a helper back when it has lacked one for a while.
static void take_part(team_job *job, int is_leader) {
    int64_t called = 0;
    for (int p = 0; p < job->count; p++) {
        phase *now = job->phases + p;
        int64_t longest = 0, started = 0;
        for (;;) {
            if (!is_leader && atomic_load(&busy) > job->threads) return;
            const int unit = atomic_fetch_add(&now->next, 1);
            if (unit >= now->units) break;
            if (!started) started = nanoseconds();
            run_unit(job, p, unit);
            const int64_t ended = nanoseconds();
            if (ended - started > longest) longest = ended - started;
            started = ended;
            if (!is_leader || atomic_load(&busy) >= job->threads) continue;
            if (!called) called = ended;
            else if (ended - called > nanoseconds_awake) {
                pthread_mutex_lock(&lock);
                call_helpers(1);
                pthread_mutex_unlock(&lock);
                called = ended;
            }
        }
        finish_phase(job, p, is_leader && job->is_repeatable ? patience + 2 * longest : 0);
    }
}

// Find a job with room for a helper. The caller holds `lock`.
static team_job *open_job(void) {
    for (int i = 0; i < TEAM_JOBS && jobs[i]; i++)
        if (jobs[i]->open && jobs[i]->room > 0 && atomic_load(&busy) < jobs[i]->threads) return jobs[i];
    return 0;
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        team_job *job = open_job();
        if (job) {
            job->room--;
            job->users++;
            atomic_fetch_add(&busy, 1);
            pthread_mutex_unlock(&lock);
            take_part(job, 0);
            atomic_fetch_sub(&busy, 1);
            pthread_mutex_lock(&lock);
            job->room++;
            job->users--;
            continue;
        }
        const int seen = atomic_load(&posts), most = allowed;
        pthread_mutex_unlock(&lock);
        const int64_t until = nanoseconds() + nanoseconds_awake;
        while (atomic_load(&posts) == seen && atomic_load(&busy) < most && nanoseconds() < until)
            for (int i = 0; i < 20; i++) pause_a_moment();
        pthread_mutex_lock(&lock);
        if (atomic_load(&posts) != seen) continue;
        sleepers++;
        pthread_mutex_unlock(&lock);
        while (sem_wait(&wake)) continue;
        pthread_mutex_lock(&lock);
    }
    return 0;
}

// A child process has no helpers and no jobs.
static void forget(void) {
    pthread_mutex_init(&lock, 0);
    sem_init(&wake, 0, 0);
    helpers = sleepers = 0;
    atomic_store(&busy, 0);
    memset(jobs, 0, sizeof jobs);
}

// Start helpers until there are `wanted`. The caller holds `lock`.
static void start_helpers(int wanted) {
    static int is_prepared;
    if (!is_prepared) is_prepared = !sem_init(&wake, 0, 0) && !pthread_atfork(0, 0, forget);
    for (; helpers < wanted; helpers++) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        const int failed = pthread_create(&thread, &detached, help, 0);
        pthread_attr_destroy(&detached);
        if (failed) return;
    }
}

// Return the number of threads that a new job may use, of `threads` that all jobs together may use.
static int free_threads(int threads) {
    const int others = atomic_load(&busy);
    return others >= threads ? 1 : threads - others;
}

// Take a job with this much memory. Return null if there is none.
static team_job *take_job(size_t bytes) {
    team_job *job = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < TEAM_JOBS && !job; i++) {
        if (!jobs[i]) jobs[i] = calloc(1, sizeof(team_job));
        if (jobs[i] && !jobs[i]->users) job = jobs[i];
    }
    if (job) job->users = 1, job->open = 0;
    pthread_mutex_unlock(&lock);
    if (job) grown(&job->memory, bytes);
    return job;
}

static void leave_job(team_job *job) {
    pthread_mutex_lock(&lock);
    job->open = 0;
    job->users--;
    pthread_mutex_unlock(&lock);
}

// Run the phases of a job on the caller and up to threads - 1 helpers. `job` is one that the caller took,
// and stays taken.
static void run_team(team_job *job, unit_function run, void *data, const int32_t *units, int phases, int threads,
                     int is_repeatable) {
    atomic_fetch_add(&busy, 1);
    if (!job || threads < 2 || phases > MAX_PHASES) {
        for (int p = 0; p < phases; p++)
            for (int unit = 0; unit < units[p]; unit++) run(data, p, unit);
        atomic_fetch_sub(&busy, 1);
        return;
    }
    int32_t total = 0;
    for (int p = 0; p < phases; p++) {
        atomic_store_explicit(&job->phases[p].next, 0, memory_order_relaxed);
        atomic_store_explicit(&job->phases[p].done, 0, memory_order_relaxed);
        job->phases[p].units = units[p];
        job->phases[p].first = total;
        total += units[p];
    }
    if (is_repeatable && (size_t)total > job->finished_bytes) {
        free(job->finished);
        job->finished = malloc((size_t)total);
        job->finished_bytes = job->finished ? (size_t)total : 0;
        if (!job->finished) abort();
    }
    if (is_repeatable) memset((char *)job->finished, 0, (size_t)total);
    job->count = phases;
    job->run = run;
    job->data = data;
    job->is_repeatable = is_repeatable;
    pthread_mutex_lock(&lock);
    start_helpers(threads - 1);
    job->open = 1;
    job->threads = allowed = threads;
    job->room = threads - 1;
    call_helpers(threads - 1);
    pthread_mutex_unlock(&lock);
    take_part(job, 1);
    pthread_mutex_lock(&lock);
    job->open = 0;
    pthread_mutex_unlock(&lock);
    atomic_fetch_sub(&busy, 1);
}

// Wake sleeping helpers for a job of this many threads that comes within `nanoseconds_awake`.
void wake_helpers(int threads) {
    const int wanted = free_threads(threads) - 1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < wanted && sleepers; i++, sleepers--) sem_post(&wake);
    pthread_mutex_unlock(&lock);
}

// Wait until no helper is inside a job that its leader has left. Called before memory that units read, and
// that belongs to no job, is freed.
void wait_for_helpers(void) {
    for (int waiting = 1; waiting;) {
        waiting = 0;
        pthread_mutex_lock(&lock);
        for (int i = 0; i < TEAM_JOBS; i++) waiting |= jobs[i] && !jobs[i]->open && jobs[i]->users;
        pthread_mutex_unlock(&lock);
        if (waiting) nanosleep(&(struct timespec){0, 1000000}, 0);
    }
}
